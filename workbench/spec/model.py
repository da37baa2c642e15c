"""What a model is: one vocabulary for every family, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Activation",
    "AttentionResidualSpec",
    "DenseFFNSpec",
    "FFNSpec",
    "ImageSpec",
    "KDASpec",
    "LayerSpec",
    "MLASpec",
    "MixerSpec",
    "ModelSpec",
    "MoESpec",
    "ProjectorSpec",
    "QuantSpec",
    "SpecialTokens",
    "VisionSpec",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """Gated activation of a feed-forward block.

    `situ`: beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta), computed in fp32.
    `silu`: g * sigmoid(g) * u.
    """

    kind: Literal["situ", "silu"]
    beta: float = 1.0
    linear_beta: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KDASpec:
    """Kimi Delta Attention: gated delta rule with a decay per head and key channel (arXiv 2510.26692).

    State per sequence: (num_heads, head_dim, head_dim) fp32, plus `conv_size - 1` inputs of each of q, k, v.
    """

    num_heads: int
    head_dim: int
    conv_size: int
    decay_bound: float  # log decay lies in (decay_bound, 0)
    decay_rank: int  # width of the f_a / f_b bottleneck
    norm_eps: float
    l2_eps: float = 1e-6  # added to the SUM of squares of q and k

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MLASpec:
    """Multi-head latent attention (arXiv 2405.04434); `rope_dim` columns are an extra shared key where NoPE is used."""

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    has_rotary: bool
    has_output_gate: bool
    latent_norm_eps: float

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Values cached per token: normalised latent and shared key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFFNSpec:
    width: int
    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """Mixture of experts with a sigmoid router, run at `latent_dim` (equal to the model width where not latent)."""

    num_experts: int
    top_k: int
    width: int  # inner width of one routed expert
    latent_dim: int
    has_latent_norm: bool
    num_shared: int
    shared_width: int  # inner width of all shared experts together
    renormalize: bool
    routed_scale: float
    norm_eps: float
    activation: Activation


MixerSpec = KDASpec | MLASpec
FFNSpec = DenseFFNSpec | MoESpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    layer_idx: int  # from 0
    mixer: MixerSpec
    ffn: FFNSpec

    @property
    def is_moe(self) -> bool:
        return isinstance(self.ffn, MoESpec)

    @property
    def kind(self) -> str:
        """Short name, e.g. "KDA+MoE"; layers of one kind run the same operators."""
        mixer = "KDA" if isinstance(self.mixer, KDASpec) else "MLA"
        return f"{mixer}+{'MoE' if self.is_moe else 'dense'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionResidualSpec:
    """Block attention residuals (arXiv 2603.15031): every sublayer reads a softmax mix of saved block sums.

    A vector is saved before layers 0, block_size, 2 * block_size, ...
    """

    block_size: int
    norm_eps: float

    def num_saved(self, num_layers_done: int) -> int:
        """Saved vectors in flight after that many layers, counted from the first layer of the model."""
        return -(-num_layers_done // self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """Vision transformer over packed patches of images of any size."""

    num_layers: int
    hidden_size: int
    num_heads: int
    qkv_width: int  # num_heads * head_dim
    ffn_width: int
    patch_size: int
    merge_size: int  # merge_size x merge_size neighbours make one token
    grid_height: int  # learned position grid, rows
    grid_width: int
    num_frames: int
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.qkv_width // self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorSpec:
    input_width: int  # merge_size**2 * vision hidden size
    hidden_width: int
    output_width: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """Limits and constants of image preprocessing; from `preprocessor_config.json` or the family's defaults."""

    patch_size: int = 14
    merge_size: int = 2
    patch_limit: int = 65536
    patch_limit_per_side: int = 512
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    chessboard_square: int = 8
    chessboard_white: int = 255
    chessboard_grey: int = 180
    white_on_top_left: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantSpec:
    """How the routed experts are stored in the published files; everything else is plain."""

    scheme: Literal["mxfp4"]
    group_size: int
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    bos: int
    eos: int
    pad: int
    media: int | None  # one per image in the prompt; replaced by the image's rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model as the rest of the workbench knows it; made only by a family's `parse`.

    `unknown_keys` are config keys nobody here reads, as ("text_config.some_key", value): on day 0 they are the news.
    """

    family: str
    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    residual: AttentionResidualSpec | None
    norm_eps: float
    max_context: int
    dtype: str  # storage dtype of plain weights, safetensors name
    quant: QuantSpec | None
    tokens: SpecialTokens
    vision: VisionSpec | None
    projector: ProjectorSpec | None
    image: ImageSpec | None
    unknown_keys: tuple[tuple[str, object], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layers_of(self, kind: type) -> tuple[LayerSpec, ...]:
        """Layers whose mixer or feed-forward block is of the given spec class."""
        return tuple(x for x in self.layers if isinstance(x.mixer, kind) or isinstance(x.ffn, kind))
