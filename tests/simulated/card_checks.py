"""What the simulated accelerator must be, checked inside a process that has it: `python card_checks.py` prints JSON,
each check with "" or what went wrong.

The process of the tests itself only reads the names; its torch knows no card.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

CARD = "simcard"
CAPACITY = int(os.environ.get("SIMCARD_MEMORY", 2 << 30))

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@check
def torch_finds_two_devices_by_itself() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None
    assert accelerator.type == CARD
    assert torch.accelerator.device_count() == 2
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device=CARD).device == torch.device(CARD, 1)
    assert torch.accelerator.current_device_index() == 0


@check
def copies_keep_every_bit_both_ways() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64):
        x = torch.randn(3, 5, 7).mul(9).to(dtype)
        across = x.to(f"{CARD}:1").to(f"{CARD}:0")
        assert across.device.index == 0
        assert torch.equal(across.cpu().view(torch.uint8), x.view(torch.uint8)), dtype
    strided = torch.randn(5, 4).t()
    assert torch.equal(torch.empty(5, 4, device=CARD).t().copy_(strided).cpu(), strided)


@check
def views_share_memory_and_in_place_work_reaches_it() -> None:
    host = torch.arange(24.0).view(2, 3, 4)
    x = host.to(CARD)
    taken = torch.accelerator.memory_allocated(0)
    part = x.transpose(0, 1)[1:, :, ::2]
    part.mul_(2)
    x[:, 0] = 7
    assert torch.accelerator.memory_allocated(0) <= taken + 512  # numbers at most
    host.transpose(0, 1)[1:, :, ::2].mul_(2)
    host[:, 0] = 7
    assert torch.equal(x.cpu(), host)
    assert torch.equal(torch.view_as_complex(torch.ones(3, 2, device=CARD)).cpu(), torch.full((3,), 1 + 1j))


@check
def operators_give_the_hosts_numbers() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 12), torch.randn(12, 5)
    ids = torch.tensor([3, 1, 1])
    for function in (
        lambda x, w, ids: (x @ w).softmax(-1),
        lambda x, w, ids: x.topk(3).values,
        lambda x, w, ids: x[ids].sum(0, keepdim=True),
        lambda x, w, ids: torch.zeros_like(x).index_add_(0, ids, x[:3]),
        lambda x, w, ids: torch.nonzero(x > 1),
        lambda x, w, ids: torch.cat([x, x.flip(0)]).sort(dim=0).values,
        lambda x, w, ids: torch.arange(5, device=x.device).view(1, -1) * 2 + ids.view(-1, 1),
        lambda x, w, ids: torch.add(x, 1, out=x.new_empty(0)),
        lambda x, w, ids: F.conv1d(x[None, :, :4], torch.arange(18.0, device=x.device).view(9, 1, 2), groups=9),
        lambda x, w, ids: F.gelu(F.layer_norm(x, (12,))),
    ):
        expected = function(x, w, ids)
        found = function(x.to(CARD), w.to(CARD), ids.to(CARD))
        assert found.device.type == CARD
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@check
def inference_takes_views_of_weights_from_outside() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, device=CARD))
    with torch.inference_mode():
        part = weight[1:].t()
        assert not part.is_inference()
        assert (part @ part.t()).is_inference()
    torch.testing.assert_close(part.detach().cpu(), weight.detach().cpu()[1:].t())


@check
def gradients_flow() -> None:
    w = torch.randn(3, 4, device=CARD, requires_grad=True)
    (w @ w.t()).sum().backward()
    host = w.detach().cpu().requires_grad_()
    (host @ host.t()).sum().backward()
    assert w.grad is not None
    assert host.grad is not None
    torch.testing.assert_close(w.grad.cpu(), host.grad)


@check
def memory_is_counted_and_given_back() -> None:
    before = torch.accelerator.memory_allocated(1)
    torch.accelerator.reset_peak_memory_stats(1)
    x = torch.empty(1 << 18, device=f"{CARD}:1")
    y = x + x
    assert torch.accelerator.memory_allocated(1) == before + 2 * x.nbytes
    assert torch.accelerator.get_memory_info(1) == (CAPACITY - before - 2 * x.nbytes, CAPACITY)
    del x, y
    assert torch.accelerator.memory_allocated(1) == before
    assert torch.accelerator.max_memory_allocated(1) == before + (2 << 20)


@check
def too_much_is_torchs_own_out_of_memory_error_and_leaves_nothing_behind() -> None:
    before = torch.accelerator.memory_allocated(0)
    half = torch.empty(CAPACITY // 2 + 1024, dtype=torch.uint8, device=CARD)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty_like(half)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        half.add(1)
    other = torch.empty_like(half, device=f"{CARD}:1")
    del half, other
    assert torch.accelerator.memory_allocated(0) == before


@check
def tensors_of_two_places_do_not_mix() -> None:
    x = torch.ones(3, device=CARD)
    assert (x + torch.tensor(2.0)).sum().item() == 9  # a number may stay on the host
    for other in (torch.ones(3), torch.ones(3, device=f"{CARD}:1")):
        with pytest.raises(RuntimeError, match="same device"):
            x.add(other)


@check
def random_numbers_follow_their_own_seed() -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device=CARD).cpu()
    torch.randn(9)
    second = torch.randn(4, device=CARD).cpu()
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=CARD).cpu(), first)
    assert torch.equal(torch.randn(4, device=CARD).cpu(), second)
    draws = [torch.rand(2, device=CARD, generator=torch.Generator(CARD).manual_seed(5)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


@check
def streams_and_events_answer() -> None:
    start, end = (torch.Event(CARD, enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    torch.accelerator.synchronize()
    assert 0 <= start.elapsed_time(end) < 1e5
    stream = torch.Stream(CARD)
    with stream:
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_stream() != stream


@check
def the_workbench_sees_it_through_torchs_neutral_door() -> None:
    from workbench.cluster import tasks

    first, second = tasks.describe_accelerators()
    assert (first["type"], first["index"], second["index"]) == (CARD, 0, 1)
    assert (first["backend"], first["memory_total"]) == ("simlink", CAPACITY)
    for name in tasks.FEATURES:
        tasks.run_feature(name, f"{CARD}:1")


def main() -> int:
    results = {}
    for name, function in CHECKS.items():
        try:
            function()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
