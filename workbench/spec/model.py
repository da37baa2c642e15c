"""What a model is: one vocabulary for every family, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.spec.mixers import CompressedSpec, GatedDeltaSpec, GQASpec, KDASpec, MixerSpec, MLASpec
from workbench.spec.quant import QuantSpec

__all__ = [
    "Activation",
    "AttentionResidualSpec",
    "DenseFFNSpec",
    "DraftSpec",
    "FFNSpec",
    "HyperConnectionSpec",
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
    `silu`: g * sigmoid(g) * u; with a `limit`, g is first cut off above and u on both sides.
    `swiglu_oai`: g * sigmoid(alpha * g) * (u + 1), after the same cuts.
    """

    kind: Literal["situ", "silu", "swiglu_oai"]
    beta: float = 1.0
    linear_beta: float = 1.0
    alpha: float = 1.0
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFFNSpec:
    width: int
    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """Mixture of experts, run at `latent_dim` (equal to the model width where `has_latent` is False).

    `scoring` is what turns router logits into scores; "softmax_topk" takes the softmax over the chosen ones only.
    Experts lie in `num_groups` groups of which the best `top_groups` stay in the race, by the sum of the best two.
    """

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
    scoring: Literal["sigmoid", "softmax", "softmax_topk", "sqrtsoftplus"] = "sigmoid"
    has_latent: bool = True
    has_correction_bias: bool = True  # joins the choice, not the weights
    has_router_bias: bool = False  # an ordinary bias of the router's logits
    has_expert_bias: bool = False
    has_shared_gate: bool = False  # sigmoid of one more projection scales the shared expert
    scales_input: bool = False  # the weight scales an expert's input rather than its output (Llama-4)
    num_groups: int = 1
    top_groups: int = 1
    is_hash_routed: bool = False  # experts are looked up by token id, the router only weighs them


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
        return f"{_mixer_name(self.mixer)}+{'MoE' if self.is_moe else 'dense'}"


def _mixer_name(mixer: MixerSpec) -> str:
    if isinstance(mixer, GQASpec):
        marks = {"window": mixer.window, "chunk": mixer.chunk, "sparse": mixer.sparse, "NoPE": mixer.rope is None}
        return "GQA" + "".join(f" {name}" for name, value in marks.items() if value)
    if isinstance(mixer, MLASpec) and mixer.indexer is not None:
        return "MLA sparse" if mixer.indexer.owns_choice else "MLA sparse, shared choice"
    if isinstance(mixer, CompressedSpec):
        return f"compressed 1/{mixer.ratio}" if mixer.ratio else "compressed window"
    return {KDASpec: "KDA", MLASpec: "MLA", GatedDeltaSpec: "delta net"}[type(mixer)]


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
class HyperConnectionSpec:
    """Manifold-constrained hyper-connections: `num_streams` residual streams, mixed by doubly stochastic matrices."""

    num_streams: int
    num_iterations: int  # Sinkhorn steps
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSpec:
    """Multi-token-prediction layers after the last one: kept apart, for speculation; the model is whole without them.

    Each joins the hidden state with the embedding of the next token by a (D, 2 D) projection, then runs `layer`.
    """

    num_layers: int
    layer: LayerSpec
    has_own_embedding: bool  # and head, stored again in the files


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """Vision transformer over packed patches of images of any size; `kind` is its name, the rest says what it does.

    `resize`: how the position grid is brought to an image's size, with its corners on the image's where
    `aligns_corners`. `rotates_halves`: column i of a head pairs with i + head_dim / 2, pairs turn by row in the first
    half and by column in the second; otherwise neighbours are pairs, which turn by column and row in turns.
    `temporal_patch`: frames of one patch; an image is repeated to fill them. `deepstack`: states after these layers are
    merged for themselves and added to the first decoder layers, at the image's places.
    """

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
    kind: Literal["moonvit_k3", "moonvit", "qwen3_vl"] = "moonvit_k3"
    norm: Literal["rms", "layer"] = "rms"  # layer norms have biases
    has_bias: bool = False  # on every matrix
    has_final_norm: bool = True
    resize: Literal["bilinear", "bicubic"] = "bilinear"
    aligns_corners: bool = False
    has_flat_grid: bool = False  # the position grid is stored (rows * columns, width)
    rotates_halves: bool = False
    temporal_patch: int = 1
    deepstack: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.qkv_width // self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorSpec:
    """Two layers with a GELU between them, and a norm: of what comes out, or of each patch before they are merged.

    `num_deepstack`: further ones of the same widths, for the states of `VisionSpec.deepstack`; they norm after merging.
    """

    input_width: int  # merge_size**2 * vision hidden size
    hidden_width: int
    output_width: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_at: Literal["output", "patch", "merged"] = "output"
    has_bias: bool = False
    num_merged: int = 4  # patches of one token
    num_deepstack: int = 0

    @property
    def patch_width(self) -> int:
        return self.input_width // self.num_merged


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """Limits and constants of image preprocessing; from `preprocessor_config.json` or the family's defaults."""

    patch_size: int = 14
    merge_size: int = 2
    patch_limit: int = 65536
    patch_limit_per_side: int = 512
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    has_chessboard: bool = True  # behind what is transparent; False: the alpha plane is dropped before all else
    chessboard_square: int = 8
    chessboard_white: int = 255
    chessboard_grey: int = 180
    white_on_top_left: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Token ids; -1 where the config names none. `more_eos` end an answer as well."""

    bos: int
    eos: int
    pad: int
    media: int | None  # one per image in the prompt; replaced by the image's rows
    more_eos: tuple[int, ...] = ()


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
    is_tied: bool = False  # the head reads the embedding matrix, which is stored once
    norm_offset: float = 0.0  # added to every norm weight: 1 where the files hold the difference from one
    streams: HyperConnectionSpec | None = None
    draft: DraftSpec | None = None
    has_transposed_experts: bool = False  # plain fused experts are stored (experts, inputs, outputs)
    unread_parts: tuple[str, ...] = ()  # whole parts of the model that are not described here, e.g. a vision tower

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_mrope(self) -> bool:
        """Whether tokens of images have places of their own on three axes."""
        return any(isinstance(x.mixer, GQASpec) and x.mixer.rope and x.mixer.rope.sections for x in self.layers)

    @property
    def image_width(self) -> int:
        """Width of an image's feature rows: the model's, for the embedding and for each state of DeepStack."""
        return self.hidden_size * (1 + (len(self.vision.deepstack) if self.vision else 0))

    def layers_of(self, kind: type) -> tuple[LayerSpec, ...]:
        """Layers whose mixer or feed-forward block is of the given spec class."""
        return tuple(x for x in self.layers if isinstance(x.mixer, kind) or isinstance(x.ffn, kind))
