"""Ranks in reserve: taken where they are of use, ended where they are not, and never a reason to fail."""

from __future__ import annotations

import pytest

from workbench.base import DeploymentError
from workbench.deployment.spare import Spare

pytestmark = pytest.mark.timeout(60)


class Ranks:
    def __init__(self, *, is_usable: bool = True, fails: bool = False) -> None:
        self.is_usable, self.fails, self.is_warm, self.num_closed = is_usable, fails, False, 0

    def warm(self) -> None:
        if self.fails:
            raise DeploymentError("rank 1 died")
        self.is_warm = True

    def close(self) -> None:
        self.num_closed += 1


def spare_of(ranks: list[Ranks]) -> Spare:
    waiting = iter(ranks)
    return Spare(lambda: next(waiting))  # type: ignore[arg-type, return-value]


def test_ranks_that_wait_are_warm_and_given_away_once():
    ranks = [Ranks(), Ranks()]
    spare = spare_of(ranks)
    assert spare.take() is None
    spare.prepare()
    spare.prepare()
    assert spare.take() is ranks[0]
    assert ranks[0].is_warm
    assert spare.take() is None
    spare.prepare()
    spare.close()
    assert (ranks[0].num_closed, ranks[1].num_closed) == (0, 1)
    spare.prepare()
    assert spare.take() is None, "closed"


@pytest.mark.parametrize("bad", [{"is_usable": False}, {"fails": True}])
def test_ranks_that_broke_while_they_waited_are_ended_and_nobody_gets_them(bad):
    ranks = Ranks(**bad)
    spare = spare_of([ranks])
    spare.prepare()
    assert spare.take() is None
    assert ranks.num_closed == 1
