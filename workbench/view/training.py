"""A training run in pictures: loss by phase, right answers on the way, and how evenly the experts were used.

Everything is drawn from metrics records (mappings): of a run that is going on, of its `metrics.jsonl`, or of the
`curve.jsonl` that a trained checkpoint carries. A record with "loss" and "load" is a step, one with "scores" an exam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.view.charts import LineChart, Series

__all__ = ["TrainingHistory", "TrainingPoint", "balance_chart", "exam_chart", "loss_chart"]

MAX_POINTS = 240  # kept of a run, however long it is: neighbours are averaged
BALANCE_LIMIT = 2.0  # busiest expert over the mean of its layer


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """The mean over `num` neighbouring steps, of which `step` is the last (counted from 1)."""

    step: int
    loss: float
    phase: str
    load: tuple[float, ...]  # of each layer with experts: busiest over mean
    num: int = 1


class TrainingHistory:
    """What is kept of a run: some hundred points whatever its length, all exams, the last step, and the last record of
    a lesson (that of the vision tower) which no step has followed yet."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.layers: tuple[int, ...] = ()
        self.exams: list[tuple[int, dict[str, tuple[int, int]]]] = []
        self.last: Mapping[str, Any] | None = None
        self.lesson: Mapping[str, Any] | None = None
        self.version = 0
        self._points: list[TrainingPoint] = []
        self._steps_a_point = 1
        for record in records:
            self.add(record)

    @property
    def points(self) -> tuple[TrainingPoint, ...]:
        return tuple(self._points)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in one record; kinds that are neither steps nor exams are left out."""
        if "scores" in record:
            scores = {kind: (int(right), int(num)) for kind, (right, num) in record["scores"].items()}
            self.exams.append((int(record["step"]) + 1, scores))
        elif "loss" in record and "load" in record:
            self._add_step(record)
        elif "lesson_step" in record:
            self.lesson = record
        else:
            return
        self.version += 1

    def _add_step(self, record: Mapping[str, Any]) -> None:
        load = {int(layer): float(value) for layer, value in record["load"].items()}
        self.layers = self.layers or tuple(sorted(load))
        point = TrainingPoint(
            step=int(record["step"]) + 1,
            loss=float(record["loss"]),
            phase=str(record["phase"]),
            load=tuple(load[layer] for layer in self.layers),
        )
        self.last, self.lesson = record, None
        last = self._points[-1] if self._points else None
        if last is not None and last.num < self._steps_a_point and last.phase == point.phase:
            self._points[-1] = _mean(last, point)
        else:
            self._points.append(point)
        if len(self._points) > MAX_POINTS:
            self._steps_a_point *= 2
            self._points = _halved(self._points)


def loss_chart(history: TrainingHistory) -> LineChart:
    """Loss over steps on a logarithmic axis, one line per phase. Raises ValueError where there is no step."""
    points = _some(history)
    by_phase: dict[str, list[TrainingPoint]] = {}
    for point in points:
        by_phase.setdefault(point.phase, []).append(point)
    first, last = points[0], points[-1]
    is_rounded = "; quantised: the forward pass sees every weight as the published files will hold it"
    return LineChart(
        title=f"loss {first.loss:.2f} at first, {last.loss:.3f} after {last.step:,} steps",
        series=tuple(_series(phase, group, [point.loss for point in group]) for phase, group in by_phase.items()),
        x_label="step",
        x_unit="",
        y_label="mean loss of a learnt token",
        y_unit="nat",
        log_y=True,
        note=f"mean of {max(point.num for point in points)} steps a point"
        + (is_rounded if "quantised" in by_phase else ""),
    )


def exam_chart(history: TrainingHistory, groups: Mapping[str, Sequence[str]] | None = None) -> LineChart:
    """Share of right held-out answers at each exam on the way, by group of kinds (None: by kind).

    Raises ValueError where there was no exam.
    """
    if not history.exams:
        raise ValueError("no exam to draw")
    kinds = list(history.exams[-1][1])
    chosen = groups or {kind: (kind,) for kind in kinds}
    steps = tuple(float(step) for step, _ in history.exams)
    series = tuple(
        Series(name=name, x=steps, y=tuple(_share(scores, members) for _, scores in history.exams))
        for name, members in chosen.items()
        if any(kind in kinds for kind in members)
    )
    ends = ", ".join(f"{s.name} {s.y[-1]:.0f} %" for s in series[:4])
    return LineChart(
        title=f"held-out answers right after {steps[-1]:,.0f} steps: {ends}",
        series=series,
        x_label="step",
        x_unit="",
        y_label="right answers",
        y_unit="%",
        note=f"{sum(num for _, num in history.exams[-1][1].values())} questions an exam",
    )


def balance_chart(history: TrainingHistory, *, limit: float = BALANCE_LIMIT) -> LineChart:
    """Load of the busiest expert over the mean, by layer. Raises ValueError where no layer has experts."""
    points = _some(history)
    if not history.layers:
        raise ValueError("no layer has experts")
    worst = max(points[-1].load)
    return LineChart(
        title=f"the busiest expert takes {worst:.2f} times its share in the worst layer at the end",
        series=tuple(
            _series(f"layer {layer}", points, [p.load[i] for p in points]) for i, layer in enumerate(history.layers)
        ),
        x_label="step",
        x_unit="",
        y_label="busiest expert over mean of its layer",
        y_unit="",
        limit=limit,
    )


def _some(history: TrainingHistory) -> tuple[TrainingPoint, ...]:
    if not history.points:
        raise ValueError("no step to draw")
    return history.points


def _series(name: str, points: Sequence[TrainingPoint], values: Sequence[float]) -> Series:
    return Series(name=name, x=tuple(float(point.step) for point in points), y=tuple(values))


def _share(scores: Mapping[str, tuple[int, int]], kinds: Sequence[str]) -> float:
    """Percent right over those of the kinds that were asked."""
    asked = [scores[kind] for kind in kinds if kind in scores]
    total = sum(num for _, num in asked)
    return 100 * sum(right for right, _ in asked) / total if total else 0.0


def _mean(a: TrainingPoint, b: TrainingPoint) -> TrainingPoint:
    num = a.num + b.num
    load = tuple((x * a.num + y * b.num) / num for x, y in zip(a.load, b.load, strict=True))
    return TrainingPoint(step=b.step, loss=(a.loss * a.num + b.loss * b.num) / num, phase=b.phase, load=load, num=num)


def _halved(points: Sequence[TrainingPoint]) -> list[TrainingPoint]:
    """Neighbours of one phase joined, so that the change of phase stays where it was."""
    joined: list[TrainingPoint] = []
    idx = 0
    while idx < len(points):
        pair = points[idx : idx + 2]
        is_pair = len(pair) == 2 and pair[0].phase == pair[1].phase
        joined.append(_mean(*pair) if is_pair else pair[0])
        idx += 2 if is_pair else 1
    return joined
