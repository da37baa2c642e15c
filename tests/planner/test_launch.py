"""Launch commands: the layout as each engine says it, or the reason why it cannot."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from planner_samples import given, machine, miniature, published, simple_trace, simple_vision

from workbench.cluster.topology import Topology
from workbench.placement import Layout
from workbench.planner import Candidate, LaunchPlan, Objective, Reserve, launch_all, plan
from workbench.planner.launch import launch_sglang, launch_vllm, launch_workbench

SMALL = Reserve(other=given(1e5, "B"), communicator=given(1e4, "B"), window_bytes=1 << 16)
OBJECTIVE = Objective(context=256, concurrency=8, chunk_tokens=128)


def planned(layout: Layout, topology: Topology, spec=None) -> Candidate:  # type: ignore[no-untyped-def]
    spec = spec or miniature()
    objective = OBJECTIVE if spec is miniature() else Objective(context=8192, concurrency=8)
    report = plan(
        spec,
        topology,
        objective,
        layouts=[layout],
        trace=simple_trace,
        trace_vision=simple_vision,
        reserve=SMALL,
    )
    assert report.best is not None, report.explain()
    return report.best


def options(found: LaunchPlan, host: int = 0) -> dict[str, str]:
    """--name value and --name=value of one command, "" for switches."""
    assert found.ok, found.refused
    words = list(found.commands[host].argv)
    result = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            following = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else ""
            result[name] = value or following
    return result


def test_one_host_of_tensor_and_expert_parallelism_in_all_three() -> None:
    topology = machine(4)
    best = planned(Layout(tp=4, ep=4), topology)
    own, vllm, sglang = launch_all(best, topology, "/models/k3")
    assert options(own)["--nproc-per-node"] == "4"
    assert "Layout(tp=4, ep=4)" in own.notes[1]
    assert options(vllm)["--tensor-parallel-size"] == "4"
    assert "--enable-expert-parallel" in options(vllm)
    assert "--data-parallel-size" not in options(vllm)
    assert options(sglang)["--tp-size"] == options(sglang)["--ep-size"] == "4"
    assert options(vllm)["--max-model-len"] == options(sglang)["--context-length"] == "256"


def test_a_pipeline_over_two_hosts_names_head_rank_and_cuts() -> None:
    topology = machine(16, memory=150e9)
    layout = Layout(pp=2, tp=8, ep=8, stages=(45, 48))
    best = planned(layout, topology, published())
    own, vllm, sglang = launch_all(best, topology, "K3")
    assert [command.host for command in vllm.commands] == ["host0", "host1"]
    assert [options(vllm, i)["--node-rank"] for i in (0, 1)] == ["0", "1"]
    assert "--headless" not in options(vllm, 0)
    assert "--headless" in options(vllm, 1)
    assert vllm.commands[0].env == {"VLLM_PP_LAYER_PARTITION": "45,48"}
    assert sglang.commands[1].env == {"SGLANG_PP_LAYER_PARTITION": "45,48"}
    assert options(sglang, 1)["--node-rank"] == "1"
    assert options(own, 1)["--node-rank"] == "1"
    assert "stages=(45, 48)" in own.notes[1]
    assert options(vllm)["--mm-encoder-tp-mode"] == "data", "12 vision heads do not divide over 8 ranks"
    assert "--mm-enable-dp-encoder" in options(sglang)


def test_spread_experts_use_attention_replicas() -> None:
    topology = machine(4)
    best = planned(Layout(dp=2, tp=2, ep=4, dispatch="all_to_all"), topology)
    _, vllm, sglang = launch_all(best, topology, "K3")
    assert (options(vllm)["--tensor-parallel-size"], options(vllm)["--data-parallel-size"]) == ("2", "2")
    assert "--all2all-backend" in options(vllm)
    assert (options(sglang)["--tp-size"], options(sglang)["--dp-size"]) == ("4", "2")
    assert "--enable-dp-attention" in options(sglang)
    assert options(sglang)["--moe-a2a-backend"] == "deepep"
    assert options(vllm)["--max-num-seqs"] == "4", "per replica"
    assert options(sglang)["--max-running-requests"] == "8", "over all replicas"


def test_layouts_that_an_engine_cannot_say_are_refused_with_the_reason() -> None:
    topology = machine(4)
    inside = planned(Layout(tp=4, ep=2), topology)
    assert "spans all 4 ranks of a stage or none" in launch_vllm(inside, topology, "K3").refused
    assert launch_sglang(inside, topology, "K3").ok
    apart = planned(Layout(dp=2, tp=2), topology)
    assert "slices experts over replicas" in launch_vllm(apart, topology, "K3").refused
    some = planned(Layout(dp=4, ep=2), topology)
    assert "over some of the replicas" in launch_sglang(some, topology, "K3").refused
    assert launch_workbench(some, topology, "K3").ok


def test_a_precision_that_is_not_in_the_files_needs_another_checkpoint() -> None:
    topology = machine(2)
    best = dataclasses.replace(planned(Layout(tp=2, ep=2), topology), precision="int8")
    assert "needs another checkpoint" in launch_vllm(best, topology, "K3").refused
    assert launch_workbench(best, topology, "K3").ok
    from_bf16 = dataclasses.replace(best, precision="fp8")
    assert options(launch_vllm(from_bf16, topology, "K3", published="bf16"))["--quantization"] == "fp8"


def test_a_narrow_cache_is_an_option_or_a_refusal() -> None:
    topology = machine(2)
    best = dataclasses.replace(planned(Layout(tp=2, ep=2), topology), kv_dtype="fp8")
    own, vllm, sglang = launch_all(best, topology, "K3")
    assert "kv_dtype='fp8'" in " ".join(own.notes)
    assert options(vllm)["--kv-cache-dtype"] == "fp8"
    assert options(sglang)["--kv-cache-dtype"] == "fp8_e4m3"
    own, vllm, sglang = launch_all(dataclasses.replace(best, kv_dtype="int8"), topology, "K3")
    assert own.ok
    assert "not in int8" in vllm.refused
    assert "not in int8" in sglang.refused


def test_uneven_hosts_are_refused() -> None:
    topology = machine(4, per_host=3)
    best = planned(Layout(tp=4, ep=4), topology)
    assert all("unequal numbers" in x.refused for x in launch_all(best, topology, "K3"))


def test_commands_survive_a_shell() -> None:
    topology = machine(2)
    best = planned(Layout(tp=2, ep=2), topology)
    found = launch_vllm(best, topology, "/models/my k3; rm -rf x")
    assert "/models/my k3; rm -rf x" in shlex.split(str(found.commands[0]))
    assert "not possible" not in found.render()


@pytest.mark.parametrize("text", ["pp2xtp2xep2", "dp2xtp2xep4", "tp4xep2"])
def test_our_own_handle_is_python_that_builds_the_same_layout(text: str) -> None:
    topology, layout = machine(4), Layout.parse(text)
    best = planned(layout, topology)
    code = launch_workbench(best, topology, "K3").notes[1]
    inside = code[code.index("placement.Layout(") + len("placement.") : code.index("), precision")] + ")"
    assert eval(inside, {"Layout": Layout}) == best.layout


def test_our_ranks_take_the_options_of_the_worker() -> None:
    """The flags are those that the worker's own parser knows."""
    from pathlib import Path

    import workbench.deployment

    topology = machine(2)
    found = launch_workbench(planned(Layout(tp=2, ep=2), topology), topology, "K3")
    words = list(found.commands[0].argv)
    after = words[words.index("-m") + 2 :]
    source = (Path(workbench.deployment.__file__).parent / "worker.py").read_text()
    assert words[words.index("-m") + 1] == "workbench.deployment.worker"
    assert all(f'"{word}"' in source for word in after if word.startswith("--"))
