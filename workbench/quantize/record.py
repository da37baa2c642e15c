"""What a conversion did: each kind of matrix with its scheme, its bytes and its rounding error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from workbench.base import Table, human

__all__ = ["QuantizeReport", "QuantizedKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedKind:
    """Matrices of one kind (numbers in their names shown as `*`). `relative_error`: ||stored - source|| / ||source||
    over all of them, 0 where the stored form passed through; bytes include scales."""

    kind: str
    scheme: str
    num_matrices: int
    num_weights: int
    bytes_source: int
    bytes_stored: int
    relative_error: float

    @property
    def bytes_per_weight(self) -> float:
        return self.bytes_stored / self.num_weights

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_weight": self.bytes_per_weight}


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """`bytes_bf16`: what all weights would take in bf16. `peak_bytes`: the most that was held of matrices at a time."""

    root: str
    out: str
    precision: str
    kinds: tuple[QuantizedKind, ...]
    bytes_source: int
    bytes_stored: int
    bytes_bf16: int
    num_files: int
    peak_bytes: int
    seconds: float
    audit: str

    @property
    def ratio(self) -> float:
        """Stored bytes over those of the same weights in bf16."""
        return self.bytes_stored / self.bytes_bf16

    @property
    def quantised_ratio(self) -> float:
        """The same over the quantised matrices alone."""
        quantised = [kind for kind in self.kinds if kind.scheme != "bf16"]
        weights = sum(kind.num_weights for kind in quantised)
        return sum(kind.bytes_stored for kind in quantised) / (2 * weights) if weights else math.nan

    def verdict(self) -> str:
        share = "" if math.isnan(self.quantised_ratio) else f", {self.quantised_ratio:.3f} over what is quantised"
        return (
            f"{self.out}: {human(self.bytes_stored, 'B')} from {human(self.bytes_source, 'B')}, {self.ratio:.3f} of "
            f"the same weights in bf16{share}"
        )

    def table(self) -> Table:
        shown = [kind for kind in self.kinds if kind.scheme != "bf16"]
        plain = [kind for kind in self.kinds if kind.scheme == "bf16"]
        if plain:
            shown.append(_joined("everything else", plain))
        rows = tuple(
            (
                kind.kind,
                kind.scheme,
                kind.num_matrices,
                kind.num_weights,
                human(kind.bytes_stored, "B"),
                f"{kind.bytes_per_weight:.4f}",
                f"{kind.relative_error:.2e}",
            )
            for kind in shown
        )
        columns = ("kind", "scheme", "matrices", "weights", "stored", "bytes per weight", "relative error")
        note = f"at most {human(self.peak_bytes, 'B')} held; {self.seconds:.1f} s; audit: {self.audit}"
        return Table(columns=columns, rows=rows, title=self.verdict(), note=note)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "out": self.out,
            "precision": self.precision,
            "bytes_source": self.bytes_source,
            "bytes_stored": self.bytes_stored,
            "bytes_bf16": self.bytes_bf16,
            "ratio": self.ratio,
            "quantised_ratio": None if math.isnan(self.quantised_ratio) else self.quantised_ratio,
            "num_files": self.num_files,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "audit": self.audit,
            "kinds": [kind.to_json() for kind in self.kinds],
        }


def _joined(name: str, kinds: list[QuantizedKind]) -> QuantizedKind:
    return QuantizedKind(
        kind=name,
        scheme="bf16",
        num_matrices=sum(kind.num_matrices for kind in kinds),
        num_weights=sum(kind.num_weights for kind in kinds),
        bytes_source=sum(kind.bytes_source for kind in kinds),
        bytes_stored=sum(kind.bytes_stored for kind in kinds),
        relative_error=max(kind.relative_error for kind in kinds),
    )
