"""Inventories of layouts and models that nobody runs here: sums, splits, memory, refusals, and how long it takes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from k3_published import SIZES, TOKENS
from uses import differences, operators_of

from workbench.base import ConfigError, LayoutError, LoadError, UnsupportedModelError, peak_resident_bytes
from workbench.checkpoint import k3_config
from workbench.loading import load_sharded_weights
from workbench.operators import CATEGORIES, Inventory, Workload, trace_inventory, trace_vision
from workbench.operators.instrument import instrument
from workbench.operators.recorder import Recorder
from workbench.operators.routing import ExpertTraffic, draw_routing, spread_evenly
from workbench.operators.silent import silent_context
from workbench.placement import Layout
from workbench.spec import ModelSpec, MoESpec, count_model, parse_config, read_spec

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"
PREFILL = Workload(phase="prefill", num_sequences=2, new_tokens=32)
DECODE = Workload(phase="decode", num_sequences=3, context=20)


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return read_spec(TINY)


@pytest.fixture(scope="module")
def k3() -> ModelSpec:
    return parse_config(k3_config(sizes=SIZES, tokens=TOKENS))


def moe_of(spec: ModelSpec) -> MoESpec:
    return next(layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec))


# sums and splits


@pytest.mark.parametrize("workload", [PREFILL, DECODE], ids=lambda w: w.phase)
def test_c05_stages_of_a_pipeline_add_up_to_the_whole_and_each_boundary_has_its_size(
    tiny: ModelSpec, workload: Workload
) -> None:
    whole = trace_inventory(tiny, Layout(), workload)
    layout = Layout(pp=3, stages=(2, 4, 3))
    stages = [trace_inventory(tiny, layout, workload, stage=stage) for stage in range(3)]
    assert sum(stage.flops for stage in stages) == whole.flops
    assert sum(stage.weight_bytes for stage in stages) == whole.weight_bytes
    sent = [(use.operation, use.num_bytes) for stage in stages for use in stage.collectives]
    hidden = tiny.hidden_size * 2 * workload.num_tokens
    # A boundary carries the sums saved before layers 0, 4, ... and the running sum.
    assert sent == [("send", 2 * hidden), ("receive", 2 * hidden), ("send", 3 * hidden), ("receive", 3 * hidden)]


def test_tensor_parallel_ranks_share_the_products(tiny: ModelSpec) -> None:
    whole, half = (trace_inventory(tiny, Layout(tp=tp), PREFILL) for tp in (1, 2))
    assert 0.5 * whole.flops < half.flops < 0.6 * whole.flops  # routers, latents and norms are whole on every rank
    assert {use.group for use in half.collectives} == {"tp", "experts"}
    assert whole.collectives == ()


def test_work_per_token_is_twice_the_active_parameters(k3: ModelSpec) -> None:
    """At 4096 tokens the published sizes: attention and the delta rule add a little to 2 FLOP per active parameter.

    The head runs for the last token of each sequence only.
    """
    workload = Workload(phase="prefill", new_tokens=4096)
    inventory = trace_inventory(k3, Layout(), workload, precision="mxfp4")
    active = count_model(k3).active_params - k3.vocab_size * k3.hidden_size
    assert 2 * active * 4096 < inventory.flops < 2.1 * active * 4096


def test_a_large_decode_reads_every_weight_once(k3: ModelSpec) -> None:
    """Enough sequences visit every expert; each stored byte but the embedding table and the tower is then read once."""
    counts = count_model(k3)
    inventory = trace_inventory(
        k3, Layout(), Workload(phase="decode", num_sequences=512, context=64), precision="mxfp4"
    )
    left_out = sum(counts.bytes_by_role[role] for role in ("embedding", "vision", "projector"))
    assert inventory.weight_bytes == pytest.approx(counts.weight_bytes - left_out, rel=0.01)


def test_every_category_is_known_and_experts_are_dequantised(tiny: ModelSpec) -> None:
    plain, packed = (trace_inventory(tiny, Layout(), DECODE, precision=p) for p in ("bf16", "mxfp4"))
    assert {use.category for use in packed.operators} <= set(CATEGORIES)
    assert not any(use.category == "dequantise" for use in plain.operators)
    work = sum(use.bytes_written * use.count for use in packed.operators if use.category == "dequantise")
    moe = moe_of(tiny)
    visited = len(set(spread_evenly(moe, DECODE.num_tokens).flatten().tolist()))
    dense = 8 * visited * 3 * moe.width * moe.latent_dim * 2  # bytes of the visited experts of 8 layers in bf16
    assert work > dense
    assert packed.weight_bytes < plain.weight_bytes


def test_activation_peak_grows_with_tokens_and_shrinks_with_ranks(tiny: ModelSpec) -> None:
    def peak(tokens: int, tp: int) -> int:
        workload = Workload(phase="prefill", new_tokens=tokens)
        return trace_inventory(tiny, Layout(tp=tp), workload).activation_peak_bytes

    assert 1.9 < peak(512, 1) / peak(256, 1) < 2.1
    assert peak(256, 4) < peak(256, 2) < peak(256, 1)


def test_layers_of_one_kind_peak_alike_and_below_the_pass(tiny: ModelSpec) -> None:
    inventory = trace_inventory(tiny, Layout(), PREFILL)
    assert dict(inventory.layer_peaks).keys() == {"KDA+dense", "KDA+MoE", "MLA+MoE"}
    assert max(dict(inventory.layer_peaks).values()) < inventory.activation_peak_bytes


# routing


def test_even_routing_is_even_and_names_no_expert_twice(tiny: ModelSpec, k3: ModelSpec) -> None:
    for moe, tokens in ((moe_of(tiny), 64), (moe_of(k3), 560), (replace(moe_of(tiny), num_experts=10, top_k=3), 100)):
        ids = spread_evenly(moe, tokens)
        assert ids.shape == (tokens, moe.top_k)
        assert bool((ids.diff(dim=1) > 0).all())
        counts = torch.bincount(ids.flatten(), minlength=moe.num_experts)
        assert counts.tolist() == [tokens * moe.top_k // moe.num_experts] * moe.num_experts


def test_a_token_meets_as_many_ranks_as_it_can(k3: ModelSpec) -> None:
    moe = moe_of(k3)
    owners = spread_evenly(moe, 50) // (moe.num_experts // 64)
    assert all(len(set(row)) == moe.top_k for row in owners.tolist())


def test_what_ranks_send_to_one_another_arrives(tiny: ModelSpec) -> None:
    layout, moe = Layout(dp=2, tp=2, ep=4, dispatch="all_to_all"), moe_of(tiny)
    ranks = [ExpertTraffic(layout=layout, coords=layout.coords(rank), num_tokens=7, moe=moe) for rank in range(4)]
    num_local = moe.num_experts // 4
    for traffic in ranks:
        counts = traffic.received_counts(1)
        slots = traffic.received_slots(1)
        assert counts.sum() == len(slots)
        assert slots.max() < num_local
        assert bool((slots >= 0).any(1).all())
    visits = sum(int((traffic.received_slots(1) >= 0).sum()) for traffic in ranks)
    assert visits == 2 * 7 * moe.top_k


@pytest.mark.parametrize("text", ["dp2xtp2xep4", "dp2xtp2xep4:all_to_all", "tp2xep2", "dp4xep2:all_to_all"])
def test_expert_layouts_share_the_experts_work(tiny: ModelSpec, text: str) -> None:
    """All ranks together do the routed experts' products of all replicas once, however tokens travel."""
    layout = Layout.parse(text)

    def expert_flops(inventory: Inventory) -> int:
        return sum(use.flops * use.count for use in inventory.operators if use.category == "grouped_gemm")

    ranks = [trace_inventory(tiny, layout, PREFILL, rank=rank) for rank in range(layout.world_size)]
    whole = expert_flops(trace_inventory(tiny, Layout(), PREFILL))
    assert sum(map(expert_flops, ranks)) == layout.dp * whole


# vision


@pytest.mark.parametrize("tp", [1, 2])
def test_vision_inventory_equals_a_real_encoding(tp: int) -> None:
    loaded = load_sharded_weights(TINY)
    model = loaded.model.eval().requires_grad_(False)
    grid = (1, 4, 6)
    vision = loaded.spec.vision
    assert vision is not None
    recorder = Recorder(model)
    patches = torch.zeros(24, 3, vision.patch_size, vision.patch_size)
    with torch.inference_mode(), instrument(model, recorder), recorder:
        model.encode_images(patches, [grid])
    traced = trace_vision(loaded.spec, Layout(tp=tp), grid)
    assert {use.category for use in traced.operators if not use.is_view} == {"vision"} | (
        {"movement"} if any(use.layer_kind == "stage" for use in traced.operators) else set()
    )
    if tp == 1:
        assert differences(operators_of(traced), operators_of(replace(traced, operators=recorder.operators()))) == ""
        assert traced.activation_peak_bytes == recorder.peak
    else:
        assert traced.collectives


def test_a_model_without_eyes_and_a_text_pass_with_pictures_are_refused(tiny: ModelSpec) -> None:
    with pytest.raises(UnsupportedModelError, match="no vision tower"):
        trace_vision(replace(tiny, vision=None, projector=None), Layout(), (1, 4, 4))
    with pytest.raises(ConfigError, match="trace_vision"):
        trace_inventory(tiny, Layout(), Workload(phase="vision", new_tokens=4))


# records and refusals


def test_an_inventory_survives_json(tiny: ModelSpec) -> None:
    inventory = trace_inventory(tiny, Layout.parse("pp2xtp2"), DECODE, stage=1, precision="int4")
    again = Inventory.from_json(json.loads(json.dumps(inventory.to_json())))
    assert again == inventory
    assert again.flops == inventory.flops > 0
    assert "stage 1 of 2" in inventory.render()
    assert "<table>" in inventory._repr_html_()


def test_asking_again_costs_nothing(tiny: ModelSpec) -> None:
    assert trace_inventory(tiny, Layout(tp=2), DECODE) is trace_inventory(tiny, Layout(tp=2), DECODE)


def test_no_process_group_is_made(tiny: ModelSpec) -> None:
    trace_inventory(tiny, Layout.parse("dp2xtp2xep4"), DECODE)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda spec: trace_inventory(spec, Layout(tp=3), DECODE), LayoutError, "tp=3 does not divide"),
        (lambda spec: trace_inventory(spec, Layout(pp=2), DECODE, stage=2), ConfigError, "no pipeline stage 2"),
        (lambda spec: trace_inventory(spec, Layout(pp=2), DECODE, stage=1, rank=0), ConfigError, "rank 0 is not"),
        (lambda spec: trace_inventory(spec, Layout(), DECODE, precision="fp3"), LoadError, "unknown precision"),
        (
            lambda spec: trace_inventory(spec, Layout(), Workload(phase="decode", context=spec.max_context)),
            ConfigError,
            "tokens in one sequence",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(
    tiny: ModelSpec, ask: Callable[[ModelSpec], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ask(tiny)


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "training"},
        {"phase": "prefill", "num_sequences": 0},
        {"phase": "prefill", "context": -1},
        {"phase": "decode", "new_tokens": 2},
    ],
)
def test_a_workload_that_means_nothing_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Workload(**fields)  # type: ignore[arg-type]


def test_silent_ranks_do_not_invent_values() -> None:
    """Index tables answer as if the other ranks had the same; everything else has no contents to answer with."""
    ctx = silent_context(Layout(tp=2, dp=2, ep=4), 3)
    assert ctx.coords.tp == 1
    assert ctx.experts.size == 4
    assert ctx.expert_gather.row_counts(5, ctx.device) == (5, 5)
    reduced = ctx.tp.all_reduce(torch.empty(3, 4, device="meta"))
    assert reduced.shape == (3, 4)
    assert reduced.device.type == "meta"
    assert ctx.log.count("all_reduce", "tp") == 1


# size


def test_published_sizes_are_traced_in_little_memory(k3: ModelSpec) -> None:
    """512 ranks, 1.5 TB of weights: no memory to speak of. How long it takes: tests/benchmarks/bench_published.py."""
    prefill, decode = (
        Workload(phase="prefill", new_tokens=4096),
        Workload(phase="decode", num_sequences=64, context=8192),
    )
    trace_inventory(k3, Layout(tp=2), decode, precision="mxfp4")  # torch's own tables are made once per process
    before = peak_resident_bytes()
    for text in ("tp16xep16", "dp8xtp8xep64", "pp4xtp8xep8", "dp64xtp8xep128:all_to_all"):
        for workload in (prefill, decode):
            assert trace_inventory(k3, Layout.parse(text), workload, precision="mxfp4").flops > 0
    assert peak_resident_bytes() - before < 400e6


def test_a_chunk_behind_a_million_tokens_takes_one_heads_keys_and_values_and_a_block_of_the_mask(
    k3: ModelSpec,
) -> None:
    """K3 over 16 ranks, 6 heads each, the last 2,048 tokens of 2^20."""
    million = 1 << 20
    workload = Workload(phase="prefill", new_tokens=2048, context=million - 2048)
    found = trace_inventory(k3, Layout.parse("tp16xep16"), workload, precision="mxfp4")
    peaks = dict(found.layer_peaks)
    needed = million * (192 + 192 + 128) * 2 + 192 * million * 2
    assert needed <= peaks["MLA+MoE"] < 1.1 * needed, "and tensors of the chunk itself"


def test_few_tokens_that_draw_their_experts_visit_fewer_than_an_even_spread(tiny: ModelSpec) -> None:
    """As many as the planner's bound expects of a decode step: E (1 - (1 - K/E)^T)."""
    moe, layers = moe_of(tiny), [layer.layer_idx for layer in tiny.layers if layer.is_moe]
    draw = draw_routing(tiny)
    visited = []
    for layer_idx, dp in itertools.product(layers, range(40)):
        ids = draw(layer_idx, dp, 3)
        assert ids.shape == (3, moe.top_k)
        assert bool((ids[:, 1:] > ids[:, :-1]).all()), "ascending, without doubles"
        assert torch.equal(ids, draw(layer_idx, dp, 3)), "the same each time"
        visited.append(len(ids.unique()))
    expected = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** 3)
    assert sum(visited) / len(visited) == pytest.approx(expected, rel=0.05)
    assert len(spread_evenly(moe, 3).unique()) > expected
    drawn = trace_inventory(tiny, Layout(), DECODE, routing=draw)
    even = trace_inventory(tiny, Layout(), DECODE)
    assert drawn.weight_bytes < even.weight_bytes
