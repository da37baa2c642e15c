"""Which matrices a config says are quantised, module by module, against what the tensor names say.

The config speaks in patterns (compressed-tensors: quantise every Linear, except modules that an `ignore` rule
matches), the files speak in names (`weight_packed` and `weight_scale`, or a plain `weight`). Only the names can be
trusted: K3 leaves its router and its latent projections plain although no rule ignores them. The table shows every
kind of module with both answers.

How a rule is read depends on the method, see `quant`. Patterns come from a downloaded file, so those that could take
exponential time are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from workbench.base import Table
from workbench.spec.model import ModelSpec
from workbench.spec.parse import published_tensors
from workbench.spec.quant import RuleBook
from workbench.spec.storage import SCHEMES, SchemeName
from workbench.spec.tensors import TensorSpec

__all__ = ["QuantRow", "QuantTable", "module_kind", "resolve_quant_rules"]

_PIECES = [piece for scheme in SCHEMES.values() for piece in scheme.pieces(256, 256, 32)]
_VALUES = tuple(dict.fromkeys(piece.suffix for piece in _PIECES if piece.holds_weights))
_SCALES = tuple(dict.fromkeys(piece.suffix for piece in _PIECES if not piece.holds_weights))
_CODES = tuple(suffix for suffix in _VALUES if suffix != ".weight")
# Names that differ in their digits alone have one form: a quarter of a million experts have a few hundred of them.
_SAME_DIGIT = str.maketrans("123456789", "000000000")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Roles whose 2-d weights are not Linear modules: lookups and the learned position grid are tables.
_TABLES = ("embedding",)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantRow:
    """Modules of one kind that all get the same two answers; numbers in the name are shown as `*`."""

    module: str  # "language_model.model.layers.*.block_sparse_moe.gate"
    count: int
    rule: str | None  # the first ignore rule that matches, None where none does
    is_quantised_by_rules: bool
    is_quantised_in_files: bool
    cuts_name: bool  # the rule stops inside a name segment: "mlp.gate" also takes "mlp.gate_proj"
    scheme: str | None = None  # how the rules store it, None: plain

    @property
    def agrees(self) -> bool:
        return self.is_quantised_by_rules == self.is_quantised_in_files


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantTable:
    rows: tuple[QuantRow, ...]
    unused_rules: tuple[str, ...]  # match no module: a wrong prefix, or a module this model does not have

    @property
    def disagreements(self) -> tuple[QuantRow, ...]:
        return tuple(row for row in self.rows if not row.agrees)

    def table(self) -> Table:
        rows = tuple(
            (
                row.module,
                row.count,
                row.scheme or "plain",
                "quantised" if row.is_quantised_in_files else "plain",
                row.rule or "",
                "" if row.agrees else "rules and files disagree",
            )
            for row in self.rows
        )
        note = f"rules that match no module: {', '.join(self.unused_rules)}" if self.unused_rules else ""
        columns = ("module", "count", "by the rules", "in the files", "kept plain by", "remark")
        return Table(title="Storage by module", columns=columns, rows=rows, note=note)


def module_kind(name: str) -> str:
    """A dotted name with its numbers replaced by `*`."""
    return _NUMBER.sub("*", name)


def resolve_quant_rules(
    spec: ModelSpec, names: Collection[str] | None = None, tensors: Iterable[TensorSpec] | None = None
) -> QuantTable:
    """Every matrix of the model against the rules of its config.

    `names` are the tensor names of the checkpoint; without them the published names of the spec stand in. `tensors`:
    all of `published_tensors(spec)`, where the caller has them already. Raises ConfigError for a rule that is no
    valid pattern or too complex to evaluate safely.
    """
    rules = () if spec.quant is None else spec.quant.ignore
    book = RuleBook(spec.quant)
    held = names if names is None or isinstance(names, (Mapping, Set)) else frozenset(names)
    counts: dict[tuple[str, int | None, bool, bool, SchemeName | None], int] = {}
    used: set[int] = set()
    known: dict[tuple[str, str], tuple[str, int | None, bool, SchemeName | None]] = {}
    for tensor in published_tensors(spec) if tensors is None else tensors:
        if not _stands_for_a_matrix(tensor):
            continue
        module = _module_of(tensor)
        if held is not None and not _is_held(module, held):
            continue  # not in the files at all: another check names it as missing
        packed = tensor.is_quantised if held is None else _is_packed(module, held)
        # The parameter tells apart what differs in a digit of a word, "w1" and "w2".
        alike = (module.translate(_SAME_DIGIT) if book.reads_no_numbers else module), tensor.param
        if alike not in known:
            matches = book.matches(module)
            decision = book.decide(module, matches)
            used.update(idx for idx, _ in matches)
            cuts = decision.stop < len(module) and module[decision.stop] != "."
            scheme = None if decision.group is None else decision.group.scheme
            known[alike] = module_kind(module), decision.rule_idx, cuts, scheme
        kind, rule_idx, cuts, scheme = known[alike]
        key = (kind, rule_idx, packed, cuts, scheme)
        counts[key] = counts.get(key, 0) + 1
    rows = tuple(
        QuantRow(
            module=module,
            count=count,
            rule=None if rule_idx is None else rules[rule_idx],
            is_quantised_by_rules=scheme is not None,
            is_quantised_in_files=packed,
            cuts_name=cuts,
            scheme=scheme,
        )
        for (module, rule_idx, packed, cuts, scheme), count in counts.items()
    )
    return QuantTable(rows=rows, unused_rules=tuple(rule for idx, rule in enumerate(rules) if idx not in used))


def _stands_for_a_matrix(tensor: TensorSpec) -> bool:
    """One tensor per matrix: its plain weight, or the piece that holds its codes."""
    if tensor.role in _TABLES:
        return False
    if tensor.weights is not None:
        return tensor.weights > 0
    return len(tensor.shape) == (2 if tensor.num_stacked is None else 3) and tensor.part in ("weight", "weight_packed")


def _module_of(tensor: TensorSpec) -> str:
    """Name of the module, as rules speak of it: the tensor's name without the suffix of its piece."""
    if tensor.name.endswith((f".{tensor.part}", f"_{tensor.part}")):
        return tensor.name[: -len(tensor.part) - 1]
    return tensor.name


def _is_held(module: str, held: Collection[str]) -> bool:
    return any(f"{module}{suffix}" in held for suffix in (*_VALUES, ""))


def _is_packed(module: str, held: Collection[str]) -> bool:
    """Whether the files hold anything but a plain weight: codes by name, or a weight with a scale beside it."""
    return any(f"{module}{suffix}" in held for suffix in (*_CODES, *_SCALES))
