"""Headers and indexes that nobody vouches for: each rule of the format has a file that breaks it."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import surgery
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from workbench.base import CheckpointError
from workbench.checkpoint import Checkpoint, audit, find_index, read_header, read_index, write_checkpoint
from workbench.checkpoint import header as header_module
from workbench.checkpoint import index as index_module
from workbench.checkpoint.index import is_shard_name, shard_numbering

GOOD = {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}


def shard(folder: Path, header: object, data: bytes = bytes(6)) -> Path:
    path = folder / "x.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_header_of_a_library_written_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "lib.safetensors"
    save_file({"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(5, np.uint8)}, path, {"made": "here"})
    header = read_header(path)
    assert header.problems == ()
    assert dict(header.metadata) == {"made": "here"}
    entry = header.entries["b"]
    assert (entry.file, entry.dtype, entry.shape, entry.num_bytes) == ("lib.safetensors", "F32", (2, 3), 24)
    data = path.read_bytes()[entry.begin : entry.end]
    assert np.frombuffer(data, np.float32).tolist() == load_file(path)["b"].ravel().tolist()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**GOOD, "dtype": "F3"}, "unknown dtype"),
        ({**GOOD, "dtype": ["U8"]}, "unknown dtype"),
        ({**GOOD, "shape": [2, -3]}, "not a list of sizes"),
        ({**GOOD, "shape": [2, 3.0]}, "not a list of sizes"),
        ({**GOOD, "shape": [True, 6]}, "not a list of sizes"),
        ({**GOOD, "shape": [1 << 70]}, "not a list of sizes"),
        ({**GOOD, "shape": [1] * 40}, "not a list of sizes"),
        ({**GOOD, "shape": [2, 4]}, "needs 8 bytes"),
        ({**GOOD, "shape": [1 << 62, 1 << 62]}, "needs 2126"),
        ({**GOOD, "data_offsets": [6, 0]}, "needs 6 bytes"),
        ({**GOOD, "data_offsets": [0]}, "not a pair"),
        ({**GOOD, "data_offsets": [-6, 0]}, "not a pair"),
        ({**GOOD, "data_offsets": [0, "6"]}, "not a pair"),
        ({**GOOD, "dtype": "F4", "shape": [3]}, "12 bits, not whole bytes"),
        ({"dtype": "U8", "shape": [6]}, "not an object of dtype"),
        ({**GOOD, "extra": 1}, "not an object of dtype"),
        ([], "not an object of dtype"),
    ],
)
def test_entry_that_makes_no_sense_is_refused_with_file_and_tensor(tmp_path: Path, entry: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: t\.w: .*{message}"):
        read_header(shard(tmp_path, {"t.w": entry}))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' stands twice"),
        (json.dumps({"a": GOOD}).encode("utf-16"), "not valid JSON"),
        (b'{"__metadata__": [1]}', "__metadata__"),
        (b'{"__metadata__": {"a": 1}}', "__metadata__"),
        (b'{"x": ' * 5000, "nested too deeply"),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b"]}}", "not valid JSON"),
        (b'{"": {}}', "unusable name"),
        (b'{"a\\u001b[2J": {}}', "unusable name"),
        (b'{"a\\ud800": {}}', "unusable name"),
        (b'{"' + b"n" * 2000 + b'": {}}', "unusable name"),
    ],
)
def test_header_that_is_no_table_of_tensors_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(shard(tmp_path, raw))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (struct.pack("<Q", 1 << 63) + b"{}", "over the limit"),
        (struct.pack("<Q", header_module.MAX_HEADER_BYTES + 1) + b"{}", "over the limit"),
        (struct.pack("<Q", 100) + b"{}", "ends inside its own header"),
        (b"PK\x03\x04" + bytes(100), "ends inside its own header|over the limit|not valid JSON"),
    ],
)
def test_file_that_is_no_safetensors_file_is_refused_before_anything_is_allocated(
    tmp_path: Path, raw: bytes, message: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "kinds"),
    [
        ({"a": GOOD}, bytes(6), []),
        ({"a": GOOD}, bytes(5), ["torn"]),
        ({"a": GOOD}, bytes(7), ["overlong"]),
        ({}, bytes(0), []),
        ({}, bytes(1), ["overlong"]),
        ({"a": {**GOOD, "data_offsets": [2, 8]}}, bytes(8), ["gap"]),
        ({"a": GOOD, "b": GOOD}, bytes(6), ["overlap"]),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 10]}}, bytes(10), ["overlap"]),
        ({"a": GOOD, "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, bytes(6), ["overlap"]),
        ({"a": GOOD, "b": {"dtype": "U8", "shape": [0, 9], "data_offsets": [3, 3]}}, bytes(6), []),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [8, 14]}}, bytes(6), ["gap", "torn"]),
        ({"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}, bytes(6), ["torn"]),
    ],
)
def test_ranges_are_held_against_each_other_and_the_file(
    tmp_path: Path, header: dict[str, object], data: bytes, kinds: list[str]
) -> None:
    problems = read_header(shard(tmp_path, header, data)).problems
    assert [problem.kind for problem in problems] == kinds


def test_the_safetensors_library_refuses_what_is_called_a_problem_here(tmp_path: Path) -> None:
    for header, data in (
        ({"a": GOOD}, bytes(5)),
        ({"a": GOOD}, bytes(7)),
        ({"a": {**GOOD, "data_offsets": [2, 8]}}, bytes(8)),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 10]}}, bytes(10)),
    ):
        path = shard(tmp_path, header, data)
        assert read_header(path).problems
        with pytest.raises(SafetensorError):
            load_file(path)


def test_pipes_folders_and_absent_files_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, message in (("pipe", "not a regular file"), ("folder", "not a regular file"), ("gone", "No such file")):
        with pytest.raises(CheckpointError, match=message):
            read_header(tmp_path / f"{name}.safetensors")


def test_links_out_of_the_folder_are_followed_as_a_download_cache_needs(f0: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(surgery.shards(f0)):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert audit(f0).ok
    (blobs / "1").unlink()
    assert [finding.kind for finding in audit(f0).errors] == ["bad_header"]


# index


def index_of(folder: Path, record: object, name: str = surgery.INDEX) -> Path:
    path = folder / name
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


@pytest.mark.parametrize(
    "file",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:evil.safetensors",
        ".hidden.safetensors",
        "x.bin",
        "config.json",
        "",
        "a\u0000.safetensors",
        "a\u001b.safetensors",
        "\ud800.safetensors",
        "x" * 250 + ".safetensors",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_index_that_sends_a_tensor_anywhere_but_to_a_plain_shard_is_refused(f0: Path, file: object) -> None:
    (f0.parent / "evil.safetensors").write_bytes((f0 / "model-00001-of-000003.safetensors").read_bytes())
    index_of(f0, {"weight_map": {"a.weight": file}})
    with pytest.raises(CheckpointError, match=r"sends a\.weight to something that is no plain file name"):
        read_index(f0 / surgery.INDEX)
    (finding,) = audit(f0).of_kind("index")
    assert "no plain file name" in finding.message
    with pytest.raises(CheckpointError):
        Checkpoint.open(f0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "key 'a' stands twice"),
        ([], "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"a\n": "x.safetensors"}}, "unusable tensor name"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_malformed_index_is_refused(tmp_path: Path, record: object, message: str, ending: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_index(index_of(tmp_path, record, surgery.INDEX + ending))


@pytest.mark.parametrize("claim", [None, "12", 1.5, True, {"x": 1}])
def test_total_size_of_a_wrong_type_is_no_claim(tmp_path: Path, claim: object) -> None:
    path = index_of(tmp_path, {"metadata": {"total_size": claim}, "weight_map": {"a": "x.safetensors"}})
    assert read_index(path).total_size is None


def test_gzipped_index_says_the_same_and_a_torn_one_is_refused(tmp_path: Path) -> None:
    record = {"metadata": {"total_size": 7}, "weight_map": {"a": "x.safetensors"}}
    plain, packed = index_of(tmp_path, record), index_of(tmp_path, record, surgery.INDEX + ".gz")
    assert (read_index(packed).files, read_index(packed).total_size) == ({"a": "x.safetensors"}, 7)
    assert read_index(plain).files == read_index(packed).files
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="index cannot be read"):
        read_index(packed)
    packed.write_bytes(b"not gzip at all")
    with pytest.raises(CheckpointError, match="index cannot be read"):
        read_index(packed)


def test_index_that_unpacks_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_INDEX_BYTES", 1 << 16)
    with pytest.raises(CheckpointError, match="over the size limit"):
        read_index(index_of(tmp_path, b" " * (1 << 20), surgery.INDEX + ".gz"))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reading_an_index_takes_memory_for_what_is_there_and_not_for_the_limit(tmp_path: Path, ending: str) -> None:
    content = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()
    path = tmp_path / f"model.safetensors.index.json{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    tracemalloc.start()
    try:
        assert read_index(path).files == {"a": "x.safetensors"}
        assert tracemalloc.get_traced_memory()[1] < 8 * index_module.READ_BYTES < index_module.MAX_INDEX_BYTES / 8
    finally:
        tracemalloc.stop()


def test_the_usual_index_name_wins_and_several_unusual_ones_are_ambiguous(tmp_path: Path) -> None:
    assert find_index(tmp_path) is None
    index_of(tmp_path, {}, "a.safetensors.index.json.gz")
    assert find_index(tmp_path) == tmp_path / "a.safetensors.index.json.gz"
    index_of(tmp_path, {}, "b.safetensors.index.json")
    with pytest.raises(CheckpointError, match="several index files"):
        find_index(tmp_path)
    index_of(tmp_path, {}, surgery.INDEX + ".gz")
    assert find_index(tmp_path) == tmp_path / (surgery.INDEX + ".gz")
    index_of(tmp_path, {})
    assert find_index(tmp_path) == tmp_path / surgery.INDEX


def test_shard_names_and_their_numbers() -> None:
    assert shard_numbering("model-00002-of-000096.safetensors") == ("model", 2, 96)
    assert shard_numbering("model.safetensors") is None
    assert is_shard_name("model.safetensors")
    assert not is_shard_name("model.safetensors.tmp")


# opening a folder


def test_single_file_checkpoint_needs_no_index(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path, shards=1)
    (root / surgery.INDEX).unlink()
    (root / "model-00001-of-000001.safetensors").rename(root / "model.safetensors")
    checkpoint = Checkpoint.open(root)
    assert checkpoint.index is None
    assert {entry.file for entry in checkpoint} == {"model.safetensors"}
    assert audit(root).ok
    assert audit(root).warnings == ()


def test_read_bytes_gives_exactly_the_stored_bytes(f0: Path) -> None:
    checkpoint = Checkpoint.open(f0)
    for path in surgery.shards(f0):
        for name, (dtype, shape, data) in surgery.load(path).items():
            entry = checkpoint.tensor(name)
            assert (entry.dtype, list(entry.shape)) == (dtype, shape)
            assert checkpoint.read_bytes(name) == data
    assert checkpoint.total_bytes == sum(entry.num_bytes for entry in checkpoint)
    assert "560 tensors in 3 files" in repr(checkpoint)


def test_folders_without_weights_and_paths_that_are_no_folders_are_refused(tmp_path: Path, f0: Path) -> None:
    for path in surgery.shards(f0):
        path.unlink()
    (f0 / surgery.INDEX).unlink()
    with pytest.raises(CheckpointError, match="no safetensors files and no index"):
        Checkpoint.open(f0)
    assert [finding.kind for finding in audit(f0).errors] == ["missing_shard"]
    with pytest.raises(CheckpointError, match="not a folder"):
        audit(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not a folder"):
        audit(f0 / "config.json")
