"""The report as one HTML document. Everything that comes from files, models or machines is escaped on its way in.

The page holds no script and asks for nothing: a content security policy forbids both, so that even a slip in escaping
could not run or fetch anything.
"""

from __future__ import annotations

import html
import itertools
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from workbench.base import Table, human
from workbench.report.gates import Gate
from workbench.report.style import STYLE
from workbench.view.svg import draw_svg
from workbench.view.tables import facts_table

if TYPE_CHECKING:
    from workbench.report.report import Day0Report, SampleAnswer, Section

__all__ = ["render_page"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
WIDE_FACTS = ("Command",)  # long, and misread when it is broken: a line of its own
MOST_CAUSE = 900  # characters in the verdict; the gate's own row has all of them
SYMBOL = {"pass": "✓", "fail": "✗", "not measured": "–"}


def render_page(report: Day0Report) -> str:
    """The whole document."""
    verdict = report.verdict
    title = f"Day-0 report: {report.model}"
    parts = [
        _header(report),
        _next(report.next_steps),
        _gates(report.gates),
        _answers(report.answers),
        *(_section(section) for section in report.sections),
        _environment(report),
    ]
    document = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)} ({'pass' if verdict.passed else 'fail'})</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}\n</main>\n</body>\n</html>\n"
    )
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") else _spelled(c) for c in document)


def text(value: object) -> str:
    """`value` as escaped text."""
    return html.escape(str(value), quote=True)


def _spelled(character: str) -> str:
    """A control character or half of a surrogate pair, which no HTML file may hold, as its escape."""
    return character.encode("unicode_escape").decode()


def _header(report: Day0Report) -> str:
    verdict = report.verdict
    state = "pass" if verdict.passed else "fail"
    blocking = len(verdict.blocking)
    words = "All gates pass" if verdict.passed else "No gate was asked"
    if blocking:
        words = "1 gate stands in the way" if blocking == 1 else f"{blocking} gates stand in the way"
    dummy = (
        '<p class="warning">These weights are not trained: the run proves the machinery, not the model’s answers.</p>'
        if report.weights_kind == "dummy"
        else ""
    )
    took = "" if report.seconds is None else f" · took {human(report.seconds, 's')}"
    weights = report.weights_kind + (f" ({report.weights_note})" if report.weights_note else "")
    commit = f"commit {report.git_commit[:12]}" if report.git_commit else "not from a checkout"
    if report.versions.get("git_dirty"):
        commit += " with local changes"
    facts = {
        "Checkpoint": report.checkpoint,
        "Weights": weights,
        "Hardware": report.hardware,
        **{key[:1].upper() + key[1:]: value for key, value in report.environment.items()},
        "Workbench": f"{report.versions.get('workbench', '–')}, {commit}",
        "Date": report.created_at + took,
    }
    cells = "".join(_fact(key, _short(value)) for key, value in facts.items())
    counts = verdict.sentence().partition(": ")[2]
    cause = f"<p class=cause>{text(_cut(verdict.cause))}</p>" if verdict.cause else ""
    return (
        f"<header><p class=eyebrow>Day-0 report</p><h1>{text(report.model)}</h1>"
        f'<div class="verdict {state}"><strong>{text(words)}</strong><span>{text(counts)}</span>{cause}</div>{dummy}'
        f"<dl class=facts>{cells}</dl></header>"
    )


def _cut(words: str) -> str:
    return words if len(words) <= MOST_CAUSE else words[: MOST_CAUSE - 1].rstrip() + "…"


def _next(steps: Iterable[str]) -> str:
    items = "".join(f"<li>{_with_commands(step)}</li>" for step in steps)
    return f"<section class=next><h2>Next</h2><ol>{items}</ol></section>" if items else ""


def _with_commands(step: str) -> str:
    """Escaped text in which what stands in backquotes is code."""
    parts = map(text, step.split("`"))
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _fact(name: str, value: str) -> str:
    width = " class=wide" if name in WIDE_FACTS else ""
    return f"<div{width}><dt>{text(name)}</dt><dd>{text(value)}</dd></div>"


def _gates(gates: Iterable[Gate]) -> str:
    """Gates by layer of the stack, in the order in which layers first appear."""
    order: dict[str, list[Gate]] = {}
    for gate in gates:
        order.setdefault(gate.layer, []).append(gate)
    groups = "".join(
        f"<tbody><tr class=layer><th colspan=4 scope=rowgroup>{text(layer)}</th></tr>"
        f"{''.join(map(_gate, group))}</tbody>"
        for layer, group in order.items()
    )
    head = "<thead><tr><th scope=col>Status</th><th scope=col>Question</th><th scope=col>Found</th>"
    head += "<th scope=col>Threshold</th></tr></thead>"
    return f"<section><h2>Gates</h2><div class=scroll><table class=gates>{head}{groups}</table></div></section>"


def _gate(gate: Gate) -> str:
    kind, found = gate.status.replace(" ", "-"), "–" if gate.value is None else gate.value_text()
    optional = " <span class=tag>optional</span>" if gate.is_optional else ""
    details = "".join(
        f"<p class={name}>{label}{text(value)}</p>"
        for name, label, value in (
            ("evidence", "", gate.evidence),
            ("conditions", "", gate.conditions),
            ("proof", "Fails under: ", gate.proof),
            ("proof", "Not proven: ", gate.unproven),
        )
        if value
    )
    return (
        f'<tr><td><span class="pill {kind}">{SYMBOL[gate.status]} {text(gate.status)}</span></td>'
        f"<td><p>{text(gate.question)}{optional}</p>{details}<p class=id>{text(gate.id)}</p></td>"
        f'<td class="value">{text(found)}</td><td class="value">{text(gate.threshold_text())}</td></tr>'
    )


def _answers(answers: Iterable[SampleAnswer]) -> str:
    cards = "".join(map(_answer, answers))
    return f"<section><h2>Answers</h2><div class=answers>{cards}</div></section>" if cards else ""


def _answer(answer: SampleAnswer) -> str:
    pictures = "".join(
        f'<figure><img src="{picture.data_uri()}" alt="{text(picture.caption or "picture in the question")}">'
        + (f"<figcaption>{text(picture.caption)}</figcaption>" if picture.caption else "")
        + "</figure>"
        for picture in answer.pictures
    )
    facts = [
        f"{answer.num_prompt_tokens:,} prompt tokens" if answer.num_prompt_tokens is not None else "",
        f"{answer.num_tokens:,} tokens" if answer.num_tokens is not None else "",
        f"first after {human(answer.first_token_s, 's')}" if answer.first_token_s is not None else "",
        f"{human(answer.end_to_end_s, 's')} in all" if answer.end_to_end_s is not None else "",
        answer.note,
    ]
    meta = " · ".join(fact for fact in facts if fact)
    mark = ""
    if answer.is_right is not None:
        kind, word = ("pass", "right") if answer.is_right else ("fail", "wrong")
        wanted = "" if answer.is_right else f" expected: <bdi>{text(answer.expected)}</bdi>"
        mark = f'<p class=mark><span class="pill {kind}">{SYMBOL[kind]} {word}</span>{wanted}</p>'
    shown = text(answer.answer) if answer.answer else "<em>(empty answer)</em>"
    return (
        f"<article>{f'<div class=pictures>{pictures}</div>' if pictures else ''}"
        f"<p class=question><bdi>{text(answer.question)}</bdi></p><p class=answer><bdi>{shown}</bdi></p>"
        f"{mark}"
        f"{f'<p class=meta>{text(meta)}</p>' if meta else ''}</article>"
    )


def _section(section: Section) -> str:
    paragraphs = "".join(f"<p>{text(part.strip())}</p>" for part in section.text.split("\n\n") if part.strip())
    charts = "".join(f"<figure class=chart>{draw_svg(chart)}</figure>" for chart in section.charts)
    return (
        f"<section><h2>{text(section.title)}</h2>{paragraphs}{charts}{''.join(map(_table, section.tables))}</section>"
    )


def _table(table: Table) -> str:
    return f"<div class=scroll>{table.to_html()}</div>"


def _environment(report: Day0Report) -> str:
    """Software in full; the machine's record, which is long, folded away."""
    software = {key: value for key, value in report.versions.items() if key != "packages"}
    packages = report.versions.get("packages")
    parts = [_table(facts_table({**software, **(packages if isinstance(packages, Mapping) else {})}))]
    if report.machine:
        record = _table(facts_table(_flat(report.machine)))
        parts.append(f"<details><summary>The machine, as it was measured</summary>{record}</details>")
    return f"<section class=environment><h2>Environment</h2>{''.join(parts)}</section>"


def _flat(record: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested records as one level of "outer.inner" names; lists of records are numbered, features put on one line."""
    flat: dict[str, object] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif key == "features" and isinstance(value, (list, tuple)):
            flat[name] = ", ".join(f"{x['name']} {'✓' if x['is_supported'] else '✗'}" for x in value)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
            parts = (_flat(item, f"{name}.{i}.") for i, item in enumerate(value))
            flat |= dict(itertools.chain.from_iterable(part.items() for part in parts))
        else:
            flat[name] = value
    return flat


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
