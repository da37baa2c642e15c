"""The gates put to the proof: each is made to fail by a fault of its own, by the code that enters it in a sound run."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from workbench.base import WorkbenchError, error_text
from workbench.cluster import default_device
from workbench.day0.gates import KNOWN_ANSWER_GATES, GateBook, gate_forms
from workbench.day0.proofs import GateProof, GateProofs
from workbench.day0.sabotage import ALONE, FAULTS, ON_RANKS, Bench, Fault, RankRuns, SabotagedRun, Site
from workbench.placement import Layout
from workbench.report import Day0Report, Gate
from workbench.spec import read_spec

__all__ = ["judge", "prove_gates"]

NOT_ASKED = "not asked of this model: nobody knows the right answers of weights that were not trained here"


def prove_gates(
    root: Path | str,
    report: Day0Report,
    *,
    layout: Layout | None = None,
    precision: str = "mxfp4",
    device: str | None = None,
    max_tokens: int | None = None,
    limits: Mapping[str, float] | None = None,
    out: Path | str | None = None,
    say: Callable[[str], None] | None = print,
    alone: tuple[SabotagedRun, ...] = ALONE,
    on_ranks: tuple[RankRuns, ...] = ON_RANKS,
) -> GateProofs:
    """Show of every gate of `report`, the sound run of `root`, that it fails under a fault planted for it.

    Arguments as `run_day0` was given; `out` gets the report again, with the proofs in it. A gate is proven where it
    passed in `report`, failed under its fault, and named it; everything else is told with its reason. `alone` and
    `on_ranks` are the sabotaged runs. Faults lie in a temporary folder (TMPDIR), in child processes and in ranks that
    are started for them; `root` is only read. Raises as `run_day0` does for arguments that make no sense.
    """
    root, began, say = Path(root), time.perf_counter(), say or (lambda line: None)
    spec = read_spec(root)
    sound = {gate.id: gate for gate in report.gates}
    every = gate_forms(has_known_answers=True)
    with tempfile.TemporaryDirectory(prefix="workbench-faults-") as folder:
        site = Site(
            root=root,
            spec=spec,
            layout=layout or Layout(),
            precision=precision,
            device=default_device() if device in (None, "auto") else str(device),
            max_tokens=max_tokens or min(4096, spec.max_context),
            forms={gate_id: form for gate_id, form in every.items() if gate_id in sound},
            limits=dict(limits or {}),
            folder=Path(folder),
        )
        prover = _Prover(site, sound, say)
        for run in alone:
            prover.prove(run.gate_ids, run.run)
        for group in on_ranks:
            prover.prove_on_ranks(group)
    proofs = [prover.proof_of(gate_id) for gate_id in dict.fromkeys([*every, *sound])]
    made_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = GateProofs.enter(proofs, report, made_at=made_at, seconds=time.perf_counter() - began)
    if out is not None:
        found.report.write(out)
    return found


def judge(sound: Gate, fault: Fault, sabotaged: Gate) -> str:
    """Why `sabotaged`, the gate under its fault, proves nothing; "" where it does."""
    if sound.passed is not True:
        return f"without a fault it is {sound.status}"
    if sabotaged.passed is None:
        return "not measured under its fault"
    if sabotaged.passed:
        return "passes under its fault"
    if not all(word in sabotaged.evidence for word in fault.words):
        return f"fails under its fault without naming it ({', '.join(fault.words)})"
    return ""


class _Prover:
    """Carries out sabotaged runs and keeps what came of each gate; a run that breaks off ends as a reason."""

    def __init__(self, site: Site, sound: Mapping[str, Gate], say: Callable[[str], None]) -> None:
        self.site, self.sound, self.say = site, sound, say
        self.proofs: dict[str, GateProof] = {}

    def proof_of(self, gate_id: str) -> GateProof:
        if gate_id not in self.sound:
            return GateProof(gate_id=gate_id, status="not asked", reason=NOT_ASKED)
        if self.sound[gate_id].passed is not True:
            gate = self.sound[gate_id]
            reason = f"without a fault it is {gate.status}: {gate.evidence}"
            return GateProof(gate_id=gate_id, status="not proven", reason=reason)
        missing = GateProof(gate_id=gate_id, status="not proven", reason="no fault was planted")
        return self.proofs.get(gate_id, missing)

    def wants(self, gate_ids: tuple[str, ...]) -> bool:
        """Whether any of these passed in the sound run: of the others nothing could be shown."""
        return any(gate_id in self.sound and self.sound[gate_id].passed for gate_id in gate_ids)

    def prove(self, gate_ids: tuple[str, ...], run: Callable[[Bench], None]) -> None:
        if not self.wants(gate_ids):
            return
        asked = [gate_id for gate_id in gate_ids if gate_id in self.sound]
        bench = self._bench(gate_ids)
        with self._broken_off(bench, asked):
            run(bench)
        gates = {gate.id: gate for gate in bench.gates.close()}
        for gate_id in asked:
            if gate_id not in self.proofs:
                self._keep(gate_id, bench, gates[gate_id])

    def prove_on_ranks(self, group: RankRuns) -> None:
        if not self.wants(group.gate_ids):
            return
        with self._broken_off(self._bench(group.gate_ids), group.gate_ids), group.start(self.site) as ranks:
            for gate_ids, run in group.runs:
                self.prove(gate_ids, lambda bench, run=run: run(bench, ranks))  # type: ignore[misc]
                if ranks.is_intact:
                    ranks.call(f"{FAULTS}.ranks:lift")

    def _bench(self, gate_ids: tuple[str, ...]) -> Bench:
        """Gates as in the sound run; right answers, which take long, are asked for only where they are to be proven."""
        known = set(KNOWN_ANSWER_GATES)
        left_out = set() if known & set(gate_ids) else known
        forms = {gate_id: form for gate_id, form in self.site.forms.items() if gate_id not in left_out}
        limits = {gate_id: limit for gate_id, limit in self.site.limits.items() if gate_id not in left_out}
        return Bench(site=self.site, gates=GateBook(forms, limits=limits))

    def _keep(self, gate_id: str, bench: Bench, sabotaged: Gate) -> None:
        fault = bench.faults.get(gate_id)
        reason = "no fault was planted" if fault is None else judge(self.sound[gate_id], fault, sabotaged)
        proof = GateProof(
            gate_id=gate_id,
            status="not proven" if reason else "proven",
            fault="" if fault is None else fault.what,
            sabotaged=sabotaged,
            reason=reason,
        )
        self.proofs[gate_id] = proof
        self.say(f"{proof.status}: {gate_id}, {reason or f'under {proof.fault!r}: {proof.value_text}'}")

    @contextmanager
    def _broken_off(self, bench: Bench, gate_ids: tuple[str, ...] | list[str]) -> Iterator[None]:
        """Gates that have no value when an error ends the block keep it as their reason."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, WorkbenchError) else "unexpected "
            for gate_id in gate_ids:
                is_settled = gate_id in self.proofs or bench.gates.found(gate_id) is not None
                if gate_id in self.sound and self.sound[gate_id].passed and not is_settled:
                    reason = f"the sabotaged run broke off: {kind}{error_text(error)}"
                    fault = bench.faults.get(gate_id)
                    self.proofs[gate_id] = GateProof(
                        gate_id=gate_id, status="not proven", fault=fault.what if fault else "", reason=reason
                    )
                    self.say(f"not proven: {gate_id}, {reason}")
