"""What is planned for other families is what their ranks hold: weights, tied heads, biases, keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.nn import StateCache
from workbench.parallel import build_stage
from workbench.placement import Layout
from workbench.planner.memory import CacheNeed, cache_need
from workbench.planner.weights import read_weight_table
from workbench.spec import read_spec

FAMILIES = Path(__file__).resolve().parents[1] / "golden" / "families"


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("name", ["llama31-tied", "olmoe", "deepseek_v3-fp8", "kimi_linear", "gpt_oss"])
def test_planned_bytes_are_those_that_a_rank_allocates(name: str, layout: Layout) -> None:
    spec = read_spec(FAMILIES / name)
    table, need = read_weight_table(spec, "bf16"), CacheNeed(slots=3, max_tokens=21)
    for rank in range(layout.world_size):
        stage = layout.coords(rank).pp
        model = build_stage(spec, layout, rank)
        held = sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
        assert table.stage(layout, stage).total() == held
        layers = layout.stage_layers(spec.num_layers)[stage]
        cache = StateCache(spec, layers, num_slots=3, max_tokens=21, dtype=torch.bfloat16, tp_size=layout.tp)
        assert sum(cache_need(spec, layout, layers, need, 2).values()) == cache.num_bytes
