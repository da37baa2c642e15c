"""What the users of a soak ask: each question holds a secret of its own, and belongs to one user for the whole run.

The right answer to each is what the server says when nobody else asks: greedy, so that it is the same every time. Where
two tokens were as likely as each other within rounding, the answer may change with the company; such a question proves
nothing and is set aside. A small model says the same to many, but hardly ever with the same certainty: log
probabilities are compared as well, so that answers of equal words are told apart.
"""

from __future__ import annotations

import json
import math
import random
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.base import ConfigError, DeploymentError, RequestError
from workbench.profiling.load import ClosedLoop, Kind, Lengths, Load, plan_load
from workbench.serving.client import chat_content
from workbench.serving.inputs import ImageSource
from workbench.serving.service import MultimodalInferenceService

__all__ = ["SECRET", "SoakQuestion", "SoakSettings", "ask_quietly", "body_of", "draw_questions", "foreign_secrets"]

SECRET = re.compile(r"KEY-[0-9a-f]{12}")
PICTURES = ("picture", "two pictures")
REPLY_ROOM = 64  # tokens beside the drawn ones: the chat's own structure and the sentence with the secret


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakSettings:
    """How many users ask for how long, and what is still good.

    `seconds` is the measured part; `tolerance` the least difference of two log probabilities (nats) that rounding does
    not turn round. With `kill_after_s` a rank is killed so long after the start, and the service must answer again
    within `restart_within_s`; users ask on until it does, for `patience_s` at most. `settle_s`: how long things may
    take to be given back after the last request.
    Raises ConfigError for values that make no run.
    """

    num_streams: int = 64
    seconds: float = 600.0
    questions_per_stream: int = 2
    max_answer_tokens: int = 24
    cancel_share: float = 0.12
    disconnect_share: float = 0.08
    tolerance: float = 2e-3
    kill_after_s: float | None = None
    restart_within_s: float = 15.0
    patience_s: float = 120.0
    settle_s: float = 30.0
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_streams, self.questions_per_stream, self.max_answer_tokens) < 1:
            raise ConfigError("somebody has to ask something", found=str(self))
        shares = (self.cancel_share, self.disconnect_share)
        if min(shares) < 0 or sum(shares) >= 1:
            raise ConfigError("shares of requests that are given up", found=str(self), expected="together below 1")
        if not 0 < self.seconds < math.inf or (self.kill_after_s is not None and self.kill_after_s >= self.seconds):
            raise ConfigError("a rank is killed within the run", found=f"{self.kill_after_s} of {self.seconds} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakQuestion:
    """One question. `expected` is the answer alone, `logprobs` those of its tokens, and `margin` the least distance
    between the two likeliest."""

    secret: str
    kind: str
    text: str
    max_tokens: int
    images: tuple[ImageSource, ...] = field(default=(), repr=False)
    expected: str = ""
    logprobs: tuple[float, ...] = ()
    margin: float = math.inf


def draw_questions(service: MultimodalInferenceService, settings: SoakSettings) -> list[SoakQuestion]:
    """Short and long texts, and pictures where the model takes them; the same for the same seed.

    Raises RequestError where a slot is too short for any.
    """
    info = service.model.info
    room = info.max_tokens - settings.max_answer_tokens - REPLY_ROOM
    if room < 32:
        raise RequestError("the slots are too short for questions", found=info.max_tokens, expected="about 128 tokens")
    answer = Lengths(least=max(1, settings.max_answer_tokens // 4), most=settings.max_answer_tokens)
    kinds = [
        Kind(name="short", prompt=Lengths(least=4, most=24), answer=answer, weight=5),
        Kind(name="long", prompt=Lengths(least=room // 4, most=room // 2), answer=answer, weight=2),
    ]
    if info.has_vision and service.image_processor is not None and room >= 512:
        text = Lengths(least=4, most=16)
        kinds.append(Kind(name=PICTURES[0], prompt=text, answer=answer, num_images=1, image_size=(96, 64), weight=3))
        kinds.append(Kind(name=PICTURES[1], prompt=text, answer=answer, num_images=2, image_size=(48, 80), weight=1))
    number = settings.num_streams * settings.questions_per_stream
    load = Load(
        arrivals=ClosedLoop(concurrency=settings.num_streams),
        num_requests=number,
        kinds=tuple(kinds),
        num_warm_up=0,
        seed=settings.seed,
    )
    secrets = random.Random(f"{settings.seed} secrets")
    questions = []
    for planned in plan_load(load, count_tokens=lambda text: len(service.tokenizer.encode(text))).requests:
        asked, secret = planned.question, f"KEY-{secrets.getrandbits(48):012x}"
        questions.append(
            SoakQuestion(
                secret=secret,
                kind=asked.label,
                text=f"{secret} is mine. {asked.text}",
                max_tokens=asked.max_tokens,
                images=asked.images,
            )
        )
    return questions


def body_of(question: SoakQuestion, model: str, **options: object) -> bytes:
    """The request as it goes over the wire. Answers have their full length, so that every one can be told apart."""
    content = {
        **chat_content(model, question.text, question.images),
        "max_tokens": question.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **options,
    }
    return json.dumps(content).encode()


def ask_quietly(question: SoakQuestion, url: str, model: str, *, timeout_s: float) -> SoakQuestion:
    """The question with its right answer and margin. Raises DeploymentError where the server does not answer."""
    body = body_of(question, model, logprobs=True, top_logprobs=2)
    request = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            (choice,) = json.load(response)["choices"]
    except (OSError, ValueError, KeyError) as error:
        text = error.read(500).decode("utf-8", "replace") if isinstance(error, urllib.error.HTTPError) else str(error)
        raise DeploymentError(f"no answer to a single question: {text}", where=url) from None
    tokens = (choice.get("logprobs") or {}).get("content") or ()
    return replace(
        question,
        expected=choice["message"]["content"] or "",
        logprobs=tuple(float(token["logprob"]) for token in tokens),
        margin=_margin(tokens),
    )


def _margin(tokens: Sequence[dict[str, Any]]) -> float:
    pairs = [sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)[:2] for token in tokens]
    return min((first - second for first, second in (pair for pair in pairs if len(pair) == 2)), default=math.inf)


def foreign_secrets(text: str, own: str) -> list[str]:
    """Secrets of others in a text."""
    return [found for found in SECRET.findall(text) if found != own]
