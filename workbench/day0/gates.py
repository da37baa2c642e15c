"""The acceptance gates, as data: what is asked, what answer is good enough, and where in the stack a failure points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.base import ConfigError, short_repr
from workbench.report import Gate
from workbench.report.gates import Relation, Value

__all__ = ["GATES", "KNOWN_ANSWER_GATES", "GateBook", "GateForm", "gate_forms"]

RUNTIME, OPERATORS, FRAMEWORK, APPLICATION = (
    "driver and runtime",
    "compilation and operators",
    "framework",
    "application",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateForm:
    """A gate before its value is known."""

    layer: str
    question: str
    threshold: Value
    relation: Relation = "=="
    unit: str = ""


GATES: Mapping[str, GateForm] = {
    "device.features": GateForm(
        layer=RUNTIME,
        question="Does the device do what the model needs, with right numbers? (features that fail)",
        threshold=0,
    ),
    "operators.coverage": GateForm(
        layer=OPERATORS,
        question="Does the device itself run every operator of the model, with right numbers? (operators it does not)",
        threshold=0,
    ),
    "checkpoint.audit": GateForm(
        layer=FRAMEWORK,
        question="Are the files whole, consistent, and one-to-one with the model? (errors)",
        threshold=0,
    ),
    "loading.rows": GateForm(
        layer=FRAMEWORK, question="Was every parameter row written exactly once? (rows missing)", threshold=0
    ),
    "loading.read_ratio": GateForm(
        layer=FRAMEWORK,
        question="Did the ranks together read only the bytes that the plan assigns them? (read over assigned)",
        threshold=1.02,
        relation="<=",
    ),
    "loading.memory": GateForm(
        layer=FRAMEWORK,
        question="Did host memory stay within the weights a rank keeps there plus the staging window? (growth beyond)",
        threshold=0,
        relation="<=",
        unit="B",
    ),
    "parity.fp32": GateForm(
        layer=OPERATORS,
        question="In fp32, do the ranks compute the published model, layer by layer? (tensors out of tolerance)",
        threshold=0,
    ),
    "parity.fp32_tokens": GateForm(
        layer=OPERATORS,
        question="In fp32, does cached decoding choose the tokens the reference would choose? (tokens apart)",
        threshold=0,
    ),
    "parity.batch": GateForm(
        layer=FRAMEWORK,
        question="In fp32, is a request answered the same alone and among others? (answers apart)",
        threshold=0,
    ),
    "parity.serving": GateForm(
        layer=OPERATORS,
        question="In the precision served, do the ranks stay within its rounding of the published model? (tensors out)",
        threshold=0,
    ),
    "answers.text": GateForm(
        layer=APPLICATION, question="Were short, medium and long text requests answered? (requests failed)", threshold=0
    ),
    "answers.image": GateForm(
        layer=APPLICATION, question="Were requests with pictures answered? (requests failed)", threshold=0
    ),
    "answers.looks": GateForm(
        layer=APPLICATION,
        question="Does the answer depend on the picture? (first-token distribution changes with it)",
        threshold=True,
    ),
    "serving.slots": GateForm(
        layer=APPLICATION, question="Is every cache slot free again after the requests? (slots held)", threshold=0
    ),
    "latency.first_token": GateForm(
        layer=APPLICATION,
        question="Is the first token there in time? (slowest request)",
        threshold=10.0,
        relation="<=",
        unit="s",
    ),
    "latency.per_token": GateForm(
        layer=APPLICATION,
        question="Do the tokens after it follow in time? (mean of the slowest request)",
        threshold=1.0,
        relation="<=",
        unit="s",
    ),
}

# Asked in addition where the right answers are known.
KNOWN_ANSWER_GATES: Mapping[str, GateForm] = {
    "answers.correct": GateForm(
        layer=APPLICATION,
        question="Are held-out questions about pictures and facts answered as expected? (share right)",
        threshold=0.8,
        relation=">=",
    ),
    "answers.blank": GateForm(
        layer=APPLICATION,
        question="Without its picture, is the same question no longer answered right? (share right by guessing)",
        threshold=0.4,  # guessing from the words gives about an eighth, and never this much in so few questions
        relation="<=",
    ),
}


def gate_forms(*, has_known_answers: bool) -> Mapping[str, GateForm]:
    """The gates of a run, in order; those about right answers follow the others about answers."""
    if not has_known_answers:
        return GATES
    forms: dict[str, GateForm] = {}
    for gate_id, form in GATES.items():
        forms[gate_id] = form
        if gate_id == "answers.looks":
            forms |= KNOWN_ANSWER_GATES
    return forms


class GateBook:
    """Collects values for the forms; what nobody measured is reported as not measured, with the reason.

    `limits` sets other thresholds, by gate id, for gates that have a limit. Raises ConfigError for an id that is not
    asked, for a gate that asks for one exact answer, and for a limit that is not a number.
    """

    def __init__(self, forms: Mapping[str, GateForm] = GATES, *, limits: Mapping[str, float] | None = None) -> None:
        self._forms = {**forms, **{gate_id: _limited(forms, gate_id, x) for gate_id, x in (limits or {}).items()}}
        self._gates: dict[str, Gate] = {}
        self._reasons: dict[str, str] = {}

    def measured(self, gate_id: str, value: Value, *, evidence: str = "", conditions: str = "") -> Gate:
        """Enter a value. Raises KeyError for an unknown gate and ValueError for one that has its value already."""
        if gate_id in self._gates:
            raise ValueError(f"gate {gate_id} has its value already")
        gate = self._gate(gate_id, value, evidence=evidence, conditions=conditions)
        self._gates[gate_id] = gate
        return gate

    def unmeasured(self, prefix: str, reason: str) -> None:
        """Say why gates whose id starts with `prefix` will have no value, unless they get one; the first reason stays.

        Raises KeyError where no gate starts so.
        """
        gate_ids = [gate_id for gate_id in self._forms if gate_id.startswith(prefix)]
        if not gate_ids:
            raise KeyError(prefix)
        for gate_id in gate_ids:
            self._reasons.setdefault(gate_id, reason)

    def asks(self, gate_id: str) -> bool:
        """Whether this run has such a gate."""
        return gate_id in self._forms

    def threshold(self, gate_id: str) -> Value:
        """What counts as good enough in this run. Raises KeyError for a gate that is not asked."""
        return self._forms[gate_id].threshold

    @property
    def failed(self) -> tuple[str, ...]:
        """Gates that were measured and failed, in the order in which they were."""
        return tuple(gate_id for gate_id, gate in self._gates.items() if gate.passed is False)

    def found(self, gate_id: str) -> Gate | None:
        """The gate with its value, where it has one."""
        return self._gates.get(gate_id)

    def close(self) -> tuple[Gate, ...]:
        """All gates in the order of the forms."""
        return tuple(self._gates.get(gate_id) or self._missing(gate_id) for gate_id in self._forms)

    def _missing(self, gate_id: str) -> Gate:
        return self._gate(gate_id, None, evidence=self._reasons.get(gate_id, "the run ended before it was asked"))

    def _gate(self, gate_id: str, value: Value | None, *, evidence: str, conditions: str = "") -> Gate:
        form = self._forms[gate_id]
        return Gate(
            id=gate_id,
            layer=form.layer,
            question=form.question,
            threshold=form.threshold,
            relation=form.relation,
            unit=form.unit,
            value=value,
            evidence=evidence,
            conditions=conditions,
        )


def _limited(forms: Mapping[str, GateForm], gate_id: str, limit: float) -> GateForm:
    choices = [name for name, form in forms.items() if form.relation != "=="]
    if gate_id not in choices:
        raise ConfigError(f"gate {gate_id!r} has no limit to set", expected=f"one of {', '.join(choices)}")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit):
        raise ConfigError(f"the limit of {gate_id} is no number", found=short_repr(limit))
    return replace(forms[gate_id], threshold=limit)
