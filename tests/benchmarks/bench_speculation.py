"""What guessing tokens ahead brings: guesses taken, tokens a step and the time of an answer, with and without.

    python tests/benchmarks/bench_speculation.py [--model data/k3-nano] [--draft data/k3-nano-draft] [--questions 24]

The model answers held-out questions one at a time and greedily, about the project (text alone) and about pictures:
without guesses, with guesses looked up in the text so far, and with guesses of the draft model. The ways take turns
question by question and must say the very same tokens; a difference ends the run with 1. `time` is the median over
questions of the seconds of an answer as a part of those without guesses (below 1 is faster).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from workbench.base import Table
from workbench.cluster import default_device
from workbench.serving import Drafter, LocalRunner, ModelDrafter, PromptLookup, open_service
from workbench.training.answers import MAX_NEW_TOKENS
from workbench.training.data import fact_exam, picture_exam, read_facts, scene_image

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("shape", "colour", "count", "position", "size", "presence", "digit", "word")
NONE = "no guesses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--draft", type=Path, default=ROOT / "data" / "k3-nano-draft")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4], help="guesses at a time")
    parser.add_argument("--questions", type=int, default=24, help="of each sort")
    args = parser.parse_args()
    device = default_device()
    facts = fact_exam(read_facts())[:: max(1, len(fact_exam(read_facts())) // args.questions)][: args.questions]
    pictures = picture_exam(-(-args.questions // len(KINDS)), seed=1, kinds=KINDS)[: args.questions]

    def load(folder: Path) -> LocalRunner:
        return LocalRunner.load(folder, precision="fp32", device=device, num_slots=1, max_tokens=1024)

    runner = load(args.model)
    drafters: dict[str, Drafter | None] = {NONE: None}
    for count in args.tokens:
        drafters[f"looked up, {count}"] = PromptLookup(count)
        drafters[f"draft, {count}"] = ModelDrafter(load(args.draft), runner.info, count)
    rows: list[tuple[object, ...]] = []
    records, has_differed = [], False
    for sort, items in (("text", facts), ("pictures", pictures)):
        seconds: dict[str, list[float]] = {way: [] for way in drafters}
        said: dict[str, list[tuple[int, ...]]] = {way: [] for way in drafters}
        drafted, accepted, steps = (dict.fromkeys(drafters, 0) for _ in range(3))
        for item in items:
            for way, drafter in drafters.items():
                with open_service(runner, args.model, drafter=drafter) as service:
                    image = [scene_image(item.scene)] if item.scene is not None else None
                    began = time.perf_counter()
                    answer = service.infer(item.text, image, max_tokens=MAX_NEW_TOKENS, temperature=0.0)
                    seconds[way].append(time.perf_counter() - began)
                    stats = service.stats()
                said[way].append(tuple(answer.token_ids))
                drafted[way] += stats.num_drafted
                accepted[way] += stats.num_accepted
                steps[way] += stats.num_steps
        for way in drafters:
            has_differed |= said[way] != said[NONE]
            num_tokens = sum(map(len, said[way]))
            record = {
                "sort": sort,
                "way": way,
                "answers": len(items),
                "tokens": num_tokens,
                "same_tokens": said[way] == said[NONE],
                "drafted": drafted[way],
                "accepted": accepted[way],
                "tokens_per_step": num_tokens / steps[way],
                "time_ratio": statistics.median(a / b for a, b in zip(seconds[way], seconds[NONE], strict=True)),
            }
            records.append(record)
            taken = f"{record['accepted'] / record['drafted']:.0%}" if drafted[way] else "-"
            rows.append(
                (
                    sort,
                    way,
                    num_tokens,
                    drafted[way],
                    taken,
                    f"{record['tokens_per_step']:.2f}",
                    f"{record['time_ratio']:.2f}",
                    "yes" if record["same_tokens"] else "NO",
                )
            )
    columns = ("questions", "way", "tokens", "guesses", "taken", "tokens a step", "time", "same tokens")
    title = f"{args.model}, {args.questions} questions a sort, one at a time, fp32, {device}"
    print(Table(title=title, columns=columns, rows=tuple(rows)).render())
    print(json.dumps({"benchmark": "speculation", "device": device, "ways": records}))
    sys.exit(1 if has_differed else 0)


if __name__ == "__main__":
    main()
