"""Kimi K3: config dialect and tensor names.

What is new about this family (each tag stands again at its line):
  [K3-1] most mixers are KDA; every fourth and the very last are full attention. The two lists count layers from 1.
  [K3-2] full attention is MLA without any rotary signal, with an output gate, latent norms at a fixed eps of 1e-6.
  [K3-3] routed experts run at their own width between a down and an up projection, with a norm after their sum.
  [K3-4] block attention residuals replace the residual stream.
  [K3-5] SiTU-GLU activation everywhere.
  [K3-6] only routed experts are quantised (MXFP4); the block that says so sits inside `text_config`.
  [K3-7] `A_log` is stored longer than the number of heads; the tail is zero padding.
  [K3-8] the text part calls itself `kimi_linear`, like Kimi-Linear-48B; only the outer `kimi_k3` tells them apart.
Source: the published config, index and modelling files of moonshotai/Kimi-K3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec.config import SERIALISED_DEFAULTS, ConfigReader
from workbench.spec.model import (
    Activation,
    AttentionResidualSpec,
    DenseFFNSpec,
    ImageSpec,
    KDASpec,
    LayerSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    ProjectorSpec,
    SpecialTokens,
    VisionSpec,
)
from workbench.spec.quant import QuantGroup, RuleBook
from workbench.spec.quant_config import read_quant
from workbench.spec.storage import Piece, pieces_of
from workbench.spec.tensors import Role, TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

ARCHITECTURE = "KimiK3ForConditionalGeneration"
ARCHITECTURES = (ARCHITECTURE,)
FAMILY = "kimi_k3"

LATENT_NORM_EPS = 1e-6  # [K3-2] the released code builds these two norms with the class default, not rms_norm_eps
VISION_NORM_EPS = 2.0**-23  # nn.RMSNorm without an eps: machine epsilon of its fp32 computation
VISION_ROPE_THETA = 10000.0

# Far above any model; a hostile count must be refused here and not by running out of memory while listing tensors.
MAX_LAYERS, MAX_EXPERTS, MAX_EXPERTS_IN_ALL = 10_000, 1 << 16, 1 << 20


def matches(config: Mapping[str, object]) -> bool:
    """True where the outer config names K3; the inner `kimi_linear` is shared with another model [K3-8]."""
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and ARCHITECTURE in architectures
    return config.get("model_type") == FAMILY or named


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a K3 `config.json` and, where present, `preprocessor_config.json`.

    Raises ConfigError for a missing, mistyped or contradictory key, UnsupportedModelError for a switch that this
    version does not compute (rotary MLA, grouped routing, another activation, tied embeddings, ...).
    """
    top = ConfigReader(config, ignore=SERIALISED_DEFAULTS)
    top.skip("model_type")
    text = top.child("text_config")
    text.skip("model_type", "num_key_value_heads")
    _refuse_unsupported(text)
    if text.integer("num_nextn_predict_layers", default=0):
        text.refuse("num_nextn_predict_layers", "multi-token-prediction layers are not loaded")
    dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(text.string("dtype", default="bfloat16"))
    if dtype is None:
        text.refuse("dtype", "plain weights are stored in bfloat16, float16 or float32")
    hidden_size, eps = text.integer("hidden_size"), text.number("rms_norm_eps")
    vision, projector = _parse_vision(top.child("vision_config"), hidden_size)
    spec = ModelSpec(
        family=FAMILY,
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        vocab_size=text.integer("vocab_size"),
        layers=_parse_layers(text, eps),
        residual=AttentionResidualSpec(block_size=text.integer("attn_res_block_size"), norm_eps=eps),  # [K3-4]
        norm_eps=eps,
        max_context=text.integer("max_position_embeddings"),
        dtype=dtype,
        quant=read_quant(text, families=("compressed-tensors",)),
        tokens=SpecialTokens(
            bos=_same(top, text, "bos_token_id"),
            eos=_same(top, text, "eos_token_id"),
            pad=_same(top, text, "pad_token_id"),
            media=top.integer("media_placeholder_token_id", minimum=0),
        ),
        vision=vision,
        projector=projector,
        image=_parse_image(image_config, vision),
    )
    if spec.quant is not None:
        for moe in {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)}:
            if moe.width % spec.quant.group_size or moe.latent_dim % spec.quant.group_size:
                raise ConfigError(
                    "expert widths are not whole quantisation groups",
                    found=f"moe_intermediate_size {moe.width}, routed_expert_hidden_size {moe.latent_dim}",
                    expected=f"multiples of {spec.quant.group_size}",
                )
    top.skip("dtype")
    top.require("tie_word_embeddings", False)
    for name in ("bos", "eos", "pad", "media"):
        token = getattr(spec.tokens, name)
        if token >= spec.vocab_size:
            raise ConfigError(f"{name} token id {token} lies outside the vocabulary of {spec.vocab_size}")
    return top.finish(spec)


def _refuse_unsupported(text: ConfigReader) -> None:
    for key, wanted in (
        ("mla_use_nope", True),
        ("mla_use_output_gate", True),
        ("hidden_act", "situ"),
        ("moe_router_activation_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("num_expert_group", 1),
        ("topk_group", 1),
        ("moe_layer_freq", 1),
        ("tie_word_embeddings", False),
        ("use_grouped_topk", True),  # with one group this is plain top-k
    ):
        text.require(key, wanted)


def _same(top: ConfigReader, text: ConfigReader, key: str) -> int:
    outer, inner = top.integer(key, minimum=0), text.integer(key, minimum=0)
    if outer != inner:
        raise ConfigError(f"{key} differs between the outer config and text_config", found=f"{outer} and {inner}")
    return outer


def _parse_layers(text: ConfigReader, eps: float) -> tuple[LayerSpec, ...]:
    linear = text.child("linear_attn_config")
    linear.require("use_full_rank_gate", True)
    num_layers = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kda_positions = linear.int_list("kda_layers")
    full_positions = linear.int_list("full_attn_layers")
    # [K3-1] Both lists count from 1. A list that counts from 0 would still look plausible and shift every layer, so
    # the two must cover 1..N exactly, each once.
    if sorted([*kda_positions, *full_positions]) != list(range(1, num_layers + 1)):
        stray = sorted({*kda_positions, *full_positions} - set(range(1, num_layers + 1)))
        raise ConfigError(
            "kda_layers and full_attn_layers do not cover every layer exactly once, counting from 1",
            where="text_config.linear_attn_config",
            found=f"positions outside 1..{num_layers}: {stray}" if stray else "a layer in both lists, twice or missing",
            expected=f"each of 1..{num_layers} in exactly one list",
            next_step="Does the file count layers from 0? The published K3 config counts from 1",
        )
    num_heads, head_dim = linear.integer("num_heads"), linear.integer("head_dim")
    kda = KDASpec(
        num_heads=num_heads,
        head_dim=head_dim,
        conv_size=linear.integer("short_conv_kernel_size"),
        decay_bound=linear.number("gate_lower_bound"),
        decay_rank=head_dim,
        norm_eps=eps,
    )
    if kda.decay_bound >= 0:
        linear.refuse("gate_lower_bound", "the log decay is bounded below by a negative number")
    mla = MLASpec(
        num_heads=text.integer("num_attention_heads"),
        q_rank=text.integer("q_lora_rank"),
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        v_dim=text.integer("v_head_dim"),
        has_rotary=False,
        has_output_gate=True,
        latent_norm_eps=LATENT_NORM_EPS,
    )
    activation = Activation(  # [K3-5]
        kind="situ", beta=text.number("activation_situ_beta"), linear_beta=text.number("activation_situ_linear_beta")
    )
    dense = DenseFFNSpec(width=text.integer("intermediate_size"), activation=activation)
    num_shared, expert_width = text.integer("num_shared_experts"), text.integer("moe_intermediate_size")
    moe = MoESpec(
        num_experts=text.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_token"),
        width=expert_width,
        latent_dim=text.integer("routed_expert_hidden_size"),  # [K3-3]
        has_latent_norm=text.boolean("latent_moe_use_norm"),
        num_shared=num_shared,
        shared_width=num_shared * expert_width,
        renormalize=text.boolean("moe_renormalize"),
        routed_scale=text.number("routed_scaling_factor"),
        norm_eps=eps,
        activation=activation,
    )
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"{moe.top_k} experts per token but only {moe.num_experts} experts")
    if moe.num_experts * num_layers > MAX_EXPERTS_IN_ALL:
        raise ConfigError(f"{num_layers} layers of {moe.num_experts} experts", expected=f"up to {MAX_EXPERTS_IN_ALL}")
    num_dense = text.integer("first_k_dense_replace", minimum=0)
    full = set(full_positions)
    return tuple(
        LayerSpec(layer_idx=i, mixer=mla if i + 1 in full else kda, ffn=dense if i < num_dense else moe)
        for i in range(num_layers)
    )


def _parse_vision(vision: ConfigReader, text_width: int) -> tuple[VisionSpec, ProjectorSpec]:
    for key, wanted in (
        ("activation_func", "gelu_pytorch_tanh"),
        ("attn_bias", False),
        ("linear_bias", False),
        ("patch_embed_proj_bias", False),
        ("merge_type", "sd2_tpool"),
        ("mlp_type", "mlp2"),
        ("mm_projector_type", "patchmergerv2"),
        ("norm_type", "rmsnorm"),
        ("pos_emb_interpolation_mode", "bilinear"),
        ("pos_emb_type", "divided_fixed"),
        ("projector_hidden_act", "gelu"),
        ("text_hidden_size", text_width),
    ):
        vision.require(key, wanted)
    merge = vision.int_list("merge_kernel_size")
    if len(merge) != 2 or merge[0] != merge[1]:
        vision.refuse("merge_kernel_size", "a square merge is expected")
    spec = VisionSpec(
        num_layers=vision.integer("vt_num_hidden_layers", maximum=MAX_LAYERS),
        hidden_size=vision.integer("vt_hidden_size"),
        num_heads=vision.integer("vt_num_attention_heads"),
        qkv_width=vision.integer("qkv_hidden_size"),
        ffn_width=vision.integer("vt_intermediate_size"),
        patch_size=vision.integer("patch_size"),
        merge_size=merge[0],
        grid_height=vision.integer("init_pos_emb_height"),
        grid_width=vision.integer("init_pos_emb_width"),
        num_frames=vision.integer("init_pos_emb_time"),
        rope_theta=VISION_ROPE_THETA,
        norm_eps=VISION_NORM_EPS,
    )
    if spec.qkv_width % spec.num_heads or spec.head_dim % 4:
        vision.refuse("qkv_hidden_size", f"must be {spec.num_heads} heads of a width divisible by 4")
    vision.require("mm_hidden_size", spec.hidden_size)
    merged = spec.merge_size**2 * spec.hidden_size
    projector = ProjectorSpec(
        input_width=merged, hidden_width=merged, output_width=text_width, norm_eps=vision.number("projector_ln_eps")
    )
    return spec, projector


def _parse_image(image_config: Mapping[str, object] | None, vision: VisionSpec) -> ImageSpec:
    if image_config is None:
        return ImageSpec(patch_size=vision.patch_size, merge_size=vision.merge_size)
    media = ConfigReader(image_config, where="preprocessor_config.json").child("media_proc_cfg")
    background = media.child("transparent_bg_config")
    background.require("pattern", "chessboard")
    media.require("transparent_bg_fill_stage", "after_resize")
    media.require("fixed_output_tokens", None)
    media.require("patch_size", vision.patch_size)
    media.require("merge_kernel_size", vision.merge_size)
    return ImageSpec(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        patch_limit=media.integer("in_patch_limit"),
        patch_limit_per_side=media.integer("patch_limit_on_one_side"),
        mean=media.float_triple("image_mean"),
        std=media.float_triple("image_std"),
        chessboard_square=background.integer("chessboard_square_size"),
        chessboard_white=background.integer("chessboard_white_value"),
        chessboard_grey=background.integer("chessboard_gray_value"),
        white_on_top_left=background.boolean("chessboard_square_on_top_left"),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Every tensor the published files must hold, in file order: layers, then head, projector, tower."""
    storage = _Storage(spec)
    for layer in spec.layers:
        yield from _layer_tensors(spec, layer, storage)
    yield from _edge_tensors(spec)
    yield from _vision_tensors(spec)


Stored = tuple[QuantGroup, tuple[Piece, ...]]


class _Storage:
    """How each matrix is stored. As published, the rules are not to be trusted: they would quantise what the files hold
    plain, so that one MXFP4 group means the routed experts alone. Another scheme, or several, say what they mean."""

    def __init__(self, spec: ModelSpec):
        self.quant, self.book = spec.quant, RuleBook(spec.quant)
        self.is_as_published = spec.quant is None or (spec.quant.scheme == "mxfp4" and not spec.quant.groups)

    def of(self, module: str, rows: int, columns: int, *, is_expert: bool) -> Stored | None:
        """What a matrix is stored in; None where it is plain. `module` is the one whose rules count."""
        if self.quant is None or (self.is_as_published and not is_expert):
            return None
        group: QuantGroup | None
        if self.is_as_published:
            group = QuantGroup(targets=(), scheme=self.quant.scheme, group_size=self.quant.group_size)
        else:
            group = self.book.decide(module).group
        return None if group is None else (group, pieces_of(group.scheme, rows, columns, group.group_size))


def _in_pieces(
    module: str,
    shape: tuple[int, ...],
    stored: Stored,
    *,
    role: Role,
    param: str,
    layer: int | None,
    expert: int | None = None,
) -> list[TensorSpec]:
    """What `module`'s matrix is stored as. A list, and no plain matrix first: this is made half a million times."""
    num_weights = math.prod(shape)
    group, pieces = stored
    return [
        TensorSpec(
            name=module + piece.suffix,
            shape=piece.shape,
            dtype=piece.dtype,
            role=role,
            param=param,
            layer=layer,
            expert=expert,
            part=piece.suffix.lstrip("."),  # type: ignore[arg-type]
            weights=num_weights if piece.holds_weights else 0,
            scheme=group.scheme,
            group_size=group.group_size,
        )
        for piece in pieces
    ]


# Matrices that a converted checkpoint may store in a scheme of its own.
_STORED_BY_RULE = re.compile(
    r"mixer\.(?:q|k|v|g|o|q_a|q_b|kv_a)_proj\.weight|ffn\.(?:shared\.)?(?:gate|up|down)_proj\.weight"
)


def _layer_tensors(spec: ModelSpec, layer: LayerSpec, storage: _Storage) -> Iterator[TensorSpec]:
    """Tensors of one layer, matrices in the pieces that they are stored in."""
    for tensor in _plain_layer_tensors(spec, layer):
        stored: Stored | None = None
        module = tensor.name.removesuffix(".weight")
        if _STORED_BY_RULE.fullmatch(tensor.param.split(".", 2)[2]):
            stored = storage.of(module, *tensor.shape, is_expert=False)
        if stored is not None:
            yield from _in_pieces(
                module, tensor.shape, stored, role=tensor.role, param=tensor.param, layer=tensor.layer
            )
        else:
            yield tensor
    if isinstance(layer.ffn, MoESpec):
        prefix = f"language_model.model.layers.{layer.layer_idx}.block_sparse_moe."
        yield from _expert_tensors(spec, layer, layer.ffn, prefix, storage)


def _plain_layer_tensors(spec: ModelSpec, layer: LayerSpec) -> Iterator[TensorSpec]:
    """All but the routed experts, as if nothing were quantised."""
    d, i = spec.hidden_size, layer.layer_idx
    prefix, target = f"language_model.model.layers.{i}.", f"layers.{i}."

    def tensor(
        published: str,
        ours: str,
        shape: tuple[int, ...],
        role: Role,
        dtype: str = spec.dtype,
        used_rows: int | None = None,
    ) -> TensorSpec:
        return TensorSpec(
            name=prefix + published,
            shape=shape,
            dtype=dtype,
            role=role,
            param=target + ours,
            layer=i,
            used_rows=used_rows,
        )

    yield tensor("input_layernorm.weight", "mixer_norm.weight", (d,), "norm")
    yield tensor("post_attention_layernorm.weight", "ffn_norm.weight", (d,), "norm")
    for published, ours in (("self_attention_res", "mixer_res"), ("mlp_res", "ffn_res")):
        yield tensor(f"{published}_norm.weight", f"{ours}.norm.weight", (d,), "residual_mix")
        yield tensor(f"{published}_proj.weight", f"{ours}.proj.weight", (1, d), "residual_mix")

    mixer = layer.mixer
    if isinstance(mixer, KDASpec):
        width, rank, heads = mixer.width, mixer.decay_rank, mixer.num_heads
        stored_heads = 1 << (heads - 1).bit_length()  # [K3-7] 96 heads are stored as 128; headers have the last word
        for x in "qkv":
            yield tensor(f"self_attn.{x}_proj.weight", f"mixer.{x}_proj.weight", (width, d), "kda")
            yield tensor(
                f"self_attn.{x}_conv1d.weight", f"mixer.{x}_conv.weight", (width, 1, mixer.conv_size), "kda", "F32"
            )
        yield tensor("self_attn.f_a_proj.weight", "mixer.f_a_proj.weight", (rank, d), "kda")
        yield tensor("self_attn.f_b_proj.weight", "mixer.f_b_proj.weight", (width, rank), "kda")
        yield tensor("self_attn.b_proj.weight", "mixer.b_proj.weight", (heads, d), "kda")
        yield tensor("self_attn.A_log", "mixer.A_log", (stored_heads,), "kda", "F32", used_rows=heads)
        yield tensor("self_attn.dt_bias", "mixer.dt_bias", (width,), "kda", "F32")
        yield tensor("self_attn.o_norm.weight", "mixer.o_norm.weight", (mixer.head_dim,), "kda", "F32")
        yield tensor("self_attn.g_proj.weight", "mixer.g_proj.weight", (width, d), "kda")
        yield tensor("self_attn.o_proj.weight", "mixer.o_proj.weight", (d, width), "kda")
    else:
        assert isinstance(mixer, MLASpec)
        out_width = mixer.num_heads * mixer.v_dim
        kv_width = mixer.num_heads * (mixer.nope_dim + mixer.v_dim)
        for published, ours, shape in (
            ("q_a_proj", "q_a_proj", (mixer.q_rank, d)),
            ("q_a_layernorm", "q_a_norm", (mixer.q_rank,)),
            ("q_b_proj", "q_b_proj", (mixer.num_heads * mixer.qk_dim, mixer.q_rank)),
            ("kv_a_proj_with_mqa", "kv_a_proj", (mixer.cache_dim, d)),
            ("kv_a_layernorm", "kv_a_norm", (mixer.kv_rank,)),
            ("kv_b_proj", "kv_b_proj", (kv_width, mixer.kv_rank)),
            ("g_proj", "g_proj", (out_width, d)),
            ("o_proj", "o_proj", (d, out_width)),
        ):
            yield tensor(f"self_attn.{published}.weight", f"mixer.{ours}.weight", shape, "mla")

    ffn = layer.ffn
    if isinstance(ffn, DenseFFNSpec):
        for x, shape in (("gate", (ffn.width, d)), ("up", (ffn.width, d)), ("down", (d, ffn.width))):
            yield tensor(f"mlp.{x}_proj.weight", f"ffn.{x}_proj.weight", shape, "dense_ffn")
        return
    moe = "block_sparse_moe."
    yield tensor(moe + "gate.weight", "ffn.router.weight", (ffn.num_experts, d), "router")
    yield tensor(moe + "gate.e_score_correction_bias", "ffn.router.bias", (ffn.num_experts,), "router", "F32")
    yield tensor(
        moe + "routed_expert_down_proj.weight", "ffn.latent_in.weight", (ffn.latent_dim, d), "latent_projection"
    )
    if ffn.has_latent_norm:
        yield tensor(moe + "routed_expert_norm.weight", "ffn.latent_norm.weight", (ffn.latent_dim,), "norm")
    yield tensor(
        moe + "routed_expert_up_proj.weight", "ffn.latent_out.weight", (d, ffn.latent_dim), "latent_projection"
    )
    width = ffn.shared_width
    for x, shape in (("gate", (width, d)), ("up", (width, d)), ("down", (d, width))):
        yield tensor(moe + f"shared_experts.{x}_proj.weight", f"ffn.shared.{x}_proj.weight", shape, "shared_expert")


def _expert_tensors(
    spec: ModelSpec, layer: LayerSpec, moe: MoESpec, prefix: str, storage: _Storage
) -> Iterator[TensorSpec]:
    up, down = (moe.width, moe.latent_dim), (moe.latent_dim, moe.width)
    forms = [  # gate, down, up; the rules for the first expert hold for all
        (x, shape, storage.of(f"{prefix}experts.0.{x}", *shape, is_expert=True))
        for x, shape in (("w1", up), ("w2", down), ("w3", up))
    ]
    for expert in range(moe.num_experts):
        for x, shape, stored in forms:
            module, param = f"{prefix}experts.{expert}.{x}", f"layers.{layer.layer_idx}.ffn.experts.{x}.weight"
            if stored is not None:
                yield from _in_pieces(
                    module,
                    shape,
                    stored,
                    role="routed_expert",
                    param=param,
                    layer=layer.layer_idx,
                    expert=expert,
                )
            else:
                yield TensorSpec(
                    name=f"{module}.weight",
                    shape=shape,
                    dtype=spec.dtype,
                    role="routed_expert",
                    param=param,
                    layer=layer.layer_idx,
                    expert=expert,
                )


def _edge_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    d, v = spec.hidden_size, spec.vocab_size
    edges: tuple[tuple[str, str, tuple[int, ...], Role], ...] = (
        ("lm_head.weight", "head.weight", (v, d), "head"),
        ("model.embed_tokens.weight", "embed.weight", (v, d), "embedding"),
        ("model.norm.weight", "final_norm.weight", (d,), "norm"),
        ("model.output_attn_res_norm.weight", "final_res.norm.weight", (d,), "residual_mix"),
        ("model.output_attn_res_proj.weight", "final_res.proj.weight", (1, d), "residual_mix"),
    )
    for published, ours, shape, role in edges:
        yield TensorSpec(name=f"language_model.{published}", shape=shape, dtype=spec.dtype, role=role, param=ours)


def _vision_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    vision, projector = spec.vision, spec.projector
    if vision is None or projector is None:
        return
    c, q, f, p = vision.hidden_size, vision.qkv_width, vision.ffn_width, vision.patch_size

    def tensor(published: str, ours: str, shape: tuple[int, ...], role: Role = "vision") -> TensorSpec:
        return TensorSpec(name=published, shape=shape, dtype=spec.dtype, role=role, param=ours)

    inner, outer = projector.hidden_width, projector.output_width
    yield tensor("mm_projector.proj.0.weight", "projector.fc0.weight", (inner, projector.input_width), "projector")
    yield tensor("mm_projector.proj.2.weight", "projector.fc1.weight", (outer, inner), "projector")
    yield tensor("mm_projector.post_norm.weight", "projector.norm.weight", (outer,), "projector")
    yield tensor("vision_tower.patch_embed.proj.weight", "vision.patch_embed.weight", (c, 3, p, p))
    grid = (vision.grid_height, vision.grid_width, c)
    yield tensor("vision_tower.patch_embed.pos_emb.weight", "vision.pos_embed.weight", grid)
    for b in range(vision.num_layers):
        for published, ours, shape in (
            ("norm0", "norm0", (c,)),
            ("norm1", "norm1", (c,)),
            ("wqkv", "wqkv", (3 * q, c)),
            ("wo", "wo", (c, q)),
            ("mlp.fc0", "fc0", (f, c)),
            ("mlp.fc1", "fc1", (c, f)),
        ):
            name = f"vision_tower.encoder.blocks.{b}.{published}.weight"
            yield tensor(name, f"vision.blocks.{b}.{ours}.weight", shape)
    yield tensor("vision_tower.encoder.final_layernorm.weight", "vision.final_norm.weight", (c,))
