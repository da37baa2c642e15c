"""The command line called in this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workbench.cli import main

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data" / "k3-tiny"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def record(self) -> Any:
        """Standard output as the one JSON document it must be."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


Call = Callable[..., Outcome]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(ROOT)

    def run(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(code=code, out=out, err=err)

    return run


@pytest.fixture
def process() -> Call:
    def run(*arguments: object, **env: str) -> Outcome:
        command = [sys.executable, "-m", "workbench.cli", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)

    return run
