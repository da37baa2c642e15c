"""Every family under a layout: the pieces of all ranks together are each tensor, whole, and nothing but it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from family_configs import CONFIGS, config_of

from workbench.base import LayoutError
from workbench.placement import Layout, check_layout, owned_shards, rule_for
from workbench.spec import ModelSpec, parse_config, published_tensors

# Sizes that two ranks divide, where the small config's own do not.
CHANGES = {
    "kimi_linear": {"num_attention_heads": 6, "num_experts": 12},
    "mixtral": {"num_local_experts": 8, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "llama 3.1": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "llama4": {"num_local_experts": 8, "num_key_value_heads": 2},
    "gpt_oss": {"num_local_experts": 6},
    "kimi_k2 wrapped": {"moe_intermediate_size": 64},
}


def even(name: str) -> ModelSpec:
    config = config_of(name, vocab_size=320, **CHANGES.get(name, {}))
    if name == "kimi_linear":
        config["linear_attn_config"]["num_heads"] = 4
    return parse_config(config)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "fp8" not in name])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2), Layout(pp=2, tp=2)], ids=str)
def test_pieces_of_all_ranks_are_the_whole_model_and_nothing_else(name: str, layout: Layout) -> None:
    spec = even(name)
    check_layout(spec, layout)
    held: dict[str, np.ndarray] = {}
    whole = {tensor.name: tensor for tensor in published_tensors(spec)}
    for rank in range(layout.world_size):
        for shard in owned_shards(spec, layout, rank):
            counter = held.setdefault(shard.tensor.name, np.zeros(shard.tensor.shape, np.int8))
            for place in product(*shard.ranges):
                counter[tuple(slice(start, stop) for start, stop in place)] += 1
    assert held.keys() == whole.keys()
    for tensor_name, counter in held.items():
        assert counter.min() >= 1, f"{tensor_name} is not held whole"
        if counter.max() > 1:  # held more than once: then by every rank of the stage alike, or by sharing ranks
            assert counter.min() == counter.max(), f"{tensor_name} is held unevenly"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_a_rule(name: str) -> None:
    spec = parse_config(CONFIGS[name])
    for tensor in published_tensors(spec):
        for param in (tensor.param, *tensor.also_fills):
            rule_for(spec, Layout(tp=2), param)


def test_gate_and_up_of_a_fused_expert_stay_together() -> None:
    spec = even("qwen3_5_moe")
    layout = Layout(tp=2)
    for rank in range(2):
        shard = next(s for s in owned_shards(spec, layout, rank) if s.tensor.name.endswith("experts.gate_up_proj"))
        assert shard.ranges[0] == ((0, 10),)
        assert shard.ranges[1] == ((11 * rank, 11 * rank + 11), (22 + 11 * rank, 22 + 11 * rank + 11))
    oss = even("gpt_oss")
    shard = next(s for s in owned_shards(oss, layout, 1) if s.tensor.name.endswith("experts.gate_up_proj"))
    assert shard.ranges == (((0, 6),), ((0, 64),), ((96, 192),))  # turns of gate and up, stored transposed


def test_packed_projections_of_a_delta_net_are_cut_part_by_part() -> None:
    spec = even("qwen3_5_moe")
    shard = next(s for s in owned_shards(spec, Layout(tp=2), 1) if s.tensor.name.endswith("in_proj_qkv.weight"))
    assert shard.ranges[0] == ((10, 20), (30, 40), (40 + 42, 40 + 84))


def test_groups_and_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="key heads"):
        check_layout(parse_config(config_of("qwen3_5_moe", vocab_size=276, linear_num_key_heads=1)), Layout(tp=2))
    with pytest.raises(LayoutError, match="output groups"):
        check_layout(parse_config(config_of("deepseek_v4", vocab_size=318, o_groups=3)), Layout(tp=2))
