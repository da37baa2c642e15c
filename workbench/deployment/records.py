"""What ranks report to the handle: plain data that needs no torch to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from workbench.serving.steps import RunnerInfo
from workbench.spec import ModelSpec

__all__ = ["ForwardResult", "LoadProgress", "LoadReport", "Phase", "RankStats", "slowest_phases"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What a part of a start took: seconds by the clock, and of a processor, which a busy machine does not stretch."""

    seconds: float
    processor_s: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """How far one rank's loading is; `tensor` is the one in hand, `stages` are seconds so far by stage of the load."""

    rank: int
    bytes_read: int
    bytes_total: int
    seconds: float
    tensor: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        return self.bytes_read / self.bytes_total if self.bytes_total else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a rank has after loading: `ledger` is the summary of its ledger, `stats` what loading cost, `stages` where
    the time of the load went, and `phases` where the time since the rank's first line of Python went, in order."""

    rank: int
    place: str
    info: RunnerInfo
    spec: ModelSpec
    ledger: dict[str, object]
    stats: dict[str, float]
    stages: dict[str, object]
    phases: Mapping[str, Phase]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStats:
    """Where a rank runs and what it uses. `collectives` has (group, operation) -> (count, bytes this rank put in)."""

    rank: int
    place: str
    host: str
    pid: int
    device: str
    resident_bytes: int
    peak_resident_bytes: int
    device_bytes: int | None  # allocated on the accelerator; None on cpu
    cache_bytes: int
    num_images: int  # whose features are held
    num_pages: int  # kept beginnings of prompts, this rank's part
    collectives: dict[tuple[str, str], tuple[int, int]]
    last_collective: str


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ForwardResult:
    """Logits (tokens, V) float32 of every sequence, and by rank what was captured there, by name."""

    logits: list[np.ndarray]
    captured: list[dict[str, np.ndarray]]


def slowest_phases(reports: Sequence[LoadReport]) -> dict[str, Phase]:
    """Each phase as the slowest rank had it, in order."""
    return {
        name: Phase(
            seconds=max(report.phases[name].seconds for report in reports),
            processor_s=max(report.phases[name].processor_s for report in reports),
        )
        for name in reports[0].phases
    }
