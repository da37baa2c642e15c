"""Metrics files: readable at any moment, also with a torn last line, and without doubled steps after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.base import ConfigError
from workbench.training.metrics import MetricsTail, MetricsWriter, describe_record, read_metrics


def test_records_come_back_in_order_and_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write("step", 0, loss=1.5, load={"1": 1.2})
        metrics.write("exam", 0, scores={"colour": [3, 4]})
        assert len(read_metrics(path)) == 2, "readable while the run goes on"
        metrics.write("step", 1, loss=1.25)
    assert [record["loss"] for record in read_metrics(path, "step")] == [1.5, 1.25]
    assert read_metrics(path, "exam") == [{"kind": "exam", "step": 0, "scores": {"colour": [3, 4]}}]


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nothing.jsonl") == []


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_left_out_wherever_it_was_torn(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write("step", 0, loss=1.5)
        metrics.write("step", 1, loss=1.25)
    path.write_bytes(path.read_bytes()[:-cut])
    records = read_metrics(path)
    assert [record["step"] for record in records] == [0][: len(records)]
    with MetricsWriter(path, first_step=2) as metrics:  # a resumed run starts a fresh line
        metrics.write("step", 2, loss=1.0)
    assert [record["step"] for record in read_metrics(path)] in ([0, 2], [2])


def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(5):
            metrics.write("step", step, loss=float(step))
    with MetricsWriter(path, first_step=3) as metrics:
        metrics.write("step", 3, loss=-1.0)
    assert [record["loss"] for record in read_metrics(path)] == [0.0, 1.0, 2.0, -1.0]


@pytest.mark.parametrize("line", ["{", "3", '{"kind":"step"}', '{"kind":"step","step":"1"}'])
def test_a_broken_line_before_the_last_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"step","step":0}\n' + line + '\n{"kind":"step","step":2}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_metrics(path)


def test_a_tail_gives_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    seen: list[object] = []
    with MetricsWriter(path, on_record=lambda record: seen.append(record["step"])) as metrics:
        metrics.write("step", 0, loss=1.0)
        tail = MetricsTail(path)
        assert tail.new() == []
        metrics.write("step", 1, loss=0.5)
        assert [record["step"] for record in tail.new()] == [1]
        with path.open("ab") as file:
            file.write(b'{"kind":"step","st')
        assert tail.new() == []
        with path.open("ab") as file:
            file.write(b'ep":2}\n')
        assert [record["step"] for record in tail.new()] == [2]
    with MetricsWriter(path, first_step=1) as metrics:
        assert tail.new() == []
        metrics.write("step", 1, loss=0.4)
        assert [record["loss"] for record in tail.new()] == [0.4]
    assert seen == [0, 1]


def test_records_read_well_in_a_terminal() -> None:
    step = {
        "kind": "step", "step": 9, "loss": 1.25, "phase": "plain", "grad_norm": 0.5, "load": {"1": 1.2, "2": 1.4},
        "tokens_per_s": 4000.0, "seconds": 6.0,
    }  # fmt: skip
    assert describe_record(step, 30) == (
        "step     10 of 30  loss 1.2500  plain  grad 0.50  load 1.40  4,000 tokens/s  2 min left"
    )
    exam = {"kind": "exam", "step": 9, "scores": {"colour": [3, 4]}}
    assert describe_record(exam, 30).endswith("held out: colour 3/4")
    run = {"kind": "run", "step": 0, "layout": "dp2", "threads": 1, "num_params": 9000}
    assert "layout dp2, 9,000 parameters" in describe_record(run, 30)
