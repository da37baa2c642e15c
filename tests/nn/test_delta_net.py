"""The gated delta net against its formula, one token at a time in float64, and cut into chunks, steps and ranks."""

from __future__ import annotations

import pytest
import torch
from nn_tiny import assert_near, batch_of, fill
from torch import Tensor
from torch.nn import functional as F

from workbench.nn import Precision, Segments, SingleRank, StateCache, TokenBatch
from workbench.nn.delta_net import DeltaNet
from workbench.placement import Layout
from workbench.planner.memory import CacheNeed, cache_need
from workbench.spec import GatedDeltaSpec, parse_config

DIM, SPEC = 18, GatedDeltaSpec(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=5, conv_size=4, norm_eps=1e-5)
FLOAT64 = Precision("fp32", torch.float64)


@pytest.fixture
def block() -> DeltaNet:
    made = DeltaNet(SPEC, DIM, 0, FLOAT64)
    fill(made)
    return made.requires_grad_(False)


def draw(num_tokens: int, seed: int = 3) -> Tensor:
    return torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(block: DeltaNet, x: Tensor) -> Tensor:
    """The formula of the module's first lines, token by token and head by head."""
    mixed, taps = x @ block.qkv_proj.weight.T, block.conv.weight[:, 0].double()
    state = torch.zeros(6, 8, 5, dtype=torch.float64)  # (head, key, value), as the paper writes it
    out = []
    for t in range(len(x)):
        window = [mixed[t - 3 + i] if t - 3 + i >= 0 else torch.zeros_like(mixed[0]) for i in range(4)]
        row = F.silu(sum(taps[:, i] * window[i] for i in range(4)))
        q, k, v = row[:16].view(2, 8), row[16:32].view(2, 8), row[32:].view(6, 5)
        decay = (-block.A_log.double().exp() * F.softplus(x[t] @ block.a_proj.weight.T + block.dt_bias)).exp()
        beta, gate = torch.sigmoid(x[t] @ block.b_proj.weight.T), (x[t] @ block.z_proj.weight.T).view(6, 5)
        heads = []
        for h in range(6):
            own_q, own_k = (y[h // 3] / (y[h // 3].square().sum() + 1e-6).sqrt() for y in (q, k))
            state[h] = state[h] * decay[h]
            state[h] += beta[h] * torch.outer(own_k, v[h] - state[h].T @ own_k)
            answer = state[h].T @ own_q * 8**-0.5
            normed = answer / (answer.square().mean() + 1e-5).sqrt() * block.o_norm.weight
            heads.append(normed * F.silu(gate[h]))
        out.append(torch.cat(heads) @ block.o_proj.weight.T)
    return torch.stack(out)


def new_cache(num_slots: int = 3, tp_size: int = 1) -> StateCache:
    spec = parse_config(QWEN)
    return StateCache(spec, [0], num_slots=num_slots, max_tokens=60, dtype=torch.float64, tp_size=tp_size)


QWEN = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "eos_token_id": 1, "head_dim": 12,
    "hidden_act": "silu", "hidden_size": DIM, "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_value_head_dim": 5, "max_position_embeddings": 512, "moe_intermediate_size": 8, "num_attention_heads": 4,
    "num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_parameters": {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5, "rope_theta": 10000},
    "shared_expert_intermediate_size": 10, "vocab_size": 46,
}  # fmt: skip


def test_whole_sequences_side_by_side_equal_the_formula(block: DeltaNet) -> None:
    lengths = (19, 1, 40)
    x = draw(sum(lengths))
    found = block(x, Segments(TokenBatch.whole([[0] * n for n in lengths])), None)
    assert_near(found, torch.cat([reference(block, part) for part in x.split(lengths)]), 1e-10)


def test_chunks_and_steps_from_a_cache_equal_the_whole(block: DeltaNet) -> None:
    x, y, cache = draw(21), draw(4, seed=4), new_cache()
    for values in cache.tensors:
        values.fill_(float("nan"))  # a fresh sequence reads nothing of what was there
    first = block(torch.cat([x[:17], y[:1]]), Segments(batch_of([(2, 0, [0] * 17), (0, 0, [0])])), cache)
    second = block(torch.cat([x[17:20], y[1:2]]), Segments(batch_of([(2, 17, [0] * 3), (0, 1, [0])])), cache)
    third = block(torch.cat([y[2:3], x[20:]]), Segments(batch_of([(0, 2, [0]), (2, 20, [0])])), cache)
    assert_near(torch.cat([first[:17], second[:3], third[1:]]), reference(block, x), 1e-10)
    assert_near(torch.cat([first[17:], second[3:], third[:1]]), reference(block, y[:3]), 1e-10)


def test_tentative_tokens_move_the_state_only_once_they_came_true(block: DeltaNet) -> None:
    x, cache = draw(12), new_cache()
    block(x[:6], Segments(batch_of([(1, 0, [0] * 6)])), cache)
    was = cache.state[0][1].clone()
    batch = batch_of([(1, 6, [0] * 4)])
    guesses = TokenBatch(
        token_ids=batch.token_ids, lengths=(4,), starts=(6,), slots=(1,), logit_rows=batch.logit_rows, tentative=(0,)
    )
    block(torch.cat([x[6:8], draw(2, seed=9)]), Segments(guesses), cache)
    assert torch.equal(cache.state[0][1], was)
    cache.settle({1: 8})  # two of four were right
    assert_near(block(x[8:], Segments(batch_of([(1, 8, [0] * 4)])), cache), reference(block, x)[8:], 1e-10)


def test_snapshots_keep_and_restore_the_state(block: DeltaNet) -> None:
    x, cache = draw(9), new_cache()
    block(x[:7], Segments(batch_of([(0, 0, [0] * 7)])), cache)
    snapshot = cache.keep(0)
    block(draw(1, seed=8), Segments(batch_of([(0, 7, [0])])), cache)
    cache.restore(2, snapshot)
    assert_near(block(x[7:], Segments(batch_of([(2, 7, [0, 0])])), cache), reference(block, x)[7:], 1e-10)


def test_the_shares_of_two_ranks_add_up(block: DeltaNet) -> None:
    x, segments, total = draw(20), Segments(TokenBatch.whole([[0] * 20])), torch.zeros(20, DIM, dtype=torch.float64)
    rows = {"z_proj": 15, "a_proj": 3, "b_proj": 3}
    for rank in range(2):
        half = DeltaNet(SPEC, DIM, 0, FLOAT64).requires_grad_(False)
        for name, count in rows.items():
            own = getattr(block, name).weight[rank * count : (rank + 1) * count]
            getattr(half, name).narrow_(tuple(own.shape))
            getattr(half, name).write(own)
        q, k, v = (y.chunk(2)[rank] for y in block.qkv_proj.weight.split([16, 16, 30]))
        half.qkv_proj.narrow_((31, DIM))
        half.qkv_proj.write(torch.cat([q, k, v]))
        half.conv.weight.data = torch.cat([y.chunk(2)[rank] for y in block.conv.weight.split([16, 16, 30])])
        for name in ("A_log", "dt_bias"):
            getattr(half, name).data = getattr(block, name).data.chunk(2)[rank].clone()
        half.o_norm.weight.data = block.o_norm.weight.data
        half.o_proj.narrow_((DIM, 15))
        half.o_proj.write(block.o_proj.weight[:, rank * 15 : (rank + 1) * 15])
        half.tp = SingleRank()
        total += half(x, segments, new_cache(tp_size=2))
    assert_near(total, reference(block, x), 1e-10)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_planner_counts_the_bytes_that_the_cache_takes(tp: int) -> None:
    need = CacheNeed(slots=3, max_tokens=60)
    counted = cache_need(parse_config(QWEN), Layout(tp=tp), range(1), need, itemsize=2)
    spec = parse_config(QWEN)
    held = StateCache(spec, [0], num_slots=3, max_tokens=60, dtype=torch.bfloat16, tp_size=tp)
    assert sum(counted.values()) == held.num_bytes
