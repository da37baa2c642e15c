"""The Day-0 report as a record: gates and the evidence around them, saved as JSON and rendered as one HTML file."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.base import ConfigError, Table, plain, read_small_file
from workbench.report.gates import Gate, Verdict, gates_table, gates_text, steps_text, verdict_of
from workbench.view.charts import Chart, chart_from_json

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMAT", "Day0Report", "Picture", "SampleAnswer", "Section", "WeightsKind", "read_report"]

FORMAT = "day0-report/1"
WeightsKind = Literal["real", "dummy"]
MAX_PICTURE_BYTES = 4 << 20
MAX_REPORT_BYTES = 256 << 20  # a report of many pictures has some megabytes
_MAGIC = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A PNG or JPEG to show in a report. Raises ValueError for other bytes (an SVG could carry script) or too many."""

    data: bytes
    caption: str = ""

    def __post_init__(self) -> None:
        if len(self.data) > MAX_PICTURE_BYTES:
            raise ValueError(
                f"picture of {len(self.data):,} bytes, at most {MAX_PICTURE_BYTES:,}: use Picture.thumbnail"
            )
        if self._mime() is None:
            raise ValueError(f"a picture must be PNG or JPEG, this begins with {self.data[:8]!r}")

    @classmethod
    def thumbnail(cls, image: Image, *, caption: str = "", max_side: int = 360) -> Picture:
        """A PIL image, made no larger than `max_side` pixels either way and encoded anew as PNG."""
        small = image.copy()
        small.thumbnail((max_side, max_side))
        buffer = io.BytesIO()
        small.convert("RGBA" if "A" in small.getbands() else "RGB").save(buffer, "PNG")
        return cls(data=buffer.getvalue(), caption=caption)

    def data_uri(self) -> str:
        return f"data:{self._mime()};base64,{base64.b64encode(self.data).decode()}"

    def _mime(self) -> str | None:
        return next((mime for magic, mime in _MAGIC.items() if self.data.startswith(magic)), None)

    def to_json(self) -> dict[str, object]:
        return {"data": base64.b64encode(self.data).decode(), "caption": self.caption}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Picture:
        return cls(data=base64.b64decode(record["data"]), caption=record["caption"])


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleAnswer:
    """A question that was put to the deployed model, with its pictures, and what it answered, word for word.

    `expected` is the right answer and `is_right` the mark, where the right answer is known.
    """

    question: str
    answer: str
    pictures: tuple[Picture, ...] = ()
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    first_token_s: float | None = None
    end_to_end_s: float | None = None
    note: str = ""
    expected: str = ""
    is_right: bool | None = None

    def to_json(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "pictures"}
        return {**plain, "pictures": [picture.to_json() for picture in self.pictures]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SampleAnswer:
        return cls(**{**record, "pictures": tuple(Picture.from_json(picture) for picture in record["pictures"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Evidence under one heading: plain text (blank lines part paragraphs), tables, charts."""

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "title": self.title,
            "text": self.text,
            "tables": [table.to_json() for table in self.tables],
            "charts": [chart.to_json() for chart in self.charts],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Section:
        return cls(
            title=record["title"],
            text=record["text"],
            tables=tuple(_table_from_json(table) for table in record["tables"]),
            charts=tuple(chart_from_json(chart) for chart in record["charts"]),
        )


@dataclass(frozen=True, kw_only=True)
class Day0Report:
    """Everything one acceptance run found. Raises ValueError where two gates share an id.

    `weights_kind` "dummy" says that the weights were not trained: such a run proves the machinery, and never the
    model's answers; `weights_note` says which they were. `environment` are further facts by name (layout, precision,
    command); `machine` and `versions` are the JSON of a machine survey and of the software. `created_at` is UTC.
    `next_steps` say what to do now, commands in backquotes.
    """

    model: str
    checkpoint: str
    weights_kind: WeightsKind
    gates: tuple[Gate, ...]
    created_at: str
    hardware: str
    versions: Mapping[str, Any]
    weights_note: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[SampleAnswer, ...] = ()
    sections: tuple[Section, ...] = ()
    seconds: float | None = None
    next_steps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = [gate.id for gate in self.gates]
        if twice := sorted({gate_id for gate_id in ids if ids.count(gate_id) > 1}):
            raise ValueError(f"two gates share the id {twice[0]!r}")
        if self.weights_kind not in ("real", "dummy"):
            raise ValueError(f"weights_kind {self.weights_kind!r} is neither 'real' nor 'dummy'")

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.gates)

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    @property
    def git_commit(self) -> str | None:
        """Commit of the workbench that made this report; None where it did not run from a checkout."""
        return self.versions.get("git_commit")

    def render(self, width: int | None = None) -> str:
        """The gates as aligned text, with the verdict above and what to do next below; `width` columns of a terminal
        shorten the evidence of gates that pass and tell that of the others in full."""
        text = gates_table(self.gates).render() if width is None else gates_text(self.gates, width)
        return f"{text}\n\n{steps_text(self.next_steps, width)}" if self.next_steps else text

    def _repr_html_(self) -> str:
        return gates_table(self.gates).to_html()

    def render_html(self) -> str:
        """One HTML document that needs nothing else: no script, no request, light and dark, fit to print."""
        from workbench.report.page import render_page

        return render_page(self)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` brings the report back."""
        verdict = self.verdict
        record = {
            "format": FORMAT,
            "passed": verdict.passed,
            "verdict": verdict.told(),
            "cause": verdict.cause,
            "next_steps": list(self.next_steps),
            "model": self.model,
            "checkpoint": self.checkpoint,
            "weights_kind": self.weights_kind,
            "weights_note": self.weights_note,
            "created_at": self.created_at,
            "seconds": self.seconds,
            "hardware": self.hardware,
            "git_commit": self.git_commit,
            "environment": dict(self.environment),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "gates": [gate.to_json() for gate in self.gates],
            "answers": [answer.to_json() for answer in self.answers],
            "sections": [section.to_json() for section in self.sections],
        }
        return {key: plain(value) for key, value in record.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Day0Report:
        """The report that `to_json` wrote. Raises ConfigError for another format."""
        if record.get("format") != FORMAT:
            raise ConfigError("not a Day-0 report", found=record.get("format"), expected=FORMAT)
        plain = ("model", "checkpoint", "weights_kind", "weights_note", "created_at", "seconds", "hardware")
        nested = ("environment", "versions", "machine")
        return cls(
            **{key: record[key] for key in (*plain, *nested)},
            gates=tuple(Gate.from_json(gate) for gate in record["gates"]),
            answers=tuple(SampleAnswer.from_json(answer) for answer in record["answers"]),
            sections=tuple(Section.from_json(section) for section in record["sections"]),
            next_steps=tuple(record.get("next_steps", ())),
        )

    def write(self, folder: Path | str) -> tuple[Path, Path]:
        """Write `report.html` and `report.json` into `folder`, each whole or not at all; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        page = self.render_html()
        record = json.dumps(self.to_json(), indent=1, allow_nan=False)
        return _replace(folder / "report.html", page), _replace(folder / "report.json", record + "\n")


def read_report(path: Path | str) -> Day0Report:
    """The report in a `report.json`, or in the folder that holds one. Raises ConfigError where it is unreadable."""
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    try:
        record = json.loads(read_small_file(path, max_bytes=MAX_REPORT_BYTES).decode("utf-8"))
    except ConfigError as error:
        raise ConfigError(f"not a readable report: {error.message}", where=path, found=error.found) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a readable report: {error}", where=path) from None
    if not isinstance(record, dict):
        raise ConfigError("not a Day-0 report", where=path, found=type(record).__name__)
    try:
        return Day0Report.from_json(record)
    except ConfigError as error:
        raise ConfigError(error.message, where=path, found=error.found, expected=error.expected) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"a damaged report: {type(error).__name__}: {error}", where=path) from None


def _replace(path: Path, text: str) -> Path:
    """A reader sees the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)
    return path


def _table_from_json(record: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(row) for row in record["rows"])
    return Table(columns=tuple(record["columns"]), rows=rows, title=record["title"], note=record["note"])
