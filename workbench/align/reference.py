"""Kimi K3 from its equations: an independent second opinion, slow and obvious.

Written from the published equations alone and sharing no code with `workbench.nn`: own weight reading, own config
reading, token-by-token recurrence, every expert by itself, naive attention. Weights are read by their published names,
one tensor at a time, so that a checkpoint of any size passes through the memory of one tensor (activations and the
recorded trace come on top). Default precision is float64, where rounding no longer matters and a difference to another
implementation is that implementation's own.

T tokens (sequences packed one behind another), D model width, H heads, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.align.reference_vision import ReferenceImage, reference_vision
from workbench.align.reference_weights import PublishedWeights, read_reference_config
from workbench.align.rounding import Round, RowRounding
from workbench.base import RequestError

__all__ = ["ReferencePrompt", "Take", "Trace", "choices_of", "reference_traces"]

Trace = dict[str, Tensor]
Read = Callable[[str], Tensor]  # a published tensor below some prefix -> its values

LATENT_NORM_EPS = 1e-6  # norms of the query and key/value latents; all other text norms use rms_norm_eps
L2_EPS = 1e-6  # added to the SUM of squares
ROUTER_EPS = 1e-20


@dataclass(frozen=True, kw_only=True)
class ReferencePrompt:
    """Token ids, and the pictures that replace the placeholder tokens among them, in order.

    A picture may stand as one placeholder (the sequence then grows) or as one placeholder per feature row.
    `bf16_grid`: None computes exactly; else results are rounded to bf16 on this grid (see `rounding.py`) wherever the
    published network, run in bf16, rounds them.
    """

    token_ids: tuple[int, ...]
    images: tuple[ReferenceImage, ...] = ()
    bf16_grid: float | None = None


# (number of the prompt, name, tensor) -> what the prompt's trace holds under that name; None: nothing.
Take = Callable[[int, str, Tensor], Tensor | None]


@dataclass
class _Recorder:
    """Collects packed per-token tensors and per-sequence states, and hands out one trace per sequence.

    `followed`: for each sequence the tensors that take the place of the own ones once these are recorded.
    """

    spans: list[slice]
    take: Take
    followed: Sequence[Mapping[str, Tensor]]
    round: Round
    traces: list[Trace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.traces = [{} for _ in self.spans]

    def state(self, name: str, sequence_idx: int, value: Tensor) -> None:
        taken = self.take(sequence_idx, name, value)
        if taken is not None:
            self.traces[sequence_idx][name] = taken

    def tokens(self, name: str, packed: Tensor) -> Tensor:
        """Record a tensor whose dim 0 is the packed tokens, and return what the computation goes on with: this tensor,
        or for sequences that follow another implementation its tensor, where it is one of the same shape and finite."""
        used = packed
        for n, (span, followed) in enumerate(zip(self.spans, self.followed, strict=True)):
            self.state(name, n, packed[span])
            other = followed.get(name)
            if other is not None and other.shape == packed[span].shape and bool(other.isfinite().all()):
                used = packed.clone() if used is packed else used
                used[span] = other.to(packed)
        return used

    def choose(self, layer_idx: int, own: Tensor, biased: Tensor) -> Tensor:
        """(T, K) experts to use: `own`, or those of the implementation that a sequence follows. Records by how much
        these score worse. `biased` (T, E) are the scores that choose."""
        used, name = own.clone(), f"L{layer_idx}."
        for n, (span, followed) in enumerate(zip(self.spans, self.followed, strict=True)):
            self.state(f"{name}topk_idx", n, own[span])
            if (other := followed.get(f"{name}topk_idx")) is not None:
                used[span], regret = _follow(own[span], other.cpu().long(), biased[span])
                self.state(f"{name}route_regret", n, regret)
        return used


def choices_of(trace: Mapping[str, Tensor]) -> Trace:
    """The chosen experts alone: what `reference_traces` follows so that the same experts are computed."""
    return {name: value for name, value in trace.items() if name.endswith(".topk_idx")}


def _keep_all(name: str) -> bool:
    return True


@torch.no_grad()
def reference_traces(
    root: Path | str,
    prompts: Sequence[ReferencePrompt],
    *,
    dtype: torch.dtype = torch.float64,
    keep: Callable[[str], bool] = _keep_all,
    take: Take | None = None,
    follow: Sequence[Mapping[str, Tensor]] | None = None,
    held: Callable[[str, Tensor], Tensor] | None = None,
) -> list[Trace]:
    """What the model in folder `root` computes on each prompt, as one trace per prompt, in `dtype` on the CPU.

    Names: `inputs_embeds`; per layer i `L{i}.attn_in`, `.attn_out`, `.mlp_in`, `.ffn_out`, `.sum`; KDA `.kda_state`
    (H, value, key) after the last token, `.kda_conv` (3, channels, kernel) last inputs, `.kda_q/k/v/g/o` (T, H, head),
    `.kda_beta_logit` (T, H), `.kda_gated`; MLA `.latent` (T, rank + shared key), `.mla_q`, `.mla_gated`; MoE
    `.router_scores` (T, E), `.topk_idx` (T, K) ascending, `.topk_w`, `.route_margin` (T,), `.moe_latent_in`,
    `.moe_combined`, `.moe_routed_out`, `.moe_shared_out`; `blocks` (T, saved, D), `final_mix`, `final_hidden`,
    `logits` (T, vocabulary); per picture n `image{n}.patch_embed`, `.block{b}`, `.encoder_out`, `.tower`, `.projector`.
    `keep(name)` chooses what is recorded (memory grows with tokens times layers); `take(prompt, name, tensor)`, where
    given, says what of it the trace holds, prompt by prompt in their order.

    `follow` holds for each prompt tensors of another implementation's trace. Once the own tensor of that name is
    recorded, the other takes its place in all that comes after. With `topk_idx` alone (`choices_of`), a token that
    rounding tipped to another expert stays comparable; with a whole trace, every tensor is computed from the other's
    inputs, and differs by what one step does. States are recorded, not followed. `topk_idx` still records the own
    choice, and `route_regret` (T,) by how much its last expert outscores the lowest followed one (0 where the choices
    agree, infinity for a choice that is none). `held(name, values)` gives the weights that are computed with, where
    those are not the published ones.

    Raises CheckpointError for a missing tensor, RequestError for placeholders that do not match the pictures.
    """
    config, text, vision = read_reference_config(root)
    with PublishedWeights(root, dtype, change=held) as weights:
        rows, image_traces = [], []
        for prompt in prompts:
            images = [reference_vision(weights, config, vision, x, bf16_grid=prompt.bf16_grid) for x in prompt.images]
            rows.append(_embed(weights, config, prompt, [image["projector"] for image in images]))
            image_traces.append(images)
        stops = torch.tensor([len(r) for r in rows]).cumsum(0).tolist()
        spans = [slice(stop - len(r), stop) for r, stop in zip(rows, stops, strict=True)]
        rounding = RowRounding([len(r) for r in rows], [prompt.bf16_grid for prompt in prompts], dtype)
        followed = [{}] * len(prompts) if follow is None else follow

        def take_kept(prompt_idx: int, name: str, value: Tensor) -> Tensor | None:
            if not keep(name):
                return None
            return value.clone() if take is None else take(prompt_idx, name, value)

        recorder = _Recorder(spans=spans, take=take_kept, followed=followed, round=rounding)
        for prompt_idx, images in enumerate(image_traces):
            for n, image in enumerate(images):
                for name, value in image.items():
                    recorder.state(f"image{n}.{name}", prompt_idx, value)
        _decoder(weights, text, recorder.tokens("inputs_embeds", torch.cat(rows)), recorder)
    return recorder.traces


def _embed(
    weights: PublishedWeights, config: dict[str, Any], prompt: ReferencePrompt, features: list[Tensor]
) -> Tensor:
    """(T, D) embeddings , placeholder runs overwritten by the picture rows, pad tokens zeroed beside pictures."""
    ids = list(prompt.token_ids)
    if not ids:
        raise RequestError("a prompt needs at least one token")
    media, pad = config["media_placeholder_token_id"], config["pad_token_id"]
    table = weights.raw("language_model.model.embed_tokens.weight")
    num_rows = sum(len(f) for f in features)
    if features and ids.count(media) == len(features) != num_rows:
        lengths = iter(len(f) for f in features)
        ids = [x for token in ids for x in ([token] * next(lengths) if token == media else [token])]
    if ids.count(media) != num_rows and (features or media in ids):
        raise RequestError(
            "placeholders and picture rows do not match",
            found=f"{ids.count(media)} placeholders",
            expected=f"{len(features)} (one per picture) or {num_rows} (one per row)",
        )
    embedded = table[torch.tensor(ids, dtype=torch.long)].to(weights.dtype)
    if features:
        embedded[torch.tensor(ids) == pad] = 0.0
        embedded[torch.tensor(ids) == media] = torch.cat(features)
    return embedded


def _decoder(weights: PublishedWeights, text: dict[str, Any], embedded: Tensor, recorder: _Recorder) -> None:
    """All layers over the packed tokens. `saved` are the block sums, `p` the running sum that restarts with a block."""
    eps, block = text["rms_norm_eps"], text["attn_res_block_size"]
    kda_positions = set(text["linear_attn_config"]["kda_layers"])  # counted from 1
    r = recorder.round
    saved: list[Tensor] = []
    p: Tensor | None = embedded
    for i in range(text["num_hidden_layers"]):
        prefix = f"language_model.model.layers.{i}."

        def read(name: str, prefix: str = prefix) -> Tensor:
            return weights(prefix + name)

        def record(name: str, value: Tensor, i: int = i) -> Tensor:
            return recorder.tokens(f"L{i}.{name}", value)

        assert p is not None
        if saved:
            h = mix(
                [*saved, p], read("self_attention_res_norm.weight"), read("self_attention_res_proj.weight")[0], eps, r
            )
        else:
            h = p
        h = record("attn_in", h)
        if i % block == 0:
            saved.append(p)
            p = None
        x = rms_norm(h, read("input_layernorm.weight"), eps, r)
        mixer = kda if i + 1 in kda_positions else mla
        attended = record("attn_out", mixer(read, text, x, recorder, i))
        p = attended if p is None else r(p + attended)
        h = mix([*saved, p], read("mlp_res_norm.weight"), read("mlp_res_proj.weight")[0], eps, r)
        h = record("mlp_in", h)
        x = rms_norm(h, read("post_attention_layernorm.weight"), eps, r)
        is_moe = i >= text["first_k_dense_replace"]
        fed = latent_moe(read, text, x, recorder, i) if is_moe else situ_ffn(read, text, "mlp.", x, r)
        p = r(p + record("ffn_out", fed))
        p = record("sum", p)
    assert p is not None
    final = "language_model.model."
    recorder.tokens("blocks", torch.stack(saved, dim=1))
    mixed = mix(
        [*saved, p],
        weights(f"{final}output_attn_res_norm.weight"),
        weights(f"{final}output_attn_res_proj.weight")[0],
        eps,
        r,
    )
    mixed = recorder.tokens("final_mix", mixed)
    hidden = recorder.tokens("final_hidden", rms_norm(mixed, weights(f"{final}norm.weight"), eps, r))
    recorder.tokens("logits", r(hidden @ weights("language_model.lm_head.weight").T))


def normalise(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, r: Round) -> Tensor:
    return r(weight * r(normalise(x, eps)))


def mix(sources: list[Tensor], norm: Tensor, proj: Tensor, eps: float, r: Round) -> Tensor:
    """Softmax mix of raw source vectors, each scored by its normalised self: n tensors (T, D) -> (T, D)."""
    stacked = torch.stack(sources)
    scores = norm * normalise(stacked, eps) @ proj
    return r((torch.softmax(scores, dim=0).unsqueeze(-1) * stacked).sum(0))


def situ(gate: Tensor, up: Tensor, text: dict[str, Any]) -> Tensor:
    beta, linear_beta = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def situ_ffn(read: Read, text: dict[str, Any], prefix: str, x: Tensor, r: Round) -> Tensor:
    gate, up = r(x @ read(f"{prefix}gate_proj.weight").T), r(x @ read(f"{prefix}up_proj.weight").T)
    return r(r(situ(gate, up, text)) @ read(f"{prefix}down_proj.weight").T)


def latent_moe(read: Read, text: dict[str, Any], x: Tensor, recorder: _Recorder, layer_idx: int) -> Tensor:
    """Sigmoid router on the full width, experts at their own width, a norm over their weighted sum, shared experts.
    Router scores and weights stay wide under rounding, and so does the sum over experts until it is complete."""
    moe, top_k, r = "block_sparse_moe.", text["num_experts_per_token"], recorder.round

    def record(name: str, value: Tensor) -> Tensor:
        return recorder.tokens(f"L{layer_idx}.{name}", value)

    scores = record("router_scores", torch.sigmoid(x @ read(f"{moe}gate.weight").T))
    biased = scores + read(f"{moe}gate.e_score_correction_bias")
    ranked = biased.sort(dim=-1, descending=True)
    runner_up = ranked.values[:, top_k] if biased.shape[-1] > top_k else torch.full_like(biased[:, 0], float("-inf"))
    record("route_margin", ranked.values[:, top_k - 1] - runner_up)
    chosen = recorder.choose(layer_idx, ranked.indices[:, :top_k].sort(dim=-1).values, biased)
    weight = scores.gather(-1, chosen)  # the bias chooses, it does not weigh
    if text["moe_renormalize"]:
        weight = weight / (weight.sum(-1, keepdim=True) + ROUTER_EPS)
    weight = record("topk_w", weight * text["routed_scaling_factor"])
    latent = record("moe_latent_in", r(x @ read(f"{moe}routed_expert_down_proj.weight").T))
    combined = torch.zeros_like(latent)
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        name, t = f"{moe}experts.{expert}.", latent[token]
        gate, up = r(t @ read(f"{name}w1.weight").T, token), r(t @ read(f"{name}w3.weight").T, token)
        y = r(r(situ(gate, up, text), token) @ read(f"{name}w2.weight").T, token)
        combined[token] += weight[token, slot].unsqueeze(-1) * y
    combined = record("moe_combined", r(combined))
    if text["latent_moe_use_norm"]:
        combined = rms_norm(combined, read(f"{moe}routed_expert_norm.weight"), text["rms_norm_eps"], r)
    routed = record("moe_routed_out", r(combined @ read(f"{moe}routed_expert_up_proj.weight").T))
    return r(routed + record("moe_shared_out", situ_ffn(read, text, f"{moe}shared_experts.", x, r)))


def _follow(chosen: Tensor, followed: Tensor, biased: Tensor) -> tuple[Tensor, Tensor]:
    """Experts to use (T, K) ascending, and how much worse than the own choice they score (T,)."""
    followed = followed.sort(dim=-1).values
    is_choice = followed.shape == chosen.shape and bool(((followed >= 0) & (followed < biased.shape[-1])).all())
    if not is_choice or bool((followed[:, 1:] == followed[:, :-1]).any()):
        return chosen, torch.full_like(biased[:, 0], float("inf"))
    lowest_own, lowest_followed = (biased.gather(-1, ids).amin(-1) for ids in (chosen, followed))
    return followed, lowest_own - lowest_followed


def kda(read: Read, text: dict[str, Any], x: Tensor, recorder: _Recorder, layer_idx: int) -> Tensor:
    """Kimi Delta Attention, one token after another: decay, read, correct, write, then the output."""
    linear, name, r = text["linear_attn_config"], f"L{layer_idx}.", recorder.round
    heads, width, kernel = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    convolved, conv_inputs = [], []
    for part in "qkv":
        inputs, taps = r(x @ read(f"self_attn.{part}_proj.weight").T), read(f"self_attn.{part}_conv1d.weight")[:, 0]
        out = torch.empty_like(inputs)
        for span in recorder.spans:
            padded = torch.cat((inputs.new_zeros(kernel - 1, inputs.shape[-1]), inputs[span]))
            length = len(padded) - kernel + 1
            out[span] = sum(padded[j : j + length] * taps[:, j] for j in range(kernel))  # the newest tap is the last
        active = r(out * torch.sigmoid(out)).unflatten(-1, (heads, width))
        convolved.append(recorder.tokens(f"{name}kda_{part}", active))
        conv_inputs.append(inputs)
    for n, span in enumerate(
        recorder.spans
    ):  # the last inputs of each, oldest first, zeros where the prompt is shorter
        padded_qkv = [torch.cat((x.new_zeros(kernel, heads * width), inputs[span])) for inputs in conv_inputs]
        recorder.state(f"{name}kda_conv", n, torch.stack([inputs[-kernel:].T for inputs in padded_qkv]))
    q, k, v = convolved
    q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * width**-0.5
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    decay_in = r(r(x @ read("self_attn.f_a_proj.weight").T) @ read("self_attn.f_b_proj.weight").T)
    decay_in = recorder.tokens(f"{name}kda_g", decay_in.unflatten(-1, (heads, width)))
    z = decay_in + read("self_attn.dt_bias").view(heads, width)
    rate = torch.exp(read("self_attn.A_log")[:heads]).unsqueeze(-1)  # stored longer than the number of heads
    alpha = torch.exp(linear["gate_lower_bound"] * torch.sigmoid(rate * z))
    beta = torch.sigmoid(recorder.tokens(f"{name}kda_beta_logit", r(x @ read("self_attn.b_proj.weight").T)))
    o = torch.empty_like(v)
    for sequence_idx, span in enumerate(recorder.spans):
        state = x.new_zeros(heads, width, width)  # (H, key, value)
        for t in range(span.start, span.stop):
            state = alpha[t].unsqueeze(-1) * state
            predicted = torch.einsum("hkv,hk->hv", state, k[t])
            correction = beta[t].unsqueeze(-1) * (v[t] - predicted)
            state = state + k[t].unsqueeze(-1) * correction.unsqueeze(-2)
            o[t] = torch.einsum("hkv,hk->hv", state, q[t])
        recorder.state(f"{name}kda_state", sequence_idx, state.transpose(-1, -2))
    o = recorder.tokens(f"{name}kda_o", r(o))
    normed = read("self_attn.o_norm.weight") * normalise(o, text["rms_norm_eps"])
    gate = torch.sigmoid(r(x @ read("self_attn.g_proj.weight").T))
    gated = recorder.tokens(f"{name}kda_gated", r(normed.flatten(-2) * gate))
    return r(gated @ read("self_attn.o_proj.weight").T)


def mla(read: Read, text: dict[str, Any], x: Tensor, recorder: _Recorder, layer_idx: int) -> Tensor:
    """Gated multi-head latent attention without any position signal, keys and values expanded from the latent."""
    heads, rank, name = text["num_attention_heads"], text["kv_lora_rank"], f"L{layer_idx}."
    nope, shared, v_dim, r = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"], recorder.round
    low = r(x @ read("self_attn.q_a_proj.weight").T)
    low = rms_norm(low, read("self_attn.q_a_layernorm.weight"), LATENT_NORM_EPS, r)
    q = recorder.tokens(f"{name}mla_q", r(low @ read("self_attn.q_b_proj.weight").T))
    q = q.unflatten(-1, (heads, nope + shared))
    latent, key_shared = r(x @ read("self_attn.kv_a_proj_with_mqa.weight").T).split((rank, shared), dim=-1)
    latent = rms_norm(latent, read("self_attn.kv_a_layernorm.weight"), LATENT_NORM_EPS, r)
    cached = recorder.tokens(f"{name}latent", torch.cat((latent, key_shared), dim=-1))
    latent, key_shared = cached.split((rank, shared), dim=-1)
    expanded = r(latent @ read("self_attn.kv_b_proj.weight").T).unflatten(-1, (heads, nope + v_dim))
    k_nope, v = expanded.split((nope, v_dim), dim=-1)
    k = torch.cat((k_nope, key_shared.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    out = torch.empty_like(v)
    for span in recorder.spans:
        scores = r(r(torch.einsum("qhd,khd->qhk", q[span], k[span]), span) * (nope + shared) ** -0.5, span)
        future = torch.ones(len(scores), len(scores), dtype=torch.bool).triu(1).unsqueeze(1)
        probabilities = r(torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1), span)
        out[span] = r(torch.einsum("qhk,khd->qhd", probabilities, v[span]), span)
    gate = r(torch.sigmoid(r(x @ read("self_attn.g_proj.weight").T)))
    gated = recorder.tokens(f"{name}mla_gated", r(out.flatten(-2) * gate))
    return r(gated @ read("self_attn.o_proj.weight").T)
