"""Transfers between ranks as they are measured: each first checked for right numbers, then timed. Runs in the worker.

Every operation of a window waits, by what it computes, for the one before it: collectives need every rank's part, a
message goes there and back, and a broadcast changes its source each time, which must have received the last one. So the
time of a window over its operations is that of one operation, and not how fast a rank can queue them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALGORITHMS", "run_step"]

NUM_WINDOWS = 5
Transfer = Callable[[int], Tensor]  # from the number of the repetition to what this rank holds after it

# torch 2.13 renamed these two and warns at the old names; 2.11 knows only the old ones.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run_step(
    step: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device, on_enter: Callable[[], None]
) -> dict[str, object]:
    """One operation over one group: bytes that this rank put in, and seconds of one operation as this rank saw them.

    `on_enter` is called when all is prepared and the operation comes next. Raises ArithmeticError for wrong numbers,
    and whatever the backend raises for what it does not do.
    """
    dtype, ranks = getattr(torch, step["dtype"]), tuple(step["ranks"])
    size, place = len(ranks), ranks.index(dist.get_rank())
    item = torch.empty((), dtype=dtype).element_size()
    count = max(size, step["num_bytes"] // item // size * size)
    own = _pattern(count, place, step["seed"], dtype, device)
    transfer, expected = ALGORITHMS[step["algorithm"]](own, place, size, group, step["seed"])
    on_enter()
    _check(transfer(0), expected(), dtype)
    seconds = _windows(transfer, step["repeats"], device) if step["repeats"] else None
    trips = 2 if step["algorithm"] == "send_recv" else 1
    return {"num_bytes": own.numel() * item, "seconds": None if seconds is None else seconds / trips}


def _windows(transfer: Transfer, repeats: int, device: torch.device) -> float:
    """Tenth percentile over windows of the seconds of one repetition."""
    transfer(0)
    times = []
    for _ in range(NUM_WINDOWS):
        _finish(device)
        start = time.perf_counter()
        for idx in range(repeats):
            transfer(idx)
        _finish(device)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _pattern(count: int, place: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small whole numbers that differ by rank, position and step, so that sums are exact in every dtype."""
    values = torch.arange(count, dtype=torch.int32, device=device)
    return ((values * 7 + place * 3 + seed) % _modulus(dtype)).to(dtype)


def _modulus(dtype: torch.dtype) -> int:
    return 2 if dtype.itemsize == 1 else 5


def _check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Exact, but for sums that a narrow float cannot hold exactly."""
    found, expected = found.float().flatten(), expected.float().flatten()
    if found.shape != expected.shape:
        raise ArithmeticError(f"wrong numbers: {found.numel()} of them, expected {expected.numel()}")
    slack = 0.13 if dtype.is_floating_point and dtype.itemsize == 1 else 1e-2 if dtype.is_floating_point else 0.0
    off = (found - expected).abs() > slack * expected.abs()
    if off.any() or found.isnan().any():
        at = int((off | found.isnan()).nonzero()[0])
        raise ArithmeticError(f"wrong numbers: element {at} is {found[at]:g}, expected {expected[at]:g}")


Built = tuple[Transfer, Callable[[], Tensor]]


def _patterns(own: Tensor, size: int, seed: int) -> list[Tensor]:
    return [_pattern(own.numel(), place, seed, own.dtype, own.device) for place in range(size)]


def _all_reduce(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    out = own.clone()

    def transfer(_: int) -> Tensor:
        out.copy_(own)
        dist.all_reduce(out, group=group)
        return out

    return transfer, lambda: torch.stack([x.float() for x in _patterns(own, size, seed)]).sum(0)


def _all_reduce_in_two(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    out, piece = torch.empty_like(own), own.new_empty(own.numel() // size)

    def transfer(_: int) -> Tensor:
        _scatter(piece, own, group=group)
        _gather(out, piece, group=group)
        return out

    return transfer, lambda: torch.stack([x.float() for x in _patterns(own, size, seed)]).sum(0)


def _all_gather(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    out = own.new_empty(size * own.numel())

    def transfer(_: int) -> Tensor:
        _gather(out, own, group=group)
        return out

    return transfer, lambda: torch.cat([x.float() for x in _patterns(own, size, seed)])


def _reduce_scatter(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    out = own.new_empty(own.numel() // size)

    def transfer(_: int) -> Tensor:
        _scatter(out, own, group=group)
        return out

    def expected() -> Tensor:
        return torch.stack([x.float().view(size, -1)[place] for x in _patterns(own, size, seed)]).sum(0)

    return transfer, expected


def _all_to_all(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    out = torch.empty_like(own)

    def transfer(_: int) -> Tensor:
        dist.all_to_all_single(out, own, group=group)
        return out

    return transfer, lambda: torch.cat([x.float().view(size, -1)[place] for x in _patterns(own, size, seed)])


def _all_to_all_in_pairs(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    """Every pair exchanges its pieces by messages, all at once."""
    out = torch.empty_like(own)
    given, taken = own.view(size, -1), out.view(size, -1)
    others = [(place + step) % size for step in range(1, size)]

    def transfer(_: int) -> Tensor:
        taken[place].copy_(given[place])
        messages = [dist.P2POp(dist.isend, given[peer], group=group, group_peer=peer) for peer in others]
        messages += [dist.P2POp(dist.irecv, taken[peer], group=group, group_peer=peer) for peer in others]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return out

    return transfer, lambda: torch.cat([x.float().view(size, -1)[place] for x in _patterns(own, size, seed)])


def _broadcast(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    out = own.clone()

    def transfer(idx: int) -> Tensor:
        dist.broadcast(out, group=group, group_src=idx % size)
        return out

    return transfer, lambda: _pattern(own.numel(), 0, seed, own.dtype, own.device)


def _send_recv(own: Tensor, place: int, size: int, group: dist.ProcessGroup, seed: int) -> Built:
    """There and back: place 0 sends, place 1 returns its own; both end with the other's numbers."""
    out = torch.empty_like(own)

    def transfer(_: int) -> Tensor:
        if place == 0:
            dist.send(own, group=group, group_dst=1)
            dist.recv(out, group=group, group_src=1)
        else:
            dist.recv(out, group=group, group_src=0)
            dist.send(own, group=group, group_dst=0)
        return out

    return transfer, lambda: _pattern(own.numel(), 1 - place, seed, own.dtype, own.device)


# How an operation is done; those named by the operation alone are what this package runs.
ALGORITHMS: dict[str, Callable[[Tensor, int, int, dist.ProcessGroup, int], Built]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
    "reduce_scatter + all_gather": _all_reduce_in_two,
    "messages between pairs": _all_to_all_in_pairs,
}
