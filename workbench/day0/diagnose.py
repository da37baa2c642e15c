"""Parity failed: by whose work? The first guilty operator, the mistake that would explain it, and the tensors whose
bytes are not the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.align import ParityPrompt, ParityReport, align_model, counter_test, served_by
from workbench.base import Table, error_text
from workbench.day0.differing import differing_tensors, tell_differing
from workbench.deployment import Deployment

__all__ = ["Diagnosis", "diagnose"]

MOST_PROMPTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What was found, in a few sentences ("" for nothing), and the tables behind it."""

    text: str
    tables: tuple[Table, ...] = ()


def diagnose(
    ranks: Deployment,
    loaded: Path,
    published: Path,
    prompts: Sequence[ParityPrompt],
    parity: ParityReport,
    *,
    precision: str,
) -> Diagnosis:
    """Replay the failing texts block by block on `ranks`, which hold `loaded` in `precision`, and ask which mistake
    would make what they made; where only prompts with pictures fail, compare what lies outside the layers.

    An error on the way is told in the text: it must not cost the gate its value.
    """
    failing = {comparison.label.partition(",")[0] for comparison in parity.every if not comparison.passed}
    texts = [prompt for prompt in prompts if prompt.label in failing and not prompt.images]
    asked = sorted(texts, key=lambda prompt: -len(prompt.token_ids))[:MOST_PROMPTS]
    parts: list[str] = []
    tables: list[Table] = []
    try:
        layers: tuple[int | None, ...] = (None,)
        if asked:
            report = align_model(served_by(ranks, precision=precision), published, asked)
            report = report.with_counter_tests(counter_test(report, published, asked))
            parts.append(report.verdict())
            tables += [report.table(only_failures=True)] if report.blame is not None else []
            tables += [report.counter_tests.table()] if report.counter_tests is not None else []
            layers = () if report.blame is None else (report.blame.layer,)
        if differing := differing_tensors(loaded, published, layers):
            parts.append(tell_differing(differing))
    except Exception as error:
        parts.append(f"looking for the operator broke off: {error_text(error)}")
    return Diagnosis(text=". ".join(parts), tables=tuple(tables))
