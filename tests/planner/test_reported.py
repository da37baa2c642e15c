"""Against what users of other engines report of the published model; pages of mixed pools."""

from __future__ import annotations

import dataclasses

import pytest
from planner_samples import published

from workbench.base import UnsupportedModelError
from workbench.placement import Layout
from workbench.planner import REPORTED, compare_reported, hybrid_pages

GIB = 1 << 30


def test_every_reported_deployment_agrees() -> None:
    table, found = compare_reported(published())
    assert len(found) == len(REPORTED) >= 12
    for x in found:
        assert x.agrees, (x.reported, x.fits, x.weights_gib, x.pool_tokens)
    text = table.render()
    assert "129.8" in text or "129.75" in text


@pytest.mark.parametrize(
    "wrong", [{"fits": False}, {"weights_gib": 126.0}, {"pool_tokens": 120_000}, {"pool_tokens": 40_000}]
)
def test_a_report_that_is_off_would_be_seen(wrong: dict[str, float]) -> None:
    true = next(x for x in REPORTED if x.layout == "tp16")
    _, (found,) = compare_reported(published(), (dataclasses.replace(true, **wrong),))  # type: ignore[arg-type]
    assert not found.agrees


def test_pages_come_out_as_an_engine_logs_them() -> None:
    """Its log at TP16: "block size 384 tokens", "padding by 8.68 %"; 24 latent layers, 69 recurrent ones."""
    pages = hybrid_pages(published(), Layout(tp=16))
    assert pages.page_tokens == 384
    assert pages.padding == pytest.approx(0.0868, abs=1e-4)
    assert (pages.layers_per_group, pages.attention_groups, pages.state_groups) == (24, 1, 3)


def test_a_short_request_pins_a_block_of_every_group() -> None:
    pages = hybrid_pages(published(), Layout(tp=16))
    assert pages.blocks(12) * pages.block_bytes == pages.request_floor
    assert pages.request_floor == 4 * 24 * 384 * 576 * 2
    pool = 3 * pages.request_floor - 1
    assert pool // pages.block_bytes // pages.blocks(12) == 2, "three tiny requests do not fit"


def test_stages_of_one_kind_have_no_mixed_pool() -> None:
    with pytest.raises(UnsupportedModelError):
        hybrid_pages(published(), Layout(pp=31), 0)
