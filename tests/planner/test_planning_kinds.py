"""Ways in which plans have gone wrong in the field, one planted case each."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from planner_samples import given, machine, miniature, published, simple_trace, simple_vision

from workbench.base import LayoutError, RequestError, human
from workbench.checkpoint import k3_config
from workbench.cluster import Topology, read_hardware
from workbench.placement import Layout, check_layout, owned_shards
from workbench.planner import (
    CacheNeed,
    Objective,
    PlanReport,
    Reserve,
    cut_stages,
    plan,
    read_weight_table,
    stage_ledger,
)
from workbench.planner.memory import cache_need, request_floor
from workbench.spec import GQASpec, MLASpec, ModelSpec, MoESpec, QuantSpec, count_model, parse_config

NOTHING = Reserve(other=given(0, "B"), communicator=given(0, "B"), window_bytes=0)
GIB = 1 << 30


def search(spec: ModelSpec, topology: Topology, objective: Objective, **options: object) -> PlanReport:
    chosen = {"trace": simple_trace, "trace_vision": simple_vision, "reserve": NOTHING, **options}
    return plan(spec, topology, objective, **chosen)  # type: ignore[arg-type]


def with_experts(spec: ModelSpec, **changed: object) -> ModelSpec:
    layers = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, **changed)) if layer.is_moe else layer  # type: ignore[arg-type]
        for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=layers)


@pytest.mark.parametrize("width", [18432, 320, 512, 768, 576])
@pytest.mark.parametrize("tp", [2, 4, 8, 16, 32])
def test_p01_a_slice_that_is_no_whole_number_of_quantisation_blocks_is_refused_before_anything_loads(
    width: int, tp: int
) -> None:
    blocks = QuantSpec(scheme="mxfp4", group_size=128)
    spec = dataclasses.replace(with_experts(published(), width=width), quant=blocks)
    report = search(spec, machine(tp, memory=1e14), Objective(context=64, concurrency=1), layouts=[Layout(tp=tp)])
    divides = width % (tp * 128) == 0
    assert report.ok == divides
    if not divides:
        (refusal,) = report.refused
        assert f"expert width {width} over {tp} ranks is not a whole number of quantisation groups" in refusal.reason
    if width % 128 == 0:
        check_layout(spec, Layout(tp=tp, ep=tp))  # whole experts on a rank are the way out


@pytest.mark.parametrize(("kv_heads", "tp"), [(4, 8), (8, 16)])
def test_p02_fewer_key_value_heads_than_ranks_are_replicated_not_cut_to_fractions(kv_heads: int, tp: int) -> None:
    """And where query heads do not divide at all, the plan is refused."""
    mixer = GQASpec(num_heads=32, num_kv_heads=kv_heads, head_dim=128, v_dim=128, rope=None)
    layer = dataclasses.replace(published().layers[0], mixer=mixer)
    spec = dataclasses.replace(published(), layers=(layer,))
    need = CacheNeed(slots=1, max_tokens=10)
    (held,) = cache_need(spec, Layout(tp=tp), range(1), need, 2).values()
    assert held == 10 * 1 * (128 + 128) * 2
    (whole,) = cache_need(spec, Layout(), range(1), need, 2).values()
    assert held * tp > whole, "replicated heads cost memory, and the ledger says so"
    report = search(published(), machine(64), Objective(context=64, concurrency=1), layouts=[Layout(tp=64)])
    assert "tp=64 does not divide layer 0: attention heads (96)" in report.refused[0].reason


def test_p04_more_ranks_than_heads_leave_no_empty_shard() -> None:
    import torch

    spec = miniature()  # four heads
    cut = [len(part) for part in torch.arange(4).tensor_split(8)]
    assert 0 in cut, "what a split without a check hands out"
    report = search(spec, machine(8), Objective(context=64, concurrency=8))
    planned = [x.layout for x in (*report.candidates, *report.uncosted)]
    assert any(layout.tp == 4 for layout in planned)
    assert not any(layout.tp == 8 for layout in planned)
    for layout in (layout for layout in planned if layout.pp == 1):
        for rank in range(layout.world_size):
            assert all(math.prod(shard.shape) for shard in owned_shards(spec, layout, rank)), (layout, rank)
    refused = [x for x in report.refused if x.layout.tp == 8]
    assert refused
    assert all("tp=8 does not divide layer 0: attention heads (4)" in x.reason for x in refused)


@pytest.mark.parametrize("text", ["tp4xep4", "dp2xtp2xep4", "pp2xdp2xtp2xep2", "tp4", "tp4xep2", "dp4xep4"])
def test_p06_experts_are_divided_by_ep_exactly_once(text: str) -> None:
    """Against a sum over every published tensor that a rank owns."""
    layout, spec = Layout.parse(text), miniature()
    table = read_weight_table(spec, "mxfp4")
    for rank in range(layout.world_size):
        brute = sum(s.num_bytes for s in owned_shards(spec, layout, rank) if s.tensor.role == "routed_expert")
        assert table.stage(layout, layout.coords(rank).pp)["routed_expert"] == brute


def test_p06_a_plan_for_32_devices_is_counted_as_32() -> None:
    counts = count_model(published())
    routed = counts.bytes_by_role["routed_expert"]
    assert routed == 1_446_456_066_048
    table = read_weight_table(published(), "mxfp4")
    found = table.stage(Layout(dp=4, tp=8, ep=32), 0)
    assert found["routed_expert"] == routed // 32
    assert found["kda"] < counts.bytes_by_role["kda"] / 7


def test_p07_weights_are_all_parameters_and_caches_follow_layers_and_heads_not_size() -> None:
    counts = count_model(published())
    table = read_weight_table(published(), "bf16")
    assert table.total() > 2 * 0.99 * counts.num_params > 25 * 2 * counts.active_params

    def latent(spec: ModelSpec) -> int:
        return cache_need(spec, Layout(), range(8), CacheNeed(slots=1, max_tokens=1000), 2)["latent"]

    few, many = (
        parse_config(k3_config(num_layers=8, full_attn_layers=full, kv_rank=64))
        for full in ((4, 7, 8), (2, 4, 6, 7, 8))
    )
    assert latent(many) * 3 == latent(few) * 5
    # What one projection gains the other loses, so the two models are equally large; their rows are not equally wide.
    narrow, wide = (
        parse_config(k3_config(q_rank=128 - kv_rank, kv_rank=kv_rank, nope_dim=24, rope_dim=16, v_dim=16))
        for kv_rank in (32, 96)
    )
    assert count_model(narrow).num_params == count_model(wide).num_params
    assert latent(wide) * (32 + 16) == latent(narrow) * (96 + 16)


def test_p08_only_attention_layers_grow_with_tokens() -> None:
    spec = published()
    latent = cache_need(spec, Layout(), range(93), CacheNeed(slots=1, max_tokens=1), 2)["latent"]
    assert latent == 27_648
    all_layers = 93 * spec.layers_of(MLASpec)[0].mixer.cache_dim * 2  # type: ignore[union-attr]
    assert all_layers / latent == pytest.approx(3.9, abs=0.05), "what counting all layers as attention would give"
    fixed = [
        sum(cache_need(spec, Layout(), range(93), CacheNeed(slots=1, max_tokens=n), 2).values()) - 27_648 * n
        for n in (1, 100_000)
    ]
    assert fixed == [449_372_160, 449_372_160]


def test_p10_the_plan_prints_what_the_shortest_request_pins() -> None:
    report = search(published(), machine(16, memory=150e9), Objective(context=8192, concurrency=3))
    best = report.best
    assert best is not None
    layers = best.layout.stage_layers(93)
    floors = [request_floor(published(), best.layout, x, best.need, 2) for x in layers]
    assert best.request_floor == max(floors)
    assert f"A request pins at least {human(max(floors), 'B')} on a rank" in report.explain()
    assert max(floors) > 1000 * 576 * 2, "the state of its layers, not the row of one token"
    # Three requests that do not fit are refused although one token of each is tiny.
    state = cache_need(published(), Layout(tp=16, ep=16), range(93), CacheNeed(slots=3, max_tokens=1), 2)
    weights = read_weight_table(published(), "mxfp4").stage(Layout(tp=16, ep=16), 0).total()
    pinned = sum(state.values())
    for share, concurrency, fits in ((0.9, 3, False), (0.9, 2, True), (1.1, 3, True)):
        pool = machine(16, memory=weights + pinned * share)
        objective = Objective(context=1, concurrency=concurrency, image_patches=0)
        tiny = search(published(), pool, objective, layouts=[Layout(tp=16, ep=16)])
        assert tiny.ok == fits, (share, concurrency, tiny.explain())
        assert [x.kind for x in tiny.refused] == ([] if fits else ["memory"])


def test_p11_every_slot_of_every_layer_has_bytes_of_its_own_and_none_beyond_them() -> None:
    import torch

    from workbench.nn.batch import TokenBatch
    from workbench.nn.cache import StateCache

    spec, layers = miniature(), range(8)
    cache = StateCache(spec, layers, num_slots=3, max_tokens=10, dtype=torch.bfloat16)
    spans = []
    for tensor in cache.tensors:
        size = tensor[0].nbytes
        spans += [(tensor[slot].data_ptr(), tensor[slot].data_ptr() + size) for slot in range(3)]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "two slots overlap"
    need = CacheNeed(slots=3, max_tokens=10)
    assert sum(end - start for start, end in spans) == sum(cache_need(spec, Layout(), layers, need, 2).values())
    for slot, start in ((3, 0), (-1, 0), (0, 10)):
        batch = TokenBatch(
            token_ids=torch.zeros(1, dtype=torch.int64),
            lengths=(1,),
            starts=(start,),
            slots=(slot,),
            logit_rows=torch.zeros(1, dtype=torch.int64),
        )
        with pytest.raises(RequestError):
            cache.check(batch)


def test_p12_no_layer_is_lost_whatever_the_number_of_stages() -> None:
    table = read_weight_table(published(), "mxfp4")
    loads = [float(size) for size in table.layers(Layout())]
    for num_stages in range(1, 17):
        sizes = cut_stages(loads, num_stages)
        assert sum(sizes) == 93
        assert min(sizes) >= 1
    lost_by_floor_division = 93 - 8 * (93 // 8)
    assert lost_by_floor_division == 5
    for num_layers, num_stages in itertools.product(range(1, 101), range(1, 17)):
        if num_stages <= num_layers:
            cut = Layout(pp=num_stages).stage_layers(num_layers)
            assert [i for layers in cut for i in layers] == list(range(num_layers)), "complete, disjoint, in order"
            assert all(cut)
    whole = sum(table.stage(Layout(pp=8), stage).total() for stage in range(8))
    assert whole == table.total()


@pytest.mark.parametrize(("pp", "ignored"), [(8, "embedding and head"), (4, "that the first layer is dense")])
def test_p14_embeddings_and_the_dense_layer_weigh_when_stages_are_cut(pp: int, ignored: str) -> None:
    """A cut that leaves out either has a fuller stage than the plan's."""
    objective = Objective(context=64, concurrency=1, image_patches=0)
    report = search(published(), machine(pp, memory=4e12), objective, layouts=[Layout(pp=pp)])
    assert report.best is not None
    table = read_weight_table(published(), "mxfp4")
    assert table.edge("last", Layout(pp=pp)).total() > 1.17e9 * 2 * 0.99

    def fullest(stages: tuple[int, ...] | None) -> int:
        return max(table.stage(Layout(pp=pp, stages=stages), stage).total() for stage in range(pp))

    loads = [float(size) for size in table.layers(Layout(pp=pp))]
    blind = cut_stages(loads if ignored == "embedding and head" else [1.0] * 93, pp)
    assert max(ledger.weights for ledger in report.best.ledgers) < fullest(blind)
    assert max(ledger.weights for ledger in report.best.ledgers) <= fullest(None)


@pytest.mark.parametrize(("tp", "placement"), [(4, "sharded"), (8, "shared_out"), (16, "shared_out"), (1, "whole")])
def test_p15_a_tower_whose_heads_do_not_divide_is_shared_out_by_pictures(tp: int, placement: str) -> None:
    """Twelve heads; and the worst picture that is counted is the model's own limit, not beyond the context."""
    layout = Layout(tp=tp, ep=tp)
    topology = machine(tp, memory=4e12)
    report = search(published(), topology, Objective(context=1 << 20, concurrency=1), layouts=[layout])
    assert report.best is not None
    assert report.best.vision == placement
    found = {line.role: line.size.value for line in report.best.ledgers[0].lines}
    whole = read_weight_table(published(), "mxfp4").stage(Layout(), 0)["vision"]
    assert (found["vision"] == whole) == (placement != "sharded")
    limit = published().image.patch_limit  # type: ignore[union-attr]
    assert found["image features"] == limit // 4 * 7168 * 2
    short = search(published(), topology, Objective(context=1024, concurrency=1), layouts=[layout])
    assert short.best is not None
    rows = next(line.size.value for line in short.best.ledgers[0].lines if line.role == "image features")
    assert rows == 512 * 7168 * 2, "half of a short context"


@pytest.mark.parametrize(
    ("hardware", "devices", "fits"),
    [
        ("b200", 8, False),
        ("h200", 8, False),
        ("b300", 8, True),
        ("mi355x", 8, True),
        ("h200", 16, True),
        ("b200", 16, True),
        ("h100", 32, True),
    ],
)
def test_p17_capacity_is_asked_of_the_hardware_at_hand(hardware: str, devices: int, fits: bool) -> None:
    found = read_hardware(hardware)
    topology = Topology.of_hardware(found, devices)
    reserve = Reserve.for_hardware(found)
    report = search(published(), topology, Objective(context=8192, concurrency=4), reserve=reserve)
    assert report.ok == fits, report.explain()
    if not fits:
        assert all(x.kind in ("memory", "divisibility") for x in report.refused)


def test_p17_eight_b200_miss_by_the_weights_alone() -> None:
    table = read_weight_table(published(), "mxfp4")
    capacity = given(180 * GIB, "B")
    ledger = stage_ledger(table, Layout(tp=8, ep=8), 0, CacheNeed(slots=1, max_tokens=1), NOTHING, capacity=capacity)
    assert ledger.free is not None
    assert ledger.free < -8e9, "replicated matrices come on top of an eighth of the weights"
    assert 8 * 180 * GIB - table.total() == pytest.approx(-14.6e9, rel=0.03)


def test_p18_tensor_parallelism_leaves_the_slow_link_and_comes_back_when_it_is_fast() -> None:
    layouts = [Layout(tp=16, ep=16), Layout(pp=2, tp=8, ep=8)]
    fast = machine(16, memory=150e9, bandwidth=4.8e12, rate=1e15, within=4.5e11, between=2e11)
    chosen = {}
    for name, topology in (("fast", fast), ("slow", fast.with_inter_node(1 / 20))):
        report = search(published(), topology, Objective(context=8192, concurrency=4), layouts=layouts)
        assert report.best is not None
        chosen[name] = report.best.layout.tp
        if name == "slow":
            assert "it loses most on all_reduce over" in report.explain()
    assert chosen == {"fast": 16, "slow": 8}


def test_a_layout_with_empty_stages_is_refused_in_one_line() -> None:
    report = search(miniature(), machine(16), Objective(context=64, concurrency=1), layouts=[Layout(pp=16)])
    assert "16 stages for 8 layers" in report.refused[0].reason
    with pytest.raises(LayoutError):
        cut_stages([1.0] * 8, 16)


def test_samples_have_the_shape_that_the_kinds_are_about() -> None:
    moe = next(layer.ffn for layer in published().layers if isinstance(layer.ffn, MoESpec))
    assert (moe.num_experts, moe.width, published().vision.num_heads) == (896, 3072, 12)  # type: ignore[union-attr]
    assert math.gcd(896, 512) == 128
