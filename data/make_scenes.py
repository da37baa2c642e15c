"""Draws the example scenes of `data/scenes` and writes down what a right answer to each question would be.

    python data/make_scenes.py [--out data/scenes]

Every scene is of the held-out side: no model that this repository trains has seen its arrangement.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from workbench.training.data import ExamItem, picture_exam, scene_image

__all__ = ["KINDS", "example_questions", "write_examples"]

KINDS = ("shape", "colour", "position", "count", "digit", "word", "chart")
SEED = 5
CANDIDATES = 60  # of each kind
DATA = Path(__file__).resolve().parent


def example_questions() -> tuple[ExamItem, ...]:
    """One of each kind, each about a scene of its own, in plain spelling; no answer is "one" or a single digit."""
    items = picture_exam(CANDIDATES, seed=SEED, kinds=KINDS)
    return tuple(next(item for item in items if item.kind == kind and _is_plain(item)) for kind in KINDS)


def _is_plain(item: ExamItem) -> bool:
    text, label = item.text, item.scene.label if item.scene else None
    is_typed_well = text[0].isupper() and text[-1] in "?." and text.count(",") + text.count(":") == 0
    is_short = label is not None and item.kind in ("digit", "word") and len(label.text) < 3
    return is_typed_well and "color" not in text and text.count(".") < 2 and item.answer != "One." and not is_short


def write_examples(out: Path) -> None:
    """A picture for each question, and `questions.json` with the questions and their answers."""
    out.mkdir(parents=True, exist_ok=True)
    records = []
    for item in example_questions():
        assert item.scene is not None
        scene_image(item.scene).save(out / f"{item.kind}.png", optimize=True)
        answers = [item.answer, *item.accepted]
        records.append({"picture": f"{item.kind}.png", "question": item.text, "answers": answers})
    (out / "questions.json").write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "scenes")
    write_examples(parser.parse_args().out)


if __name__ == "__main__":
    main()
