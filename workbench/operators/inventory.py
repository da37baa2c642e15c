"""What one rank must run in one forward pass: operators with shapes, work and bytes, and collectives. Plain records.

An inventory is made by running the model itself on tensors without contents (see `trace`), never written by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from workbench.base import Cell, ConfigError, Table, human
from workbench.placement import Layout

__all__ = [
    "CATEGORIES",
    "Category",
    "CollectiveUse",
    "Inventory",
    "OperatorUse",
    "Phase",
    "Workload",
    "distinct_operators",
]

Phase = Literal["prefill", "decode", "vision"]
Category = Literal[
    "gemm",
    "grouped_gemm",
    "attention",
    "linear_attention",
    "routing",
    "norm",
    "elementwise",
    "movement",
    "conv",
    "dequantise",
    "sampling",
    "vision",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
SHOWN_OPERATORS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One forward pass of ONE data-parallel replica: `num_sequences` sequences, each with `new_tokens` new tokens after
    `context` cached ones. In phase "vision" the sequences are images and the new tokens are theirs.

    Raises ConfigError for counts below their least and for a decode step of more than one new token.
    """

    phase: Phase
    num_sequences: int = 1
    new_tokens: int = 1
    context: int = 0

    def __post_init__(self) -> None:
        if self.phase not in get_args(Phase):
            raise ConfigError(f"phase {self.phase!r}", expected=f"one of {get_args(Phase)}")
        if min(self.num_sequences, self.new_tokens) < 1 or self.context < 0:
            raise ConfigError(
                "not a workload",
                found=str(self),
                expected="at least one sequence, one new token, no less than 0 cached",
            )
        if self.phase == "decode" and self.new_tokens != 1:
            raise ConfigError(f"a decode step takes one new token of each sequence, not {self.new_tokens}")

    @property
    def num_tokens(self) -> int:
        """New tokens of the whole pass."""
        return self.num_sequences * self.new_tokens

    def __str__(self) -> str:
        return f"{self.phase}: {self.num_sequences} x {self.new_tokens} new tokens after {self.context}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Workload:
        return cls(**record)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorUse:
    """One operator at one set of shapes, `count` times in the stage. Work and bytes are those of ONE call.

    `name` is torch's ("aten.mm.default"). `call` is its argument list as JSON: {"t": i} stands for the i-th entry of
    `input_shapes`, {"dtype": ..}, {"device": ..} for what JSON has no word for. A view moves nothing: 0 bytes.
    `flops` counts multiplications and additions of matrix products and attention; other arithmetic counts 0 and is
    bound by its bytes. `weight_bytes` is the part of `bytes_read` that comes from parameters.
    """

    name: str
    category: Category
    layer_kind: str  # "KDA+MoE", ...; "embed", "head", "stage", "vision" outside layers
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    weight_bytes: int
    count: int
    call: str = "[[], {}]"
    is_view: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two uses the same operator for a device: name, shapes, dtypes, arguments."""
        return (self.name, self.input_shapes, self.input_dtypes, "" if self.is_view else self.call)

    @property
    def num_bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    def __str__(self) -> str:
        pairs = zip(self.input_dtypes, self.input_shapes, strict=True)
        return f"{self.name}({', '.join(f'{dtype}{list(shape)}' for dtype, shape in pairs)})"

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> OperatorUse:
        shapes = tuple(tuple(shape) for shape in record["input_shapes"])
        return cls(**{**record, "input_shapes": shapes, "input_dtypes": tuple(record["input_dtypes"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveUse:
    """One collective as the traced rank enters it, `count` times in the stage; `num_bytes` it puts in per call.

    `operation` is all_reduce, all_gather, all_to_all, broadcast, send or receive: a hop between two pipeline stages is
    a send in the one's inventory and a receive in the other's. `group` names the ranks' purpose: tp, pp, dp, `experts`
    (ranks whose expert results are summed or exchanged), `expert_gather` (the replicas that an expert group spans).
    """

    operation: str
    group: str
    group_size: int
    num_bytes: int
    dtype: str
    layer_kind: str
    count: int
    ranks: tuple[int, ...] = ()  # global ranks of the group

    @property
    def link_operation(self) -> str:
        """The operation's name where links are measured: a send and a receive are the two ends of one send_recv."""
        return "send_recv" if self.operation in ("send", "receive") else self.operation

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CollectiveUse:
        return cls(**{**record, "ranks": tuple(record["ranks"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Everything that one rank of pipeline stage `stage` runs in one forward pass of `workload`.

    `activation_peak_bytes` is the most that tensors made during the pass take at one time, beside weights and caches:
    outputs of operators while Python still holds them, without workspace inside an operator. `layer_peaks` says how
    much of it one layer of each kind adds on top of what is alive when it begins. `notes` state what was assumed.
    """

    model: str
    layout: Layout
    stage: int
    precision: str
    workload: Workload
    operators: tuple[OperatorUse, ...] = field(repr=False)  # hundreds of entries, as the next
    collectives: tuple[CollectiveUse, ...] = field(repr=False)
    activation_peak_bytes: int
    layer_peaks: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        return sum(use.flops * use.count for use in self.operators)

    @property
    def bytes(self) -> int:
        """Bytes that operators read and write."""
        return sum(use.num_bytes * use.count for use in self.operators)

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters that operators read."""
        return sum(use.weight_bytes * use.count for use in self.operators)

    @property
    def collective_bytes(self) -> int:
        return sum(use.num_bytes * use.count for use in self.collectives)

    def distinct(self) -> tuple[OperatorUse, ...]:
        """One use per operator, shapes and dtypes, with the counts of all layer kinds together."""
        return distinct_operators((self,))

    def to_json(self) -> dict[str, object]:
        layout = {axis: getattr(self.layout, axis) for axis in ("pp", "dp", "tp", "ep", "dispatch")}
        return {
            "model": self.model,
            "layout": {**layout, "stages": None if self.layout.stages is None else list(self.layout.stages)},
            "stage": self.stage,
            "precision": self.precision,
            "workload": self.workload.to_json(),
            "flops": self.flops,
            "bytes": self.bytes,
            "weight_bytes": self.weight_bytes,
            "collective_bytes": self.collective_bytes,
            "activation_peak_bytes": self.activation_peak_bytes,
            "layer_peaks": [list(pair) for pair in self.layer_peaks],
            "operators": [use.to_json() for use in self.operators],
            "collectives": [use.to_json() for use in self.collectives],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Inventory:
        layout = dict(record["layout"])
        stages = layout.pop("stages")
        return cls(
            model=record["model"],
            layout=Layout(**layout, stages=None if stages is None else tuple(stages)),
            stage=record["stage"],
            precision=record["precision"],
            workload=Workload.from_json(record["workload"]),
            operators=tuple(OperatorUse.from_json(use) for use in record["operators"]),
            collectives=tuple(CollectiveUse.from_json(use) for use in record["collectives"]),
            activation_peak_bytes=record["activation_peak_bytes"],
            layer_peaks=tuple((kind, size) for kind, size in record["layer_peaks"]),
            notes=tuple(record["notes"]),
        )

    def tables(self) -> tuple[Table, ...]:
        """Work by layer kind and category, the heaviest operators, the collectives."""
        tables = [self._by_category(), self._heaviest()]
        return (*tables, self._collective_table()) if self.collectives else tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    @property
    def title(self) -> str:
        of = f" stage {self.stage} of {self.layout.pp}" if self.layout.pp > 1 else ""
        return f"{self.model}, {self.layout}{of}, {self.precision}, {self.workload}"

    def _by_category(self) -> Table:
        calls: Counter[tuple[str, str]] = Counter()
        sums: dict[tuple[str, str], list[int]] = {}
        for use in self.operators:
            at = (use.layer_kind, use.category)
            calls[at] += 0 if use.is_view else use.count
            totals = sums.setdefault(at, [0, 0, 0])
            for i, value in enumerate((use.flops, use.num_bytes, use.weight_bytes)):
                totals[i] += value * use.count
        rows: list[tuple[Cell, ...]] = [
            (kind, category, calls[kind, category], _work(flops), _size(total), _size(weights))
            for (kind, category), (flops, total, weights) in sums.items()
            if calls[kind, category]
        ]
        rows.append(
            ("all", "", sum(calls.values()), _work(self.flops), _size(self.bytes), _size(self.weight_bytes)),
        )
        peak = f"activations at most {_size(self.activation_peak_bytes)}"
        return Table(
            title=f"Operators of one rank: {self.title}",
            columns=("layers", "category", "calls", "FLOP", "bytes", "of weights"),
            rows=tuple(rows),
            note="\n".join((peak, *self.notes)),
        )

    def _heaviest(self) -> Table:
        working = [use for use in self.distinct() if not use.is_view]
        working.sort(key=lambda use: -(use.num_bytes + use.flops) * use.count)
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (
                use.name.removeprefix("aten.").removesuffix(".default"),
                " ".join(f"{d}{list(s)}" for d, s in zip(use.input_dtypes, use.input_shapes, strict=True))[:72],
                use.category,
                use.count,
                _work(use.flops * use.count),
                _size(use.num_bytes * use.count),
            )
            for use in working[:SHOWN_OPERATORS]
        )
        more = len(working) - len(rows)
        return Table(
            title="Heaviest operators",
            columns=("operator", "inputs", "category", "calls", "FLOP", "bytes"),
            rows=rows,
            note=f"and {more} more shapes of {len({use.name for use in working})} operators" if more > 0 else "",
        )

    def _collective_table(self) -> Table:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (
                use.layer_kind,
                use.operation,
                use.group,
                use.group_size,
                use.dtype,
                use.count,
                _size(use.num_bytes),
                _size(use.num_bytes * use.count),
            )
            for use in self.collectives
        )
        return Table(
            title="Collectives of one rank",
            columns=("layers", "operation", "group", "ranks", "dtype", "calls", "bytes per call", "bytes"),
            rows=rows,
            note=f"{_size(self.collective_bytes)} put in by this rank in one pass",
        )


def distinct_operators(inventories: tuple[Inventory, ...]) -> tuple[OperatorUse, ...]:
    """One use per operator, shapes, dtypes and arguments of several inventories, counts added up, in order."""
    found: dict[tuple[object, ...], OperatorUse] = {}
    for inventory in inventories:
        for use in inventory.operators:
            known = found.get(use.key)
            found[use.key] = use if known is None else replace(known, count=known.count + use.count)
    return tuple(found.values())


def _work(flops: int) -> str:
    return human(flops, "FLOP") if flops else "–"


def _size(num_bytes: int) -> str:
    return human(num_bytes, "B") if num_bytes else "–"
