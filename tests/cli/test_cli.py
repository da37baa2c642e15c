"""Every command in both forms, its exit codes, and what a user reads who asked for something impossible."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from k3_published import CONFIG, INDEX

from workbench.cli.arguments import size
from workbench.cluster import survey_machine
from workbench.deployment import Deployment
from workbench.spec import read_spec

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data" / "k3-tiny"
HOUSE = ROOT / "data" / "images" / "house.png"
COMMANDS = ("inspect", "audit", "devices", "load", "generate", "day0", "compare", "profile", "train", "exam")
COMMANDS += ("rehearse",)

Call = Callable[..., Any]


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    root = tmp_path / "torn"
    shutil.copytree(TINY, root)
    shard = sorted(root.glob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:-100])
    return root


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test that starts a rank: what is refused must be refused before the weights are loaded."""
    monkeypatch.setattr(Deployment, "start", lambda *args, **options: pytest.fail("ranks were started"))


# how to ask


def test_a_bare_command_lists_what_can_be_asked(process: Call) -> None:
    outcome = process()
    assert (outcome.code, outcome.out) == (2, "")
    assert all(f"    {command} " in outcome.err for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_has_a_json_form(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.cli import main

    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspct"], "invalid choice: 'inspct'"),
        (["inspect"], "required: path"),
        (["inspect", TINY, "more"], "unrecognized arguments: more"),
        (["load", TINY, "--precision", "fp9"], "invalid choice: 'fp9'"),
        (["load", TINY, "--ranks", "0"], "'0' is not a number from 1"),
        (["load", TINY, "--ranks", "two"], "'two' is not a number from 1"),
        (["load", TINY, "--max-tokens-per-sequence", "-4"], "'-4' is not a number from 1"),
        (["generate", TINY], "required: text"),
        (["generate", TINY, "hi", "--max-tokens", "0"], "'0' is not a number from 1"),
        (["generate", TINY, "hi", "--temperature", "nan"], "'nan' is not a temperature from 0"),
        (["generate", TINY, "hi", "--expert-memory", "2 kg"], "'2 kg' is not a size above 0"),
        (["generate", TINY, "hi", "--expert-memory", "0"], "'0' is not a size above 0"),
        (["day0", TINY, "--max-first-token-s", "0"], "'0' is not a time in seconds above 0"),
        (["compare", "one"], "required: new"),
        (["exam", TINY, "--per-kind", "0"], "'0' is not a number from 1"),
        (["exam", TINY, "--control", "red"], "invalid choice: 'red'"),
    ],
)
def test_a_question_that_cannot_be_asked_is_a_usage_error(call: Call, arguments: list[object], message: str) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("UsageError: ")
    assert message in outcome.err
    assert "usage: workbench" in outcome.err
    outcome = call(*arguments, "--json")
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.record["error"]["type"] == "UsageError"
    assert message in outcome.record["error"]["message"]


def test_host_memory_for_experts_alone_is_a_usage_error(call: Call) -> None:
    outcome = call("generate", TINY, "hi", "--expert-host-memory", "1GiB")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("UsageError: --expert-host-memory is more of --expert-memory")


@pytest.mark.parametrize(("text", "num_bytes"), [("2GiB", 2 << 30), ("1.5 kB", 1500), ("500M", 500 * 10**6), ("7", 7)])
def test_sizes_are_read_with_their_units(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["inspect", "no/such"], "ConfigError", "no/such: file is missing. A checkpoint folder holds config.json"),
        (["inspect", "data"], "ConfigError", "Folders in it that have one: k3-nano, k3-nano-draft, k3-tiny"),
        (["inspect", "README.md"], "ConfigError", "not readable as JSON"),
        (["inspect", TINY / "model-00001-of-000012.safetensors"], "ConfigError", "Give the folder it lies in"),
        (["audit", "no/such"], "CheckpointError", "no/such: not a folder"),
        (["audit", "README.md"], "CheckpointError", "not a folder"),
        (["load", "no/such"], "ConfigError", "file is missing"),
        (["load", TINY, "--layout", "tq2"], "LayoutError", "layout 'tq2' is not readable (expected for example tp2"),
        (["load", TINY, "--layout", "tp2:by_post"], "LayoutError", "dispatch='by_post'"),
        (["load", TINY, "--layout", "tp2", "--ranks", "3"], "LayoutError", "needs 2 ranks, --ranks says 3"),
        (["load", TINY, "--layout", "tp5"], "LayoutError", "tp=5 does not divide"),
        (["load", TINY, "--ranks", "23"], "LayoutError", "no layout of 23 ranks divides this model"),
        (["load", TINY, "--max-tokens-per-sequence", "9000"], "RequestError", "1 to 8192 tokens"),
        (["generate", "no/such", "hi"], "ConfigError", "file is missing"),
        (["generate", TINY, "hi", "--image", "no.png"], "ImageError", "no.png: no such file"),
        (["generate", TINY, "hi", "--image", HOUSE, "--image", "README.md"], "ImageError", "not a readable picture"),
        (["day0", "no/such"], "ConfigError", "file is missing"),
        (["day0", TINY, "--layout", "tp5"], "LayoutError", "tp=5 does not divide"),
        (["day0", TINY, "--out", "README.md/deep"], "ConfigError", "the report cannot be written here"),
        (["generate", TINY, "hi", "--seed", "-1"], "RequestError", "seed is out of range"),
        (["generate", TINY, "hi", "--temperature", "101"], "RequestError", "temperature is out of range"),
        (["compare", "/dev/zero", "/dev/zero"], "ConfigError", "not a regular file"),
        (["compare", "no/such", "no/such"], "ConfigError", "not a readable report"),
        (["compare", TINY / "config.json", TINY / "config.json"], "ConfigError", "config.json: not a Day-0 report"),
    ],
)
def test_what_goes_wrong_is_typed_and_told_in_a_line(
    call: Call,
    arguments: list[object],
    kind: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "--max-tokens-per-sequence" not in arguments:  # that one is the deployment's own refusal
        request.getfixturevalue("no_ranks")
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"{kind}: ")
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    outcome = call(*arguments, "--json")
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.record["error"]["type"] == kind
    assert message in outcome.record["error"]["message"]


@pytest.mark.usefixtures("no_ranks")
def test_no_tokenizer_is_found_out_before_the_weights_are_loaded(call: Call, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    outcome = call("generate", tmp_path / "mute", "hi")
    assert outcome.code == 2
    assert outcome.err.startswith("TokenizerError: ")


@pytest.mark.usefixtures("no_ranks")
def test_a_picture_for_a_blind_model_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = dataclasses.replace(read_spec(TINY), vision=None, projector=None)
    monkeypatch.setattr("workbench.spec.read_spec", lambda path: blind)
    outcome = call("generate", TINY, "hi", "--image", HOUSE)
    assert outcome.code == 2
    assert outcome.err == f"RequestError: {TINY}: this model takes no pictures\n"


# what a terminal and a script can rely on


def test_control_characters_in_a_path_reach_the_terminal_as_escapes(call: Call, tmp_path: Path) -> None:
    hostile = tmp_path / "\x1b]0;owned\x07\x1b[31mred\udcff"
    shutil.copytree(TINY, hostile)
    for arguments, code in ((["inspect", hostile], 0), (["audit", hostile], 0), (["inspect", hostile / "no"], 2)):
        outcome = call(*arguments)
        assert outcome.code == code
        shown = outcome.out + outcome.err
        assert "\\x1b]0;owned\\x07" in shown
        assert all(character.isprintable() for character in shown.replace("\n", ""))
        assert call(*arguments, "--json").record


def test_a_terminal_that_spells_only_ascii_gets_escapes(process: Call) -> None:
    outcome = process("inspect", TINY, PYTHONIOENCODING="ascii")
    assert (outcome.code, outcome.err) == (0, "")
    assert "\\u2500" in outcome.out


def test_a_reader_that_leaves_early_ends_nothing() -> None:
    command = [sys.executable, "-m", "workbench.cli", "inspect", str(TINY)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_signals_of_the_calling_process_are_left_alone(call: Call) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    call("inspect", TINY)
    assert signal.getsignal(signal.SIGPIPE) is before  # a dead rank's socket must raise, not kill the handle


def test_a_bug_shows_its_traceback_and_is_not_a_no(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.checkpoint.inspect_checkpoint", lambda path: 1 / 0)
    outcome = call("inspect", TINY, "--json")
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert outcome.record["error"]["type"] == "ZeroDivisionError"


def test_an_interrupt_is_told_and_has_its_own_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.checkpoint.inspect_checkpoint", interrupt)
    outcome = call("inspect", TINY)
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


def test_numbers_that_json_cannot_hold_are_spelled_out(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def to_json(self) -> dict[str, object]:
            return {"logprobs": [math.nan, -math.inf]}

    monkeypatch.setattr("workbench.checkpoint.inspect_checkpoint", lambda path: Broken())
    assert call("inspect", TINY, "--json").record == {"logprobs": ["nan", "-inf"]}


# inspect and audit


def test_inspect_tells_sizes_layers_and_caches(process: Call, call: Call) -> None:
    outcome = process("inspect", "data/k3-tiny")
    assert (outcome.code, outcome.err) == (0, "")
    for fact in ("2,484,724", "KDA+MoE", "routed_expert", "one-to-one", "Files"):
        assert fact in outcome.out
    counts = call("inspect", TINY, "--json").record["counts"]
    assert (counts["num_params"], counts["kv_bytes_per_token"]) == (2_484_724, 288)


def test_inspect_needs_only_a_config(call: Call, tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    whole = call("inspect", TINY, "--json").record
    for path in (tmp_path, tmp_path / "config.json"):
        bare = call("inspect", path, "--json").record
        assert bare["counts"] == whole["counts"]
        assert bare["sources"] == ["config.json"]


@pytest.mark.skipif(not (CONFIG.is_file() and INDEX.is_file()), reason="no copy of the published config and index here")
@pytest.mark.slow
def test_inspect_counts_the_published_model_to_the_byte(process: Call, tmp_path: Path) -> None:
    shutil.copyfile(CONFIG, tmp_path / "config.json")
    shutil.copyfile(INDEX, tmp_path / INDEX.name)
    outcome = process("inspect", tmp_path, "--json")
    assert outcome.code == 0, outcome.err
    counts, names = outcome.record["counts"], outcome.record["names"]
    assert counts["num_params"] == 2_779_931_837_184
    assert round(counts["active_params"] / 1e9, 2) == 104.19
    assert counts["weight_bytes"] == 1_560_860_324_864
    assert counts["kv_bytes_per_token"] == 27_648
    assert counts["state_bytes_per_sequence"] == 449_372_160
    assert (names["num_names"], names["num_matched"], names["missing"], names["unknown"]) == (497_220, 497_220, [], [])
    code = (
        "import sys; from workbench.base import peak_resident_bytes; from workbench.cli import main;"
        "main(['inspect', sys.argv[1], '--json']); print(peak_resident_bytes(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=300)
    assert int(done.stderr.split()[-1]) < 2 << 30


def test_audit_says_yes_with_0_and_no_with_1(process: Call, call: Call, torn: Path) -> None:
    assert "sound" in call("audit", TINY).out
    assert call("audit", TINY, "--shallow", "--json").record["content"]["mode"] == "none"
    outcome = process("audit", torn)
    assert (outcome.code, outcome.err) == (1, "")
    assert "error: torn  model-00004-of-000012.safetensors" in outcome.out
    outcome = process("audit", torn, "--json")
    assert outcome.code == 1
    assert [x["kind"] for x in outcome.record["findings"] if x["severity"] == "error"] == ["torn"]


# commands that measure or start ranks


def test_devices_are_told_in_words(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = survey_machine(features=False, rates=False)
    monkeypatch.setattr("workbench.cluster.survey_machine", lambda folder: quick)
    outcome = call("devices")
    assert outcome.code == 0
    assert "cpu" in outcome.out
    assert "torch" in outcome.out


@pytest.mark.slow
def test_devices_are_measured_as_json(process: Call) -> None:
    outcome = process("devices", "--folder", TINY, "--json")
    assert outcome.code == 0, outcome.err
    cpu = next(device for device in outcome.record["devices"] if device["type"] == "cpu")
    assert any(feature["is_supported"] for feature in cpu["features"])
    assert outcome.record["disk_read"]["value"] > 0


def test_devices_of_a_folder_without_files_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = call("devices", "--folder", "no/such")
    assert outcome.code == 2
    assert outcome.err.startswith("ConfigError: no/such: not a folder")


def test_load_prints_one_ledger_as_json(process: Call) -> None:
    outcome = process("load", TINY, "--device", "cpu", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    record = outcome.record
    assert record["bytes_read"] == record["bytes_assigned"] == 2_669_784
    assert (record["rows_missing"], len(record["ranks"])) == (0, 1)


@pytest.mark.ranks
def test_load_over_ranks_prints_a_table(call: Call) -> None:
    outcome = call("load", TINY, "--ranks", "2", "--device", "cpu", "--precision", "bf16")
    assert outcome.code == 0
    assert outcome.out.startswith("2 ranks read ")
    assert outcome.out.count(" on cpu ") == 2


def test_load_of_a_torn_checkpoint_names_the_file(call: Call, torn: Path) -> None:
    outcome = call("load", torn, "--device", "cpu")
    assert (outcome.code, outcome.out) == (2, "")
    assert "model-00004-of-000012.safetensors" in outcome.err


def test_load_on_a_device_that_is_not_there_says_what_is(call: Call) -> None:
    outcome = call("load", TINY, "--device", "npu9", "--json")
    assert outcome.code == 2
    assert outcome.record["error"]["type"] == "DeploymentError"
    assert "npu9" in outcome.record["error"]["message"]


@pytest.mark.ranks
def test_generate_answers_a_picture_in_words(process: Call) -> None:
    outcome = process("generate", TINY, "What is it?", "--image", HOUSE, "--max-tokens", 5, "--layout", "tp2")
    assert (outcome.code, outcome.err) == (0, "")
    assert " prompt tokens, " in outcome.out
    assert "first token after" in outcome.out


def test_generate_prints_the_whole_answer_as_json_and_repeats_itself(call: Call) -> None:
    arguments = ("generate", TINY, "Say", "--max-tokens", 4, "--temperature", 0.8, "--seed", 7, "--json")
    first, second = (call(*arguments).record for _ in range(2))
    assert first["text"] == second["text"]
    assert first["token_ids"] == second["token_ids"]
    assert first["usage"]["completion_tokens"] >= 1
    assert first["usage"]["image_tokens"] == 0


def test_train_refuses_a_recipe_that_is_not_there_and_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "train", str(tmp_path / "none.toml"), "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "none.toml" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
