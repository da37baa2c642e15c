"""What can be said of a checkpoint whose architecture nobody here knows: guesses with their confidence, and facts.

Facts are names, shapes, bytes and the keys of the config. Roles are guesses (see `roles`), the nearest family is the
one whose names and keys fit best. The report says what would have to be written to run the model.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from workbench.base import Cell, CheckpointError, ConfigError, Table, UnsupportedModelError, human, short_repr
from workbench.checkpoint.checkpoint import list_shards
from workbench.checkpoint.header import TensorEntry, read_header
from workbench.checkpoint.index import find_index, read_index
from workbench.checkpoint.roles import RoleGuess, Sizes, guess_role, read_sizes
from workbench.spec import missing_blocks, module_kind, read_json, read_spec
from workbench.spec.nearest import FamilyGuess, nearest_families

__all__ = ["TensorKind", "UnknownReport", "inspect_unknown"]

_SHOWN = 5
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """Tensors whose names differ only in their numbers; `shapes` are the distinct ones, None without headers."""

    name: str
    count: int
    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...]
    num_bytes: int
    guess: RoleGuess


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownReport:
    """See the module text. `num_params` counts two weights per packed byte where a name says that it is packed."""

    path: str
    why: str
    sizes: Sizes
    kinds: tuple[TensorKind, ...]
    num_params: int
    num_bytes: int
    attention: tuple[str, ...]
    experts_in_names: int
    layer_bytes: tuple[tuple[str, int, int], ...]  # (layers, how many, bytes of each)
    nearest: tuple[FamilyGuess, ...]
    missing: tuple[str, ...]
    unknown_keys: tuple[tuple[str, object], ...]
    unreadable: tuple[tuple[str, str], ...]

    def summary(self) -> str:
        best = self.nearest[0]
        names = "" if best.names_shared is None else f", {best.names_shared:.0%} of its kinds of names"
        size = f"{human(self.num_params, '')} parameters in headers; " if self.kinds and self.num_params else ""
        return f"{self.path}: unknown model. {size}nearest known family: {best.family}{names}. {self.why}"

    def tables(self) -> tuple[Table, ...]:
        made = (self._fact_table(), self._kind_table(), self._layer_table(), *self._nearest_tables())
        rows = tuple((key, short_repr(value)) for key, value in self.unknown_keys)
        note = f"Keys that {self.nearest[0].family}, the nearest family, does not read."
        unknown = Table(title="Unknown config keys", columns=("key", "value"), rows=rows, note=note)
        return tuple(table for table in (*made, unknown) if table.rows)

    def render(self) -> str:
        return "\n\n".join([self.summary(), *(table.render() for table in self.tables())])

    def to_json(self) -> dict[str, object]:
        nearest = [
            {
                **{f.name: getattr(guess, f.name) for f in dataclasses.fields(guess) if f.name != "spec"},
                "reads_config": guess.spec is not None,
            }
            for guess in self.nearest
        ]
        return {
            "path": self.path,
            "known": False,
            "why": self.why,
            "sizes": dataclasses.asdict(self.sizes),
            "num_params": self.num_params,
            "num_bytes": self.num_bytes,
            "attention": list(self.attention),
            "experts_in_names": self.experts_in_names,
            "kinds": [dataclasses.asdict(kind) for kind in self.kinds],
            "layer_bytes": [list(row) for row in self.layer_bytes],
            "nearest": nearest,
            "missing": list(self.missing),
            "unknown_keys": {key: short_repr(value) for key, value in self.unknown_keys},
            "unreadable": dict(self.unreadable),
        }

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.summary())}</p>" + "".join(table.to_html() for table in self.tables())

    def _fact_table(self) -> Table:
        sizes = self.sizes
        rows: list[tuple[str, Cell]] = [
            ("hidden size / vocabulary", f"{sizes.hidden_size or '?'} / {sizes.vocab_size or '?'}"),
            ("layers", sizes.num_layers),
            ("heads / key-value heads", f"{sizes.num_heads or '?'} / {sizes.num_kv_heads or '?'}"),
            ("experts by the config, by the names", f"{sizes.num_experts or 0}, {self.experts_in_names}"),
            ("experts per token", sizes.top_k),
            ("attention", ", ".join(self.attention) or "?"),
            ("parameters / bytes in headers", f"{self.num_params:,} / {self.num_bytes:,}"),
            ("missing", ", ".join(self.missing) or "nothing that can be told"),
            *((f"unreadable: {file}", reason) for file, reason in self.unreadable),
        ]
        return Table(title="What can be told", columns=("what", "value"), rows=tuple(rows))

    def _kind_table(self) -> Table:
        rows = []
        for kind in sorted(self.kinds, key=lambda kind: (-kind.num_bytes, kind.name)):
            shapes = "?" if kind.shapes is None else " or ".join(str(list(shape)) for shape in kind.shapes[:3])
            dtypes = ", ".join(kind.dtypes) or "?"
            guess = kind.guess
            rows.append(
                (
                    kind.name,
                    kind.count,
                    shapes,
                    dtypes,
                    human(kind.num_bytes, "B"),
                    guess.role,
                    guess.confidence,
                    guess.reason,
                )
            )
        columns = ("names", "count", "shape", "dtype", "bytes", "role, guessed", "confidence", "why")
        return Table(title="Tensors", columns=columns, rows=tuple(rows))

    def _layer_table(self) -> Table:
        rows = tuple((layers, count, size) for layers, count, size in self.layer_bytes)
        return Table(title="Bytes per layer", columns=("layers", "how many", "bytes of each"), rows=rows)

    def _nearest_tables(self) -> tuple[Table, ...]:
        rows = tuple(
            (
                guess.family,
                "" if guess.names_shared is None else f"{guess.names_shared:.0%}",
                f"{guess.share_read:.0%}",
                guess.refusal or "reads it",
            )
            for guess in self.nearest[:_SHOWN]
        )
        columns = ("family", "kinds of names shared", "config keys it reads", "what stops it")
        best = self.nearest[0]
        differences = [("only in the files", name) for name in best.only_in_files]
        differences += [(f"only in {best.family}", name) for name in best.only_in_family]
        return (
            Table(title="Nearest families", columns=columns, rows=rows),
            Table(title=f"Differences from {best.family}", columns=("where", "names"), rows=tuple(differences)),
        )


def inspect_unknown(path: Path | str) -> UnknownReport:
    """Describe a checkpoint folder, or a bare config, of a model that no family reads.

    Raises ConfigError for a config that is no JSON object; files that cannot be read are listed in the report.
    """
    path = Path(path)
    config = read_json(path / "config.json" if path.is_dir() else path)
    try:
        read_spec(path)
        why = "a family reads this config"
    except UnsupportedModelError as error:
        why = str(error)
    except ConfigError as error:
        why = str(error)
    entries, names, unreadable = _read_names(path) if path.is_dir() else ({}, (), ())
    sizes = read_sizes(config)
    kinds = _kinds(entries, names, sizes)
    nearest = nearest_families(config, names)
    best = nearest[0]
    return UnknownReport(
        path=str(path),
        why=why,
        sizes=sizes,
        kinds=kinds,
        num_params=sum(_weights(entry) for entry in entries.values()),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        attention=_attention(kinds, sizes),
        experts_in_names=_experts(entries, names),
        layer_bytes=_layer_profile(entries),
        nearest=nearest,
        missing=_missing(best, kinds),
        unknown_keys=best.spec.unknown_keys if best.spec is not None else (),
        unreadable=unreadable,
    )


def _read_names(root: Path) -> tuple[dict[str, TensorEntry], tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Entries of every readable header, all names (of the index as well), and files that could not be read."""
    entries: dict[str, TensorEntry] = {}
    unreadable: list[tuple[str, str]] = []
    for file in list_shards(root):
        try:
            entries |= read_header(root / file).entries
        except CheckpointError as error:
            unreadable.append((file, error.message))
    names = dict.fromkeys(entries)
    if (index_path := find_index(root)) is not None:
        try:
            names |= dict.fromkeys(read_index(index_path).files)
        except CheckpointError as error:
            unreadable.append((index_path.name, error.message))
    return entries, tuple(names), tuple(unreadable)


def _kinds(entries: dict[str, TensorEntry], names: tuple[str, ...], sizes: Sizes) -> tuple[TensorKind, ...]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(module_kind(name), []).append(name)
    made = []
    for kind, members in groups.items():
        held = [entries[name] for name in members if name in entries]
        shapes = tuple(dict.fromkeys(entry.shape for entry in held))
        made.append(
            TensorKind(
                name=kind,
                count=len(members),
                shapes=shapes or None,
                dtypes=tuple(dict.fromkeys(entry.dtype for entry in held)),
                num_bytes=sum(entry.num_bytes for entry in held),
                guess=guess_role(kind, shapes[0] if shapes else None, sizes),
            )
        )
    return tuple(made)


def _weights(entry: TensorEntry) -> int:
    """Parameters that a tensor stands for, as far as its name tells: packed codes hold several per element."""
    if guess_role(entry.name, None, Sizes()).role == "scale":
        return 0
    size = math.prod(entry.shape)
    if entry.name.endswith((".weight_packed", "_blocks", ".qweight")):
        return size * {"U8": 2, "I8": 2, "I32": 8}.get(entry.dtype, 1)
    return size


def _attention(kinds: tuple[TensorKind, ...], sizes: Sizes) -> tuple[str, ...]:
    roles = {kind.guess.role for kind in kinds}
    found = []
    if "latent attention" in roles:
        found.append("latent (MLA)")
    if "linear recurrence" in roles:
        found.append("linear recurrence")
    if roles & {"attention q", "attention qkv"} and "latent attention" not in roles:
        grouped = sizes.num_kv_heads is not None and sizes.num_heads != sizes.num_kv_heads
        found.append("grouped-query" if grouped else "multi-head")
    if "indexer" in roles:
        found.append("with a sparse indexer")
    if "attention sinks" in roles:
        found.append("with sinks")
    return tuple(found)


def _experts(entries: dict[str, TensorEntry], names: tuple[str, ...]) -> int:
    """Experts of a layer: the highest number in the names, or the leading size of stacked expert tensors."""
    numbered = [int(match[1]) + 1 for name in names if (match := _EXPERT.search(name))]
    stacked = [e.shape[0] for e in entries.values() if ".experts." in e.name and len(e.shape) >= 3]
    return max([*numbered, *stacked], default=0)


def _layer_profile(entries: dict[str, TensorEntry]) -> tuple[tuple[str, int, int], ...]:
    """Runs of neighbouring layers that weigh the same; layers of towers and drafts are told apart by their prefix."""
    sums: Counter[tuple[str, int]] = Counter()
    for entry in entries.values():
        if match := _LAYER.search(entry.name):
            sums[(entry.name[: match.start()], int(match[1]))] += entry.num_bytes
    runs: list[tuple[str, int, int, int]] = []  # prefix, first, last, bytes
    for (prefix, layer), size in sorted(sums.items()):
        if runs and runs[-1][0] == prefix and runs[-1][2] + 1 == layer and runs[-1][3] == size:
            runs[-1] = (prefix, runs[-1][1], layer, size)
        else:
            runs.append((prefix, layer, layer, size))
    return tuple((f"{prefix} {a}..{b}".strip(), b - a + 1, size) for prefix, a, b, size in runs)


def _missing(best: FamilyGuess, kinds: tuple[TensorKind, ...]) -> tuple[str, ...]:
    """What would have to be written: a family always; blocks of the nearest one; parts that nothing recognises."""
    missing = ["a file in spec/families"]
    if best.spec is not None:
        missing += [f"{block} (as {best.family})" for block in missing_blocks(best.spec)]
    missing += [f"whatever reads {kind.name}" for kind in kinds if kind.guess.role == "?"][:_SHOWN]
    return tuple(missing)
