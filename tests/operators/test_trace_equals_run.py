"""The inventory equals the execution: the same operators, shapes, work and memory as a real pass, recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from trace_tasks import run_recorded
from uses import collectives_of, differences, operators_of

from workbench.loading import load_sharded_weights
from workbench.nn import workspace
from workbench.nn.kda import KDA
from workbench.nn.model import DecoderLayer
from workbench.nn.moe import Experts
from workbench.operators import Inventory, Workload, trace_inventory
from workbench.operators.routing import spread_evenly
from workbench.placement import Layout

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"
FAMILIES = Path(__file__).resolve().parents[1] / "golden" / "families"
PREFILL = Workload(phase="prefill", num_sequences=2, new_tokens=19)
CONTINUED = Workload(phase="prefill", num_sequences=2, new_tokens=19, context=5)
LONG = Workload(phase="prefill", num_sequences=1, new_tokens=97)
DECODE = Workload(phase="decode", num_sequences=3, context=7)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("precision", "workload"),
    [
        ("bf16", PREFILL),
        ("bf16", CONTINUED),
        ("bf16", LONG),
        ("bf16", DECODE),
        ("fp32", PREFILL),
        ("mxfp4", PREFILL),
        ("mxfp4", DECODE),
        ("fp8", DECODE),
        ("int8", DECODE),
        ("int4", DECODE),
    ],
    ids=str,
)
def test_operators_and_memory_of_the_trace_are_those_of_a_run(precision: str, workload: Workload) -> None:
    loaded = load_sharded_weights(TINY, precision=precision)
    loaded.model.eval().requires_grad_(False)
    real, visits = run_recorded(loaded.model, loaded.ctx, workload)
    traced = trace_inventory(
        loaded.spec, Layout(), workload, precision=precision, routing=lambda layer, dp, tokens: visits[layer]
    )
    assert differences(operators_of(traced), operators_of(real)) == ""
    assert traced.flops == real.flops > 0
    assert traced.bytes == real.bytes
    assert traced.activation_peak_bytes == real.activation_peak_bytes
    assert traced.layer_peaks == real.layer_peaks
    assert collectives_of(real) == collectives_of(traced) == {}


@pytest.mark.parametrize("name", ["k3-tiny", "deepseek_v32", "gpt_oss", "llama4"])
def test_a_long_context_is_traced_as_it_is_read_in_groups_and_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With next to no workspace: groups of heads, blocks of queries, chosen tokens, sinks, windows and chunks."""
    workload = Workload(phase="prefill", num_sequences=2, new_tokens=70, context=25)
    loaded = load_sharded_weights(TINY if name == "k3-tiny" else FAMILIES / name, precision="bf16")
    loaded.model.eval().requires_grad_(False)

    def traced_and_run() -> tuple[Inventory, Inventory]:
        real, visits = run_recorded(loaded.model, loaded.ctx, workload)
        traced = trace_inventory(
            loaded.spec, Layout(), workload, precision="bf16", routing=lambda layer, dp, tokens: visits[layer]
        )
        return traced, real

    at_once, _ = traced_and_run()
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1 << 10)
    traced, real = traced_and_run()
    assert sum(use.count for use in traced.operators) > sum(use.count for use in at_once.operators)
    assert differences(operators_of(traced), operators_of(real)) == ""
    assert traced.activation_peak_bytes == real.activation_peak_bytes
    assert traced.layer_peaks == real.layer_peaks


@pytest.mark.parametrize("workload", [PREFILL, DECODE], ids=str)
def test_one_layer_of_each_kind_counts_as_much_as_every_layer_for_itself(workload: Workload) -> None:
    """With even routing parts that repeat run once; given the same routing from outside nothing is repeated."""
    spec = load_sharded_weights(TINY).spec
    repeated = trace_inventory(spec, Layout(), workload)
    moe = spec.layers[1].ffn
    single = trace_inventory(
        spec, Layout(), workload, routing=lambda layer, dp, tokens: spread_evenly(moe, tokens, dp * tokens)
    )
    assert differences(operators_of(repeated), operators_of(single)) == ""
    assert repeated.activation_peak_bytes == single.activation_peak_bytes
    assert repeated.layer_peaks == single.layer_peaks


def test_an_operator_more_in_a_block_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_sharded_weights(TINY)
    loaded.model.eval().requires_grad_(False)
    real, visits = run_recorded(loaded.model, loaded.ctx, DECODE)
    inner = KDA.forward

    def with_more(self: KDA, x: Tensor, *rest: object) -> Tensor:
        return inner(self, x, *rest) + 0.0

    monkeypatch.setattr(KDA, "forward", with_more)
    traced = trace_inventory(
        loaded.spec, Layout(), DECODE, routing=lambda layer, dp, tokens: visits[layer], dtype=torch.bfloat16
    )
    assert "+5 ('KDA+MoE', 'elementwise', 'aten.add.Tensor'" in differences(operators_of(traced), operators_of(real))


def test_memory_held_longer_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 1 MB that a layer keeps while it runs raises the peak by as much."""
    spec = load_sharded_weights(TINY).spec
    plain = trace_inventory(spec, Layout(), LONG, precision="bf16", dtype=torch.float32)
    inner = DecoderLayer.forward

    def with_ballast(self: DecoderLayer, stream: object, segments: object, cache: object) -> object:
        ballast = torch.empty(1_000_000, dtype=torch.uint8, device="meta")
        out = inner(self, stream, segments, cache)
        assert len(ballast) == 1_000_000
        return out

    monkeypatch.setattr(DecoderLayer, "forward", with_ballast)
    held = trace_inventory(spec, Layout(), LONG, precision="fp32")
    assert held.activation_peak_bytes == plain.activation_peak_bytes + 1_000_000


def test_experts_visited_unevenly_change_shapes_and_not_the_work() -> None:
    """All tokens at the same two experts: two products of all rows each instead of many small ones."""
    spec = load_sharded_weights(TINY).spec
    crowded = trace_inventory(
        spec, Layout(), PREFILL, routing=lambda layer, dp, tokens: torch.tensor([[3, 11]]).expand(tokens, 2)
    )
    even = trace_inventory(spec, Layout(), PREFILL)
    rows = {u.input_shapes[0][0] for u in crowded.operators if u.category == "grouped_gemm"}
    assert rows == {PREFILL.num_tokens}
    grouped = [sum(u.flops * u.count for u in i.operators if u.category == "grouped_gemm") for i in (crowded, even)]
    assert grouped[0] == grouped[1] > 0


def test_model_is_as_before_after_a_recorded_run() -> None:
    loaded = load_sharded_weights(TINY)
    before = {name: set(vars(module)) for name, module in loaded.model.named_modules()}
    run_recorded(loaded.model, loaded.ctx, DECODE)
    assert {name: set(vars(module)) for name, module in loaded.model.named_modules()} == before
    assert loaded.ctx.log.listener is None
    assert all("each" not in vars(m) for m in loaded.model.modules() if isinstance(m, Experts))
