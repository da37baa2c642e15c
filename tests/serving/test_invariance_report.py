"""The invariance report: clean on the real network, and every planted cross-talk is found and named."""

from __future__ import annotations

import json
import math

import pytest
import torch

from workbench.base import RequestError
from workbench.nn.cache import StateCache
from workbench.serving import LocalRunner, SamplingParams, TokenEvent
from workbench.serving import runner as runner_module
from workbench.serving.invariance import check_invariance, compare, invariance_requests, tolerance_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def runner(pytestconfig):
    return LocalRunner.load(pytestconfig.getoption("--golden"), precision="fp32", num_slots=3, max_tokens=120)


@pytest.fixture(scope="module")
def requests(runner):
    return invariance_requests(runner.rank.spec, runner.info, num_requests=3, max_tokens=3)


AGAIN, TOGETHER, PAGES = "alone again, slots in another order", "all together", "from kept pages"
SMALL = "together, steps of 6 tokens"


def check(runner, requests, *conditions):
    return check_invariance(runner, requests, tolerance=tolerance_of("fp32"), conditions=conditions or None)


def verdicts(report) -> dict[str, str]:
    return {result.name: report.verdict(result) for result in report.results}


def test_answers_of_the_real_network_do_not_depend_on_their_company(runner, requests):
    report = check(runner, requests)
    assert report.ok, report.render()
    assert set(verdicts(report).values()) == {"same"}
    assert len(report.results) >= 11
    assert all(result.num_tokens == 9 for result in report.results)
    assert 0 < max(result.max_difference for result in report.results) < 1e-3, "sums are taken in other orders"
    assert any(request.images for request in requests)
    assert "verdict" in report.render()
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_the_wrong_slot_is_found_in_company_and_not_alone(runner, requests, monkeypatch):
    """Every sequence reads the recurrent state of its neighbour in the batch."""
    read_state = StateCache.read_state

    def shifted(self, layer_idx, slots, is_fresh):
        return read_state(self, layer_idx, slots.roll(1), is_fresh)

    monkeypatch.setattr(StateCache, "read_state", shifted)
    report = check(runner, requests, AGAIN, TOGETHER)
    assert not report.ok
    assert verdicts(report) == {AGAIN: "same", TOGETHER: "CROSS-TALK"}
    assert "CROSS-TALK" in report.render()
    assert "alone" in next(result.first_wrong for result in report.results if result.name == TOGETHER)


def test_a_slot_that_is_not_cleared_is_found_by_the_order_of_slots(runner, requests, monkeypatch):
    read_state = StateCache.read_state
    monkeypatch.setattr(StateCache, "reset", lambda self, slot: None)
    monkeypatch.setattr(
        StateCache,
        "read_state",
        lambda self, layer, slots, fresh: read_state(self, layer, slots, torch.zeros_like(fresh)),
    )
    report = check(runner, requests, AGAIN)
    assert verdicts(report) == {AGAIN: "CROSS-TALK"}
    runner.rank.cache = runner.rank.new_cache(3, 120)


def test_a_page_with_the_state_of_another_moment_is_found_from_kept_pages(runner, requests, monkeypatch):
    keep = StateCache.keep

    def late(self, slot):
        page = keep(self, slot)
        for state in page.state.values():
            state.mul_(0.5)
        return page

    monkeypatch.setattr(StateCache, "keep", late)
    assert verdicts(check(runner, requests, PAGES, TOGETHER)) == {PAGES: "CROSS-TALK", TOGETHER: "same"}


def test_a_chunk_that_begins_one_token_late_is_found_by_small_steps(runner, requests, monkeypatch):
    build = runner_module.build_batch

    def late(spec, steps, features, **options):
        batch = build(spec, steps, features, **options)
        starts = tuple(
            start - 1 if start and length > 1 else start
            for start, length in zip(batch.starts, batch.lengths, strict=True)
        )
        return type(batch)(**{**{name: getattr(batch, name) for name in batch.__slots__}, "starts": starts})

    monkeypatch.setattr(runner_module, "build_batch", late)
    assert verdicts(check(runner, requests, SMALL, TOGETHER)) == {SMALL: "CROSS-TALK", TOGETHER: "same"}


def test_a_condition_that_did_not_come_about_proves_nothing(runner, requests):
    short = type(requests[0])(token_ids=(5, 6, 7), sampling=requests[0].sampling)
    report = check(runner, [short, short], PAGES)
    assert verdicts(report) == {PAGES: "not shown"}
    assert not report.ok
    assert "no page was taken" in report.render()


# comparing


def event(token_id: int, *top: tuple[int, float]) -> TokenEvent:
    return TokenEvent(token_id=token_id, logprob=dict(top)[token_id], time_s=0.0, top=top)


def test_tokens_that_were_as_likely_as_each_other_may_change_places_and_others_may_not():
    alone = [[event(1, (1, -0.5), (2, -0.5005), (3, -2.0))]]
    tie = compare("x", alone, [[event(2, (2, -0.5), (1, -0.5002), (3, -2.0))]], 1e-3)
    wrong = compare("x", alone, [[event(3, (3, -0.5), (1, -2.0), (2, -2.0))]], 1e-3)
    foreign = compare("x", alone, [[event(9, (9, -0.1), (8, -3.0))]], 1e-3)
    short = compare("x", alone, [[]], 1e-3)
    assert (tie.num_ties, tie.num_wrong) == (1, 0)
    assert tie.max_difference == pytest.approx(5e-4, abs=1e-5)
    assert (wrong.num_ties, wrong.num_wrong) == (0, 1)
    assert wrong.first_wrong == "token 0 of request 0 is 3, alone 1"
    assert foreign.max_difference == math.inf
    assert short.num_wrong == 1


def test_without_company_or_log_probabilities_there_is_nothing_to_compare(runner, requests):
    with pytest.raises(RequestError, match="no company"):
        check(runner, requests[:1])
    plain = [type(r)(token_ids=r.token_ids, images=r.images, sampling=SamplingParams(max_tokens=2)) for r in requests]
    with pytest.raises(RequestError, match="log probabilities"):
        check(runner, plain)
    with pytest.raises(RequestError, match="no condition"):
        check(runner, requests, "on Sundays")
    with pytest.raises(RequestError, match="tokens in a slot"):
        invariance_requests(runner.rank.spec, runner.info, max_tokens=110)
