"""How the matrices of a checkpoint are stored: which schemes, and by which rule each module gets one.

Four grammars of rules are in use, and the same text means different modules in them:

* compressed-tensors: `re:PATTERN` matches from the start of the full module name, anything else must equal the name
  or be the class name `Linear`;
* transformers (`modules_to_not_convert` of fp8, mxfp4, awq): a pattern from the start of the name up to a dot or the
  end, or a plain suffix;
* modelopt: globs over the whole name, a star also crossing dots.

Patterns come from a downloaded file, so those that could take exponential time are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from workbench.base import ConfigError, short_repr
from workbench.spec.storage import SchemeName

__all__ = ["Decision", "Grammar", "QuantGroup", "QuantSpec", "RuleBook"]

Grammar = Literal["compressed-tensors", "transformers", "glob"]
_WHERE = "quantization_config.ignore"
# Three ".*" over an 80-character name are some 80,000 steps at worst; each one more multiplies that by twenty.
MAX_PATTERN_LENGTH, MAX_REPEATS, MAX_PATTERNS = 200, 3, 64
_PLAIN = re.compile(r"[\w.\-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantGroup:
    """Modules named by `targets` (grammar of the spec; "Linear" names every matrix) share one scheme."""

    targets: tuple[str, ...]
    scheme: SchemeName
    group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantSpec:
    """How matrices are stored in the published files. `scheme` and `group_size` hold where `groups` is empty.

    `grammar` says how rules are read, `ignore` which modules stay plain, `method` what the config called it.
    """

    scheme: SchemeName
    group_size: int
    ignore: tuple[str, ...] = ()
    grammar: Grammar = "compressed-tensors"
    method: str = "compressed-tensors"
    groups: tuple[QuantGroup, ...] = ()
    quantises_head: bool = True  # False: the output head stays plain whatever the rules say
    has_power_of_two_scales: bool = False  # scale_fmt ue8m0
    has_column_order: bool = False  # desc_act of GPTQ: columns of one group need not be neighbours
    prefix: str = ""  # of the text model inside a wrapper, where the rules may speak of its own names

    @property
    def schemes(self) -> tuple[SchemeName, ...]:
        """Every scheme in use, in the order of the groups."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups)) or (self.scheme,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the rules say of one module. `rule_idx` is the ignore rule that keeps it plain; `stop` where it matched."""

    group: QuantGroup | None
    rule_idx: int | None
    stop: int


class _Matcher:
    """One list of rules under a grammar; `first(name)` is the lowest index that matches and the place it stops."""

    def __init__(self, rules: tuple[str, ...], grammar: Grammar):
        self.exact: dict[str, int] = {}
        self.prefixes: dict[str, int] = {}
        self.suffixes: list[tuple[str, int]] = []
        self.patterns: list[tuple[int, re.Pattern[str]]] = []
        self.of_class: int | None = None
        for idx, rule in enumerate(rules):
            if rule == "Linear":
                self.of_class = idx if self.of_class is None else self.of_class
            elif grammar == "compressed-tensors":
                if rule.startswith("re:"):
                    self.patterns.append((idx, compile_rule(rule, rule.removeprefix("re:"))))
                else:
                    self.exact.setdefault(rule, idx)
            elif grammar == "glob":
                if set(rule) & set("*?["):
                    self.patterns.append((idx, compile_rule(rule, _glob(rule))))
                else:
                    self.exact.setdefault(rule, idx)
            elif _PLAIN.fullmatch(rule):
                self.prefixes.setdefault(rule, idx)
                self.suffixes.append((rule, idx))
            else:
                self.patterns.append((idx, compile_rule(rule, rf"(?:{rule})(?:(?<=\.)|(?=\.|$))", inner=rule)))
        if len(self.patterns) > MAX_PATTERNS:
            raise ConfigError(f"{len(self.patterns)} ignore patterns", where=_WHERE, expected=f"up to {MAX_PATTERNS}")
        self._endings = tuple(rule for rule, _ in self.suffixes)

    def all(self, name: str) -> list[tuple[int, int]]:
        """(rule index, where the match stops) of every rule that matches."""
        found = [(idx, match.end()) for idx, pattern in self.patterns if (match := pattern.match(name))]
        if name in self.exact:
            found.append((self.exact[name], len(name)))
        if self.prefixes:
            stop = -1
            while (stop := name.find(".", stop + 1)) >= 0:
                if name[:stop] in self.prefixes:
                    found.append((self.prefixes[name[:stop]], stop))
            if name in self.prefixes:
                found.append((self.prefixes[name], len(name)))
            if name.endswith(self._endings):
                found += [(idx, len(name)) for rule, idx in self.suffixes if name.endswith(rule)]
        if self.of_class is not None:
            found.append((self.of_class, len(name)))
        return found


class RuleBook:
    """The rules of a config, compiled on first use: ConfigError for one that is no valid or no safe pattern."""

    def __init__(self, quant: QuantSpec | None):
        self.quant = quant

    @cached_property
    def ignore(self) -> _Matcher:
        return _Matcher(*((self.quant.ignore, self.quant.grammar) if self.quant else ((), "compressed-tensors")))

    @cached_property
    def _targets(self) -> list[tuple[_Matcher, QuantGroup]]:
        groups = self.quant.groups if self.quant else ()
        if self.quant is not None and not groups:
            groups = (QuantGroup(targets=("Linear",), scheme=self.quant.scheme, group_size=self.quant.group_size),)
        # Targets are always read as compressed-tensors does: only that method, and families themselves, write any.
        return [(_Matcher(group.targets, "compressed-tensors"), group) for group in groups]

    @cached_property
    def reads_no_numbers(self) -> bool:
        """Whether names that differ in their digits alone are always decided alike.

        A rule without a digit in its text, be it a name or a pattern, cannot tell one digit from another: the ends of
        a range of characters are no digits then, so that it holds all ten or none.
        """
        quant = self.quant
        rules = () if quant is None else (quant.prefix, *quant.ignore, *(x for g in quant.groups for x in g.targets))
        return not any(char.isdigit() for rule in rules for char in rule)

    def matches(self, module: str) -> list[tuple[int, int]]:
        """(rule index, where the match stops) of every ignore rule that matches a full module name."""
        return [
            (idx, len(module) - len(name) + stop)
            for name in self._spellings(module)
            for idx, stop in self.ignore.all(name)
        ]

    def _spellings(self, module: str) -> tuple[str, ...]:
        prefix = "" if self.quant is None else self.quant.prefix
        own = module.removeprefix(prefix)
        return (module,) if own == module else (module, own)

    def decide(self, module: str, matches: list[tuple[int, int]] | None = None) -> Decision:
        """Which group stores the matrix of `module`, or which rule keeps it plain.

        `matches`: what `matches(module)` found, where the caller has it already.
        """
        matches = self.matches(module) if matches is None else matches
        if matches:
            rule_idx, stop = min(matches)
            return Decision(group=None, rule_idx=rule_idx, stop=stop)
        names = self._spellings(module)
        group = next((group for matcher, group in self._targets if any(map(matcher.all, names))), None)
        return Decision(group=group, rule_idx=None, stop=len(module))


def _glob(rule: str) -> str:
    text = re.escape(rule).replace(r"\*", ".*").replace(r"\?", ".")
    if r"\[" in text:
        raise ConfigError("ignore rule with a character set is not read", where=_WHERE, found=short_repr(rule))
    return f"{text}$"


def compile_rule(rule: str, pattern: str, inner: str | None = None) -> re.Pattern[str]:
    """`pattern` compiled, refused where it could take for ever; `inner` is the part of it that nobody vouches for."""
    judged = pattern if inner is None else inner
    # A repeated group can backtrack exponentially, a chain of repeats polynomially; "(?" opens groups and flags that
    # are hard to judge. Escapes are not looked at: refusing one pattern too many costs an info line, not an hour.
    repeats = len(re.findall(r"[*+?{]", judged))
    if len(judged) > MAX_PATTERN_LENGTH or repeats > MAX_REPEATS or re.search(r"\)[*+{]|\(\?", judged):
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
