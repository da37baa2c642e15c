"""What an audit finds, as records that print well: one finding per fault, one line per check, one verdict."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from workbench.base import Cell, Table, human, printable

__all__ = ["CHECKS", "AuditReport", "Check", "ContentCheck", "Finding", "FindingKind", "Severity", "merged"]

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

FindingKind = Literal[
    "config",
    "index", "no_index", "total_size",
    "missing_shard", "stale_index", "bad_header", "torn", "overlong", "stray_file", "partial_file",
    "overlap", "gap",
    "not_held", "misplaced", "duplicate", "stray_tensor",
    "missing_tensor", "unknown_tensor", "mtp_layer", "layer_beyond_last", "stacked_experts",
    "unpaired",
    "wrong_dtype", "wrong_shape", "transposed", "square",
    "padding", "padding_not_zero",
    "zero_extent", "zero_rows", "zero_tensor", "zero_scale", "nan_scale", "scale_range", "unreadable",
    "quant_rule",
    "ghost", "ghost_mark", "ghost_values", "ghost_filled",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A group of finding kinds that answers one question."""

    name: str
    question: str
    kinds: tuple[FindingKind, ...]


CHECKS = (
    Check(name="description", question="config.json is sound and names a known model", kinds=("config",)),
    Check(
        name="files",
        question="every file of the checkpoint is here, readable and of the length its header says",
        kinds=(
            "index", "no_index", "missing_shard", "stale_index", "bad_header", "torn", "overlong", "stray_file",
            "partial_file",
        ),
    ),
    Check(name="ranges", question="no two tensors share bytes, no bytes are ownerless", kinds=("overlap", "gap")),
    Check(
        name="index",
        question="index and headers name the same tensors in the same files, both ways",
        kinds=("not_held", "misplaced", "duplicate", "stray_tensor", "total_size"),
    ),
    Check(
        name="names",
        question="names map one-to-one onto the model",
        kinds=("missing_tensor", "unknown_tensor", "mtp_layer", "layer_beyond_last", "stacked_experts"),
    ),
    Check(name="pairs", question="every packed matrix has its scale, every scale its matrix", kinds=("unpaired",)),
    Check(
        name="shapes",
        question="dtype, shape and orientation are those the model needs",
        kinds=("wrong_dtype", "wrong_shape", "transposed", "square"),
    ),
    Check(
        name="padding", question="what is stored beyond the used entries is zero", kinds=("padding", "padding_not_zero")
    ),
    Check(
        name="contents",
        question="nothing is zero-filled that should hold weights, scales are exponents",
        kinds=(
            "zero_extent", "zero_rows", "zero_tensor", "zero_scale", "nan_scale", "scale_range", "unreadable",
        ),
    ),
    Check(
        name="ghost",
        question="weights and files without weights are not mixed up",
        kinds=("ghost", "ghost_mark", "ghost_values", "ghost_filled"),
    ),
    Check(name="rules", question="quantisation rules of the config agree with the tensor names", kinds=("quant_rule",)),
)  # fmt: skip

_MERGE_ABOVE = 20  # findings of one kind in one file; beyond that one finding lists all tensors
_SHOWN_FINDINGS, _SHOWN_TENSORS = 40, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault: what kind, how bad, in which file, on which tensors (all of them), and the facts in words."""

    kind: FindingKind
    severity: Severity
    message: str
    file: str | None = None
    tensors: tuple[str, ...] = ()

    @property
    def tensor(self) -> str | None:
        """The first tensor concerned."""
        return self.tensors[0] if self.tensors else None

    def render(self) -> str:
        """Kind and place on the first line, tensors and facts below: names are too long for a table in a terminal."""
        place = [f"  {printable(self.file)}"] if self.file else []
        names = [f"    {printable(_names(self.tensors))}"] if self.tensors else []
        return "\n".join([f"{self.severity}: {self.kind}{''.join(place)}", *names, f"    {printable(self.message)}"])

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "severity": self.severity,
            "file": self.file,
            "tensor": self.tensor,
            "tensors": list(self.tensors),
            "message": self.message,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentCheck:
    """How much of the data was looked at: `full` reads every byte, `sampled` evenly spaced windows, `none` nothing.

    `ghost`: there is no data; that the files are holes was asked of the file system.
    """

    mode: Literal["full", "sampled", "none", "ghost"]
    bytes_read: int
    bytes_total: int
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """Outcome of an audit. `ok` means no finding of severity error; warnings and infos are for reading.

    `skipped` names checks that could not be made, with the reason: a check that did not run is not a check passed.
    """

    root: str
    findings: tuple[Finding, ...]
    num_files: int
    num_tensors: int
    tensor_bytes: int
    content: ContentCheck
    seconds: float
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def is_ghost(self) -> bool:
        """Whether the files say that they hold no weights; everything but contents was checked all the same."""
        return self.content.mode == "ghost"

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def of_kind(self, kind: FindingKind) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def checks_table(self) -> Table:
        """One row per check: the question, the answer, the number of findings by severity."""
        rows: list[tuple[Cell, ...]] = []
        for check in CHECKS:
            found = [finding.severity for finding in self.findings if finding.kind in check.kinds]
            counts = [found.count(severity) for severity in SEVERITIES]
            answer = "FAIL" if counts[0] else "skipped" if check.name in self.skipped else "look" if counts[1] else "ok"
            question = check.question
            if check.name in self.skipped:
                question += f" ({self.skipped[check.name]})"
            rows.append((answer, check.name, *counts, question))
        columns = ("", "check", "errors", "warnings", "infos", "question")
        return Table(columns=columns, rows=tuple(rows), note=f"contents: {self.content.note}")

    def findings_table(self, limit: int = _SHOWN_FINDINGS) -> Table:
        """Findings, worst first; at most `limit` rows, the whole list is in `findings` and `to_json`."""
        rows = tuple((f.severity, f.kind, f.file, _names(f.tensors), f.message) for f in self.findings[:limit])
        rest = len(self.findings) - len(rows)
        return Table(
            columns=("severity", "kind", "file", "tensor", "what"),
            rows=rows,
            note=f"{rest} more findings: see .findings or --json" if rest else "",
        )

    def summary(self) -> str:
        verdict = "sound" if self.ok else f"NOT sound: {len(self.errors)} errors"
        verdict = f"ghost, no weights in it, otherwise {verdict}" if self.is_ghost else verdict
        return (
            f"{self.root}: {verdict}, {len(self.warnings)} warnings. {self.num_tensors:,} tensors, "
            f"{human(self.tensor_bytes, 'B')} in {self.num_files} files, audited in {self.seconds:.2f} s"
        )

    def render(self) -> str:
        """Verdict, checks and findings as aligned text."""
        shown, rest = self.findings[:_SHOWN_FINDINGS], len(self.findings) - _SHOWN_FINDINGS
        parts = [self.summary(), self.checks_table().render(), *(finding.render() for finding in shown)]
        if rest > 0:
            parts.append(f"and {rest} more findings: see .findings or --json")
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, object]:
        return {
            "root": self.root,
            "ok": self.ok,
            "is_ghost": self.is_ghost,
            "num_files": self.num_files,
            "num_tensors": self.num_tensors,
            "tensor_bytes": self.tensor_bytes,
            "content": {
                "mode": self.content.mode,
                "bytes_read": self.content.bytes_read,
                "bytes_total": self.content.bytes_total,
                "note": self.content.note,
            },
            "seconds": self.seconds,
            "skipped": dict(self.skipped),
            "checks": self.checks_table().to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        findings = self.findings_table().to_html() if self.findings else ""
        return f"<p>{html.escape(self.summary())}</p>{self.checks_table().to_html()}{findings}"


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, worst first, in the order they were made; a flood of one kind in one file becomes one finding."""
    groups: dict[tuple[Severity, FindingKind, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind, finding.file), []).append(finding)
    result: list[Finding] = []
    for (severity, kind, file), group in groups.items():
        if len(group) <= _MERGE_ABOVE:
            result += group
            continue
        tensors = tuple(name for finding in group for name in finding.tensors)
        message = f"{len(group)} of this kind; the first: {group[0].message}"
        result.append(Finding(kind=kind, severity=severity, file=file, tensors=tensors, message=message))
    return tuple(sorted(result, key=lambda finding: SEVERITIES.index(finding.severity)))


def _names(tensors: tuple[str, ...]) -> str:
    rest = len(tensors) - _SHOWN_TENSORS
    return ", ".join(tensors[:_SHOWN_TENSORS]) + (f" and {rest} more" if rest > 0 else "")
