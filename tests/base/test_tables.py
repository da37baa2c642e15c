"""Tables and readable numbers."""

from __future__ import annotations

import json

import pytest

from workbench.base import Table, human, plain, printable_lines


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.56e12, "B", "1.56 TB"),
        (29.43e9, "B/s", "29.4 GB/s"),
        (512, "B", "512 B"),
        (0, "B", "0 B"),
        (0.0042, "s", "4.2 ms"),
        (2.5e-7, "s", "250 ns"),
        (7200, "s", "7,200 s"),
        (0.0, "s", "0 s"),
        (-2e6, "B", "-2 MB"),
        (float("nan"), "B", "nan B"),
    ],
)
def test_human_numbers(value: float, unit: str, text: str) -> None:
    assert human(value, unit) == text


def test_table_aligns_numbers_right_and_text_left() -> None:
    table = Table(columns=("name", "bytes"), rows=(("a", 12345), ("long name", 7)), title="T", note="n")
    assert table.render().splitlines() == [
        "T",
        "name        bytes",
        "─────────  ──────",
        "a          12,345",
        "long name       7",
        "n",
    ]


def test_wide_characters_keep_columns_aligned() -> None:
    lines = Table(columns=("x", "y"), rows=(("한글", "a"), ("é", "b"))).render().splitlines()
    assert lines[2] == "한글  a"
    assert lines[3] == "é     b"


def test_control_characters_cannot_reach_the_terminal() -> None:
    text = Table(columns=("x",), rows=(("a\x1b[31mred\nnext\u202e",),)).render()
    assert "\x1b" not in text
    assert "\\x1b[31mred\\nnext\\u202e" in text


def test_html_form_is_escaped() -> None:
    text = Table(columns=("<b>",), rows=(("<script>alert(1)</script>",),), title="a&b", note="<i>").to_html()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<th>&lt;b&gt;</th>" in text
    assert "<caption>a&amp;b</caption>" in text


def test_missing_and_boolean_cells_are_words() -> None:
    assert Table(columns=("x",), rows=((None,), (True,), (False,))).render().splitlines()[2:] == ["–", "yes", "no"]


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table(columns=("a", "b"), rows=(("x",),))


def test_printable_lines_keep_line_ends_and_spell_out_the_rest() -> None:
    assert printable_lines("a\tb\n\x1b[31mred\u202e\udcff\r\n") == "a   b\n\\x1b[31mred\\u202e\\udcff\\r\n"


def test_plain_values_survive_strict_json() -> None:
    value = {"x": (float("nan"), [float("-inf")], 1.5), 3: {"y": None}}
    assert plain(value) == {"x": ["nan", ["-inf"], 1.5], "3": {"y": None}}
    json.dumps(plain(value), allow_nan=False)
