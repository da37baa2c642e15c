"""Charts: findings in titles, units on axes, the same record drawn as SVG and by plotly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from workbench.base import Table
from workbench.view import (
    BarChart,
    Chart,
    LineChart,
    Series,
    bytes_by_role,
    bytes_table,
    chart_from_json,
    difference_by_layer,
    draw_svg,
    facts_table,
    latency_bars,
    latency_table,
    load_timeline,
    matmul_table,
    plotly_figure,
)
from workbench.view.charts import MAX_POINTS
from workbench.view.svg import decades, ticks

SUMMARY = {
    "num_requests": 3,
    "first_token_s": {"count": 3, "p50": 0.042, "p90": 0.05, "p99": 0.051, "low": 0.04, "high": 0.051},
    "per_token_s": {"count": 2, "p50": 0.012, "p90": 0.02, "p99": 0.02, "low": 0.01, "high": 0.02},
    "end_to_end_s": None,
    "conditions": "2 ranks",
}
CHARTS = [
    bytes_by_role({"head": 2_348_810_240, "routed_expert": 1_446_456_066_048}, what="Kimi K3"),
    load_timeline({1: [(0.0, 0), (2.0, 3_000_000)], 0: [(0.0, 0), (1.5, 1_000_000)]}),
    latency_bars(SUMMARY),
    difference_by_layer({0: 1e-6, 1: 0.0, 2: 9e-6}, limit=2e-5),
]


def numbers(svg: str) -> list[float]:
    """Every number of every drawing attribute."""
    found = []
    for element in ElementTree.fromstring(svg).iter():
        for key, value in element.attrib.items():
            if key in ("x", "y", "width", "height", "cx", "cy", "r", "points", "d", "x1", "y1", "x2", "y2"):
                found += [float(n) for n in re.findall(r"-?[\d.]+(?:e-?\d+)?|nan|inf", value)]
    return found


def test_importing_the_room_loads_neither_torch_nor_plotly_nor_widgets() -> None:
    code = (
        "import sys, workbench.view\n"
        "loaded = {'torch', 'plotly', 'ipywidgets', 'IPython'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_titles_state_the_finding() -> None:
    assert [chart.title for chart in CHARTS] == [
        "routed expert: 99.8% of the 1.45 TB of Kimi K3",
        "2 ranks read 4 MB in 2 s, 2 MB/s",
        "first token after 42 ms, then 12 ms per token",
        "largest relative difference to the reference: 9.0e-06 in layer 2, limit 2e-05",
    ]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title[:12])
def test_svg_is_well_formed_and_stays_inside_its_frame(chart: Chart) -> None:
    svg = draw_svg(chart)
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(-1 <= n <= max(width, height) + 1 for n in numbers(svg))
    assert chart.title in svg
    assert "<script" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title[:12])
def test_axes_carry_units_in_both_drawings(chart: Chart) -> None:
    svg, layout = draw_svg(chart), plotly_figure(chart).layout
    assert layout.title.text == chart.title
    if isinstance(chart, BarChart):
        assert f"[{chart.unit}]" in svg
        assert layout.xaxis.title.text.endswith(f"[{chart.unit}]")
    else:
        for label, unit, axis in (
            (chart.x_label, chart.x_unit, layout.xaxis),
            (chart.y_label, chart.y_unit, layout.yaxis),
        ):
            name = f"{label} [{unit}]" if unit else label
            assert name in svg
            assert axis.title.text == name


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title[:12])
def test_a_chart_survives_its_json(chart: Chart) -> None:
    record = json.loads(json.dumps(chart.to_json(), allow_nan=False))
    assert chart_from_json(record) == chart


def test_text_from_outside_is_escaped_in_svg() -> None:
    hostile = '"><script>alert(1)</script>'
    chart = BarChart(title=hostile, labels=(hostile,), values=(1.0,), texts=(hostile,), unit=hostile, x_label=hostile)
    lines = LineChart(
        title=hostile,
        series=(Series(name=hostile, x=(0.0, 1.0), y=(1.0, 2.0)), Series(name="b", x=(), y=())),
        x_label=hostile,
        x_unit="s",
        y_label=hostile,
        y_unit="B",
        note=hostile,
    )
    for drawing in (draw_svg(chart), draw_svg(lines)):
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawing).iter()}
        assert tags <= {"svg", "title", "text", "rect", "path", "polyline", "circle"}


def test_standalone_svg_paints_its_own_background() -> None:
    assert 'fill="#ffffff"' in draw_svg(CHARTS[0], standalone=True)
    assert 'fill="#ffffff"' not in draw_svg(CHARTS[0])


def test_bars_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="finite values"):
        BarChart(title="", labels=("a",), values=(float("nan"),), unit="", x_label="")
    with pytest.raises(ValueError, match="2 labels, 1 values"):
        BarChart(title="", labels=("a", "b"), values=(1.0,), unit="", x_label="")
    with pytest.raises(ValueError, match="not finite"):
        Series(name="a", x=(1.0,), y=(float("inf"),))
    with pytest.raises(ValueError, match="not a chart"):
        chart_from_json({"kind": "pie"})


def test_nothing_to_draw_is_said_and_not_drawn() -> None:
    for empty in (lambda: bytes_by_role({}), lambda: load_timeline({0: []}), lambda: latency_bars({})):
        with pytest.raises(ValueError, match=r"no bytes|no progress|no latency"):
            empty()
    with pytest.raises(ValueError, match="no layer"):
        difference_by_layer({})


def test_a_difference_that_is_not_finite_is_named_instead_of_drawn() -> None:
    chart = difference_by_layer({0: 1e-6, 1: float("inf"), 2: float("nan")})
    assert chart.series[0].x == (0.0,)
    assert chart.note == "not finite in layers 1, 2"
    ElementTree.fromstring(draw_svg(chart))


def test_long_series_are_thinned_and_keep_their_ends() -> None:
    points = [(i * 0.01, i) for i in range(10_000)]
    series = load_timeline({0: points}).series[0]
    assert len(series.x) == MAX_POINTS
    assert (series.x[0], series.x[-1]) == (0.0, points[-1][0])
    assert list(series.x) == sorted(series.x)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 3.7e9), (-2.0, 5.0), (4.0, 4.0), (0.0, 0.0), (0.1, 0.3)])
def test_ticks_cover_the_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 * abs(low)
    assert found[-1] >= high * (1 - 1e-9)
    assert 2 <= len(found) <= 12
    assert found == sorted(set(found))


def test_decades_cover_the_values() -> None:
    assert decades([3e-6, 2e-5]) == pytest.approx([1e-6, 1e-5, 1e-4])
    assert decades([1e-5]) == pytest.approx([1e-5, 1e-4])
    wide = decades([1e-20, 1.0])
    assert wide[0] == pytest.approx(1e-20)
    assert wide[-1] >= 1.0
    assert len(wide) <= 8


def test_tables_hold_what_the_figures_show() -> None:
    table = bytes_table({"head": 1000, "routed_expert": 3000})
    assert table.rows[0] == ("routed expert", 3000, "3 kB", "75.00%")
    assert table.rows[-1] == ("together", 4000, "4 kB", "100%")
    latency = latency_table(SUMMARY)
    assert [row[0] for row in latency.rows] == ["first token", "per token after the first"]
    assert latency.note == "2 ranks"
    rates = [{"device": "cpu", "dtype": "float16", "flops_per_s": None, "conditions": "RuntimeError: no"}]
    assert matmul_table(rates).rows == (("cpu", "float16", "not measured", "RuntimeError: no"),)
    facts = facts_table({"a": 1, "b": {"c": 2}, "d": ["x", 3], "e": None})
    assert isinstance(facts, Table)
    assert facts.rows == (("a", 1), ("b", "c 2"), ("d", "x, 3"), ("e", None))
