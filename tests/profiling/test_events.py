"""From spans to a ledger: exact on spans made by hand, and the whole step on a real profiler."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from workbench.base import Quantity, RequestError
from workbench.operators import Roofline
from workbench.profiling.events import AREA, COLLECTIVE, STEP, host_spans, read_step, spans_of
from workbench.profiling.operators import mark_areas, profile_steps, record_step, record_work
from workbench.profiling.steps import Span, StepLedger, merge_ledgers


def span(name: str, start: float, end: float, *, shapes: tuple[tuple[int, ...], ...] = (), **kind: object) -> Span:
    return Span(name, start, end, shapes, **kind)  # type: ignore[arg-type]


SHAPES = ((4, 8), (8, 2))
HOST = [
    span("aten::mm", 0.0, 1.0),  # before the step: not part of it
    span(STEP, 10.0, 30.0),
    span("aten::linear", 10.5, 13.0),
    span("aten::mm", 11.0, 12.5, shapes=SHAPES),
    span(AREA + "experts", 14.0, 19.0),
    span("aten::mm", 14.5, 16.0, shapes=SHAPES),
    span("aten::silu", 16.5, 17.0),
    span(AREA + "routing", 20.0, 22.0),
    span("aten::topk", 20.5, 21.5),
    span(AREA + "attention", 22.0, 25.0),
    span("aten::scaled_dot_product_attention", 22.5, 24.5),
    span("aten::mm", 23.0, 24.0),
    span(COLLECTIVE + "all_reduce", 25.0, 28.0),  # holds the wait for its end, which no operator shows
    span("c10d::allreduce_", 25.25, 26.25),
    span("aten::copy_", 25.5, 26.0),
    span(AREA + "norm", 28.5, 29.5),
    span("aten::mul", 28.5, 29.0),
]


def test_every_moment_of_a_step_belongs_to_one_part() -> None:
    ledger = read_step(HOST)
    assert ledger.by_category() == {
        "attention": 2.0,  # a whole: the product inside it is not a GEMM of its own
        "gemm": 1.5,
        "grouped_gemm": 1.5,
        "elementwise": pytest.approx(1.5),  # linear's own second and silu's half
        "routing": 1.0,
        "norm": 0.5,
        "communication": 3.0,
        "host gap": pytest.approx(9.0),
    }
    assert ledger.accounted_s == pytest.approx(ledger.seconds) == 20.0
    by_area = {(x.name, x.area): x.seconds for x in ledger.operators}
    assert by_area["aten::mm", "experts"] == 1.5
    assert by_area["aten::mm", ""] == 1.5


def test_an_accelerators_step_is_counted_in_kernels_with_what_they_share_taken_off() -> None:
    spans = [
        span(STEP, 0.0, 10.0),
        span(AREA + "experts", 0.0, 1.0),
        span("aten::mm", 0.0, 0.5, shapes=SHAPES, kernels=(("gemm_kernel", 4.0),)),
        span("aten::add", 1.0, 1.2, kernels=(("add_kernel", 1.0),)),
        span("gemm_kernel", 1.0, 5.0, is_device=True),
        span("ncclDevKernel_AllReduce", 4.0, 7.0, is_device=True),
        span("add_kernel", 8.0, 9.0, is_device=True),
        span("of_another_step", 20.0, 21.0, is_device=True),
    ]
    ledger = read_step(spans, clock="xpu")
    assert ledger.by_category() == {
        "grouped_gemm": 4.0,
        "elementwise": 1.0,
        "communication": 3.0,
        "host gap": 3.0,  # 0-1, 7-8, 9-10
        "overlap": -1.0,
    }
    assert ledger.hidden_communication_s == 1.0
    assert ledger.accounted_s == ledger.seconds == 10.0
    orphan = read_step([*spans, span("graph_kernel", 9.0, 9.5, is_device=True)], clock="xpu")
    assert orphan.accounted_s == pytest.approx(10.0)
    assert next(x for x in orphan.operators if "without an operator" in x.name).seconds == pytest.approx(0.5)


def test_events_without_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        read_step(HOST[:1])


def test_ledgers_of_steps_add_up_and_survive_json() -> None:
    twice = merge_ledgers([read_step(HOST), read_step(HOST)])
    assert (twice.num_steps, twice.seconds, twice.accounted_s) == (2, 40.0, pytest.approx(40.0))
    assert next(x for x in twice.operators if x.name == "aten::topk").count == 2
    assert StepLedger.from_json(twice.to_json()) == twice
    with pytest.raises(ValueError, match="cannot add"):
        merge_ledgers([])


def test_a_cap_on_kinds_loses_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.profiling.events.MAX_KINDS", 2)
    ledger = read_step(HOST)
    assert ledger.num_left_out == 5
    assert ledger.accounted_s == pytest.approx(20.0)
    assert [x.name for x in ledger.operators[:2]] != ["others", "others"]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T).topk(2, -1).indices


class TinyExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Foreign(nn.Module):
    """A model that nobody here knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 24), nn.LayerNorm(24)
        self.gate, self.experts = Gate(), TinyExperts()
        self.is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        self.gate(x)
        if self.is_broken:
            raise RuntimeError("broken")
        return self.experts(x)


def test_any_torch_model_is_taken_apart_and_its_parts_sum_to_the_step() -> None:
    model, x = Foreign().eval(), torch.randn(32, 16)
    walls = []

    def step() -> torch.Tensor:
        began = time.perf_counter()
        out = model(x)
        walls.append(time.perf_counter() - began)
        return out

    with torch.inference_mode():
        ledger = profile_steps(model, step, num_steps=3, num_warm_up=1)
        uses, peak, _ = record_work(model, lambda: model(x))
    assert ledger.num_steps == 3
    assert ledger.accounted_s == pytest.approx(ledger.seconds, rel=1e-6)
    assert sum(walls[1:]) <= ledger.seconds, "the marked step holds what the caller timed"
    assert {"gemm", "grouped_gemm", "routing", "norm", "host gap"} <= set(ledger.by_category())
    limits = Roofline(matmul=(("float32", Quantity(1e9, "FLOP/s")),), memory=Quantity(1e12, "B/s"))
    joined = ledger.with_work(uses, limits)
    (product,) = [each for each in joined.operators if each.area == "experts" and each.flops]
    assert product.flops == 2 * 32 * 24 * 40
    assert product.least_s == pytest.approx(2 * 32 * 24 * 40 / 1e9)
    assert product.share_of_roofline == pytest.approx(product.least_s * 3 / product.seconds)
    assert peak >= 32 * 40 * 4
    assert "of its roofline" in joined.render()


def test_recording_ends_at_the_cap_and_says_how_far_it_came() -> None:
    model, x = Foreign(), torch.randn(4, 16)
    ledger = profile_steps(model, lambda: model(x), num_steps=50, max_events=1)
    assert ledger.num_steps == 1
    with pytest.raises(RequestError, match="nothing to profile"):
        profile_steps(model, lambda: model(x), num_steps=0)


def test_a_step_that_fails_leaves_no_mark_open_and_no_hook_behind() -> None:
    model, x = Foreign(), torch.randn(4, 16)
    model.is_broken = True
    with pytest.raises(RuntimeError, match="broken"):
        profile_steps(model, lambda: model(x), num_warm_up=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.is_broken = False
    assert profile_steps(model, lambda: model(x)).num_steps == 3


def test_raw_results_of_the_profiler_say_what_its_own_list_says() -> None:
    """The list that torch makes of the same recording is the independent reading."""
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.SiLU(), nn.Linear(10, 3))
    with mark_areas(model):
        recording, _ = record_step(lambda: model(torch.randn(5, 6)).softmax(-1).clone(), torch.device("cpu"))
    profiler = recording._profiler
    raw = host_spans(profiler.profiler.kineto_results)
    listed = spans_of(profiler.events())
    assert len(raw) > 10
    assert sorted((x.name, x.shapes) for x in raw) == sorted((x.name, x.shapes) for x in listed)
    ours, theirs = read_step(raw), read_step(listed)
    assert ours.num_steps == theirs.num_steps == 1
    assert {x.name: x.count for x in ours.operators} == {x.name: x.count for x in theirs.operators}
    assert ours.by_category() == pytest.approx(theirs.by_category(), rel=1e-6, abs=1e-8)
