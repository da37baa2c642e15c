"""A chart shown in a notebook is there in JupyterLab, in a viewer without scripts, and as text."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from workbench.view import bytes_by_role
from workbench.view.notebook import chart_bundle

CHART = bytes_by_role({"routed_expert": 835_584, "head": 221_184}, what="<model> & more")


def test_bundle_holds_figure_drawing_and_text() -> None:
    bundle = chart_bundle(CHART)
    assert set(bundle) == {"application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"}
    assert bundle["text/plain"] == CHART.title
    figure = bundle["application/vnd.plotly.v1+json"]
    assert isinstance(figure, dict)
    assert list(figure["data"][0]["x"]) == [835_584, 221_184]
    ElementTree.fromstring(str(bundle["image/svg+xml"]))  # well-formed, whatever stands in the title


def test_bundle_is_small_and_holds_no_script() -> None:
    text = json.dumps(chart_bundle(CHART))
    assert len(text) < 20_000
    assert "<script" not in text
    assert "cdn" not in text
