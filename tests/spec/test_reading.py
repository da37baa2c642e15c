"""What chunks of a prompt cost: against the counts of whole models, and chunk sizes against trying every one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from workbench.spec import MoESpec, ReadingCost, count_model, read_spec, reading_cost

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.mark.parametrize("name", ["k3-tiny", "k3-nano"])
def test_every_weight_that_a_token_meets_counts_once_and_routers_as_if_for_chosen_experts(name: str) -> None:
    spec = read_spec(DATA / name)
    routers = sum(
        (ffn.num_experts - ffn.top_k) * (spec.hidden_size + ffn.has_correction_bias)
        for ffn in (layer.ffn for layer in spec.layers)
        if isinstance(ffn, MoESpec)
    )
    assert reading_cost(spec).token == count_model(spec).active_params - routers


def test_attention_of_k3_nano_in_numbers() -> None:
    """Layers 4, 7 and 8 attend: 4 heads, keys of 32 + 16, values of 48, latents of 64."""
    cost = reading_cost(read_spec(DATA / "k3-nano"))
    assert cost.pair == 3 * 4 * (48 + 48)
    assert cost.context == 3 * 4 * (32 + 48) * 64
    assert cost.least == 54
    assert cost.of(10, 90) == 10 * cost.token + 10 * 100 * cost.pair + 100 * cost.context


def test_without_attention_a_chunk_is_never_cut() -> None:
    assert ReadingCost(token=7.0).chunk(512, 10**7, limit=0.0) == 512


def test_a_chunk_is_the_longest_that_keeps_the_limit_or_the_least_one() -> None:
    rng = random.Random(5)
    seen = set()
    for _ in range(300):
        cost = ReadingCost(
            token=rng.uniform(1, 3000), pair=rng.uniform(0.1, 5), context=rng.choice([0.0, rng.uniform(0, 60)])
        )
        most, start = rng.randint(1, 300), rng.randint(0, 20_000)
        limit = cost.of(most, rng.randint(0, 4000))
        fitting = [n for n in range(1, most + 1) if cost.of(n, start) <= limit]
        longest = max(fitting, default=0)
        found = cost.chunk(most, start, limit=limit)
        assert found == min(most, max(longest, cost.least, 1)), (cost, most, start, limit)
        seen.add("whole" if found == most else "cut" if found == longest else "least")
    assert seen == {"whole", "cut", "least"}
