"""Latencies from time stamps, counted in tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.profiling import Percentiles, RequestTiming, append_records, read_records, summarise


def scripted(*arrivals: tuple[float, int], submitted: float = 100.0, label: str = "") -> RequestTiming:
    return RequestTiming(
        submitted_s=submitted, arrivals=tuple((submitted + t, n) for t, n in arrivals), num_prompt_tokens=9, label=label
    )


def test_chunks_of_one_three_none_and_five_tokens_are_counted_as_tokens() -> None:
    timing = scripted((0.5, 1), (0.75, 3), (1.0, 0), (1.5, 5))
    assert timing.num_tokens == 9
    assert timing.first_token_s == pytest.approx(0.5)
    assert timing.per_token_s == pytest.approx(1.0 / 8)  # not 1.0 / 3 arrivals
    assert timing.end_to_end_s == pytest.approx(1.5)


def test_arrivals_without_tokens_are_not_the_first_token_nor_the_last() -> None:
    timing = scripted((0.25, 0), (0.5, 2), (1.0, 1), (4.0, 0))
    assert timing.first_token_s == pytest.approx(0.5)
    assert timing.per_token_s == pytest.approx(0.5)
    assert timing.end_to_end_s == pytest.approx(4.0)


def test_figures_that_do_not_exist_are_none() -> None:
    silent, single = scripted(), scripted((0.5, 7))
    assert (silent.first_token_s, silent.per_token_s, silent.end_to_end_s) == (None, None, None)
    assert single.first_token_s == pytest.approx(0.5)
    assert single.per_token_s is None


def test_impossible_events_are_refused() -> None:
    with pytest.raises(ValueError, match="run backwards"):
        scripted((0.5, 1), (0.4, 1))
    with pytest.raises(ValueError, match="run backwards"):
        RequestTiming(submitted_s=3.0, arrivals=((2.0, 1),))
    with pytest.raises(ValueError, match="negative number"):
        scripted((0.5, -1))


def test_percentiles_are_values_that_were_seen() -> None:
    found = Percentiles.of([float(n) for n in range(200, 0, -1)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.low, found.high) == (100.0, 180.0, 198.0, 1.0, 200.0)
    assert found.mean == pytest.approx(100.5)
    few = Percentiles.of([3.0, 1.0])
    assert few is not None
    assert (few.p50, few.p90, few.p99) == (1.0, 3.0, 3.0)
    assert Percentiles.of([]) is None


def test_summary_adds_up_over_requests() -> None:
    timings = [scripted((0.5, 1), (1.5, 4)), scripted((1.0, 1), (3.0, 2), submitted=101.0), scripted(submitted=101.0)]
    summary = summarise(timings, conditions="2 ranks")
    assert (summary.num_requests, summary.num_tokens) == (3, 8)
    assert summary.first_token_s is not None
    assert summary.first_token_s.count == 2
    assert summary.tokens_per_s is not None
    assert summary.tokens_per_s.value == pytest.approx(8 / 4.0)  # 100 s to 104 s
    assert summary.tokens_per_s.source == "2 ranks"
    text = summary.render()
    assert "first token" in text
    assert "3 requests, 8 tokens, 2 tokens/s together; 2 ranks" in text
    assert "500 ms" in text


def test_summary_of_no_answers_has_no_figures() -> None:
    summary = summarise([scripted()])
    assert summary.first_token_s is None
    assert summary.tokens_per_s is None
    assert summarise([]).num_requests == 0
    json.dumps(summary.to_json(), allow_nan=False)


def test_records_append_with_their_environment_and_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "out" / "latency.jsonl"
    environment = {"device": "cpu", "commit": "abc", "date": "2026-11-29"}
    append_records(path, [scripted((0.5, 1), label="first")], environment)
    with path.open("a") as file:
        file.write('{"kind": "RequestTim')  # a writer that was killed
    append_records(path, [summarise([scripted((0.5, 1))])], environment)
    records = read_records(path)
    assert [record["kind"] for record in records] == ["RequestTiming", "LatencySummary"]
    assert records[0]["label"] == "first"
    assert all(record["environment"] == environment for record in records)


def test_a_number_without_circumstances_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs its environment"):
        append_records(tmp_path / "x.jsonl", [scripted((0.5, 1))], {})
    assert not (tmp_path / "x.jsonl").exists()
