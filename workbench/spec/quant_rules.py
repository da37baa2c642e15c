"""Which matrices a config says are quantised, module by module, against what the tensor names say.

The config speaks in patterns (compressed-tensors: quantise every Linear, except modules that an `ignore` rule
matches), the files speak in names (`weight_packed` and `weight_scale`, or a plain `weight`). Only the names can be
trusted: K3 leaves its router and its latent projections plain although no rule ignores them. The table shows every
kind of module with both answers.

Rules follow compressed-tensors: `re:PATTERN` matches from the start of the full module name, anything else must equal
the name. Patterns come from a downloaded file, so those that could take exponential time are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from workbench.base import ConfigError, short_repr
from workbench.spec.model import ModelSpec
from workbench.spec.parse import published_tensors
from workbench.spec.tensors import TensorSpec

__all__ = ["QuantRow", "QuantTable", "module_kind", "resolve_quant_rules"]

PACKED, PLAIN = "weight_packed", "weight"
_WHERE = "quantization_config.ignore"
# Three ".*" over an 80-character name are some 80,000 steps at worst; each one more multiplies that by twenty.
MAX_PATTERN_LENGTH, MAX_REPEATS, MAX_PATTERNS = 200, 3, 64
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


def module_kind(name: str) -> str:
    """A dotted name with its numbers replaced by `*`."""
    return _NUMBER.sub("*", name)


def resolve_quant_rules(
    spec: ModelSpec, names: Collection[str] | None = None, tensors: Iterable[TensorSpec] | None = None
) -> QuantTable:
    """Every matrix of the model against the ignore rules of its config.

    `names` are the tensor names of the checkpoint; without them the published names of the spec stand in. `tensors`:
    all of `published_tensors(spec)`, where the caller has them already. Raises ConfigError for a rule that is no
    valid pattern or too complex to evaluate safely.
    """
    rules = () if spec.quant is None else spec.quant.ignore
    exact = {rule: idx for idx, rule in enumerate(rules) if not rule.startswith("re:")}
    patterns = [(idx, _compile(rule)) for idx, rule in enumerate(rules) if rule.startswith("re:")]
    if len(patterns) > MAX_PATTERNS:
        raise ConfigError(f"{len(patterns)} ignore patterns", where=_WHERE, expected=f"up to {MAX_PATTERNS}")
    held = names if names is None or isinstance(names, (Mapping, Set)) else frozenset(names)
    counts: dict[tuple[str, int | None, bool, bool], int] = {}
    used: set[int] = set()
    for tensor in published_tensors(spec) if tensors is None else tensors:
        if len(tensor.shape) != 2 or tensor.role in _TABLES or tensor.part == "weight_scale":
            continue
        module = tensor.name.rpartition(".")[0]
        if held is not None and not (f"{module}.{PLAIN}" in held or f"{module}.{PACKED}" in held):
            continue  # not in the files at all: another check names it as missing
        packed = tensor.part == PACKED if held is None else f"{module}.{PACKED}" in held
        matches = [(idx, match.end()) for idx, pattern in patterns if (match := pattern.match(module))]
        if module in exact:
            matches.append((exact[module], len(module)))
        used.update(idx for idx, _ in matches)
        rule_idx, stop = min(matches, default=(None, len(module)))
        cuts = stop < len(module) and module[stop] != "."
        key = (module_kind(module), rule_idx, packed, cuts)
        counts[key] = counts.get(key, 0) + 1
    rows = tuple(
        QuantRow(
            module=module,
            count=count,
            rule=None if rule_idx is None else rules[rule_idx],
            is_quantised_by_rules=spec.quant is not None and rule_idx is None,
            is_quantised_in_files=packed,
            cuts_name=cuts,
        )
        for (module, rule_idx, packed, cuts), count in counts.items()
    )
    return QuantTable(rows=rows, unused_rules=tuple(rule for idx, rule in enumerate(rules) if idx not in used))


def _compile(rule: str) -> re.Pattern[str]:
    pattern = rule.removeprefix("re:")
    # A repeated group can backtrack exponentially, a chain of repeats polynomially; "(?" opens groups and flags that
    # are hard to judge. Escapes are not looked at: refusing one pattern too many costs an info line, not an hour.
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > MAX_PATTERN_LENGTH or repeats > MAX_REPEATS or re.search(r"\)[*+{]|\(\?", pattern):
        raise ConfigError(
            "ignore rule is too complex to evaluate safely",
            where=_WHERE,
            found=short_repr(rule),
            expected=f"up to {MAX_PATTERN_LENGTH} characters, {MAX_REPEATS} repeats, no repeated or special group",
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"ignore rule is no valid pattern: {error}", where=_WHERE, found=short_repr(rule)) from None
