"""What a tensor of an unknown model probably is, from its name and its shape, and how sure that is.

A guess is for reading, never for loading: nothing outside the report on unknown models uses it. Confidence is 0.95
where name and shape agree, 0.7 where only the name speaks and no shape is known to check, 0.5 where only the shape
speaks, 0.3 where they contradict each other, 0 where neither says anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RoleGuess", "Sizes", "guess_role", "read_sizes"]

BOTH, NAME_ONLY, SHAPE_ONLY, CONTRADICTED = 0.95, 0.7, 0.5, 0.3

# Keys under which configs of different makers state the same thing; searched in nested objects as well.
_SPELLINGS = {
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim", "model_dim"),
    "vocab_size": ("vocab_size", "n_vocab", "padded_vocab_size"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the config says of the model's sizes, None where it says nothing under a known name."""

    hidden_size: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    num_experts: int | None = None
    top_k: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleGuess:
    role: str  # "?" where nothing is known
    confidence: float
    reason: str


# (role, pattern on the name, shape that the role has as (rows, columns) of Sizes fields; "" is any size)
_RULES: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("vision tower", r"(^|[._])(vision|visual|image|vit)", None),
    ("projector", r"(projector|multi_modal|mm_)", None),
    ("draft layer", r"(^|\.)(mtp|nextn|eh_proj|enorm|hnorm)", None),
    ("scale", r"(_scale(_inv|_2)?|_scales|\.scales?|_global_scale|qzeros|g_idx|weight_shape)$", None),
    (
        "embedding",
        r"(embed_tokens|word_embeddings|tok_embeddings|wte|(^|\.)embed)\.weight$",
        ("vocab_size", "hidden_size"),
    ),
    ("head", r"(lm_head|(^|\.)head|output_layer|embed_out)\.weight$", ("vocab_size", "hidden_size")),
    ("indexer", r"(indexer|index_[qk])", None),
    ("shared expert", r"shared_expert", None),
    ("router bias", r"(correction_bias|router.*\.bias|(^|\.)gate\.bias)$", ("num_experts",)),
    ("routed expert", r"\.experts?[._]", None),
    ("router", r"((^|\.)gate|router|gate\.wg)(\.\w+)?\.weight$", ("num_experts", "hidden_size")),
    ("norm", r"(norm|(^|\.)ln_?\w*|layernorm)\w*\.(weight|bias)$", None),
    ("linear recurrence", r"(A_log|dt_bias|conv1d|(^|\.)(ssm|mamba|linear_attn|in_proj_\w+|f_[ab]_proj))", None),
    ("latent attention", r"(kv_a_|kv_b_|q_a_|q_b_|kv_lora|wkv_a|wq_a|wq_b|wkv)", None),
    ("attention sinks", r"(sinks?$|sink_bias$|attn_sink$)", ("num_heads",)),
    ("attention q", r"(^|\.)(q_proj|wq|query)\.(weight|bias)", ("", "hidden_size")),
    ("attention k", r"(^|\.)(k_proj|wk|key)\.(weight|bias)", ("", "hidden_size")),
    ("attention v", r"(^|\.)(v_proj|wv|value)\.(weight|bias)", ("", "hidden_size")),
    ("attention qkv", r"(qkv|query_key_value|c_attn|W_pack)", ("", "hidden_size")),
    ("attention output", r"(o_proj|wo|out_proj|attn\.dense|c_proj)\.(weight|bias)", ("hidden_size", "")),
    ("feed-forward in", r"(gate_proj|up_proj|gate_up_proj|(^|\.)w[13]|fc1|c_fc|h_to_4h)\.", ("", "hidden_size")),
    ("feed-forward out", r"(down_proj|(^|\.)w2|fc2|4h_to_h)\.", ("hidden_size", "")),
)
_COMPILED = tuple((role, re.compile(pattern), shape) for role, pattern, shape in _RULES)
_BY_SHAPE = (  # where the name says nothing; only sizes that no other tensor would have by chance
    ("embedding or head", ("vocab_size", "hidden_size")),
    ("router", ("num_experts", "hidden_size")),
    ("norm", ("hidden_size",)),
)


def read_sizes(config: Mapping[str, object]) -> Sizes:
    """The first spelling of each size that is an integer, outer keys before inner ones."""
    found: dict[str, int] = {}
    queue: list[Mapping[str, object]] = [config]
    while queue:
        here = queue.pop(0)
        for field, keys in _SPELLINGS.items():
            for key in keys:
                value = here.get(key)
                if field not in found and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    found[field] = value
        queue += [v for k, v in here.items() if isinstance(v, Mapping) and "vision" not in k and "audio" not in k]
    return Sizes(**found)


def guess_role(name: str, shape: tuple[int, ...] | None, sizes: Sizes) -> RoleGuess:
    """`name` with its numbers replaced by `*` or not; `shape` None where only an index is here."""
    for role, pattern, wanted in _COMPILED:
        if pattern.search(name) is None:
            continue
        if shape is None or wanted is None:
            return RoleGuess(role=role, confidence=NAME_ONLY, reason="by its name")
        # A bias is as long as the rows of its matrix; packed columns and stacks cannot be judged here.
        numbers = [getattr(sizes, field) if field else None for field in wanted]
        if name.endswith((".bias", "_bias")) and len(numbers) == 2:
            numbers = numbers[:1]
        if all(number is None for number in numbers) and len(shape) == len(numbers):
            return RoleGuess(role=role, confidence=NAME_ONLY, reason="by its name; no size in the config to check")
        fits = len(shape) == len(numbers) and all(
            number in (None, size) for number, size in zip(numbers, shape, strict=True)
        )
        if fits:
            return RoleGuess(role=role, confidence=BOTH, reason="name and shape agree")
        text = " x ".join("any" if number is None else str(number) for number in numbers)
        return RoleGuess(role=role, confidence=CONTRADICTED, reason=f"by its name, but the shape is not {text}")
    for role, fields in _BY_SHAPE:
        numbers = [getattr(sizes, field) for field in fields]
        if shape is not None and None not in numbers and tuple(numbers) == shape:
            return RoleGuess(role=role, confidence=SHAPE_ONLY, reason="by its shape alone")
    return RoleGuess(role="?", confidence=0.0, reason="neither name nor shape is known")
