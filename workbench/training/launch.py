"""`train`: a recipe into a trained, exported model; one process, or N ranks started and watched here.

out/recipe.json  tokenizer/  metrics.jsonl  states/  model/        model/ is the export, written last
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from workbench.base import CheckpointError, WorkerDiedError
from workbench.parallel import join_processes, make_context
from workbench.training.checkpointing import find_states, newest_state
from workbench.training.config import TrainConfig, read_config
from workbench.training.data.domain import read_facts
from workbench.training.data.tokenizer import corpus_lines, train_tokenizer, write_tokenizer
from workbench.training.export import export_run
from workbench.training.loop import METRICS, STATES, TOKENIZER, RankTrainer
from workbench.training.metrics import MetricsTail, OnRecord, read_metrics

__all__ = ["TrainReport", "main", "train"]

RECIPE, EXPORT = "recipe.toml", "model"
POLL_S, ORPHAN_POLL_S = 0.2, 0.5
LOCK_WAIT_S = 15.0  # ranks of a killed run end by themselves within a poll or two
LOG_TAIL = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a finished run left behind."""

    out: str
    model: str
    steps: int
    tokens: int
    samples: int
    train_s: float
    last_loss: float
    exam: dict[str, tuple[int, int]]

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def render(self) -> str:
        exam = "  ".join(f"{kind} {right}/{num}" for kind, (right, num) in self.exam.items()) or "none"
        return (
            f"{self.steps} steps, {self.tokens:,} tokens, {self.samples:,} samples in {self.train_s:,.0f} s of steps; "
            f"last loss {self.last_loss:.3f}\nheld-out exam: {exam}\nmodel: {self.model}"
        )


def train(
    recipe: Path | str, out: Path | str, *, resume: bool = False, on_record: OnRecord | None = None
) -> TrainReport:
    """Train a recipe into the folder `out` and export the result to `out/model`.

    With `resume` a run that was stopped or killed goes on from its last saved state, to the same weights as if it had
    never stopped (on the same layout and thread count), and an `out` without states begins anew; without it `out` must
    hold no run. `on_record` is shown every metrics record as it is written. Raises ConfigError or LayoutError for a
    recipe that makes no run, CheckpointError for a folder that belongs to another, WorkerDiedError where a rank ended
    early.
    """
    out = Path(out)
    path = Path(recipe)
    config = read_config(path)
    config.spec()
    with _only_writer(out) as lock:
        if not resume and find_states(out / STATES):
            raise CheckpointError(
                "the folder holds a run", where=out, next_step="Resume it, or choose another output folder"
            )
        newest_state(out / STATES, essence=config.essence, layout=str(config.run.layout))
        (out / RECIPE).write_bytes(path.read_bytes())
        _write_tokenizer(config, out)
        if config.run.layout.world_size == 1:
            _train_here(config, out, on_record)
        else:
            _train_on_ranks(config, out, lock, on_record)
        model = export_run(config, out, out / EXPORT)
    return _report(out, model)


def _train_here(config: TrainConfig, out: Path, on_record: OnRecord | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(config.run.threads)
    try:
        _train_rank(config, out, on_record)
    finally:
        torch.set_num_threads(before)


def _train_rank(config: TrainConfig, out: Path, on_record: OnRecord | None = None) -> None:
    ctx = make_context(config.run.layout)
    state = newest_state(out / STATES, essence=config.essence, layout=str(config.run.layout))
    try:
        RankTrainer(config, out, ctx, state=state, on_record=on_record).run()
    finally:
        ctx.close()


def _train_on_ranks(config: TrainConfig, out: Path, lock: int, on_record: OnRecord | None) -> None:
    """Start all ranks, wait for all; the first that fails ends the others."""
    world_size = config.run.layout.world_size
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-")))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(config.run.threads),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            log: IO[bytes] = stack.enter_context((out / f"rank-{rank}.log").open("wb"))
            command = [sys.executable, "-m", "workbench.training.launch", str(out), "--rank", str(rank)]
            command += ["--rendezvous", f"file://{folder / 'rendezvous'}", "--parent", str(os.getpid())]
            # The lock's descriptor goes along: while any rank of a killed run lives, nobody else may write here.
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=(lock,)))
        try:
            _wait(processes, out, on_record)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], out: Path, on_record: OnRecord | None) -> None:
    tail = MetricsTail(out / METRICS)
    while True:
        codes = [process.poll() for process in processes]
        if on_record is not None:
            for record in tail.new():
                on_record(record)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            rank = failed[0]
            lines = (out / f"rank-{rank}.log").read_text(errors="replace").splitlines()
            last_lines = "\n".join(lines[-LOG_TAIL:])
            raise WorkerDiedError(
                f"rank {rank} of the training run ended early (exit code {codes[rank]}); its last lines:\n{last_lines}",
                where=out,
                next_step="Resume the run: it goes on from its last saved state",
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


@contextmanager
def _only_writer(out: Path) -> Iterator[int]:
    """Hold the folder's lock, so that two runs never write into one folder; its open file, for those who share it."""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise CheckpointError("another run is writing into this folder", where=out) from None
                time.sleep(0.1)
        yield handle
    finally:
        os.close(handle)


def _write_tokenizer(config: TrainConfig, out: Path) -> None:
    """The tokenizer is a function of the facts and the vocabulary size; written whole or not at all."""
    folder = out / TOKENIZER
    if folder.is_dir():
        return
    fresh = out / f"{TOKENIZER}.new"
    fresh.mkdir(exist_ok=True)
    tokenizer = train_tokenizer(corpus_lines(read_facts()), config.sizes["vocab_size"])
    write_tokenizer(tokenizer, fresh)
    fresh.rename(folder)


def _report(out: Path, model: Path) -> TrainReport:
    steps, exams = read_metrics(out / METRICS, "step"), read_metrics(out / METRICS, "exam")
    return TrainReport(
        out=str(out),
        model=str(model),
        steps=len(steps),
        tokens=sum(record["tokens"] for record in steps),
        samples=sum(record["samples"] for record in steps),
        train_s=sum(record["seconds"] for record in steps),
        last_loss=steps[-1]["loss"],
        exam={kind: (right, num) for kind, (right, num) in exams[-1]["scores"].items()} if exams else {},
    )


def _watch_parent(parent: int) -> None:
    """End this rank when the process that started it is gone: a rank alone would wait for the others for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(argv: list[str] | None = None) -> None:
    """One rank of a run whose folder `train` has prepared."""
    parser = argparse.ArgumentParser(description="One rank of a training run.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="init method of the process group")
    parser.add_argument("--parent", type=int, required=True, help="process without which this one ends")
    args = parser.parse_args(argv)
    _watch_parent(args.parent)
    config = read_config(args.out / RECIPE)
    torch.set_num_threads(config.run.threads)
    join_processes(args.rank, config.run.layout.world_size, init_method=args.rendezvous)
    _train_rank(config, args.out)


if __name__ == "__main__":
    main()
