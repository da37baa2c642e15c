"""Random damage to headers, indexes and whole files: the answer is a report, a checkpoint or one of our own errors."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surgery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.base import WorkbenchError
from workbench.checkpoint import Checkpoint, audit, inspect_checkpoint, k3_config, read_header, read_index
from workbench.checkpoint.header import parse_header
from workbench.checkpoint.index import parse_index
from workbench.checkpoint.synthetic import write_checkpoint

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, 2**64, -1, 10**400]),
    st.floats(),
    st.text(max_size=5),
)
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4), x, max_size=3))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "F4", "F6_E2M3", "X"]) | VALUES,
        "shape": st.lists(st.integers(-1, 9), max_size=4) | VALUES,
        "data_offsets": st.tuples(st.integers(-1, 99), st.integers(-1, 99)) | VALUES,
    }
)
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=80) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_header_bytes_are_parsed_or_refused(raw: bytes) -> None:
    try:
        header = parse_header(raw, file="x.safetensors", file_bytes=100)
    except WorkbenchError:
        return
    assert header.tensor_bytes >= 0


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ENTRIES | VALUES, max_size=4), st.integers(0, 200)
)
def test_any_header_table_is_parsed_or_refused_and_never_believed_beyond_the_file(
    table: dict[str, object], data_bytes: int
) -> None:
    raw = json.dumps(table).encode()
    try:
        header = parse_header(raw, file="x.safetensors", file_bytes=8 + len(raw) + data_bytes)
    except WorkbenchError:
        return
    ranges = sorted((entry.begin, entry.end) for entry in header.entries.values() if entry.num_bytes)
    is_exact = [8 + len(raw), *(end for _, end in ranges)] == [*(begin for begin, _ in ranges), header.file_bytes]
    # Zero-sized tensors may name any place inside; everything else must tile the data exactly.
    if not header.problems:
        assert is_exact
    if not is_exact:
        assert header.problems


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=80)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.text(max_size=4), st.just("a.safetensors") | VALUES, max_size=4).map(
        lambda files: json.dumps({"weight_map": files, "metadata": files}).encode()
    )
)
def test_any_index_bytes_are_parsed_or_refused(raw: bytes) -> None:
    try:
        index = parse_index(raw, path=Path("i.json"))
    except WorkbenchError:
        return
    assert all(file.endswith(".safetensors") and "/" not in file for file in index.files.values())


@SLOW
@given(st.binary(max_size=200))
def test_any_file_contents_are_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    for name, read in (("x.safetensors", read_header), ("x.index.json", read_index), ("x.index.json.gz", read_index)):
        path = tmp_path / name
        path.write_bytes(raw)
        try:
            read(path)
        except WorkbenchError:
            continue


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = k3_config(num_layers=2, full_attn_layers=(2,), num_experts=2, vocab_size=64, vision_layers=1)
    return write_checkpoint(tmp_path_factory.mktemp("small"), config, shards=2)


def look_at(root: Path) -> None:
    """Whatever is wrong with the folder, these three answer or raise one of our own errors."""
    for look in (audit, inspect_checkpoint, Checkpoint.open):
        try:
            found: Any = look(root)
        except WorkbenchError:
            continue
        if not isinstance(found, Checkpoint):
            assert found.render()
            assert json.loads(json.dumps(found.to_json()))
            assert "<table" in found._repr_html_()


@SLOW
@given(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "zero", "insert", "swap"]))
def test_random_damage_to_any_file_is_reported_or_refused(small: Path, tmp_path: Path, seed: int, how: str) -> None:
    rng = random.Random(seed)
    root = tmp_path / "damaged"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(small, root)
    path = rng.choice(sorted(path for path in root.iterdir() if path.is_file()))
    raw = bytearray(path.read_bytes())
    # Half of the time near the start, where the header of a shard lies.
    at = rng.randrange(min(len(raw), 4000)) if rng.random() < 0.5 else rng.randrange(len(raw))
    if how == "flip":
        for _ in range(rng.choice([1, 3, 50])):
            raw[min(len(raw) - 1, at + rng.randrange(200))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del raw[at:]
    elif how == "zero":
        raw[at : at + rng.choice([1, 64, 40000])] = bytes(min(len(raw) - at, 64))
    elif how == "insert":
        raw[at:at] = rng.randbytes(rng.choice([1, 8, 4096]))
    else:
        raw = bytearray(rng.choice(sorted(p for p in root.iterdir() if p.is_file())).read_bytes())
    path.write_bytes(raw)
    look_at(root)


@SLOW
@given(st.integers(0, 2**32), VALUES)
def test_any_value_at_any_place_of_a_real_header_is_reported_or_refused(
    small: Path, tmp_path: Path, seed: int, value: object
) -> None:
    rng = random.Random(seed)
    root = tmp_path / "edited"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(small, root)
    path = rng.choice(surgery.shards(root))
    header, data = surgery.read_raw(path)
    name = rng.choice(sorted(header))
    if rng.random() < 0.5 and name != "__metadata__":
        header[name][rng.choice(["dtype", "shape", "data_offsets"])] = value
    elif rng.random() < 0.5:
        header[name] = value
    else:
        header[str(value)] = header.pop(name)
    surgery.write_raw(path, header, data)
    look_at(root)


def test_sound_small_checkpoint_is_sound(small: Path) -> None:
    """The damage above is done to something that passes: otherwise those tests would see only the first fault."""
    assert audit(small).ok


@pytest.mark.parametrize("kind", ["link into nothing", "pipe", "folder"])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "preprocessor_config.json"])
def test_what_stands_under_the_name_of_an_optional_file_never_counts_as_absent(
    tmp_path: Path, name: str, kind: str
) -> None:
    root = write_checkpoint(tmp_path / "model", k3_config())
    (root / name).unlink(missing_ok=True)
    make: dict[str, Callable[[Path], None]] = {
        "link into nothing": lambda path: path.symlink_to("/nowhere/blob"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }
    make[kind](root / name)
    assert not audit(root).ok
    for read in (inspect_checkpoint, Checkpoint.open):
        with pytest.raises(WorkbenchError, match=name):
            read(root)
