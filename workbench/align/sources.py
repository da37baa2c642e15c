"""Where in a running model each tensor of a trace is found, and how it is turned into the trace's form.

A source is written as a deployment's capture names it: "layers.3.mixer:out" is a module's output, ":in" its first
input, ":out.1" an element of it, ":out.running" a field, "cache.state.0" what the cache holds afterwards. One table
serves hooks in this process (`capture.py`) and ranks elsewhere (`deployed.py`).
"""

from __future__ import annotations

from torch import Tensor

from workbench.align.trace import layer_of, short_name
from workbench.spec import KDASpec, ModelSpec, MoESpec

__all__ = ["CACHE_SOURCE", "FINAL_NAMES", "in_model_form", "in_trace_form", "trace_sources"]

CACHE_SOURCE = "cache."
FINAL_NAMES = ("final_mix", "final_hidden", "logits")  # computed only for the rows whose logits are wanted

_EVERY_LAYER = {
    "attn_in": "mixer_norm:in",
    "attn_out": "mixer:out",
    "mlp_in": "ffn_norm:in",
    "ffn_out": "ffn:out",
}
_KDA = {
    "kda_q": "mixer.q_conv:out",
    "kda_k": "mixer.k_conv:out",
    "kda_v": "mixer.v_conv:out",
    "kda_g": "mixer.f_b_proj:out",
    "kda_beta_logit": "mixer.b_proj:out",
    "kda_o": "mixer.o_norm:in",
    "kda_gated": "mixer.o_proj:in",
}
_MLA = {"mla_q": "mixer.q_b_proj:out", "mla_gated": "mixer.o_proj:in"}
_MOE = {
    "topk_idx": "ffn.router:out.0",
    "topk_w": "ffn.router:out.1",
    "moe_latent_in": "ffn.latent_in:out",
    "moe_combined": "ffn.latent_norm:in",
    "moe_routed_out": "ffn.latent_out:out",
    "moe_shared_out": "ffn.shared:out",
}
_BY_HEAD = ("kda_q", "kda_k", "kda_v", "kda_g", "kda_o")


def trace_sources(spec: ModelSpec) -> dict[str, str]:
    """Trace name -> source, in forward order within each layer."""
    sources = {"inputs_embeds": "layers.0:in.running"}
    for layer in spec.layers:
        i = layer.layer_idx
        is_kda = isinstance(layer.mixer, KDASpec)
        modules = _EVERY_LAYER | (_KDA if is_kda else _MLA) | (_MOE if isinstance(layer.ffn, MoESpec) else {})
        sources |= {f"L{i}.{name}": f"layers.{i}.{source}" for name, source in modules.items()}
        sources[f"L{i}.sum"] = f"layers.{i}:out.running"
        if is_kda:
            sources |= {f"L{i}.kda_conv": f"cache.conv.{i}", f"L{i}.kda_state": f"cache.state.{i}"}
        else:
            sources[f"L{i}.latent"] = f"cache.latent.{i}"
    if spec.residual is not None:
        sources["blocks"] = f"layers.{spec.num_layers - 1}:out.saved"
    return {**sources, "final_mix": "final_norm:in", "final_hidden": "final_norm:out", "logits": "head:out"}


def in_trace_form(name: str, value: Tensor, spec: ModelSpec) -> Tensor:
    """A captured tensor as the trace shows it: channels by head, saved vectors behind the tokens."""
    if short_name(name) in _BY_HEAD and value.ndim == 2:
        layer = layer_of(name)
        assert layer is not None
        mixer = spec.layers[layer].mixer
        assert isinstance(mixer, KDASpec)
        return value.unflatten(-1, (-1, mixer.head_dim))
    return value.transpose(0, 1) if name == "blocks" else value


def in_model_form(name: str, value: Tensor) -> Tensor:
    """The inverse of `in_trace_form` for tensors between two modules: channels in one row again.

    The heads' norm reads its input by head, as the trace shows it.
    """
    is_by_head = short_name(name) in _BY_HEAD and short_name(name) != "kda_o"
    return value.flatten(-2) if is_by_head and value.ndim == 3 else value
