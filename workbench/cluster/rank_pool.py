"""Ranks that form one group, given one step at a time; a rank that hangs costs a time limit.

Nothing is ever waited for without a limit. When ranks of a step stay silent, the outcome says which ones, and how far
they had come, before anything is killed; the pool is broken then and a new one has to be started.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.cluster.rank_process import TAIL_CHARS, Rank

__all__ = ["RankPool", "StepOutcome"]

GRACE_S = 3.0  # what the others get once one rank has failed: most of them hang in its absence


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Answers by rank. `failure` is "" where every rank answered without an error; else who did what, in one line.
    `is_broken`: ranks are missing, and the pool cannot go on."""

    answers: Mapping[int, Mapping[str, Any]]
    failure: str = ""
    is_broken: bool = False


@dataclass(slots=True)
class _Heard:
    """What the ranks said of one step so far."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)


class RankPool:
    """Rank r is `ranks[r]` and runs on `devices[r]` (torch's name); they meet at `init_method`."""

    def __init__(self, ranks: Sequence[Rank], devices: Sequence[str], *, init_method: str, time_limit_s: float) -> None:
        assert len(ranks) == len(devices)
        self._ranks, self._devices = tuple(ranks), tuple(devices)
        self._init_method, self._time_limit_s = init_method, time_limit_s
        self._events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._num_steps = 0

    def start(self, *, join_limit_s: float) -> StepOutcome:
        """Start the ranks and form their group. Call once."""
        for number, (rank, device) in enumerate(zip(self._ranks, self._devices, strict=True)):
            who = {
                "rank": number,
                "world_size": len(self._ranks),
                "device": device,
                "init_method": self._init_method,
                "timeout_s": join_limit_s + 3 * self._time_limit_s,
            }
            rank.start(who, lambda event, number=number: self._events.put((number, event)))  # type: ignore[misc]
        return self._collect("joined", None, join_limit_s, "joining the group")

    def run(self, step: Mapping[str, Any], what: str) -> StepOutcome:
        """Give every rank a step and wait for all of them, for at most the time limit. `what` names it."""
        number, self._num_steps = self._num_steps, self._num_steps + 1
        for rank in self._ranks:
            rank.tell({**step, "step": number})
        return self._collect("done", number, self._time_limit_s, f"step {number}, {what}")

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.kill()

    def _collect(self, kind: str, number: int | None, limit_s: float, what: str) -> StepOutcome:
        heard = _Heard()
        deadline = time.monotonic() + limit_s
        while len(heard.answers) + len(heard.dead) < len(self._ranks):
            try:
                rank, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if event is None:
                heard.dead[rank] = self._ranks[rank].last_words()
            elif event.get("step") == number:
                if event["event"] == kind:
                    heard.answers[rank] = event
                elif event["event"] == "start":
                    heard.begun.add(rank)
                elif event["event"] == "enter":
                    heard.entered.add(rank)
            if heard.dead or any(answer.get("error") for answer in heard.answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return self._outcome(heard, limit_s, what)

    def _outcome(self, heard: _Heard, limit_s: float, what: str) -> StepOutcome:
        parts = [f"rank {rank} {words}" for rank, words in sorted(heard.dead.items())]
        errors: dict[str, list[int]] = {}
        for rank, answer in sorted(heard.answers.items()):
            if answer.get("error"):
                errors.setdefault(answer["error"].partition("\n")[0][:TAIL_CHARS], []).append(rank)
        parts += [f"{_names(ranks)}: {error}" for error, ranks in errors.items()]
        silent = [r for r in range(len(self._ranks)) if r not in heard.answers and r not in heard.dead]
        back = [rank for rank, answer in sorted(heard.answers.items()) if not answer.get("error")]
        after = "" if parts else f" within {limit_s:g} s"
        for state, ranks in (
            (f"did not answer{after}", [r for r in silent if r not in heard.begun]),
            (f"began and did not enter{after}", [r for r in silent if r in heard.begun and r not in heard.entered]),
            (f"entered and did not come back{after}", [r for r in silent if r in heard.entered]),
            ("came back", back if silent else []),
        ):
            if ranks:
                parts.append(f"{_names(ranks)} {state}")
        failure = f"{what}: {'; '.join(parts)}" if parts else ""
        return StepOutcome(answers=heard.answers, failure=failure, is_broken=bool(silent or heard.dead))


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}"
