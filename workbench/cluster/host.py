"""Rates of the machine, measured: host memory copies, reading a folder, matrix products per dtype.

Each rate is a `Quantity` whose source says under which conditions it was taken. Rates are near-best ones (the tenth
percentile of the window times), since other work on the machine can only add time.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.base import ConfigError, Quantity
from workbench.cluster.probe import run_probe

__all__ = ["MatmulRate", "measure_copy", "measure_disk_read", "measure_matmul", "measure_memory_copy"]

MATMUL_DTYPES = ("float32", "bfloat16", "float16")
MATMUL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulRate:
    """`rate` in FLOP/s, or None and the reason: a gap is shown as a gap."""

    device: str
    dtype: str
    rate: Quantity | None
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "device": self.device,
            "dtype": self.dtype,
            "flops_per_s": None if self.rate is None else self.rate.value,
            "conditions": self.reason if self.rate is None else self.rate.source,
        }


def measure_memory_copy(*, threads: int | None = None, size_bytes: int = 64 << 20, repeats: int = 9) -> Quantity:
    """B/s of copying host memory on `threads` threads, each its own `size_bytes`; a copied byte is read and written, so
    it counts twice. Choose the size well above the last cache level."""
    num_threads = threads or len(os.sched_getaffinity(0))
    pairs = [(np.ones(size_bytes // 8), np.empty(size_bytes // 8)) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:

        def window() -> float:
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))  # releases the interpreter lock
            return time.perf_counter() - start

        window()  # first touch maps the pages
        elapsed = _tenth_percentile([window() for _ in range(repeats)])
    moved = 2 * sum(source.nbytes for source, _ in pairs)
    conditions = f"copy of {size_bytes >> 20} MiB per thread, {num_threads} threads, p10 of {repeats} windows"
    return Quantity(moved / elapsed, "B/s", "measured", conditions)


def measure_disk_read(
    folder: Path | str,
    *,
    max_bytes: int = 1 << 30,
    block_bytes: int = 8 << 20,
    evict: bool = True,
    is_direct: bool = False,
) -> Quantity:
    """B/s of reading the files of `folder` once, one thread, largest first, up to `max_bytes`; buffered, or with
    `is_direct` past this kernel's page cache (O_DIRECT).

    Buffered files are evicted from the page cache first where the kernel allows that; a cache below it (a virtual
    machine's host, a network file server) cannot be seen from here. Raises ConfigError where there is nothing to read,
    or where the file system does not read directly.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError("not a folder", where=folder)
    files = sorted((p for p in folder.iterdir() if p.is_file()), key=lambda p: p.stat().st_size, reverse=True)
    buffer = mmap.mmap(-1, block_bytes)  # starts on a page, as direct reads need it
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if is_direct else 0)
    total, elapsed, num_evicted, num_files = 0, 0.0, 0, 0
    for path in files:
        if total >= max_bytes:
            break
        try:
            fd = os.open(path, flags)
            try:
                num_evicted += evict and not is_direct and _evict(fd)
                start, before = time.perf_counter(), total
                # The last block of a file ends it: past it a direct read would start off the block size.
                while total < max_bytes and (count := os.preadv(fd, [buffer], total - before)):
                    total += count
                    if is_direct and count < block_bytes:
                        break
                elapsed += time.perf_counter() - start
            finally:
                os.close(fd)
        except OSError as error:
            if not is_direct:
                raise
            raise ConfigError(f"files here are not read directly: {error}", where=folder) from None
        num_files += 1
    buffer.close()
    if not total:
        raise ConfigError("no bytes to read in this folder", where=folder)
    state = "evicted from the page cache first" if num_evicted == num_files else "maybe in the page cache"
    way = "O_DIRECT, 1 thread" if is_direct else f"buffered, 1 thread, {state}"
    conditions = f"{total:,} bytes of {num_files} files in {folder}, {way}"
    return Quantity(total / max(elapsed, 1e-9), "B/s", "measured", conditions)


def _evict(fd: int) -> bool:
    """Ask the kernel to drop a file from its page cache; False where it does not offer that."""
    try:
        os.fsync(fd)  # dirty pages are never dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except (AttributeError, OSError):
        return False
    return True


def measure_matmul(
    device: str, dtypes: Sequence[str] = MATMUL_DTYPES, *, time_limit_s: float = MATMUL_SECONDS
) -> tuple[MatmulRate, ...]:
    """FLOP/s of matrix products on `device` (torch's name) per dtype, in a child process with a time limit."""
    rates = []
    for result in run_probe([("matmul", dtype) for dtype in dtypes], device=device, time_limit_s=time_limit_s):
        rate = None
        if not result.error:
            assert isinstance(result.value, dict)
            rows, size, threads = (result.value[name] for name in ("rows", "size", "threads"))
            conditions = f"{rows} x {size} x {size}, {device}"
            conditions += f", {threads} threads" if device == "cpu" else ""
            rate = Quantity(result.value["flops_per_s"], "FLOP/s", "measured", conditions)
        rates.append(
            MatmulRate(device=device, dtype=result.argument, rate=rate, reason=result.error.partition("\n")[0])
        )
    return tuple(rates)


def measure_copy(device: str, *, time_limit_s: float = MATMUL_SECONDS) -> Quantity | None:
    """B/s of copying memory of `device` (torch's name), read and write counted, measured in a child process; None where
    the device does not do it."""
    (answer,) = run_probe([("copy", "")], device=device, time_limit_s=time_limit_s)
    if answer.error:
        return None
    assert isinstance(answer.value, dict)
    conditions = f"copy of {answer.value['size'] >> 20} MiB, {device}"
    conditions += f", {answer.value['threads']} threads" if device == "cpu" else ""
    return Quantity(answer.value["bytes_per_s"], "B/s", "measured", conditions)


def _tenth_percentile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=10, method="inclusive")[0]
