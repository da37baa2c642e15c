"""What a device can do, found out by doing it: small computations with checked results. Runs inside the probe child.

Every task takes a torch device and raises where the device cannot do it or the numbers come out wrong; a driver that
says yes and answers wrongly counts as no. This module and `link_operations` are the only ones of the room that import
torch when imported.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FEATURES", "copy_rate", "describe_accelerators", "matmul_rate", "run_feature"]

WINDOW_S = 0.05  # shortest timed run that is trusted
NUM_WINDOWS = 7
MAX_MATMUL_SIZE = 8192
COPY_BYTES = {"cpu": 256 << 20, "": 1 << 30}
# Inputs stay small, so that a slow software path still answers within the time limit.
M, K, N = 48, 64, 80


def describe_accelerators() -> list[dict[str, object]]:
    """One entry per accelerator that torch offers here, through `torch.accelerator` alone; empty on a CPU machine."""
    if not torch.accelerator.is_available():
        return []
    current = torch.accelerator.current_accelerator()
    assert current is not None
    return [_describe(current.type, idx) for idx in range(torch.accelerator.device_count())]


def _describe(device_type: str, idx: int) -> dict[str, object]:
    entry: dict[str, object] = {"type": device_type, "index": idx, "name": device_type}
    module = torch.get_device_module(device_type)
    for attribute in ("get_device_name", "get_device_properties"):
        try:
            found = getattr(module, attribute)(idx)
        except (AttributeError, RuntimeError, NotImplementedError):
            continue
        entry["name"] = found if isinstance(found, str) else str(getattr(found, "name", device_type))
        break
    # Not every backend reports everything: what is not offered stays a gap in the record.
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        free, total = torch.accelerator.get_memory_info(idx)
        entry |= {"memory_free": int(free), "memory_total": int(total)}
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        entry["backend"] = torch.distributed.get_default_backend_for_device(device_type)
    return entry


def run_feature(name: str, device: str) -> None:
    """Run one feature task. Raises whatever the device raises, ArithmeticError for wrong numbers."""
    with torch.no_grad():
        FEATURES[name](torch.device(device))


def _pair(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (M, K), (K, N) on the device and their exact product on the host."""
    generator = torch.Generator().manual_seed(7)
    left = torch.randn(M, K, generator=generator).to(dtype)
    right = torch.randn(K, N, generator=generator).to(dtype)
    return left.to(device), right.to(device), left.double() @ right.double()


def _check(found: Tensor, expected: Tensor, relative: float) -> None:
    error = ((found.cpu().double() - expected).norm() / expected.norm()).item()
    if not error <= relative:
        raise ArithmeticError(f"wrong numbers: relative error {error:.1e}, expected below {relative:.1e}")


def _matmul(dtype: torch.dtype, relative: float) -> Callable[[torch.device], None]:
    def task(device: torch.device) -> None:
        left, right, expected = _pair(device, dtype)
        _check(left @ right, expected, relative)

    return task


def _int8_matmul(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    left = torch.randint(-128, 128, (M, K), generator=generator, dtype=torch.int8)
    right = torch.randint(-128, 128, (K, N), generator=generator, dtype=torch.int8)
    _check(torch._int_mm(left.to(device), right.to(device)), left.double() @ right.double(), 0.0)


def _cast(dtype: torch.dtype) -> Callable[[torch.device], None]:
    def task(device: torch.device) -> None:
        values = torch.linspace(-400, 400, 1 + 2 * K)
        _check(values.to(device).to(dtype).to(torch.float32), values.to(dtype).double(), 0.0)
        _check(values.to(device).to(dtype).to(torch.float32), values.double(), 0.13)  # 2 or 3 bits of mantissa

    return task


def _fp8_scaled_mm(device: torch.device) -> None:
    left, right, _ = _pair(device, torch.float32)
    a, b = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    out = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    _check(out, a.cpu().double() @ b.cpu().double().t(), 1e-2)


def _grouped_mm(device: torch.device) -> None:
    """Rows of one matrix, group by group, each group times its own matrix; one group is empty."""
    generator = torch.Generator().manual_seed(7)
    sizes = [5, 0, 11]
    left = torch.randn(sum(sizes), K, generator=generator).bfloat16()
    right = torch.randn(len(sizes), K, N, generator=generator).bfloat16()
    stops = torch.tensor(sizes).cumsum(0).to(torch.int32)
    found = torch._grouped_mm(left.to(device), right.to(device), offs=stops.to(device))
    parts = left.split(sizes)
    _check(found, torch.cat([p.double() @ w.double() for p, w in zip(parts, right, strict=True)]), 1e-2)


def _sdpa(device: torch.device) -> None:
    """Causal attention with keys wider than values, as multi-head latent attention needs it."""
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, 3, 17, 24, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(1, 3, 17, 16, generator=generator).bfloat16()
    found = F.scaled_dot_product_attention(q.to(device), k.to(device), v.to(device), is_causal=True)
    scores = (q.double() @ k.double().transpose(-1, -2)) * 24**-0.5
    scores = scores.masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), float("-inf"))
    _check(found, scores.softmax(-1) @ v.double(), 2e-2)


def _conv1d_depthwise(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    x, w = torch.randn(1, 12, 21, generator=generator), torch.randn(12, 1, 4, generator=generator)
    _check(F.conv1d(x.to(device), w.to(device), groups=12), F.conv1d(x.double(), w.double(), groups=12), 1e-5)


def _nibble_unpack(device: torch.device) -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    found = torch.stack((packed.to(device) & 15, packed.to(device) >> 4), -1)
    _check(found, torch.stack((packed % 16, packed // 16), -1).double(), 0.0)


def _top_k(device: torch.device) -> None:
    scores = torch.randn(9, 97, generator=torch.Generator().manual_seed(7))
    _check(scores.to(device).topk(8).values, scores.sort(descending=True).values[:, :8].double(), 0.0)


def _index_add(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    rows, values = torch.randint(0, 6, (40,), generator=generator), torch.randn(40, 5, generator=generator)
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for row, value in zip(rows.tolist(), values, strict=True):
        expected[row] += value.double()
    found = torch.zeros(6, 5, device=device).index_add_(0, rows.to(device), values.to(device))
    _check(found, expected, 1e-5)


def _float64(device: torch.device) -> None:
    left, right, expected = _pair(device, torch.float64)
    _check(left @ right, expected, 1e-13)


FEATURES: dict[str, Callable[[torch.device], None]] = {
    "fp32 matmul": _matmul(torch.float32, 3e-3),  # wide enough for TF32
    "bf16 matmul": _matmul(torch.bfloat16, 1e-2),
    "fp16 matmul": _matmul(torch.float16, 2e-3),
    "fp64 matmul": _float64,
    "int8 matmul": _int8_matmul,
    "fp8 e4m3 cast": _cast(torch.float8_e4m3fn),
    "fp8 e5m2 cast": _cast(torch.float8_e5m2),
    "fp8 scaled matmul": _fp8_scaled_mm,
    "grouped matmul": _grouped_mm,
    "attention (sdpa)": _sdpa,
    "depthwise conv": _conv1d_depthwise,
    "nibble unpack": _nibble_unpack,
    "top-k": _top_k,
    "index_add": _index_add,
}


def matmul_rate(dtype_name: str, device_name: str) -> dict[str, object]:
    """FLOP/s of matrix products in `dtype_name` ("float32", "bfloat16", ...), with the size it was taken at.

    The better of a square product and of one row times a square matrix: a processor without units for a type may have a
    fast loop for the latter alone, and a limit that is passed is none. The size doubles until one product takes a
    trusted time; the tenth percentile of several windows is reported, since other work only ever adds time.
    """
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def seconds(size: int, repeats: int, rows: int | None = None) -> float:
        left, right = (torch.randn(height, size).to(device, dtype) for height in (rows or size, size))
        left @ right
        finish()
        start = time.perf_counter()
        for _ in range(repeats):
            left @ right
        finish()
        return (time.perf_counter() - start) / repeats

    size, elapsed = 256, seconds(256, 1)
    while elapsed < WINDOW_S and size < MAX_MATMUL_SIZE:
        size *= 2
        elapsed = seconds(size, 1)
    best: dict[int, float] = {}  # rows -> FLOP/s
    for rows, once in ((size, elapsed), (1, seconds(size, 1, 1))):
        repeats = max(1, round(WINDOW_S / once))
        windows = [seconds(size, repeats, rows) for _ in range(NUM_WINDOWS)]
        best[rows] = 2 * rows * size**2 / statistics.quantiles(windows, n=10, method="inclusive")[0]
    rows = max(best, key=lambda rows: best[rows])
    return {"flops_per_s": best[rows], "rows": rows, "size": size, "threads": torch.get_num_threads()}


def copy_rate(device_name: str) -> dict[str, object]:
    """B/s of copying device memory, read and write counted, with the size it was taken at: well above any cache."""
    device = torch.device(device_name)
    size = COPY_BYTES["cpu" if device.type == "cpu" else ""]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)

    def window(repeats: int) -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            target.copy_(source)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / repeats

    window(1)
    repeats = max(1, round(WINDOW_S / window(1)))
    best = statistics.quantiles([window(repeats) for _ in range(NUM_WINDOWS)], n=10, method="inclusive")[0]
    return {"bytes_per_s": 2 * size / best, "size": size, "threads": torch.get_num_threads()}
