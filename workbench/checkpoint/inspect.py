"""What a checkpoint is, from as little as its `config.json`: sizes, layers, caches, and what nobody here reads.

Index and shard headers are used where they lie beside it, never needed, and `sources` says what was used.
"""

from __future__ import annotations

import dataclasses
import html
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workbench.base import Cell, CheckpointError, ConfigError, Table, human, short_repr
from workbench.checkpoint.checkpoint import list_shards
from workbench.checkpoint.header import read_header
from workbench.checkpoint.index import ShardIndex, find_index, read_index
from workbench.checkpoint.names import NameMatch, match_names
from workbench.checkpoint.origin import read_origin
from workbench.spec import (
    ModelCounts,
    ModelSpec,
    QuantTable,
    TensorSpec,
    count_draft,
    count_model,
    missing_blocks,
    read_spec,
    resolve_quant_rules,
)

__all__ = ["InspectReport", "NameSummary", "ShardSummary", "inspect_checkpoint"]

_SHOWN = 5  # names listed where more may follow


@dataclass(frozen=True, kw_only=True, slots=True)
class NameSummary:
    """Index against model, by names alone."""

    source: str  # "model.safetensors.index.json" or "headers"
    num_names: int
    num_files: int
    num_matched: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]  # names the model has no place for, layers beyond the last among them
    total_size: int | None  # bytes, as the index claims

    @property
    def is_bijection(self) -> bool:
        return not (self.missing or self.unknown)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSummary:
    """What the headers of the files that are here say."""

    num_files: int
    num_tensors: int
    tensor_bytes: int
    bytes_by_dtype: dict[str, int]
    unreadable: dict[str, str]  # file -> reason
    is_ghost: bool = False  # the folder is marked: files of full size that hold no weights


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectReport:
    """A model and its counts; `names` and `shards` are None where the folder has nothing to compare."""

    path: str
    spec: ModelSpec
    counts: ModelCounts
    names: NameSummary | None
    shards: ShardSummary | None
    sources: tuple[str, ...]
    storage: QuantTable | None = None  # module by module, for a model that is quantised by rules

    def tables(self) -> tuple[Table, ...]:
        """Everything worth reading, as tables: model, layers, weights, storage, tokens, vision, files, unknown keys."""
        made = (
            _model_table(self.spec, self.counts),
            _layer_table(self.counts),
            _weight_table(self.counts),
            Table(title="Storage by module", columns=(), rows=()) if self.storage is None else self.storage.table(),
            _token_table(self.spec),
            _vision_table(self.spec),
            self._files_table(),
            _unknown_table(self.spec),
        )
        return tuple(table for table in made if table.rows)

    def summary(self) -> str:
        return (
            f"{self.path}: {self.spec.architecture}, {human(self.counts.num_params, '')} parameters, "
            f"{human(self.counts.active_params, '')} active per token (from {', '.join(self.sources)})"
        )

    def render(self) -> str:
        return "\n\n".join([self.summary(), *(table.render() for table in self.tables())])

    def to_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "sources": list(self.sources),
            "spec": _plain(dataclasses.asdict(self.spec)),
            "counts": dataclasses.asdict(self.counts),
            "names": None if self.names is None else dataclasses.asdict(self.names),
            "shards": None if self.shards is None else dataclasses.asdict(self.shards),
        }

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.summary())}</p>" + "".join(table.to_html() for table in self.tables())

    def _files_table(self) -> Table:
        rows: list[tuple[str, Cell]] = []
        if (names := self.names) is not None:
            rows += [
                ("names from", names.source),
                ("names", names.num_names),
                ("files named", names.num_files),
                ("names that fill a tensor of the model", names.num_matched),
                ("tensors of the model without a name", _counted(names.missing)),
                ("names without a place in the model", _counted(names.unknown)),
                ("one-to-one", names.is_bijection),
                ("total_size claimed, bytes", names.total_size),
            ]
        if (shards := self.shards) is not None:
            by_dtype = ", ".join(f"{dtype} {human(size, 'B')}" for dtype, size in shards.bytes_by_dtype.items())
            rows += [
                *(
                    [("what they hold", "nothing: this is a ghost, files of full size without weights")]
                    * shards.is_ghost
                ),
                ("files here", shards.num_files),
                ("tensors in them", shards.num_tensors),
                ("bytes of tensors in them", shards.tensor_bytes),
                ("by dtype", by_dtype),
                *((f"unreadable: {file}", reason) for file, reason in shards.unreadable.items()),
            ]
        note = "" if not rows else "Names and headers only; `workbench audit` checks the files themselves."
        return Table(title="Files", columns=("what", "value"), rows=tuple(rows), note=note)


def inspect_checkpoint(path: Path | str) -> InspectReport:
    """Describe a checkpoint folder or a bare `config.json`.

    Raises ConfigError (UnsupportedModelError for a family nobody here knows) for the config and CheckpointError for an
    index that cannot be read; shards with an unreadable header are listed in the report.
    """
    path = Path(path)
    spec = read_spec(path)
    if not path.is_dir():
        return InspectReport(
            path=str(path), spec=spec, counts=count_model(spec), names=None, shards=None, sources=(path.name,)
        )
    sources = ["config.json"]
    if os.path.lexists(path / "preprocessor_config.json"):
        sources.append("preprocessor_config.json")
    held, shards = _read_shards(path)
    index_path = find_index(path)
    index = read_index(index_path) if index_path is not None else None
    names: NameSummary | None = None
    expected: Iterable[TensorSpec] | None = None
    if index is not None or shards is not None:
        match = match_names(spec, held if index is None else index.files)
        names = _name_summary(match, index, held, shards)
        expected = match.expected.values()
    if index is not None:
        sources.append(index.path.name)
    if shards is not None:
        sources.append(f"headers of {shards.num_files} files")
    counts = count_model(spec, expected)
    return InspectReport(
        path=str(path),
        spec=spec,
        counts=counts,
        names=names,
        shards=shards,
        sources=tuple(sources),
        storage=_storage(spec, held if shards is not None else None, expected),
    )


def _storage(spec: ModelSpec, held: set[str] | None, expected: Iterable[TensorSpec] | None) -> QuantTable | None:
    """The rules against the files, against the published names where there are none; None where no rule can be read."""
    if spec.quant is None:
        return None
    try:
        return resolve_quant_rules(spec, held, expected)
    except ConfigError:  # a pattern that is not safe to try: a finding of the audit
        return None


def _read_shards(root: Path) -> tuple[set[str], ShardSummary | None]:
    files = list_shards(root)
    held: set[str] = set()
    by_dtype: Counter[str] = Counter()
    unreadable: dict[str, str] = {}
    for file in files:
        try:
            header = read_header(root / file)
        except CheckpointError as error:
            unreadable[file] = error.message
            continue
        held |= header.entries.keys()
        for entry in header.entries.values():
            by_dtype[entry.dtype] += entry.num_bytes
    if not files:
        return held, None
    return held, ShardSummary(
        num_files=len(files),
        num_tensors=len(held),
        tensor_bytes=sum(by_dtype.values()),
        bytes_by_dtype=dict(by_dtype),
        unreadable=unreadable,
        is_ghost=read_origin(root).is_ghost,
    )


def _name_summary(
    match: NameMatch, index: ShardIndex | None, held: set[str], shards: ShardSummary | None
) -> NameSummary:
    extra = [name for group in (*match.mtp.values(), *match.beyond.values()) for name in group]
    num_files = len(set(index.files.values())) if index is not None else shards.num_files if shards is not None else 0
    return NameSummary(
        source="headers" if index is None else index.path.name,
        num_names=len(held) if index is None else len(index.files),
        num_files=num_files,
        num_matched=match.num_matched,
        missing=match.missing,
        unknown=(*match.unknown, *match.stacked, *extra),
        total_size=None if index is None else index.total_size,
    )


def _model_table(spec: ModelSpec, counts: ModelCounts) -> Table:
    missing = missing_blocks(spec)
    rows: list[tuple[str, Cell]] = [
        ("family", spec.family),
        ("hidden size / vocabulary", f"{spec.hidden_size:,} / {spec.vocab_size:,}"),
        ("context, tokens", spec.max_context),
        ("parameters", counts.num_params),
        ("active per token", counts.active_params),
        ("weight bytes", counts.weight_bytes),
        ("weight bytes one token touches", counts.active_weight_bytes),
        ("KV bytes per token (bf16)", counts.kv_bytes_per_token),
        ("state bytes per sequence", counts.state_bytes_per_sequence),
        ("routed experts visited per token", counts.experts_per_token),
        ("plain weights / quantisation", f"{spec.dtype} / {_quantisation(spec)}"),
        ("residual", _residual(spec)),
        *(
            [("draft layers, kept apart", f"{spec.draft.num_layers}, {count_draft(spec)[0]:,} parameters")]
            if spec.draft
            else []
        ),
        ("runs here", "yes" if not missing else f"no: {', '.join(missing)}"),
        ("norm eps", f"{spec.norm_eps:g}"),
    ]
    note = "Active leaves out the input embedding (a lookup) and the vision tower, as the published figure does."
    return Table(title="Model", columns=("what", "value"), rows=tuple(rows), note=note)


def _quantisation(spec: ModelSpec) -> str:
    if spec.quant is None:
        return "none"
    if spec.quant.schemes == ("mxfp4",):
        return f"routed experts in mxfp4, groups of {spec.quant.group_size}"
    return f"{', '.join(spec.quant.schemes)}, by the rules of {spec.quant.method}"


def _residual(spec: ModelSpec) -> str:
    if spec.streams is not None:
        return f"{spec.streams.num_streams} streams, hyper-connections"
    return "plain" if spec.residual is None else f"blocks of {spec.residual.block_size} layers, mixed"


def _layer_table(counts: ModelCounts) -> Table:
    rows = []
    for kind in dict.fromkeys(layer.kind for layer in counts.layers):
        layers = [layer for layer in counts.layers if layer.kind == kind]
        one = layers[0]
        rows.append(
            (
                kind,
                len(layers),
                _ranges([layer.layer_idx for layer in layers]),
                one.num_params,
                one.active_params,
                one.weight_bytes,
                one.kv_bytes_per_token,
                one.state_bytes_per_sequence,
            )
        )
    columns = ("kind", "layers", "which (from 0)", "params", "active", "bytes", "KV B/token", "state B/sequence")
    return Table(title="Layers, each", columns=columns, rows=tuple(rows))


def _weight_table(counts: ModelCounts) -> Table:
    total = counts.weight_bytes
    rows = [
        (role, counts.params_by_role[role], size, f"{size / total:.2%}") for role, size in counts.bytes_by_role.items()
    ]
    rows.sort(key=lambda row: -row[2])
    by_dtype = ", ".join(f"{dtype} {size:,} B" for dtype, size in counts.bytes_by_dtype.items())
    rows.append(("total", counts.num_params, total, "100%"))
    columns = ("role", "params", "bytes", "share")
    return Table(title="Weights by role", columns=columns, rows=tuple(rows), note=f"by dtype: {by_dtype}")


def _token_table(spec: ModelSpec) -> Table:
    tokens = spec.tokens
    ids = [("bos", tokens.bos), ("eos", tokens.eos), ("pad", tokens.pad), ("picture", tokens.media)]
    ids += [("ends an answer as well", token) for token in tokens.more_eos]
    rows = [(name, token) for name, token in ids if token != -1]
    return Table(title="Special tokens", columns=("token", "id"), rows=tuple(rows))


def _vision_table(spec: ModelSpec) -> Table:
    vision, image = spec.vision, spec.image
    if vision is None or image is None:
        return Table(title="Vision", columns=("what", "value"), rows=())
    rows = (
        ("tower", f"{vision.num_layers} layers, {vision.num_heads} heads of {vision.head_dim}"),
        ("width / feed-forward", f"{vision.hidden_size:,} / {vision.ffn_width:,}"),
        ("patch, merge", f"{vision.patch_size} px, {vision.merge_size} x {vision.merge_size} to one token"),
        ("position grid", f"{vision.grid_height} x {vision.grid_width}"),
        ("patches per picture", f"up to {image.patch_limit:,}, {image.patch_limit_per_side:,} along a side"),
        ("transparency", f"chessboard of {image.chessboard_square} px squares"),
    )
    return Table(title="Vision", columns=("what", "value"), rows=rows)


def _unknown_table(spec: ModelSpec) -> Table:
    rows = tuple((key, short_repr(value)) for key, value in spec.unknown_keys)
    note = "Nothing here reads these keys. On a new model they are the news: find out what they do."
    return Table(title="Unknown config keys", columns=("key", "value"), rows=rows, note=note)


def _ranges(numbers: list[int]) -> str:
    """ "3 7 11..12": runs of neighbours joined, long lists cut in the middle."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a}" if a == b else f"{a}..{b}" for a, b in runs]
    return " ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-3:]])


def _counted(names: tuple[str, ...]) -> str:
    if not names:
        return "0"
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{len(names):,}: {', '.join(names[:_SHOWN])}{rest}"


def _plain(spec: dict[str, object]) -> dict[str, object]:
    # Unknown values may be nested without bound; as text they are safe to print and to store.
    unknown = spec["unknown_keys"]
    assert isinstance(unknown, tuple)
    return {**spec, "unknown_keys": {key: short_repr(value) for key, value in unknown}}
