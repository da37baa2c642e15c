"""Does it answer? Text of three lengths and pictures through the service, and how long each took."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from workbench.base import WorkbenchError
from workbench.day0.gates import GateBook
from workbench.day0.prompts import IMAGE_QUESTIONS, draw_pictures, text_questions
from workbench.deployment import Deployment
from workbench.profiling import RequestTiming, summarise
from workbench.report import Picture, SampleAnswer, Section
from workbench.serving import Answer, MultimodalInferenceService
from workbench.serving.open import open_service
from workbench.view import latency_bars

__all__ = ["measure_answers"]

ANSWER_TOKENS = 32


def measure_answers(
    gates: GateBook,
    sections: list[Section],
    answers: list[SampleAnswer],
    ranks: Deployment,
    root: Path,
    *,
    say: Callable[[str], None],
) -> None:
    """Put the questions one after another and enter answers, latencies and the gates about them.

    Raises what opening the service raises: a folder without a tokenizer cannot be asked anything.
    """
    timings: list[RequestTiming] = []
    with open_service(ranks, root) as service:
        service.infer("warm up", max_tokens=2, temperature=0.0)  # the first request pays for pages and kernels

        def ask(label: str, question: str, pictures: Sequence[Image.Image] = ()) -> bool:
            files = [_png(picture) for picture in pictures]
            try:
                answer = service.infer(question, files or None, max_tokens=ANSWER_TOKENS, temperature=0.0)
            except WorkbenchError as error:
                say(f"{label}: {type(error).__name__}: {error}")
                return False
            timings.append(_timing(label, answer))
            answers.append(_sample(question, answer, pictures))
            say(f"{label}: {answer.usage.completion_tokens} tokens, first after {answer.timings.first_token_s:.3f} s")
            return bool(answer.token_ids)

        questions = text_questions(ranks.info.max_tokens)
        results = [ask(f"text, {label}", question) for label, question in questions.items()]
        gates.measured(
            "answers.text", results.count(False), evidence=f"{len(results)} requests: {', '.join(questions)}"
        )
        if ranks.spec.vision is None:
            for prefix in ("answers.image", "answers.looks"):
                gates.unmeasured(prefix, "the model takes no pictures")
        else:
            shapes, circle = draw_pictures()
            results = [
                ask("picture", IMAGE_QUESTIONS[0], [shapes]),
                ask("two pictures", IMAGE_QUESTIONS[1], [shapes, circle]),
            ]
            gates.measured(
                "answers.image", results.count(False), evidence="one picture; two of different size, one RGBA"
            )
            gates.measured(
                "answers.looks", _depends_on_picture(service), evidence="same question and size, two pictures"
            )
        stats = service.stats()
    held = ranks.info.num_slots * ranks.layout.dp - stats.num_free_slots
    gates.measured("serving.slots", held, evidence=f"{stats.num_free_slots} free after {len(timings)} requests")
    _latencies(gates, sections, timings, f"{ranks.layout} on {ranks.stats()[0].device}, one request at a time, greedy")


def _latencies(gates: GateBook, sections: list[Section], timings: list[RequestTiming], conditions: str) -> None:
    summary = summarise(timings, conditions=conditions)
    for name, percentiles in (("first_token", summary.first_token_s), ("per_token", summary.per_token_s)):
        if percentiles is not None:
            gates.measured(
                f"latency.{name}",
                percentiles.high,
                evidence=f"{percentiles.count} requests, median {percentiles.p50:.4f} s",
                conditions=conditions,
            )
    sections.append(Section(title="Latencies", tables=(summary.table(),), charts=(latency_bars(summary.to_json()),)))


def _depends_on_picture(service: MultimodalInferenceService) -> bool:
    """Whether two pictures of one size give another first token, or the same one with another probability."""
    plain = Image.new("RGB", (112, 84), "white")
    found = [
        service.infer(IMAGE_QUESTIONS[0], _png(picture), max_tokens=1, temperature=0.0)
        for picture in (plain, draw_pictures()[0])
    ]
    first, second = ((answer.token_ids[:1], answer.logprobs[:1]) for answer in found)
    return first != second


def _timing(label: str, answer: Answer) -> RequestTiming:
    return RequestTiming(
        submitted_s=0.0,
        arrivals=tuple((moment, 1) for moment in answer.timings.token_s),
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_images=int(answer.usage.image_tokens > 0),
        label=label,
    )


def _sample(question: str, answer: Answer, pictures: Sequence[Image.Image]) -> SampleAnswer:
    return SampleAnswer(
        question=question,
        answer=answer.text,
        pictures=tuple(Picture.thumbnail(picture) for picture in pictures),
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
