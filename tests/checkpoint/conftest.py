"""Small sound checkpoints, made once; a test that plants a fault gets a copy of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.checkpoint import F0, F1, F2, k3_config, write_checkpoint

SIZES = {"F0": F0, "F1": F1, "F2": F2}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, sizes in SIZES.items():
        write_checkpoint(folder / name, k3_config(sizes=sizes), seed=3, shards=3)
    return folder


@pytest.fixture
def copy_of(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return copy


@pytest.fixture
def f0(copy_of: Callable[[str], Path]) -> Path:
    """Three shards; the last two layers full attention, the first dense."""
    return copy_of("F0")


@pytest.fixture
def f1(copy_of: Callable[[str], Path]) -> Path:
    """No two dimensions equal; A_log padded from 6 to 8."""
    return copy_of("F1")


@pytest.fixture
def f2(copy_of: Callable[[str], Path]) -> Path:
    """Square matrices."""
    return copy_of("F2")
