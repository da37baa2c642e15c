"""docs/failure-kinds.md names tests that exist, and leaves out none of the kinds that are known here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "failure-kinds.md"
KNOWN = ROOT.parent / "shared" / "reference" / "failure-cases.md"
ROW = re.compile(r"^\| ([A-Z]\d\d) \| (.+) \| (.+) \|$", re.MULTILINE)


def rows(text: str) -> dict[str, list[str]]:
    """Tests by kind."""
    return {kind: re.findall(r"`([^`]+)`", tests) for kind, _, tests in ROW.findall(text)}


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(tests: list[str]) -> list[str]:
    named = [(ROOT / test.partition("::")[0], test.partition("::")[2]) for test in tests]
    return [f"{path}::{name}" for path, name in named if not path.is_file() or name not in functions(path)]


def test_every_kind_is_shown_by_tests_that_exist() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 90
    assert [kind for kind, tests in found.items() if not tests] == []
    assert {kind: gone for kind, tests in found.items() if (gone := missing(tests))} == {}


def test_no_known_kind_is_left_out() -> None:
    if not KNOWN.is_file():
        pytest.skip(f"{KNOWN} is not here")
    known = set(re.findall(r"^\| ([A-Z]\d\d) \|", KNOWN.read_text(encoding="utf-8"), re.MULTILINE))
    rules = {
        f"T{int(number):02}" for number in re.findall(r"^- T(\d+) ", KNOWN.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert known
    assert rules
    assert known | rules <= rows(PAGE.read_text(encoding="utf-8")).keys()


def test_a_test_that_was_renamed_is_noticed() -> None:
    row = (
        "| Z01 | a thing goes wrong | `tests/test_layers.py::test_every_top_module_is_known`<br>`tests/x.py::test_y` |"
    )
    found = rows(row)
    assert list(found) == ["Z01"]
    assert missing(found["Z01"]) == [f"{ROOT / 'tests/x.py'}::test_y"]
    assert missing(["tests/test_layers.py::test_gone"]) == [f"{ROOT / 'tests/test_layers.py'}::test_gone"]
