"""What to do next: a step for whatever stands in the way, commands that exist, and an end where nothing does."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from workbench.cli import _parser
from workbench.cli.arguments import UsageError
from workbench.day0.advice import ADVICE, Run, next_steps
from workbench.day0.gates import GateBook, gate_forms
from workbench.report import Gate

HOW = Run(
    checkpoint="/data/my model", layout="tp2xep2", precision="mxfp4", device="cpu", out="out/day0", is_dummy=False
)


def closed(**values: object) -> tuple[Gate, ...]:
    """Every gate passes but those that are given; None has no value, with the reason "no luck"."""
    book = GateBook(gate_forms(has_known_answers=True))
    for gate_id, form in gate_forms(has_known_answers=True).items():
        value = values.get(gate_id.replace(".", "_"), form.threshold)
        if value is None:
            book.unmeasured(gate_id, "LoadError: no luck")
        else:
            book.measured(gate_id, value, evidence="seen")  # type: ignore[arg-type]
    return book.close()


def commands(steps: tuple[str, ...]) -> list[list[str]]:
    return [shlex.split(x) for step in steps for x in re.findall(r"`(workbench [^`]+)`", step)]


def test_every_gate_has_a_step_of_its_own() -> None:
    assert set(ADVICE) == set(gate_forms(has_known_answers=True))
    for gate_id, form in gate_forms(has_known_answers=True).items():
        wrong = not form.threshold if isinstance(form.threshold, bool) else form.threshold + 1  # type: ignore[operator]
        wrong = 0.0 if form.relation == ">=" else wrong
        first, *rest = next_steps(closed(**{gate_id.replace(".", "_"): wrong}), HOW)
        assert first.startswith(f"{gate_id}: "), first
        assert len(rest) == 1
        assert "{" not in first


@pytest.mark.parametrize("gate_id", [*ADVICE, ""])
def test_commands_can_be_run_as_they_stand(gate_id: str) -> None:
    steps = (ADVICE[gate_id].format_map(HOW.words),) if gate_id else next_steps(closed(), HOW)
    found = commands(steps)
    for words in found:
        args = _parser().parse_args(words[1:])
        assert str(getattr(args, "path", "/data/my model")) in ("/data/my model", "ADDRESS/v1")
    assert found or gate_id == "answers.looks"


def test_a_command_that_does_not_exist_would_be_seen() -> None:
    with pytest.raises(UsageError):
        _parser().parse_args(commands(("`workbench mend /data --layout tp2`",))[0][1:])


def test_a_command_that_no_shell_would_find_is_told_with_its_path() -> None:
    text = " ".join(next_steps(closed(), replace(HOW, program=".venv/bin/workbench")))
    assert "`.venv/bin/workbench serve" in text
    assert "`workbench" not in text


def test_where_all_pass_the_model_is_served_asked_and_compared() -> None:
    text = " ".join(next_steps(closed(), HOW))
    for word in ("workbench serve '/data/my model' --layout tp2xep2", "workbench chat", "--prove-gates", "compare"):
        assert word in text
    assert "trained" not in text


def test_weights_that_were_never_trained_are_the_first_thing_to_replace() -> None:
    assert next_steps(closed(), replace(HOW, is_dummy=True))[0].startswith("These weights were never trained")


def test_gates_without_a_value_are_told_once_a_reason_and_after_what_failed() -> None:
    silent = {"loading_rows": None, "parity_fp32": None, "answers_text": None}
    steps = next_steps(closed(checkpoint_audit=2, **silent), HOW)
    assert [step.partition(":")[0] for step in steps[:2]] == [
        "checkpoint.audit",
        "loading.rows and 2 more gates without a value",
    ]
    assert "mend the above first" in steps[1]
    assert "LoadError: no luck" in steps[1]
    assert steps[2].startswith("Then run it again")
    alone = next_steps(closed(**silent), HOW)
    assert alone[0].startswith("loading.rows and 2 more gates without a value: LoadError: no luck. `workbench load")
