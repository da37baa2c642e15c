"""How bytes are read: straight into place or staged, past the page cache or through it, by one thread or several."""

from __future__ import annotations

import errno
import fcntl
import importlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from workbench.base import HostBytes, LoadError
from workbench.checkpoint import Checkpoint
from workbench.loading import Extent, ShardReader, load_in_pieces, load_rank, prepare_load, strategy
from workbench.loading.schedule import PAGE, Batch, Read, Window
from workbench.loading.strategy import StrategyProbe, cached_share, choose_strategy, file_system_of, is_network
from workbench.loading.stream import Writer
from workbench.placement import Layout

SCHEDULE = importlib.import_module("workbench.loading.schedule")  # the function has the name of its module
MIB = 1 << 20
BIG_WINDOW = 64 * MIB


def direct() -> StrategyProbe:
    return StrategyProbe(is_settled=True, is_direct=True)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """9 MiB and an odd number of bytes, on a disk."""
    root = tmp_path_factory.mktemp("direct")
    data = torch.randint(0, 256, (9 * MIB + 1237,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    (root / "x").write_bytes(data.numpy().tobytes())
    return root, data.numpy().tobytes()


@pytest.mark.parametrize("precision", ["bf16", "mxfp4"])
@pytest.mark.parametrize(("folder", "layout"), [("F0", Layout(tp=2, ep=2)), ("mixed", Layout()), ("F1", Layout())])
def test_what_goes_straight_into_place_is_what_staging_brings(
    sound: Path, monkeypatch: pytest.MonkeyPatch, folder: str, layout: Layout, precision: str
) -> None:
    checkpoint, rank = Checkpoint.open(sound / folder), layout.world_size - 1
    placed = []
    places = Writer.places
    monkeypatch.setattr(Writer, "places", lambda self, chunk: placed.append(places(self, chunk)) or placed[-1])
    straight, own, stats = load_rank(checkpoint, layout, rank, precision=precision, window_bytes=BIG_WINDOW)
    num_placed = sum(rows.nbytes for each in placed for rows in each.values())
    assert num_placed > 0.2 * stats.resident_bytes, "the way that is tested is taken"
    monkeypatch.setattr(Writer, "places", lambda self, chunk: {})
    staged, other, _ = load_rank(checkpoint, layout, rank, precision=precision, window_bytes=1 << 20)
    for (name, a), b in zip(straight.named_parameters(), staged.parameters(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    for x, y in zip(own.entries, other.entries, strict=True):
        assert (x.label, x.zero_rows, x.written) == (y.label, y.zero_rows, y.written)
        assert x.norm == pytest.approx(y.norm, rel=1e-5), x.label


@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
@pytest.mark.parametrize("scratch_bytes", [1 << 16, 1 << 20])
def test_bytes_past_the_page_cache_are_the_same_at_any_offset(
    large_file: tuple[Path, bytes], offset: int, scratch_bytes: int
) -> None:
    """Over several buffers of odd sizes and up to the last byte of the file."""
    root, data = large_file
    length = len(data) - offset
    reader = ShardReader(root, scratch_bytes=scratch_bytes, strategy=direct())
    slot, place = bytearray(length), bytearray(3 * MIB + 77)
    pieces = (MIB + 5, len(place), length - MIB - 5 - len(place))
    read = Read(Extent("x", offset, length, length, 1), 0, pieces)
    reader.fill(Batch((read,), (), length), memoryview(slot), {MIB + 5: memoryview(place)})
    reader.close()
    begin, end = MIB + 5, MIB + 5 + len(place)
    assert slot[:begin] == data[offset : offset + begin]
    assert place == data[offset + begin : offset + end]
    assert slot[end:] == data[offset + end :]
    assert slot[begin:end] == bytes(len(place)), "what has a place of its own is not staged"
    assert reader.bytes_read == length
    if reader.strategy.is_direct:  # else this file system has no such way, and the reads above were buffered
        assert reader.bytes_direct == length


def _aligned(num_bytes: int, shift: int = 0) -> memoryview:
    """Memory that begins so many bytes behind a page."""
    return memoryview(mmap.mmap(-1, num_bytes + PAGE))[shift : shift + num_bytes]


@pytest.mark.parametrize(("shift", "is_own"), [(0, True), (64, False)])
def test_past_the_cache_pages_go_to_the_slot_itself_and_touch_no_neighbour(
    large_file: tuple[Path, bytes], shift: int, is_own: bool
) -> None:
    """Two reads at odd offsets, each where it lies in a page; where the slot does not begin at one, through scratch."""
    root, data = large_file
    buffers: list[int] = []

    def watched(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        buffers.extend(np.frombuffer(x, np.uint8).ctypes.data for x in targets)
        return os.preadv(fd, targets, offset)

    slot = _aligned(6 * MIB, shift)
    base = np.frombuffer(slot, np.uint8).ctypes.data
    place = memoryview(bytearray(MIB + 3))
    first = Read(Extent("x", 5000, 3 * MIB, 3 * MIB, 1), 5000 - PAGE, (MIB, len(place), 2 * MIB - len(place)))
    begin = -(-(first.at + 3 * MIB) // PAGE) * PAGE + 77
    second = Read(Extent("x", 4 * MIB + 77, 2 * MIB, 2 * MIB, 1), begin, (2 * MIB,))
    reader = ShardReader(root, preadv=watched, strategy=direct())
    reader.fill(Batch((first, second), (), begin + 2 * MIB), slot, {first.at + MIB: place})
    reader.close()
    end = first.at + MIB + len(place)
    assert slot[first.at : first.at + MIB] == data[5000 : 5000 + MIB]
    assert place == data[5000 + MIB : 5000 + MIB + len(place)]
    assert slot[end : first.at + 3 * MIB] == data[5000 + MIB + len(place) : 5000 + 3 * MIB]
    assert slot[begin : begin + 2 * MIB] == data[4 * MIB + 77 : 6 * MIB + 77]
    assert reader.bytes_read == 5 * MIB
    if reader.strategy.is_direct:
        assert reader.bytes_direct == 5 * MIB
        assert (buffers == [base, base + begin - 77]) is is_own


@pytest.mark.parametrize("gap", [0, 1, PAGE])
def test_a_read_whose_pages_reach_into_its_neighbours_goes_through_scratch(
    large_file: tuple[Path, bytes], gap: int
) -> None:
    """Bytes that lie in the slot as in a page, but with no page of their own: neither may lose any."""
    root, data = large_file
    slot = _aligned(4 * MIB)
    first = Read(Extent("x", 0, MIB + 100, MIB + 100, 1), 0)
    second = Read(Extent("x", 3 * MIB + 100 + gap, MIB, MIB, 1), MIB + 100 + gap)
    for reads in ((first, second), (first,), (second,)):
        slot[:] = bytes(len(slot))
        reader = ShardReader(root, strategy=direct())
        reader.fill(Batch(reads, (), len(slot)), slot)
        reader.close()
        for read in reads:
            wanted = data[read.extent.offset : read.extent.end]
            assert slot[read.at : read.at + len(wanted)] == wanted


@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_a_load_past_the_cache_is_the_same_and_reads_into_its_slots(
    sound: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(SCHEDULE, "LONG", 1 << 12)
    monkeypatch.setattr(strategy, "DIRECT_FROM", 1 << 12)
    checkpoint = Checkpoint.open(sound / "mixed")
    expected, _, _ = load_rank(checkpoint, Layout(), 0, precision=precision, window_bytes=BIG_WINDOW)
    monkeypatch.setattr(ShardReader, "_scratch", lambda self: pytest.fail("a long read went through scratch"))
    monkeypatch.setattr("workbench.loading.load.choose_strategy", lambda *args, **kwargs: direct())
    model, _, stats = load_rank(checkpoint, Layout(), 0, precision=precision, window_bytes=BIG_WINDOW)
    for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    assert stats.bytes_direct in (0, pytest.approx(stats.bytes_read, rel=0.2))  # 0: no such way here


def test_a_file_system_that_refuses_reads_past_the_cache_is_read_through_it(large_file: tuple[Path, bytes]) -> None:
    root, data = large_file
    calls = []

    def refusing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers[0]))
        if len(calls) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(fd, buffers, offset)

    reader = ShardReader(root, preadv=refusing, strategy=direct())
    slot = bytearray(len(data))
    reader.fill(Batch((Read(Extent("x", 0, len(data), len(data), 1), 0),), (), len(data)), memoryview(slot))
    assert slot == data
    assert (reader.bytes_read, reader.bytes_direct) == (len(data), 0)
    assert not reader.strategy.wants_direct(8 * MIB)
    reader.close()


@pytest.mark.parametrize("shift", [0, 64], ids=["in the slot", "through scratch"])
def test_a_refusal_within_a_read_sends_the_rest_of_it_through_the_cache(
    large_file: tuple[Path, bytes], shift: int
) -> None:
    """Blocks larger than a page: the first call begins and ends with one, a later one does not."""
    root, data = large_file
    calls: list[int] = []

    def refusing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(fd, [buffers[0][:MIB]] if len(calls) == 1 else buffers, offset)

    strategy = direct()
    reader = ShardReader(root, preadv=refusing, scratch_bytes=MIB, strategy=strategy)
    length, at = 4 * MIB, 5000 - PAGE
    slot, place = _aligned(length + 2 * PAGE, shift), memoryview(bytearray(MIB))
    read = Read(Extent("x", 5000, length, length, 1), at, (MIB // 2, MIB, length - MIB // 2 - MIB))
    reader.fill(Batch((read,), (), at + length), slot, {at + MIB // 2: place})
    reader.close()
    begin = 5000 + MIB // 2
    assert slot[at : at + MIB // 2] == data[5000:begin]
    assert place == data[begin : begin + MIB]
    assert slot[at + MIB // 2 + MIB : at + length] == data[begin + MIB : 5000 + length]
    assert reader.bytes_read == length
    assert not strategy.wants_direct(8 * MIB)
    if reader.bytes_direct:  # else this file system has no such way, and the first call was buffered
        assert reader.bytes_direct == MIB - 5000 % PAGE


def test_a_file_that_ends_early_is_an_error_past_the_cache_too(large_file: tuple[Path, bytes]) -> None:
    root, data = large_file
    reader = ShardReader(root, rank=3, strategy=direct())
    length = len(data) + 100
    with pytest.raises(LoadError, match=rf"x: file ends at byte {len(data)}, 100 bytes short.*rank 3"):
        reader.fill(Batch((Read(Extent("x", 0, length, length, 1), 0),), (), length), memoryview(bytearray(length)))
    reader.close()


def test_the_probe_keeps_the_faster_way_and_asks_both_first() -> None:
    for seconds, expected in (({False: 2.0, True: 1.0}, True), ({False: 1.0, True: 0.9}, False)):
        probe = StrategyProbe(probe_bytes=8 * MIB)
        asked = []
        while not probe.is_settled:
            asked.append(probe.wants_direct(2 * MIB))
            probe.saw(asked[-1], 2 * MIB, seconds[asked[-1]])
        assert (asked.count(False), asked.count(True)) == (4, 4)
        assert probe.wants_direct(2 * MIB) is expected
        assert not probe.wants_direct(MIB - 1), "short reads stay in the page cache"


@pytest.mark.parametrize(("on_host", "times", "is_short"), [(True, 2.1, False), (True, 1.9, True), (False, 1.1, False)])
def test_where_files_and_weights_do_not_fit_together_the_cache_is_left_out(
    large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, on_host: bool, times: float, is_short: bool
) -> None:
    root, data = large_file
    monkeypatch.setattr(strategy, "WORTH_A_PROBE", 1)
    monkeypatch.setattr(strategy, "cached_share", lambda root, extents: 0.0)
    monkeypatch.setattr(strategy, "file_system_of", lambda root: "ext4")
    monkeypatch.setattr(strategy, "host_memory", lambda: HostBytes(total=None, available=int(times * len(data))))
    extents = [Extent("x", 0, 4 * MIB, 4 * MIB, 1), Extent("x", 4 * MIB, 4 * MIB, 4 * MIB, 1)]
    probe = choose_strategy(root, extents, is_held_on_host=on_host)
    assert (probe.is_settled, probe.is_direct) == (is_short, is_short)


def test_what_is_cached_or_small_or_on_a_share_is_not_probed(
    large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, data = large_file
    extents = [Extent("x", 0, len(data), len(data), 1)]
    assert choose_strategy(root, extents).is_settled, "small"
    monkeypatch.setattr(strategy, "WORTH_A_PROBE", 1)
    monkeypatch.setattr(strategy, "cached_share", lambda root, extents: 0.0)
    assert not choose_strategy(root, extents).is_settled
    monkeypatch.setattr(strategy, "file_system_of", lambda root: "nfs4")
    assert choose_strategy(root, extents).is_settled
    monkeypatch.setattr(strategy, "file_system_of", lambda root: "ext4")
    monkeypatch.setattr(strategy, "cached_share", lambda root, extents: 1.0)
    assert choose_strategy(root, extents).is_settled


def test_what_is_cached_is_counted_and_asking_fetches_nothing(large_file: tuple[Path, bytes]) -> None:
    """Asked twice in a row: a read that must not wait begins to fetch what it does not find, and finds it then."""
    root, data = large_file
    extents = [Extent("x", at, MIB, MIB, 1) for at in range(0, 8 * MIB, MIB)]
    assert (root / "x").read_bytes() == data
    assert cached_share(root, []) == 0.0
    if cached_share(root, extents) == 0.0:
        pytest.skip("this system does not say what it has cached")
    assert cached_share(root, extents) == 1.0
    fd = os.open(root / "x", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    shares = [cached_share(root, extents) for _ in range(3)]
    os.close(fd)
    assert shares[0] < 0.5
    assert shares[1:] == shares[:1] * 2
    with (root / "x").open("rb") as file:
        file.seek(4 * MIB)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
        file.read(2 * MIB)
    assert cached_share(root, extents) >= shares[0] + 0.2


def test_where_nobody_says_what_is_cached_nothing_counts_as_cached(
    large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, data = large_file
    assert (root / "x").read_bytes() == data
    monkeypatch.setattr(strategy, "CACHESTAT", 100_000)  # no such call
    assert cached_share(root, [Extent("x", 0, len(data), len(data), 1)]) == 0.0
    assert cached_share(root, [Extent("gone", 0, 5, 5, 1)]) == 0.0


def test_the_file_system_of_a_folder_is_named_and_a_share_is_told(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_system_of(Path("/proc")) in ("proc", "")  # "" where the kernel keeps no list
    assert file_system_of(tmp_path / "nothing") == ""
    for name, expected in (("nfs4", True), ("fuse.s3fs", True), ("lustre", True), ("ext4", False), ("xfs", False)):
        assert is_network(name) is expected
    checkpoint = Checkpoint.open(sound / "F1")
    assert not any("another machine" in text for text in load_rank(checkpoint, Layout(), 0)[1].warnings)
    monkeypatch.setattr("workbench.loading.load.file_system_of", lambda root: "nfs4")
    text = f"{checkpoint.root} lies on nfs4"
    assert any(text in each for each in load_rank(checkpoint, Layout(), 0)[1].warnings)
    assert any(text in each for each in load_in_pieces(prepare_load(checkpoint, Layout(), 0)).ledger.warnings)


def test_a_large_window_reads_with_several_threads_each_byte_once(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULE, "BATCH_BYTES", 1 << 16)
    checkpoint = Checkpoint.open(sound / "mixed")
    window = Window.of(BIG_WINDOW)
    assert window.num_slots * window.slot + window.scratch + window.temporary <= BIG_WINDOW
    assert (window.num_readers, Window.of(16 * MIB).num_readers) == (4, 1)
    one, _, _ = load_rank(checkpoint, Layout(), 0, precision="mxfp4", window_bytes=16 * MIB)
    several, ledger, stats = load_rank(checkpoint, Layout(), 0, precision="mxfp4", window_bytes=BIG_WINDOW)
    assert stats.bytes_read == sum(entry.num_bytes for entry in ledger.entries) == stats.bytes_assigned
    for (name, a), b in zip(one.named_parameters(), several.parameters(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_the_first_trouble_in_file_order_is_what_a_parallel_load_tells(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCHEDULE, "BATCH_BYTES", 1 << 16)
    root = copy_of("F0")
    checkpoint = Checkpoint.open(root)
    files = sorted(root.glob("*.safetensors"))
    for path in files:
        os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(LoadError, match=rf"{files[0].name}: file ends at byte \d+, 64 bytes short"):
        load_rank(checkpoint, Layout(), 0, window_bytes=BIG_WINDOW)


def test_a_file_that_is_written_or_replaced_while_it_is_read_fails_the_load(copy_of: Callable[[str], Path]) -> None:
    def load(root: Path, tamper: Callable[[Path], object]) -> None:
        path, calls = sorted(root.glob("*.safetensors"))[0], []

        def reading(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.append(offset)
            if len(calls) == 3:
                tamper(path)
            return os.preadv(fd, buffers, offset)

        load_rank(Checkpoint.open(root), Layout(), 0, reader=ShardReader(root, preadv=reading))

    def rewrite(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        os.utime(path, ns=(1, 1))  # whatever the clock of the file system resolves

    def replace(path: Path) -> None:
        save_file({"x": torch.zeros(3)}, path.with_name("y"))
        os.replace(path.with_name("y"), path)

    load(copy_of("F1"), lambda path: None)
    with pytest.raises(LoadError, match=r"model-00001.*changed while it was read.*Load again"):
        load(copy_of("F0"), rewrite)
    with pytest.raises(LoadError, match=r"model-00001.*changed while it was read"):
        load(copy_of("F2"), replace)
