"""Tentative tokens leave the recurrent state alone, and what came true of them is replayed as if read for certain."""

from __future__ import annotations

import pytest
import torch

from workbench.base import RequestError
from workbench.nn.batch import Segments, TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.kda import KDA
from workbench.nn.precision import Precision
from workbench.spec import KDASpec, read_spec

DIM, LIMIT = 24, 1e-10


@pytest.fixture(scope="module")
def spec(pytestconfig):
    return read_spec(pytestconfig.getoption("--golden"))


@pytest.fixture(scope="module")
def layers(spec):
    """The first two KDA layers of the tiny model with drawn weights, float64."""
    found = [i for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, KDASpec)][:2]
    torch.manual_seed(5)
    made = {}
    for i in found:
        made[i] = KDA(spec.layers[i].mixer, DIM, i, Precision.parse("fp32", torch.float64)).double()
        for parameter in made[i].parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return made


def new_cache(spec, layers) -> StateCache:
    return StateCache(spec, layers, num_slots=4, max_tokens=40, dtype=torch.float64)


def run(layers, cache, x, lengths, starts, slots, tentative=()) -> list[torch.Tensor]:
    cache.settle(dict(zip(slots, starts, strict=True)))
    batch = TokenBatch(
        token_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        lengths=tuple(lengths),
        starts=tuple(starts),
        slots=tuple(slots),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        tentative=tuple(tentative),
    )
    segments = Segments(batch)
    with torch.no_grad():
        return [layer(x, segments, cache) for layer in layers.values()]


def states(cache, slot) -> list[torch.Tensor]:
    return [table[layer][slot] for table in (cache.conv, cache.state) for layer in table]


def assert_near(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < LIMIT, f"{(a - b).abs().max():.2e}"


@pytest.mark.parametrize("num_true", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("before", [0, 1, 6])
def test_the_state_is_that_of_the_tokens_that_came_true(spec, layers, before, num_true):
    """In company of a settled sequence and of another tentative one with a different outcome."""
    torch.manual_seed(num_true)
    x, y, z = (torch.randn(before + 5 + 3, DIM, dtype=torch.float64) for _ in range(3))
    cache, plain = new_cache(spec, layers), new_cache(spec, layers)
    if before:
        for each in (cache, plain):
            run(layers, each, torch.cat([x[:before], y[:before], z[:before]]), [before] * 3, [0] * 3, [2, 0, 1])
    was = [state.clone() for state in states(cache, 2)]
    rows = torch.cat([x[before : before + 5], z[before : before + 2], y[before : before + 4]])
    out = run(layers, cache, rows, [5, 2, 4], [before] * 3, [2, 1, 0], tentative=[0, 2])
    assert_near(states(cache, 2), was)
    expected = run(layers, plain, rows, [5, 2, 4], [before] * 3, [2, 1, 0])
    assert_near(out, expected)
    assert_near(states(cache, 1), states(plain, 1))

    redone = new_cache(spec, layers)
    if before + num_true:
        run(layers, redone, x[: before + num_true], [before + num_true], [0], [2])
    start = before + num_true
    after = run(layers, cache, x[start : start + 3], [3], [start], [2])
    assert_near(after, run(layers, redone, x[start : start + 3], [3], [start], [2]))
    assert_near(states(cache, 2), states(redone, 2))
    run(layers, cache, y[before + 3 : before + 4], [1], [before + 3], [0])
    other = new_cache(spec, layers)
    run(layers, other, y[: before + 4], [before + 4], [0], [0])
    assert_near(states(cache, 0), states(other, 0))
    assert cache._held == []


def test_one_replayed_token_too_many_would_be_noticed(spec, layers):
    x = torch.randn(8, DIM, dtype=torch.float64)
    cache, redone = new_cache(spec, layers), new_cache(spec, layers)
    run(layers, cache, x[:5], [5], [0], [1], tentative=[0])
    cache.settle({1: 3})
    run(layers, redone, x[:2], [2], [0], [1])
    gaps = [(a - b).abs().max() for a, b in zip(states(cache, 1), states(redone, 1), strict=True)]
    assert max(gaps) > 1e-3


def test_a_slot_cannot_go_on_where_it_never_was(spec, layers):
    x = torch.randn(4, DIM, dtype=torch.float64)
    for start, words in ((7, "expected 2 to 5"), (1, "expected 2 to 5")):
        cache = new_cache(spec, layers)
        run(layers, cache, x[:2], [2], [0], [1])
        run(layers, cache, x[:3], [3], [2], [1], tentative=[0])
        with pytest.raises(RequestError, match=words):
            cache.settle({1: start})


def test_a_cleared_slot_holds_nothing_and_others_keep_what_they_hold(spec, layers):
    x = torch.randn(6, DIM, dtype=torch.float64)
    cache = new_cache(spec, layers)
    run(layers, cache, x, [3, 3], [0, 0], [1, 2], tentative=[0, 1])
    cache.reset(1)
    cache.settle({1: 0})
    assert all(not bool(state.any()) for state in states(cache, 1))
    assert [list(held.spans) for held in cache._held] == [[2]]
    cache.settle({2: 3})
    assert cache._held == []
