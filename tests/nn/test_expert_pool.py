"""The pool of expert slots: who stays, who is fetched in which order, what is told. Experts here are their keys."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from nn_tiny import MOE

from workbench.base import LoadError
from workbench.nn.expert_pool import ExpertPool, PagedExperts
from workbench.nn.moe import Experts
from workbench.nn.precision import Precision

NUM, WIDTH, LATENT = MOE.num_experts, MOE.width, MOE.latent_dim
SHAPES = {"w1.weight": (WIDTH, LATENT), "w2.weight": (LATENT, WIDTH), "w3.weight": (WIDTH, LATENT)}
ONE = 3 * WIDTH * LATENT * 4  # bytes of an expert


def experts() -> Experts:
    with torch.device("meta"):
        return Experts(MOE, Precision.parse("fp32"))


class Source:
    """Experts full of 100 * layer + expert; comes at once where `is_quick`, else when its future is asked."""

    def __init__(self, room: int = 4, *, is_quick: bool = True, missing: tuple[int, int] | None = None) -> None:
        self.room, self.is_quick, self.missing = room, is_quick, missing
        self.asked: list[tuple[int, int]] = []
        self.here: set[tuple[int, int]] = set()

    def is_here(self, key: tuple[int, int]) -> bool:
        return key in self.here

    def prefer(self, keys: object) -> None:
        pass

    def request(self, key: tuple[int, int]) -> Future[dict[str, torch.Tensor]]:
        self.asked.append(key)
        future: Future[dict[str, torch.Tensor]] = Future()
        if key == self.missing:
            future.set_exception(LoadError("file ends"))
            return future
        value = float(100 * key[0] + key[1])
        future.set_result({name: torch.full(shape, value) for name, shape in SHAPES.items()})
        if self.is_quick:
            self.here.add(key)
        return future


def pool_of(num_slots: int, source: Source, layers: tuple[int, ...] = (1, 2)) -> ExpertPool:
    return ExpertPool(experts(), layers, num_slots * ONE + ONE - 1, source, torch.device("cpu"))


def served(pool: ExpertPool, layer: int, wanted: list[int]) -> list[int]:
    """The experts in the order they came; each slot holds what it should when it is given."""
    order = []
    for expert, slot in pool.serve(layer, wanted):
        for name in ("w1", "w2", "w3"):
            assert (pool.stores[name].weight[slot] == 100 * layer + expert).all()
        order.append(expert)
    return order


def test_what_is_here_comes_first_and_what_is_missing_is_fetched() -> None:
    source = Source()
    pool = pool_of(3, source)
    assert served(pool, 1, [0, 2]) == [0, 2]
    assert served(pool, 1, [1, 2, 3]) == [2, 1, 3]
    assert source.asked == [(1, 0), (1, 2), (1, 1), (1, 3)]
    assert (pool.use.num_used, pool.use.num_resident) == (5, 1)
    assert pool.use.num_waited == 4
    assert pool.use.hit_rate == 1 / 5


def test_more_experts_than_slots_are_served_one_after_another() -> None:
    pool = pool_of(1, Source(room=2))
    assert sorted(served(pool, 1, list(range(NUM)))) == list(range(NUM))
    assert served(pool, 1, [NUM - 1]) == [NUM - 1]
    assert pool.use.num_resident == 1, "the last one stayed"


def test_an_expert_that_came_back_outlives_those_used_once() -> None:
    pool = pool_of(3, Source())
    for wanted in ([0], [0], [1], [2], [3], [1], [2]):
        served(pool, 1, wanted)
    assert pool.is_resident((1, 0)), "least recently used, and used twice"
    lru = [key for key in ((1, 1), (1, 2), (1, 3)) if pool.is_resident(key)]
    assert len(lru) == 2


def test_layers_share_the_slots_and_their_experts_are_not_mixed_up() -> None:
    pool = pool_of(4, Source())
    for _ in range(3):
        assert sorted(served(pool, 1, [0, 1])) == [0, 1]
        assert sorted(served(pool, 2, [0, 1])) == [0, 1]
    assert pool.use.num_resident == 8


def test_what_followed_last_time_is_fetched_ahead() -> None:
    source = Source(room=4)
    pool = pool_of(2, source)
    served(pool, 1, [0])
    served(pool, 2, [3])
    served(pool, 1, [1])
    served(pool, 2, [4])
    source.asked.clear()
    served(pool, 1, [0])  # 3 of layer 2 followed it
    assert source.asked == [(1, 0), (2, 3)]
    before = pool.use
    served(pool, 2, [3])
    assert (pool.use - before).num_ahead == 1
    assert (pool.use - before).num_waited == 0


def test_no_more_are_asked_for_at_one_time_than_the_source_has_room_for() -> None:
    source = Source(room=2, is_quick=False)
    pool = pool_of(6, source)
    serving = pool.serve(1, list(range(5)))
    next(serving)
    assert len(source.asked) <= 3, "two were asked for, one came, and one more was asked for"
    assert len(list(serving)) == 4


def test_an_expert_that_cannot_come_is_an_error_and_harms_no_slot() -> None:
    source = Source(missing=(1, 2))
    pool = pool_of(2, source)
    served(pool, 1, [0, 1])
    with pytest.raises(LoadError, match="file ends"):
        served(pool, 1, [1, 2])
    assert served(pool, 1, [0, 1]) in ([0, 1], [1, 0])
    source.missing = None
    assert sorted(served(pool, 1, [0, 2])) == [0, 2]


def test_a_pool_without_room_for_one_expert_is_refused() -> None:
    with pytest.raises(LoadError, match="holds none"):
        ExpertPool(experts(), (1,), ONE - 1, Source(), torch.device("cpu"))
    assert pool_of(1000, Source()).num_slots == 2 * NUM, "no more slots than there are experts"


@pytest.mark.parametrize(("num_slots", "scales_input"), [(1, False), (3, True), (2 * NUM, False)])
def test_paged_experts_compute_what_the_stack_does(num_slots: int, scales_input: bool) -> None:
    torch.manual_seed(3)
    whole = Experts(replace(MOE, scales_input=scales_input), Precision.parse("fp32")).requires_grad_(False)
    for store in (whole.w1, whole.w2, whole.w3):
        store.weight.normal_()

    class Stack(Source):
        def request(self, key: tuple[int, int]) -> Future[dict[str, torch.Tensor]]:
            future: Future[dict[str, torch.Tensor]] = Future()
            future.set_result({name: getattr(whole, name[:2]).weight[key[1]] for name in SHAPES})
            return future

    paged = PagedExperts(whole, 1, pool_of(num_slots, Stack()))
    assert not list(paged.parameters())
    for num_tokens in (0, 1, 7):
        x = torch.randn(num_tokens, LATENT)
        slots = torch.randint(-1, NUM, (num_tokens, MOE.top_k))
        weights = torch.rand(num_tokens, MOE.top_k)
        assert torch.equal(paged(x, slots, weights), whole(x, slots, weights))
