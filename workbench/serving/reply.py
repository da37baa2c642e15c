"""One answer on its way: generated ids become text, stop strings end it, times are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

from workbench.base import RequestError, printable_lines
from workbench.serving.generation import Generation, TokenEvent
from workbench.serving.pieces import AnswerPieces, Piece
from workbench.serving.sequence import FinishReason

__all__ = ["Answer", "Reply", "Timings", "Usage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts. Image tokens are part of the prompt tokens; a stop token counts as generated.

    `drafted_tokens` were guessed ahead of the model, and `accepted_tokens` of them held.
    """

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds since the request was submitted; `token_s` has the moment of every token."""

    queued_s: float
    token_s: tuple[float, ...]
    total_s: float

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token; None where there was none."""
        return self.token_s[0] if self.token_s else None

    @property
    def per_token_s(self) -> float | None:
        """Mean time from one token to the next, after the first; None below two tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1) if len(self.token_s) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished answer: `text` is what the model said, `thinking` what it thought before, where it was asked to.

    `finish_reason`: "stop" at an end token or stop string, "length" at max_tokens, "abort" where the caller gave up.
    `token_ids` are all generated ids but the end token, structure among them; `logprobs` belong to them one by one.
    """

    text: str
    thinking: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings

    def __str__(self) -> str:
        return self.text

    def render(self) -> str:
        """What it thought, where it did, the text, and a line of counts and times."""
        first, rest = self.timings.first_token_s, self.timings.per_token_s
        times = [f"first token after {first:.3f} s"] if first is not None else []
        times += [f"then {rest:.4f} s per token"] if rest is not None else []
        counts = (
            f"{self.usage.prompt_tokens} prompt tokens, {self.usage.completion_tokens} generated, {self.finish_reason}"
        )
        thought = f"({printable_lines(self.thinking)})\n\n" if self.thinking else ""
        return f"{thought}{printable_lines(self.text)}\n\n{'; '.join([counts, *times])}"

    def to_json(self) -> dict[str, object]:
        return {
            "text": self.text,
            "thinking": self.thinking,
            "token_ids": list(self.token_ids),
            "logprobs": list(self.logprobs),
            "finish_reason": self.finish_reason,
            "usage": asdict(self.usage),
            "timings": {
                "queued_s": self.timings.queued_s,
                "first_token_s": self.timings.first_token_s,
                "per_token_s": self.timings.per_token_s,
                "total_s": self.timings.total_s,
            },
        }


class Reply:
    """Text of one answer as it comes: iterate for the deltas, then read `answer`; or `result()` for all at once.

    `close()`, leaving a `with` block, or dropping the object before the end aborts the request and frees its slot.
    """

    def __init__(
        self,
        generation: Generation,
        pieces: AnswerPieces,
        *,
        prompt_tokens: int,
        image_tokens: int = 0,
    ) -> None:
        self.answer: Answer | None = None
        self._generation = generation
        self._pieces = pieces
        self._prompt_tokens, self._image_tokens = prompt_tokens, image_tokens
        self._events: list[TokenEvent] = []
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._deltas = self._run()

    def __iter__(self) -> Iterator[str]:
        """Pieces of the answer's text, none empty. Raises the engine's error where the request failed."""
        return self._deltas

    def __next__(self) -> str:
        return next(self._deltas)

    @property
    def submitted_s(self) -> float:
        """When it was queued, on the engine's clock; the answer's timings count from here."""
        return self._generation.submitted_s

    def result(self) -> Answer:
        """Wait for the end. Raises the engine's error where the request failed."""
        try:
            for _ in self._deltas:
                pass
        except BaseException:  # also an interrupted notebook cell must free the slot
            self.close()
            raise
        if self.answer is None:
            raise RequestError("an interrupt has ended this reply before its answer was whole")
        return self.answer

    @property
    def thinking(self) -> str:
        """What the model has thought so far."""
        return "".join(self._thinking)

    def close(self) -> None:
        """Stop the request, from any thread; whoever reads it sees it end. Harmless after the end."""
        self._generation.abort()

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self.answer is None:
            self.close()

    def _run(self) -> Iterator[str]:
        for event in self._generation:
            self._events.append(event)
            if shown := self._shown(self._pieces.push(event)):
                yield shown
            if self._pieces.is_stopped:
                self.close()
                break
        if not self._pieces.is_stopped and (rest := self._shown(self._pieces.flush())):
            yield rest
        self.answer = self._finished()

    def _shown(self, pieces: Sequence[Piece]) -> str:
        self._thinking += [piece.text for piece in pieces if piece.channel == "thinking"]
        shown = "".join(piece.text for piece in pieces if piece.channel == "response")
        self._text.append(shown)
        return shown

    def _finished(self) -> Answer:
        start, finish = self._generation.submitted_s, self._generation.finish
        times = [event.time_s - start for event in self._events]
        # After a stop string the engine's own end of the request is of no interest: the answer ended with its token.
        total_s = finish.time_s - start if finish is not None else times[-1]
        admitted_s = self._generation.admitted_s
        return Answer(
            text="".join(self._text),
            thinking="".join(self._thinking),
            token_ids=tuple(event.token_id for event in self._events),
            logprobs=tuple(event.logprob for event in self._events),
            finish_reason="stop" if finish is None else finish.reason,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                image_tokens=self._image_tokens,
                completion_tokens=finish.num_tokens if finish is not None else len(self._events),
                drafted_tokens=self._generation.num_drafted,
                accepted_tokens=self._generation.num_accepted,
            ),
            timings=Timings(
                queued_s=admitted_s - start if admitted_s is not None else total_s,
                token_s=tuple(times),
                total_s=total_s,
            ),
        )
