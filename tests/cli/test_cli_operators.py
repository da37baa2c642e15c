"""`workbench operators`: the inventory alone, with the device's answer, and its exit codes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.operators import Coverage, Inventory, OperatorResult, Roofline, Status
from workbench.operators import survey as survey_module

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"
Call = Callable[..., Any]


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    shutil.copy(TINY / "config.json", tmp_path)
    return tmp_path


def answer(status: Status) -> Callable[..., Coverage]:
    """A device that gives every matrix product this status."""

    def probe(inventories: list[Inventory], device: str, **_: object) -> Coverage:
        uses = [u for inventory in inventories for u in inventory.distinct()]
        results = tuple(
            OperatorResult(use=u, status=status if u.name == "aten.mm.default" else "ran", detail="said so")
            for u in uses
        )
        return Coverage(device=device, device_name="card", taken_at="now", results=results, roofline=Roofline())

    return probe


def test_a_description_alone_is_enough_for_the_inventory(call: Call, config_only: Path) -> None:
    done = call("operators", config_only, "--layout", "tp2", "--no-probe", "--tokens", "24", "--image", "4x6")
    assert done.code == 0, done.err
    for text in ("KDA+dense", "MLA+MoE", "dequantise", "all_reduce", "prefill: 1 x 24", "decode: 1 x 1", "vision"):
        assert text in done.out, text
    assert "Operators on" not in done.out


def test_phases_layouts_and_stages_are_those_asked_for(call: Call) -> None:
    arguments = (
        "--phase",
        "decode",
        "--layout",
        "pp2xtp2",
        "--context",
        "0",
        "--precision",
        "bf16",
        "--sequences",
        "3",
    )
    done = call("operators", TINY, *arguments, "--no-probe", "--json")
    assert done.code == 0, done.err
    inventories = done.record["inventories"]
    assert [(i["stage"], i["layout"]["tp"], i["workload"]["phase"]) for i in inventories] == [
        (0, 2, "decode"),
        (1, 2, "decode"),
    ]
    assert inventories[0]["workload"]["num_sequences"] == 3
    assert done.record["coverage"] is None
    assert "aten.mm.default" in done.record["operators"]


@pytest.mark.parametrize(
    ("status", "code"), [("ran", 0), ("approximate", 1), ("fell back", 1), ("missing", 1), ("failed", 1)]
)
def test_the_exit_code_is_the_answer_of_the_device(
    call: Call, monkeypatch: pytest.MonkeyPatch, status: Status, code: int
) -> None:
    monkeypatch.setattr(survey_module, "probe_operators", answer(status))
    done = call("operators", TINY, "--phase", "decode", "--context", "4", "--device", "card")
    assert done.code == code, done.err
    assert ("pass:" in done.out) == (code == 0)
    assert ("said so" in done.out) == (code == 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--layout", "tp3"), "does not divide"),
        (("--image", "4by4"), "not a patch grid"),
        (("--context", "-1"), "context"),
        (("--tokens", "9000"), "at most 8192"),
        (("--precision", "fp3"), "invalid choice"),
    ],
)
def test_what_cannot_be_asked_is_told_in_a_line(call: Call, arguments: tuple[str, ...], text: str) -> None:
    done = call("operators", TINY, "--no-probe", *arguments)
    assert done.code == 2
    assert text in done.err
