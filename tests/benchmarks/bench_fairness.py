"""A short text question behind a very long prompt and behind many large pictures, over HTTP with a real model.

    python tests/benchmarks/bench_fairness.py [--model data/k3-nano] [--rounds 5] [--long-tokens 32000]
                                              [--images 20] [--image-size 896x896] [--only pictures] [--limit-s 900]

A server (fp32, `--slots` sequences, `--step-tokens` a step) answers a short question again and again: alone, then while
a prompt of `--long-tokens` tokens is being read, then while one with `--images` pictures is. The crowd is read once by
itself, then again with the short questions spread over it, from its beginning to where `--deepest` of it is read, as
often as it takes until `--rounds` of them have been answered inside: a short answer counts only where the crowd was
under way from before its question to after its last token. A crowd that would be over too soon for that is made
longer, of more words or pictures, before it is asked. After `--limit-s` the run ends with what it has, and says what
it left out.

    one step      the longest step of the crowd alone that had text in it and no picture
    gap bound     99 in 100 gaps between tokens of the short answer <= twice those alone, and one step
    first token   within ceil(n / (step tokens // slots)) steps for a prompt of n tokens, and the step in hand

Steps are timed where the engine calls the model, gaps where the client reads the stream. The log of steps says of each
kind how many there were and how long they took, and what was in the longest. The run ends with 1 where a bound is
broken, or where nothing was shown because no answer counts.
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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from long_context import long_context
from PIL import Image
from step_log import LoggedRunner, by_kind, longest

from workbench.base import Table, human
from workbench.cluster import default_device
from workbench.profiling import Percentiles, Question, RequestTiming, ServerTarget
from workbench.serving import LocalRunner, MultimodalInferenceService
from workbench.serving.client import RemoteReply, RemoteService
from workbench.serving.http import HttpServer, ServerSettings
from workbench.serving.inputs import ImageProcessor, read_tokenizer
from workbench.serving.sequence import SequenceState
from workbench.spec import read_spec

ROOT = Path(__file__).resolve().parents[2]
ALONE, LONG, PICTURES = "alone", "long prompt", "pictures"
FIELDS = {"ignore_eos": True}
MAX_PICTURES = 2000  # of one request, however small they are
SHORT = "shard rank layer expert router token cache state kernel stream weight tensor batch stage layout node link"


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
    parser.add_argument("--whole-pictures", action="store_true", help="encode each in one step, which breaks the bound")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for everything but loading")
    args = parser.parse_args()
    device = default_device()
    with tempfile.TemporaryDirectory() as scratch:
        crowds, most_tokens = make_crowds(args)
        model = long_context(args.model, Path(scratch) / "model", most_tokens)
        loaded = LocalRunner.load(model, precision="fp32", device=device, num_slots=args.slots, max_tokens=most_tokens)
        if args.whole_pictures:
            loaded.rank.info = replace(loaded.rank.info, encoding=None)
        runner = LoggedRunner(loaded.rank)
        bench = Bench(args, runner, model, max_images=len(crowds[PICTURES].images))
        with bench.service, HttpServer(bench.service, bench.settings) as server:
            bench.connect(server.url)
            records = [bench.alone()]
            for number, name in enumerate(args.only):
                limit_s = (bench.ends_s - time.perf_counter()) / (len(args.only) - number)
                records.append(bench.behind(name, crowds[name], limit_s))
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
            f"{each['answers']} of {args.rounds}",
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
    for line in bench.left_out:
        print(f"left out: {line}")
    print(json.dumps({"benchmark": "fairness", "device": device, "kinds": records, "left_out": bench.left_out}))
    sys.exit(0 if all(each["is_kept"] for each in records) else 1)


def make_crowds(args: argparse.Namespace) -> tuple[dict[str, Question], int]:
    """The two crowds, long enough for a short answer inside, and the tokens that the longest sequence may have."""
    spec = read_spec(args.model)
    assert spec.image is not None, "this model takes no pictures"
    tokenizer = read_tokenizer(args.model, spec)
    width, height = map(int, args.image_size.split("x"))
    # Steps of a short answer, and three times as many of the crowd: it may begin late and must not end early.
    share = args.step_tokens // args.slots
    num_steps = 3 * (math.ceil((64 + len(tokenizer.encode(SHORT))) / share) + 1 + args.answer_tokens)
    per_picture = ImageProcessor(spec.image).process(pictures(1, width, height)[0]).num_tokens
    num_images = min(MAX_PICTURES, max(args.images, math.ceil(num_steps * args.step_tokens / per_picture)))
    long_tokens = max(args.long_tokens, num_steps * args.step_tokens)
    for name, asked, made in ((PICTURES, args.images, num_images), (LONG, args.long_tokens, long_tokens)):
        if made > asked:
            print(f"{name}: {made:,} instead of {asked:,}, so that it lasts for {num_steps} steps")
    text = " token" * (long_tokens // len(tokenizer.encode(" token")))
    crowds = {
        PICTURES: Question(text="What is there?", images=pictures(num_images, width, height), max_tokens=1),
        LONG: Question(text=text, max_tokens=1),
    }
    # A picture stands in markup that names its size.
    return crowds, 512 + max(long_tokens, num_images * (per_picture + 64))


class Bench:
    def __init__(self, args: argparse.Namespace, runner: LoggedRunner, model: Path, *, max_images: int) -> None:
        self.args, self.runner = args, runner
        spec = read_spec(model)
        assert spec.image is not None
        self.service = MultimodalInferenceService(
            runner, read_tokenizer(model, spec), ImageProcessor(spec.image), step_tokens=args.step_tokens
        )
        self.settings = ServerSettings(
            model="model", port=0, max_images=max(16, max_images), request_timeout_s=max(600.0, args.limit_s)
        )
        self.unloaded: Percentiles | None = None
        self.ends_s = time.perf_counter() + args.limit_s
        self.left_out: list[str] = []

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
        num_steps = sum(timing.submitted_s <= step.ended_s <= first_at for step in self.runner.steps)
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

    def behind(self, name: str, crowd: Question, limit_s: float) -> dict[str, object]:
        """Short answers while the crowd is read, after the crowd was read once with nobody else there."""
        began = time.perf_counter()
        ends_s = began + limit_s
        self.runner.steps.clear()
        total, was_read = self.read_alone(crowd, began + limit_s / 2)
        texts = [step.seconds for step in self.runner.steps if step.chunks and not step.rows]
        one_step_s = max(texts, default=None)
        typical_s = statistics.median(texts) if texts else math.nan
        print(
            f"{name}: {was_read:,} of {total:,} tokens alone in {time.perf_counter() - began:.1f} s; half of the steps "
            f"with text alone within {human(typical_s, 's')}"
        )
        print(by_kind(f"{name}, alone", self.runner.steps).render())
        if was_read < total:
            self.left_out.append(f"{name}: {total - was_read:,} of {total:,} tokens, when it was read alone")
        alone = list(self.runner.steps)
        self.runner.steps.clear()
        answers: list[ShortAnswer] = []
        num_passes = num_outside = 0
        while len(answers) < self.args.rounds and time.perf_counter() < ends_s and num_passes < self.args.rounds + 3:
            num_passes += 1
            own, outside = self.answers_inside(crowd, total, self.args.rounds - len(answers), ends_s)
            answers += own
            num_outside += outside
        if len(answers) < self.args.rounds:
            self.left_out.append(f"{name}: {self.args.rounds - len(answers)} of {self.args.rounds} short answers")
        print(f"{name}: asked {num_passes} times; {num_outside} short answers were not inside and do not count")
        print(by_kind(f"{name}, with short answers", self.runner.steps).render())
        for step in longest([*alone, *self.runner.steps]):
            print(f"  a long step: {step}")
        record = self.record(name, answers, one_step_s=one_step_s)
        longest_s = {kind: max(x.seconds for x in alone if x.kind == kind) for kind in {x.kind for x in alone}}
        return {**record, "longest_s": longest_s, "outside": num_outside, "passes": num_passes}

    def begin(self, crowd: Question) -> RemoteReply:
        # A stream, since a reply that has not begun cannot be closed: its head comes before its first token.
        reply = self.remote.stream(crowd.text, crowd.images, max_tokens=crowd.max_tokens, fields=FIELDS)
        while self.service.stats().num_waiting:
            time.sleep(0.001)
        return reply

    def end(self, reply: RemoteReply) -> None:
        reply.close()
        while self.service.stats().num_running:
            time.sleep(0.01)

    def read_alone(self, crowd: Question, ends_s: float) -> tuple[int, int]:
        """Tokens of the crowd, and how many of them were read in time."""
        reply, total, was_read = self.begin(crowd), 0, 0
        while (each := self.reading()) is not None and time.perf_counter() < ends_s:
            total, was_read = each.num_to_read, each.num_cached
            time.sleep(0.002)
        was_read = total if each is None else was_read
        self.end(reply)
        return total, was_read

    def answers_inside(self, crowd: Question, total: int, wanted: int, ends_s: float) -> tuple[list[ShortAnswer], int]:
        """Up to `wanted` short answers inside one reading of the crowd, and how many were not."""
        answers: list[ShortAnswer] = []
        reply, num_outside = self.begin(crowd), 0
        for number in range(wanted):
            depth = round(total * self.args.deepest * number / max(1, self.args.rounds - 1))
            while (each := self.reading()) is not None and each.num_cached < depth and time.perf_counter() < ends_s:
                time.sleep(0.002)
            if each is None or time.perf_counter() > ends_s:
                break
            answer = self.short(each.num_cached)
            if self.reading() is not each:
                num_outside += 1
                break
            answers.append(answer)
        self.end(reply)
        return answers, num_outside

    def reading(self) -> SequenceState | None:
        """The crowd, where it is there and not read to its end."""
        running = [each for each in self.service.engine.scheduler.running[0] if each.num_unread]
        return max(running, key=lambda each: each.num_to_read, default=None)

    def record(self, name: str, answers: Sequence[ShortAnswer], *, one_step_s: float | None) -> dict[str, object]:
        gaps = Percentiles.of([gap for each in answers for gap in each.gaps])
        share = self.args.step_tokens // self.args.slots
        # One step is in hand when the question comes.
        bounds = [math.ceil(each.num_prompt / share) + 1 for each in answers]
        bound = None
        if one_step_s is not None and self.unloaded is not None:
            bound = 2 * self.unloaded.p99 + one_step_s
        is_kept = bool(answers) and all(each.num_steps <= most for each, most in zip(answers, bounds, strict=True))
        is_kept = is_kept and (name == ALONE or (bound is not None and gaps is not None and gaps.p99 <= bound))
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
