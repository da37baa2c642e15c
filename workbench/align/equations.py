"""One layer of Kimi K3 with every step exchangeable: what a step would make of its inputs if computed otherwise.

A `LayerBench` reads the inputs of each step from a trace and computes the step's result in float64, so that steps do
not hand errors on. Everything that implementations get wrong is an attribute: weights after reading, epsilons, scales,
functions. As made, a bench computes the published equations (a test holds it to the reference model); a counter-test
changes one attribute and looks whether the result is what was observed.

T tokens, D model width, H heads, K experts per token. Names are those of traces, without "L3.".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.align.reference import L2_EPS, LATENT_NORM_EPS, ROUTER_EPS, normalise

__all__ = ["Facts", "LayerBench", "LayerKind"]

Weights = Callable[[str], Tensor]
LayerKind = str  # "kda" or "mla", "dense" or "moe"


@dataclass(frozen=True)
class Facts:
    """The figures of a config that a layer needs."""

    text: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.text["num_hidden_layers"])

    def mixer(self, layer_idx: int) -> LayerKind:
        return "kda" if layer_idx + 1 in self.text["linear_attn_config"]["kda_layers"] else "mla"

    def ffn(self, layer_idx: int) -> LayerKind:
        return "moe" if layer_idx >= self.text["first_k_dense_replace"] else "dense"

    @property
    def kda_heads(self) -> tuple[int, int]:
        return self.text["linear_attn_config"]["num_heads"], self.text["linear_attn_config"]["head_dim"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normalise(x, eps)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def unit_length(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def short_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """(T, C) and (C, K), the newest tap last."""
    size = taps.shape[-1]
    padded = torch.cat((x.new_zeros(size - 1, x.shape[-1]), x))
    return torch.stack([padded[j : j + len(x)] * taps[:, j] for j in range(size)]).sum(0)


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """State (H, key, value), one token (H, width) and its beta (H,): the next state and the output."""
    state = alpha.unsqueeze(-1) * state
    correction = beta.unsqueeze(-1) * (v - torch.einsum("hkv,hk->hv", state, k))
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    return state, torch.einsum("hkv,hk->hv", state, q)


def top_k(biased: Tensor, k: int) -> Tensor:
    return biased.topk(k, -1).indices.sort(-1).values


@dataclass
class LayerBench:
    """Layer `idx` of the model, over one sequence. `given` is a trace with the inputs; `read` the layer's weights by
    published name below the layer's prefix ("self_attn.q_proj.weight"); `chosen` the experts (T, K) and their weights
    that the observed side used.

    Attributes below `change` are what counter-tests exchange.
    """

    idx: int
    facts: Facts
    read: Weights
    given: Mapping[str, Tensor]
    chosen: tuple[Tensor, Tensor] | None = None
    layer: Callable[[int], Weights] | None = None  # the weights of another layer
    near: Tensor | float = 0.0  # experts whose scores lie closer than this may change places, for all tokens or (T,)

    weight: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # published name -> change
    eps: dict[str, float] = field(default_factory=dict)  # norm -> epsilon
    norm: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = field(default_factory=dict)
    result: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # name -> change of the result
    convolve: Callable[[Tensor, Tensor], Tensor] = short_convolution
    conv_act: Callable[[Tensor], Tensor] = silu
    unit: Callable[[Tensor], Tensor] = unit_length
    step: Callable[..., tuple[Tensor, Tensor]] = delta_step
    q_scale: float | None = None
    log_decay: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    beta: Callable[[Tensor], Tensor] = torch.sigmoid
    reset_every: int = 0  # tokens after which the state is lost
    gate: Callable[[Tensor], Tensor] = torch.sigmoid
    softmax_scale: float | None = None
    is_causal: bool = True
    rotate: Callable[[Tensor, int], Tensor] | None = None  # (T, H, width) -> the same, turned by position
    split_kv: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] | None = None
    activation: dict[str, Callable[[Tensor, Tensor], Tensor]] = field(
        default_factory=dict
    )  # "mlp", "shared", "experts"
    scores: Callable[[Tensor], Tensor] = torch.sigmoid
    logits_of: Callable[[Tensor, Tensor], Tensor] = lambda x, w: x @ w.T
    choose: Callable[[Tensor, int], Tensor] = top_k
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda scores, biased: scores  # what weights are taken from
    renormalises: bool = True
    routed_scale: float | None = None
    expert_of: Callable[[int, int], int] = lambda expert, num: expert
    has_latent_norm: bool = True
    residual_scale: float = 1.0
    mix_norm: Callable[[Tensor, float], Tensor] = normalise
    starts_block: Callable[[int, int], bool] = lambda layer, size: layer % size == 0
    sources: Callable[[list[Tensor]], list[Tensor]] = lambda sources: sources  # saved sums, then the running one
    mixes: Callable[[Tensor], Tensor] = lambda stacked: stacked  # what of the sources is mixed
    is_summed: Callable[[int, int], bool] = lambda expert, num: True  # whether an expert's output arrives

    # -- pieces ----------------------------------------------------------------------------------------------------

    def w(self, name: str) -> Tensor:
        values = self.read(name)
        change = self.weight.get(name)
        return values if change is None else change(values)

    def x(self, name: str) -> Tensor:
        """A given tensor of this layer. Raises KeyError where the trace does not hold it."""
        return self.given[f"L{self.idx}.{name}"].double()

    def before(self) -> Tensor:
        """The running sum that this layer adds to."""
        return (self.given["inputs_embeds"] if self.idx == 0 else self.given[f"L{self.idx - 1}.sum"]).double()

    def saved(self, num_layers_done: int) -> list[Tensor]:
        """Sums saved before the first so many layers, oldest first."""
        size = self.facts.text["attn_res_block_size"]
        starts = [layer for layer in range(num_layers_done) if self.starts_block(layer, size)]
        names = ["inputs_embeds" if layer == 0 else f"L{layer - 1}.sum" for layer in starts]
        return [self.given[name].double() for name in names]

    def normed(self, which: str, x: Tensor, weight: str, eps: float) -> Tensor:
        norm = self.norm.get(which, rms_norm)
        return norm(x, self.w(weight), self.eps.get(which, eps))

    def mix(self, which: str, sources: list[Tensor], prefix: str) -> Tensor:
        stacked = torch.stack(self.sources(sources))
        eps = self.eps.get(which, self.facts.text["rms_norm_eps"])
        scores = self.w(f"{prefix}_norm.weight") * self.mix_norm(stacked, eps) @ self.w(f"{prefix}_proj.weight")[0]
        shares = torch.softmax(self.residual_scale * scores, dim=0)
        return (shares.unsqueeze(-1) * self.mixes(stacked)).sum(0)

    def acted(self, where: str, gate: Tensor, up: Tensor) -> Tensor:
        if where in self.activation:
            return self.activation[where](gate, up)
        beta, linear = self.facts.text["activation_situ_beta"], self.facts.text["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear * torch.tanh(up / linear)

    def gated_ffn(self, where: str, x: Tensor, prefix: str) -> Tensor:
        gate, up = x @ self.w(f"{prefix}gate_proj.weight").T, x @ self.w(f"{prefix}up_proj.weight").T
        return self.acted(where, gate, up) @ self.w(f"{prefix}down_proj.weight").T

    # -- results ---------------------------------------------------------------------------------------------------

    def compute(self, name: str) -> Tensor | None:
        """What this layer makes of the given inputs under `name`; None where the trace lacks an input."""
        make = getattr(self, f"_{name}", None)
        if make is None:
            return None
        try:
            value: Tensor | None = make()
        except KeyError:
            return None
        change = self.result.get(name)
        return value if value is None or change is None else change(value)

    def names(self) -> tuple[str, ...]:
        """Results of this kind of layer, in the order of a forward pass."""
        is_kda, is_moe = self.facts.mixer(self.idx) == "kda", self.facts.ffn(self.idx) == "moe"
        mixer = (
            ("kda_conv", "kda_q", "kda_k", "kda_v", "kda_g", "kda_beta_logit", "kda_o", "kda_state", "kda_gated")
            if is_kda
            else ("mla_q", "latent", "mla_gated")
        )
        moe = ("topk_idx", "topk_w", "moe_latent_in", "moe_combined", "moe_routed_out", "moe_shared_out")
        return ("attn_in", *mixer, "attn_out", "mlp_in", *(moe if is_moe else ()), "ffn_out", "sum")

    def _attn_in(self) -> Tensor:
        sources = self.saved(self.idx)
        if not sources:
            return self.before()
        # A sum that was just saved before this layer has not yet restarted when this layer reads it.
        return self.mix("mixer_res", [*sources, self.before()], "self_attention_res")

    def _attended(self) -> Tensor:
        return self.normed("mixer_norm", self.x("attn_in"), "input_layernorm.weight", self.facts.text["rms_norm_eps"])

    def _conv_inputs(self, part: str) -> Tensor:
        return self._attended() @ self.w(f"self_attn.{part}_proj.weight").T

    def _kda_conv(self) -> Tensor:
        size = self.facts.text["linear_attn_config"]["short_conv_kernel_size"]
        inputs = [self._conv_inputs(part) for part in "qkv"]
        padded = [torch.cat((x.new_zeros(size, x.shape[-1]), x)) for x in inputs]
        return torch.stack([x[-size:].T for x in padded])

    def _convolved(self, part: str) -> Tensor:
        out = self.convolve(self._conv_inputs(part), self.w(f"self_attn.{part}_conv1d.weight")[:, 0])
        return self.conv_act(out).unflatten(-1, self.facts.kda_heads)

    def _kda_q(self) -> Tensor:
        return self._convolved("q")

    def _kda_k(self) -> Tensor:
        return self._convolved("k")

    def _kda_v(self) -> Tensor:
        return self._convolved("v")

    def _kda_g(self) -> Tensor:
        low = self._attended() @ self.w("self_attn.f_a_proj.weight").T
        return (low @ self.w("self_attn.f_b_proj.weight").T).unflatten(-1, self.facts.kda_heads)

    def _kda_beta_logit(self) -> Tensor:
        return self._attended() @ self.w("self_attn.b_proj.weight").T

    def _recurrence(self) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, value) and the last state (H, key, value)."""
        heads, width = self.facts.kda_heads
        scale = width**-0.5 if self.q_scale is None else self.q_scale
        q, k, v = self.unit(self.x("kda_q")) * scale, self.unit(self.x("kda_k")), self.x("kda_v")
        bias, rate = self.w("self_attn.dt_bias").view(heads, width), self.w("self_attn.A_log")[:heads]
        bound = self.facts.text["linear_attn_config"]["gate_lower_bound"]
        decay = bounded_decay if self.log_decay is None else self.log_decay
        alpha = torch.exp(decay(self.x("kda_g"), rate, bias, bound))
        beta = self.beta(self.x("kda_beta_logit"))
        state, outputs = v.new_zeros(heads, width, width), []
        for t in range(len(v)):
            if self.reset_every and t % self.reset_every == 0:
                state = torch.zeros_like(state)
            state, out = self.step(state, q[t], k[t], v[t], alpha[t], beta[t])
            outputs.append(out)
        return torch.stack(outputs), state

    def _kda_o(self) -> Tensor:
        return self._recurrence()[0]

    def _kda_state(self) -> Tensor:
        return self._recurrence()[1].transpose(-1, -2)

    def _kda_gated(self) -> Tensor:
        normed = self.normed("o_norm", self.x("kda_o"), "self_attn.o_norm.weight", self.facts.text["rms_norm_eps"])
        return normed.flatten(-2) * self.gate(self._attended() @ self.w("self_attn.g_proj.weight").T)

    def _attn_out(self) -> Tensor:
        gated = self.x("kda_gated" if self.facts.mixer(self.idx) == "kda" else "mla_gated")
        return gated @ self.w("self_attn.o_proj.weight").T

    def _mla_q(self) -> Tensor:
        low = self._attended() @ self.w("self_attn.q_a_proj.weight").T
        low = self.normed("q_a_norm", low, "self_attn.q_a_layernorm.weight", LATENT_NORM_EPS)
        return low @ self.w("self_attn.q_b_proj.weight").T

    def _latent(self) -> Tensor:
        rank, shared = self.facts.text["kv_lora_rank"], self.facts.text["qk_rope_head_dim"]
        both = self._attended() @ self.w("self_attn.kv_a_proj_with_mqa.weight").T
        latent, key = both.split((rank, shared), -1)
        latent = self.normed("kv_a_norm", latent, "self_attn.kv_a_layernorm.weight", LATENT_NORM_EPS)
        return torch.cat((latent, key), -1)

    def _mla_gated(self) -> Tensor:
        text = self.facts.text
        heads, rank, v_dim = text["num_attention_heads"], text["kv_lora_rank"], text["v_head_dim"]
        nope, shared = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        q = self.x("mla_q").unflatten(-1, (heads, nope + shared))
        latent, key = self.x("latent").split((rank, shared), -1)
        expanded = (latent @ self.w("self_attn.kv_b_proj.weight").T).unflatten(-1, (heads, nope + v_dim))
        k_nope, v = expanded.split((nope, v_dim), -1) if self.split_kv is None else self.split_kv(expanded, nope, v_dim)
        key = key.unsqueeze(1).expand(-1, heads, -1)
        if self.rotate is not None:
            q = torch.cat((q[..., :nope], self.rotate(q[..., nope:], shared)), -1)
            key = self.rotate(key, shared)
        k = torch.cat((k_nope, key), -1)
        scale = (nope + shared) ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = torch.einsum("qhd,khd->qhk", q, k) * scale
        if self.is_causal:
            future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1).unsqueeze(1)
            scores = scores.masked_fill(future, float("-inf"))
        out = torch.einsum("qhk,khd->qhd", torch.softmax(scores, -1), v)
        return out.flatten(-2) * self.gate(self._attended() @ self.w("self_attn.g_proj.weight").T)

    def _running(self) -> Tensor:
        """The sum after the mixer."""
        is_start = self.starts_block(self.idx, self.facts.text["attn_res_block_size"])
        return self.x("attn_out") if is_start else self.before() + self.x("attn_out")

    def _mlp_in(self) -> Tensor:
        return self.mix("ffn_res", [*self.saved(self.idx + 1), self._running()], "mlp_res")

    def _fed(self) -> Tensor:
        return self.normed(
            "ffn_norm", self.x("mlp_in"), "post_attention_layernorm.weight", self.facts.text["rms_norm_eps"]
        )

    def router_scores(self) -> tuple[Tensor, Tensor]:
        """(T, E) scores, and the same with the correction bias."""
        scores = self.scores(self.logits_of(self._fed(), self.w("block_sparse_moe.gate.weight")))
        return scores, scores + self.w("block_sparse_moe.gate.e_score_correction_bias")

    def _topk_idx(self) -> Tensor:
        biased = self.router_scores()[1]
        own = self.choose(biased, self.facts.text["num_experts_per_token"])
        seen = None if self.chosen is None else self.chosen[0]
        if seen is None or seen.shape != own.shape or bool(((seen < 0) | (seen >= biased.shape[-1])).any()):
            return own
        regret = biased.gather(-1, own).amin(-1) - biased.gather(-1, seen).amin(-1)
        return torch.where((regret.abs() < self.near).unsqueeze(-1), seen.sort(-1).values, own)

    def _topk_w(self) -> Tensor | None:
        if self.chosen is None:
            return None
        scores, biased = self.router_scores()
        weight = self.weigh(scores, biased).gather(-1, self.chosen[0])
        if self.facts.text["moe_renormalize"] and self.renormalises:
            weight = weight / (weight.sum(-1, keepdim=True) + ROUTER_EPS)
        return weight * (self.facts.text["routed_scaling_factor"] if self.routed_scale is None else self.routed_scale)

    def _moe_latent_in(self) -> Tensor:
        return self._fed() @ self.w("block_sparse_moe.routed_expert_down_proj.weight").T

    def _moe_combined(self) -> Tensor | None:
        if self.chosen is None:
            return None
        latent, (ids, weights) = self.x("moe_latent_in"), self.chosen
        combined = torch.zeros_like(latent)
        for expert in ids.unique().tolist():
            if not self.is_summed(expert, self.facts.text["num_experts"]):
                continue
            token, slot = (ids == expert).nonzero(as_tuple=True)
            combined[token] += weights[token, slot].unsqueeze(-1) * self.one_expert(expert, latent[token])
        return combined

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        """(n, L) -> (n, L). Changes of expert weights are named without the number: "experts.w1.weight"."""
        held = self.expert_of(expert, self.facts.text["num_experts"])
        w1, w2, w3 = (
            self.weight.get(f"experts.{part}.weight", lambda w: w)(
                self.read(f"block_sparse_moe.experts.{held}.{part}.weight")
            )
            for part in ("w1", "w2", "w3")
        )
        return self.acted("experts", x @ w1.T, x @ w3.T) @ w2.T

    def _moe_routed_out(self) -> Tensor:
        combined = self.x("moe_combined")
        if self.facts.text["latent_moe_use_norm"] and self.has_latent_norm:
            name = "block_sparse_moe.routed_expert_norm.weight"
            combined = self.normed("latent_norm", combined, name, self.facts.text["rms_norm_eps"])
        return combined @ self.w("block_sparse_moe.routed_expert_up_proj.weight").T

    def _moe_shared_out(self) -> Tensor:
        return self.gated_ffn("shared", self._fed(), "block_sparse_moe.shared_experts.")

    def _ffn_out(self) -> Tensor:
        if self.facts.ffn(self.idx) == "dense":
            return self.gated_ffn("mlp", self._fed(), "mlp.")
        return self.x("moe_routed_out") + self.x("moe_shared_out")

    def _sum(self) -> Tensor:
        return self._running() + self.x("ffn_out")


def bounded_decay(z: Tensor, a_log: Tensor, bias: Tensor, bound: float) -> Tensor:
    """(T, H, width) -> the log decay of each head and key channel, in (bound, 0)."""
    return bound * torch.sigmoid(torch.exp(a_log).unsqueeze(-1) * (z + bias))
