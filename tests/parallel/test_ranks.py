"""The process harness itself: results in order, errors with their rank, other world sizes, and a rank that hangs."""

from __future__ import annotations

import collective_tasks as tasks
import pytest
from ranks import RankError, Ranks, shared_ranks

pytestmark = pytest.mark.ranks


def test_results_come_in_rank_order_for_changing_world_sizes() -> None:
    for world_size in (2, 4, 2, 3, 4):
        assert shared_ranks().run(tasks.raise_on_rank, -1, world_size=world_size) == list(range(world_size))


def test_an_exception_names_its_rank_and_the_next_run_works() -> None:
    ranks = Ranks(2)
    try:
        with pytest.raises(RankError, match=r"(?s)rank 1:.*planted on rank 1"):
            ranks.run(tasks.raise_on_rank, 1, world_size=2)
        assert ranks.run(tasks.raise_on_rank, -1, world_size=2) == [0, 1]
    finally:
        ranks.close()


def test_a_rank_that_waits_for_a_skipped_collective_is_named_in_seconds() -> None:
    ranks = Ranks(2, timeout_s=6)
    try:
        with pytest.raises(RankError, match="rank 0 did not answer"):
            ranks.run(tasks.skip_a_collective, 2, world_size=2)
    finally:
        ranks.close()
