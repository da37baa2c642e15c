"""A run killed at random moments ends with the same bytes as one that was never touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import give_tokenizer, write_recipe

from workbench.base import CheckpointError, ConfigError
from workbench.parallel import Group
from workbench.training.checkpointing import find_states, load_rank_state, newest_state, save_state
from workbench.training.launch import train
from workbench.training.metrics import read_metrics

STEPS = 8


def start(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    """A training run in processes of its own, as the command line starts it."""
    code = f"from workbench.training.launch import train; train({str(recipe)!r}, {str(out)!r}, resume=True)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (out / "log.txt").open("ab")
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)


def final_state(out: Path, rank: int = 0) -> dict[str, object]:
    state = find_states(out / "states")[0]
    assert state.step == STEPS
    return load_rank_state(state, rank)


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and left.keys() == right.keys() and all(same(v, right[k]) for k, v in left.items())
        )
    return left == right


def wait_for_step(out: Path, process: subprocess.Popen[bytes], step: int) -> None:
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up and process.poll() is None:
        if any(record["step"] >= step for record in read_metrics(out / "metrics.jsonl", "step")):
            return
        time.sleep(0.02)
    raise AssertionError((out / "log.txt").read_text(errors="replace")[-3000:])


def check_equal(whole: Path, killed: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        assert same(final_state(killed, rank), final_state(whole, rank)), f"rank {rank}"
    records = [read_metrics(out / "metrics.jsonl", "step") for out in (whole, killed)]
    assert [r["step"] for r in records[1]] == list(range(STEPS)), "every step stands in the metrics once"
    assert [r["loss"] for r in records[1]] == [r["loss"] for r in records[0]]
    weights = sorted(path.name for path in (whole / "model").glob("*.safetensors"))
    assert weights
    for name in weights:
        assert (whole / "model" / name).read_bytes() == (killed / "model" / name).read_bytes(), name


def test_killed_three_times_and_resumed_the_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS, muon_lr=1e-3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        give_tokenizer(out)
    train(recipe, whole)
    rng = random.Random(3)
    for step in (0, 3, 5):  # then at any moment of the step or of the save that follows
        process = start(recipe, killed)
        wait_for_step(killed, process, step)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.wait()
    assert start(recipe, killed).wait(timeout=240) == 0, (killed / "log.txt").read_text()[-3000:]
    check_equal(whole, killed, 1)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_replicas_survive_the_loss_of_their_parent_and_of_one_of_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS, layout="dp2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        give_tokenizer(out)
    train(recipe, whole)

    process = start(recipe, killed)
    wait_for_step(killed, process, 2)
    process.kill()  # its ranks must notice by themselves: the next run waits for them to be gone
    process.wait()
    process = start(recipe, killed)
    wait_for_step(killed, process, 5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    assert "rank 1 of the training run ended early (exit code -9)" in (killed / "log.txt").read_text()
    train(recipe, killed, resume=True)
    check_equal(whole, killed, 2)


def test_another_recipe_or_layout_does_not_go_on_from_a_state(tmp_path: Path) -> None:
    out = tmp_path / "out"
    give_tokenizer(out)
    train(write_recipe(tmp_path, steps=3), out)
    with pytest.raises(CheckpointError, match="holds a run"):
        train(write_recipe(tmp_path, steps=3), out)
    with pytest.raises(CheckpointError, match=r"steps: 3 there, 4 here"):
        train(write_recipe(tmp_path, steps=4), out, resume=True)
    with pytest.raises(CheckpointError, match="another layout"):
        train(write_recipe(tmp_path, steps=3, layout="tp2"), out, resume=True)
    report = train(write_recipe(tmp_path, steps=3), out, resume=True)  # nothing left to do
    assert report.steps == 3


def save(states: Path, step: int, value: float = 1.0) -> None:
    world = Group("world")
    content = {"values": torch.full((1000,), value), "step": step}
    save_state(states, step=step, rank=0, world=world, layout="tp1", essence="{}", content=content)


def test_the_last_two_states_are_kept_and_left_overs_removed(tmp_path: Path) -> None:
    (tmp_path / "writing-00000003").mkdir(parents=True)
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]
    assert [state.step for state in find_states(tmp_path)] == [15, 10]


@pytest.mark.parametrize("damage", ["truncated", "one bit", "file missing", "manifest missing", "manifest torn"])
def test_a_damaged_state_is_passed_over_for_the_one_before(damage: str, tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step, value=float(step))
    folder = tmp_path / "step-00000010"
    data = (folder / "rank-0.pt").read_bytes()
    if damage == "truncated":
        (folder / "rank-0.pt").write_bytes(data[:-100])
    elif damage == "one bit":
        (folder / "rank-0.pt").write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    elif damage == "file missing":
        (folder / "rank-0.pt").unlink()
    elif damage == "manifest missing":
        (folder / "state.json").unlink()
    else:
        (folder / "state.json").write_text((folder / "state.json").read_text()[:40])
    state = newest_state(tmp_path, essence="{}", layout="tp1")
    assert state is not None
    assert state.step == 5
    assert load_rank_state(state, 0)["values"][0] == 5.0


def test_a_state_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = tmp_path / "step-00000005" / "rank-0.pt"
    torch.save({"values": Path("/")}, path)  # any object beyond tensors and plain values
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_rank_state(find_states(tmp_path)[0], 0)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.training import launch

    monkeypatch.setattr(launch, "LOCK_WAIT_S", 0.3)
    out = tmp_path / "out"
    with launch._only_writer(out), pytest.raises(CheckpointError, match="another run"):
        train(write_recipe(tmp_path), out)


def test_a_recipe_file_that_is_no_recipe_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = 3")
    with pytest.raises(ConfigError):
        train(tmp_path / "bad.toml", tmp_path / "out")
    assert not (tmp_path / "out").exists()
