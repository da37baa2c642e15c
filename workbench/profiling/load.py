"""Which requests a load consists of, and when they come: a pure function of a seed. Sending them is in `generator`.

    open loop      requests come when they come, whether or not the ones before were answered: Poisson, or bursts
    closed loop    so many askers, each of whom asks again once answered; the load slows down with the server

An open loop shows what users see; a closed loop shows the most a server does at a given number of askers.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from PIL import Image, ImageDraw

from workbench.base import ConfigError
from workbench.profiling.targets import Question

__all__ = ["Bursts", "ClosedLoop", "Kind", "Lengths", "Load", "LoadPlan", "PlannedRequest", "Poisson", "plan_load"]

WORDS = (
    "shard rank layer expert router token cache state kernel stream weight tensor batch stage layout node link copy "
    "matrix vector norm gate head page slot queue step prompt answer image patch tower scale block byte seed mesh"
)
BYTES_PER_WORD = 6.0  # of the words above, with the space before them


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths in tokens, evenly likely from `least` to `most`; or logarithmically, so that short ones are
    many and long ones few. Raises ConfigError for a range that is none."""

    least: int
    most: int
    is_logarithmic: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                "not a range of lengths", found=f"{self.least}..{self.most}", expected="1 <= least <= most"
            )

    def draw(self, rng: random.Random) -> int:
        if not self.is_logarithmic:
            return rng.randint(self.least, self.most)
        drawn = math.exp(rng.uniform(math.log(self.least), math.log(self.most + 1)))
        return min(self.most, int(drawn))

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        return f"{self.least}..{self.most}{' (log)' if self.is_logarithmic else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of request in a mix; `weight` is its share relative to the others. `image_size` is (width, height)."""

    name: str = "text"
    prompt: Lengths = field(default_factory=lambda: Lengths(least=64, most=64))
    answer: Lengths = field(default_factory=lambda: Lengths(least=32, most=32))
    num_images: int = 0
    image_size: tuple[int, int] = (224, 224)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf or self.num_images < 0 or min(self.image_size) < 1:
            raise ConfigError("not a kind of request", found=str(self), expected="a weight above 0 and real pictures")

    def __str__(self) -> str:
        images = f", {self.num_images} images of {self.image_size[0]}x{self.image_size[1]}" if self.num_images else ""
        return f"{self.name}: about {self.prompt} prompt tokens{images}, up to {self.answer} generated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Poisson:
    """Independent arrivals, `rate_per_s` on average."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def times(self, number: int, rng: random.Random) -> list[float]:
        """Seconds after the start, ascending."""
        now, times = 0.0, []
        for _ in range(number):
            now += rng.expovariate(self.rate_per_s)
            times.append(now)
        return times

    def __str__(self) -> str:
        return f"open loop, Poisson at {self.rate_per_s:g} requests/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bursts:
    """`size` requests at once, again and again, with pauses as of a Poisson process; `rate_per_s` counts requests."""

    rate_per_s: float
    size: int

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        if self.size < 1:
            raise ConfigError("a burst has at least one request", found=self.size)

    def times(self, number: int, rng: random.Random) -> list[float]:
        """Seconds after the start, ascending."""
        bursts = Poisson(rate_per_s=self.rate_per_s / self.size).times(math.ceil(number / self.size), rng)
        return [time_s for time_s in bursts for _ in range(self.size)][:number]

    def __str__(self) -> str:
        return f"open loop, bursts of {self.size} at {self.rate_per_s:g} requests/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """`concurrency` askers, each with one request under way."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("somebody has to ask", found=f"concurrency {self.concurrency}")

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at once"


Arrivals = Poisson | Bursts | ClosedLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What to send. Warm-up requests come first, one after another, and are kept apart in every figure."""

    arrivals: Arrivals
    num_requests: int
    kinds: tuple[Kind, ...] = (Kind(),)
    num_warm_up: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_warm_up < 0 or not self.kinds:
            raise ConfigError("not a load", found=f"{self.num_requests} requests of {len(self.kinds)} kinds")

    def __str__(self) -> str:
        return f"{self.num_requests} requests, {self.arrivals}, seed {self.seed}; " + "; ".join(map(str, self.kinds))

    def to_json(self) -> dict[str, Any]:
        kind = type(self.arrivals).__name__
        return {**asdict(self), "arrivals": {"kind": kind, **asdict(self.arrivals)}, "text": str(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """`due_s` is after the start of the measured part; None where a request is sent as soon as somebody is free."""

    question: Question
    due_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    load: Load
    warm_up: tuple[PlannedRequest, ...]
    requests: tuple[PlannedRequest, ...]


def plan_load(load: Load, *, count_tokens: Callable[[str], int] | None = None) -> LoadPlan:
    """Every request of a load, the same for the same seed. Warm-up has draws of its own: more of it changes nothing.

    With `count_tokens` prompts have the drawn length as the model's tokenizer counts it, to within a word; without it
    the length is a guess of four bytes a token, and what the server counted is in the timings. No two prompts begin
    alike, so that a server which keeps beginnings of prompts finds none, unless it keeps those of an earlier run.
    """
    draws, chances = random.Random(f"{load.seed} requests"), random.Random(f"{load.seed} arrivals")
    warm_up = random.Random(f"{load.seed} warm-up")
    questions = [_question(load, draws, f"{load.seed}-{n}", count_tokens) for n in range(load.num_requests)]
    if isinstance(load.arrivals, ClosedLoop):
        due: Sequence[float | None] = [None] * load.num_requests
    else:
        due = load.arrivals.times(load.num_requests, chances)
    return LoadPlan(
        load=load,
        warm_up=tuple(
            PlannedRequest(question=_question(load, warm_up, f"{load.seed}-w{n}", count_tokens))
            for n in range(load.num_warm_up)
        ),
        requests=tuple(
            PlannedRequest(question=question, due_s=due_s) for question, due_s in zip(questions, due, strict=True)
        ),
    )


def _question(load: Load, rng: random.Random, name: str, count_tokens: Callable[[str], int] | None) -> Question:
    (kind,) = rng.choices(load.kinds, weights=[kind.weight for kind in load.kinds])
    prompt, answer = kind.prompt.draw(rng), kind.answer.draw(rng)
    return Question(
        text=_text(rng, name, prompt, count_tokens),
        images=tuple(_picture(rng, kind.image_size) for _ in range(kind.num_images)),
        max_tokens=answer,
        seed=rng.getrandbits(32),
        label=kind.name,
    )


def _text(rng: random.Random, name: str, num_tokens: int, count_tokens: Callable[[str], int] | None) -> str:
    known = WORDS.split()
    if count_tokens is None:
        wanted = max(1, round(num_tokens * 4 / BYTES_PER_WORD))
        return " ".join([name, *rng.choices(known, k=wanted)])
    words = [name, *rng.choices(known, k=num_tokens)]
    low, high = 1, len(words)
    while low < high:  # most words that stay within the length; every word is at least a token
        middle = (low + high + 1) // 2
        if count_tokens(" ".join(words[:middle])) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])


def _picture(rng: random.Random, size: tuple[int, int]) -> bytes:
    """A PNG of some rectangles: no two alike, and small however large the picture."""
    image = Image.new("RGB", size, _colour(rng))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = sorted(rng.choices(range(size[0] + 1), k=2)), sorted(rng.choices(range(size[1] + 1), k=2))
        draw.rectangle((x[0], y[0], x[1], y[1]), fill=_colour(rng))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ConfigError("not a rate of requests", found=rate, expected="above 0 and finite, per second")
