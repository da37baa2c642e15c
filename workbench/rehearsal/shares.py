"""Every rank of a layout without loading one: shares, a ledger of what would be written, and collectives.

Ranks of one pipeline stage hold pieces of equal size, so one rank speaks for a stage; its last rank is planned as well
and must agree. The ledger is filled from the plan instead of from files: a row that no read would fill, or two, fails
here as it would at the load. Collectives come from a pass of the stage on empty tensors, as the rank itself would run.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base import Cell, LoadError, Table
from workbench.checkpoint import Checkpoint
from workbench.loading import Ledger, PreparedLoad, prepare_load, schedule
from workbench.operators import CollectiveUse, Workload
from workbench.operators.trace import trace_inventory
from workbench.placement import Layout

__all__ = ["StageShare", "check_ledger", "collective_table", "share_table", "stage_shares"]

DECODE = Workload(phase="decode", num_sequences=1, context=1024)
PREFILL = Workload(phase="prefill", num_sequences=1, new_tokens=1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShare:
    """What each rank of a stage reads and holds, and what it exchanges in one decode step and one prompt.

    `rows` of the ledger would each be written once. Collective bytes are those that one rank puts in.
    """

    stage: int
    layers: tuple[int, int]  # first, last
    ranks: tuple[int, int]  # first, last
    num_ranks: int
    num_bytes: int
    resident_bytes: int
    num_params: int
    rows: int
    decode: tuple[CollectiveUse, ...]
    prefill: tuple[CollectiveUse, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "stage": self.stage,
            "layers": list(self.layers),
            "ranks": list(self.ranks),
            "num_ranks": self.num_ranks,
            "num_bytes": self.num_bytes,
            "resident_bytes": self.resident_bytes,
            "num_params": self.num_params,
            "rows": self.rows,
            "decode": [use.to_json() for use in self.decode],
            "prefill": [use.to_json() for use in self.prefill],
        }


def stage_shares(checkpoint: Checkpoint, layout: Layout, *, precision: str) -> tuple[StageShare, ...]:
    """The share of every stage of `layout`, by stage.

    Raises LoadError where the plan would leave a row unwritten, write one twice, or give two ranks of a stage unequal
    shares, and LayoutError or LoadError as `plan_load` does.
    """
    return tuple(_share(checkpoint, layout, stage, precision) for stage in range(layout.pp))


def check_ledger(prepared: PreparedLoad) -> Ledger:
    """The ledger of a load that is only planned, closed. Raises LoadError as the load would, contents apart."""
    ledger = Ledger(prepared.model, rank=prepared.plan.rank, check=False, device="cpu")
    for batch in schedule(prepared.plan, prepared.window):
        for chunk in batch.chunks:
            for target in chunk.assignment.transform.targets if not chunk.is_padding else ():
                ledger.record(target, chunk.assignment.slot, (chunk.first, chunk.last))
    ledger.close()
    return ledger


def share_table(shares: tuple[StageShare, ...]) -> Table:
    """One row per stage."""
    rows: list[tuple[Cell, ...]] = [
        (
            share.stage,
            f"{share.layers[0]}..{share.layers[1]}",
            f"{share.ranks[0]}..{share.ranks[1]}",
            share.num_bytes,
            share.resident_bytes,
            share.num_params,
            share.rows,
            sum(use.count for use in share.decode),
            sum(use.count * use.num_bytes for use in share.decode),
            sum(use.count * use.num_bytes for use in share.prefill),
        )
        for share in shares
    ]
    columns = (
        "stage", "layers", "ranks", "bytes read, each", "bytes held, each", "parameters", "ledger rows, each once",
        "exchanges per token", "bytes, a token", f"bytes, {PREFILL.new_tokens:,} tokens",
    )  # fmt: skip
    return Table(title="Every rank, planned and not loaded", columns=columns, rows=tuple(rows))


def collective_table(shares: tuple[StageShare, ...]) -> Table:
    """What a rank of each stage enters for one token of one sequence."""
    rows: list[tuple[Cell, ...]] = [
        (share.stage, use.layer_kind, use.operation, use.group, use.group_size, use.count, use.num_bytes)
        for share in shares
        for use in share.decode
    ]
    columns = ("stage", "where", "operation", "group", "ranks", "times", "bytes each")
    return Table(title=f"Collectives of one step ({DECODE})", columns=columns, rows=tuple(rows))


def _share(checkpoint: Checkpoint, layout: Layout, stage: int, precision: str) -> StageShare:
    spec = checkpoint.spec
    per_stage = layout.dp * layout.tp
    first, last = stage * per_stage, (stage + 1) * per_stage - 1
    found = {rank: _planned(checkpoint, layout, rank, precision) for rank in dict.fromkeys((first, last))}
    if len(set(found.values())) > 1:
        raise LoadError(f"ranks {first} and {last} of stage {stage} have unequal shares", found=found)
    num_bytes, resident, params, rows = found[first]
    layers = layout.stage_layers(spec.num_layers)[stage]
    decode, prefill = (
        trace_inventory(spec, layout, workload, stage=stage, precision=precision).collectives
        for workload in (DECODE, PREFILL)
    )
    return StageShare(
        stage=stage,
        layers=(layers[0], layers[-1]),
        ranks=(first, last),
        num_ranks=per_stage,
        num_bytes=num_bytes,
        resident_bytes=resident,
        num_params=params,
        rows=rows,
        decode=tuple(decode),
        prefill=tuple(prefill),
    )


def _planned(checkpoint: Checkpoint, layout: Layout, rank: int, precision: str) -> tuple[int, int, int, int]:
    """Bytes assigned, bytes held, parameters and rows of one rank."""
    prepared = prepare_load(checkpoint, layout, rank, precision=precision)
    entries = check_ledger(prepared).entries
    return prepared.plan.bytes_assigned, prepared.resident_bytes, len(entries), sum(x.num_rows for x in entries)
