"""What to do next: for each gate that stands in the way, and where none does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.report import Gate, verdict_of

__all__ = ["ADVICE", "Run", "next_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What was accepted, and how: the words that commands are made of. `program` is what the reader has to type for
    "workbench": a path, where the command is not on the way of the shell."""

    checkpoint: str
    layout: str
    precision: str
    device: str
    out: str
    is_dummy: bool
    program: str = "workbench"

    def say(self, step: str) -> str:
        """`step` with its words filled in."""
        return step.format_map(self.words).replace("`workbench ", f"`{self.program} ")

    @property
    def words(self) -> dict[str, str]:
        checkpoint, precision, out = map(shlex.quote, (self.checkpoint, self.precision, self.out))
        return {
            "checkpoint": checkpoint,
            "layout": self.layout,
            "precision": precision,
            "device": self.device,
            "out": out,
            "deployed": f"{checkpoint} --layout {self.layout} --precision {precision}",
        }


# By gate: what finds out more, or mends it. Commands in backquotes can be run as they stand.
ADVICE: Mapping[str, str] = {
    "device.features": (
        "Update the driver, or the build of torch for {device}, until `workbench devices` shows every feature as right"
    ),
    "operators.coverage": (
        "`workbench operators {checkpoint} --layout {layout} --precision {precision} --device {device}` lists each "
        "operator with what came out; ask the vendor for those that are missing or wrong, or serve in a precision that "
        "does without"
    ),
    "checkpoint.audit": (
        "`workbench audit {checkpoint}` lists every finding; fetch the files that it names again, and audit them "
        "before anything is loaded"
    ),
    "loading.rows": "`workbench load {deployed}` shows the ledger; `workbench audit {checkpoint}` says what files lack",
    "loading.read_ratio": (
        "`workbench load {deployed}` shows how the bytes travelled; storage that answers in long reads only is read "
        "more than once (docs/loading.md)"
    ),
    "loading.memory": (
        "Run it again with nothing else on this host; where it stays, hold less on each rank: another layout "
        "(`workbench plan {checkpoint}`), or `workbench serve {deployed} --expert-memory 40GiB`"
    ),
    "parity.fp32": (
        "`workbench align {checkpoint} --layout {layout} --precision fp32` names the first guilty operator and the "
        "mistake that would explain it; do not serve before it is gone"
    ),
    "parity.fp32_tokens": (
        "Tensors are asked in one pass, these tokens one by one: look at the cache and its places, and run "
        "`workbench invariance {checkpoint} --layout {layout} --precision fp32`"
    ),
    "parity.batch": (
        "`workbench invariance {checkpoint} --layout {layout} --precision fp32` shows with which company answers change"
    ),
    "parity.serving": (
        "`workbench align {deployed}` names the first operator beyond its rounding; where fp32 is right, it is this "
        "precision: serve in bf16 until it is known"
    ),
    "answers.text": (
        '`workbench generate {deployed} "What is tensor parallelism?"` asks once more, alone; the reason beside the '
        "gate is the service's own"
    ),
    "answers.image": (
        '`workbench generate {deployed} "What is in the picture?" --image FILE` asks once more, alone; the reason '
        "beside the gate is that of the picture's path"
    ),
    "answers.looks": (
        "The picture does not reach the text: see whether parity holds for the prompt with a picture (the tower), then "
        "whether its rows replace the placeholders (the request's path)"
    ),
    "answers.correct": "`workbench exam {checkpoint}` asks every held-out question and shows each wrong answer",
    "answers.blank": (
        "Answers do not come from the picture: `workbench exam {checkpoint}` asks with blank and shuffled pictures"
    ),
    "serving.slots": ("`workbench soak {deployed}` shows under load when slots are lost"),
    "latency.first_token": (
        "`workbench profile {deployed} --operators` shows where the time of a step goes; a limit of your own is "
        "--max-first-token-s"
    ),
    "latency.per_token": (
        "`workbench profile {deployed} --operators` shows where the time of a step goes; a limit of your own is "
        "--max-per-token-s"
    ),
}
GOOD = (
    "Serve it: `workbench serve {deployed}` prints its address; `workbench profile ADDRESS/v1` says how fast it is",
    "Talk to it: `workbench chat {checkpoint}`",
    "See each gate fail once, so that its pass means something: `workbench day0 {deployed} --prove-gates`",
    "After any change, run this again into another folder and ask `workbench compare {out} OTHER` what changed",
)
AGAIN = "Then run it again into another folder: `workbench compare {out} OTHER` shows what is better and what is worse"
DUMMY = "These weights were never trained: run this again on the real ones, with the same layout and precision"


def next_steps(gates: Sequence[Gate], run: Run) -> tuple[str, ...]:
    """A step for each gate that failed, in the order of the gates; for gates without a value one step a reason, or one
    for all where others failed; at the end the way back. Where nothing stands in the way, what an accepted model is
    good for."""
    blocking = [gate for gate in gates if gate.blocks]
    if verdict_of(gates).passed:
        steps = [*([DUMMY] if run.is_dummy else []), *GOOD]
        return tuple(map(run.say, steps))
    failed = [gate for gate in blocking if gate.status == "fail"]
    steps = [f"{gate.id}: {ADVICE[gate.id]}" for gate in failed if gate.id in ADVICE]
    told = list(map(run.say, steps))
    reasons: dict[str, list[str]] = {}
    for gate in blocking:
        if gate.status == "not measured":
            reasons.setdefault(gate.evidence, []).append(gate.id)
    if failed and reasons:  # most often they have no value because of what failed
        silent = [gate_id for gate_ids in reasons.values() for gate_id in gate_ids]
        told.append(f"{_counted(silent)} without a value: mend the above first; {_short(next(iter(reasons)))}")
    elif reasons:
        told += [
            f"{_counted(gate_ids)} without a value: {_short(reason)}. {run.say(ADVICE.get(gate_ids[0], ''))}".rstrip()
            for reason, gate_ids in reasons.items()
        ]
    return (*told, run.say(AGAIN))


def _counted(gate_ids: Sequence[str]) -> str:
    return gate_ids[0] if len(gate_ids) == 1 else f"{gate_ids[0]} and {len(gate_ids) - 1} more gates"


def _short(reason: str, most: int = 160) -> str:
    line = " ".join(reason.replace("`", "'").split())  # a command that is cut would leave half of its quotes
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
