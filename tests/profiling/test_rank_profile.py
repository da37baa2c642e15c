"""What one rank does while it is profiled, in this process: steps go on, some are recorded, nothing stays behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.base import DeploymentError
from workbench.nn.router import Router
from workbench.profiling import expert_watch, rank
from workbench.profiling.clocks import ClockSample
from workbench.profiling.deployed import profile_of
from workbench.serving import LocalRunner
from workbench.serving.requests import SamplingParams
from workbench.serving.steps import SequenceStep

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"


@pytest.fixture(scope="module")
def commands() -> Any:
    """What `RankCommands` offers to a called function, around a model in this process."""
    runner = LocalRunner.load(TINY, precision="bf16", num_slots=1, max_tokens=64).rank
    return SimpleNamespace(extensions={}, runner=runner, loaded=SimpleNamespace(ctx=runner.ctx, model=runner.model))


def tokens(commands: Any, count: int) -> list[int]:
    """A greedy answer of so many steps."""
    runner = commands.runner
    runner.reset_slot(0)
    new, start, answer = (5, 6, 7, 8, 9), 0, []
    for n in range(count):
        step = SequenceStep(slot=0, start=start, token_ids=new, sample=SamplingParams(max_tokens=count), step_idx=n)
        (token,) = runner.step((step,))
        answer.append(token.token_id)
        start, new = start + len(new), (token.token_id,)
    return answer


def test_a_rank_is_profiled_while_it_steps_and_is_as_before_afterwards(commands: Any) -> None:
    plain = tokens(commands, 5)
    runner, log = commands.runner, commands.loaded.ctx.log
    rank.start(commands, every=2, max_steps=1)
    assert "step" in vars(runner)
    with pytest.raises(DeploymentError, match="profiled already"):
        rank.start(commands)
    assert tokens(commands, 5) == plain, "recording changes no answer"
    found = rank.stop(commands)
    assert len(found.spans) > 100
    assert len(repr(found)) < 4000, "a notebook keeps the text of whatever a cell ends with"
    assert "step" not in vars(runner)
    assert log.listener is None
    assert log.finished is None
    assert not any(module._forward_hooks for module in runner.model.modules())
    with pytest.raises(DeploymentError, match="not being profiled"):
        rank.stop(commands)
    assert tokens(commands, 5) == plain

    assert found.problem == ""
    assert (found.num_recorded, found.num_plain) == (1, 3), "one step for the work, one recorded, the rest plain"
    ledger = found.ledger
    assert ledger is not None
    assert ledger.num_steps == 1
    assert ledger.accounted_s == pytest.approx(ledger.seconds, rel=0.05)
    assert 0 < ledger.seconds <= found.recorded_step_s, "the marked step lies within the one that was timed outside"
    categories = {"gemm", "grouped_gemm", "linear_attention", "attention", "routing", "norm", "host gap"}
    assert categories <= set(ledger.by_category()), ledger.by_category()
    assert ledger.communication_s == 0.0
    assert found.collectives == ()
    memory = dict(ledger.memory)
    assert memory["weights"] > 0
    assert memory["activations, at the peak of the first step"] > 0

    spec = runner.model.spec
    top_k = {layer.layer_idx: layer.ffn.top_k for layer in spec.layers if layer.is_moe}
    profile = profile_of([found], [ClockSample(asked_s=0, answered_s=1, readings=(rank.read_clock(commands),))])
    assert {x.layer: x.num_tokens for x in profile.experts.layers} == {n: 9 * k for n, k in top_k.items()}, (
        "5 tokens of the prompt and 4 that followed, each K times"
    )
    assert "A step of rank 0" in profile.render()
    joined = ledger.with_work(found.uses)
    products = [x for x in joined.operators if x.category in ("gemm", "grouped_gemm") and x.flops]
    assert products


@pytest.mark.parametrize(("plain_s", "is_room"), [(67.0, False), (132.0, False), (134.0, True)])
def test_a_step_is_recorded_only_where_the_budget_holds_with_it(commands: Any, plain_s: float, is_room: bool) -> None:
    """One recorded step and its reading cost 2 s; two may cost 4, which is 3 % of 133 s."""
    profiler = rank._RankProfiler(commands, rank.ProfileOptions(with_work=False, budget=0.03))
    profiler.plain = rank._Times(count=1000, seconds=plain_s)
    profiler.recorded = rank._Times(count=1, seconds=1.0 + plain_s / 1000)
    profiler.read_s = 1.0
    assert profiler._has_room() is is_room


def test_recorded_steps_that_happened_to_be_quick_pay_for_nothing(commands: Any) -> None:
    profiler = rank._RankProfiler(commands, rank.ProfileOptions(with_work=False, budget=1e-9))
    profiler.plain = rank._Times(count=3, seconds=1.2)
    profiler.recorded = rank._Times(count=1, seconds=0.2)
    profiler.read_s = 0.15
    assert not profiler._has_room()


@pytest.mark.parametrize("budget", [1e-9, None])
def test_a_budget_that_is_spent_passes_steps_over(commands: Any, budget: float | None) -> None:
    rank.start(commands, with_work=False, budget=budget)
    tokens(commands, 3)
    commands.extensions[rank.KEY]._reader.join()  # while a step is read none is recorded anyway
    tokens(commands, 3)
    found = rank.stop(commands)
    assert found.read_s > 0
    assert (found.num_recorded == 1) == (budget is not None)
    assert found.num_recorded + found.num_plain == 6
    with pytest.raises(DeploymentError, match="not a share of step time"):
        rank.start(commands, budget=0.0)


def test_a_recording_that_cannot_be_read_is_said_and_ends_nothing(
    commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(rank.Recording, "read", broken)
    rank.start(commands, with_work=False, max_steps=1)
    assert len(tokens(commands, 2)) == 2
    found = rank.stop(commands)
    assert found.ledger is None
    assert "planted" in found.problem
    profile = profile_of([found], [ClockSample(asked_s=0, answered_s=1, readings=(rank.read_clock(commands),))])
    assert "planted" in profile.render()


def test_expert_counts_are_those_of_the_router(commands: Any) -> None:
    router = next(m for n, m in commands.loaded.model.named_modules() if n.endswith("ffn.router"))
    seen: list[torch.Tensor] = []
    handle = router.register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    rank.start(commands, with_work=False, max_steps=1, every=100)
    tokens(commands, 2)
    found = rank.stop(commands)
    handle.remove()
    first = min(found.expert_counts)
    counts = torch.bincount(torch.cat([ids.flatten() for ids in seen]), minlength=router.spec.num_experts)
    assert found.expert_counts[first] == tuple(counts.tolist())


def test_experts_are_counted_from_the_first_question_until_nobody_has_asked_for_long(commands: Any) -> None:
    now = [0.0]
    spec = commands.runner.model.spec
    top_k = {layer.layer_idx: layer.ffn.top_k for layer in spec.layers if layer.is_moe}
    seen: dict[str, Tensor] = {}

    def note(name: str, num_experts: int) -> Any:
        seen[name] = torch.zeros(num_experts, dtype=torch.int64)

        def add(_module: Any, _args: Any, out: tuple[Tensor, Tensor]) -> None:
            seen[name] += torch.bincount(out[0].flatten(), minlength=num_experts)

        return add

    handles = [
        module.register_forward_hook(note(name, module.spec.num_experts))
        for name, module in commands.runner.model.named_modules()
        if isinstance(module, Router)
    ]
    plain = tokens(commands, 5)
    for counts in seen.values():
        counts.zero_()

    first = expert_watch.count(commands, clock=lambda: now[0])
    assert {layer: sum(counts) for layer, counts in first.items()} == dict.fromkeys(top_k, 0)
    assert tokens(commands, 5) == plain, "counting changes no answer"
    now[0] = expert_watch.LEASE_S  # just in time
    found = expert_watch.count(commands)
    assert [found[layer] for layer in sorted(found)] == [tuple(counts.tolist()) for counts in seen.values()]
    assert {layer: sum(counts) for layer, counts in found.items()} == {n: 9 * k for n, k in top_k.items()}

    for handle in handles:
        handle.remove()
    now[0] *= 2.01
    tokens(commands, 3)
    assert not any(module._forward_hooks for module in commands.runner.model.modules()), "nobody asked, nothing counts"
    again = expert_watch.count(commands, clock=lambda: now[0])
    assert {layer: sum(counts) for layer, counts in again.items()} == dict.fromkeys(top_k, 0), "counted anew"
    now[0] *= 2.0
    tokens(commands, 1)


def test_ranks_that_see_the_tokens_of_another_count_nothing(commands: Any) -> None:
    ctx = SimpleNamespace(coords=SimpleNamespace(tp=1))
    other = SimpleNamespace(extensions={}, loaded=SimpleNamespace(ctx=ctx, model=commands.runner.model))
    assert expert_watch.count(other) == {}
    assert other.extensions == {}
    load = expert_watch.expert_load(SimpleNamespace(call=lambda function: [{1: (2, 3)}, {}, {1: (1, 0), 4: (0, 5)}]))
    assert [(x.layer, x.counts) for x in load.layers] == [(1, (3, 3)), (4, (0, 5))]
