"""Names of a trace: which tensor comes before which, and what computed it.

A trace maps names to tensors: "L3.attn_in", "final_hidden", "image0.block1"; a prefix such as "p64." may precede.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["IN_LAYER_ORDER", "PRODUCED_BY", "forward_order", "layer_of", "produced_by", "short_name"]

# In the order in which one layer computes them, each with the parameters (below "layers.N.") whose work it shows.
PRODUCED_BY: dict[str, str] = {
    "attn_in": "mixer_res",
    "kda_conv": "mixer_norm, mixer.{q,k,v}_proj",
    "kda_q": "mixer.q_proj, mixer.q_conv",
    "kda_k": "mixer.k_proj, mixer.k_conv",
    "kda_v": "mixer.v_proj, mixer.v_conv",
    "kda_g": "mixer.f_a_proj, mixer.f_b_proj",
    "kda_beta_logit": "mixer.b_proj",
    "kda_o": "mixer.A_log, mixer.dt_bias, L2 norm of q and k, recurrence",
    "kda_state": "mixer.A_log, mixer.dt_bias, L2 norm of q and k, recurrence",
    "kda_gated": "mixer.o_norm, mixer.g_proj",
    "mla_q": "mixer_norm, mixer.q_a_proj, mixer.q_a_norm, mixer.q_b_proj",
    "latent": "mixer_norm, mixer.kv_a_proj, mixer.kv_a_norm",
    "mla_gated": "mixer.kv_b_proj, attention, mixer.g_proj",
    "attn_out": "mixer.o_proj and what feeds it",
    "mlp_in": "ffn_res",
    "router_scores": "ffn_norm, ffn.router.weight",
    "topk_idx": "ffn.router.weight, ffn.router.bias",
    "route_margin": "ffn.router.weight, ffn.router.bias",
    "route_regret": "ffn.router.weight, ffn.router.bias",
    "topk_w": "ffn.router.weight, renormalisation, scale",
    "moe_latent_in": "ffn_norm, ffn.latent_in",
    "moe_combined": "ffn.experts",
    "moe_routed_out": "ffn.latent_norm, ffn.latent_out",
    "moe_shared_out": "ffn_norm, ffn.shared",
    "ffn_out": "ffn and its norm",
    "sum": "residual sum",
}
IN_LAYER_ORDER = tuple(PRODUCED_BY)
_BEFORE = ("inputs_embeds",)
_AFTER = ("blocks", "final_mix", "final_hidden", "logits", "greedy_logits")
_IN_IMAGE = ("patches_u8", "pixel_values", "patch_embed", "block", "encoder_out", "tower", "projector")
_ELSEWHERE = {
    "inputs_embeds": "embed, image merge",
    "blocks": "residual blocks",
    "final_mix": "final_res",
    "final_hidden": "final_norm",
    "logits": "head",
    "greedy_logits": "head",
    "patch_embed": "vision.patch_embed, vision.pos_embed",
    "encoder_out": "vision.final_norm",
    "tower": "2 x 2 merge",
    "projector": "projector",
}
_LAYER = re.compile(r"(?:^|\.)L(\d+)\.(\w+)$")


def layer_of(name: str) -> int | None:
    """Layer index in a name, None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def short_name(name: str) -> str:
    """The last part: "p7.L3.mla_q" -> "mla_q"."""
    return name.rsplit(".", 1)[-1]


def produced_by(name: str) -> str:
    """What computes this tensor, in parameter names of the model; "" where nothing is known."""
    last = short_name(name)
    layer = layer_of(name)
    if layer is not None and last in PRODUCED_BY:
        return f"layer {layer}: {PRODUCED_BY[last]}"
    if match := re.fullmatch(r"block(\d+)", last):
        return f"vision.blocks.{match[1]}"
    return _ELSEWHERE.get(last, "")


def forward_order(names: Iterable[str]) -> list[str]:
    """Names in the order in which a forward pass computes them; unknown names come last, by name."""
    return sorted(names, key=_position)


def _position(name: str) -> tuple[int, int, int, str]:
    last = short_name(name)
    layer = layer_of(name)
    if layer is not None:
        inner = IN_LAYER_ORDER.index(last) if last in PRODUCED_BY else len(IN_LAYER_ORDER)
        return (2, layer, inner, name)
    if last in _BEFORE:
        return (1, 0, 0, name)
    if last in _AFTER:
        return (3, 0, _AFTER.index(last), name)
    if match := re.fullmatch(r"block(\d+)", last):
        return (0, _IN_IMAGE.index("block"), int(match[1]), name)
    if last in _IN_IMAGE:
        return (0, _IN_IMAGE.index(last), 0, name)
    return (4, 0, 0, name)
