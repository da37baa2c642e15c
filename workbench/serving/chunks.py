"""Tokens of a streamed answer from its chunks, which are not tokens: one may carry none, several, or text alone.

How they are counted, from firm to weak:

    running usage     the server says with each chunk how many tokens there are so far (`continuous_usage_stats`)
    tokenizer         the text is cut again; a token counts where its last byte arrives
    spread total      the server's total alone, spread over the chunks by their bytes: right in sum only
    chunks            nothing is known: one a chunk, which is no count of tokens

Reasoning is answered text like any other. Nothing here reads a clock.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.serving.inputs import Tokenizer

__all__ = ["CountedBy", "StreamChunk", "TokenEnds", "token_arrivals", "token_ends_of"]

CountedBy = Literal["ids", "running usage", "tokenizer", "spread total", "chunks"]
TokenEnds = Callable[[str], Sequence[int]]  # text -> where each of its tokens ends, in UTF-8 bytes, ascending
Arrivals = tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """One event of a stream. `completion_tokens` is the server's running total where it came with this chunk."""

    time_s: float
    content: str = ""
    reasoning: str = ""
    completion_tokens: int | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning)


def token_arrivals(chunks: Sequence[StreamChunk], *, token_ends: TokenEnds | None = None) -> tuple[Arrivals, CountedBy]:
    """(time, tokens) of every chunk, and how they were counted.

    A token arrives when its text does: tokens that a server announces with a chunk without text (held back by a parser)
    count with the next one that has some. What is announced after all text, such as the end token, counts there.
    """
    running = [chunk.completion_tokens for chunk in chunks]
    seen = [tokens for tokens in running if tokens is not None]
    is_running = any(chunk.has_text for chunk in chunks) and all(
        chunk.completion_tokens is not None for chunk in chunks if chunk.has_text
    )
    if is_running and all(later >= earlier for earlier, later in itertools.pairwise([0, *seen])):
        return _by_running_total(chunks), "running usage"
    total = seen[-1] if seen else None
    if token_ends is not None:
        return _arrivals(chunks, _fitted(_by_tokenizer(chunks, token_ends), total)), "tokenizer"
    if total is not None:
        sizes = [len(chunk.content.encode()) + len(chunk.reasoning.encode()) for chunk in chunks]
        return _arrivals(chunks, _spread(total, sizes)), "spread total"
    return _arrivals(chunks, [int(chunk.has_text) for chunk in chunks]), "chunks"


def token_ends_of(tokenizer: Tokenizer) -> TokenEnds:
    """How `tokenizer` cuts text."""
    return lambda text: list(itertools.accumulate(len(tokenizer.token_bytes(id_)) for id_ in tokenizer.encode(text)))


def _by_running_total(chunks: Sequence[StreamChunk]) -> Arrivals:
    last_text = max(idx for idx, chunk in enumerate(chunks) if chunk.has_text)
    counted, arrivals = 0, []
    for idx, chunk in enumerate(chunks):
        is_shown = chunk.has_text or idx > last_text
        new = chunk.completion_tokens - counted if is_shown and chunk.completion_tokens is not None else 0
        counted += new
        arrivals.append((chunk.time_s, new))
    return tuple(arrivals)


def _by_tokenizer(chunks: Sequence[StreamChunk], token_ends: TokenEnds) -> list[int]:
    counts = [0] * len(chunks)
    for channel in ("reasoning", "content"):
        texts = [getattr(chunk, channel) for chunk in chunks]
        ends = token_ends("".join(texts))
        read = counted = 0
        for idx, text in enumerate(texts):
            read += len(text.encode())
            complete = bisect.bisect_right(ends, read)
            counts[idx] += complete - counted
            counted = complete
    return counts


def _fitted(counts: list[int], total: int | None) -> list[int]:
    """Counts that add up to the server's total: what it counts beyond the text (structure, the end) comes at the end;
    where it counts fewer, text was cut otherwise than it was generated."""
    if total is None or not counts:
        return counts
    extra = total - sum(counts)
    if extra < 0:
        return _spread(total, counts)
    return [*counts[:-1], counts[-1] + extra]


def _spread(total: int, weights: Sequence[int]) -> list[int]:
    """`total` over the weights, by largest remainder; without any weight it all comes at the end."""
    whole = sum(weights)
    if not whole:
        return [*[0] * (len(weights) - 1), total] if weights else []
    counts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda idx: (-(total * weights[idx] % whole), idx))
    for idx in by_remainder[: total - sum(counts)]:
        counts[idx] += 1
    return counts


def _arrivals(chunks: Sequence[StreamChunk], counts: list[int]) -> Arrivals:
    first = next((idx for idx, chunk in enumerate(chunks) if chunk.has_text), None)
    if first is not None and not counts[first] and any(counts):
        # Rounding, or a token in pieces: text that is there is at least one token, taken from the next that has some.
        counts[next(idx for idx, count in enumerate(counts) if count)] -= 1
        counts[first] = 1
    return tuple((chunk.time_s, count) for chunk, count in zip(chunks, counts, strict=True))
