"""A short text question behind a very long prompt and behind many large pictures, over HTTP with a real model.

    python tests/benchmarks/bench_fairness.py [--model data/k3-nano] [--rounds 5] [--long-tokens 32000]
                                              [--images 20] [--image-size 896x896] [--only alone pictures]

A server (fp32, `--slots` sequences, `--step-tokens` a step) answers a short question again and again: alone, then while
a prompt of `--long-tokens` tokens is being read, then while one with `--images` pictures is. The crowd is read once by
itself, then once more with the short questions spread over it, from its beginning to where `--deepest` of it is read,
and given up after the last. A short answer counts only where the crowd was under way from before its question to after
its last token.

    one step      the longest step (with the picture encoded before it) of the crowd alone, nobody else asking
    gap bound     99 in 100 gaps between tokens of the short answer <= twice those alone, and one step
    first token   within ceil(n / (step tokens // slots)) steps for a prompt of n tokens, and the step in hand

Steps are timed where the engine calls the model, gaps where the client reads the stream. The run ends with 1 where a
bound is broken, or where nothing was shown because no answer counts.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from long_context import long_context
from PIL import Image

from workbench.base import Table, WorkbenchError, human
from workbench.cluster import default_device
from workbench.profiling import Percentiles, Question, RequestTiming, ServerTarget
from workbench.serving import LocalRunner, MultimodalInferenceService, StepInput
from workbench.serving.client import RemoteService
from workbench.serving.http import HttpServer, ServerSettings
from workbench.serving.inputs import ImageProcessor, read_tokenizer
from workbench.serving.steps import EncodeImage, SampledToken
from workbench.spec import read_spec

ROOT = Path(__file__).resolve().parents[2]
ALONE, LONG, PICTURES = "alone", "long prompt", "pictures"
FIELDS = {"ignore_eos": True}
SHORT = "shard rank layer expert router token cache state kernel stream weight tensor batch stage layout node link"


@dataclass(frozen=True)
class TimedRunner(LocalRunner):
    """Writes down every step: its end, and its seconds with those of the pictures encoded before it."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    encoding: list[float] = field(default_factory=list)

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        began = time.perf_counter()
        super().encode_images(replica, images)
        self.encoding.append(time.perf_counter() - began)

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken | WorkbenchError]]:
        began = time.perf_counter()
        sampled = super().step(inputs)
        ended = time.perf_counter()
        self.steps.append((ended, ended - began + sum(self.encoding)))
        self.encoding.clear()
        return sampled


@dataclass(frozen=True, kw_only=True)
class ShortAnswer:
    first_s: float
    gaps: tuple[float, ...]
    num_steps: int  # from the question to its first token
    num_prompt: int
    depth: int = 0  # tokens of the crowd that were read by then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--rounds", type=int, default=5, help="short answers of each kind")
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--long-tokens", type=int, default=32_000)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--image-size", default="896x896", metavar="WxH")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument(
        "--deepest", type=float, default=0.75, help="part of the crowd read when the last question comes"
    )
    parser.add_argument("--only", nargs="+", choices=(LONG, PICTURES), default=(LONG, PICTURES))
    args = parser.parse_args()
    device = default_device()
    width, height = map(int, args.image_size.split("x"))
    crowds = {
        PICTURES: Question(text="What is there?", images=pictures(args.images, width, height), max_tokens=1),
    }
    with tempfile.TemporaryDirectory() as scratch:
        spec = read_spec(args.model)
        assert spec.image is not None, "this model takes no pictures"
        tokens_of_pictures = sum(
            ImageProcessor(spec.image).process(each).num_tokens for each in crowds[PICTURES].images
        )
        tokenizer = read_tokenizer(args.model, spec)
        text = " token" * (args.long_tokens // len(tokenizer.encode(" token")))
        crowds[LONG] = Question(text=text, max_tokens=1)
        longest = 512 + max(args.long_tokens, tokens_of_pictures)
        model = long_context(args.model, Path(scratch) / "model", longest)
        loaded = LocalRunner.load(model, precision="fp32", device=device, num_slots=args.slots, max_tokens=longest)
        runner = TimedRunner(loaded.rank)
        bench = Bench(args, runner, model)
        with bench.service, HttpServer(bench.service, bench.settings) as server:
            bench.connect(server.url)
            records = [bench.alone()] + [bench.behind(name, crowds[name]) for name in args.only]
    columns = (
        "behind",
        "answers",
        "asked at",
        "first token",
        "steps to it",
        "gap p50",
        "gap p99",
        "one step",
        "gap bound",
        "kept",
    )
    rows = tuple(
        (
            each["behind"],
            each["answers"],
            f"{each['depths'][0]:,} to {each['depths'][-1]:,}" if each["depths"] else None,
            human(each["first_s"], "s") if each["answers"] else None,
            f"{each['most_steps']} of {each['steps_bound']}",
            human(each["gap_p50_s"], "s") if each["answers"] else None,
            human(each["gap_p99_s"], "s") if each["answers"] else None,
            human(each["one_step_s"], "s") if each["one_step_s"] else None,
            human(each["gap_bound_s"], "s") if each["gap_bound_s"] else None,
            "yes" if each["is_kept"] else "NO",
        )
        for each in records
    )
    title = f"{args.model}, {args.slots} slots, {args.step_tokens} tokens a step, fp32, {device}"
    print(Table(title=title, columns=columns, rows=rows).render())
    print(json.dumps({"benchmark": "fairness", "device": device, "kinds": records}))
    sys.exit(0 if all(each["is_kept"] for each in records) else 1)


class Bench:
    def __init__(self, args: argparse.Namespace, runner: TimedRunner, model: Path) -> None:
        self.args, self.runner = args, runner
        spec = read_spec(model)
        assert spec.image is not None
        self.service = MultimodalInferenceService(
            runner, read_tokenizer(model, spec), ImageProcessor(spec.image), step_tokens=args.step_tokens
        )
        self.settings = ServerSettings(model="model", port=0, max_images=max(16, args.images))
        self.unloaded: Percentiles | None = None

    def connect(self, url: str) -> None:
        self.remote = RemoteService(url)
        self.target = ServerTarget(self.remote, fields=FIELDS)
        self.short()  # the first request loads code

    def ask(self, question: Question) -> RequestTiming:
        timing = self.target.ask(question)
        assert not timing.error, timing.error
        return timing

    def short(self, depth: int = 0) -> ShortAnswer:
        timing = self.ask(Question(text=SHORT, max_tokens=self.args.answer_tokens))
        assert timing.first_token_s is not None
        first_at = timing.submitted_s + timing.first_token_s
        num_steps = sum(timing.submitted_s <= ended <= first_at for ended, _ in self.runner.steps)
        # Markup is no text: where the first text comes with the second token, the first came a step earlier.
        num_steps -= next(count for _, count in timing.arrivals if count) - 1
        gaps = tuple(gap for gap, count in timing.gaps for _ in range(count))
        return ShortAnswer(
            first_s=timing.first_token_s,
            gaps=gaps,
            num_steps=num_steps,
            num_prompt=timing.num_prompt_tokens,
            depth=depth,
        )

    def alone(self) -> dict[str, object]:
        answers = [self.short() for _ in range(self.args.rounds)]
        self.unloaded = Percentiles.of([gap for each in answers for gap in each.gaps])
        return self.record(ALONE, answers, one_step_s=None)

    def behind(self, name: str, crowd: Question) -> dict[str, object]:
        """Short answers while the crowd is read, after the crowd was read once with nobody else there."""
        self.runner.steps.clear()
        began = time.perf_counter()
        total = self.ask(crowd).num_prompt_tokens
        one_step_s = max(seconds for _, seconds in self.runner.steps)
        typical_s = statistics.median(seconds for _, seconds in self.runner.steps)
        print(
            f"{name}: {total:,} tokens alone in {time.perf_counter() - began:.1f} s, {len(self.runner.steps)} steps, "
            f"half of them within {human(typical_s, 's')}, the longest {human(one_step_s, 's')}"
        )
        self.runner.steps.clear()
        # From here, since a reply that has not begun cannot be closed: its head comes before its first token.
        reply = self.remote.stream(crowd.text, crowd.images, max_tokens=crowd.max_tokens, fields=FIELDS)
        while self.service.stats().num_waiting:
            time.sleep(0.001)
        answers: list[ShortAnswer] = []
        for number in range(self.args.rounds):
            wanted = round(total * self.args.deepest * number / max(1, self.args.rounds - 1))
            while (depth := self.depth()) is not None and depth < wanted:
                time.sleep(0.002)
            if depth is None:
                break
            each = self.short(depth)
            if self.depth() is not None:
                answers.append(each)
        reply.close()
        while self.service.stats().num_running:
            time.sleep(0.01)
        return self.record(name, answers, one_step_s=one_step_s)

    def depth(self) -> int | None:
        """Tokens read of the one long prompt that is there, or None where it is not there."""
        reading = [each for each in self.service.engine.scheduler.running[0] if each.num_unread]
        return max((each.num_cached for each in reading), default=None)

    def record(self, name: str, answers: Sequence[ShortAnswer], *, one_step_s: float | None) -> dict[str, object]:
        gaps = Percentiles.of([gap for each in answers for gap in each.gaps])
        share = self.args.step_tokens // self.args.slots
        # One step is in hand when the question comes.
        bounds = [math.ceil(each.num_prompt / share) + 1 for each in answers]
        bound = None
        if one_step_s is not None and self.unloaded is not None:
            bound = 2 * self.unloaded.p99 + one_step_s
        is_kept = bool(answers) and all(each.num_steps <= most for each, most in zip(answers, bounds, strict=True))
        is_kept = is_kept and (bound is None or (gaps is not None and gaps.p99 <= bound))
        return {
            "behind": name,
            "answers": len(answers),
            "depths": [each.depth for each in answers] if name != ALONE else [],
            "first_s": statistics.median(each.first_s for each in answers) if answers else None,
            "most_steps": max((each.num_steps for each in answers), default=0),
            "steps_bound": max(bounds, default=0),
            "gap_p50_s": gaps.p50 if gaps is not None else None,
            "gap_p99_s": gaps.p99 if gaps is not None else None,
            "one_step_s": one_step_s,
            "gap_bound_s": bound,
            "is_kept": is_kept,
        }


def pictures(number: int, width: int, height: int) -> tuple[bytes, ...]:
    """PNGs, no two alike."""
    files = []
    for seed in range(number):
        file = io.BytesIO()
        colours = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
        files.append(file.getvalue())
    return tuple(files)


if __name__ == "__main__":
    main()
