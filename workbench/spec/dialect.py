"""Keys that most transformers-style configs share, read once for all families.

A family's `parse` opens the config here, reads what is its own, and closes with `decoder`. Settings with two
spellings (rotary keys, dtype) must agree where both are given: two truths in one file are an error, not a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base import ConfigError
from workbench.spec.config import SERIALISED_DEFAULTS, ConfigReader
from workbench.spec.model import (
    Activation,
    DraftSpec,
    ImageSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    ProjectorSpec,
    SpecialTokens,
    VisionSpec,
)
from workbench.spec.quant import QuantSpec, RuleBook
from workbench.spec.quant_config import read_quant
from workbench.spec.rope import LlamaScaling, RopeSpec, YarnSpec

__all__ = [
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "SILU",
    "decoder",
    "is_named",
    "num_layers",
    "open_config",
    "plain_moe",
    "read_rope",
    "token_id",
]

# Far above any model; a hostile count must be refused here and not by running out of memory while listing tensors.
MAX_LAYERS, MAX_EXPERTS, MAX_EXPERTS_IN_ALL = 10_000, 1 << 16, 1 << 20
SILU = Activation(kind="silu")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Settings of training, of a serving engine or of the config class itself: nothing about the weights or the maths.
_NO_NEWS = frozenset(
    """
    model_type attention_dropout aux_loss_alpha router_aux_loss_coef output_router_logits seq_aux pretraining_tp
    ep_size max_window_layers _experts_implementation tf_version router_jitter_noise embd_pdrop resid_pdrop
    """.split()  # noqa: SIM905 - reads better than a list of literals
)


def is_named(config: Mapping[str, object], model_types: Sequence[str], architectures: Sequence[str]) -> bool:
    """Whether the outer config calls itself by one of these names; an architecture outranks a model type."""
    held = config.get("architectures")
    if isinstance(held, list) and held:
        return any(name in architectures for name in held if isinstance(name, str))
    return config.get("model_type") in model_types


def open_config(config: Mapping[str, object]) -> tuple[ConfigReader, ConfigReader]:
    """The outer reader and that of the text model; the same reader where the config is flat."""
    top = ConfigReader(config, ignore=SERIALISED_DEFAULTS | _NO_NEWS)
    return top, top.child("text_config") if top.has("text_config") else top


def num_layers(text: ConfigReader) -> int:
    return text.integer("num_hidden_layers", maximum=MAX_LAYERS)


def token_id(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """Ids under a key that may hold one id, a list of them, null, or be absent."""
    if not reader.has(key):
        reader.skip(key)
        return ()
    if reader.holds_list(key):
        return reader.int_list(key)
    return (reader.integer(key, minimum=0),)


def read_rope(text: ConfigReader, head_dim: int, *, dim: int | None = None, is_interleaved: bool = False) -> RopeSpec:
    """Rotary settings from `rope_theta`, `rope_scaling`, `partial_rotary_factor` or the newer `rope_parameters`.

    `dim`: rotated columns where the family knows; otherwise `head_dim` times the partial factor. Raises ConfigError
    where the two spellings disagree, UnsupportedModelError for a scaling of an unknown kind.
    """
    theta = text.number("rope_theta") if text.has("rope_theta") else None
    partial = text.number("partial_rotary_factor") if text.has("partial_rotary_factor") else None
    text.skip("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters")
    blocks = [text.child(key) for key in ("rope_scaling", "rope_parameters") if text.has(key)]
    for block in blocks:
        theta = _agreed("rope_theta", theta, block)
        partial = _agreed("partial_rotary_factor", partial, block)
    if theta is None:
        raise ConfigError("no rope_theta", expected="beside the other keys or in rope_parameters")
    if theta <= 1:
        text.refuse("rope_theta", "a base above 1 is expected")
    scalings = [_read_scaling(block) for block in blocks]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError("rope_scaling and rope_parameters say different things", found=f"{scalings}")
    yarn, llama, sections, takes_turns = scalings[0] if scalings else (None, None, (), False)
    rotated = dim if dim is not None else int(head_dim * (1.0 if partial is None else partial))
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise ConfigError(f"{rotated} rotated columns of a head of {head_dim}", expected="an even number within it")
    if sections and sum(sections) != rotated // 2:
        raise ConfigError("mrope_section does not cover the rotated pairs", found=f"{sections} of {rotated // 2}")
    return RopeSpec(
        theta=theta,
        dim=rotated,
        is_interleaved=is_interleaved,
        yarn=yarn,
        llama=llama,
        sections=sections,
        has_interleaved_sections=takes_turns,
    )


def _agreed(key: str, value: float | None, block: ConfigReader) -> float | None:
    if not block.has(key):
        return value
    inner = block.number(key)
    if value is not None and inner != value:
        raise ConfigError(f"{key} stands twice in the config with two values", found=f"{value:g} and {inner:g}")
    return inner


def _read_scaling(block: ConfigReader) -> tuple[YarnSpec | None, LlamaScaling | None, tuple[int, ...], bool]:
    key = "rope_type" if block.has("rope_type") else "type"
    kind = block.one_of(key, ("default", "yarn", "deepseek_yarn", "llama3", "mrope"), default="default")
    block.skip("type", "rope_type")
    sections = block.int_list("mrope_section", default=())
    takes_turns = block.boolean("mrope_interleaved", default=False)
    if kind in ("default", "mrope"):
        return None, None, sections, takes_turns
    factor, context = block.number("factor"), block.integer("original_max_position_embeddings")
    if factor < 1:
        block.refuse("factor", "a factor of at least 1 is expected")
    if kind == "llama3":
        low, high = block.number("low_freq_factor"), block.number("high_freq_factor")
        if high <= low:
            block.refuse("high_freq_factor", "must lie above low_freq_factor")
        scaling = LlamaScaling(factor=factor, original_context=context, low_freq_factor=low, high_freq_factor=high)
        return None, scaling, sections, takes_turns
    mscale, mscale_all_dim, attention_factor = (
        block.number(name) if block.has(name) else None for name in ("mscale", "mscale_all_dim", "attention_factor")
    )
    yarn = YarnSpec(
        factor=factor,
        original_context=context,
        beta_fast=block.number("beta_fast", default=32.0),
        beta_slow=block.number("beta_slow", default=1.0),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        attention_factor=attention_factor,
        truncate=block.boolean("truncate", default=True),
    )
    return yarn, None, sections, takes_turns


def plain_moe(
    *,
    num_experts: int,
    top_k: int,
    width: int,
    hidden_size: int,
    norm_eps: float,
    shared_width: int = 0,
    num_shared: int = 0,
    renormalize: bool = True,
    routed_scale: float = 1.0,
    activation: Activation = SILU,
    **options: object,
) -> MoESpec:
    """A mixture of experts at the model's own width; `options` are further fields of MoESpec."""
    if top_k > num_experts:
        raise ConfigError(f"{top_k} experts per token but only {num_experts} experts")
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        width=width,
        latent_dim=hidden_size,
        has_latent_norm=False,
        has_latent=False,
        num_shared=num_shared,
        shared_width=shared_width,
        renormalize=renormalize,
        routed_scale=routed_scale,
        norm_eps=norm_eps,
        activation=activation,
        **options,  # type: ignore[arg-type]
    )


def decoder(
    top: ConfigReader,
    text: ConfigReader,
    *,
    family: str,
    architecture: str,
    layers: Sequence[LayerSpec],
    norm_eps: float,
    media_key: str | None = None,
    vision: VisionSpec | None = None,
    projector: ProjectorSpec | None = None,
    image: ImageSpec | None = None,
    draft: DraftSpec | None = None,
    quant: QuantSpec | None = None,
    context_key: str = "max_position_embeddings",
    **options: object,
) -> ModelSpec:
    """The ModelSpec of a decoder with a plain residual stream; `options` are further fields of ModelSpec.

    Reads sizes, dtype, tokens, tying and, unless given, the quantisation block. Raises ConfigError for token ids
    outside the vocabulary and for sizes beyond reason.
    """
    experts = [layer.ffn.num_experts for layer in layers if isinstance(layer.ffn, MoESpec)]
    if sum(experts) > MAX_EXPERTS_IN_ALL:
        raise ConfigError(f"{sum(experts)} experts in all", expected=f"up to {MAX_EXPERTS_IN_ALL}")
    spellings = {r.string(k) for r in (top, text) for k in ("dtype", "torch_dtype") if r.has(k)}
    if len(spellings) > 1 or not spellings <= _DTYPES.keys():
        raise ConfigError("dtype is unclear", found=sorted(spellings), expected=" or ".join(_DTYPES))
    vocab_size = text.integer("vocab_size")
    spec = ModelSpec(
        family=family,
        architecture=architecture,
        hidden_size=text.integer("hidden_size"),
        vocab_size=vocab_size,
        layers=tuple(layers),
        residual=None,
        norm_eps=norm_eps,
        max_context=text.integer(context_key),
        dtype=_DTYPES[spellings.pop() if spellings else "bfloat16"],
        quant=quant or read_quant(top, text),
        tokens=_read_tokens(top, text, media_key, vocab_size),
        vision=vision,
        projector=projector,
        image=image,
        draft=draft,
        is_tied=_is_tied(top, text),
        **options,  # type: ignore[arg-type]
    )
    RuleBook(spec.quant).decide("")  # a rule that cannot be evaluated is an error of the config, here and not later
    return top.finish(spec)


def _is_tied(top: ConfigReader, text: ConfigReader) -> bool:
    values = {reader.boolean("tie_word_embeddings") for reader in (top, text) if reader.has("tie_word_embeddings")}
    if len(values) > 1:
        raise ConfigError("tie_word_embeddings differs between the outer config and text_config")
    return values.pop() if values else False


def _read_tokens(top: ConfigReader, text: ConfigReader, media_key: str | None, vocab_size: int) -> SpecialTokens:
    ids: dict[str, tuple[int, ...]] = {}
    for name in ("bos", "eos", "pad"):
        outer, inner = token_id(top, f"{name}_token_id"), token_id(text, f"{name}_token_id")
        if outer and inner and outer != inner:
            raise ConfigError(f"{name}_token_id differs between the outer config and text_config", found=(outer, inner))
        ids[name] = outer or inner
    media = token_id(top, media_key) if media_key else ()
    for name, values in {**ids, "media": media}.items():
        for value in values:
            if not 0 <= value < vocab_size:
                raise ConfigError(f"{name} token id {value} lies outside the vocabulary of {vocab_size}")
    first = {name: values[0] if values else -1 for name, values in ids.items()}
    return SpecialTokens(**first, media=media[0] if media else None, more_eos=ids["eos"][1:])
