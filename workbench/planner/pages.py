"""Pages of engines that keep latents and recurrent states in one pool: what a request takes, however short it is.

Such a pool has pages of one size, so the attention page is blown up until a recurrent state fits into one, and layers
are handled in groups of equal number. A short request then pins a page of every group.
Source: vLLM's hybrid cache; its log for Kimi K3 at TP16 says 384 tokens per page and 8.68 % padding, as comes out here.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base import UnsupportedModelError
from workbench.placement import Layout
from workbench.planner.memory import CacheNeed, cache_need
from workbench.spec import KDASpec, MLASpec, ModelSpec

__all__ = ["HybridPages", "hybrid_pages"]

GRANULE = 64  # tokens: pages are multiples of the attention kernel's block


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPages:
    """Pool of one rank: a block is one page of `page_bytes` in each of `layers_per_group` layers."""

    page_tokens: int
    page_bytes: int
    padding: float  # share by which a recurrent state is padded up to a page
    layers_per_group: int
    attention_groups: int
    state_groups: int

    @property
    def block_bytes(self) -> int:
        return self.layers_per_group * self.page_bytes

    @property
    def request_floor(self) -> int:
        """Bytes that the shortest request pins: one block of every group."""
        return (self.attention_groups + self.state_groups) * self.block_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks of one request of that many tokens."""
        return self.attention_groups * -(-tokens // self.page_tokens) + self.state_groups

    def tokens(self, pool_bytes: float, context: int) -> float:
        """Tokens that a pool holds in requests of `context` tokens each, as such engines report it."""
        return pool_bytes // self.block_bytes / self.blocks(context) * context


def hybrid_pages(spec: ModelSpec, layout: Layout, stage: int = 0, *, itemsize: int = 2) -> HybridPages:
    """Pages on each rank of a stage. Raises UnsupportedModelError for a stage without both kinds of layer."""
    layers = layout.stage_layers(spec.num_layers)[stage]
    latent = [i for i in layers if isinstance(spec.layers[i].mixer, MLASpec)]
    recurrent = [i for i in layers if isinstance(spec.layers[i].mixer, KDASpec)]
    if not latent or not recurrent:
        raise UnsupportedModelError("pages of a mixed pool need layers of both kinds", where=f"stage {stage}")
    one = CacheNeed(slots=1, max_tokens=1)
    per_token = cache_need(spec, layout, range(latent[0], latent[0] + 1), one, itemsize)["latent"]
    state = sum(cache_need(spec, layout, range(recurrent[0], recurrent[0] + 1), one, itemsize).values())
    page_tokens = -(-state // (per_token * GRANULE)) * GRANULE
    size = min(len(latent), len(recurrent))
    return HybridPages(
        page_tokens=page_tokens,
        page_bytes=page_tokens * per_token,
        padding=page_tokens * per_token / state - 1,
        layers_per_group=size,
        attention_groups=-(-len(latent) // size),
        state_groups=-(-len(recurrent) // size),
    )
