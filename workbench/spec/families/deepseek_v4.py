"""DeepSeek-V4 (Flash and Pro): counted, audited and planned, not run.

What is new against DeepSeek-V3.2:
  [V4-1] one key-value head of 512, the same tensor read as key and value, over a window of 128 tokens; layers with a
         compression ratio add entries that stand for 4 tokens (overlapping, picked by an indexer) or 128 (all read).
         The ratio list has entries for the draft layers behind those of the model.
  [V4-2] a learned sink per head; the output is rotated back; the output projection is low-rank in groups of heads.
  [V4-3] hyper-connections: four residual streams, mixed by matrices that Sinkhorn steps make doubly stochastic.
  [V4-4] the first layers choose experts by a table of token ids (`tid2eid`); scores are sqrt(softplus(logit)).
  [V4-5] clamped SwiGLU; every layer has experts and one shared expert; no dense layer.
  [V4-6] experts in FP4 (codes I8, scales F8_E8M0), other linear layers in FP8 tiles with F8_E8M0 scales.
  [V4-7] names of the reference code, without a prefix; draft layers under `mtp.`, three matrices apart.
Source: configs of deepseek-ai/DeepSeek-V4-Flash and V4-Pro, transformers' deepseek_v4 and its weight conversion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import CompressedSpec, IndexerSpec
from workbench.spec.model import Activation, DraftSpec, HyperConnectionSpec, LayerSpec, ModelSpec, MoESpec
from workbench.spec.naming import Writer
from workbench.spec.quant import QuantGroup, QuantSpec, RuleBook
from workbench.spec.quant_config import read_quant
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "draft_tensors", "matches", "parse", "tensors"]

FAMILY = "deepseek_v4"
ARCHITECTURES = ("DeepseekV4ForCausalLM",)


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a DeepSeek-V4 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("num_key_value_heads", 1),
        ("topk_method", "noaux_tc"),
    ):
        text.require(key, wanted, default=wanted)
    eps, count = text.number("rms_norm_eps"), num_layers(text)
    num_draft = text.integer("num_nextn_predict_layers", minimum=0, maximum=64, default=0)
    ratios = text.int_list("compress_ratios")
    if len(ratios) < count or not set(ratios) <= {0, 4, 128}:
        raise ConfigError("compress_ratios must hold 0, 4 or 128 for each layer", found=f"{len(ratios)}: {set(ratios)}")
    mixers = {ratio: _read_mixer(text, ratio, eps) for ratio in (0, 4, 128)}
    moe, num_hashed = _read_moe(text, eps), text.integer("num_hash_layers", minimum=0)
    hashed = dataclasses.replace(moe, is_hash_routed=True, has_correction_bias=False)  # [V4-4]
    layers = [
        LayerSpec(layer_idx=i, mixer=mixers[ratios[i]], ffn=hashed if i < num_hashed else moe) for i in range(count)
    ]
    draft_mixer = mixers[ratios[count] if len(ratios) > count else 0]
    draft_layer = LayerSpec(layer_idx=count, mixer=draft_mixer, ffn=moe)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=layers,
        norm_eps=eps,
        quant=_read_quant(text),
        draft=DraftSpec(num_layers=num_draft, layer=draft_layer, has_own_embedding=False) if num_draft else None,
        streams=HyperConnectionSpec(  # [V4-3]
            num_streams=text.integer("hc_mult"),
            num_iterations=text.integer("hc_sinkhorn_iters"),
            eps=text.number("hc_eps"),
        ),
    )


def _read_mixer(text: ConfigReader, ratio: int, eps: float) -> CompressedSpec:  # [V4-1]
    rope_dim, head_dim = text.integer("qk_rope_head_dim"), text.integer("head_dim")
    rope = read_rope(text, head_dim, dim=rope_dim, is_interleaved=True)
    if ratio:
        assert rope.yarn is not None or not text.has("rope_scaling")
        yarn = None if rope.yarn is None else dataclasses.replace(rope.yarn, attention_factor=1.0)
        rope = dataclasses.replace(rope, theta=text.number("compress_rope_theta"), yarn=yarn)
    else:
        rope = dataclasses.replace(rope, yarn=None)  # the window alone is not stretched
    indexer = IndexerSpec(
        num_heads=text.integer("index_n_heads"),
        head_dim=text.integer("index_head_dim"),
        top_k=text.integer("index_topk"),
        rope_dim=rope_dim,
        is_interleaved=True,
    )
    mixer = CompressedSpec(
        num_heads=text.integer("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=text.integer("q_lora_rank"),
        output_rank=text.integer("o_lora_rank"),
        num_output_groups=text.integer("o_groups"),
        window=text.integer("sliding_window"),
        ratio=ratio,
        norm_eps=eps,
        rope=rope,
        indexer=indexer if ratio == 4 else None,
    )
    if mixer.num_heads % mixer.num_output_groups:
        text.refuse("o_groups", f"must divide the {mixer.num_heads} heads")
    return mixer


def _read_moe(text: ConfigReader, eps: float) -> MoESpec:
    width, num_shared = text.integer("moe_intermediate_size"), text.integer("n_shared_experts", minimum=0)
    return plain_moe(
        num_experts=text.integer("n_routed_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=width,
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        num_shared=num_shared,
        shared_width=num_shared * width,
        renormalize=text.boolean("norm_topk_prob"),
        routed_scale=text.number("routed_scaling_factor"),
        activation=Activation(kind="silu", limit=text.number("swiglu_limit")),  # [V4-5]
        scoring=text.one_of("scoring_func", ("sqrtsoftplus",)),
    )


def _read_quant(text: ConfigReader) -> QuantSpec | None:  # [V4-6]
    expert_dtype = text.one_of("expert_dtype", ("fp4", "fp8"), default="fp8")
    quant = read_quant(text)
    if quant is None:
        return None
    group = QuantGroup(targets=("Linear",), scheme="fp8_block_bytes", group_size=quant.group_size)
    experts = QuantGroup(targets=(r"re:.*\.ffn\.experts\.",), scheme="mxfp4_bytes", group_size=32)
    groups = (experts, group) if expert_dtype == "fp4" else (group,)
    return dataclasses.replace(quant, scheme=groups[0].scheme, group_size=groups[0].group_size, groups=groups)


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    book, d, v = RuleBook(spec.quant), spec.hidden_size, spec.vocab_size
    for layer in spec.layers:
        i = layer.layer_idx
        yield from _layer(Writer(spec, book, f"layers.{i}.", f"layers.{i}.", i), layer)
    edge = Writer(spec, book)
    yield edge.plain("embed.weight", "embed.weight", (v, d), "embedding")
    yield edge.plain("norm.weight", "final_norm.weight", (d,), "norm", "F32")
    yield edge.plain("head.weight", "head.weight", (v, d), "head")
    yield from _head_mix(edge)


def draft_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:  # [V4-7]
    book, d = RuleBook(spec.quant), spec.hidden_size
    for k in range(spec.draft.num_layers if spec.draft is not None else 0):
        assert spec.draft is not None
        writer = Writer(spec, book, f"mtp.{k}.", f"draft.{k}.", spec.num_layers + k, role="draft")
        for published, ours in (("enorm", "embed_norm"), ("hnorm", "hidden_norm"), ("norm", "final_norm")):
            yield writer.plain(f"{published}.weight", f"{ours}.weight", (d,), "draft", "F32")
        for published, ours in (("e_proj", "embed_join"), ("h_proj", "hidden_join")):
            yield from writer.linear(published, ours, d, d, "draft")
        yield from _head_mix(writer)
        yield from _layer(writer, spec.draft.layer)


def _head_mix(writer: Writer) -> Iterator[TensorSpec]:
    streams = writer.spec.streams
    assert streams is not None
    n = streams.num_streams
    for part, shape in (("fn", (n, n * writer.spec.hidden_size)), ("base", (n,)), ("scale", (1,))):
        yield writer.plain(f"hc_head_{part}", f"final_streams.{part}", shape, "streams", "F32")


def _layer(writer: Writer, layer: LayerSpec) -> Iterator[TensorSpec]:
    d, streams, mixer, moe = writer.spec.hidden_size, writer.spec.streams, layer.mixer, layer.ffn
    assert streams is not None
    assert isinstance(mixer, CompressedSpec)
    assert isinstance(moe, MoESpec)
    for published, ours in (("attn", "mixer"), ("ffn", "ffn")):
        yield writer.plain(f"{published}_norm.weight", f"{ours}_norm.weight", (d,), "norm", "F32")
        n = streams.num_streams
        size = (2 + n) * n  # to read, to write, and to mix the streams among themselves
        for part, shape in (("fn", (size, n * d)), ("base", (size,)), ("scale", (3,))):
            name = f"hc_{published}_{part}"
            yield writer.plain(name, f"{ours}_streams.{part}", shape, "streams", "F32")
    yield from _attention(writer, mixer, d)
    yield writer.plain("ffn.gate.weight", "ffn.router.weight", (moe.num_experts, d), "router")
    if moe.is_hash_routed:
        table = (writer.spec.vocab_size, moe.top_k)
        tensor = writer.plain("ffn.gate.tid2eid", "ffn.router.table", table, "router", "I64")
        yield dataclasses.replace(tensor, weights=0, part="weight")  # a lookup of ids, no parameter
    else:
        yield writer.plain("ffn.gate.bias", "ffn.router.bias", (moe.num_experts,), "router", "F32")
    for x, ours, rows, columns in (
        ("w1", "gate_proj", moe.shared_width, d),
        ("w2", "down_proj", d, moe.shared_width),
        ("w3", "up_proj", moe.shared_width, d),
    ):
        yield from writer.linear(f"ffn.shared_experts.{x}", f"ffn.shared.{ours}", rows, columns, "shared_expert")
    for e in range(moe.num_experts):
        for x, rows, columns in (("w1", moe.width, d), ("w2", d, moe.width), ("w3", moe.width, d)):
            name = f"ffn.experts.{e}.{x}"
            yield from writer.linear(name, f"ffn.experts.{x}", rows, columns, "routed_expert", expert=e)


def _attention(writer: Writer, mixer: CompressedSpec, d: int) -> Iterator[TensorSpec]:  # [V4-1] [V4-2]
    heads, dim = mixer.num_heads, mixer.head_dim
    rank = mixer.num_output_groups * mixer.output_rank
    for published, ours, rows, columns in (
        ("wq_a", "q_a_proj", mixer.q_rank, d),
        ("wq_b", "q_b_proj", heads * dim, mixer.q_rank),
        ("wkv", "kv_proj", dim, d),
        ("wo_a", "o_a_proj", rank, heads * dim // mixer.num_output_groups),
        ("wo_b", "o_b_proj", d, rank),
    ):
        yield from writer.linear(f"attn.{published}", f"mixer.{ours}", rows, columns, "compressed_attention")
    yield writer.plain("attn.q_norm.weight", "mixer.q_a_norm.weight", (mixer.q_rank,), "compressed_attention", "F32")
    yield writer.plain("attn.kv_norm.weight", "mixer.kv_norm.weight", (dim,), "compressed_attention", "F32")
    yield writer.plain("attn.attn_sink", "mixer.sinks", (heads,), "compressed_attention", "F32")
    if mixer.ratio:
        yield from _compressor(writer, "attn.compressor", "mixer.compressor", mixer, dim, d)
    if (indexer := mixer.indexer) is not None:
        at, ours = "attn.indexer", "mixer.indexer"
        rows = indexer.num_heads * indexer.head_dim
        yield from writer.linear(f"{at}.wq_b", f"{ours}.q_b_proj", rows, mixer.q_rank, "indexer")
        shape = (indexer.num_heads, d)
        yield writer.plain(f"{at}.weights_proj.weight", f"{ours}.weights_proj.weight", shape, "indexer")
        yield from _compressor(writer, f"{at}.compressor", f"{ours}.compressor", mixer, indexer.head_dim, d)


def _compressor(writer: Writer, at: str, ours: str, mixer: CompressedSpec, dim: int, d: int) -> Iterator[TensorSpec]:
    width = dim * (2 if mixer.has_overlap else 1)
    yield writer.plain(f"{at}.wkv.weight", f"{ours}.kv_proj.weight", (width, d), "compressed_attention")
    yield writer.plain(f"{at}.wgate.weight", f"{ours}.gate_proj.weight", (width, d), "compressed_attention")
    yield writer.plain(f"{at}.ape", f"{ours}.place_bias", (mixer.ratio, width), "compressed_attention", "F32")
    yield writer.plain(f"{at}.norm.weight", f"{ours}.norm.weight", (dim,), "compressed_attention", "F32")
