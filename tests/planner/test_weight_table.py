"""The planner's weights are the loader's weights, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner_samples import miniature, published

from workbench.base import LayoutError, num_bytes
from workbench.checkpoint import Checkpoint, k3_config, write_checkpoint
from workbench.loading import load_rank
from workbench.parallel import build_stage
from workbench.placement import Layout, owned_shards
from workbench.planner import VLLM, WORKBENCH, read_weight_table
from workbench.spec import count_model, parse_config

GIB = 1 << 30
LAYOUTS = [
    "tp1",
    "tp2",
    "tp4xep2",
    "tp2xep2",
    "pp3",
    "pp2xtp2xep2",
    "dp2xep2",
    "dp4xtp2xep8:all_to_all",
    "pp2xdp2xtp2xep4",
]


def held(layout: Layout, rank: int, precision: str) -> int:
    """Bytes of the parameters and buffers that the rank's real module has."""
    model = build_stage(miniature(), layout, rank, precision=precision)
    return sum(x.nbytes for x in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp4", "fp8", "int8", "int4"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_rank_holds_what_the_table_says(text: str, precision: str) -> None:
    layout = Layout.parse(text)
    table = read_weight_table(miniature(), precision)
    for rank in range(layout.world_size):
        stage = layout.coords(rank).pp
        assert table.stage(layout, stage).total() == held(layout, rank, precision), (text, rank)


def test_hand_made_stages_are_counted_as_cut() -> None:
    layout = Layout(pp=3, stages=(1, 5, 2))
    table = read_weight_table(miniature(), "bf16")
    for stage in range(3):
        assert table.stage(layout, stage).total() == held(layout, layout.rank_at(pp=stage), "bf16")


@pytest.mark.parametrize("precision", ["mxfp4", "int8"])
def test_the_table_is_what_a_loaded_rank_really_holds(tmp_path: Path, precision: str) -> None:
    config = k3_config(num_experts=16, top_k=4)
    write_checkpoint(tmp_path, config)
    layout = Layout(tp=2, ep=2)
    table = read_weight_table(parse_config(config), precision)
    model, _, stats = load_rank(Checkpoint.open(tmp_path), layout, 1, precision=precision)
    assert stats.resident_bytes == table.stage(layout, 0).total()
    assert stats.resident_bytes == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])


def test_published_bytes_come_out_whole() -> None:
    counts = count_model(published())
    table = read_weight_table(published(), "mxfp4")
    stored_not_used = 69 * 32 * 4  # A_log is stored for 128 heads, 96 of them are used
    assert table.total() == counts.weight_bytes - stored_not_used == 1_560_860_324_864 - stored_not_used
    assert table.stage(Layout(), 0)["routed_expert"] == 1_446_456_066_048


def test_roles_add_up_to_the_published_shards_of_a_rank() -> None:
    """In the precision of the files a rank holds exactly its published shards, A_log without its padding."""
    spec = miniature()
    layout = Layout(pp=2, dp=2, tp=2, ep=4)
    table = read_weight_table(spec, "mxfp4")
    for rank in (0, 3, 5):
        shards = sum(num_bytes(shard.tensor.dtype, shard.shape) for shard in owned_shards(spec, layout, rank))
        assert table.stage(layout, layout.coords(rank).pp).total() == shards


def test_a_matrix_that_would_be_cut_inside_a_group_is_refused_by_name() -> None:
    spec = parse_config(k3_config(sizes=None, expert_width=96, is_quantised=False, num_experts=8))
    table = read_weight_table(spec, "mxfp4")
    with pytest.raises(LayoutError, match=r"experts\.w2.*48 columns.*multiple of 32"):
        table.stage(Layout(tp=2), 0)


@pytest.mark.parametrize(
    ("text", "reported_gib"),
    [("tp16", 129.75), ("dp2xtp8", 135.7), ("pp2xtp8", 98.0)],
)
def test_another_engines_weights_come_out_as_its_users_report(text: str, reported_gib: float) -> None:
    """H200, per GPU, as its users report: padded experts and whole latent projections explain it."""
    layout = Layout.parse(text)
    table = read_weight_table(published(), "mxfp4", engine=VLLM)
    most = max(table.stage(layout, stage).total() for stage in range(layout.pp)) / GIB
    assert most == pytest.approx(reported_gib, rel=0.02)


def test_padding_is_what_makes_the_difference() -> None:
    layout = Layout(tp=16)
    own, other = (read_weight_table(published(), "mxfp4", engine=e).stage(layout, 0) for e in (WORKBENCH, VLLM))
    assert other["routed_expert"] * 3 == own["routed_expert"] * 4  # 192 rows become 256
    assert other["kda"] == own["kda"]
