"""Which module is held in which scheme, where one answer for the whole model is not enough.

    {"format": "workbench-precision-map", "version": 1, "default": "fp8",
     "rules": [{"match": "layers.*.ffn.experts.*", "scheme": "int4"}, {"match": "layers.3.mixer.*", "scheme": "bf16"}]}

`match` names canonical parameters with `*` for anything; the last rule that matches decides, `default` where none does.
Only matrices that may be quantised are asked for; "bf16" leaves one plain. Loader and quantiser read the same map.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from workbench.base import ConfigError, short_repr
from workbench.nn.quant import SCHEMES, Scheme

__all__ = ["PLAIN", "PrecisionMap", "is_quantisable", "read_precision_map"]

FORMAT, VERSION = "workbench-precision-map", 1
PLAIN = "bf16"
NAMES = (PLAIN, *SCHEMES)
MAX_BYTES, MAX_RULES = 16 << 20, 100_000

# Projections and experts. Never: embedding, head, router, norms, convolutions, the low-rank decay and beta of KDA, kv_b
# (absorbed into queries and outputs), latent projections, vision, projector.
_QUANTISABLE = re.compile(
    r"layers\.\d+\.(?:mixer\.(?:q|k|v|g|o|q_a|q_b|kv_a)_proj|ffn\.(?:shared\.)?(?:gate|up|down)_proj|ffn\.experts\.w[123])"
    r"\.weight"
)


def is_quantisable(param: str) -> bool:
    """Whether the matrix of this canonical name may be held in a scheme."""
    return _QUANTISABLE.fullmatch(param) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionMap:
    """`rules` are (match, scheme name) pairs, the last match decides. Raises ConfigError for an unknown scheme."""

    default: str = PLAIN
    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in (self.default, *(scheme for _, scheme in self.rules)):
            if name not in NAMES:
                raise ConfigError(
                    "unknown scheme in a precision map", found=short_repr(name), expected=", ".join(NAMES)
                )

    @classmethod
    def uniform(cls, precision: str) -> PrecisionMap:
        """The map of a precision by name: mxfp4 is for routed experts alone, fp8, int8 and int4 for everything.

        Raises ConfigError for a name that is no precision.
        """
        if precision == "mxfp4":
            return cls(rules=(("layers.*.ffn.experts.*", "mxfp4"),))
        return cls(default=PLAIN if precision in ("fp32", "bf16") else precision)

    def name_of(self, param: str) -> str:
        """Scheme name of a canonical parameter; "bf16" for what may not be quantised."""
        if not is_quantisable(param):
            return PLAIN
        found = self.default
        for match, scheme in self.rules:
            if fnmatchcase(param, match):
                found = scheme
        return found

    def scheme_of(self, param: str) -> Scheme | None:
        return SCHEMES.get(self.name_of(param))

    def unused(self, params: Iterable[str]) -> tuple[str, ...]:
        """Rules that match none of `params`: a misspelt name would otherwise change nothing, silently."""
        names = [param for param in params if is_quantisable(param)]
        return tuple(match for match, _ in self.rules if not any(fnmatchcase(name, match) for name in names))

    def to_json(self) -> dict[str, Any]:
        rules = [{"match": match, "scheme": scheme} for match, scheme in self.rules]
        return {"format": FORMAT, "version": VERSION, "default": self.default, "rules": rules}

    @classmethod
    def from_json(cls, record: object, *, where: object = None) -> PrecisionMap:
        """Raises ConfigError for anything but a record of `to_json`."""
        if not isinstance(record, Mapping) or record.get("format") != FORMAT or record.get("version") != VERSION:
            raise ConfigError(
                "not a precision map", where=where, expected=f'"format": "{FORMAT}", "version": {VERSION}'
            )
        default, rules = record.get("default", PLAIN), record.get("rules", [])
        if not isinstance(default, str) or not isinstance(rules, list) or len(rules) > MAX_RULES:
            raise ConfigError("not a precision map", where=where, expected="a text `default` and a list `rules`")
        pairs = []
        for rule in rules:
            match, scheme = (rule.get(key) if isinstance(rule, Mapping) else None for key in ("match", "scheme"))
            if not isinstance(match, str) or not isinstance(scheme, str):
                raise ConfigError("not a rule", where=where, found=short_repr(rule), expected="match and scheme, texts")
            pairs.append((match, scheme))
        return cls(default=default, rules=tuple(pairs))

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")


def read_precision_map(path: Path | str) -> PrecisionMap:
    """Raises ConfigError for a file that cannot be read or holds no map."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError("precision map is too long", where=path, expected=f"up to {MAX_BYTES} bytes")
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"precision map cannot be read: {short_repr(str(error))}", where=path) from None
    return PrecisionMap.from_json(record, where=path)
