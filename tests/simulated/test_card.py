"""The simulated accelerator by itself: a device that torch finds, counts, fills up, refuses to mix, and that gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from card_checks import CHECKS
from card_runs import OnCard

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def results(on_card: OnCard) -> dict[str, str]:
    done = on_card(HERE / "card_checks.py", MEMORY=64 << 20)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_card(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def test_the_workbench_does_not_know_its_name() -> None:
    texts = [path.read_text() for path in (HERE.parents[1] / "workbench").rglob("*.py")]
    assert len(texts) > 100
    assert not [text[:80] for text in texts if "simcard" in text.lower() or "simlink" in text.lower()]
