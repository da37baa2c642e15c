"""Answers as the OpenAI interface spells them: whole objects, chunks of a stream, log probabilities, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.serving.generation import TokenEvent
from workbench.serving.http.live import Choice
from workbench.serving.inputs import Tokenizer
from workbench.serving.pieces import Piece

__all__ = ["ChatForm", "CompletionForm", "ReplyForm", "Written"]

Json = dict[str, Any]


@dataclass(slots=True)
class Written:
    """What a choice has said so far."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            (self.text if piece.channel == "response" else self.thinking).append(piece.text)
            self.tokens += piece.tokens


class ReplyForm(Protocol):
    """How one kind of request is answered."""

    def opening(self, choice: Choice) -> list[Json]:
        """Chunks before the first piece of a choice."""

    def delta(self, choice: Choice, piece: Piece) -> Json:
        """A chunk with new text."""

    def closing(self, choice: Choice) -> Json:
        """The last chunk of a choice."""

    def usage(self, choices: Sequence[Choice]) -> Json:
        """A chunk without choices, after all others."""

    def whole(self, choices: Sequence[Choice], written: Sequence[Written]) -> Json:
        """Everything in one object."""


@dataclass(frozen=True, kw_only=True)
class _Form:
    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    prompt_tokens: int
    image_tokens: int
    choices_per_prompt: int = 1
    with_logprobs: bool = False
    with_usage: bool = False

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, kind: str, choice: Json) -> Json:
        # With usage asked for, every chunk has the field, and all but the last have null in it.
        return {**self._head(kind), "choices": [choice], **({"usage": None} if self.with_usage else {})}

    def _usage(self, choices: Sequence[Choice]) -> Json:
        completion = sum(choice.num_tokens for choice in choices)
        drafted, accepted = (sum(c.num_drafted for c in choices), sum(c.num_accepted for c in choices))
        predictions = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {
                "image_tokens": self.image_tokens,
                "cached_tokens": sum(choice.num_cached for choice in choices) // self.choices_per_prompt,
            },
            **({"completion_tokens_details": predictions} if drafted else {}),
        }

    def _spelled(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id, show_markers=True).decode("utf-8", "replace")


def _reason(choice: Choice) -> str:
    return "length" if choice.finish_reason == "length" else "stop"


class ChatForm(_Form):
    """Chat completions. What the model thought comes as `reasoning_content`, as from the model's own service."""

    def opening(self, choice: Choice) -> list[Json]:
        return [self._delta(choice, {"role": "assistant", "content": ""})]

    def delta(self, choice: Choice, piece: Piece) -> Json:
        name = "content" if piece.channel == "response" else "reasoning_content"
        return self._delta(choice, {name: piece.text}, piece.tokens)

    def closing(self, choice: Choice) -> Json:
        chunk = self._delta(choice, {})
        chunk["choices"][0]["finish_reason"] = _reason(choice)
        return chunk

    def usage(self, choices: Sequence[Choice]) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage(choices)}

    def whole(self, choices: Sequence[Choice], written: Sequence[Written]) -> Json:
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {
                        "role": "assistant",
                        "content": "".join(said.text),
                        "refusal": None,
                        **({"reasoning_content": "".join(said.thinking)} if said.thinking else {}),
                    },
                    "logprobs": self._logprobs(said.tokens),
                    "finish_reason": _reason(choice),
                }
                for choice, said in zip(choices, written, strict=True)
            ],
            "usage": self._usage(choices),
        }

    def _delta(self, choice: Choice, delta: Json, tokens: Sequence[TokenEvent] = ()) -> Json:
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": None,
        }
        return self._chunk("chat.completion.chunk", entry)

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> Json | None:
        if not self.with_logprobs:
            return None
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self.tokenizer.token_bytes(token_id, show_markers=True)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class CompletionForm(_Form):
    """Completions of plain text. Stop strings and markers are left out of the text, as in chats."""

    def opening(self, choice: Choice) -> list[Json]:
        return []

    def delta(self, choice: Choice, piece: Piece) -> Json:
        return self._chunk("text_completion", self._choice(choice.index, piece.text, piece.tokens, None))

    def closing(self, choice: Choice) -> Json:
        return self._chunk("text_completion", self._choice(choice.index, "", (), _reason(choice)))

    def usage(self, choices: Sequence[Choice]) -> Json:
        return {**self._head("text_completion"), "choices": [], "usage": self._usage(choices)}

    def whole(self, choices: Sequence[Choice], written: Sequence[Written]) -> Json:
        return {
            **self._head("text_completion"),
            "choices": [
                self._choice(choice.index, "".join(said.text), said.tokens, _reason(choice))
                for choice, said in zip(choices, written, strict=True)
            ],
            "usage": self._usage(choices),
        }

    def _choice(self, index: int, text: str, tokens: Sequence[TokenEvent], reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> Json | None:
        if not self.with_logprobs:
            return None
        return {
            "tokens": [self._spelled(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._spelled(id_): logprob for id_, logprob in token.top} for token in tokens],
        }
