"""Waiting told from transfer: exact on planted times, over skewed clocks, and with a rank that is really late."""

from __future__ import annotations

from typing import Any

import profile_tasks as tasks
import pytest
from ranks import shared_ranks

from workbench.profiling.clocks import ClockReading, ClockSample, compare_clocks
from workbench.profiling.communication import CollectiveTime, split_communication


def reduce_at(entered: float, left: float, **fields: Any) -> CollectiveTime:
    known = {"name": "all_reduce", "group": "tp", "ranks": (0, 1, 2), "place": 0, "num_bytes": 100}
    return CollectiveTime(**{**known, "entered_s": entered, "left_s": left, **fields})


LATE_TWO = {0: [reduce_at(1.0, 5.0)], 1: [reduce_at(2.0, 5.0)], 2: [reduce_at(4.0, 5.0)]}


def test_waiting_ends_when_the_last_rank_enters_and_is_its_doing() -> None:
    found = split_communication(LATE_TWO, seconds=10.0)
    assert [(x.rank, x.waiting_s, x.transfer_s, x.caused_s) for x in found.ranks] == [
        (0, 3.0, 1.0, 0.0),
        (1, 2.0, 1.0, 0.0),
        (2, 0.0, 1.0, 5.0),
    ]
    assert found.latest == 2
    assert found.share("waiting_s") == pytest.approx(5.0 / 3 / 10)
    assert found.share("transfer_s") == pytest.approx(0.1)
    (kind,) = found.operations
    assert (kind.count, kind.num_bytes, kind.waiting_s, kind.transfer_s) == (3, 300, 5.0, 3.0)
    assert "ranks waited for rank 2 most" in found.render()


def test_a_slow_link_is_transfer_and_nobodys_fault() -> None:
    found = split_communication({r: [reduce_at(1.0, 9.0)] for r in range(3)}, seconds=10.0)
    assert (found.share("waiting_s"), found.share("transfer_s"), found.latest) == (0.0, pytest.approx(0.8), None)


def test_clocks_are_compared_before_entries_are() -> None:
    skewed = {0: LATE_TWO[0], 1: [reduce_at(102.0, 105.0)], 2: [reduce_at(-6.0, -5.0)]}
    found = split_communication(skewed, seconds=10.0, offsets={1: 100.0, 2: -10.0})
    assert found.ranks == split_communication(LATE_TWO, seconds=10.0).ranks
    assert split_communication(skewed, seconds=10.0).latest == 1, "without it the wrong rank is blamed"


def test_waits_below_the_error_of_the_clocks_are_not_believed() -> None:
    found = split_communication(LATE_TWO, seconds=10.0, clock_error_s=2.5)
    assert [x.waiting_s for x in found.ranks] == [3.0, 0.0, 0.0]
    assert [x.transfer_s for x in found.ranks] == [1.0, 3.0, 1.0]


def test_a_barrier_before_the_operation_shows_waiting_without_any_clock() -> None:
    """The late rank waits 0.25 s itself: that is what a barrier costs, and is transfer."""
    times = {0: [reduce_at(50.0, 51.0, barrier_s=3.25)], 1: [reduce_at(7.0, 8.0, barrier_s=2.25)],
             2: [reduce_at(900.0, 901.0, barrier_s=0.25)]}  # fmt: skip
    found = split_communication(times, seconds=10.0)
    assert [(x.waiting_s, x.transfer_s) for x in found.ranks] == [(3.0, 1.25), (2.0, 1.25), (0.0, 1.25)]
    assert (found.latest, found.ranks[2].caused_s) == (2, 5.0)
    assert found.mode == "barrier before each operation"


def test_a_receive_waits_for_its_sender_and_a_send_does_not_wait() -> None:
    stages = (0, 1, 2)

    def message(name: str, entered: float, left: float) -> CollectiveTime:
        return reduce_at(entered, left, ranks=stages, name=name, group="pp")

    times = {0: [message("send", 4.0, 5.0)], 1: [message("receive", 1.0, 5.0), message("send", 6.0, 6.5)],
             2: [message("receive", 2.0, 6.5)]}  # fmt: skip
    found = split_communication(times, seconds=10.0)
    assert [(x.waiting_s, x.transfer_s, x.caused_s) for x in found.ranks] == [
        (0.0, 1.0, 3.0),
        (3.0, 1.5, 4.0),
        (4.0, 0.5, 0.0),
    ]
    assert found.num_unmatched == 0


def test_an_operation_that_some_rank_did_not_report_is_in_no_figure() -> None:
    times = {**LATE_TWO, 2: [*LATE_TWO[2], reduce_at(7.0, 8.0, place=1)]}
    found = split_communication(times, seconds=10.0)
    assert found.num_unmatched == 1
    assert found.ranks == split_communication(LATE_TWO, seconds=10.0).ranks


def test_offsets_of_clocks_come_from_the_quickest_round() -> None:
    def sample(asked: float, answered: float, *shown: tuple[str, float]) -> ClockSample:
        readings = tuple(ClockReading(boot=boot, shown_s=s) for boot, s in shown)
        return ClockSample(asked_s=asked, answered_s=answered, readings=readings)

    samples = [
        sample(0.0, 2.0, ("a", 501.0), ("a", 501.9), ("b", 9000.0)),
        sample(3.0, 3.25, ("a", 503.125), ("a", 503.0), ("b", 7003.0)),
    ]
    offsets, error = compare_clocks(samples)
    assert offsets == {0: 0.0, 1: 0.0, 2: 7003.0 - 503.125}
    assert error == 0.25
    assert compare_clocks([sample(0.0, 2.0, ("a", 501.0), ("a", 501.9))]) == ({0: 0.0, 1: 0.0}, 0.0)
    with pytest.raises(ValueError, match="no clock"):
        compare_clocks([])


@pytest.mark.ranks
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_is_really_late_is_named_and_the_others_waited(late: int) -> None:
    """One rank of three enters each of 6 reductions 0.15 s late: each other rank waits 0.9 s or more."""
    times = shared_ranks().run(tasks.timed_reductions, late, 0.15, 6, world_size=3)
    found = split_communication(dict(enumerate(times)), seconds=2.0)
    assert found.num_unmatched == 0
    assert found.latest == late
    for share in found.ranks:
        assert share.count == 6
        if share.rank != late:
            assert share.waiting_s >= 6 * 0.15 * 0.9
    assert found.ranks[late].caused_s >= 2 * 6 * 0.15 * 0.9
