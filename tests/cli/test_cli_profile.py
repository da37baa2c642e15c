"""profile and profile-compare as commands: against a server of its own, against ranks, and over records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Call

for room in ("serving",):
    sys.path.append(str(Path(__file__).resolve().parents[1] / room))

SMALL = ("--requests", 4, "--warm-up", 1, "--prompt-tokens", "4..9", "--answer-tokens", 5)


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_is_measured_token_by_token_and_recorded_with_its_circumstances(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from http_served import served

    record, trace = tmp_path / "p.jsonl", tmp_path / "t.json"
    with served([*b"abcdefgh"]) as server:
        url = server.server.url
        options = ("--record", record, "--trace", trace, "--slo-first-token", 60, "--goodput", 1.0)
        first = call("profile", url, *SMALL, *options, "--concurrency", 2, "--json")
        again = call("profile", url, *SMALL, "--record", record, "--rate", 200, "--burst", 2, "--ignore-eos")
        refused = call("profile", url, *SMALL, "--record", tmp_path / "r.jsonl", "--field", "echo=true")
        failing = call("profile", url, *SMALL, "--record", tmp_path / "f.jsonl", "--answer-tokens", 10**6)
    assert first.code == 0, first.err
    summary = first.record["load"]["summary"]
    assert summary["counted_by"] == ["running usage"]
    assert (summary["num_requests"], summary["num_tokens"], summary["num_failed"]) == (4, 20, 0)
    assert summary["inter_token_s"]["count"] <= 16
    assert first.record["load"]["goodput"]["share"] == 1.0
    assert again.code == 0, again.err
    assert "open loop, bursts of 2 at 200 requests/s" in again.out
    assert "answered 5 of 5 requests" in again.err
    one, two = records(record)
    for each in (one, two):
        assert each["kind"] == "LoadReport"
        environment = each["environment"]
        assert environment["target"] == url
        assert environment["hardware"]["cores"] >= 1
        assert environment["versions"]["packages"]["torch"]
        assert environment["commit"] is None or len(environment["commit"]) == 40
        assert environment["command"]
    assert any(event["name"] == "tokens" for event in json.loads(trace.read_text())["traceEvents"])
    assert refused.code == 1, "the field is in the request, and this server refuses it"
    assert "echo is not supported" in refused.out
    assert failing.code == 1, "requests that fail are the answer no"
    assert "RequestError" in failing.out


def test_two_runs_are_compared_and_a_slower_one_is_the_answer_no(call: Call, tmp_path: Path) -> None:
    def line(first_token_s: float) -> str:
        request = {"first_token_s": first_token_s, "per_token_s": 0.1, "longest_pause_s": 0.2, "end_to_end_s": 3.0}
        run = {
            "kind": "LoadReport",
            "environment": {"commit": "x"},
            "load": {"seed": 1},
            "requests": [request] * 20,
            "summary": {"num_failed": 0},
            "goodput": None,
        }
        return json.dumps(run) + "\n"

    fast, slow = tmp_path / "fast.jsonl", tmp_path / "slow.jsonl"
    fast.write_text(line(1.0))
    slow.write_text(line(9.9) + line(1.5))
    worse, better = call("profile-compare", fast, slow), call("profile-compare", slow, fast, "--json")
    same = call("profile-compare", slow, slow)
    assert (worse.code, better.code, same.code) == (1, 0, 0)
    assert "+50.0%" in worse.out
    assert better.record["changes"][0]["verdict"] == "better"
    assert "-84.8%" in same.out, "one file: its last two loads"
    (tmp_path / "none.jsonl").write_text("{}\n")
    none = call("profile-compare", tmp_path / "none.jsonl", fast)
    assert none.code == 2
    assert "no record of a load" in none.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--rate", 2, "--concurrency", 2), "give one of them"),
        (("--burst", 2), "--burst needs --rate"),
        (("--prompt-tokens", "9..3"), "not a length"),
        (("--image-share", 1.5), "share from 0 to 1"),
        (("--image-size", "0x9"), "not a size"),
        (("--goodput", 0.9), "needs a limit"),
        (("--operators",), "for a checkpoint folder"),
        (("--ranks", 2), "for a checkpoint folder"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused_before_anything_is_asked(
    call: Call, arguments: tuple[object, ...], word: str
) -> None:
    outcome = call("profile", "http://127.0.0.1:9/v1", *arguments)
    assert outcome.code == 2
    assert word in outcome.err


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_are_measured_inside(call: Call, tmp_path: Path) -> None:
    record, trace = tmp_path / "p.jsonl", tmp_path / "t.json.gz"
    outcome = call("profile", TINY, *SMALL, "--precision", "bf16", "--device", "cpu", "--max-tokens-per-sequence", 256,
                   "--operators", "--every", 2, "--record", record, "--trace", trace, "--json")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert outcome.record["load"]["summary"]["counted_by"] == ["ids"]
    (ledger,) = outcome.record["profile"]["ledgers"].values()
    assert sum(ledger["by_category"].values()) == pytest.approx(ledger["seconds"], rel=0.05)
    assert outcome.record["profile"]["experts"]["layers"]
    assert [each["kind"] for each in records(record)] == ["LoadReport", "DeploymentProfile"]
    assert records(record)[0]["environment"]["hardware"]["layout"]
    assert trace.stat().st_size > 1000
