"""Which operators of an inventory a device runs, how rightly and how fast: records without torch.

green   ran           on the device, numbers as float64 gives them
amber   fell back     right, but computed on the host
        approximate   on the device, numbers off by more than its rounding
        not tried     too large for the device or the time given: a gap, shown as one
red     failed        the device refused, crashed, hung or answered wrongly
        missing       there is no such operator here
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from workbench.base import Cell, Quantity, Table, human
from workbench.operators.inventory import OperatorUse

__all__ = ["STATUSES", "Coverage", "OperatorResult", "Roofline", "Status"]

Status = Literal["ran", "fell back", "approximate", "not tried", "failed", "missing"]
STATUSES: tuple[Status, ...] = get_args(Status)
COLOURS: dict[Status, str] = {
    "ran": "green",
    "fell back": "amber",
    "approximate": "amber",
    "not tried": "amber",
    "failed": "red",
    "missing": "red",
}
SHOWN_RATES = 16

# What to compute an operator with where a device has no good one of its own.
REPLACEMENTS: dict[str, str] = {
    "aten.mm": "bmm of a batch of one, or the vendor's GEMM library",
    "aten.bmm": "one mm per matrix of the batch",
    "aten.baddbmm": "bmm, then add",
    "aten.addmm": "mm, then add",
    "aten.mv": "mm with one column",
    "aten.scaled_dot_product_attention": "softmax(q k^T) v from bmm and softmax, in blocks of rows",
    "aten._softmax": "exp(x - max x) divided by its sum",
    "aten.topk": "sort descending, keep the first k",
    "aten.sort": "topk over the whole dimension; for a stable order add the position to the key",
    "aten.argsort": "topk over the whole dimension",
    "aten.bincount": "compare with arange and sum",
    "aten.nonzero": "sort of the mask's positions and a count",
    "aten.gather": "index_select of the flattened tensor",
    "aten.index": "index_select of the flattened tensor",
    "aten.index_select": "index with one tensor",
    "aten.index_put": "index_copy of the flattened tensor",
    "aten.index_copy": "index_put with one index",
    "aten.index_add": "one-hot matrix product",
    "aten.index_fill": "masked_fill of a comparison with the index",
    "aten.embedding": "index_select of the weight",
    "aten.scatter": "compare with arange and where",
    "aten.cumsum": "product with a triangular matrix of ones",
    "aten.linalg_vector_norm": "square, sum, square root",
    "aten.addcmul": "mul, then add",
    "aten.constant_pad_nd": "cat with zeros",
    "aten.polar": "cosine and sine as pairs",
    "aten.view_as_complex": "pairs of reals, multiplied out",
    "aten.upsample_bilinear2d": "two products with interpolation matrices",
    "aten.gelu": "its tanh or erf formula",
    "aten.rsqrt": "sqrt, then reciprocal",
    "aten.masked_fill": "where",
    "aten.where": "products with the mask and its complement",
    "aten._to_copy": "a cast kernel of the vendor; for 8-bit floats a table of 256 values",
}
BY_CATEGORY = {
    "dequantise": "hold the weights in another precision that the device can expand",
    "movement": "a copy kernel of the vendor, or another arrangement of the same rows",
    "elementwise": "an elementwise kernel of the vendor, or a composition of simpler ones",
}
OTHERWISE = "a kernel of the vendor behind the same operator name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Measured limits of the device: FLOP/s of large matrix products by dtype, B/s of a large copy. Gaps are absent.

    A copy that is larger than every cache is the limit of weights that are read once a step. A call on small tensors,
    tried again and again, finds them in a cache and may pass it: a share above one says that, not that it is good.
    """

    matmul: tuple[tuple[str, Quantity], ...] = ()
    memory: Quantity | None = None

    def least_seconds(self, use: OperatorUse) -> float | None:
        """What one call takes at these limits; None where the limit that it needs was not measured."""
        times = []
        if use.flops:
            rate = dict(self.matmul).get(use.input_dtypes[0] if use.input_dtypes else "")
            if rate is None:
                return None
            times.append(use.flops / rate.value)
        if use.num_bytes:
            if self.memory is None:
                return None
            times.append(use.num_bytes / self.memory.value)
        return max(times, default=None)

    def to_json(self) -> dict[str, object]:
        return {
            "matmul": {dtype: _quantity(rate) for dtype, rate in self.matmul},
            "memory": None if self.memory is None else _quantity(self.memory),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Roofline:
        memory = record["memory"]
        return cls(
            matmul=tuple((dtype, Quantity(**rate)) for dtype, rate in record["matmul"].items()),
            memory=None if memory is None else Quantity(**memory),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorResult:
    """One operator tried. `error` is the relative distance to float64 on the host and `tolerance` what its rounding
    explains; `seconds` the median of one call. `detail` says what went wrong, or how the comparison was made."""

    use: OperatorUse
    status: Status
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    share: float | None = None  # of the roofline

    @property
    def colour(self) -> str:
        return COLOURS[self.status]

    @property
    def replacement(self) -> str:
        """What to compute it with instead; empty where nothing is wrong."""
        if self.status in ("ran", "not tried"):
            return ""
        name = ".".join(self.use.name.split(".")[:2])
        known = REPLACEMENTS.get(name) or REPLACEMENTS.get(name.removesuffix("_"))
        return known or BY_CATEGORY.get(self.use.category, OTHERWISE)

    def to_json(self) -> dict[str, object]:
        fields = {name: getattr(self, name) for name in ("status", "detail", "error", "tolerance", "seconds", "share")}
        return {"use": self.use.to_json(), **fields, "colour": self.colour, "replacement": self.replacement}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> OperatorResult:
        kept = {k: v for k, v in record.items() if k not in ("use", "colour", "replacement")}
        return cls(use=OperatorUse.from_json(record["use"]), **kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How `device` (torch's name) meets the operators of some inventories. Passes where every operator ran there."""

    device: str
    device_name: str
    taken_at: str
    results: tuple[OperatorResult, ...] = field(repr=False)  # hundreds of entries
    roofline: Roofline
    _seconds: dict[tuple[object, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._seconds.update({r.use.key: r.seconds for r in self.results if r.seconds is not None})

    @property
    def ok(self) -> bool:
        """Nothing fell back, is approximated, failed, is missing, or was not tried."""
        return all(result.status == "ran" for result in self.results)

    @property
    def gaps(self) -> tuple[OperatorResult, ...]:
        return tuple(result for result in self.results if result.status != "ran")

    def seconds(self, use: OperatorUse) -> Quantity | None:
        """Measured time of one call of this operator at these shapes; None where it was not measured."""
        value = self._seconds.get(use.key)
        return None if value is None else Quantity(value, "s", "measured", f"{self.device}, median, {self.taken_at}")

    def to_json(self) -> dict[str, object]:
        return {
            "device": self.device,
            "device_name": self.device_name,
            "taken_at": self.taken_at,
            "ok": self.ok,
            "roofline": self.roofline.to_json(),
            "results": [result.to_json() for result in self.results],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Coverage:
        return cls(
            device=record["device"],
            device_name=record["device_name"],
            taken_at=record["taken_at"],
            results=tuple(OperatorResult.from_json(result) for result in record["results"]),
            roofline=Roofline.from_json(record["roofline"]),
        )

    def tables(self) -> tuple[Table, ...]:
        """Operators by colour, what is wrong with which shapes, and rates of the slowest ones."""
        tables = [self._by_operator()]
        if self.gaps:
            tables.append(self._gaps())
        if any(result.seconds is not None for result in self.results):
            tables.append(self._rates())
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def _by_operator(self) -> Table:
        by_name: dict[str, list[OperatorResult]] = {}
        for result in self.results:
            by_name.setdefault(result.use.name, []).append(result)
        rows: list[tuple[Cell, ...]] = []
        for name, results in sorted(by_name.items(), key=lambda item: (-max(map(_severity, item[1])), item[0])):
            worst = max(results, key=_severity)
            errors = [result.error for result in results if result.error is not None]
            shapes = Counter(result.status for result in results)
            text = ", ".join(f"{count} {status}" for status, count in shapes.items())
            rows.append((worst.colour, name, text, max(errors, default=None), worst.replacement))
        verdict = "every operator runs on the device" if self.ok else f"{len(self.gaps)} of {len(self.results)} do not"
        return Table(
            title=f"Operators on {self.device} ({self.device_name}), {self.taken_at}",
            columns=("", "operator", "shapes", "largest error", "instead"),
            rows=tuple(rows),
            note=f"{'pass' if self.ok else 'FAIL'}: {verdict}",
        )

    def _gaps(self) -> Table:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (result.colour, str(result.use)[:80], result.status, result.detail[:120], result.replacement)
            for result in sorted(self.gaps, key=lambda result: -_severity(result))
        )
        return Table(title="Gaps", columns=("", "operator", "status", "why", "instead"), rows=rows)

    def _rates(self) -> Table:
        timed = [result for result in self.results if result.seconds]
        timed.sort(key=lambda result: -(result.seconds or 0) * result.use.count)
        rows: list[tuple[Cell, ...]] = []
        for result in timed[:SHOWN_RATES]:
            use, seconds = result.use, result.seconds or 0.0
            flops = human(use.flops / seconds, "FLOP/s") if use.flops else "–"
            share = "–" if result.share is None else f"{100 * result.share:.1f} %"
            rate = human(use.num_bytes / seconds, "B/s")
            rows.append((str(use)[:72], use.count, human(seconds, "s"), flops, rate, share))
        limits = [f"{human(rate.value, rate.unit)} {dtype}" for dtype, rate in self.roofline.matmul]
        if self.roofline.memory is not None:
            limits.append(f"{human(self.roofline.memory.value, 'B/s')} copy")
        total = sum((result.seconds or 0.0) * result.use.count for result in timed)
        note = f"all together {human(total, 's')} one behind another; roofline: {', '.join(limits) or 'not measured'}"
        columns = ("operator", "calls", "one call", "FLOP/s", "B/s", "of roofline")
        return Table(title="Slowest operators", columns=columns, rows=tuple(rows), note=note)


def _severity(result: OperatorResult) -> int:
    return STATUSES.index(result.status)


def _quantity(quantity: Quantity) -> dict[str, object]:
    return asdict(quantity)
