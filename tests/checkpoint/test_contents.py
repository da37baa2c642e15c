"""What only the data can tell, at each depth of looking, and what each depth honestly cannot see."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import surgery

from workbench.base import CheckpointError
from workbench.checkpoint import Checkpoint, audit, read_header
from workbench.checkpoint import content as content_module
from workbench.checkpoint.content import ContentScan, sample_file, scan_file
from workbench.spec import published_tensors

SHARD = "model-00002-of-000003.safetensors"


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is over the limit up to which a full read is made unasked."""
    # The package exports the function of that name; the module behind it is reached by its full name.
    monkeypatch.setattr(sys.modules["workbench.checkpoint.audit"], "FULL_READ_LIMIT", 0)


def overwrite(path: Path, begin: int, end: int, *, punch: bool) -> None:
    """Zeros from begin to end: as data, or as an extent that was never written."""
    raw = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(raw[:begin])
        file.seek(end) if punch else file.write(bytes(end - begin))
        file.write(raw[end:])


def has_holes(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < path.stat().st_size
    finally:
        os.close(fd)


def test_full_read_looks_at_every_byte_once(f0: Path) -> None:
    content = audit(f0).content
    assert content.mode == "full"
    assert content.bytes_read == content.bytes_total == sum(path.stat().st_size for path in surgery.shards(f0))


def test_no_read_says_so_and_skips_what_it_cannot_answer(f1: Path) -> None:
    report = audit(f1, deep=False)
    assert (report.content.mode, report.content.bytes_read) == ("none", 0)
    assert report.skipped.keys() == {"contents", "padding"}
    assert "skipped  contents" in report.render()


def test_large_checkpoint_is_sampled_and_the_note_says_what_that_misses(f0: Path, as_if_large: None) -> None:
    report = audit(f0)
    assert report.ok
    assert report.content.mode == "sampled"
    assert "audit(root, deep=True) reads everything" in report.content.note
    assert audit(f0, deep=True).content.mode == "full"


def test_sampling_finds_a_hole_that_the_file_system_knows(f0: Path, as_if_large: None, tmp_path: Path) -> None:
    path = f0 / SHARD
    begin, end = 50 * 4096, 52 * 4096
    overwrite(path, begin, end, punch=True)
    if not has_holes(path):
        pytest.skip("this file system keeps no map of holes")
    (finding,) = audit(f0).of_kind("zero_extent")
    assert f"at {begin}..{end} are zero" in finding.message


def test_sampling_reads_far_less_than_a_file_and_still_finds_a_large_extent(tmp_path: Path) -> None:
    """48 MiB in one tensor; zeros over one 1 MiB step of the 64 windows are hit wherever they lie."""
    size = 48 << 20
    block = bytes(range(1, 256)) * 257
    data = bytearray((block * (size // len(block) + 1))[:size])
    path = tmp_path / "big.safetensors"
    surgery.save(path, {"a": ("U8", [size], bytes(data))})
    sound = sample_file(path, read_header(path), {})
    assert sound.findings == []
    assert sound.bytes_read < 5 << 20
    for begin in (1 << 20, (17 << 20) + 4096, 46 << 20):
        holed = bytearray(data)
        holed[begin : begin + (3 << 19)] = bytes(3 << 19)
        surgery.save(path, {"a": ("U8", [size], bytes(holed))})
        found = sample_file(path, read_header(path), {}).findings  # one for each window that lies inside
        assert {finding.kind for finding in found} == {"zero_extent"}


def test_sampling_sees_zero_scales_of_the_experts_it_looks_at(f0: Path, as_if_large: None) -> None:
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"

    def zero(tensors: dict[str, surgery.Stored]) -> None:
        for other, (dtype, shape, data) in tensors.items():
            if other.endswith("weight_scale"):
                tensors[other] = (dtype, shape, bytes(len(data)))

    path = surgery.holder(f0, name)
    surgery.edit(path, zero)
    findings = audit(f0).of_kind("zero_scale")
    assert {finding.file for finding in findings} == {path.name}
    assert sum(len(finding.tensors) for finding in findings) >= content_module.SCALES_PER_FILE


@pytest.mark.parametrize("chunk", [4096, 3 * 4096, 1 << 20])
def test_findings_do_not_depend_on_where_the_reading_is_cut(
    f0: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    overwrite(f0 / SHARD, 50 * 4096, 66 * 4096, punch=False)
    checkpoint = Checkpoint.open(f0)
    expected = {tensor.name: tensor for tensor in published_tensors(checkpoint.spec)}
    whole = scan_file(f0 / SHARD, checkpoint.headers[SHARD], expected)
    monkeypatch.setattr(content_module, "CHUNK", chunk)
    cut = scan_file(f0 / SHARD, checkpoint.headers[SHARD], expected)
    assert (cut.findings, cut.bytes_read) == (whole.findings, whole.bytes_read)
    assert [finding.kind for finding in whole.findings if finding.kind == "zero_extent"] == ["zero_extent"]


def test_zeros_shorter_than_a_page_are_weights(f0: Path) -> None:
    overwrite(f0 / SHARD, 50 * 4096 + 1, 51 * 4096 + 4095, punch=False)
    assert audit(f0).ok
    overwrite(f0 / SHARD, 50 * 4096, 51 * 4096 + 4095, punch=False)
    assert not audit(f0).ok


@pytest.mark.parametrize("look", [scan_file, sample_file])
def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_signal(
    f0: Path, look: Callable[..., ContentScan]
) -> None:
    header = Checkpoint.open(f0).headers[SHARD]
    os.truncate(f0 / SHARD, 4096)
    with pytest.raises(CheckpointError, match=f"{SHARD}: file ended at byte .* while it was being read"):
        look(f0 / SHARD, header, {})


def test_a_shard_that_cannot_be_read_any_more_is_a_finding(f0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: object) -> ContentScan:
        raise CheckpointError("read error at byte 0: Input/output error", where=path)

    monkeypatch.setattr(sys.modules["workbench.checkpoint.audit"], "scan_file", fail)
    findings = audit(f0).of_kind("unreadable")
    assert [finding.file for finding in findings] == [path.name for path in surgery.shards(f0)]
