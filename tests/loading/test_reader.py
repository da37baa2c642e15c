"""Batches and reads: everything once, inside the window, in long runs; storage that is slow, short or broken."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import surgery
import torch

from workbench.base import LoadError
from workbench.checkpoint import Checkpoint
from workbench.loading import Extent, LoadPlan, ReadPolicy, ShardReader, Window, load_rank, plan_load, schedule
from workbench.loading.schedule import Batch, Read
from workbench.parallel import build_stage
from workbench.placement import Layout

SMALL = 1 << 16


class CountingReads:
    """os.preadv that records (offset, bytes) of each call, at most `limit` bytes a call, with a delay."""

    def __init__(self, limit: int = 1 << 30, delay_s: float = 0.0) -> None:
        self.calls: list[tuple[int, int]] = []
        self.limit, self.delay_s = limit, delay_s

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        short, left = [], self.limit
        for buffer in buffers:
            short.append(buffer[:left])
            left -= len(short[-1])
        count = os.preadv(fd, [buffer for buffer in short if len(buffer)], offset)
        self.calls.append((offset, count))
        return count


def make_plan(root: Path, layout: Layout, rank: int, precision: str = "bf16") -> LoadPlan:
    checkpoint = Checkpoint.open(root)
    return plan_load(checkpoint, build_stage(checkpoint.spec, layout, rank, precision=precision), layout, rank)


@pytest.mark.parametrize("precision", ["fp32", "mxfp4", "int4"])
@pytest.mark.parametrize("folder", ["F0", "mixed"])
def test_batches_hold_every_row_once_and_stay_inside_the_window(sound: Path, folder: str, precision: str) -> None:
    layout, window = Layout(tp=2), Window.of(SMALL)
    assert 2 * window.slot + window.scratch + window.temporary <= SMALL
    plan = make_plan(sound / folder, layout, 1, precision)
    rows: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
    num_chunks = 0
    for batch in schedule(plan, window):
        assert 0 < batch.used_bytes <= window.slot
        ends = 0
        for read in batch.reads:
            assert read.at >= ends, "two reads share a place in the slot"
            ends = read.at + read.extent.num_bytes
        assert ends == batch.used_bytes
        for chunk in batch.chunks:
            num_chunks += 1
            x = chunk.assignment
            weights = (chunk.last - chunk.first) * x.num_columns
            assert weights * x.transform.temporary_bytes <= window.temporary
            if not chunk.is_padding:
                rows.setdefault((x.param, x.slot), []).append((chunk.first, chunk.last))
    assert num_chunks > len(rows), "the window is small enough to cut some tensors"
    for x in plan.assignments:
        cuts = rows[x.param, x.slot]
        assert cuts[0][0] == 0
        assert cuts[-1][1] == x.num_rows
        assert all(a[1] == b[0] for a, b in pairwise(cuts))


def test_one_rank_alone_reads_each_file_in_one_run(sound: Path) -> None:
    plan = make_plan(sound / "F0", Layout(), 0)
    reads = [read for batch in schedule(plan, Window.of(64 << 20)) for read in batch.reads]
    assert [read.extent.file for read in reads] == list(plan.files)
    assert sum(read.extent.num_bytes for read in reads) == sum(e.num_bytes for e in plan.extents())


def test_a_row_that_does_not_fit_the_window_is_refused_with_its_size(sound: Path) -> None:
    plan = make_plan(sound / "F0", Layout(), 0)
    with pytest.raises(LoadError, match=r"one row \(512 bytes.*does not fit the window.*Raise window_bytes"):
        list(schedule(plan, Window(slot=600, scratch=64, temporary=1 << 20)))
    with pytest.raises(LoadError, match="staging window of 100 bytes"):
        Window.of(100)


def read_extent(root: Path, extent: Extent, **options: object) -> tuple[bytes, ShardReader]:
    reader = ShardReader(root, **options)  # type: ignore[arg-type]
    slot = torch.zeros(extent.num_bytes, dtype=torch.uint8)
    reader.fill(Batch((Read(extent, 0),), (), extent.num_bytes), slot.numpy().data)
    reader.close()
    return bytes(slot.numpy()), reader


@pytest.fixture
def columns(tmp_path: Path) -> tuple[Path, Extent, bytes]:
    """A file of 400 rows of 1000 bytes; the extent is bytes 300..340 of each row."""
    data = torch.randint(0, 256, (400, 1000), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (tmp_path / "x.safetensors").write_bytes(bytes(data.numpy()))
    return tmp_path, Extent("x.safetensors", 300, 40, 1000, 400), bytes(data[:, 300:340].contiguous().numpy())


@pytest.mark.parametrize("limit", [7, 33, 1 << 20])
def test_reads_that_come_up_short_are_continued(columns: tuple[Path, Extent, bytes], limit: int) -> None:
    root, extent, expected = columns
    found, reader = read_extent(root, extent, preadv=CountingReads(limit))
    assert found == expected
    assert (reader.bytes_read, reader.bytes_through) == (len(expected), 0)


def test_l23_slow_storage_gets_long_reads_and_fast_storage_exact_ones(columns: tuple[Path, Extent, bytes]) -> None:
    """L23: with 1 ms a call, the 400 short reads of a column slice turn into a few long ones after the first 32."""
    root, extent, expected = columns
    fast = CountingReads()
    found, reader = read_extent(root, extent, preadv=fast, policy=ReadPolicy(slow_read_s=0.1))
    assert found == expected
    assert (len(fast.calls), reader.bytes_read) == (400, 16_000)

    slow = CountingReads(delay_s=0.001)
    found, reader = read_extent(root, extent, preadv=slow, scratch_bytes=1 << 16)
    assert found == expected
    assert len(slow.calls) == 32 + 6  # 65 rows of 1000 bytes fit the scratch
    assert reader.bytes_through == reader.bytes_read - 16_000 > 0

    exact = CountingReads(delay_s=0.001)
    found, reader = read_extent(root, extent, preadv=exact, policy=ReadPolicy(slow_read_s=None))
    assert found == expected
    assert (len(exact.calls), reader.bytes_through) == (400, 0)


def test_l23_a_busy_machine_is_not_taken_for_slow_storage(
    columns: tuple[Path, Extent, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L23: where reading memory takes as long, reads stay exact."""
    root, extent, expected = columns
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *call: (time.sleep(0.001), preadv(*call))[1])
    found, reader = read_extent(root, extent)
    assert found == expected
    assert reader.bytes_through == 0


def test_l23_reading_through_keeps_to_its_limits(columns: tuple[Path, Extent, bytes]) -> None:
    """L23: a gap beyond the limit, or a row beyond the scratch, is never read through."""
    root, extent, expected = columns
    for options in ({"policy": ReadPolicy(largest_gap=900)}, {"scratch_bytes": 999}):
        slow = CountingReads(delay_s=0.0005)
        found, reader = read_extent(root, extent, preadv=slow, **options)
        assert found == expected
        assert (len(slow.calls), reader.bytes_through) == (400, 0)


def test_l23_a_whole_load_is_sequential_and_not_in_pages(sound: Path) -> None:
    """L23: reads of one rank are few, long and ascending, against one per 4 KiB page of a mapping."""
    counting = CountingReads()
    checkpoint = Checkpoint.open(sound / "F0")
    reader = ShardReader(checkpoint.root, preadv=counting)
    load_rank(checkpoint, Layout(), 0, window_bytes=4 << 20, reader=reader)
    pages = checkpoint.total_bytes // 4096
    assert len(counting.calls) < pages / 50
    per_file = len(counting.calls) / len(checkpoint.headers)
    descents = sum(b[0] < a[0] for a, b in pairwise(counting.calls))
    assert descents == len(checkpoint.headers) - 1, f"{per_file} reads a file, each file front to back"


def test_an_input_output_error_names_file_offset_and_rank(sound: Path) -> None:
    calls = 0

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, [buffers[0][:50_000]], offset)

    checkpoint, layout = Checkpoint.open(sound / "F0"), Layout(tp=2)
    reader = ShardReader(checkpoint.root, rank=1, preadv=failing, policy=ReadPolicy(slow_read_s=None))
    with pytest.raises(LoadError, match=r"model-00001.*Input/output error.*offset \d+, rank 1") as caught:
        load_rank(checkpoint, layout, 1, reader=reader)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_that_vanishes_or_shrinks_after_the_dry_run_is_an_error_with_its_offset(
    copy_of: Callable[[str], Path],
) -> None:
    root = copy_of("F0")
    checkpoint = Checkpoint.open(root)
    last = surgery.shards(root)[-1]
    os.truncate(last, last.stat().st_size - 4096)
    with pytest.raises(LoadError, match=rf"{last.name}: file ends at byte \d+, 4096 bytes short"):
        load_rank(checkpoint, Layout(), 0)
    last.unlink()
    with pytest.raises(LoadError, match=rf"{last.name}: cannot be opened.*rank 0"):
        load_rank(checkpoint, Layout(), 0)


def test_tensors_at_odd_offsets_load_as_well_as_aligned_ones(copy_of: Callable[[str], Path]) -> None:
    root = copy_of("F0")
    before, _, _ = load_rank(Checkpoint.open(root), Layout(), 0, precision="mxfp4")
    for path in surgery.shards(root):
        header, data = surgery.read_raw(path)
        while len(str(header.get("__metadata__", ""))) % 2 == 0 or (path.stat().st_size - len(data)) % 2 == 0:
            header.setdefault("__metadata__", {})["pad"] = header.get("__metadata__", {}).get("pad", "") + "x"
            surgery.write_raw(path, header, data)
            if (path.stat().st_size - len(data)) % 2:
                break
    assert all(header.data_begin % 2 for header in Checkpoint.open(root).headers.values())
    after, _, _ = load_rank(Checkpoint.open(root), Layout(), 0, precision="mxfp4")
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(a, b), name
