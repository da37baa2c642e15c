"""Tokens of a stream from chunks that are not tokens."""

from __future__ import annotations

import pytest

from workbench.serving.chunks import StreamChunk, token_arrivals


def chunk(time_s: float, content: str = "", *, reasoning: str = "", total: int | None = None) -> StreamChunk:
    return StreamChunk(time_s=time_s, content=content, reasoning=reasoning, completion_tokens=total)


def letters(text: str) -> list[int]:
    """A tokenizer whose tokens are single characters."""
    return [len(text[: i + 1].encode()) for i in range(len(text))]


def pairs(text: str) -> list[int]:
    """A tokenizer whose tokens are pairs of ASCII characters, the last one perhaps alone."""
    return [min(i + 2, len(text)) for i in range(0, len(text), 2)]


def test_the_servers_own_running_count_is_taken_chunk_by_chunk() -> None:
    chunks = [
        chunk(1, total=0),
        chunk(2, "a", total=1),
        chunk(3, "bcd", total=4),
        chunk(4, total=4),
        chunk(5, "e", total=9),
    ]
    assert token_arrivals(chunks) == (((1, 0), (2, 1), (3, 3), (4, 0), (5, 5)), "running usage")
    assert token_arrivals(chunks, token_ends=letters)[1] == "running usage", "firmer than our own tokenizer"


def test_tokens_held_back_count_with_the_text_that_shows_them_and_the_end_token_at_the_end() -> None:
    chunks = [chunk(1, total=2), chunk(2, "<tool>", total=6), chunk(3, total=7)]
    assert token_arrivals(chunks) == (((1, 0), (2, 6), (3, 1)), "running usage")


def test_a_running_count_that_falls_or_is_missing_from_a_text_is_not_believed() -> None:
    falling = [chunk(1, "a", total=3), chunk(2, "b", total=2)]
    gappy = [chunk(1, "a", total=1), chunk(2, "b"), chunk(3, total=2)]
    for chunks in (falling, gappy):
        arrivals, counted_by = token_arrivals(chunks)
        assert counted_by == "spread total"
        assert [count for _, count in arrivals][:2] == [1, 1]


def test_a_tokenizer_counts_both_channels_and_a_token_where_its_last_byte_comes() -> None:
    chunks = [chunk(1), chunk(2, reasoning="abc"), chunk(3, reasoning="d"), chunk(4, "ef"), chunk(5, "gh"), chunk(6)]
    assert token_arrivals(chunks, token_ends=pairs) == (
        ((1, 0), (2, 1), (3, 1), (4, 1), (5, 1), (6, 0)),
        "tokenizer",
    )
    assert token_arrivals([chunk(1, "é"), chunk(2, "한국")], token_ends=letters)[0] == ((1, 1), (2, 2))


def test_what_the_server_counts_beyond_the_text_comes_at_the_end_and_a_smaller_total_is_spread() -> None:
    chunks = [chunk(1, "abcd"), chunk(2, "ef"), chunk(3, total=5)]
    assert token_arrivals(chunks, token_ends=pairs)[0] == ((1, 2), (2, 1), (3, 2))
    fewer = [chunk(1, "abcd"), chunk(2, "ef"), chunk(3, total=2)]
    arrivals, _ = token_arrivals(fewer, token_ends=pairs)
    assert [count for _, count in arrivals] == [1, 1, 0]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 50])
def test_a_total_alone_is_spread_by_bytes_and_the_first_text_is_a_token(total: int) -> None:
    chunks = [chunk(1), chunk(2, "a"), chunk(3, "b" * 30), chunk(4, "c" * 9), chunk(5, total=total)]
    arrivals, counted_by = token_arrivals(chunks)
    assert counted_by == "spread total"
    counts = [count for _, count in arrivals]
    assert sum(counts) == total
    assert counts[1] >= 1, "text that is there is a first token"
    assert counts[0] == counts[4] == 0
    assert min(counts) >= 0


def test_without_any_count_chunks_are_called_chunks() -> None:
    assert token_arrivals([chunk(1), chunk(2, "abc"), chunk(3)]) == (((1, 0), (2, 1), (3, 0)), "chunks")
    assert token_arrivals([]) == ((), "chunks")
    assert token_arrivals([chunk(1, total=4)]) == (((1, 4),), "spread total")
