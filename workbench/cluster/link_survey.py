"""What is measured between ranks, in which order, and what becomes of what fails: the driver of the rank pools.

A step that hangs or kills ranks costs its algorithm, which is not tried again, and nothing else: the rest goes on with
new ranks, until they have broken MAX_BREAKS times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from workbench.cluster.cost import OPERATIONS, Operation
from workbench.cluster.rank_pool import RankPool, StepOutcome
from workbench.cluster.topology import CollectiveSupport

__all__ = ["ALTERNATIVES", "COVERAGE_DTYPES", "Findings", "LinkSurvey", "Series", "plan_series"]

MAX_BREAKS = 4
COVERAGE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "int64")
COVERAGE_BYTES = 1 << 10
WINDOW_S = 0.05
MIN_REPEATS, MAX_REPEATS = 4, 60
ALTERNATIVES: dict[Operation, str] = {
    "all_reduce": "reduce_scatter + all_gather",
    "all_to_all": "messages between pairs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One algorithm over one group in one dtype, measured at rising sizes."""

    operation: Operation
    algorithm: str
    ranks: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        by = "" if self.algorithm == self.operation else f" by {self.algorithm}"
        return f"{self.operation}{by} in {self.dtype} over ranks {' '.join(map(str, self.ranks))}"


@dataclass(slots=True)
class Findings:
    """(num_bytes, seconds) by series, coverage, and what was claimed and could not be measured."""

    points: dict[Series, list[tuple[int, float]]] = field(default_factory=dict)
    coverage: list[CollectiveSupport] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)

    def claim(self, what: str) -> None:
        self.claims.append(f"claimed, not measured: {what}")


def plan_series(hosts: tuple[str, ...], sizes: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[Series]:
    """Everything to be measured between ranks on these hosts (by rank), the most telling first."""
    world = tuple(range(len(hosts)))
    for pair in combinations(world, 2):
        yield Series(operation="send_recv", algorithm="send_recv", ranks=pair, dtype=dtypes[0], sizes=sizes)
    groups = [world]
    half = 2
    while half < len(world):
        groups.append(world[:half])
        half *= 2
    heads = tuple(rank for rank in world if hosts.index(hosts[rank]) == rank)  # one rank of each host
    if len(heads) > 1:
        groups.append(heads)
    collectives: list[Operation] = [x for x in OPERATIONS if x != "send_recv"]
    for group in dict.fromkeys(groups):
        for name in collectives:
            yield Series(operation=name, algorithm=name, ranks=group, dtype=dtypes[0], sizes=sizes)
    for operation, algorithm in ALTERNATIVES.items():
        yield Series(operation=operation, algorithm=algorithm, ranks=world, dtype=dtypes[0], sizes=sizes)
    for dtype in dtypes[1:]:
        for name in collectives:
            yield Series(operation=name, algorithm=name, ranks=world, dtype=dtype, sizes=sizes)


class LinkSurvey:
    """Runs series in a pool, and has `new_pool` make another one after a break. `say` hears what comes next."""

    def __init__(
        self, new_pool: Callable[[], RankPool], *, num_ranks: int, join_limit_s: float, say: Callable[[str], None]
    ) -> None:
        self.findings = Findings()
        self._new_pool, self._num_ranks = new_pool, num_ranks
        self._join_limit_s, self._say = join_limit_s, say
        self._pool: RankPool | None = None
        self._hung: set[str] = set()  # algorithms that broke the ranks once are not tried again
        self._breaks = self._seed = self._skipped = 0

    def __enter__(self) -> LinkSurvey:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._skipped:
            self.findings.claim(f"{self._skipped} more measurements, given up after the ranks broke")

    def cover(self) -> None:
        """Which operation gives right numbers in which dtype."""
        for operation in OPERATIONS:
            ranks = tuple(range(2 if operation == "send_recv" else self._num_ranks))
            for dtype in COVERAGE_DTYPES:
                if operation in self._hung:
                    break
                series = Series(operation=operation, algorithm=operation, ranks=ranks, dtype=dtype, sizes=())
                outcome = self._step(series, COVERAGE_BYTES, 0)
                if outcome is None:
                    continue
                words = {str(answer["error"]).partition("\n")[0] for answer in outcome.answers.values()}
                detail = words.pop() if len(words) == 1 and not outcome.is_broken else outcome.failure
                self.findings.coverage.append(
                    CollectiveSupport(operation=operation, dtype=dtype, is_supported=not outcome.failure, detail=detail)
                )

    def measure(self, series: Series) -> None:
        """Times at every size. At the first failure the series ends: the failure becomes a claim, and what was measured
        before it counts where it is enough for a fit."""
        covered = {(x.operation, x.dtype): x.is_supported for x in self.findings.coverage}
        if series.algorithm in self._hung or not covered.get((series.operation, series.dtype), True):
            return  # said already
        self._say(str(series))
        points: list[tuple[int, float]] = []
        seconds = 0.0
        for size in series.sizes:
            outcome = self._step(series, size, _repeats(seconds))
            if outcome is None:
                break
            if outcome.failure:
                if not outcome.is_broken:
                    self.findings.claim(outcome.failure)
                break
            parts = [outcome.answers[rank] for rank in series.ranks]
            seconds = max(part["seconds"] for part in parts)  # an operation is over when its last rank has it
            points.append((int(parts[0]["num_bytes"]), seconds))
        if len({size for size, _ in points}) > 1:
            self.findings.points[series] = points

    def _step(self, series: Series, size: int, repeats: int) -> StepOutcome | None:
        """None where nothing is tried any more."""
        pool = self._ready_pool()
        if pool is None:
            self._skipped += 1
            return None
        self._seed += 1
        step = {
            "algorithm": series.algorithm,
            "dtype": series.dtype,
            "ranks": series.ranks,
            "num_bytes": size,
            "repeats": repeats,
            "seed": self._seed,
        }
        outcome = pool.run(step, f"{series}, {size:,} B")
        if outcome.is_broken:
            self._hung.add(series.algorithm)
            self._break(outcome)
        return outcome

    def _ready_pool(self) -> RankPool | None:
        if self._pool is None and self._breaks < MAX_BREAKS:
            self._say(f"start of {self._num_ranks} ranks")
            self._pool = self._new_pool()
            outcome = self._pool.start(join_limit_s=self._join_limit_s)
            if outcome.failure:
                self._break(outcome)
                self._breaks = MAX_BREAKS  # ranks that cannot join will not join the next time
        return self._pool

    def _break(self, outcome: StepOutcome) -> None:
        """The words of the ranks are kept before the ranks are ended."""
        self.findings.claim(outcome.failure)
        self._breaks += 1
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _repeats(seconds: float) -> int:
    """Repetitions of a window, from the time that a smaller size took."""
    if seconds <= 0:
        return MIN_REPEATS
    return max(MIN_REPEATS, min(MAX_REPEATS, round(WINDOW_S / seconds)))
