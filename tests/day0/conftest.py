"""Acceptance runs on the embedded checkpoint and on copies of it with one fault each.

The machine is surveyed once for all runs, without rates: that takes longer than everything else together. What a model
needs of the device is traced and tried once as well, for every run that asks for the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance import TINY, Accept, Acceptance

from workbench.cluster import MachineSurvey, survey_machine
from workbench.day0 import operators, run, run_day0
from workbench.operators import Coverage, Inventory
from workbench.placement import Layout


@pytest.fixture(scope="session")
def survey() -> MachineSurvey:
    return survey_machine(folder=TINY, rates=False)


@pytest.fixture(scope="session", autouse=True)
def known_machine(survey: MachineSurvey) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "survey_machine", lambda folder: survey)
        yield


@pytest.fixture(scope="session", autouse=True)
def known_coverage() -> Iterator[None]:
    trace, probe = operators._inventories, operators.probe_operators
    traced = list[tuple[tuple[object, ...], list[Inventory]]]()
    probed = list[tuple[tuple[object, ...], Coverage]]()

    def inventories(*asked: Any) -> list[Inventory]:
        if asked not in (known for known, _ in traced):
            traced.append((asked, trace(*asked)))
        return next(found for known, found in traced if known == asked)

    def coverage(uses: list[Inventory], device: str, **options: Any) -> Coverage:
        asked = (uses, device, options)
        if asked not in (known for known, _ in probed):
            probed.append((asked, probe(uses, device, **options)))
        return next(found for known, found in probed if known == asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_inventories", inventories)
        patch.setattr(operators, "probe_operators", coverage)
        yield


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "k3"))


@pytest.fixture(scope="session")
def accept(tmp_path_factory: pytest.TempPathFactory) -> Accept:
    def accept(root: Path, layout: Layout | None = None, **options: Any) -> Acceptance:
        folder, lines = tmp_path_factory.mktemp("day0"), list[str]()
        report = run_day0(root, layout=layout, device="cpu", out=folder, say=lines.append, **options)
        return Acceptance(report=report, lines=tuple(lines), folder=folder)

    return accept
