"""The flight recorder: who fell out of step, of which operation, told while the others still hang."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import flight_tasks as tasks
import pytest
import torch
from ranks import RankError, Ranks

from workbench.parallel import CollectiveLog, FlightEntry, FlightRecorder, Group, compare_flights, read_flights
from workbench.parallel.flight import NUM_ENTRIES, FlightFinding, save_flights

RANKS = (0, 1, 2)


def entry(place: int, step: int | None = None, *, name: str = "all_reduce", at: float = 100.0, **more) -> FlightEntry:
    fields = {"dtype": "float32", "group": "tp", "ranks": RANKS, **more}
    return FlightEntry(step=place if step is None else step, place=place, entered_s=at, name=name, **fields)


def test_ranks_in_step_are_left_alone() -> None:
    flights = {rank: [entry(place) for place in range(5)] for rank in RANKS}
    assert compare_flights(flights, now=1e6) is None
    assert compare_flights({}, now=1e6) is None
    flights[2].append(entry(5, at=99.0))
    assert compare_flights(flights, now=100.0, stall_s=5) is None, "the others may still come"


def test_c01_a_skipped_operation_is_seen_without_any_hang() -> None:
    """The rank that skipped goes on, and its next operation pairs with the one the others wait in."""
    whole = [entry(place) for place in range(9)]
    skipping = [entry(place, step=place if place < 6 else place + 1) for place in range(8)]
    finding = compare_flights({0: whole, 1: skipping, 2: whole}, now=100.0)
    assert finding is not None
    assert (finding.ranks, finding.step, finding.operation) == ((1,), 6, "all_reduce")
    assert finding.message == (
        "rank 1 skipped all_reduce of step 6 (operation 6 over tp ranks [0, 1, 2]): "
        "entered all_reduce of step 7 instead"
    )


def test_another_operation_or_dtype_is_named_for_the_fewest() -> None:
    odd = [entry(0), entry(1, name="broadcast")]
    finding = compare_flights({0: [entry(0), entry(1)], 1: odd, 2: [entry(0), entry(1)]}, now=100.0)
    assert finding is not None
    assert finding.ranks == (1,)
    assert "entered broadcast in float32 where others entered all_reduce of step 1" in finding.message
    wide = [entry(0), entry(1, dtype="bfloat16")]
    finding = compare_flights({0: wide, 1: [entry(0), entry(1)], 2: [entry(0), entry(1)]}, now=100.0)
    assert finding is not None
    assert finding.ranks == (0,)


def test_c04_a_rank_that_stays_away_is_named_after_the_stall() -> None:
    flights = {0: [entry(0), entry(1, at=100.0)], 1: [entry(0)], 2: [entry(0), entry(1, at=101.0)]}
    finding = compare_flights(flights, now=107.0, stall_s=5)
    assert finding is not None
    assert finding.ranks == (1,)
    assert finding.message.startswith("rank 1 did not enter all_reduce of step 1")
    assert finding.message.endswith("entered 7.0 s ago")


def test_groups_are_compared_by_themselves_and_messages_not_at_all() -> None:
    pair = {"group": "pp", "ranks": (0, 1)}
    flights = {
        0: [entry(0, name="send", **pair), entry(0)],
        1: [entry(0, name="receive", **pair), entry(0)],
        2: [entry(0)],
    }
    assert compare_flights(flights, now=1e6) is None


def test_c04_the_ring_keeps_the_newest_and_a_torn_file_what_it_holds(tmp_path: Path) -> None:
    log = CollectiveLog()
    heard = []
    log.listener = heard.append
    recorder = FlightRecorder(tmp_path / "rank0.flight", log)
    group = Group("tp", log=log)
    for step in range(NUM_ENTRIES + 7):
        recorder.step = step
        with log.record("all_reduce", group, torch.zeros(2)):
            pass
    assert len(heard) == NUM_ENTRIES + 7, "a listener that was there before still hears"
    (entries,) = read_flights({0: tmp_path / "rank0.flight"}).values()
    assert [x.step for x in entries] == list(range(7, NUM_ENTRIES + 7))
    data = (tmp_path / "rank0.flight").read_bytes()
    (tmp_path / "torn").write_bytes(data[: len(data) // 2])
    torn, none = read_flights({0: tmp_path / "torn", 1: tmp_path / "missing"}).values()
    assert 0 < len(torn) < len(entries)
    assert none == ()


def watch(
    folder: Path, found: list[tuple[float, FlightFinding]], ranks: Ranks, *, limit_s: float, stall_s: float
) -> None:
    """What a parent does: compares, and at the first finding saves the evidence and ends the ranks."""
    paths = {rank: folder / f"rank{rank}.flight" for rank in range(2)}
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not found:
        flights = read_flights(paths)
        finding = compare_flights(flights, stall_s=stall_s)
        if finding is not None:
            save_flights(folder / "evidence.json", flights, finding)
            found.append((time.time(), finding))
            ranks.kill()
            return
        time.sleep(0.1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "words"),
    [("skip", "skipped all_reduce of step 50"), pytest.param("leave", "did not enter", marks=pytest.mark.slow)],
)
def test_c01_c04_real_ranks_that_drift_are_named_with_step_and_operation_before_anything_is_ended(
    fault: str, words: str, tmp_path: Path
) -> None:
    """C01, C04: rank 1 leaves out one of 60 all-reduces; the rest pairs up wrongly until rank 0 hangs at the end."""
    found: list[tuple[float, FlightFinding]] = []
    ranks = Ranks(2, timeout_s=200)
    watcher = threading.Thread(target=watch, args=(tmp_path, found, ranks), kwargs={"limit_s": 60, "stall_s": 2.0})
    try:
        (tmp_path / "start").mkdir()
        ranks.run(tasks.steps_with_a_fault, str(tmp_path / "start"), "", -1, 1, world_size=2)  # slow, outside the watch
        watcher.start()
        with pytest.raises(RankError):
            ranks.run(tasks.steps_with_a_fault, str(tmp_path), fault, 50, 60, world_size=2, timeout_s=15)
        ended = time.time()
    finally:
        ranks.close()
        if watcher.is_alive():
            watcher.join(10)
    assert found, "nothing was found"
    seen, finding = found[0]
    assert seen < ended
    assert finding.ranks == (1,)
    assert finding.step == (50 if fault == "skip" else 51)
    assert finding.operation == "all_reduce"
    assert words in finding.message
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    assert evidence["finding"]["message"] == finding.message
    assert len(evidence["flights"]["0"]) > 50
