"""O04 of the failure cases: a start-up that worked, a warm-up or a pass over dummy weights is no acceptance."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from acceptance import TINY, command

from workbench.base import CheckpointError, DeploymentError, RequestError, WorkbenchError
from workbench.checkpoint import write_ghost
from workbench.day0 import run, run_day0, serve
from workbench.day0.gates import GateBook
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.report import Gate
from workbench.serving import Answer, Timings, Usage
from workbench.spec import read_spec


@pytest.fixture
def ghost(tmp_path: Path) -> Path:
    return write_ghost(TINY, tmp_path / "ghost").root


def test_o04_a_ghost_is_refused_before_anything_is_started(ghost: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object, **options: object) -> None:
        raise AssertionError("a deployment was started")

    monkeypatch.setattr(Deployment, "start", started)
    monkeypatch.setattr(run, "survey_machine", started)
    with pytest.raises(CheckpointError, match="hold no weights") as caught:
        run_day0(ghost, device="cpu")
    assert caught.value.where == str(ghost)
    assert "ghost" in str(caught.value.found)
    assert "workbench rehearse" in str(caught.value.next_step)


def test_o04_the_command_says_so_and_leaves_no_report(ghost: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, output = command(ghost, "--device", "cpu", "--out", out, "--json")
    assert code not in (0, 1)  # 1 is a verdict
    assert '"type": "CheckpointError"' in output
    assert not out.exists()


class Service:
    """Warms up and then `fails`, or answers where it does not."""

    def __init__(self, fails: WorkbenchError | None) -> None:
        self.fails, self.asked = fails, list[str]()

    def infer(self, text: str, pictures: object = None, **options: object) -> Answer:
        self.asked.append(text)
        if text != "warm up" and self.fails is not None:
            raise self.fails
        return Answer(
            text="words",
            thinking="",
            token_ids=(1, 2),
            logprobs=(0.0, float(len(self.asked))),
            finish_reason="stop",
            usage=Usage(prompt_tokens=9, image_tokens=0, completion_tokens=2),
            timings=Timings(queued_s=0.0, token_s=(0.1, 0.2), total_s=0.2),
        )

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_free_slots=4)


def answered(monkeypatch: pytest.MonkeyPatch, service: Service) -> dict[str, Gate]:
    @contextmanager
    def opened(*_: object):
        yield service

    monkeypatch.setattr(serve, "open_service", opened)
    ranks: Any = SimpleNamespace(
        spec=read_spec(TINY),
        info=SimpleNamespace(max_tokens=512, num_slots=4),
        layout=Layout(),
        stats=lambda: [SimpleNamespace(device="card")],
    )
    gates = GateBook()
    serve.measure_answers(gates, [], [], ranks, TINY, say=lambda line: None)
    return {gate.id: gate for gate in gates.close()}


def test_o04_the_warm_up_is_asked_and_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(RequestError("no room"))
    gates = answered(monkeypatch, service)
    assert service.asked[:2] == ["warm up", "warm up"]  # words, and a picture
    assert (gates["answers.text"].value, gates["answers.image"].value) == (3, 2)
    assert gates["answers.text"].status == gates["answers.image"].status == "fail"
    assert gates["latency.first_token"].status == "not measured"
    answering = answered(monkeypatch, Service(None))
    assert answering["answers.text"].status == answering["answers.image"].status == "pass"
    assert answering["answers.text"].evidence.startswith("3 requests")
    assert answering["serving.slots"].evidence == "4 of 4 free after 5 requests"
    assert answering["answers.looks"].evidence.endswith("two distributions")
    assert answering["latency.first_token"].evidence.rpartition("slowest: ")[2] in {
        "text, short",
        "text, medium",
        "text, long",
        "picture",
        "two pictures",
    }


def test_where_the_ranks_gave_out_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = answered(monkeypatch, Service(DeploymentError("rank 0: NotImplementedError: no aten::topk here")))
    for gate_id in ("answers.text", "answers.image", "answers.looks"):
        assert gates[gate_id].status == "not measured"
        assert gates[gate_id].blocks
        assert "aten::topk" in gates[gate_id].evidence
