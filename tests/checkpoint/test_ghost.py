"""Ghosts: full size without weights, told from weights by their mark and never by their zeros."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import surgery

from workbench.base import CheckpointError
from workbench.checkpoint import (
    GHOST_NAME,
    INDEX_NAME,
    Checkpoint,
    audit,
    find_index,
    ghost,
    ghost_mark,
    inspect_checkpoint,
    k3_config,
    read_ghost_mark,
    read_header,
    read_index,
    read_origin,
    write_checkpoint,
    write_ghost,
)
from workbench.spec import published_tensors, read_spec

sys.path.append(str(Path(__file__).resolve().parents[1]))
import k3_published

CopyOf = Callable[[str], Path]


@pytest.fixture
def spooky(made: Path, tmp_path: Path) -> Path:
    """Ghost of F0, three files."""
    return write_ghost(made / "F0", tmp_path / "ghost").root


def set_metadata(path: Path, **metadata: str) -> None:
    header, data = surgery.read_raw(path)
    surgery.write_raw(path, {**header, "__metadata__": {"format": "pt", **metadata}}, data)


def kinds(root: Path, *, severity: str = "error") -> set[str]:
    return {finding.kind for finding in audit(root).findings if finding.severity == severity}


def test_ghost_has_every_tensor_of_the_model_and_takes_no_disk_for_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k3_config(hidden_size=1024, num_experts=64, vocab_size=8192)))
    made = write_ghost(tmp_path / "config.json", tmp_path / "ghost")
    tensors = list(published_tensors(read_spec(tmp_path)))
    held = {e.name: e for path in surgery.shards(made.root) for e in read_header(path).entries.values()}
    assert {(t.name, t.dtype, t.shape) for t in tensors} == {(e.name, e.dtype, e.shape) for e in held.values()}
    sizes = [path.stat().st_size for path in surgery.shards(made.root)]
    assert made.mark.tensor_bytes == sum(t.num_bytes for t in tensors) > 60 << 20
    assert made.mark.file_bytes == sum(sizes) > made.mark.tensor_bytes
    assert made.disk_bytes < 2 << 20
    assert made.mark.names_from == f"family {read_spec(tmp_path).family}"


def test_ghost_is_called_one_everywhere(spooky: Path) -> None:
    report = audit(spooky)
    assert report.ok
    assert report.is_ghost
    assert report.content.mode == "ghost"
    assert "contents" in report.skipped  # what was not looked at is not passed
    assert "ghost, no weights in it" in report.summary()
    assert report.to_json()["is_ghost"] is True
    assert [finding.severity for finding in report.of_kind("ghost")] == ["info"]
    origin = read_origin(spooky)
    assert (origin.is_ghost, origin.is_dummy) == (True, True)
    opened = Checkpoint.open(spooky)
    assert opened.ghost == read_ghost_mark(spooky) is not None
    assert "ghost" in repr(opened)
    assert "this is a ghost" in inspect_checkpoint(spooky).render()


def test_deep_audit_of_a_ghost_reads_no_zeros(spooky: Path) -> None:
    report = audit(spooky, deep=True)
    assert (report.ok, report.content.bytes_read) == (True, 0)


def test_weights_are_not_called_a_ghost(made: Path) -> None:
    report = audit(made / "F0")
    assert (report.ok, report.is_ghost, report.content.mode) == (True, False, "full")
    assert not read_origin(made / "F0").is_ghost
    assert "ghost" not in inspect_checkpoint(made / "F0").render()
    assert Checkpoint.open(made / "F0").ghost is None


def test_files_names_and_padding_are_those_of_the_checkpoint(made: Path, tmp_path: Path) -> None:
    """F1 stores 8 entries of an A_log that has 6: the headers say so, and the ghost repeats it."""
    root = write_ghost(made / "F1", tmp_path / "ghost").root
    for path in surgery.shards(made / "F1"):
        real, copy = read_header(path), read_header(root / path.name)
        assert {(e.name, e.dtype, e.shape) for e in real.entries.values()} == {
            (e.name, e.dtype, e.shape) for e in copy.entries.values()
        }
    assert read_header(surgery.shards(root)[0]).entries[f"{surgery.PREFIX}0.self_attn.A_log"].shape == (8,)
    for name in ("config.json", "preprocessor_config.json"):
        assert (root / name).read_bytes() == (made / "F1" / name).read_bytes()


def test_tensors_stand_in_the_order_of_the_safetensors_library(spooky: Path) -> None:
    from safetensors.numpy import save

    path = surgery.shards(spooky)[0]
    entries = list(read_header(path).entries.values())
    import numpy as np

    kind = {"F32": np.float32, "BF16": np.float16, "U8": np.uint8}  # numpy has no bf16; it sorts as f16 does
    raw = save({e.name: np.zeros(e.shape, kind[e.dtype]) for e in sorted(entries, key=lambda e: e.name[::-1])})
    (size,) = struct.unpack("<Q", raw[:8])
    fields = json.loads(raw[8 : 8 + size])
    fields.pop("__metadata__", None)
    assert [e.name for e in entries] == sorted(fields, key=lambda name: fields[name]["data_offsets"])


def test_same_model_gives_the_same_ghost_and_another_one_does_not(made: Path, tmp_path: Path) -> None:
    ids = [write_ghost(made / name, tmp_path / str(i)).mark.ghost for i, name in enumerate(("F0", "F0", "F2"))]
    assert ids[0] == ids[1] != ids[2]


# ---------------------------------------------------------------------------------- faults


def test_mark_copied_onto_weights_is_refused(f0: Path, spooky: Path) -> None:
    shutil.copy(spooky / GHOST_NAME, f0)
    report = audit(f0)
    assert {finding.kind for finding in report.errors} == {"ghost_mark"}
    assert len(report.errors) == 3  # each file
    assert not report.is_ghost
    with pytest.raises(CheckpointError, match="was the mark copied here"):
        Checkpoint.open(f0)
    assert read_origin(f0).is_dummy  # and no report calls them real


def test_weights_that_claim_in_every_file_to_be_a_ghost_are_refused(f0: Path, spooky: Path) -> None:
    shutil.copy(spooky / GHOST_NAME, f0)
    mark = read_ghost_mark(spooky)
    assert mark is not None
    for path in surgery.shards(f0):
        set_metadata(path, ghost=mark.ghost)
    assert kinds(f0) == {"ghost_values"}
    with pytest.raises(CheckpointError, match="hold values: these are weights"):
        Checkpoint.open(f0)


def test_one_value_in_a_hole_is_found(spooky: Path) -> None:
    path = surgery.shards(spooky)[1]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\1")
    assert "ghost_values" in kinds(spooky)


def test_one_value_is_found_where_the_file_system_keeps_no_map_of_holes(
    spooky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = surgery.shards(spooky)[1]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")

    def no_map(fd: int, offset: int, whence: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(ghost_mark.os, "lseek", no_map)
    assert "ghost_values" in kinds(spooky)


def test_ghost_without_its_mark_is_refused(spooky: Path) -> None:
    (spooky / GHOST_NAME).unlink()
    assert "ghost_mark" in kinds(spooky)
    with pytest.raises(CheckpointError, match=r"without weights, in a folder that has no ghost\.json"):
        Checkpoint.open(spooky)


def test_holes_without_any_mark_are_faults_of_weights(spooky: Path) -> None:
    """Zeros alone make no ghost: this is what a download looks like that reserved its space and stopped."""
    (spooky / GHOST_NAME).unlink()
    for path in surgery.shards(spooky):
        set_metadata(path)
    report = audit(spooky)
    assert not report.is_ghost
    assert {"zero_tensor", "zero_scale"} <= {finding.kind for finding in report.errors}


def test_a_ghosts_file_among_weights_is_named(f0: Path, spooky: Path) -> None:
    file = surgery.shards(spooky)[1].name
    shutil.copy(spooky / file, f0 / file)
    errors = [finding for finding in audit(f0).errors if finding.kind == "ghost_mark"]
    assert [finding.file for finding in errors] == [file]
    with pytest.raises(CheckpointError, match=file):
        Checkpoint.open(f0)


def test_file_of_another_ghost_is_named(made: Path, spooky: Path, tmp_path: Path) -> None:
    other = write_ghost(made / "F2", tmp_path / "other").root
    file = surgery.shards(other)[0].name
    shutil.copy(other / file, spooky / file)
    assert any(finding.file == file for finding in audit(spooky).of_kind("ghost_mark"))


def test_ghost_with_a_wrong_header_is_not_sound(spooky: Path) -> None:
    path = surgery.shards(spooky)[0]
    header, data = surgery.read_raw(path)
    name = f"{surgery.PREFIX}0.input_layernorm.weight"
    header[name]["shape"] = [header[name]["shape"][0] // 2, 2]
    surgery.write_raw(path, header, data)
    report = audit(spooky)
    assert report.is_ghost
    assert [(f.kind, f.tensor) for f in report.errors] == [("wrong_shape", name)]


def test_ghost_that_lost_a_file_is_not_sound(spooky: Path) -> None:
    surgery.shards(spooky)[2].unlink()
    assert "missing_shard" in kinds(spooky)
    with pytest.raises(CheckpointError, match="missing, and with it"):
        Checkpoint.open(spooky)


def test_ghost_of_the_wrong_length_is_torn(spooky: Path) -> None:
    os.truncate(surgery.shards(spooky)[0], surgery.shards(spooky)[0].stat().st_size - 1)
    assert "torn" in kinds(spooky)


def test_filled_holes_are_worth_a_warning(spooky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_mark, "LOOK_BYTES", 1 << 16)
    path = surgery.shards(spooky)[0]
    raw = path.read_bytes()
    path.write_bytes(raw)  # every zero written
    report = audit(spooky)
    assert report.ok
    assert [finding.file for finding in report.of_kind("ghost_filled")] == [path.name]


@pytest.mark.parametrize("content", ["{", '{"ghost": 3}', "[]", "null"])
def test_mark_that_makes_no_sense_is_refused(spooky: Path, content: str) -> None:
    (spooky / GHOST_NAME).write_text(content)
    assert "ghost_mark" in kinds(spooky)
    with pytest.raises(CheckpointError):
        Checkpoint.open(spooky)


def test_mark_that_leads_nowhere_is_not_taken_for_none(f0: Path) -> None:
    (f0 / GHOST_NAME).symlink_to(f0 / "gone")
    with pytest.raises(CheckpointError, match=r"ghost.json: file is missing"):
        Checkpoint.open(f0)


# ---------------------------------------------------------------------------------- what cannot be written


def test_index_of_another_model_is_refused(made: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "small", k3_config(num_experts=4), seed=1, shards=1)
    with pytest.raises(CheckpointError, match=r"\d+ of the model without a name"):
        write_ghost(made / "F0", tmp_path / "ghost", index=tmp_path / "small" / INDEX_NAME)
    assert not (tmp_path / "ghost").exists()


def test_index_that_claims_another_size_is_refused(f0: Path, tmp_path: Path) -> None:
    record = json.loads((f0 / INDEX_NAME).read_text())
    record["metadata"]["total_size"] += 2
    (f0 / INDEX_NAME).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="another size than the index claims"):
        write_ghost(f0, tmp_path / "ghost")


def test_folder_that_holds_something_is_left_alone(made: Path, f0: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in f0.iterdir()}
    with pytest.raises(CheckpointError, match="folder is not empty"):
        write_ghost(made / "F0", f0)
    assert {path.name: path.stat().st_mtime_ns for path in f0.iterdir()} == before


def test_ghost_of_a_ghost_is_refused(spooky: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already a ghost"):
        write_ghost(spooky, tmp_path / "again")


def test_file_size_limit_is_told_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    """The limit of the process stands for that of a file system: the same call fails with the same error."""
    code = """
        import resource, sys
        from workbench.base import CheckpointError
        from workbench.checkpoint import write_ghost
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            write_ghost(sys.argv[1], sys.argv[2])
        except CheckpointError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), made / "F0", tmp_path / "ghost"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "no file of 4194304 bytes here: File too large" in done.stdout, done.stderr
    assert not (tmp_path / "ghost").exists()


def test_file_system_that_fills_holes_is_refused_before_it_fills_the_disk(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def filled(path: Path) -> int:
        sizes.append(path.stat().st_size)
        return path.stat().st_size

    monkeypatch.setattr(ghost, "_disk_bytes", filled)
    with pytest.raises(CheckpointError, match="this file system fills holes"):
        write_ghost(made / "F0", tmp_path / "ghost")
    assert sizes == [4 << 20]  # a small hole was enough to tell
    assert not (tmp_path / "ghost").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_disk_without_room_is_refused(made: Path, small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match="no room for a ghost"):
        write_ghost(made / "F0", small_disk / "ghost")
    assert not (small_disk / "ghost").exists()


def test_disk_that_fills_up_meanwhile_leaves_nothing_behind(
    made: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ghost, "_check_room", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match="a ghost cannot be written: No space left on device"):
        write_ghost(made / "F0", small_disk / "ghost")
    assert not (small_disk / "ghost").exists()


def test_interrupted_writing_leaves_nothing_behind(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ghost, "write_index", interrupted)
    (tmp_path / "ghost").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_ghost(made / "F0", tmp_path / "ghost")
    assert list((tmp_path / "ghost").iterdir()) == []  # the folder was there before and stays


# ---------------------------------------------------------------------------------- the published model


@pytest.mark.timeout(900)  # half a minute on a calm machine
@pytest.mark.skipif(not k3_published.INDEX.exists(), reason="the published index is not here")
@pytest.mark.slow
def test_published_k3_in_full_size(tmp_path: Path) -> None:
    made = write_ghost(k3_published.CONFIG, tmp_path / "k3", index=k3_published.INDEX)
    assert made.mark.num_tensors == 497_220
    assert made.mark.num_files == len(surgery.shards(made.root)) == 96
    assert made.mark.tensor_bytes == 1_560_860_324_864
    apparent = sum(path.stat().st_size for path in surgery.shards(made.root))
    headers = sum(8 + struct.unpack("<Q", path.open("rb").read(8))[0] for path in surgery.shards(made.root))
    assert apparent - headers == 1_560_860_324_864
    assert sum(path.stat().st_blocks * 512 for path in made.root.iterdir()) < 1 << 30

    report = audit(made.root)
    assert (report.ok, report.is_ghost, report.num_tensors) == (True, True, 497_220)
    assert report.tensor_bytes == 1_560_860_324_864
    assert report.warnings == ()


@pytest.mark.timeout(900)
@pytest.mark.skipif(not k3_published.INDEX.exists(), reason="the published index is not here")
def test_family_alone_deals_k3_to_the_files_it_is_published_in() -> None:
    spec = read_spec(k3_published.CONFIG)
    dealt = {tensor.name: file for file, tensors in ghost._deal(spec, None, {}).items() for tensor in tensors}
    assert find_index(k3_published.INDEX.parent) is not None
    assert dealt == dict(read_index(k3_published.INDEX).files)
