"""The golden folder that the tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """Folder of a tiny checkpoint with expected outputs: `--golden DIR`, by default the one in this repository."""
    folder: Path = request.config.getoption("--golden")
    if not (folder / "golden" / "vision.json").is_file():
        raise pytest.UsageError(f"--golden {folder}: no golden/vision.json in it")
    return folder
