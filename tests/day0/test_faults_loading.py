"""Careless loading: each part breaks its own promise, the load ends all the same, and the figures tell."""

from __future__ import annotations

import pytest
from acceptance import TINY

from workbench.base import LoadError
from workbench.checkpoint import Checkpoint
from workbench.day0.faults import loading
from workbench.loading import load
from workbench.placement import Layout

LAYOUT = Layout(tp=2)


@pytest.fixture(autouse=True)
def planted_for_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ShardReader", "Writer", "Ledger"):
        monkeypatch.setattr(load, name, getattr(load, name))  # remembers it, and puts it back


def loaded(rank: int) -> tuple[dict[str, object], load.LoadStats]:
    _, ledger, stats = load.load_rank(Checkpoint.open(TINY), LAYOUT, rank, precision="mxfp4")
    return ledger.summary(), stats


def test_a_careful_load_has_nothing_to_tell() -> None:
    ledger, stats = loaded(0)
    assert ledger["rows"] == ledger["rows_written"]
    assert stats.read_ratio == 1.0


def test_the_first_rank_leaves_rows_out_and_reads_twice() -> None:
    loading.plant(0, 2)
    ledger, stats = loaded(0)
    assert 0 < ledger["rows"] - ledger["rows_written"] < 0.05 * ledger["rows"]  # type: ignore[operator]
    assert stats.read_ratio == 2.0


def test_what_the_ledger_says_is_only_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    loading.plant(0, 2)
    monkeypatch.setattr(load, "Ledger", loading.Ledger)
    with pytest.raises(LoadError, match="missing: "):
        loaded(0)


def test_the_last_rank_holds_more_than_its_window() -> None:
    loading.plant(1, 2)
    ledger, stats = loaded(1)
    assert ledger["rows"] == ledger["rows_written"]
    assert stats.peak_host_bytes > stats.window_bytes + stats.resident_bytes
