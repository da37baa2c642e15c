"""Which computing blocks a model needs, and which of them this version does not have.

Reading, counting, auditing and planning work for every known family; running one takes every block of it. A block is
named here by what a reader of the model's paper would call it. `BLOCKS` grows with `workbench.nn`; nothing else
decides what can run, so that a model that cannot is refused in one place, at once, with the whole list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.base import UnsupportedModelError
from workbench.spec.mixers import CompressedSpec, GatedDeltaSpec, GQASpec, KDASpec, MixerSpec, MLASpec
from workbench.spec.model import FFNSpec, ModelSpec, MoESpec

__all__ = ["BLOCKS", "missing_blocks", "needed_blocks", "require_runnable"]

# What workbench.nn computes and workbench.loading reads.
BLOCKS = frozenset(
    {
        "KDA",
        "KDA: bounded decay",
        "KDA: unbounded decay",
        "KDA: full-rank output gate",
        "KDA: low-rank output gate",
        "latent attention",
        "latent attention: query latent",
        "latent attention: queries in one step",
        "latent attention: output gate",
        "latent attention: no output gate",
        "latent attention: rotary neighbours",
        "latent attention: rotary halves",
        "latent attention: YaRN",
        "grouped-query attention",
        "grouped-query attention: no position signal",
        "grouped-query attention: rotary halves",
        "grouped-query attention: rotary neighbours",
        "grouped-query attention: partly rotated",
        "grouped-query attention: YaRN",
        "grouped-query attention: Llama 3 frequencies",
        "grouped-query attention: M-RoPE",
        "grouped-query attention: biases",
        "grouped-query attention: output gate",
        "grouped-query attention: sinks",
        "grouped-query attention: q and k norm per head",
        "grouped-query attention: q and k norm across heads",
        "grouped-query attention: q and k divided by their mean square",
        "grouped-query attention: query temperature by position",
        "grouped-query attention: window",
        "grouped-query attention: chunks",
        "grouped-query attention: clipped q, k, v",
        "sparse indexer",
        "sparse indexer: shared choice",
        "gated delta net",
        "dense feed-forward",
        "experts",
        "experts: at a latent width",
        "experts: at the model width",
        "experts: none shared",
        "experts: biases",
        "experts: gated shared expert",
        "experts: weight on the input",
        "router: sigmoid",
        "router: softmax",
        "router: softmax_topk",
        "router: correction bias",
        "router: no correction bias",
        "router: bias of the logits",
        "router: groups",
        "activation: situ",
        "activation: silu",
        "activation: swiglu_oai clamped",
        "attention residuals",
        "norms stored as a difference from one",
        "head tied to the embedding",
        "vision tower: moonvit_k3",
        "vision tower: moonvit",
        "vision tower: qwen3_vl",
        "vision tower: DeepStack",
        "storage: experts as (inputs, outputs)",
        "storage: mxfp4",
        "storage: mxfp4_blocks",
        "storage: nvfp4",
        "storage: nvfp4_packed",
        "storage: fp8_tensor",
        "storage: fp8_block",
        "storage: fp8_channel",
        "storage: int8_channel",
        "storage: int4_packed",
        "storage: int4_awq",
        "storage: int4_gptq",
    }
)


def needed_blocks(spec: ModelSpec) -> tuple[str, ...]:
    """Every block the model is made of, in the order a token meets them first."""
    found: dict[str, None] = {}
    if spec.is_tied:
        found["head tied to the embedding"] = None
    if spec.norm_offset:
        found["norms stored as a difference from one"] = None
    if spec.streams is not None:
        found["hyper-connections"] = None
    if spec.residual is not None:
        found["attention residuals"] = None
    for mixer in dict.fromkeys(layer.mixer for layer in spec.layers):
        found |= dict.fromkeys(_of_mixer(mixer))
    for ffn in dict.fromkeys(layer.ffn for layer in spec.layers):
        found |= dict.fromkeys(_of_ffn(ffn))
    if spec.vision is not None:
        found[f"vision tower: {spec.vision.kind}"] = None
        if spec.vision.deepstack:
            found["vision tower: DeepStack"] = None
    if spec.quant is not None:
        found |= {f"storage: {scheme}": None for scheme in spec.quant.schemes}
    if spec.has_transposed_experts and spec.quant is None:
        found["storage: experts as (inputs, outputs)"] = None
    found |= dict.fromkeys(spec.unread_parts)
    return tuple(found)


def missing_blocks(spec: ModelSpec) -> tuple[str, ...]:
    """Blocks of the model that this version cannot compute; empty for a model that runs."""
    return tuple(block for block in needed_blocks(spec) if block not in BLOCKS)


def require_runnable(spec: ModelSpec) -> None:
    """Raises UnsupportedModelError with the list of missing blocks, unless there are none."""
    missing = missing_blocks(spec)
    if missing:
        raise UnsupportedModelError(
            f"{spec.architecture} is read and counted, but {len(missing)} of its blocks are not computed here",
            found="; ".join(missing),
            next_step="`workbench inspect`, `audit` and `families` work for it; docs/adding-a-family.md says how to "
            "add a block",
        )


def _of_mixer(mixer: MixerSpec) -> Iterator[str]:
    if isinstance(mixer, KDASpec):
        yield "KDA"
        yield "KDA: unbounded decay" if math.isinf(mixer.decay_bound) else "KDA: bounded decay"
        yield "KDA: full-rank output gate" if mixer.gate_rank is None else "KDA: low-rank output gate"
    elif isinstance(mixer, MLASpec):
        yield "latent attention"
        yield "latent attention: query latent" if mixer.q_rank else "latent attention: queries in one step"
        yield "latent attention: output gate" if mixer.has_output_gate else "latent attention: no output gate"
        yield from _of_rope("latent attention", mixer)
        if mixer.indexer is not None:
            yield "sparse indexer"
            if not mixer.indexer.owns_choice:
                yield "sparse indexer: shared choice"
    elif isinstance(mixer, GatedDeltaSpec):
        yield "gated delta net"
    elif isinstance(mixer, CompressedSpec):
        yield "compressed attention"
        if mixer.ratio:
            yield f"compressed attention: 1/{mixer.ratio}"
    else:
        yield "grouped-query attention"
        yield from _of_rope("grouped-query attention", mixer)
        options = {
            "biases": mixer.has_bias or mixer.has_output_bias,
            "output gate": mixer.has_output_gate,
            "sinks": mixer.has_sinks,
            "q and k norm per head": mixer.qk_norm == "head",
            "q and k norm across heads": mixer.qk_norm == "full",
            "q and k divided by their mean square": mixer.qk_norm == "l2",
            "window": mixer.window is not None,
            "chunks": mixer.chunk is not None,
            "values of another width": mixer.v_dim != mixer.head_dim,
            "value scale": mixer.value_scale != 1.0,
            "clipped q, k, v": mixer.qkv_limit is not None,
            "block-sparse reading": mixer.sparse is not None,
            "query temperature by position": mixer.temperature is not None,
        }
        yield from (f"grouped-query attention: {name}" for name, needed in options.items() if needed)


def _of_rope(block: str, mixer: MLASpec | GQASpec) -> Iterator[str]:
    rope = mixer.rope
    if rope is None:
        if isinstance(mixer, GQASpec):
            yield f"{block}: no position signal"
        return
    yield f"{block}: rotary {'neighbours' if rope.is_interleaved else 'halves'}"
    if isinstance(mixer, GQASpec) and rope.dim < mixer.head_dim:
        yield f"{block}: partly rotated"
    if rope.yarn is not None:
        yield f"{block}: YaRN"
    if rope.llama is not None:
        yield f"{block}: Llama 3 frequencies"
    if rope.sections:
        yield f"{block}: M-RoPE"


def _of_ffn(ffn: FFNSpec) -> Iterator[str]:
    activation = ffn.activation
    clamp = "" if activation.limit is None else " clamped"
    yield f"activation: {activation.kind}{clamp}"
    if not isinstance(ffn, MoESpec):
        yield "dense feed-forward"
        return
    yield "experts"
    yield "experts: at a latent width" if ffn.has_latent else "experts: at the model width"
    yield f"router: {ffn.scoring}"
    options = {
        "router: correction bias": ffn.has_correction_bias,
        "router: no correction bias": not ffn.has_correction_bias and not ffn.is_hash_routed,
        "router: bias of the logits": ffn.has_router_bias,
        "router: groups": ffn.num_groups > 1,
        "router: by token id": ffn.is_hash_routed,
        "experts: none shared": not ffn.shared_width,
        "experts: gated shared expert": ffn.has_shared_gate,
        "experts: biases": ffn.has_expert_bias,
        "experts: weight on the input": ffn.scales_input,
    }
    yield from (name for name, needed in options.items() if needed)
