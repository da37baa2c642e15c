"""A small table that reads well in a terminal, a notebook and a report, and numbers with readable units."""

from __future__ import annotations

import html
import unicodedata
from dataclasses import dataclass

__all__ = ["Cell", "Table", "human", "printable", "printable_lines"]

Cell = str | int | float | bool | None

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def human(value: float, unit: str) -> str:
    """`value` with a decimal prefix: 1.56e12, "B" -> "1.56 TB"; 0.0042, "s" -> "4.2 ms"; seconds never grow kilo."""
    if value != value or value in (float("inf"), float("-inf")):
        return f"{value} {unit}"
    size = abs(value)
    if unit == "s":
        scale, prefix = next((x for x in _SMALL if size >= x[0]), _SMALL[-1]) if size else (1.0, "")
    else:
        scale, prefix = next((x for x in _LARGE if size >= x[0]), _LARGE[-1])
    text = f"{value / scale:.3g}" if size / scale < 1000 else f"{value / scale:,.0f}"
    return f"{text} {prefix}{unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns of cells. Numbers stand to the right with thousands separators, everything else to the left.

    Cells may hold text from files or models: control characters are shown as escapes in the terminal form, and the
    HTML form is escaped. Raises ValueError for a row of the wrong length.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row} has {len(row)} cells for {len(self.columns)} columns")

    def render(self) -> str:
        """Aligned text."""
        texts = [[printable(_text(cell)) for cell in row] for row in self.rows]
        heads = [printable(name) for name in self.columns]
        widths = [max([_width(head), *(_width(row[i]) for row in texts)]) for i, head in enumerate(heads)]
        right = [self._is_numeric(i) for i in range(len(heads))]

        def line(cells: list[str]) -> str:
            padded = (
                " " * (w - _width(c)) + c if r else c + " " * (w - _width(c))
                for c, w, r in zip(cells, widths, right, strict=True)
            )
            return "  ".join(padded).rstrip()

        body = [line(heads), line(["─" * w for w in widths]), *(line(row) for row in texts)]
        return "\n".join([*([self.title] if self.title else []), *body, *([self.note] if self.note else [])])

    def to_html(self) -> str:
        """An escaped HTML table without styles of its own; numeric cells carry class "num"."""
        right = [' class="num"' if self._is_numeric(i) else "" for i in range(len(self.columns))]
        head = "".join(f"<th{r}>{html.escape(name)}</th>" for name, r in zip(self.columns, right, strict=True))
        rows = "".join(
            "<tr>" + "".join(f"<td{r}>{html.escape(_text(c))}</td>" for c, r in zip(row, right, strict=True)) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{note}"

    def to_json(self) -> dict[str, object]:
        rows = [list(row) for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "note": self.note}

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return self.render()

    def _is_numeric(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in cells)


def printable(text: str) -> str:
    """`text` on one line, with control characters (terminal escapes among them) spelled out."""
    return "".join(c if unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """`text` with its line ends and tabs kept and every other control character spelled out."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.split("\n"))


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.4g}" if isinstance(cell, float) else cell


def _width(text: str) -> int:
    """Columns on a terminal: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
