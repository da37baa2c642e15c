"""Mistakes planted in a small model, each with the layer and tensor where it first shows and the suspect that it is.

They are made on the modules of the fast model, by hand and without the code of the counter-tests.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import workbench.nn.kda
import workbench.nn.mla
from workbench.checkpoint import write_checkpoint
from workbench.checkpoint.synthetic_config import Sizes, k3_config
from workbench.nn.model import Model
from workbench.nn.norm import normalise

# KDA+dense, KDA+MoE, KDA+MoE, MLA+MoE, MLA+MoE; blocks of two layers. Square where a transposed matrix is to fit.
SIZES = Sizes(
    num_layers=5,
    full_attn_layers=(4, 5),
    residual_block=2,
    hidden_size=96,
    vocab_size=160,
    dense_width=160,
    kda_heads=4,
    kda_head_dim=16,
    mla_heads=4,
    q_rank=96,
    kv_rank=48,
    nope_dim=24,
    rope_dim=8,
    v_dim=16,
    num_experts=8,
    top_k=3,
    expert_width=64,
    latent_dim=64,
    vision_layers=1,
)
TOKENS = (17, 3, 99, 41, 150 - 3, 8, 64, 5, 23, 77, 101, 12, 50, 31)


def write_model(root: Path, seed: int = 0) -> Path:
    return write_checkpoint(root, k3_config(**SIZES), seed=seed)


@dataclass(frozen=True)
class Planted:
    """`tensors`: short names any of which may be the first guilty one. `cause`: how the suspect's name begins."""

    name: str
    layer: int | None
    tensors: tuple[str, ...]
    cause: str
    plant: Callable[[Model, Any], None]


PLANTED: list[Planted] = []


def planted(layer: int | None, tensors: str, cause: str) -> Callable[[Callable[[Model, Any], None]], None]:
    def register(plant: Callable[[Model, Any], None]) -> None:
        PLANTED.append(Planted(plant.__name__, layer, tuple(tensors.split()), cause, plant))

    return register


def change(parameter: Tensor, values: Tensor) -> None:
    assert parameter.shape == values.shape
    assert not torch.equal(parameter, values.to(parameter.dtype)), "the planted fault changes nothing"
    with torch.no_grad():
        parameter.copy_(values.clone())


def override(module: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(module, name, types.MethodType(function, module))


def replace_spec(module: Any, **values: Any) -> None:
    module.spec = dataclasses.replace(module.spec, **values)


# -- norms -------------------------------------------------------------------------------------------------------------


@planted(3, "mla_q", "norm_eps.q_a_norm")
def query_norm_epsilon(model: Model, patch: Any) -> None:
    model.layers["3"].mixer.q_a_norm.eps = 1e-5


@planted(4, "latent", "norm_eps.kv_a_norm")
def latent_norm_epsilon(model: Model, patch: Any) -> None:
    model.layers["4"].mixer.kv_a_norm.eps = 1e-5


@planted(1, "kda_conv kda_q", "norm_offset.mixer_norm")
def norm_weight_offset(model: Model, patch: Any) -> None:
    weight = model.layers["1"].mixer_norm.weight
    change(weight, 1 + weight)


@planted(2, "topk_idx topk_w moe_latent_in", "norm_mean.ffn_norm")
def layer_norm_for_rms_norm(model: Model, patch: Any) -> None:
    norm = model.layers["2"].ffn_norm
    override(norm, "forward", lambda self, x: self.weight * normalise(x - x.mean(-1, keepdim=True), self.eps))


@planted(2, "kda_conv kda_q", "norm_bf16.mixer_norm")
def variance_summed_in_bf16(model: Model, patch: Any) -> None:
    norm = model.layers["2"].mixer_norm

    def forward(self: Any, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[:-1], dtype=torch.bfloat16)
        for column in range(x.shape[-1]):
            square = x[..., column].bfloat16() * x[..., column].bfloat16()
            total = total + square
        scale = torch.rsqrt(total / x.shape[-1] + torch.tensor(self.eps, dtype=torch.bfloat16))
        return self.weight * (x * scale.to(x.dtype)[..., None])

    override(norm, "forward", forward)


@planted(3, "moe_routed_out", "norm_missing.latent_norm")
def latent_norm_missing(model: Model, patch: Any) -> None:
    model.layers["3"].ffn.latent_norm = torch.nn.Identity()


# -- linear attention --------------------------------------------------------------------------------------------------


@planted(2, "kda_o", "l2_eps_mean")
def epsilon_on_the_mean(model: Model, patch: Any) -> None:
    mixer = model.layers["2"].mixer
    replace_spec(mixer, l2_eps=mixer.spec.l2_eps * mixer.spec.head_dim)


@planted(0, "kda_o", "decay_bias_missing")
def decay_bias_missing(model: Model, patch: Any) -> None:
    bias = model.layers["0"].mixer.dt_bias
    change(bias, torch.zeros_like(bias))


@planted(1, "kda_o", "decay_softplus")
def decay_of_kimi_linear(model: Model, patch: Any) -> None:
    def log_decay(self: Any, z: Tensor) -> Tensor:
        z = self._heads(z + self.dt_bias)
        return -self.A_log.exp()[:, None] * F.softplus(z)

    override(model.layers["1"].mixer, "_log_decay", log_decay)


@planted(2, "kda_o", "decay_rate_not_exp")
def decay_rate_without_exp(model: Model, patch: Any) -> None:
    rate = model.layers["2"].mixer
    override(
        rate,
        "_log_decay",
        lambda self, z: self.spec.decay_bound * torch.sigmoid(self.A_log[:, None] * self._heads(z + self.dt_bias)),
    )


@planted(1, "kda_q", "conv_order")
def convolution_taps_reversed(model: Model, patch: Any) -> None:
    mixer = model.layers["1"].mixer
    for conv in (mixer.q_conv, mixer.k_conv, mixer.v_conv):
        change(conv.weight, conv.weight.flip(-1))


@planted(0, "kda_conv kda_q", "swapped.qk")
def queries_and_keys_exchanged(model: Model, patch: Any) -> None:
    mixer = model.layers["0"].mixer
    q, k = mixer.q_proj.weight.clone(), mixer.k_proj.weight.clone()
    change(mixer.q_proj.weight, k)
    change(mixer.k_proj.weight, q)


@planted(2, "kda_conv kda_v", "head_order.v")
def value_heads_interleaved(model: Model, patch: Any) -> None:
    weight = model.layers["2"].mixer.v_proj.weight
    change(weight, weight.view(4, 16, -1).transpose(0, 1).reshape(weight.shape))


@planted(1, "kda_gated", "gate_missing")
def gate_without_its_sigmoid_and_all(model: Model, patch: Any) -> None:
    norm = model.layers["1"].mixer.o_norm
    override(norm, "forward", lambda self, x, gate: self.weight * normalise(x, self.eps))


@planted(2, "kda_gated", "gate_silu")
def gate_through_silu(model: Model, patch: Any) -> None:
    norm = model.layers["2"].mixer.o_norm
    override(norm, "forward", lambda self, x, gate: self.weight * normalise(x, self.eps) * F.silu(gate))


def patch_delta_rule(patch: Any, layer: Any, wrong: Callable[..., Any]) -> None:
    """The delta rule of one mixer alone, through a hook that exchanges the function while that mixer runs."""
    right = workbench.nn.kda.delta_rule
    layer.mixer.register_forward_pre_hook(lambda *_: patch.setattr(workbench.nn.kda, "delta_rule", wrong))
    layer.mixer.register_forward_hook(lambda *_: patch.setattr(workbench.nn.kda, "delta_rule", right))


@planted(2, "kda_o", "state_lost")
def state_lost_between_chunks(model: Model, patch: Any) -> None:
    def wrong(q, k, v, g, beta, state, segments):  # type: ignore[no-untyped-def]
        outputs = []
        state = state[0]  # (H, value, key)
        for t in range(len(q)):
            state = torch.zeros_like(state) if t % 8 == 0 else state * g[t].exp()[:, None, :]
            error = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + error[:, :, None] * k[t][:, None, :]
            outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        return torch.stack(outputs), state[None]

    patch_delta_rule(patch, model.layers["2"], wrong)


@planted(1, "kda_o", "beta_sigmoid_missing")
def beta_without_its_sigmoid(model: Model, patch: Any) -> None:
    right = workbench.nn.kda.delta_rule

    def wrong(q, k, v, g, beta, state, segments):  # type: ignore[no-untyped-def]
        return right(q, k, v, g, torch.logit(beta.double()).to(beta.dtype), state, segments)

    patch_delta_rule(patch, model.layers["1"], wrong)


@planted(1, "kda_o", "q_scale_missing")
def queries_not_scaled(model: Model, patch: Any) -> None:
    right = workbench.nn.kda.delta_rule

    def wrong(q, k, v, g, beta, state, segments):  # type: ignore[no-untyped-def]
        return right(q * q.shape[-1] ** 0.5, k, v, g, beta, state, segments)

    patch_delta_rule(patch, model.layers["1"], wrong)


# -- latent attention --------------------------------------------------------------------------------------------------


@planted(3, "mla_gated", "softmax_scale.nope")
def softmax_scale_without_the_shared_part(model: Model, patch: Any) -> None:
    mixer = model.layers["3"].mixer
    factor = math.sqrt(mixer.spec.qk_dim / mixer.spec.nope_dim)
    right = mixer._attend
    mixer._attend = lambda q, latent, segments, cache: right(q * factor, latent, segments, cache)


@planted(4, "mla_gated", "softmax_scale.yarn40")
def softmax_scale_with_yarn(model: Model, patch: Any) -> None:
    mixer = model.layers["4"].mixer
    right = mixer._attend
    factor = (0.1 * math.log(40) + 1) ** 2
    mixer._attend = lambda q, latent, segments, cache: right(q * factor, latent, segments, cache)


@planted(3, "mla_gated", "gate_missing")
def no_output_gate(model: Model, patch: Any) -> None:
    model.layers["3"].mixer.g_proj.forward = lambda x: torch.full((len(x), 64), 40.0, dtype=x.dtype)


@planted(4, "mla_gated", "kv_order")
def values_before_keys(model: Model, patch: Any) -> None:
    weight = model.layers["4"].mixer.kv_b_proj.weight
    heads = weight.view(4, 24 + 16, -1)
    change(weight, torch.cat((heads[:, 16:], heads[:, :16]), 1).reshape(weight.shape))


@planted(3, "mla_gated", "rotary.pairs")
def rotary_positions(model: Model, patch: Any) -> None:
    mixer = model.layers["3"].mixer
    nope, width, rank = mixer.spec.nope_dim, mixer.spec.rope_dim, mixer.spec.kv_rank

    def turn(x: Tensor) -> Tensor:
        position = torch.arange(len(x), dtype=torch.float64)
        angle = position[:, None] / 10000.0 ** (torch.arange(0, width, 2).double() / width)
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        phase = torch.polar(torch.ones_like(angle), angle)
        phase = phase if x.ndim == 2 else phase[:, None]
        return torch.view_as_real(turned * phase).flatten(-2).to(x.dtype)

    right = workbench.nn.mla.naive_attention

    def wrong(q, latent, kv_b, spec):  # type: ignore[no-untyped-def]
        q = torch.cat((q[..., :nope], turn(q[..., nope:])), -1)
        return right(q, torch.cat((latent[:, :rank], turn(latent[:, rank:])), -1), kv_b, spec)

    mixer.register_forward_pre_hook(lambda *_: patch.setattr(workbench.nn.mla, "naive_attention", wrong))
    mixer.register_forward_hook(lambda *_: patch.setattr(workbench.nn.mla, "naive_attention", right))


@planted(4, "mla_q", "transposed.q_a_proj")
def square_matrix_transposed(model: Model, patch: Any) -> None:
    weight = model.layers["4"].mixer.q_a_proj.weight
    change(weight, weight.T)


@planted(3, "attn_out", "columns_swapped.o_proj")
def slices_of_two_ranks_exchanged(model: Model, patch: Any) -> None:
    weight = model.layers["3"].mixer.o_proj.weight
    change(weight, weight.roll(weight.shape[1] // 2, 1))


@planted(2, "attn_out", "columns_missing.o_proj")
def part_of_a_sum_missing(model: Model, patch: Any) -> None:
    weight = model.layers["2"].mixer.o_proj.weight
    half = weight.clone()
    half[:, weight.shape[1] // 2 :] = 0
    change(weight, half)


@planted(1, "attn_out", "reduced_twice.attn_out")
def reduced_twice(model: Model, patch: Any) -> None:
    weight = model.layers["1"].mixer.o_proj.weight
    change(weight, 2 * weight)


# -- feed-forward ------------------------------------------------------------------------------------------------------


@planted(0, "ffn_out", "gate_up_swapped.mlp")
def gate_and_up_exchanged(model: Model, patch: Any) -> None:
    ffn = model.layers["0"].ffn
    gate, up = ffn.gate_proj.weight.clone(), ffn.up_proj.weight.clone()
    change(ffn.gate_proj.weight, up)
    change(ffn.up_proj.weight, gate)


@planted(2, "moe_shared_out", "silu.shared")
def silu_in_the_shared_experts(model: Model, patch: Any) -> None:
    shared = model.layers["2"].ffn.shared
    shared.activation = dataclasses.replace(shared.activation, kind="silu")


@planted(4, "moe_combined", "silu.experts")
def silu_in_the_routed_experts(model: Model, patch: Any) -> None:
    experts = model.layers["4"].ffn.experts
    experts.activation = dataclasses.replace(experts.activation, kind="silu")


@planted(1, "topk_idx", "router.bias_bf16")
def correction_bias_in_bf16(model: Model, patch: Any) -> None:
    bias = model.layers["1"].ffn.router.bias
    change(bias, bias.bfloat16().float())


@planted(2, "topk_idx topk_w", "router.logits_bf16")
def router_logits_in_bf16(model: Model, patch: Any) -> None:
    router = model.layers["2"].ffn.router
    override(router, "scores", lambda self, x: torch.sigmoid(F.linear(x, self.weight).bfloat16().float()))


@planted(4, "topk_w", "router.bias_in_weights")
def bias_in_the_weights(model: Model, patch: Any) -> None:
    router = model.layers["4"].ffn.router

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        biased = self.scores(x) + self.bias
        ids = biased.topk(self.spec.top_k, -1).indices.sort(-1).values
        weights = biased.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    override(router, "forward", forward)


@planted(3, "topk_w", "router.not_renormalised")
def weights_not_renormalised(model: Model, patch: Any) -> None:
    replace_spec(model.layers["3"].ffn.router, renormalize=False)


@planted(1, "topk_w", "router.scale")
def routed_scale_of_another_model(model: Model, patch: Any) -> None:
    replace_spec(model.layers["1"].ffn.router, routed_scale=2.5)


@planted(2, "topk_idx topk_w", "router.softmax")
def softmax_for_sigmoid(model: Model, patch: Any) -> None:
    router = model.layers["2"].ffn.router
    override(router, "scores", lambda self, x: torch.softmax(F.linear(x, self.weight), -1))


@planted(3, "moe_combined", "expert_ids.shifted")
def expert_numbers_shifted(model: Model, patch: Any) -> None:
    experts = model.layers["3"].ffn.experts
    for store in (experts.w1, experts.w2, experts.w3):
        change(store.weight, store.weight.roll(-1, 0))


@planted(4, "moe_combined", "nibble_order.experts")
def nibbles_in_the_wrong_order(model: Model, patch: Any) -> None:
    experts = model.layers["4"].ffn.experts
    for store in (experts.w1, experts.w2, experts.w3):
        change(store.weight, store.weight.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@planted(2, "moe_combined", "scale_missing.experts")
def scales_not_applied(model: Model, patch: Any) -> None:
    from workbench.nn.quant import SCHEMES

    experts = model.layers["2"].ffn.experts
    for store in (experts.w1, experts.w2, experts.w3):
        parts = SCHEMES["mxfp4"].encode(store.weight)
        parts["weight_scale"] = torch.full_like(parts["weight_scale"], 127)
        change(store.weight, SCHEMES["mxfp4"].decode(parts, torch.float32))


@planted(1, "moe_combined", "experts_missing")
def one_expert_rank_missing(model: Model, patch: Any) -> None:
    weight = model.layers["1"].ffn.experts.w2.weight
    half = weight.clone()
    half[4:] = 0
    change(weight, half)


@planted(3, "ffn_out", "shared_missing")
def shared_experts_left_out(model: Model, patch: Any) -> None:
    moe = model.layers["3"].ffn
    right = moe.forward
    moe.forward = lambda x: right(x) - moe.shared(x)


def expert_values(model: Model, layer: str, change_one: Callable[[Tensor], Tensor], *parts: str) -> None:
    experts = model.layers[layer].ffn.experts
    for part in parts or ("w1", "w2", "w3"):
        store = getattr(experts, part)
        change(store.weight, change_one(store.weight))


@planted(4, "moe_combined", "transposed.experts.w1")
def square_experts_transposed(model: Model, patch: Any) -> None:
    expert_values(model, "4", lambda w: w.transpose(1, 2), "w1")


@planted(1, "moe_combined", "nibble_order_awq.experts")
def codes_in_interleaved_order(model: Model, patch: Any) -> None:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    expert_values(model, "1", lambda w: w.view(*w.shape[:2], -1, 8)[..., order].reshape(w.shape))


@planted(3, "moe_combined", "scale_linear.experts")
def exponent_bytes_as_numbers(model: Model, patch: Any) -> None:
    from workbench.nn.quant import SCHEMES

    def linear(weight: Tensor) -> Tensor:
        parts = SCHEMES["mxfp4"].encode(weight)
        byte = parts["weight_scale"].float().repeat_interleave(32, -1)
        return weight / 2 ** (byte - 127) * byte

    expert_values(model, "3", linear)


@planted(4, "moe_combined", "zero.experts.w2")
def experts_never_loaded(model: Model, patch: Any) -> None:
    expert_values(model, "4", torch.zeros_like, "w2")


@planted(1, "moe_shared_out", "up_is_gate.shared")
def a_buffer_used_twice(model: Model, patch: Any) -> None:
    shared = model.layers["1"].ffn.shared
    change(shared.up_proj.weight, shared.gate_proj.weight)


@planted(2, "kda_conv kda_k", "fp8_scale_missing.k_proj")
def fp8_without_its_scale(model: Model, patch: Any) -> None:
    weight = model.layers["2"].mixer.k_proj.weight
    change(weight, weight / weight.abs().amax(1, keepdim=True) * 448)


@planted(2, "kda_o", "not_finite")
def a_row_of_nan(model: Model, patch: Any) -> None:
    right = workbench.nn.kda.delta_rule

    def wrong(q, k, v, g, beta, state, segments):  # type: ignore[no-untyped-def]
        outputs, state = right(q, k, v, g, beta, state, segments)
        outputs[-1] = torch.nan
        return outputs, state

    patch_delta_rule(patch, model.layers["2"], wrong)


# -- residual, ends ----------------------------------------------------------------------------------------------------


@planted(2, "mlp_in", "residual.block_flipped")
def block_not_restarted(model: Model, patch: Any) -> None:
    model.layers["2"].starts_block = False


@planted(3, "mlp_in", "residual.block_flipped")
def block_starts_one_layer_late(model: Model, patch: Any) -> None:
    model.layers["3"].starts_block = True


@planted(4, "attn_in", "residual.newest_overwritten")
def saved_sum_overwritten(model: Model, patch: Any) -> None:
    mixer = model.layers["4"].mixer_res
    right = mixer.forward
    mixer.forward = lambda sources: right((*sources[:-2], sources[-1], sources[-1]))


@planted(3, "mlp_in", "residual.scaled")
def residual_scores_divided(model: Model, patch: Any) -> None:
    weight = model.layers["3"].ffn_res.proj.weight
    change(weight, weight / 96**0.5)


@planted(2, "kda_conv kda_q", "layer_off_by_one.self_attn")
def mixer_of_the_layer_before(model: Model, patch: Any) -> None:
    own, other = model.layers["2"].mixer, model.layers["1"].mixer
    for name, parameter in own.named_parameters():
        change(parameter, other.get_parameter(name))


@planted(None, "final_hidden", "norm_eps.final_norm")
def last_norm_epsilon(model: Model, patch: Any) -> None:
    model.final_norm.eps = 1e-8


@planted(None, "logits", "tied.head")
def head_tied_to_the_embedding(model: Model, patch: Any) -> None:
    change(model.head.weight, model.embed.weight)


@planted(None, "inputs_embeds", "rows_swapped.embed")
def vocabulary_halves_exchanged(model: Model, patch: Any) -> None:
    weight = model.embed.weight
    change(weight, weight.roll(len(weight) // 2, 0))
