"""Latencies of a served request from its time stamps, counted in tokens: first token, between tokens, end to end.

One arrival of a stream is not one token: a chunk may carry none (held back by a decoder) or several. All figures here
divide by token counts. Nothing in this file reads a clock: times come from whoever saw the events.

    submitted      sent        first arrival with tokens      k tokens after a gap g        last arrival
        |------------|------------------|---------------------------|---------------------------|
        |--- late ---|                  |           k times g / k between tokens                |
        |-------- first token ----------|--------- per token: time over tokens that follow -----|
        |------------------------------- end to end --------------------------------------------|

`submitted` is when the request was due: for a load that comes by itself, whether or not the sender was ready then.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workbench.base import Quantity, Table, human
from workbench.serving.chunks import CountedBy

__all__ = [
    "FIGURES",
    "LatencySummary",
    "Percentiles",
    "Record",
    "RequestTiming",
    "append_records",
    "read_records",
    "summarise",
]

LEVELS = (50, 90, 99)
# What a summary has percentiles of, and how it is called.
FIGURES = {
    "first_token_s": "first token",
    "inter_token_s": "between tokens",
    "per_token_s": "per token after the first",
    "longest_pause_s": "longest pause",
    "end_to_end_s": "end to end",
    "late_s": "sent after it was due",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming:
    """One request: when it was submitted, and each arrival as (time, tokens it carried), all in seconds of one clock.

    `sent_s`: when it left, where that was later than it was due. `counted_by`: how tokens were counted; with "chunks"
    they were not, and figures per token are None. `error`: it failed, after what had arrived by then; such a request
    has no latencies. Raises ValueError for times that run backwards or negative counts.
    """

    submitted_s: float
    arrivals: tuple[tuple[float, int], ...]
    num_prompt_tokens: int = 0
    num_images: int = 0
    label: str = ""
    sent_s: float | None = None
    counted_by: CountedBy = "ids"
    error: str = ""
    is_warm_up: bool = False

    def __post_init__(self) -> None:
        sent = [] if self.sent_s is None else [self.sent_s]
        times = [self.submitted_s, *sent, *(time_s for time_s, _ in self.arrivals)]
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"times run backwards: {times}")
        if any(count < 0 for _, count in self.arrivals):
            raise ValueError(f"an arrival carries a negative number of tokens: {self.arrivals}")

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived; 0 where they were not counted."""
        return sum(count for _, count in self.arrivals) if self.is_counted else 0

    @property
    def is_counted(self) -> bool:
        return self.counted_by != "chunks"

    @property
    def late_s(self) -> float | None:
        """How long after it was due the request left; None where nothing was due."""
        return None if self.sent_s is None else self.sent_s - self.submitted_s

    @property
    def _carrying(self) -> list[tuple[float, int]]:
        return [] if self.error else [(time_s, count) for time_s, count in self.arrivals if count]

    @property
    def first_token_s(self) -> float | None:
        """From submission to the arrival that carried the first token; None where none came."""
        return self._carrying[0][0] - self.submitted_s if self._carrying else None

    @property
    def gaps(self) -> tuple[tuple[float, int], ...]:
        """(seconds per token, tokens) of every arrival after the first with tokens; empty where tokens were not
        counted. What arrives together shares the time since the arrival before, so the sum over tokens is the time."""
        pairs = itertools.pairwise(self._carrying) if self.is_counted else ()
        return tuple(((later - earlier) / count, count) for (earlier, _), (later, count) in pairs)

    @property
    def longest_pause_s(self) -> float | None:
        """Longest time without anything new once something had come; None below two arrivals."""
        return max((later - earlier for (earlier, _), (later, _) in itertools.pairwise(self._carrying)), default=None)

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first arrival with tokens; None where no token followed it.

        Tokens of that first arrival have no time of their own and are left out of both sides of the division.
        """
        following = sum(count for _, count in self.gaps)
        return (self._carrying[-1][0] - self._carrying[0][0]) / following if following else None

    @property
    def end_to_end_s(self) -> float | None:
        """From submission to the last arrival; None where there was none."""
        return self.arrivals[-1][0] - self.submitted_s if self.arrivals and not self.error else None

    def to_json(self) -> dict[str, object]:
        return {
            "label": self.label,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_images": self.num_images,
            "num_tokens": self.num_tokens,
            "first_token_s": self.first_token_s,
            "per_token_s": self.per_token_s,
            "longest_pause_s": self.longest_pause_s,
            "end_to_end_s": self.end_to_end_s,
            "late_s": self.late_s,
            "counted_by": self.counted_by,
            "error": self.error,
            "is_warm_up": self.is_warm_up,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles: every figure was seen. Without enough samples the high levels equal the maximum."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Percentiles of `values`; None where there are none."""
        return cls.weighted([(value, 1) for value in values])

    @classmethod
    def weighted(cls, values: Iterable[tuple[float, int]]) -> Percentiles | None:
        """Percentiles of values that each stand for a number of samples; None where there are none."""
        ordered = sorted((value, weight) for value, weight in values if weight)
        if not ordered:
            return None
        ends = list(itertools.accumulate(weight for _, weight in ordered))
        count = ends[-1]
        places = (bisect.bisect_left(ends, math.ceil(level / 100 * count)) for level in LEVELS)
        p50, p90, p99 = (ordered[place][0] for place in places)
        mean = math.fsum(value * weight for value, weight in ordered) / count
        return cls(count=count, mean=mean, p50=p50, p90=p90, p99=p99, low=ordered[0][0], high=ordered[-1][0])

    def supports(self, level: int) -> bool:
        """Whether there are samples beyond the percentile: below that it is the largest value under another name."""
        return self.count - math.ceil(level / 100 * self.count) >= 1

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySummary:
    """Latencies of several requests. `tokens_per_s`: all tokens over the time from first submission to last arrival.

    `num_failed` requests are among `num_requests` and in no percentile. `inter_token_s` has one sample a token.
    """

    num_requests: int
    num_tokens: int
    first_token_s: Percentiles | None
    per_token_s: Percentiles | None
    end_to_end_s: Percentiles | None
    tokens_per_s: Quantity | None
    inter_token_s: Percentiles | None = None
    longest_pause_s: Percentiles | None = None
    late_s: Percentiles | None = None
    num_failed: int = 0
    counted_by: tuple[CountedBy, ...] = ()
    conditions: str = ""

    def to_json(self) -> dict[str, object]:
        parts = {name: getattr(self, name) for name in FIGURES}
        return {
            "num_requests": self.num_requests,
            "num_failed": self.num_failed,
            "num_tokens": self.num_tokens,
            "counted_by": list(self.counted_by),
            **{name: None if value is None else value.to_json() for name, value in parts.items()},
            "tokens_per_s": None if self.tokens_per_s is None else self.tokens_per_s.value,
            "conditions": self.conditions,
        }

    def table(self) -> Table:
        rows, has_few = [], False
        for name, label in FIGURES.items():
            value: Percentiles | None = getattr(self, name)
            if value is None:
                continue
            few = ["" if value.supports(level) else "*" for level in LEVELS]
            has_few = has_few or any(few)
            seen = [human(x, "s") + mark for x, mark in zip((value.p50, value.p90, value.p99), few, strict=True)]
            rows.append((label, str(value.count), *seen, human(value.low, "s"), human(value.high, "s")))
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s.value:.3g} tokens/s together"
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        note = f"{self.num_requests} requests{failed}, {self.num_tokens} tokens{rate}"
        note += f"; {self.conditions}" if self.conditions else ""
        note += f"\ntokens counted by {', '.join(self.counted_by)}" if set(self.counted_by) - {"ids"} else ""
        note += "\n* too few samples for this percentile: the largest value seen" if has_few else ""
        return Table(columns=("latency", "samples", "p50", "p90", "p99", "least", "most"), rows=tuple(rows), note=note)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def summarise(timings: Sequence[RequestTiming], *, conditions: str = "") -> LatencySummary:
    """Percentiles over requests; one without a figure (no token came, it failed) is counted, but adds no sample."""

    def over(name: str) -> Percentiles | None:
        values = [getattr(timing, name) for timing in timings]
        return Percentiles.of([value for value in values if value is not None])

    num_tokens = sum(timing.num_tokens for timing in timings)
    ends = [timing.arrivals[-1][0] for timing in timings if timing.arrivals]
    elapsed = max(ends) - min(timing.submitted_s for timing in timings) if ends else 0.0
    rate = Quantity(num_tokens / elapsed, "tokens/s", "measured", conditions) if elapsed > 0 else None
    return LatencySummary(
        num_requests=len(timings),
        num_tokens=num_tokens,
        first_token_s=over("first_token_s"),
        per_token_s=over("per_token_s"),
        end_to_end_s=over("end_to_end_s"),
        tokens_per_s=rate,
        inter_token_s=Percentiles.weighted(gap for timing in timings for gap in timing.gaps),
        longest_pause_s=over("longest_pause_s"),
        late_s=over("late_s"),
        num_failed=sum(bool(timing.error) for timing in timings),
        counted_by=tuple(sorted({timing.counted_by for timing in timings if not timing.error})),
        conditions=conditions,
    )


class Record(Protocol):
    """What can be kept as a line of JSON."""

    def to_json(self) -> dict[str, object]: ...


def append_records(path: Path | str, records: Sequence[Record], environment: Mapping[str, object]) -> None:
    """Append records to a file of JSON lines, each with its kind and the environment it was taken in.

    `environment` says what a reader needs to trust the figures (hardware, versions, commit, date); raises ValueError
    where it is empty, since a number without its circumstances is not kept.
    """
    if not environment:
        raise ValueError("a latency record needs its environment: hardware, versions, date")
    lines = [
        json.dumps(
            {"kind": type(record).__name__, "environment": dict(environment), **record.to_json()}, allow_nan=False
        )
        for record in records
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        # A writer that was killed may have left half a line: ours must not join it.
        is_torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write((b"\n" if is_torn else b"") + "".join(line + "\n" for line in lines).encode())


def read_records(path: Path | str) -> list[dict[str, object]]:
    """Records of a file written by `append_records`. A line that is no whole JSON (a killed writer) is left out."""
    records = []
    for line in Path(path).read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records
