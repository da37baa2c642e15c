"""One line per model: what a folder of configs describes, counted. The table of known families."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from workbench.base import Cell, ConfigError, Table, WorkbenchError, human
from workbench.spec.blocks import missing_blocks
from workbench.spec.config import read_json
from workbench.spec.counts import (
    count_draft,
    count_model,
    index_bytes_per_token,
    kv_bytes,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from workbench.spec.families import known_families
from workbench.spec.model import ModelSpec, MoESpec
from workbench.spec.parse import parse_config
from workbench.spec.published import PUBLISHED

__all__ = ["FamilyReport", "KnownFamilies", "ModelLine", "describe_configs", "describe_families", "describe_model"]

LONG = 1 << 17  # tokens at which windows have long stopped growing


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLine:
    """One config, counted. `num_params` are those of the decoder; tower and draft layers stand apart."""

    name: str
    family: str
    num_layers: int
    layer_kinds: str
    num_params: int
    tower_params: int
    draft_params: int
    active_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_at_length: int  # of one sequence of LONG tokens
    index_bytes_per_token: int
    state_bytes: int
    experts: str
    formats: str
    missing: tuple[str, ...]
    unknown_keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyReport:
    lines: tuple[ModelLine, ...]
    refused: tuple[tuple[str, str], ...]  # (file, why)

    def tables(self) -> tuple[Table, ...]:
        columns = (
            "config", "family", "layers", "kinds of layer", "total", "tower", "draft", "active", "bytes", "KV B/token",
            f"KV at {LONG // 1024}k tokens", "index B/token", "state B", "experts", "formats", "missing blocks",
        )  # fmt: skip
        rows = tuple(_row(line) for line in self.lines)
        note = (
            "total and active: parameters in billions, of the decoder; active without the input embedding. KV and "
            "state in bytes of a bf16 cache on one rank; index keys in FP8. missing: blocks that are not computed here."
        )
        tables = [Table(title="Models", columns=columns, rows=rows, note=note)]
        if published := tuple(row for line in self.lines if (row := _against_published(line)) is not None):
            tables.append(_published_table(published))
        if any(line.missing for line in self.lines):
            rows_missing = tuple((line.name, ", ".join(line.missing)) for line in self.lines if line.missing)
            tables.append(Table(title="Missing blocks", columns=("config", "blocks"), rows=rows_missing))
        if any(line.unknown_keys for line in self.lines):
            rows_unknown = tuple((line.name, ", ".join(line.unknown_keys)) for line in self.lines if line.unknown_keys)
            tables.append(Table(title="Unknown config keys", columns=("config", "keys"), rows=rows_unknown))
        if self.refused:
            tables.append(Table(title="Refused", columns=("file", "why"), rows=self.refused))
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def to_json(self) -> dict[str, object]:
        return {"models": [asdict(line) for line in self.lines], "refused": [list(pair) for pair in self.refused]}

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFamilies:
    """The families this version reads, with the length of each file."""

    rows: tuple[tuple[str, str, int], ...]  # family, architectures, lines of its file

    def tables(self) -> tuple[Table, ...]:
        note = "One file each in workbench/spec/families; docs/adding-a-family.md walks through adding one."
        columns = ("family", "architectures", "lines")
        return (Table(title="Known families", columns=columns, rows=self.rows, note=note),)

    def render(self) -> str:
        return self.tables()[0].render()

    def to_json(self) -> dict[str, object]:
        return {"families": [{"family": f, "architectures": a.split(", "), "lines": n} for f, a, n in self.rows]}

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return self.tables()[0].to_html()


def describe_families() -> KnownFamilies:
    rows = []
    for family in known_families():
        source = Path(str(getattr(family, "__file__", "")))
        rows.append((family.FAMILY, ", ".join(family.ARCHITECTURES), len(source.read_text().splitlines())))
    return KnownFamilies(rows=tuple(rows))


def describe_configs(path: Path | str) -> FamilyReport:
    """Every `*.json` in a folder (or one file), as configs. One that is refused is listed with the reason.

    Raises ConfigError where there is nothing to read.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError("no such file or folder", where=path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError("no configs here", where=path, expected="files named *.json")
    lines, refused = [], []
    for file in files:
        try:
            lines.append(describe_model(file.stem, parse_config(read_json(file))))
        except WorkbenchError as error:
            refused.append((file.name, str(error)))
    return FamilyReport(lines=tuple(lines), refused=tuple(refused))


def describe_model(name: str, spec: ModelSpec) -> ModelLine:
    """Counts of one model; a second for each few hundred thousand tensors."""
    counts = count_model(spec)
    tower = sum(counts.params_by_role.get(role, 0) for role in ("vision", "projector"))
    return ModelLine(
        name=name,
        family=spec.family,
        num_layers=spec.num_layers,
        layer_kinds=_tally(layer.kind for layer in spec.layers),
        num_params=counts.num_params - tower,
        tower_params=tower,
        draft_params=count_draft(spec)[0],
        active_params=counts.active_params,
        weight_bytes=counts.weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(spec),
        kv_bytes_at_length=kv_bytes(spec, LONG),
        index_bytes_per_token=index_bytes_per_token(spec),
        state_bytes=state_bytes_per_sequence(spec),
        experts=_experts(spec),
        formats=f"{spec.dtype}" if spec.quant is None else f"{spec.dtype} + {' + '.join(spec.quant.schemes)}",
        missing=missing_blocks(spec),
        unknown_keys=tuple(key for key, _ in spec.unknown_keys),
    )


def _row(line: ModelLine) -> tuple[Cell, ...]:
    return (
        line.name,
        line.family,
        line.num_layers,
        line.layer_kinds,
        f"{line.num_params / 1e9:.2f}",
        f"{line.tower_params / 1e9:.2f}" if line.tower_params else None,
        f"{line.draft_params / 1e9:.2f}" if line.draft_params else None,
        f"{line.active_params / 1e9:.2f}",
        human(line.weight_bytes, "B"),
        line.kv_bytes_per_token,
        human(line.kv_bytes_at_length, "B"),
        line.index_bytes_per_token or None,
        line.state_bytes or None,
        line.experts,
        line.formats,
        len(line.missing) or "none: runs",
    )


def _published_table(rows: tuple[tuple[Cell, ...], ...]) -> Table:
    columns = ("config", "stated", "figure", "ours", "published", "agree", "why not")
    note = (
        "stated: by the publisher, total / active. The figures beside ours were counted elsewhere from the same shapes."
    )
    return Table(title="Against published figures", columns=columns, rows=rows, note=note)


def _against_published(line: ModelLine) -> tuple[Cell, ...] | None:
    """Our figures beside the published ones, None for a model that none are known of."""
    known = PUBLISHED.get(line.name.replace("__", "/", 1))
    if known is None:
        return None
    pairs: dict[str, tuple[str, str]] = {
        "total": (f"{line.num_params / 1e9:.2f}", "" if known.total is None else f"{known.total:.2f}"),
        "active": (f"{line.active_params / 1e9:.2f}", "" if known.active is None else f"{known.active:.2f}"),
        "KV": (str(line.kv_bytes_per_token), "" if known.kv is None else str(known.kv)),
        "state": (str(line.state_bytes), str(known.state)),
        "index": (str(line.index_bytes_per_token), str(known.index)),
    }
    shown = {name: pair for name, pair in pairs.items() if pair != ("0", "0")}
    differing = ", ".join(name for name, (ours, theirs) in shown.items() if theirs and ours != theirs)
    has_count = known.total is not None
    verdict = "–" if not has_count else f"not {differing}" if differing else "all"
    return (
        line.name,
        known.stated,
        ", ".join(shown),
        "; ".join(ours for ours, _ in shown.values()),
        "; ".join(theirs for _, theirs in shown.values()) if has_count else None,
        verdict,
        known.remark or None,
    )


def _tally(names: Iterable[str]) -> str:
    held = list(names)
    return ", ".join(f"{held.count(name)} {name}" for name in dict.fromkeys(held))


def _experts(spec: ModelSpec) -> str:
    kinds = {(f.num_experts, f.top_k, f.num_shared) for layer in spec.layers if isinstance(f := layer.ffn, MoESpec)}
    return "; ".join(f"{num} take {top}" + (f" + {shared}" if shared else "") for num, top, shared in sorted(kinds))
