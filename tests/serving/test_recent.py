"""Waits of the last minutes: what is older is gone, and a full record says how far back it reaches."""

from __future__ import annotations

from serving_fakes import EchoRunner

from workbench.serving.engine import Engine
from workbench.serving.recent import RecentWaits
from workbench.serving.requests import GenerationRequest, SamplingParams


def test_what_is_older_than_the_window_is_forgotten() -> None:
    waits = RecentWaits(window_s=10.0, most=100)
    for now in range(15):
        waits.first(float(now), now / 10)
        waits.gap(float(now), now / 100)
    times = waits.times(14.0)
    assert times.first_token_s == tuple(n / 10 for n in range(4, 15))
    assert times.token_gap_s == tuple(n / 100 for n in range(4, 15))
    assert times.window_s == 10.0
    assert waits.times(100.0).first_token_s == ()


def test_a_full_record_says_how_far_back_it_reaches() -> None:
    waits = RecentWaits(window_s=100.0, most=3)
    for now in range(8):
        waits.gap(float(now), 1.0)
    times = waits.times(8.0)
    assert (len(times.token_gap_s), times.window_s) == (3, 3.0)


def test_the_engine_takes_down_first_tokens_gaps_and_counts() -> None:
    now = [0.0]

    def gate() -> None:
        now[0] += 0.5

    engine = Engine(
        EchoRunner(num_slots=1, gate=gate), step_tokens=4, clock=lambda: now[0], prefix_pages=4, page_tokens=4
    )
    for _ in range(2):
        generation = engine.submit(
            GenerationRequest(token_ids=(1, 2, 3, 4, 5, 6), sampling=SamplingParams(max_tokens=3))
        )
        while engine.step_once():
            pass
        assert len(list(generation)) == 3
    recent, stats = engine.recent(), engine.stats()
    assert recent.first_token_s == (1.0, 0.5), "two steps to read six tokens; one where four were kept"
    assert recent.token_gap_s == (0.5, 0.5) * 2
    assert (stats.num_generated, stats.num_prompt_tokens, stats.num_cached_tokens) == (6, 12, 4)
