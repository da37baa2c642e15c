"""A model in this process whose every step is written down: how long it took, and what was in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.base import Table, WorkbenchError, human
from workbench.serving import LocalRunner, StepInput
from workbench.serving.steps import EncodeImage, SampledToken
from workbench.spec import encoding_cost

__all__ = ["LoggedRunner", "LoggedStep", "by_kind", "longest"]


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One step. `chunks` has (tokens, tokens before them) of every prompt that was read from; `rows` of pictures are
    patches times layers."""

    ended_s: float
    seconds: float
    encoding_s: float = 0.0
    rows: int = 0
    pictures: tuple[str, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    num_generating: int = 0

    @property
    def kind(self) -> str:
        parts = (["pictures"] if self.rows else []) + (["prompts"] if self.chunks else [])
        return " and ".join(parts) or "generating alone"

    def __str__(self) -> str:
        parts = []
        if self.rows:
            what = f"{self.rows:,} rows of {len(self.pictures)} pictures"
            parts.append(f"{human(self.encoding_s, 's')} for {what}")
        parts += [f"{num:,} tokens of a prompt behind {start:,}" for num, start in self.chunks]
        parts += [f"{self.num_generating} who generate"] if self.num_generating else []
        return f"{human(self.seconds, 's')}: {', '.join(parts)}"


@dataclass(frozen=True)
class LoggedRunner(LocalRunner):
    steps: list[LoggedStep] = field(default_factory=list)
    pending: list[tuple[str, int, float]] = field(default_factory=list)  # key, rows and seconds since the last step

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        (key, patches, _), began = images[0], time.perf_counter()
        super().encode_images(replica, images)
        cost = encoding_cost(self.rank.spec)
        assert cost is not None
        self._encoded(key, cost.num_rows(len(patches)), began)

    def encode_rows(self, replica: int, image: EncodeImage, first: int, stop: int) -> None:
        began = time.perf_counter()
        super().encode_rows(replica, image, first, stop)
        self._encoded(image[0], stop - first, began)

    def _encoded(self, key: str, rows: int, began: float) -> None:
        if any(key == each for each, _, _ in self.pending):  # a picture has one part in a step: the last had no text
            self._flush(0.0, ())
        self.pending.append((key, rows, time.perf_counter() - began))

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken | WorkbenchError]]:
        began = time.perf_counter()
        sampled = super().step(inputs)
        self._flush(time.perf_counter() - began, inputs[0])
        return sampled

    def _flush(self, seconds: float, steps: StepInput) -> None:
        encoding_s = sum(each for _, _, each in self.pending)
        self.steps.append(
            LoggedStep(
                ended_s=time.perf_counter(),
                seconds=seconds + encoding_s,
                encoding_s=encoding_s,
                rows=sum(rows for _, rows, _ in self.pending),
                pictures=tuple(key for key, _, _ in self.pending),
                chunks=tuple((len(x.token_ids), x.start) for x in steps if not x.step_idx),
                num_generating=sum(x.step_idx > 0 for x in steps),
            )
        )
        self.pending.clear()


def by_kind(title: str, steps: Sequence[LoggedStep]) -> Table:
    """Number, median and longest of each kind of step."""
    kinds: dict[str, list[float]] = {}
    for each in steps:
        kinds.setdefault(each.kind, []).append(each.seconds)
    rows = tuple(
        (kind, len(times), human(statistics.median(times), "s"), human(max(times), "s"))
        for kind, times in sorted(kinds.items())
    )
    return Table(title=title, columns=("steps with", "number", "median", "longest"), rows=rows)


def longest(steps: Sequence[LoggedStep], number: int = 3) -> list[LoggedStep]:
    return sorted(steps, key=lambda each: -each.seconds)[:number]
