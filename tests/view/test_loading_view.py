"""A load drawn by stages: the finding stands in the title, parts add up to the load, and the panel moves."""

from __future__ import annotations

from typing import Any

import pytest
from one_cell import run_cell

from workbench.view import draw_svg, load_piece_table, load_stage_bars, load_stage_lines, load_stage_table
from workbench.view.loading import MAX_BINS


def record(rank: int = 0, **seconds: float) -> dict[str, Any]:
    known = {"read": 1.5, "wait": 0.5, "transfer": 0.0, "transform": 2.0, "bind": 1.0, "check": 0.25} | seconds
    return {
        "rank": rank,
        "seconds": 4.0,
        "seconds_by_stage": known,
        "bytes_by_stage": {"read": 100, "transfer": 100, "transform": 100, "bind": 377, "check": 377},
        "pieces": [
            {"name": f"layers.{n}", "seconds_by_stage": {"read": 9.0, "bind": 0.1 * n}, "bytes_by_stage": {"read": n}}
            for n in range(5)
        ],
        "bin_s": 0.05,
        "busy": {"read": [1.0] * 30 + [0.0] * 50, "wait": [0.0] * 80, "bind": [0.25, 0.75] * 40},
    }


def test_stages_are_bars_by_rank_that_add_up_to_the_load() -> None:
    chart = load_stage_bars([record(1), record(0, transform=1.0)])
    assert chart.title == "transform takes 38% of the load, waiting for reads 12%"
    assert chart.labels[:2] == ("rank 0, read", "rank 0, wait for a read")
    values = dict(zip(chart.labels, chart.values, strict=True))
    for rank, rest in ((0, 1.25), (1, 0.25)):
        own = {label: value for label, value in values.items() if label.startswith(f"rank {rank}")}
        assert own[f"rank {rank}, rest"] == rest
        assert sum(own.values()) - own[f"rank {rank}, read"] == 4.0
    assert chart.texts[chart.labels.index("rank 1, transform")] == "2 s · 50%"
    assert "[s]" in draw_svg(chart)


def test_a_load_that_waits_for_its_reads_says_so_once() -> None:
    assert load_stage_bars([record(wait=2.5, transform=0.1)]).title == "wait for a read takes 62% of the load"
    with pytest.raises(ValueError, match="no load"):
        load_stage_bars([{**record(), "seconds": 0.0}])


def test_busy_bins_are_joined_to_lines_in_percent() -> None:
    chart = load_stage_lines(record())
    assert [line.name for line in chart.series] == ["read", "bind"], "a stage that never worked is not drawn"
    read, bind = chart.series
    assert len(read.x) == MAX_BINS
    assert read.y[:15] == (100.0,) * 15
    assert read.y[15:] == (0.0,) * 25
    assert bind.y == (50.0,) * MAX_BINS
    assert (read.x[0], read.x[-1]) == (pytest.approx(0.05), pytest.approx(3.95))
    assert chart.title == "rank 0: the reading thread is busy 38% of 4 s"
    assert (chart.x_unit, chart.y_unit) == ("s", "%")
    with pytest.raises(ValueError, match="no load"):
        load_stage_lines({**record(), "busy": {"read": [0.0]}})


def test_tables_have_every_stage_and_the_dearest_pieces_first() -> None:
    table = load_stage_table([record(0), record(1)])
    assert table.columns == ("stage", "rank 0, s", "rank 0, bytes", "rank 1, s", "rank 1, bytes")
    assert table.rows[3] == ("transform", 2.0, 100, 2.0, 100)
    assert table.rows[-2:] == (
        ("rest", 0.25, None, 0.25, None),
        ("the load, without read", 4.0, None, 4.0, None),
    )
    pieces = load_piece_table(record(), most=2)
    assert [row[:4] for row in pieces.rows] == [("layers.4", 4, None, 0.4), ("layers.3", 3, None, 0.3)]
    assert "2 of 5 pieces" in pieces.title


CELL = """
import time
from types import SimpleNamespace
from workbench.view import LoadStagesView

began = time.monotonic()
with LoadStagesView(num_ranks=2, title="A & B") as view:
    for i in range(1, 601):
        for rank in range(2):
            view(SimpleNamespace(rank=rank, bytes_read=i * 1000, bytes_total=600_000, seconds=i * 0.002, tensor="<w>",
                                 stages={"read": i * 0.002, "transform": i * 0.001, "wait": i * 0.0005}))
        time.sleep(0.002)
    print("cell is done")
view.close()
assert view.num_redraws <= 2 + (time.monotonic() - began) / 0.1, view.num_redraws
"""


@pytest.mark.notebook
def test_panel_moves_while_the_cell_is_busy_and_leaves_a_picture() -> None:
    book, messages = run_cell(CELL)
    printed = next(at for at, kind in messages if kind == "stream")
    assert sum(kind == "comm_msg" and at < printed for at, kind in messages) >= 5, "the panel stood still"
    states = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    (panel,) = (str(x["state"]["value"]) for x in states if "A &amp; B" in str(x["state"].get("value")))
    assert "rank 1" in panel
    assert "2 of 2 ranks" in panel
    pictures = [out["data"] for out in book.cells[0].outputs if "image/svg+xml" in out.get("data", {})]
    assert len(pictures) == 1
    assert pictures[0]["text/plain"] == "transform takes 50% of the load, waiting for reads 25%"
