"""What an exam found: marks by kind with intervals and chance, the controls beside them, expert load, the verdict.

Controls are the same questions with an empty picture ("blank") and with the picture of another question ("shuffled").
A model that looks at its pictures falls to what blind guessing gives on both; one that guesses from the words does not
fall. All intervals are Wilson's, of 95 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from workbench.base import Cell, ConfigError, Table, plain, read_small_file
from workbench.exam.paired import PairedMarks
from workbench.training.data.exam import FACT_KIND
from workbench.training.data.score import Mark, ScoreTable

__all__ = [
    "CONTROLS",
    "EXAM_NAME",
    "TARGETS",
    "Control",
    "ExamReport",
    "LayerLoad",
    "Target",
    "WrongAnswer",
    "read_exam",
]

EXAM_NAME = "exam.json"  # beside the weights it is about
FORMAT = "exam/1"
Control = Literal["blank", "shuffled"]
CONTROLS: tuple[Control, ...] = ("blank", "shuffled")
MAX_OVER_MEAN = 2.0  # load of the busiest expert of a layer over the mean of that layer
MAX_POINTS_LOST = 1.0  # by the published weights against those they were rounded from
NUM_WRONG = 24  # wrong answers kept as examples
MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Kinds of question that are judged together, and the share of right answers asked of them."""

    name: str
    kinds: tuple[str, ...]
    at_least: float


TARGETS = (
    Target(name="scenes", kinds=("shape", "colour", "count", "position"), at_least=0.90),
    Target(name="reading", kinds=("digit", "word"), at_least=0.80),
    Target(name="domain", kinds=(FACT_KIND,), at_least=0.80),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """Tokens that chose each expert of a layer, over all questions and answers of the exam."""

    layer: int
    counts: tuple[int, ...]

    @property
    def max_over_mean(self) -> float:
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0

    @property
    def num_dead(self) -> int:
        return self.counts.count(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongAnswer:
    kind: str
    question: str
    reply: str
    expected: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamReport:
    """`controls` hold those that were run; `paired` compares with the weights before rounding, where that was asked.

    `settings` are facts by name: precision, device, questions of a kind, versions, when.
    """

    model: str
    exam: ScoreTable
    controls: Mapping[str, ScoreTable]
    loads: tuple[LayerLoad, ...]
    wrong: tuple[WrongAnswer, ...] = ()
    paired: tuple[PairedMarks, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def mark(self, target: Target) -> Mark | None:
        """The pooled mark of a target; None where none of its kinds were asked."""
        kinds = [mark.kind for mark in self.exam.marks if mark.kind in target.kinds]
        return self.exam.pooled(kinds) if kinds else None

    @property
    def checks(self) -> tuple[tuple[str, str, str, bool], ...]:
        """What was asked for: (what, found, asked, whether it holds), of all that was measured."""
        rows = [self._target_check(target, mark) for target in TARGETS if (mark := self.mark(target))]
        rows += [self._control_check(control, target) for control in self.controls for target in TARGETS[:2]]
        if self.loads:
            busiest, dead = max(load.max_over_mean for load in self.loads), sum(load.num_dead for load in self.loads)
            limit = f"at most {MAX_OVER_MEAN:g}"
            rows.append(("busiest expert over mean, worst layer", f"{busiest:.2f}", limit, busiest <= MAX_OVER_MEAN))
            rows.append(("experts that no token chose", str(dead), "none", dead == 0))
        for pair in self.paired[:1]:  # over all kinds; the others are parts of it
            low, high = pair.interval
            found = f"{pair.points_lost:+.2f} points ({low:+.2f} .. {high:+.2f})"
            limit = f"at most {MAX_POINTS_LOST:g} point"
            rows.append(("lost by rounding to the published form", found, limit, pair.points_lost <= MAX_POINTS_LOST))
        return tuple(rows)

    @property
    def ok(self) -> bool:
        """Whether everything that was measured is as asked."""
        return all(holds for *_, holds in self.checks)

    def tables(self) -> tuple[Table, ...]:
        tables = [self._verdict_table(), self._marks_table()]
        if self.loads:
            tables.append(self._load_table())
        if self.paired:
            tables.append(self._paired_table())
        if self.wrong:
            rows = tuple((w.kind, w.question, w.reply, w.expected) for w in self.wrong[:8])
            tables.append(Table(title="Wrong answers", columns=("kind", "question", "reply", "expected"), rows=rows))
        return tuple(tables)

    def render(self) -> str:
        facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.settings.items())
        head = f"{self.model}: {'as asked' if self.ok else 'NOT as asked'} ({self.seconds:.0f} s; {facts})"
        return "\n\n".join([head, *(table.render() for table in self.tables())])

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "ok": self.ok,
            "checks": [dict(zip(("what", "found", "asked", "holds"), row, strict=True)) for row in self.checks],
            "settings": dict(self.settings),
            "seconds": round(self.seconds, 2),
            "exam": self.exam.as_records(),
            "controls": {name: table.as_records() for name, table in self.controls.items()},
            "loads": [
                {"layer": load.layer, "max_over_mean": load.max_over_mean, "counts": list(load.counts)}
                for load in self.loads
            ],
            "paired": [pair.to_json() for pair in self.paired],
            "wrong": [asdict(wrong) for wrong in self.wrong],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ExamReport:
        """The report that `to_json` wrote; verdicts are computed anew. Raises ConfigError for another format."""
        if record.get("format") != FORMAT:
            raise ConfigError("not an exam report", found=record.get("format"), expected=FORMAT)
        return cls(
            model=record["model"],
            exam=_marks(record["exam"]),
            controls={name: _marks(marks) for name, marks in record["controls"].items()},
            loads=tuple(LayerLoad(layer=x["layer"], counts=tuple(x["counts"])) for x in record["loads"]),
            wrong=tuple(WrongAnswer(**wrong) for wrong in record["wrong"]),
            paired=tuple(PairedMarks.from_json(pair) for pair in record["paired"]),
            settings=record["settings"],
            seconds=record["seconds"],
        )

    def save(self, path: Path | str) -> Path:
        """Write the record, whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(plain(self.to_json()), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return partial.replace(path)

    def _target_check(self, target: Target, mark: Mark) -> tuple[str, str, str, bool]:
        kinds = ", ".join(kind for kind in target.kinds)
        return (
            f"{target.name}: {kinds}",
            _share(mark),
            f"at least {target.at_least:.0%}",
            mark.accuracy >= target.at_least,
        )

    def _control_check(self, control: str, target: Target) -> tuple[str, str, str, bool]:
        kinds = [mark.kind for mark in self.controls[control].marks if mark.kind in target.kinds]
        mark = self.controls[control].pooled(kinds)
        chance = mark.chance or 0.0
        # Not above chance with 95 % confidence; below it is as blind as at it.
        return f"{target.name}, {control} picture", _share(mark), f"chance, {chance:.1%}", mark.low <= chance

    def _verdict_table(self) -> Table:
        rows = tuple((what, found, asked, "yes" if holds else "NO") for what, found, asked, holds in self.checks)
        return Table(title="What was asked", columns=("what", "found (95 % interval)", "asked", "holds"), rows=rows)

    def _marks_table(self) -> Table:
        names = tuple(self.controls)
        others = {name: {mark.kind: mark for mark in table.marks} for name, table in self.controls.items()}
        rows: list[tuple[Cell, ...]] = []
        for mark in self.exam.marks:
            chance = None if mark.chance is None else f"{mark.chance:.0%}"
            blind = [f"{others[n][mark.kind].accuracy:.0%}" if mark.kind in others[n] else None for n in names]
            span = f"{mark.low:.1%} .. {mark.high:.1%}"
            rows.append((mark.kind, f"{mark.num_right} / {mark.num}", f"{mark.accuracy:.1%}", span, *blind, chance))
        return Table(
            title="Held-out questions, greedy answers",
            columns=("kind", "right", "accuracy", "95 % interval", *(f"{name} picture" for name in names), "chance"),
            rows=tuple(rows),
            note="chance: the most frequent answer to the words of the question, without the picture",
        )

    def _load_table(self) -> Table:
        rows = tuple(
            (
                load.layer,
                sum(load.counts),
                round(load.max_over_mean, 2),
                min(load.counts),
                max(load.counts),
                load.num_dead,
            )
            for load in self.loads
        )
        columns = ("layer", "choices", "max / mean", "least chosen", "most chosen", "dead experts")
        return Table(title="Load of the routed experts", columns=columns, rows=rows)

    def _paired_table(self) -> Table:
        rows = tuple(
            (
                pair.kinds,
                pair.num,
                pair.num_right,
                pair.other_right,
                pair.only_model,
                pair.only_other,
                f"{pair.points_lost:+.2f}",
                "{:+.2f} .. {:+.2f}".format(*pair.interval),
            )
            for pair in self.paired
        )
        columns = ("kinds", "questions", "right", "right before", "won", "lost", "points lost", "95 % interval")
        return Table(
            title="Published form against the weights before rounding, same questions", columns=columns, rows=rows
        )


def read_exam(path: Path | str) -> ExamReport:
    """The report in an `exam.json`, or in the folder that holds one. Raises ConfigError where it is unreadable."""
    path = Path(path)
    path = path / EXAM_NAME if path.is_dir() else path
    try:
        record = json.loads(read_small_file(path, max_bytes=MAX_BYTES).decode("utf-8"))
        return ExamReport.from_json(record)
    except ConfigError as error:
        raise ConfigError(f"not a readable exam report: {error.message}", where=path, found=error.found) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"a damaged exam report: {type(error).__name__}: {error}", where=path) from None


def _marks(records: Sequence[Mapping[str, Any]]) -> ScoreTable:
    fields = Mark.__slots__
    return ScoreTable(marks=tuple(Mark(**{name: record[name] for name in fields}) for record in records), wrong=())


def _share(mark: Mark) -> str:
    return f"{mark.num_right} / {mark.num} = {mark.accuracy:.1%} ({mark.low:.1%} .. {mark.high:.1%})"
