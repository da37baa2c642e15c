"""The tower's lesson: it teaches, replicas share it, and a run that is killed and resumed takes it once."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

import step_tasks
from ranks import shared_ranks
from tiny_runs import give_tokenizer, tiny_config, tokenizer_folder

from workbench.base import ConfigError
from workbench.parallel import single_context
from workbench.placement import Layout
from workbench.serving.inputs import read_tokenizer
from workbench.training.config import TowerConfig, TrainConfig
from workbench.training.initial import draw_parameter
from workbench.training.metrics import read_metrics
from workbench.training.sharding import whole_shapes
from workbench.training.tower import TowerLesson, draw_batch, word_vectors


def tower_weights(config: TrainConfig) -> dict[str, Tensor]:
    spec = config.spec()
    shapes = {n: s for n, s in whole_shapes(spec).items() if n.startswith(("vision.", "projector."))}
    return {name: draw_parameter(spec, name, shape, config.seed) for name, shape in shapes.items()}


def tower_words(config: TrainConfig) -> tuple[Tensor, ...]:
    spec = config.spec()
    embedding = draw_parameter(spec, "embed.weight", whole_shapes(spec)["embed.weight"], config.seed)
    return word_vectors(embedding, read_tokenizer(tokenizer_folder(), spec))


def with_tower(at_step: int = 1, steps: int = 3, batch: int = 6, **changes: object) -> TrainConfig:
    config = tiny_config(**{"steps": 3, **changes})
    return dataclasses.replace(config, tower=TowerConfig(at_step=at_step, steps=steps, batch=batch, warmup_steps=1))


def test_a_lesson_teaches_colours_and_leaves_the_given_weights_alone() -> None:
    config = tiny_config()
    weights = tower_weights(config)
    before = {name: value.clone() for name, value in weights.items()}
    schedule = TowerConfig(steps=60, batch=24, muon_lr=1e-2, warmup_steps=5)
    lesson = TowerLesson(config.spec(), schedule, 1, weights, tower_words(config), single_context().dp)
    losses = [lesson.step(step)["loss"] for step in range(60)]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5]), f"{losses[0]:.2f} -> {losses[-1]:.2f}"
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    taught = lesson.weights()
    assert taught.keys() == weights.keys()
    assert all(not torch.equal(taught[name], weights[name]) for name in weights)


def test_a_picture_depends_on_its_number_alone_whoever_draws_it() -> None:
    config = tiny_config()
    words = tower_words(config)
    lesson = TowerLesson(
        config.spec(), TowerConfig(steps=1, batch=4), 1, tower_weights(config), words, single_context().dp
    )
    spec, processor = config.spec(), lesson.processor
    whole = draw_batch(spec, processor, 9, 2, range(4))
    parts = [draw_batch(spec, processor, 9, 2, range(rank, 4, 2)) for rank in range(2)]
    rows = sorted(row.tolist() for part in parts for row in part.pictures)
    assert rows == sorted(row.tolist() for row in whole.pictures)
    assert draw_batch(spec, processor, 9, 3, range(4)).pictures.tolist() != whole.pictures.tolist()


@pytest.mark.slow
def test_a_taught_tower_shows_things_in_the_words_of_the_text_model() -> None:
    """The middle of the first place points nearer to the embedding of what is there than to those of other colours."""
    config = tiny_config()
    weights, words = tower_weights(config), tower_words(config)
    lesson = TowerLesson(
        config.spec(), TowerConfig(steps=240, batch=24, muon_lr=1e-2, warmup_steps=5), 1, weights, words,
        single_context().dp,
    )  # fmt: skip

    def share_right() -> float:
        batch = draw_batch(config.spec(), lesson.processor, 5, 0, range(64))
        with torch.no_grad():
            features = lesson.model.encode_images(batch.pixels, batch.grids)[batch.place_rows]
        colours = batch.places[..., 1]
        return ((features @ words[1].T).argmax(-1) == colours - 1)[colours > 0].float().mean().item()

    untaught = share_right()
    for step in range(240):
        lesson.step(step)
    assert untaught < 0.25
    assert share_right() > 0.5


@pytest.fixture(scope="module")
def taught_on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("lesson") / "one"
    give_tokenizer(out)
    return step_tasks.taught_tower(with_tower(), Layout(), out)


@pytest.mark.ranks
@pytest.mark.parametrize("text", ["dp2", "pp2", "pp2xdp2"])
def test_replicas_and_stages_end_a_lesson_with_the_tower_of_one_rank(
    text: str, taught_on_one_rank: dict[str, Tensor], tmp_path: Path
) -> None:
    layout, config, expected = Layout.parse(text), with_tower(), taught_on_one_rank
    give_tokenizer(tmp_path / "many")
    found = shared_ranks().run(step_tasks.taught_tower, config, layout, tmp_path / "many", world_size=layout.world_size)
    initial = tower_weights(config)
    for rank, weights in enumerate(found):
        assert bool(weights) == (layout.coords(rank).pp == 0)
        for name, value in weights.items():
            moved = (expected[name] - initial[name]).abs().max()
            assert moved > 1e-3, f"{name} was not taught"
            # Muon makes updates of unit size in bfloat16, also from gradients that are all but noise.
            # Replicas that kept their own gradients would differ by as much as they moved.
            assert (value - expected[name]).abs().max() < 0.25 * moved, f"rank {rank}: {name}"


def test_the_lesson_stands_in_the_metrics_at_its_step(tmp_path: Path) -> None:
    give_tokenizer(tmp_path)
    step_tasks.run_to_the_end(with_tower(at_step=2), Layout(), tmp_path)
    kinds = [(record["kind"], record["step"]) for record in read_metrics(tmp_path / "metrics.jsonl")]
    lesson = kinds.index(("tower", 2))
    assert kinds[lesson - 1] == ("step", 1)
    assert kinds[lesson + 2] == ("step", 2), "first and last batch of the lesson, then the step"


@pytest.mark.parametrize("learns_on", [False, True])
def test_a_tower_stays_as_taught_unless_it_learns_on(learns_on: bool, tmp_path: Path) -> None:
    """Neither gradients nor weight decay nor left-over momentum move it; the rest of the model moves all the same."""
    config = with_tower(at_step=0)
    config = dataclasses.replace(config, tower=dataclasses.replace(config.tower, learns_on=learns_on))
    for out in (tmp_path / "taught", tmp_path / "trained"):
        give_tokenizer(out)
    taught = step_tasks.taught_tower(config, Layout(), tmp_path / "taught")
    trained = step_tasks.taught_tower(config, Layout(), tmp_path / "trained", further_steps=2)
    assert {torch.equal(taught[name], trained[name]) for name in taught} == {not learns_on}


@pytest.mark.parametrize(
    ("tower", "layout"),
    [
        ({"at_step": 6, "steps": 1}, "tp1"),
        ({"steps": -1}, "tp1"),
        ({"steps": 1, "batch": 3}, "dp2"),
        ({"steps": 1}, "tp2"),
    ],
)
def test_a_lesson_that_cannot_be_given_is_refused(tower: dict[str, int], layout: str) -> None:
    with pytest.raises(ConfigError, match="tower"):
        dataclasses.replace(tiny_config(layout=layout), tower=TowerConfig(**tower))
