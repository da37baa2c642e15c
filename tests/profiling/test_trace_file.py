"""The trace file: what it holds, and that it stays within its budget."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from workbench.profiling import RequestTiming, write_trace
from workbench.profiling.clocks import ClockReading, ClockSample
from workbench.profiling.communication import CollectiveTime
from workbench.profiling.deployed import profile_of
from workbench.profiling.rank_profile import RankProfile
from workbench.profiling.steps import Span
from workbench.profiling.trace import write_spans


def rank_profile(rank: int, clock_s: float) -> RankProfile:
    collective = CollectiveTime(name="all_reduce", group="tp", ranks=(0, 1), place=0, num_bytes=64,
                                entered_s=clock_s + 1.0, left_s=clock_s + 1.5)  # fmt: skip
    return RankProfile(
        rank=rank, seconds=9.0, ledger=None, uses=(), collectives=(collective,), num_collectives_left_out=0,
        expert_counts={}, spans=((clock_s, Span("aten::mm", 0.25, 0.75, ((4, 8), (8, 2)))),), num_plain=2,
        plain_step_s=1.0, num_recorded=1, recorded_step_s=1.25,
    )  # fmt: skip


TIMINGS = [
    RequestTiming(submitted_s=70.0, sent_s=70.5, arrivals=((71.0, 1), (72.0, 4)), label="chat"),
    RequestTiming(submitted_s=70.25, arrivals=((70.5, 1), (71.0, 1)), label="chat"),
    RequestTiming(submitted_s=71.5, arrivals=(), error="QueueFullError: full"),
]


def read(path: Path) -> dict[str, Any]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    record: dict[str, Any] = json.loads(text)
    for event in record["traceEvents"]:  # what the format asks of every event
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
    return record


def test_ranks_lie_on_one_clock_and_requests_beside_them(tmp_path: Path) -> None:
    reading = (ClockReading(boot="a", shown_s=100.0), ClockReading(boot="b", shown_s=7100.0))
    samples = [ClockSample(asked_s=0.0, answered_s=0.001, readings=reading)]
    profile = profile_of([rank_profile(0, 100.0), rank_profile(1, 7100.0)], samples)
    assert profile.overhead == pytest.approx(0.25 / 3.0)
    file = write_trace(tmp_path / "t.json.gz", profile=profile, timings=TIMINGS)
    events = [event for event in read(file.path)["traceEvents"] if event["ph"] == "X"]
    products = [event for event in events if event["name"] == "aten::mm"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in products] == [
        (0, 250000.0, 500000.0),
        (1, 250000.0, 500000.0),
    ]
    assert products[0]["args"]["shapes"] == "[[4, 8], [8, 2]]"
    assert {event["ts"] for event in events if event["name"] == "all_reduce over tp"} == {1e6}
    requests = {event["name"]: event for event in events if event["pid"] > 1}
    assert requests["due, not sent yet"]["dur"] == 500000.0
    assert requests["until the first token"]["pid"] == requests["tokens"]["pid"]
    assert "request (failed)" in requests
    whole = [event for event in events if event["name"] == "chat"]
    assert len({event["tid"] for event in whole}) == 2, "two at once do not share a row"


def test_the_longest_events_stay_where_not_all_fit(tmp_path: Path) -> None:
    spans = [Span("long", 0.0, 1.0), *(Span(f"short {n}", 0.5, 0.5001) for n in range(500)), Span("longer", 2.0, 4.0)]
    file = write_spans(tmp_path / "t.json", [spans, [Span("next step", 10.0, 11.0)]], max_bytes=4096)
    assert file.path.stat().st_size <= 4096
    record = read(file.path)
    names = [event["name"] for event in record["traceEvents"] if event["ph"] == "X"]
    assert {"long", "longer", "next step"} <= set(names)
    assert file.num_left_out == 503 - len(names) > 400
    assert record["otherData"]["events left out (the shortest)"] == file.num_left_out
    later = next(event for event in record["traceEvents"] if event["name"] == "next step")
    assert later["ts"] == 4e6, "a step begins where the one before ended"
