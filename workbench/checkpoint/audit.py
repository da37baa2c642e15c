"""Audit of a checkpoint folder: index = headers = file sizes = model, in both directions, before a byte is loaded."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from workbench.base import CheckpointError, ConfigError, human
from workbench.checkpoint.content import WINDOWS_PER_FILE, odd_zeros, padding_findings, sample_file, scan_file
from workbench.checkpoint.files import Survey, survey_folder
from workbench.checkpoint.findings import AuditReport, ContentCheck, Finding, merged
from workbench.checkpoint.ghost_mark import GhostMark, ghost_problems, read_ghost_mark
from workbench.checkpoint.header import ShardHeader
from workbench.checkpoint.names import check_pairs, check_tensors, match_names, name_findings
from workbench.spec import ModelSpec, TensorSpec, read_spec, resolve_quant_rules

__all__ = ["FULL_READ_LIMIT", "audit"]

FULL_READ_LIMIT = 1 << 30  # up to here a full read takes seconds and is made without asking


def audit(root: Path | str, *, deep: bool | None = None) -> AuditReport:
    """Check a checkpoint folder and name every fault with its file and tensors.

    `deep=True` reads all data once, `deep=False` none of it, None reads all of a checkpoint up to 1 GiB and samples a
    larger one; `report.content` says what was read and what that can miss. Faults of the checkpoint, its config
    included, are findings; CheckpointError is raised only where there is no folder to look at.
    """
    started = time.perf_counter()
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError("not a folder", where=root)
    skipped: dict[str, str] = {}
    survey = survey_folder(root)
    findings = list(survey.findings)
    spec: ModelSpec | None = None
    try:
        spec = read_spec(root)
    except ConfigError as error:
        findings.append(Finding(kind="config", severity="error", file="config.json", message=str(error)))
        skipped |= dict.fromkeys(("names", "shapes", "padding", "rules"), "no spec without a sound config")

    findings += _pair_findings(survey)
    expected: Mapping[str, TensorSpec] = {}
    if spec is not None:
        match = match_names(spec, survey.names)
        expected = match.expected
        files = {name: entry.file for name, entry in survey.located.items()}
        findings += _stray_findings(survey, expected)
        if survey.names:
            findings += name_findings(spec, match, files, survey.explained)
        else:
            skipped |= dict.fromkeys(("names", "pairs", "rules"), "no tensor is named anywhere")
        findings += check_tensors(spec, expected, survey.located.values())
        findings += _quant_findings(spec, survey.names, expected)
        if deep is False:
            skipped["padding"] = "contents were not read"
        else:
            findings += padding_findings(root, expected, survey.located)
    if not survey.headers:
        skipped |= dict.fromkeys(("ranges", "index", "shapes", "padding"), "no readable header")
    mark = _check_ghost(survey, findings)
    if mark is None:
        content = _check_contents(survey, expected, deep, findings)
        findings = odd_zeros(findings, expected)
    else:
        total = sum(header.file_bytes for header in survey.headers.values())
        content = ContentCheck(mode="ghost", bytes_read=0, bytes_total=total, note="a ghost has none")
    if content.mode in ("none", "ghost"):
        skipped["contents"] = content.note
    return AuditReport(
        root=str(root),
        findings=merged(findings),
        num_files=len(survey.headers),
        num_tensors=len(survey.located),
        tensor_bytes=sum(entry.num_bytes for entry in survey.located.values()),
        content=content,
        seconds=time.perf_counter() - started,
        skipped=skipped,
    )


def _check_ghost(survey: Survey, findings: list[Finding]) -> GhostMark | None:
    """Findings about a mark and the files beside it; returns the mark of a folder that is a ghost throughout."""
    try:
        mark = read_ghost_mark(survey.root)
    except CheckpointError as error:
        findings.append(Finding(kind="ghost_mark", severity="error", message=str(error)))
        return None
    problems = list(ghost_problems(survey.root, mark, survey.headers.values()))
    findings += (
        Finding(kind=x.kind, severity="error" if x.is_error else "warning", file=x.file, message=x.message)
        for x in problems
    )
    if mark is None or any(problem.is_error for problem in problems):
        return None
    message = f"this is a ghost (names from {mark.names_from}): files of full size that hold no weights"
    findings.append(Finding(kind="ghost", severity="info", message=message))
    return mark


def _pair_findings(survey: Survey) -> Iterator[Finding]:
    for finding in check_pairs(survey.located, survey.names):
        for name in finding.tensors:
            # The absent partner is told here, better than as a missing tensor.
            module = name.rpartition(".")[0]
            pair = {f"{module}.{part}" for part in ("weight_packed", "weight_scale")}
            survey.explained |= pair - survey.names.keys()
        yield finding


def _stray_findings(survey: Survey, expected: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    """Tensors in the index's files that the index does not name: lost where the model needs them, else ballast."""
    for name, file in survey.strays.items():
        survey.explained.add(name)
        if name in expected:
            message = "the model needs it and a file holds it, but the index does not name it: it would not be loaded"
            yield Finding(kind="stray_tensor", severity="error", file=file, tensors=(name,), message=message)
        else:
            message = "the index does not name it; it is not loaded"
            yield Finding(kind="stray_tensor", severity="warning", file=file, tensors=(name,), message=message)


def _quant_findings(spec: ModelSpec, names: Collection[str], expected: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    """Where the config's quantisation rules and the tensor names disagree. The names are trusted."""
    try:
        table = resolve_quant_rules(spec, names, expected.values())
    except ConfigError as error:
        yield Finding(kind="quant_rule", severity="warning", file="config.json", message=str(error))
        return
    for row in table.rows:
        if row.cuts_name:
            message = f"rule {row.rule!r} stops inside the last part of {row.module}: meant for a shorter name?"
            yield Finding(kind="quant_rule", severity="warning", file="config.json", message=message)
        if row.agrees:
            continue
        if row.is_quantised_in_files:
            message = f"{row.module} ({row.count}) is packed although rule {row.rule!r} leaves it plain"
            yield Finding(kind="quant_rule", severity="warning", file="config.json", message=message)
        else:
            message = f"{row.module} ({row.count}) is stored plain although no rule ignores it; the names are trusted"
            yield Finding(kind="quant_rule", severity="info", file="config.json", message=message)
    for rule in table.unused_rules:
        message = f"rule {rule!r} matches no module; is its prefix that of another file?"
        yield Finding(kind="quant_rule", severity="info", file="config.json", message=message)


def _check_contents(
    survey: Survey, expected: Mapping[str, TensorSpec], deep: bool | None, findings: list[Finding]
) -> ContentCheck:
    # A torn file is already known to be broken, and its last tensors cannot be read.
    whole: list[ShardHeader] = [header for header in survey.headers.values() if not header.problems]
    total = sum(header.file_bytes for header in whole)
    if deep is False:
        return ContentCheck(mode="none", bytes_read=0, bytes_total=total, note="not read, as asked")
    if not whole:
        return ContentCheck(mode="none", bytes_read=0, bytes_total=0, note="no sound file to read")
    is_full = deep or total <= FULL_READ_LIMIT
    bytes_read = 0
    for header in whole:
        look = scan_file if is_full else sample_file
        try:
            scan = look(survey.root / header.file, header, expected)
        except CheckpointError as error:
            findings.append(Finding(kind="unreadable", severity="error", file=header.file, message=str(error)))
            continue
        findings += scan.findings
        bytes_read += scan.bytes_read
    if is_full:
        note = f"all {human(total, 'B')} were read once"
        return ContentCheck(mode="full", bytes_read=bytes_read, bytes_total=total, note=note)
    unseen = max(header.file_bytes for header in whole) // WINDOWS_PER_FILE
    note = (
        f"sampled: {human(bytes_read, 'B')} of {human(total, 'B')} were read. Holes known to the file system are found "
        f"at any size, other zero-filled extents from {human(unseen, 'B')} up; audit(root, deep=True) reads everything"
    )
    return ContentCheck(mode="sampled", bytes_read=bytes_read, bytes_total=total, note=note)
