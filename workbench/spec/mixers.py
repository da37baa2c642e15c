"""Token mixers: every kind of attention and of linear recurrence a layer can have, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.spec.rope import RopeSpec

__all__ = [
    "BlockSparseSpec",
    "CompressedSpec",
    "GQASpec",
    "GatedDeltaSpec",
    "IndexerSpec",
    "KDASpec",
    "MLASpec",
    "MixerSpec",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class KDASpec:
    """Kimi Delta Attention: gated delta rule with a decay per head and key channel (arXiv 2510.26692).

    State per sequence: (num_heads, head_dim, head_dim) fp32, plus `conv_size - 1` inputs of each of q, k, v.
    """

    num_heads: int
    head_dim: int
    conv_size: int
    decay_bound: float  # log decay lies in (decay_bound, 0); -inf: -exp(A_log) * softplus(...), without a bound
    decay_rank: int  # width of the f_a / f_b bottleneck
    norm_eps: float
    l2_eps: float = 1e-6  # added to the SUM of squares of q and k
    gate_rank: int | None = None  # width of the g_a / g_b bottleneck of the output gate; None: one full g projection

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet (arXiv 2412.06464): delta rule with one decay per value head; key heads are shared by groups.

    State per sequence: (num_value_heads, key_dim, value_dim) fp32, plus `conv_size - 1` inputs of the packed q, k, v.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    norm_eps: float
    l2_eps: float = 1e-6  # added to the SUM of squares of q and k

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the short convolution: q, k and v packed."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """Sparse selector of DeepSeek-V3.2: a small attention picks the `top_k` tokens that the large one reads.

    `owns_choice` False: the layer has no indexer and reuses the choice of the last layer that has one (GLM-5.2).
    """

    num_heads: int
    head_dim: int
    top_k: int
    rope_dim: int
    is_interleaved: bool = False  # pairs of its rotation, see RopeSpec
    owns_choice: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MLASpec:
    """Multi-head latent attention (arXiv 2405.04434); `rope_dim` columns are an extra shared key where NoPE is used."""

    num_heads: int
    q_rank: int  # 0: queries are projected in one step, without a latent
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    has_rotary: bool
    has_output_gate: bool
    latent_norm_eps: float
    rope: RopeSpec | None = None
    indexer: IndexerSpec | None = None

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Values cached per token: normalised latent and shared key."""
        return self.kv_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_dim**-0.5 * (self.rope.softmax_scale if self.rope is not None else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSparseSpec:
    """Block-sparse attention (MiniMax-M3): index heads score keys, and whole blocks of keys are read."""

    num_heads: int
    head_dim: int
    block_size: int
    top_blocks: int
    local_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GQASpec:
    """Grouped-query attention and its options; multi-head attention is the case of equal head counts.

    `qk_norm`: "head" normalises each head's q and k with a learned weight of `head_dim`; "full" normalises across all
    heads at once; "l2" divides by the root mean square after the rotation, without a weight.
    `window`: keys at a distance below it are seen; `chunk`: keys of the same aligned block of positions.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    rope: RopeSpec | None  # None: no position signal in this layer
    has_bias: bool = False  # on q, k, v
    has_output_bias: bool = False
    has_output_gate: bool = False  # q_proj is twice as wide: query and gate of each head
    has_sinks: bool = False  # one learned logit per head joins the softmax
    qk_norm: Literal["none", "head", "full", "l2"] = "none"
    qk_norm_eps: float = 0.0
    qk_norm_offset: float = 0.0  # added to the weights of these norms, as ModelSpec.norm_offset to all others
    window: int | None = None
    chunk: int | None = None
    value_scale: float = 1.0
    qkv_limit: float | None = None  # q, k and v are clipped to +-limit
    sparse: BlockSparseSpec | None = None
    temperature: tuple[float, float] | None = None  # (floor, scale) of Llama-4's query scaling in NoPE layers

    @property
    def kv_width(self) -> int:
        """Values cached per token."""
        return self.num_kv_heads * (self.head_dim + self.v_dim)

    @property
    def span(self) -> int | None:
        """Tokens after which the cache of this layer stops growing, None where it never does."""
        return self.window if self.window is not None else self.chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedSpec:
    """DeepSeek-V4 attention: one shared key-value head over a window, joined by compressed tokens further back.

    `ratio` 0: the window alone. 4: overlapping windows of 2 * 4 tokens give one entry each 4, and an indexer picks
    among them. 128: plain windows, all of them read. The output projection is low-rank in `num_output_groups` blocks.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    output_rank: int
    num_output_groups: int
    window: int
    ratio: int
    norm_eps: float
    rope: RopeSpec
    indexer: IndexerSpec | None

    @property
    def has_overlap(self) -> bool:
        """Two series per token, one for the window before and one for its own: twice the compressor's width."""
        return self.indexer is not None


MixerSpec = KDASpec | MLASpec | GQASpec | GatedDeltaSpec | CompressedSpec
