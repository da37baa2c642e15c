"""Imports between rooms point downward only; the table below is the house plan of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "workbench"

_MODEL_SIDE = {"base", "spec", "placement", "nn", "parallel", "loading"}
_BELOW_DEPLOYMENT = _MODEL_SIDE | {"checkpoint", "cluster", "align", "serving"}
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "spec": {"base"},
    "checkpoint": {"base", "spec"},
    "cluster": {"base", "spec"},
    "placement": {"base", "spec"},
    "nn": {"base", "spec"},
    "parallel": {"base", "spec", "placement", "nn"},
    "loading": {"base", "spec", "checkpoint", "placement", "nn", "parallel"},
    "align": {"base", "spec", "checkpoint", "placement", "nn", "parallel", "loading"},
    "quantize": {"base", "spec", "checkpoint", "nn"},
    "serving": _MODEL_SIDE,
    "deployment": _BELOW_DEPLOYMENT,
    "profiling": _BELOW_DEPLOYMENT | {"deployment", "operators"},
    "training": _BELOW_DEPLOYMENT | {"deployment"},
    "view": _BELOW_DEPLOYMENT | {"deployment", "profiling"},
    "operators": {"base", "spec", "placement", "nn", "parallel", "cluster"},
    "planner": {"base", "spec", "placement", "cluster", "operators"},
    "rehearsal": _MODEL_SIDE | {"checkpoint", "cluster", "operators", "planner"},
    "report": {"base", "view"},
    "exam": _BELOW_DEPLOYMENT | {"training"},
    "day0": _BELOW_DEPLOYMENT | {"operators", "deployment", "profiling", "view", "report", "training", "exam"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)  # the command line may import anything
TOP_MODULES = {"__init__"}
NO_TORCH = (
    "base",
    "spec",
    "checkpoint",
    "placement",
    "view",
    "report",
    "planner",
)  # a laptop is enough to read and count


def imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Absolute names imported when the module is imported: not inside functions, not under TYPE_CHECKING."""
    stack: list[ast.stmt] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            stack.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def violations(source: str, room: str, package: str) -> list[str]:
    found = []
    for name in imported_names(ast.parse(source), package):
        parts = name.split(".")
        is_other_room = (
            parts[0] == "workbench" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir() and parts[1] != room
        )
        if is_other_room and parts[1] not in MAY_IMPORT[room]:
            found.append(f"{room} -> {parts[1]}")
        if parts[0] == "torch" and room in NO_TORCH:
            found.append(f"{room} -> torch")
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if len(path.relative_to(PACKAGE).parts) > 1)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    assert room in MAY_IMPORT, f"{room} is not in the table of rooms"
    package = ".".join(("workbench", *path.relative_to(PACKAGE).parts[:-1]))
    assert violations(path.read_text(), room, package) == []


def test_every_top_module_is_known() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} <= TOP_MODULES


@pytest.mark.parametrize(
    ("source", "room", "expected"),
    [
        ("from workbench.serving import Engine", "nn", ["nn -> serving"]),
        ("import torch", "spec", ["spec -> torch"]),
        ("from ..parallel import mesh", "nn", ["nn -> parallel"]),
        ("if True:\n    from workbench.loading import plan", "placement", ["placement -> loading"]),
        ("class A:\n    import workbench.deployment", "align", ["align -> deployment"]),
    ],
)
def test_scanner_sees_an_offence(source: str, room: str, expected: list[str]) -> None:
    assert set(violations(source, room, f"workbench.{room}")) == set(expected)


@pytest.mark.parametrize(
    "source",
    [
        "def late():\n    from workbench.serving import Engine",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from workbench.serving import Engine",
        "from workbench.base import ConfigError",
        "import torchvision_like_name",
    ],
)
def test_scanner_lets_the_innocent_pass(source: str) -> None:
    assert violations(source, "nn", "workbench.nn") == []


def test_import_of_the_package_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, workbench, workbench.spec, workbench.placement, workbench.checkpoint, workbench.view\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
