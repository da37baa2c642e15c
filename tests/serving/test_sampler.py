"""The sampler is a function of one row, the parameters and the position; filters keep what they should."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.base import DeploymentError
from workbench.serving.requests import SamplingParams
from workbench.serving.sampler import keep_mask, sample_row, sample_rows, uniform


def logits_of(rows: int, vocab: int = 37, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_temperature_zero_takes_the_first_of_the_largest_and_reports_its_log_probability():
    row = torch.tensor([0.0, 2.0, 1.0, 2.0])
    token = sample_row(row, SamplingParams(top_k=1, top_p=0.2, seed=9), 4)
    assert token.token_id == 1
    assert token.logprob == pytest.approx(2 - math.log(1 + 2 * math.exp(2) + math.exp(1)), abs=1e-6)


def test_a_token_depends_on_seed_and_position_but_not_on_its_neighbours():
    rows = logits_of(6)
    params = [SamplingParams(temperature=1.3, top_p=0.9, seed=s) for s in (5, 5, 6, 7, 2**64 - 1, 5)]
    positions = [0, 1, 0, 3, 1000, 0]
    together = sample_rows(rows, params, positions)
    order = [4, 2, 0, 5, 3, 1]
    shuffled = sample_rows(rows[order], [params[i] for i in order], [positions[i] for i in order])
    alone = [sample_row(rows[i], params[i], positions[i]) for i in range(6)]
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_another_seed_or_position_gives_another_sequence():
    row = torch.zeros(50_000)
    drawn = {
        (seed, idx): sample_row(row, SamplingParams(temperature=1.0, seed=seed), idx).token_id
        for seed in range(8)
        for idx in range(8)
    }
    assert len(set(drawn.values())) > 60
    assert drawn[3, 4] == sample_row(row, SamplingParams(temperature=1.0, seed=3), 4).token_id


def test_the_draw_is_pinned_so_that_recorded_answers_stay_valid():
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.011546754286331562,
        0.34218278474233466,
        0.3035680343067586,
    ]


def test_frequencies_follow_the_probabilities():
    """2,000 draws; the largest deviation of a frequency from p stays within 4.5 standard deviations."""
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    temperature, draws = 0.7, 2000
    p = torch.softmax(row.double() / temperature, 0)
    ids = [sample_row(row, SamplingParams(temperature=temperature, seed=11), i).token_id for i in range(draws)]
    frequency = torch.bincount(torch.tensor(ids), minlength=5) / draws
    limit = 4.5 * torch.sqrt(p * (1 - p) / draws)
    assert (abs(frequency - p) < limit).all(), (frequency, p)
    wrong = torch.softmax(row.double(), 0)  # the same draws do not fit temperature 1
    assert not (abs(frequency - wrong) < 4.5 * torch.sqrt(wrong * (1 - wrong) / draws)).all()


def keep_reference(scaled: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[:top_k] if top_k else order
    mass = [math.exp(scaled[i]) for i in kept]
    out: set[int] = set()
    for i in kept:
        if top_p < 1 and sum(math.exp(scaled[j]) for j in out) / sum(mass) >= top_p:
            break
        out.add(i)
    return out


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 37, 100])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999999, 1.0])
def test_filters_keep_what_the_obvious_loop_keeps(top_k, top_p):
    for row in logits_of(5).double():
        row = (row * 2).round() / 2  # many ties
        kept = set(torch.nonzero(keep_mask(row, top_k, top_p)).flatten().tolist())
        assert kept == keep_reference(row.tolist(), top_k, top_p)
        assert int(torch.argmax(row)) in kept


def test_only_kept_tokens_are_drawn():
    row = logits_of(1)[0]
    params = SamplingParams(temperature=5.0, top_k=4, top_p=0.7, seed=1)
    kept = set(torch.nonzero(keep_mask((row.double() - row.max()) / 5, 4, 0.7)).flatten().tolist())
    drawn = {sample_row(row, params, i).token_id for i in range(300)}
    assert drawn == kept
    assert len(kept) == 3


def test_a_tiny_temperature_is_greedy_and_a_large_one_does_not_overflow():
    row = torch.tensor([1e4, -1e4, 9.99e3])
    assert sample_row(row, SamplingParams(temperature=1e-300), 0).token_id == 0
    drawn = {
        sample_row(torch.tensor([50.0, -50.0]), SamplingParams(temperature=100.0, seed=2), i).token_id
        for i in range(99)
    }
    assert drawn == {0, 1}


def test_rounding_noise_in_the_logits_does_not_change_sampled_tokens():
    rows = logits_of(200, vocab=512)
    noisy = rows + 1e-5 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(4))
    params = [SamplingParams(temperature=1.0, seed=s) for s in range(200)]
    first, second = (sample_rows(r, params, [s % 7 for s in range(200)]) for r in (rows, noisy))
    assert sum(a.token_id != b.token_id for a, b in zip(first, second, strict=True)) <= 1


def test_bf16_rows_and_an_empty_batch_are_accepted():
    rows = logits_of(3).bfloat16()
    tokens = sample_rows(rows, [SamplingParams()] * 3, [0] * 3)
    assert [token.token_id for token in tokens] == rows.float().argmax(-1).tolist()
    assert sample_rows(torch.empty(0, 37), [], []) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused_by_count(bad):
    row = torch.zeros(9)
    row[3] = bad
    with pytest.raises(DeploymentError, match="1 of 9 logits"):
        sample_row(row, SamplingParams(), 0)
