"""What reading a prompt costs, chunk by chunk: a token deep in a prompt costs more than one at its beginning.

Reading n tokens from position c on, in multiply-adds:

    n * token            every weight that a token meets, once
    n * (c + n) * pair   queries against keys, and weights against values, in layers of full attention
    (c + n) * context    whatever n is: latents of the whole context are expanded to keys and values for each chunk

Recurrent layers cost the same wherever a token stands.

A picture of N patches goes through the layers of a vision tower before; there a row of a layer (one patch of it) costs
row + pair * N, for it attends to all patches of its picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from workbench.spec.counts import count_model
from workbench.spec.mixers import GQASpec, MixerSpec, MLASpec
from workbench.spec.model import LayerSpec, ModelSpec, MoESpec

__all__ = ["EncodingCost", "ReadingCost", "encoding_cost", "reading_cost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingCost:
    """Multiply-adds per token, per token and token of its context, and per token of a chunk's context."""

    token: float
    pair: float = 0.0
    context: float = 0.0

    def of(self, num_tokens: int, start: int) -> float:
        """Multiply-adds of one chunk of `num_tokens` from position `start` on."""
        length = start + num_tokens
        return num_tokens * (self.token + self.pair * length) + self.context * length

    @property
    def least(self) -> int:
        """Tokens of a chunk below which expanding its context would cost more than attending to it: smaller ones
        would make a step no cheaper, and a prompt dearer."""
        return max(1, math.ceil(self.context / self.pair)) if self.pair else 1

    def chunk(self, most: int, start: int, *, limit: float) -> int:
        """Tokens to read from `start` on, `most` of them where they cost no more than `limit`, else as many as do, but
        never fewer than `least` (or `most`)."""
        if not self.pair or self.of(most, start) <= limit:
            return most
        # pair n^2 + (token + pair c + context) n + context c - limit = 0
        half = (self.token + self.pair * start + self.context) / (2 * self.pair)
        rest = (limit - self.context * start) / self.pair
        fitting = math.floor(math.sqrt(half * half + rest) - half) if rest > 0 else 0
        return min(most, max(fitting, self.least, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingCost:
    """Multiply-adds of one row of one layer of the tower, in a picture of N patches: `row` + `pair` N."""

    num_layers: int
    row: float
    pair: float

    def num_rows(self, num_patches: int) -> int:
        """Rows of all layers."""
        return self.num_layers * num_patches

    def of(self, num_rows: int, num_patches: int) -> float:
        """Multiply-adds of so many rows of a picture of `num_patches`."""
        return num_rows * (self.row + self.pair * num_patches)

    def rows(self, limit: float, num_patches: int) -> int:
        """Rows that cost no more than `limit`."""
        return math.floor(limit / self.of(1, num_patches))


def encoding_cost(spec: ModelSpec) -> EncodingCost | None:
    """None for a model without a vision tower."""
    if (vision := spec.vision) is None:
        return None
    weights = 4 * vision.hidden_size * vision.qkv_width + 2 * vision.hidden_size * vision.ffn_width
    return EncodingCost(num_layers=vision.num_layers, row=float(weights), pair=float(2 * vision.qkv_width))


def reading_cost(spec: ModelSpec) -> ReadingCost:
    """Of a model as `workbench.nn` computes it: windows and indexers mask attention and do not shorten it, but
    for windows where a chunk is read in blocks (`nn.workspace`), which is not counted."""
    mixers = [layer.mixer for layer in spec.layers]
    return ReadingCost(
        token=float(count_model(_of_one_token(spec)).active_params),
        pair=float(sum(map(_pair, mixers))),
        context=float(sum(map(_context, mixers))),
    )


def _of_one_token(spec: ModelSpec) -> ModelSpec:
    """The model with as many experts as a token visits: counted the same but for the router, and far sooner."""
    return replace(spec, layers=tuple(map(_with_chosen_experts, spec.layers)))


def _with_chosen_experts(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.ffn, MoESpec):
        return layer
    return replace(layer, ffn=replace(layer.ffn, num_experts=layer.ffn.top_k, num_groups=1, top_groups=1))


def _pair(mixer: MixerSpec) -> int:
    if isinstance(mixer, MLASpec):
        own = mixer.indexer.num_heads * mixer.indexer.head_dim if mixer.indexer and mixer.indexer.owns_choice else 0
        return own + mixer.num_heads * (mixer.qk_dim + mixer.v_dim)
    return mixer.num_heads * (mixer.head_dim + mixer.v_dim) if isinstance(mixer, GQASpec) else 0


def _context(mixer: MixerSpec) -> int:
    return mixer.num_heads * (mixer.nope_dim + mixer.v_dim) * mixer.kv_rank if isinstance(mixer, MLASpec) else 0
