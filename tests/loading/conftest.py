"""Small sound checkpoints, made once; a test that plants a fault gets a copy of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.checkpoint import F0, F1, F2, k3_config, write_checkpoint

# Shared helpers: taking checkpoints apart, the plain loader of the goldens, slices by the placement table.
for room in ("checkpoint", "golden", "parallel"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / room))


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders F0 (splits over 2 and 4 ranks), F1 (no two dimensions equal), F2 (square matrices), and F0 again with its
    tensors dealt to five files at random, so that codes and scales of one expert lie apart."""
    folder = tmp_path_factory.mktemp("sound")
    for name, sizes in (("F0", F0), ("F1", F1), ("F2", F2)):
        write_checkpoint(folder / name, k3_config(sizes=sizes), seed=4, shards=3)
    write_checkpoint(folder / "mixed", k3_config(sizes=F0), seed=4, shards=5, layout="mixed")
    return folder


@pytest.fixture
def copy_of(sound: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(sound / name, tmp_path / name))

    return copy
