"""A deployment of real ranks profiled while it serves, and one of its ranks slowed on purpose."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.base import DeploymentError
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.profiling import (
    ClosedLoop,
    DeploymentProfiler,
    Kind,
    Lengths,
    Load,
    ServiceTarget,
    generate_load,
    plan_load,
)
from workbench.profiling.trace import write_trace
from workbench.serving import SamplingParams, open_service

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"
SHORT = SamplingParams(max_tokens=6)

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment.start(TINY, Layout(tp=2), precision="bf16", num_slots=2, max_tokens=256, threads=1) as running:
        yield running


def test_a_deployment_is_profiled_while_it_answers(deployment: Deployment, tmp_path: Path) -> None:
    load = Load(
        arrivals=ClosedLoop(concurrency=2),
        num_requests=3,
        kinds=(Kind(prompt=Lengths(least=8, most=8), answer=Lengths(least=6, most=6)),),
        num_warm_up=0,
    )
    before = deployment.generate([5, 6, 7], SHORT)
    with open_service(deployment, TINY) as service:
        with DeploymentProfiler(deployment, every=3, max_steps=2) as profiler:
            report = generate_load(ServiceTarget(service), plan_load(load))
        assert report.summary.num_failed == 0
    profile = profiler.profile
    assert profile is not None
    assert [rank.num_recorded for rank in profile.ranks] == [2, 2]
    for rank in profile.ranks:
        assert rank.problem == ""
        ledger = rank.ledger
        assert ledger is not None
        assert ledger.num_steps == 2
        assert ledger.accounted_s == pytest.approx(ledger.seconds, rel=0.05)
        found = ledger.by_category()
        assert {"gemm", "grouped_gemm", "linear_attention", "routing", "norm", "communication", "host gap"} <= set(
            found
        )
        assert found["communication"] > 0
        assert dict(ledger.memory)["weights"] > 0
        assert rank.num_plain > 0
    assert profile.overhead is not None
    communication = profile.communication
    assert communication.num_unmatched == 0
    first, second = communication.ranks
    assert first.count == second.count > 0
    share, waiting, transfer = (communication.share(x) for x in ("seconds", "waiting_s", "transfer_s"))
    assert share == pytest.approx(waiting + transfer)  # type: ignore[operator]
    assert 0 < share < 1  # type: ignore[operator]
    spec = deployment.spec
    moe = [layer.layer_idx for layer in spec.layers if layer.is_moe]
    assert [layer.layer for layer in profile.experts.layers] == moe
    prompts = sum(t.num_prompt_tokens + t.num_tokens for t in report.timings)
    assert all(0 < layer.num_tokens <= prompts * spec.layers[moe[0]].ffn.top_k for layer in profile.experts.layers)  # type: ignore[union-attr]
    assert profile.offsets == {0: 0.0, 1: 0.0}, "one machine has one clock"
    joined = [x for x in profile.ranks[0].ledger.with_work(profile.ranks[0].uses).operators if x.flops]  # type: ignore[union-attr]
    assert joined, "no product was found among those that were recorded with their work"
    assert "A step of rank" in profile.render()
    kept = write_trace(tmp_path / "trace.json", profile=profile, timings=report.timings)
    assert kept.num_events > 100
    assert deployment.generate([5, 6, 7], SHORT) == before, "the model answers as before"


def test_a_rank_slowed_on_purpose_shows_as_waiting_of_the_other(deployment: Deployment) -> None:
    deployment.call("workbench.profiling.rank:delay", {"rank": 1, "seconds": 0.02})
    try:
        with DeploymentProfiler(deployment, max_steps=1, with_work=False) as profiler:
            deployment.generate([5, 6, 7], SamplingParams(max_tokens=3))
    finally:
        deployment.call("workbench.profiling.rank:delay", {"rank": 1, "seconds": 0.0})
    assert profiler.profile is not None
    found = profiler.profile.communication
    assert found.latest == 1
    count = found.ranks[0].count
    assert found.ranks[0].waiting_s >= 0.9 * 0.02 * count
    assert found.ranks[1].caused_s > found.ranks[0].caused_s
    ledger = profiler.profile.ranks[0].ledger
    assert ledger is not None
    assert ledger.communication_s >= 0.9 * 0.02 * count / 3, "one of three steps: its waits are no gap of the host"


def test_only_functions_of_this_package_are_called_and_profiles_do_not_nest(deployment: Deployment) -> None:
    with pytest.raises(DeploymentError, match="not a function of this package"):
        deployment.call("os:getpid")
    with pytest.raises(DeploymentError, match="not being profiled"):
        deployment.call("workbench.profiling.rank:stop")
    with DeploymentProfiler(deployment) as profiler:
        with pytest.raises(DeploymentError, match="profiled already"):
            DeploymentProfiler(deployment).__enter__()
        deployment.generate([5, 6], SamplingParams(max_tokens=2))
    assert profiler.profile is not None
    assert pickle.loads(pickle.dumps(profiler.profile)) == profiler.profile


def test_a_barrier_before_each_collective_measures_waiting_by_itself(deployment: Deployment) -> None:
    with DeploymentProfiler(deployment, with_work=False, max_steps=1, barriers=True) as profiler:
        deployment.generate([5, 6, 7], SamplingParams(max_tokens=2))
    assert profiler.profile is not None
    found = profiler.profile.communication
    assert found.mode == "barrier before each operation"
    assert all(share.count and share.transfer_s > 0 for share in found.ranks)
