"""How big a model is: parameters, active parameters, bytes, cache and state, summed over its published tensors.

Nothing here is a closed formula of a family: parameters and bytes are a fold over `published_tensors`, so they cannot
drift from what the loader reads; caches follow from the mixer specs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.base import num_bytes
from workbench.spec.mixers import CompressedSpec, GatedDeltaSpec, GQASpec, KDASpec, MixerSpec, MLASpec
from workbench.spec.model import LayerSpec, ModelSpec, MoESpec
from workbench.spec.parse import draft_tensors, published_tensors
from workbench.spec.tensors import Role, TensorSpec

__all__ = [
    "LayerCounts",
    "ModelCounts",
    "count_draft",
    "count_model",
    "index_bytes_per_token",
    "kv_bytes",
    "kv_bytes_per_token",
    "state_bytes_per_sequence",
]

# Not counted as active, as in the published figure: a lookup is no work, and a text token never sees the tower.
_INACTIVE_ROLES: frozenset[Role] = frozenset({"embedding", "vision", "projector"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """One decoder layer: weights as published, and what one token or one sequence adds to its cache."""

    layer_idx: int
    kind: str  # "KDA+MoE", see LayerSpec.kind
    num_params: int
    active_params: int  # per token
    weight_bytes: int
    active_weight_bytes: int  # read to compute one token of a batch of one
    kv_bytes_per_token: int
    state_bytes_per_sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounts:
    """Totals of a model. All bytes are of the published storage format; caches are those of a bf16 run on one rank."""

    num_tensors: int
    num_params: int
    active_params: int  # per token, without input embedding, vision tower and projector
    weight_bytes: int
    active_weight_bytes: int
    experts_per_token: int  # routed experts that one token visits, over all layers
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    params_by_role: dict[str, int]
    bytes_by_role: dict[str, int]
    bytes_by_dtype: dict[str, int]
    layers: tuple[LayerCounts, ...]


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "BF16") -> int:
    """Bytes one token adds to the cache, summed over layers, on one rank (MLA latents are not split by tp).

    MLA stores its normalised latent and the shared key once per layer; grouped-query attention keys and values of its
    key-value heads; KDA and delta nets keep a fixed state and add nothing. Layers with a window count in full, as if
    it were not yet reached: `kv_bytes` is exact for a length. Compressed attention counts its entries per token they
    stand for, and its window not at all. Source: arXiv 2405.04434, section 2.1.
    """
    return sum(_layer_kv_bytes(layer, dtype) for layer in spec.layers)


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype: str = "BF16") -> int:
    """Bytes of the cache of one sequence of `num_tokens`, where layers with a window have stopped growing."""
    return sum(_sequence_kv_bytes(layer.mixer, num_tokens, dtype) for layer in spec.layers)


def index_bytes_per_token(spec: ModelSpec, dtype: str = "F8_E4M3") -> int:
    """Bytes of indexer keys that one token adds, kept beside the cache and in FP8 by the reference code."""
    return sum(_index_bytes(layer.mixer, dtype) for layer in spec.layers)


def state_bytes_per_sequence(spec: ModelSpec, dtype: str = "BF16") -> int:
    """Bytes of fixed state per sequence, summed over layers, before any split by heads.

    A KDA layer keeps a (heads, head_dim, head_dim) matrix in fp32 and, in `dtype`, the last conv_size - 1 inputs of
    each of the q, k and v convolutions; a delta net the same with its own head counts. Sources: arXiv 2510.26692,
    2412.06464.
    """
    return sum(_layer_state_bytes(layer, dtype) for layer in spec.layers)


def count_draft(spec: ModelSpec) -> tuple[int, int]:
    """Parameters and bytes of the multi-token-prediction layers, which no other count includes."""
    tensors = list(draft_tensors(spec))
    return sum(tensor.num_params for tensor in tensors), sum(tensor.num_bytes for tensor in tensors)


def count_model(spec: ModelSpec, tensors: Iterable[TensorSpec] | None = None) -> ModelCounts:
    """Counts of every published tensor; about two seconds for half a million.

    `tensors`: all of `published_tensors(spec)`, where the caller has them already.
    """
    params_by_role: Counter[str] = Counter()
    bytes_by_role: Counter[str] = Counter()
    bytes_by_dtype: Counter[str] = Counter()
    # Per layer and, under None, for everything outside the layers: [params, bytes] of routed experts and of the rest.
    routed: dict[int | None, list[int]] = {}
    plain: dict[int | None, list[int]] = {}
    num_tensors = 0
    for tensor in published_tensors(spec) if tensors is None else tensors:
        num_tensors += 1
        size, weights = tensor.num_bytes, tensor.num_params
        params_by_role[tensor.role] += weights
        bytes_by_role[tensor.role] += size
        bytes_by_dtype[tensor.dtype] += size
        if tensor.role in _INACTIVE_ROLES:
            continue
        pair = (routed if tensor.role == "routed_expert" else plain).setdefault(tensor.layer, [0, 0])
        pair[0] += weights
        pair[1] += size

    layers = tuple(_count_layer(layer, plain[layer.layer_idx], routed.get(layer.layer_idx)) for layer in spec.layers)
    edge_params, edge_bytes = plain[None]
    return ModelCounts(
        num_tensors=num_tensors,
        num_params=sum(params_by_role.values()),
        active_params=edge_params + sum(layer.active_params for layer in layers),
        weight_bytes=sum(bytes_by_role.values()),
        active_weight_bytes=edge_bytes + sum(layer.active_weight_bytes for layer in layers),
        experts_per_token=sum(layer.ffn.top_k for layer in spec.layers if isinstance(layer.ffn, MoESpec)),
        kv_bytes_per_token=sum(layer.kv_bytes_per_token for layer in layers),
        state_bytes_per_sequence=sum(layer.state_bytes_per_sequence for layer in layers),
        params_by_role=dict(params_by_role),
        bytes_by_role=dict(bytes_by_role),
        bytes_by_dtype=dict(bytes_by_dtype),
        layers=layers,
    )


def _count_layer(layer: LayerSpec, plain: list[int], routed: list[int] | None) -> LayerCounts:
    params, size = plain
    routed_params, routed_bytes = routed or (0, 0)
    chosen, of = (layer.ffn.top_k, layer.ffn.num_experts) if isinstance(layer.ffn, MoESpec) else (0, 1)
    return LayerCounts(
        layer_idx=layer.layer_idx,
        kind=layer.kind,
        num_params=params + routed_params,
        # Exact: all experts of a layer are equally large.
        active_params=params + routed_params // of * chosen,
        weight_bytes=size + routed_bytes,
        active_weight_bytes=size + routed_bytes // of * chosen,
        kv_bytes_per_token=_layer_kv_bytes(layer, "BF16"),
        state_bytes_per_sequence=_layer_state_bytes(layer, "BF16"),
    )


def _layer_kv_bytes(layer: LayerSpec, dtype: str) -> int:
    mixer = layer.mixer
    if isinstance(mixer, CompressedSpec):
        return num_bytes(dtype, (mixer.head_dim,)) // mixer.ratio if mixer.ratio else 0
    return num_bytes(dtype, (_cached_values(mixer),))


def _cached_values(mixer: MixerSpec) -> int:
    """Values one token leaves in the cache of its layer."""
    if isinstance(mixer, MLASpec):
        return mixer.cache_dim
    if isinstance(mixer, GQASpec):
        return mixer.kv_width
    return 0


def _sequence_kv_bytes(mixer: MixerSpec, num_tokens: int, dtype: str) -> int:
    if isinstance(mixer, CompressedSpec):
        entries = min(num_tokens, mixer.window) + (num_tokens // mixer.ratio if mixer.ratio else 0)
        return num_bytes(dtype, (entries, mixer.head_dim))
    span = mixer.span if isinstance(mixer, GQASpec) else None
    held = num_tokens if span is None else min(num_tokens, span)
    return num_bytes(dtype, (held, _cached_values(mixer)))


def _index_bytes(mixer: MixerSpec, dtype: str) -> int:
    if isinstance(mixer, MLASpec) and mixer.indexer is not None and mixer.indexer.owns_choice:
        return num_bytes(dtype, (mixer.indexer.head_dim,))
    if isinstance(mixer, CompressedSpec) and mixer.indexer is not None:
        return num_bytes(dtype, (mixer.indexer.head_dim,)) // mixer.ratio
    if isinstance(mixer, GQASpec) and mixer.sparse is not None:
        return num_bytes(dtype, (mixer.sparse.head_dim,))
    return 0


def _layer_state_bytes(layer: LayerSpec, dtype: str) -> int:
    mixer = layer.mixer
    if isinstance(mixer, KDASpec):
        recurrent = num_bytes("F32", (mixer.num_heads, mixer.head_dim, mixer.head_dim))
        return recurrent + num_bytes(dtype, (3, mixer.width, mixer.conv_size - 1))
    if isinstance(mixer, GatedDeltaSpec):
        recurrent = num_bytes("F32", (mixer.num_value_heads, mixer.key_dim, mixer.value_dim))
        return recurrent + num_bytes(dtype, (mixer.conv_width, mixer.conv_size - 1))
    return 0
