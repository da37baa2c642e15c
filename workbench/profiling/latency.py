"""Latencies of a served request from its time stamps, counted in tokens: first token, per token, end to end.

One arrival of a stream is not one token: a chunk may carry none (held back by a decoder) or several. All figures here
divide by token counts. Nothing in this file reads a clock: times come from whoever saw the events.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base import Quantity, Table, human

__all__ = ["LatencySummary", "Percentiles", "RequestTiming", "append_records", "read_records", "summarise"]

LEVELS = (50, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming:
    """One request: when it was submitted, and each arrival as (time, tokens it carried), all in seconds of one clock.

    Raises ValueError for times that run backwards or negative counts.
    """

    submitted_s: float
    arrivals: tuple[tuple[float, int], ...]
    num_prompt_tokens: int = 0
    num_images: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        times = [self.submitted_s, *(time_s for time_s, _ in self.arrivals)]
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"times run backwards: {times}")
        if any(count < 0 for _, count in self.arrivals):
            raise ValueError(f"an arrival carries a negative number of tokens: {self.arrivals}")

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_s(self) -> float | None:
        """From submission to the arrival that carried the first token; None where none came."""
        first = next((time_s for time_s, count in self.arrivals if count), None)
        return None if first is None else first - self.submitted_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first arrival with tokens; None where no token followed it.

        Tokens of that first arrival have no time of their own and are left out of both sides of the division.
        """
        carrying = [(time_s, count) for time_s, count in self.arrivals if count]
        following = sum(count for _, count in carrying[1:])
        return (carrying[-1][0] - carrying[0][0]) / following if following else None

    @property
    def end_to_end_s(self) -> float | None:
        """From submission to the last arrival; None where there was none."""
        return self.arrivals[-1][0] - self.submitted_s if self.arrivals else None

    def to_json(self) -> dict[str, object]:
        return {
            "label": self.label,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_images": self.num_images,
            "num_tokens": self.num_tokens,
            "first_token_s": self.first_token_s,
            "per_token_s": self.per_token_s,
            "end_to_end_s": self.end_to_end_s,
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
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (ordered[math.ceil(level / 100 * len(ordered)) - 1] for level in LEVELS)
        mean = math.fsum(ordered) / len(ordered)
        return cls(count=len(ordered), mean=mean, p50=p50, p90=p90, p99=p99, low=ordered[0], high=ordered[-1])

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySummary:
    """Latencies of several requests. `tokens_per_s`: all tokens over the time from first submission to last arrival."""

    num_requests: int
    num_tokens: int
    first_token_s: Percentiles | None
    per_token_s: Percentiles | None
    end_to_end_s: Percentiles | None
    tokens_per_s: Quantity | None
    conditions: str = ""

    def to_json(self) -> dict[str, object]:
        parts = {name: getattr(self, name) for name in ("first_token_s", "per_token_s", "end_to_end_s")}
        return {
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
            **{name: None if value is None else value.to_json() for name, value in parts.items()},
            "tokens_per_s": None if self.tokens_per_s is None else self.tokens_per_s.value,
            "conditions": self.conditions,
        }

    def table(self) -> Table:
        rows = []
        for name in ("first_token_s", "per_token_s", "end_to_end_s"):
            value: Percentiles | None = getattr(self, name)
            if value is None:
                continue
            seen = (value.p50, value.p90, value.p99, value.low, value.high)
            label = name.removesuffix("_s").replace("_", " ").replace("per token", "per token after the first")
            rows.append((label, str(value.count), *(human(x, "s") for x in seen)))
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s.value:.3g} tokens/s together"
        note = f"{self.num_requests} requests, {self.num_tokens} tokens{rate}"
        note += f"; {self.conditions}" if self.conditions else ""
        return Table(columns=("latency", "samples", "p50", "p90", "p99", "least", "most"), rows=tuple(rows), note=note)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def summarise(timings: Sequence[RequestTiming], *, conditions: str = "") -> LatencySummary:
    """Percentiles over requests; a request without a figure (no token came) is counted, but adds no sample to it."""

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
        conditions=conditions,
    )


def append_records(
    path: Path | str, records: Sequence[RequestTiming | LatencySummary], environment: Mapping[str, object]
) -> None:
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
