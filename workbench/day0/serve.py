"""Does it answer? Text of three lengths and pictures through the service, and how long each took."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from workbench.base import DeploymentError, ImageError, RequestError, WorkbenchError, error_text
from workbench.day0.gates import GateBook
from workbench.day0.known import measure_known_answers
from workbench.day0.prompts import IMAGE_QUESTIONS, draw_pictures, text_questions
from workbench.deployment import Deployment
from workbench.profiling import RequestTiming, summarise
from workbench.report import Picture, SampleAnswer, Section
from workbench.serving import Answer, MultimodalInferenceService, open_service
from workbench.view import latency_bars

__all__ = ["measure_answers"]

ANSWER_TOKENS = 64  # the longest answer that is waited for


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request and what came of it: an answer with tokens in it, or the reason why there is none."""

    label: str
    question: str
    pictures: tuple[Image.Image, ...]
    submitted_s: float
    answer: Answer | None
    reason: str = ""
    is_lost: bool = False  # the ranks could not do it, whoever asks

    def line(self) -> str:
        if self.answer is None or self.reason:
            return f"{self.label}: {self.reason}"
        return f"{self.label}: {len(self.answer.token_ids)} tokens, first after {self.answer.timings.token_s[0]:.3f} s"


def measure_answers(
    gates: GateBook,
    sections: list[Section],
    answers: list[SampleAnswer],
    ranks: Deployment,
    root: Path,
    *,
    say: Callable[[str], None],
    answer_tokens: int = ANSWER_TOKENS,
    opens: Callable[[Deployment, Path], MultimodalInferenceService] | None = None,
) -> None:
    """Put the questions one after another and enter answers, latencies and the gates about them.

    `answer_tokens` is the longest answer that is waited for; `opens` makes the service that is asked, by default
    `open_service`. A request that fails counts against its gate with its reason; where the ranks gave out and none was
    answered, the gate has no value. Raises what opening the service raises (a folder without a tokenizer cannot be
    asked anything), and what warming up raises, which counts for no gate itself.
    """
    with (opens or open_service)(ranks, root) as service:
        _warm_up(service, has_pictures=ranks.spec.vision is not None)

        def ask(label: str, question: str, *pictures: Image.Image) -> Asked:
            asked = _ask(service, label, question, pictures, max_tokens=answer_tokens)
            say(asked.line())
            return asked

        if gates.asks("answers.correct"):
            measure_known_answers(gates, sections, answers, service, say=say)
        questions = text_questions(ranks.info.max_tokens)
        texts = [ask(f"text, {label}", question) for label, question in questions.items()]
        _count(gates, "answers.text", texts, ", ".join(questions))
        looks: list[Asked] = []
        if ranks.spec.vision is None:
            for gate_id in ("answers.image", "answers.looks"):
                gates.unmeasured(gate_id, "the model takes no pictures")
        else:
            shapes, circle = draw_pictures()
            looks = [
                ask("picture", IMAGE_QUESTIONS[0], shapes),
                ask("two pictures", IMAGE_QUESTIONS[1], shapes, circle),
            ]
            _count(gates, "answers.image", looks, "one picture; two of different size, one RGBA")
            _measure_looking(gates, service)
        stats = service.stats()
    asked = [*texts, *looks]
    num_slots = ranks.info.num_slots * ranks.layout.dp
    held = num_slots - stats.num_free_slots
    evidence = f"{stats.num_free_slots} of {num_slots} free after {len(asked)} requests"
    gates.measured("serving.slots", held, evidence=evidence + (f"; {stats.num_running} still running" if held else ""))
    answers += [_sample(one, one.answer) for one in asked if one.answer is not None]
    timings = [_timing(one, one.answer) for one in asked if one.answer is not None]
    _latencies(gates, sections, timings, f"{ranks.layout} on {ranks.stats()[0].device}, one request at a time, greedy")


def _warm_up(service: MultimodalInferenceService, *, has_pictures: bool) -> None:
    """The first requests pay for pages and kernels, and find out whether the ranks can answer at all."""
    service.infer("warm up", max_tokens=2, temperature=0.0)
    if has_pictures:
        with contextlib.suppress(RequestError, ImageError):  # a refusal is asked about, and counted, later
            service.infer("warm up", _png(draw_pictures()[0]), max_tokens=2, temperature=0.0)


def _ask(
    service: MultimodalInferenceService,
    label: str,
    question: str,
    pictures: tuple[Image.Image, ...],
    *,
    max_tokens: int,
) -> Asked:
    answer, reason, is_lost, submitted_s = None, "", False, time.perf_counter()
    try:
        files = [_png(picture) for picture in pictures]
        answer = service.infer(question, files or None, max_tokens=max_tokens, temperature=0.0)
    except WorkbenchError as error:
        reason, is_lost = error_text(error), isinstance(error, DeploymentError)
    if answer is not None and not answer.token_ids:
        reason = "no token was generated"
    return Asked(
        label=label,
        question=question,
        pictures=pictures,
        submitted_s=submitted_s,
        answer=answer,
        reason=reason,
        is_lost=is_lost,
    )


def _count(gates: GateBook, gate_id: str, asked: Sequence[Asked], what: str) -> None:
    if asked and all(one.is_lost for one in asked):
        gates.unmeasured(gate_id, f"nothing was answered: {asked[0].reason}")
        return
    failed = [one.line() for one in asked if one.reason]
    evidence = f"{len(asked)} requests: {what}"
    gates.measured(gate_id, len(failed), evidence="; ".join([evidence, *failed]))


def _measure_looking(gates: GateBook, service: MultimodalInferenceService) -> None:
    """Whether two pictures of one size give another first token, or the same one with another probability."""
    found: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    for picture in (Image.new("RGB", (112, 84), "white"), draw_pictures()[0]):
        try:
            answer = service.infer(IMAGE_QUESTIONS[0], _png(picture), max_tokens=1, temperature=0.0)
        except WorkbenchError as error:
            gates.unmeasured("answers.looks", error_text(error))
            return
        found.append((answer.token_ids, answer.logprobs))
    looks = found[0] != found[1]
    outcome = "two distributions" if looks else "the same first token with the same probability"
    gates.measured("answers.looks", looks, evidence=f"same question and size, two pictures: {outcome}")


def _latencies(gates: GateBook, sections: list[Section], timings: list[RequestTiming], conditions: str) -> None:
    summary = summarise(timings, conditions=conditions)
    for name, percentiles in (("first_token", summary.first_token_s), ("per_token", summary.per_token_s)):
        if percentiles is None:
            gates.unmeasured(f"latency.{name}", "no request gave enough tokens to time")
            continue
        slowest = next(x.label for x in timings if getattr(x, f"{name}_s") == percentiles.high)
        gates.measured(
            f"latency.{name}",
            percentiles.high,
            evidence=f"{percentiles.count} requests, median {percentiles.p50:.4f} s, slowest: {slowest}",
            conditions=conditions,
        )
    if timings:
        sections.append(
            Section(title="Latencies", tables=(summary.table(),), charts=(latency_bars(summary.to_json()),))
        )


def _timing(asked: Asked, answer: Answer) -> RequestTiming:
    return RequestTiming(
        submitted_s=asked.submitted_s,
        arrivals=tuple((asked.submitted_s + moment, 1) for moment in answer.timings.token_s),
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_images=len(asked.pictures),
        label=asked.label,
    )


def _sample(asked: Asked, answer: Answer) -> SampleAnswer:
    return SampleAnswer(
        question=asked.question,
        answer=answer.text,
        pictures=tuple(Picture.thumbnail(picture) for picture in asked.pictures),
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_tokens=answer.usage.completion_tokens,
        first_token_s=answer.timings.first_token_s,
        end_to_end_s=answer.timings.total_s,
        note=f"ended by {answer.finish_reason}",
    )


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
