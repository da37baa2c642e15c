"""N01: importing this project asks no device anything, and none of its processes is a fork of one that might have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORKS = re.compile(r"os\.fork\b|[\"']fork(?:server)?[\"']|multiprocessing\.(?:Process|Pool)\b")
# Every module is imported with all that would wake a device replaced by what takes down who asked.
IMPORT_ALL = """
import importlib, pkgutil, sys
import torch

asked = []
def asks(name):
    def answer(*args, **kwargs):
        asked.append(f"{current}: {name}")
        return 0
    return answer

for owner, names in ((torch.accelerator, ("is_available", "device_count", "current_accelerator")),
                     (torch.cuda, ("init", "_lazy_init", "is_available", "device_count"))):
    for name in names:
        setattr(owner, name, asks(f"{owner.__name__}.{name}"))
for package in sys.argv[1:]:
    current = package
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        current = module.name
        if not current.endswith("__main__"):
            importlib.import_module(current)
print(*asked, sep="\\n", end="")
"""


def asked_while_importing(*packages: str, path: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *packages],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_n01_no_module_asks_a_device_when_it_is_imported() -> None:
    assert asked_while_importing("workbench", "apps") == ""


def test_n01_one_that_does_is_named(tmp_path: Path) -> None:
    (tmp_path / "eager").mkdir()
    (tmp_path / "eager" / "__init__.py").write_text("")
    (tmp_path / "eager" / "probe.py").write_text("import torch\nHAS = torch.accelerator.is_available()\n")
    assert asked_while_importing("eager", path=tmp_path) == "eager.probe: torch.accelerator.is_available"


def test_n01_no_process_is_forked() -> None:
    sources = [*(ROOT / "workbench").rglob("*.py"), *(ROOT / "apps").rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if FORKS.search(path.read_text(encoding="utf-8"))] == []
    assert FORKS.search('context = get_context("fork")')
