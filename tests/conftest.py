"""Options of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

DEFAULT_GOLDEN = Path(__file__).parent / "golden" / "k3-tiny-a"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        type=Path,
        default=DEFAULT_GOLDEN,
        metavar="DIR",
        help="folder with a tiny checkpoint and its expected outputs (default: tests/golden/k3-tiny-a)",
    )
    parser.addoption(
        "--screenshots", type=Path, default=None, metavar="DIR", help="keep pictures of pages here (default: nowhere)"
    )
