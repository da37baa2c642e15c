"""The simulated accelerator, built once; tests reach it only through processes whose torch finds it by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from card_runs import OnCard

HERE = Path(__file__).resolve().parent
PLUGIN = HERE / "plugin"
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def card() -> dict[str, str]:
    """Environment in which torch finds the card. Skips where it cannot be compiled, with the reason."""
    build = "from simcard import build; print(build.why_not() or build.build())"
    quiet = {**os.environ, "PYTHONPATH": str(PLUGIN), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, env=quiet, check=True)
    answer = done.stdout.strip().splitlines()[-1]
    if not answer.endswith(".so"):
        pytest.skip(f"no simulated accelerator: {answer}")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{PLUGIN}", "SIMCARD_GAPS": ""}


@pytest.fixture(scope="session")
def on_card(card: dict[str, str]) -> OnCard:
    """`on_card("-m", "workbench", …, GAPS="missing:topk")`: Python in a process of its own, with SIMCARD_… set."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        settings = {f"SIMCARD_{name}": str(value) for name, value in options.items()}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env={**card, **settings}, cwd=ROOT)

    return run
