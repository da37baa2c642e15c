"""The trained draft: small, of the same tokenizer, the result of its recipe, and its guesses hold."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.checkpoint import audit
from workbench.exam.trained import is_trained_here
from workbench.serving import LocalRunner, ModelDrafter, open_service
from workbench.spec import count_model, read_spec
from workbench.training.config import read_config

DATA = Path(__file__).resolve().parents[2] / "data"
MODEL, DRAFT, RECIPE = DATA / "k3-nano", DATA / "k3-nano-draft", DATA / "train" / "k3-nano-draft.toml"
MAX_BYTES = 2 * 10**6
ASKED = (("What is tensor parallelism?", None), ("How many objects are there?", DATA / "scenes" / "count.png"))


def test_it_is_the_result_of_the_recipe_that_ships_and_is_small() -> None:
    assert (DRAFT / "recipe.toml").read_bytes() == RECIPE.read_bytes()
    config = read_config(RECIPE)
    assert is_trained_here(DRAFT)
    assert read_spec(DRAFT) == config.spec()
    origin = json.loads((DRAFT / "origin.json").read_text())
    assert (origin["steps"], origin["seed"]) == (config.steps, config.seed)
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= MAX_BYTES
    assert count_model(read_spec(DRAFT)).num_params < count_model(read_spec(MODEL)).num_params / 5
    assert audit(DRAFT).ok


def test_its_tokenizer_is_that_of_the_model_it_guesses_for() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (DRAFT / name).read_bytes() == (MODEL / name).read_bytes()


def test_its_guesses_hold_with_text_and_with_a_picture_that_it_does_not_see() -> None:
    def load(folder: Path) -> LocalRunner:
        return LocalRunner.load(folder, precision="fp32", num_slots=1, max_tokens=1024)

    runner = load(MODEL)
    with open_service(runner, MODEL) as service:
        expected = [service.infer(text, picture).token_ids for text, picture in ASKED]
    drafter = ModelDrafter(load(DRAFT), runner.info, 3)
    for (text, picture), tokens in zip(ASKED, expected, strict=True):
        with open_service(runner, MODEL, drafter=drafter) as service:
            assert service.infer(text, picture).token_ids == tokens
            stats = service.stats()
        assert stats.num_accepted > stats.num_drafted / 2 > 0, "of the guesses, most hold"
