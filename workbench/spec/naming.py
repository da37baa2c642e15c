"""The tensor names that most families share, as one table of names and one walk over a ModelSpec.

A family states what it calls things (`Names`); which tensors there are follows from the spec, how each matrix is
stored from the rules of its config. A family with names of its own writes its own walk with the same `Writer`.
Shapes are (rows = outputs, columns = inputs) throughout, as in a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.spec.mixers import CompressedSpec, GatedDeltaSpec, GQASpec, KDASpec, MLASpec
from workbench.spec.model import DenseFFNSpec, LayerSpec, ModelSpec, MoESpec
from workbench.spec.quant import RuleBook
from workbench.spec.storage import SCHEMES, pieces_of
from workbench.spec.tensors import Role, TensorSpec

__all__ = ["Names", "Writer", "draft_tensors", "edge_tensors", "layer_tensors", "standard_tensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What a family calls the parts of a layer. Module names without their last dot, the root with it.

    `expert`: gate, down, up of one expert. `is_fused`: all experts of a layer lie in two tensors instead,
    `fused_gate_up` and `fused_down`; `is_transposed`: those are stored (experts, inputs, outputs) where plain.
    """

    root: str = "model."
    head: str = "lm_head"
    attention: str = "self_attn"
    delta_net: str = "linear_attn"
    dense: str = "mlp"
    moe: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    correction_dtype: str = "F32"
    expert: tuple[str, str, str] = ("gate_proj", "down_proj", "up_proj")
    is_fused: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False  # gate and up rows take turns
    shared: str = "shared_experts"
    sinks: str = "sinks"
    mixer_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"


@dataclass(slots=True)
class Writer:
    """Makes TensorSpecs of one place in the model: `prefix` before published names, `target` before ours."""

    spec: ModelSpec
    book: RuleBook
    prefix: str = ""
    target: str = ""
    layer: int | None = None
    role: Role | None = None  # overrides every role: draft layers
    _cache: dict[str, bool] = field(default_factory=dict)

    def plain(
        self, published: str, ours: str, shape: tuple[int, ...], role: Role, dtype: str | None = None
    ) -> TensorSpec:
        """A tensor that no rule quantises: norms, biases, tables, convolutions, routers."""
        return TensorSpec(
            name=self.prefix + published,
            shape=shape,
            dtype=dtype or self.spec.dtype,
            role=self.role or role,
            param=self.target + ours,
            layer=self.layer,
            part="bias" if published.endswith(".bias") else "weight",
        )

    def linear(
        self,
        module: str,
        ours: str,
        rows: int,
        columns: int,
        role: Role,
        *,
        has_bias: bool = False,
        expert: int | None = None,
        stack: int | None = None,
        also_fills: tuple[str, ...] = (),
        is_transposed: bool = False,
        is_interleaved: bool = False,
        plain_suffix: str = ".weight",
    ) -> Iterator[TensorSpec]:
        """The matrix of `module` in the pieces that the rules store it in, and its bias."""
        name, role = self.prefix + module, self.role or role
        group = self.book.decide(name).group if self.book.quant is not None else None
        if role == "head" and self.book.quant is not None and not self.book.quant.quantises_head:
            group = None
        lead = () if stack is None else (stack,)
        fills = tuple(f"{self.target}{other}.weight" for other in also_fills)
        param = f"{self.target}{ours}.weight"
        common = {"role": role, "layer": self.layer, "expert": expert, "num_stacked": stack, "also_fills": fills}
        if group is None:
            shape = (columns, rows) if is_transposed else (rows, columns)
            yield TensorSpec(
                name=name + plain_suffix,
                shape=lead + shape,
                dtype=self.spec.dtype,
                param=param,
                is_transposed=is_transposed,
                is_interleaved=is_interleaved,
                **common,  # type: ignore[arg-type]
            )
        else:
            for piece in pieces_of(group.scheme, rows, columns, group.group_size):
                yield TensorSpec(
                    name=name + piece.suffix,
                    shape=lead + piece.shape,
                    dtype=piece.dtype,
                    param=param,
                    part=piece.suffix.lstrip("._"),  # type: ignore[arg-type]
                    weights=(stack or 1) * rows * columns if piece.holds_weights else 0,
                    is_transposed=SCHEMES[group.scheme].is_transposed,
                    is_interleaved=is_interleaved,
                    scheme=group.scheme,
                    group_size=group.group_size,
                    **common,  # type: ignore[arg-type]
                )
        if has_bias:
            yield TensorSpec(
                name=f"{name}{'.bias' if plain_suffix else '_bias'}",
                shape=(*lead, rows),
                dtype=self.spec.dtype,
                param=f"{self.target}{ours}.bias",
                part="bias",
                is_interleaved=is_interleaved,
                **{**common, "also_fills": tuple(f"{self.target}{other}.bias" for other in also_fills)},  # type: ignore[arg-type]
            )


def standard_tensors(spec: ModelSpec, names: Names) -> Iterator[TensorSpec]:
    """Every tensor of the decoder: layers in order, then the edges. Towers and drafts are the family's to add."""
    book = RuleBook(spec.quant)
    for layer in spec.layers:
        i = layer.layer_idx
        writer = Writer(spec, book, prefix=f"{names.root}layers.{i}.", target=f"layers.{i}.", layer=i)
        yield from layer_tensors(writer, layer, names)
    yield from edge_tensors(Writer(spec, book), names)


def edge_tensors(writer: Writer, names: Names) -> Iterator[TensorSpec]:
    d, v = writer.spec.hidden_size, writer.spec.vocab_size
    yield writer.plain(f"{names.root}embed_tokens.weight", "embed.weight", (v, d), "embedding")
    yield writer.plain(f"{names.root}norm.weight", "final_norm.weight", (d,), "norm")
    if not writer.spec.is_tied:
        yield from writer.linear(names.head, "head", v, d, "head")


def layer_tensors(writer: Writer, layer: LayerSpec, names: Names) -> Iterator[TensorSpec]:
    """Norms, mixer and feed-forward block of one layer."""
    d, mixer, ffn = writer.spec.hidden_size, layer.mixer, layer.ffn
    yield writer.plain(f"{names.mixer_norm}.weight", "mixer_norm.weight", (d,), "norm")
    yield writer.plain(f"{names.ffn_norm}.weight", "ffn_norm.weight", (d,), "norm")
    if isinstance(mixer, GQASpec):
        yield from _gqa(writer, mixer, d, names)
    elif isinstance(mixer, MLASpec):
        yield from _mla(writer, mixer, d, names.attention)
    elif isinstance(mixer, GatedDeltaSpec):
        yield from _delta_net(writer, mixer, d, names.delta_net)
    elif isinstance(mixer, KDASpec):
        yield from _kda(writer, mixer, d, names.attention)
    else:
        assert not isinstance(mixer, CompressedSpec), "the one family that has it writes its own walk"
    if isinstance(ffn, DenseFFNSpec):
        yield from _gated(writer, names.dense, "ffn", ffn.width, d, "dense_ffn")
    else:
        yield from _moe(writer, ffn, d, names)


def draft_tensors(spec: ModelSpec, names: Names) -> Iterator[TensorSpec]:
    """Multi-token-prediction layers in the DeepSeek form: numbered on after the last layer."""
    if spec.draft is None:
        return
    book, d, v = RuleBook(spec.quant), spec.hidden_size, spec.vocab_size
    for k in range(spec.draft.num_layers):
        i = spec.num_layers + k
        writer = Writer(spec, book, f"{names.root}layers.{i}.", f"draft.{k}.", i, role="draft")
        for published, ours in (("enorm", "embed_norm"), ("hnorm", "hidden_norm"), ("shared_head.norm", "final_norm")):
            yield writer.plain(f"{published}.weight", f"{ours}.weight", (d,), "draft")
        yield writer.plain("eh_proj.weight", "join.weight", (d, 2 * d), "draft")
        if spec.draft.has_own_embedding:
            yield writer.plain("embed_tokens.weight", "embed.weight", (v, d), "draft")
            yield writer.plain("shared_head.head.weight", "head.weight", (v, d), "draft")
        yield from layer_tensors(writer, spec.draft.layer, names)


def _gated(writer: Writer, module: str, ours: str, width: int, d: int, role: Role) -> Iterator[TensorSpec]:
    for x, rows, columns in (("gate_proj", width, d), ("up_proj", width, d), ("down_proj", d, width)):
        yield from writer.linear(f"{module}.{x}", f"{ours}.{x}", rows, columns, role)


def _gqa(writer: Writer, mixer: GQASpec, d: int, names: Names) -> Iterator[TensorSpec]:
    at, heads, kv = names.attention, mixer.num_heads, mixer.num_kv_heads
    q_rows = heads * mixer.head_dim * (2 if mixer.has_output_gate else 1)
    for x, rows, columns, has_bias in (
        ("q_proj", q_rows, d, mixer.has_bias),
        ("k_proj", kv * mixer.head_dim, d, mixer.has_bias),
        ("v_proj", kv * mixer.v_dim, d, mixer.has_bias),
        ("o_proj", d, heads * mixer.v_dim, mixer.has_output_bias),
    ):
        yield from writer.linear(f"{at}.{x}", f"mixer.{x}", rows, columns, "gqa", has_bias=has_bias)
    if mixer.qk_norm in ("head", "full"):
        for x, count in (("q_norm", heads), ("k_norm", kv)):
            size = mixer.head_dim * (count if mixer.qk_norm == "full" else 1)
            yield writer.plain(f"{at}.{x}.weight", f"mixer.{x}.weight", (size,), "gqa")
    if mixer.has_sinks:
        yield writer.plain(f"{at}.{names.sinks}", "mixer.sinks", (heads,), "gqa")
    if (sparse := mixer.sparse) is not None:
        for x, rows in (("q", sparse.num_heads * sparse.head_dim), ("k", sparse.head_dim)):
            yield from writer.linear(f"{at}.index_{x}_proj", f"mixer.index_{x}_proj", rows, d, "indexer")
            name = f"index_{x}_norm.weight"
            yield writer.plain(f"{at}.{name}", f"mixer.{name}", (sparse.head_dim,), "indexer")


def _mla(writer: Writer, mixer: MLASpec, d: int, at: str) -> Iterator[TensorSpec]:
    heads = mixer.num_heads
    if mixer.q_rank:
        yield from writer.linear(f"{at}.q_a_proj", "mixer.q_a_proj", mixer.q_rank, d, "mla")
        yield writer.plain(f"{at}.q_a_layernorm.weight", "mixer.q_a_norm.weight", (mixer.q_rank,), "mla")
        yield from writer.linear(f"{at}.q_b_proj", "mixer.q_b_proj", heads * mixer.qk_dim, mixer.q_rank, "mla")
    else:
        yield from writer.linear(f"{at}.q_proj", "mixer.q_proj", heads * mixer.qk_dim, d, "mla")
    yield from writer.linear(f"{at}.kv_a_proj_with_mqa", "mixer.kv_a_proj", mixer.cache_dim, d, "mla")
    yield writer.plain(f"{at}.kv_a_layernorm.weight", "mixer.kv_a_norm.weight", (mixer.kv_rank,), "mla")
    kv_rows = heads * (mixer.nope_dim + mixer.v_dim)
    yield from writer.linear(f"{at}.kv_b_proj", "mixer.kv_b_proj", kv_rows, mixer.kv_rank, "mla")
    yield from writer.linear(f"{at}.o_proj", "mixer.o_proj", d, heads * mixer.v_dim, "mla")
    if (indexer := mixer.indexer) is not None and indexer.owns_choice:
        at, dim = f"{at}.indexer", indexer.head_dim
        rows = indexer.num_heads * dim
        yield from writer.linear(f"{at}.wq_b", "mixer.indexer.q_b_proj", rows, mixer.q_rank, "indexer")
        yield from writer.linear(f"{at}.wk", "mixer.indexer.k_proj", dim, d, "indexer")
        yield writer.plain(f"{at}.k_norm.weight", "mixer.indexer.k_norm.weight", (dim,), "indexer", "F32")
        yield writer.plain(f"{at}.k_norm.bias", "mixer.indexer.k_norm.bias", (dim,), "indexer", "F32")
        # Weighs the index heads; kept plain by every publisher although no rule says so.
        yield writer.plain(
            f"{at}.weights_proj.weight", "mixer.indexer.weights_proj.weight", (indexer.num_heads, d), "indexer"
        )


def _delta_net(writer: Writer, mixer: GatedDeltaSpec, d: int, at: str) -> Iterator[TensorSpec]:
    heads, values = mixer.num_value_heads, mixer.value_width
    for x, rows in (("qkv", mixer.conv_width), ("z", values), ("b", heads), ("a", heads)):
        yield from writer.linear(f"{at}.in_proj_{x}", f"mixer.{x}_proj", rows, d, "delta_net")
    conv = (mixer.conv_width, 1, mixer.conv_size)
    yield writer.plain(f"{at}.conv1d.weight", "mixer.conv.weight", conv, "delta_net")
    yield writer.plain(f"{at}.dt_bias", "mixer.dt_bias", (heads,), "delta_net")
    yield writer.plain(f"{at}.A_log", "mixer.A_log", (heads,), "delta_net", "F32")
    yield writer.plain(f"{at}.norm.weight", "mixer.o_norm.weight", (mixer.value_dim,), "delta_net", "F32")
    yield from writer.linear(f"{at}.out_proj", "mixer.o_proj", d, values, "delta_net")


def _kda(writer: Writer, mixer: KDASpec, d: int, at: str) -> Iterator[TensorSpec]:
    width, rank, heads = mixer.width, mixer.decay_rank, mixer.num_heads
    for x in "qkv":
        yield from writer.linear(f"{at}.{x}_proj", f"mixer.{x}_proj", width, d, "kda")
        conv = (width, 1, mixer.conv_size)
        yield writer.plain(f"{at}.{x}_conv1d.weight", f"mixer.{x}_conv.weight", conv, "kda")
    yield from writer.linear(f"{at}.f_a_proj", "mixer.f_a_proj", rank, d, "kda")
    yield from writer.linear(f"{at}.f_b_proj", "mixer.f_b_proj", width, rank, "kda")
    yield from writer.linear(f"{at}.b_proj", "mixer.b_proj", heads, d, "kda")
    yield writer.plain(f"{at}.A_log", "mixer.A_log", (1, 1, heads, 1), "kda", "F32")
    yield writer.plain(f"{at}.dt_bias", "mixer.dt_bias", (width,), "kda", "F32")
    if mixer.gate_rank is None:
        yield from writer.linear(f"{at}.g_proj", "mixer.g_proj", width, d, "kda")
    else:
        yield from writer.linear(f"{at}.g_a_proj", "mixer.g_a_proj", mixer.gate_rank, d, "kda")
        yield from writer.linear(f"{at}.g_b_proj", "mixer.g_b_proj", width, mixer.gate_rank, "kda")
    yield writer.plain(f"{at}.o_norm.weight", "mixer.o_norm.weight", (mixer.head_dim,), "kda")
    yield from writer.linear(f"{at}.o_proj", "mixer.o_proj", d, width, "kda")


def _moe(writer: Writer, moe: MoESpec, d: int, names: Names) -> Iterator[TensorSpec]:
    at, num, width = names.moe, moe.num_experts, moe.width
    # A router is a bare parameter in the reference code, so rules about linear layers never reach it.
    yield writer.plain(f"{at}.{names.router}.weight", "ffn.router.weight", (num, d), "router")
    if moe.has_router_bias:
        yield writer.plain(f"{at}.{names.router}.bias", "ffn.router.logit_bias", (num,), "router")
    if moe.has_correction_bias:
        yield writer.plain(f"{at}.{names.correction}", "ffn.router.bias", (num,), "router", names.correction_dtype)
    if moe.shared_width:
        yield from _gated(writer, f"{at}.{names.shared}", "ffn.shared", moe.shared_width, d, "shared_expert")
        if moe.has_shared_gate:
            yield writer.plain(f"{at}.{names.shared}_gate.weight", "ffn.shared_gate.weight", (1, d), "router")
    if not names.is_fused:
        gate, down, up = names.expert
        for e in range(num):
            for x, ours, rows, columns in ((gate, "w1", width, d), (down, "w2", d, width), (up, "w3", width, d)):
                param = f"ffn.experts.{ours}"
                yield from writer.linear(f"{at}.experts.{e}.{x}", param, rows, columns, "routed_expert", expert=e)
        return
    for x, ours, others, rows, columns in (
        ("gate_up_proj", "w1", ("ffn.experts.w3",), 2 * width, d),
        ("down_proj", "w2", (), d, width),
    ):
        yield from writer.linear(
            f"{at}.experts.{x}",
            f"ffn.experts.{ours}",
            rows,
            columns,
            "routed_expert",
            has_bias=moe.has_expert_bias,
            stack=num,
            also_fills=others,
            is_transposed=names.is_transposed,
            is_interleaved=names.is_interleaved and bool(others),
            plain_suffix="",
        )
