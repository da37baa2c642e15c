"""The users of a soak: each asks its own questions again and again, gives some up half way, and judges every answer."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from workbench.base import DeploymentError, QueueFullError, WorkbenchError
from workbench.profiling.soak.questions import SoakQuestion, SoakSettings, body_of, foreign_secrets
from workbench.serving.client import RemoteReply, RemoteService

__all__ = ["Ledger", "User"]

MAX_FAULTS = 20
FIELDS = {"ignore_eos": True, "logprobs": True}
PAUSE_S = 0.2  # before somebody who was turned away knocks again


@dataclass(eq=False)
class Ledger:
    """What all users saw together. `killed_s` and `back_s` are when a rank was killed, and when the first answer to a
    question asked after that was whole and right."""

    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    max_gap: float = 0.0  # of a log probability from the same alone, nats
    killed_s: float | None = None
    back_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(
        self,
        question: SoakQuestion,
        text: str,
        logprobs: Sequence[float] = (),
        *,
        is_whole: bool,
        tolerance: float = 2e-3,
    ) -> bool:
        """Take down one answer, or as much of it as came; whether it is right."""
        foreign = foreign_secrets(text, question.secret)
        is_right = text == question.expected if is_whole else question.expected.startswith(text)
        gaps = [abs(found - alone) for found, alone in zip(logprobs, question.logprobs, strict=False)]
        gap = math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)
        with self._lock:
            self.counts["answers compared" if is_whole else "parts of answers compared"] += 1
            self.counts["log probabilities compared"] += len(gaps)
            self.max_gap = max(self.max_gap, gap)
            if foreign:
                self._note(self.leaks, "answers with another's secret", f"{question.secret} was told {foreign[0]}")
            if not is_right:
                words = f"{question.kind} {question.secret}: {text[:80]!r}, alone {question.expected[:80]!r}"
                self._note(self.wrong, "wrong answers", words)
            elif gap > tolerance:
                words = f"{question.kind} {question.secret}: log probabilities up to {gap:.1e} from those alone"
                self._note(self.wrong, "wrong answers", words)
        return is_right and not foreign and gap <= tolerance

    def answered(self, kind: str, asked_s: float, *, is_right: bool) -> None:
        with self._lock:
            self.kinds[kind] += 1
            if is_right and self.back_s is None and self.killed_s is not None and asked_s >= self.killed_s:
                self.back_s = self.clock()

    def failed(self, error: WorkbenchError, asked_s: float) -> None:
        """A request that ended in an error: expected of those that a killed rank took with it, of no others."""
        with self._lock:
            killed, back = self.killed_s, self.back_s
            if isinstance(error, DeploymentError) and killed is not None and (back is None or asked_s < back):
                self.counts["clear errors while ranks were replaced"] += 1
            else:
                self._note(self.failures, "failed requests", f"{type(error).__name__}: {error}"[:300])

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _note(self, faults: list[str], name: str, words: str) -> None:
        self.counts[name] += 1
        if len(faults) < MAX_FAULTS:
            faults.append(words)


class User:
    """One stream. `run` asks until `until_s` on the clock of its `ledger`, `once` each question a single time."""

    def __init__(
        self,
        number: int,
        questions: Sequence[SoakQuestion],
        service: RemoteService,
        settings: SoakSettings,
    ) -> None:
        assert questions, number
        self.questions, self.service, self.settings, self.ledger = questions, service, settings, Ledger()
        self._rng = random.Random(f"{settings.seed} user {number}")

    def once(self) -> None:
        for question in self.questions:
            self._ask(question)

    def run(self, until_s: float) -> None:
        while not self._is_over(until_s):
            question, chance = self._rng.choice(self.questions), self._rng.random()
            if chance < self.settings.disconnect_share:
                self._disconnect(question)
            elif chance < self.settings.disconnect_share + self.settings.cancel_share:
                self._ask(question, give_up_after=self._rng.randint(0, max(1, question.max_tokens // 2)))
            else:
                self._ask(question)

    def _is_over(self, until_s: float) -> bool:
        now, killed_s = self.ledger.clock(), self.ledger.killed_s
        is_out = killed_s is not None and self.ledger.back_s is None and now < killed_s + self.settings.patience_s
        return now >= until_s and not is_out

    def _ask(self, question: SoakQuestion, *, give_up_after: int | None = None) -> None:
        asked_s = self.ledger.clock()
        pieces: list[str] = []
        reply: RemoteReply | None = None
        try:
            reply = self.service.stream(question.text, question.images, max_tokens=question.max_tokens, fields=FIELDS)
            if give_up_after != 0:
                for piece in reply:
                    pieces.append(piece)
                    if len(pieces) == give_up_after:
                        break
        except QueueFullError:
            self.ledger.count("turned away, and asked again")
            time.sleep(PAUSE_S)
            return
        except WorkbenchError as error:
            self._judge(question, pieces, reply, is_whole=False)
            self.ledger.failed(error, asked_s)
            time.sleep(PAUSE_S)
            return
        finally:
            if reply is not None:
                reply.close()
        if reply.answer is None:
            self.ledger.count("cancelled")
            self._judge(question, pieces, reply, is_whole=False)
            return
        is_right = self._judge(question, pieces, reply, is_whole=True)
        self.ledger.answered(question.kind, asked_s, is_right=is_right)

    def _judge(
        self, question: SoakQuestion, pieces: Sequence[str], reply: RemoteReply | None, *, is_whole: bool
    ) -> bool:
        if reply is None or not (pieces or is_whole):
            return True  # nothing came
        return self.ledger.judge(
            question, "".join(pieces), reply.logprobs, is_whole=is_whole, tolerance=self.settings.tolerance
        )

    def _disconnect(self, question: SoakQuestion) -> None:
        """Vanish without a word: in the middle of the request, or with the answer under way."""
        body = body_of(question, self.service.model, stream=True)
        parts = urlsplit(self.service.url)
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sent = body if self._rng.random() < 0.6 else body[: self._rng.randrange(len(body))]
        assert parts.hostname is not None
        address = (parts.hostname, parts.port or 80)
        with (
            contextlib.suppress(OSError),  # a server that is being replaced may hang up first
            socket.create_connection(address, timeout=self.settings.timeout_s) as wire,
        ):
            wire.sendall(head.encode() + sent)
            if sent is body and self._rng.random() < 0.5:
                wire.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    wire.recv(1)
            # A reset instead of an orderly end, as of a machine that was switched off.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.ledger.count("disconnected")
