"""What people report of real deployments of Kimi K3, beside what is predicted for the same layouts."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base import Cell, Table
from workbench.placement import Layout
from workbench.planner.engines import VLLM, WORKBENCH
from workbench.planner.memory import CacheNeed, Reserve
from workbench.planner.pages import hybrid_pages
from workbench.planner.weights import read_weight_table
from workbench.spec import ModelSpec

__all__ = ["REPORTED", "Comparison", "Reported", "compare_reported"]

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """One report. `weights_gib` per device; `pool_gib` (least, most) is what was left for caches and `pool_tokens` the
    tokens that were said to fit into it, in requests of `context` tokens."""

    hardware: str
    devices: int
    layout: str
    fits: bool
    source: str
    weights_gib: float | None = None
    pool_gib: tuple[float, float] | None = None
    pool_tokens: int | None = None
    context: int = 8192


_RECIPES = "vLLM recipes for Kimi K3"
_H200 = "github.com/mnmehta/kimi-k3, vLLM on 2 x 8 H200"
REPORTED = (
    Reported(hardware="b300", devices=8, layout="tp8xep8", fits=True, source=_RECIPES),
    Reported(hardware="b200", devices=8, layout="tp8xep8", fits=False, source=_RECIPES),
    Reported(hardware="b200", devices=16, layout="tp16xep16", fits=True, source=_RECIPES),
    Reported(hardware="b200", devices=16, layout="pp2xtp8xep8", fits=True, source=_RECIPES),
    Reported(hardware="h200", devices=8, layout="tp8", fits=False, source=_H200),
    Reported(
        hardware="h200",
        devices=16,
        layout="tp16",
        fits=True,
        source=_H200,
        weights_gib=129.75,
        pool_gib=(1.7, 2.2),
        pool_tokens=55_000,
    ),
    Reported(
        hardware="h200",
        devices=16,
        layout="pp2xtp8",
        fits=True,
        source=_H200,
        weights_gib=98.0,
        pool_gib=(25.0, 27.0),
        pool_tokens=1_450_000,
    ),
    Reported(hardware="h200", devices=16, layout="dp2xtp8", fits=True, source=_H200, weights_gib=135.7),
    Reported(hardware="h200", devices=32, layout="pp4xtp8", fits=True, source="Dynamo recipe, 4 x 8 H200"),
    Reported(hardware="h100", devices=32, layout="pp4xtp8", fits=True, source=_RECIPES),
    Reported(hardware="mi355x", devices=8, layout="tp8xep8", fits=True, source=_RECIPES, weights_gib=None),
    Reported(
        hardware="ascend-910c",
        devices=64,
        layout="dp4xtp16xep64",
        fits=True,
        source="vllm-ascend tutorial, 4 nodes of A3, 4-bit experts",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One report and the prediction. `pool_tokens` is the range that the reported range of bytes makes."""

    reported: Reported
    fits: bool
    weights_gib: float
    free_gib: float
    pool_tokens: tuple[float, float] | None

    @property
    def agrees(self) -> bool:
        """Same verdict, weights within 2 %, tokens within 10 % of the range."""
        said = self.reported
        weights = said.weights_gib is None or abs(self.weights_gib / said.weights_gib - 1) <= 0.02
        tokens = True
        if self.pool_tokens is not None and said.pool_tokens is not None:
            tokens = 0.9 * self.pool_tokens[0] <= said.pool_tokens <= 1.1 * self.pool_tokens[1]
        return self.fits == said.fits and weights and tokens


def compare_reported(spec: ModelSpec, reports: tuple[Reported, ...] = REPORTED) -> tuple[Table, tuple[Comparison, ...]]:
    """Table and records. Reports with figures are predicted by the rules of the engine they come from."""
    from workbench.cluster.catalogue import read_hardware
    from workbench.planner.candidates import ledgers_of

    found = []
    for said in reports:
        hardware = read_hardware(said.hardware)
        table = read_weight_table(spec, "mxfp4", engine=VLLM if said.weights_gib is not None else WORKBENCH)
        layout = Layout.parse(said.layout)
        # The shortest useful cache: that a layout fits at all is what was reported.
        need = CacheNeed(slots=1, max_tokens=said.context)
        reserve = Reserve.for_hardware(hardware)
        ledgers = ledgers_of(table, layout, need, reserve, capacity=hardware.memory)
        free = min(ledger.free for ledger in ledgers if ledger.free is not None)
        tokens = None
        if said.pool_gib is not None:
            # The stage whose blocks are largest has the fewest of them.
            pages = [hybrid_pages(spec, layout, stage) for stage in range(layout.pp)]
            low, high = (min(x.tokens(size * GIB, said.context) for x in pages) for size in said.pool_gib)
            tokens = (low, high)
        found.append(
            Comparison(
                reported=said,
                fits=free >= 0,
                weights_gib=max(ledger.weights for ledger in ledgers) / GIB,
                free_gib=free / GIB,
                pool_tokens=tokens,
            )
        )
    return _table(found), tuple(found)


def _table(found: list[Comparison]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for x in found:
        said = x.reported
        tokens = None if x.pool_tokens is None else f"{x.pool_tokens[0]:,.0f} to {x.pool_tokens[1]:,.0f}"
        rows.append(
            (
                f"{said.devices} x {said.hardware}",
                said.layout,
                "fits" if said.fits else "does not fit",
                "fits" if x.fits else f"{-x.free_gib:.1f} GiB short",
                said.weights_gib,
                round(x.weights_gib, 2),
                None if said.pool_tokens is None else f"{said.pool_tokens:,}",
                tokens,
                x.agrees,
                said.source,
            )
        )
    columns = (
        "machines",
        "layout",
        "reported",
        "here",
        "weights GiB reported",
        "here ",
        "cache tokens reported",
        "here  ",
        "agrees",
        "source",
    )
    return Table(
        title="Reported deployments of Kimi K3, and what is predicted for them", columns=columns, rows=tuple(rows)
    )
