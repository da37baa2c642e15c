"""The Day-0 report: complete, self-contained, safe to open whatever the model said, and comparable."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from report_samples import png_bytes, sample_report

from workbench.base import ConfigError, Table
from workbench.report import Day0Report, Gate, Picture, Section, compare_reports, page, read_report

PAYLOAD = (
    "\"'><script>window.hit=1</script><img src=x onerror=\"window.hit=1\"></style></svg><svg onload='window.hit=1'>"
)


class Structure(HTMLParser):
    """Tags in order, and attributes by tag; text is not looked at."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self.tags.append("/" + tag)


def numbered_payload() -> object:
    """Each place gets a payload of its own, so that names which must differ still do."""
    count = iter(range(1000))
    return lambda plain: f"{next(count)}{PAYLOAD}"


def numbered_word() -> object:
    count = iter(range(1000))
    return lambda plain: f"{next(count)}word"


def test_no_text_from_outside_can_change_the_page() -> None:
    """With a payload in every field the page has exactly the tags that it has with plain words."""
    hostile = Structure(sample_report(numbered_payload()).render_html())  # type: ignore[arg-type]
    benign = Structure(sample_report(numbered_word()).render_html())  # type: ignore[arg-type]
    assert hostile.tags == benign.tags
    assert [(tag, name) for tag, name, _ in hostile.attributes] == [(tag, name) for tag, name, _ in benign.attributes]
    assert not [x for x in hostile.attributes if x[1].startswith("on")]
    assert "script" not in hostile.tags


def test_the_check_above_sees_a_forgotten_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "text", str)
    assert "script" in Structure(sample_report(numbered_payload()).render_html()).tags  # type: ignore[arg-type]


def test_page_refers_to_nothing_outside_itself() -> None:
    structure = Structure(sample_report().render_html())
    links = [(tag, name, value) for tag, name, value in structure.attributes if name in ("src", "href", "action")]
    assert links
    assert all(tag == "img" and value.startswith("data:image/png;base64,") for tag, _, value in links)
    assert not {"script", "link", "iframe", "object", "base"} & set(structure.tags)
    policy = next(value for tag, name, value in structure.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "url(" not in sample_report().render_html()


def test_control_characters_and_lone_surrogates_do_not_reach_the_file(tmp_path: Path) -> None:
    report = sample_report(lambda plain: plain + "\x00\x1b[31m\ud800\u0085")
    html_path, json_path = report.write(tmp_path)
    text = html_path.read_text(encoding="utf-8")
    assert not {"\x00", "\x1b", "\u0085"} & set(text)
    assert "\\x1b[31m" in text
    assert json.loads(json_path.read_text(encoding="utf-8"))["model"] == "Kimi K3 tiny\x00\x1b[31m\ud800\u0085"


def test_page_says_everything_a_reader_needs_to_trust_it() -> None:
    text = sample_report().render_html()
    for fact in (
        "Kimi K3 tiny",
        "abcdef012345",
        "local changes",
        "2026-11-29T19:30:00+00:00",
        "a CPU",
        "tp2",
        "2.13.0",
    ):
        assert fact in text, fact
    assert "All gates pass" in text
    assert "not trained" in text
    assert "Fails under: a torn file" in text
    assert "<li>Serve it: <code>workbench serve k3</code></li><li>compare</li>" in text
    assert "not measured" in text
    assert text.count("<svg") == 3
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert len(text) < 60_000


def test_real_weights_carry_no_warning_and_a_blocking_gate_is_named() -> None:
    report = sample_report(weights_kind="real")
    assert "not trained" not in report.render_html()
    bad = Gate(id="loading.peak", layer="loading", question="?", threshold=1, value=2, relation="<=")
    report = dataclasses.replace(report, gates=(*report.gates, bad))
    assert not report.passed
    assert "1 gate stands in the way" in report.render_html()
    assert "blocking: loading.peak" in report.render()


def test_the_verdict_names_what_is_at_fault_and_what_to_do_next() -> None:
    words = "a.safetensors is torn: model.norm.weight & more"
    late = Gate(id="parity.fp32", layer="operators", question="?", threshold=0, value=None, evidence="never loaded")
    bad = Gate(id="checkpoint.files", layer="framework", question="?", threshold=0, value=1, evidence=words)
    report = sample_report(gates=(late, bad), next_steps=("checkpoint.files: `workbench audit a`",))
    assert report.verdict.cause == f"checkpoint.files: {words}"
    page = report.render_html()
    assert page.count("<p class=cause>checkpoint.files: a.safetensors is torn: model.norm.weight &amp; more</p>") == 1
    record = report.to_json()
    assert record["cause"] == report.verdict.cause
    assert record["verdict"].endswith(f". {report.verdict.cause}")
    assert record["next_steps"] == ["checkpoint.files: `workbench audit a`"]
    assert report.render(width=80).endswith("\n\nNext:\n1. checkpoint.files: `workbench audit a`")
    assert sample_report(gates=(late,)).verdict.cause == "parity.fp32: never loaded"
    assert sample_report().verdict.cause == ""


def test_a_long_cause_is_cut_in_the_verdict_and_whole_beside_its_gate() -> None:
    gate = Gate(id="a.b", layer="framework", question="?", threshold=0, value=1, evidence="wrong " * 300 + "end")
    page = sample_report(gates=(gate,)).render_html()
    assert page.count("wrong " * 299) == 1
    assert re.search(r"<p class=cause>a\.b: (wrong )+w?r?o?n?g?…</p>", page)


def test_a_report_of_before_has_no_steps() -> None:
    record = sample_report().to_json()
    del record["next_steps"], record["cause"]
    assert Day0Report.from_json(record).next_steps == ()
    assert "Next" not in Day0Report.from_json(record).render()


def test_report_survives_its_json_and_renders_the_same(tmp_path: Path) -> None:
    report = sample_report()
    report.write(tmp_path / "deep" / "folder")
    restored = read_report(tmp_path / "deep" / "folder")
    assert restored == report
    assert restored.render_html() == report.render_html()
    assert not list((tmp_path / "deep" / "folder").glob("*.partial"))


def test_numbers_that_json_cannot_hold_are_spelled_out(tmp_path: Path) -> None:
    section = Section(title="t", tables=(Table(columns=("x",), rows=((float("nan"),), (float("inf"),))),))
    report = sample_report(sections=(section,), seconds=float("inf"), machine={"rate": float("nan")})
    _, path = report.write(tmp_path)
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))
    assert record["machine"]["rate"] == "nan"
    assert record["sections"][0]["tables"][0]["rows"] == [["nan"], ["inf"]]


def test_unreadable_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a readable report"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"format": "something/9"}')
    with pytest.raises(ConfigError, match="not a Day-0 report"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a Day-0 report"):
        read_report(tmp_path / "report.json")
    record = sample_report().to_json()
    del record["gates"][0]["threshold"]
    (tmp_path / "report.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"report\.json: a damaged report: KeyError: 'threshold'"):
        read_report(tmp_path)


def test_two_gates_of_one_id_and_an_unknown_kind_of_weights_are_refused() -> None:
    gates = sample_report().gates
    with pytest.raises(ValueError, match=r"share the id 'checkpoint\.audit'"):
        sample_report(gates=(*gates, gates[0]))
    with pytest.raises(ValueError, match="neither 'real' nor 'dummy'"):
        sample_report(weights_kind="calibrated")


def test_only_small_pixel_pictures_are_shown() -> None:
    with pytest.raises(ValueError, match="PNG or JPEG"):
        Picture(data=b"<svg onload='alert(1)'/>")
    with pytest.raises(ValueError, match="at most"):
        Picture(data=png_bytes() + b"\0" * (5 << 20))
    picture = Picture.thumbnail(Image.new("LA", (4000, 1000), (9, 128)), max_side=100)
    assert len(picture.data) < 10_000
    assert picture.data_uri().startswith("data:image/png;base64,")
    assert Picture(data=b"\xff\xd8\xff\xe0rest").data_uri().startswith("data:image/jpeg")


def changed(report: Day0Report, **values: object) -> Day0Report:
    """The report with other values in its gates, by gate id; None drops the gate."""
    gates = []
    for gate in report.gates:
        if gate.id not in values:
            gates.append(gate)
        elif values[gate.id] is not None:
            gates.append(dataclasses.replace(gate, value=values[gate.id]))  # type: ignore[arg-type]
    return dataclasses.replace(report, gates=tuple(gates))


def timed(value: float | None, **changes: object) -> Day0Report:
    gate = Gate(
        id="profiling.first_token", layer="profiling", question="?", threshold=1.0, value=value, relation="<=", unit="s"
    )
    return sample_report(gates=(*sample_report().gates, gate), **changes)


def test_equal_reports_compare_without_news() -> None:
    comparison = compare_reports(timed(0.5), timed(0.5).to_json())
    assert comparison.passed
    assert comparison.environment == ()
    assert comparison.table().rows == ()
    assert "0 of 4 gates changed" in comparison.render()


def test_a_slower_gate_shows_its_ratio_and_a_failed_one_is_a_regression() -> None:
    slower = compare_reports(timed(0.5), timed(0.75))
    assert slower.passed
    (change,) = (x for x in slower.gates if x.is_changed)
    assert change.ratio == pytest.approx(1.5)
    assert "1.5x" in slower.render()
    failed = compare_reports(timed(0.5).to_json(), timed(2.0).to_json())
    assert [x.id for x in failed.regressions] == ["profiling.first_token"]
    assert "WORSE" in failed.render()
    assert "WORSE" in failed._repr_html_()


def test_a_gate_that_is_gone_or_no_longer_measured_is_a_regression() -> None:
    gone = compare_reports(timed(0.5), sample_report())
    assert [x.id for x in gone.regressions] == ["profiling.first_token"]
    silent = compare_reports(timed(0.5), timed(None))
    assert [x.id for x in silent.regressions] == ["profiling.first_token"]
    new = compare_reports(sample_report(), timed(0.5))
    assert new.passed
    assert [x.id for x in new.gates if x.is_changed] == ["profiling.first_token"]


def test_what_differs_in_the_environment_is_listed() -> None:
    versions = {**sample_report().versions, "packages": {"torch": "2.14.0"}}
    comparison = compare_reports(timed(0.5), timed(0.5, versions=versions, hardware="another CPU"))
    assert ("torch", "2.13.0", "2.14.0") in comparison.environment
    assert ("hardware", "a CPU", "another CPU") in comparison.environment
    json.dumps(comparison.to_json(), allow_nan=False)


def test_ratio_is_left_out_where_it_means_nothing() -> None:
    ratios = {x.id: x.ratio for x in compare_reports(sample_report(), sample_report()).gates}
    assert ratios == {"checkpoint.audit": None, "serving.text": None, "cluster.links": None}
    assert changed(sample_report(), **{"serving.text": None}).gates[1].id == "cluster.links"


@pytest.mark.parametrize("kind", ["pipe", "too deep"])
def test_a_report_that_would_block_or_recurse_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "report.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("[" * 300_000)
    with pytest.raises(ConfigError, match="not a readable report"):
        read_report(path)
