"""What a search found, and why: the best plan, the others, the refusals, in words and tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from workbench.base import Cell, Table, human
from workbench.planner.candidates import Candidate, Refusal, nearest_first
from workbench.planner.cost import Efficiency
from workbench.planner.engines import Engine
from workbench.planner.memory import by_group
from workbench.planner.objective import Objective

__all__ = ["PlanReport"]

SHOWN_PLANS, SHOWN_REFUSALS = 8, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """`candidates` fit and keep the limits, cheapest first; of those after the first only the decode step is known.

    `uncosted` fit, but are not expected to win by their bound (or the number of traces ran out); `refused` have a
    reason each. `seconds` is what the search took.
    """

    model: str
    topology: str
    objective: Objective
    engine: Engine
    efficiency: Efficiency
    candidates: tuple[Candidate, ...] = field(repr=False)  # hundreds of entries, here and below
    uncosted: tuple[Candidate, ...] = field(repr=False)
    refused: tuple[Refusal, ...] = field(repr=False)
    num_layouts: int
    seconds: float
    claims: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def ok(self) -> bool:
        return self.best is not None

    def refusals(self, text: str = "") -> tuple[Refusal, ...]:
        """Refusals of one layout, by its text ("tp8"), or all."""
        return tuple(x for x in self.refused if text in ("", str(x.layout)))

    def explain(self) -> str:
        """Why this plan, what binds it, what the next best loses; or why there is none."""
        best = self.best
        if best is None:
            return "\n".join(["No plan fits." if not self.uncosted else "No plan was found.", *self._why_none()])
        goal = self.objective
        lines = [
            f"{best} on {best.num_devices} of {self.topology}: "
            f"{best.tokens_per_s:,.4g} tokens/s ({best.tokens_per_s_per_device:,.3g} per device), "
            f"{human(best.per_token.value, 's')} per token ({best.per_token.basis}), first token of "
            f"{goal.prompt_tokens:,} after {human(best.first_token.value, 's') if best.first_token else '?'}.",
            f"Chosen: the fewest device seconds per token ({best.cost:.3g}) of {len(self.candidates)} costed plans for "
            f"{goal.concurrency} sequences of {goal.context:,} tokens; {self._rest()}",
            self._binding(best),
        ]
        if len(self.candidates) > 1:
            lines.append(self._loss(best, self.candidates[1]))
        if best.vision == "shared_out":
            lines.append(
                f"Vision: its heads do not divide over tp={best.layout.tp}, so the tower is whole on every rank and "
                "pictures are shared out."
            )
        lines.append(f"A request pins at least {human(best.request_floor, 'B')} on a rank, however short it is.")
        return "\n".join(lines)

    def tables(self) -> tuple[Table, ...]:
        """Plans, memory and time of the best one, refusals."""
        best = self.best
        tables = [self._plans()] if self.candidates else []
        if best is not None and best.decode is not None and best.prefill is not None:
            tables.append(self._stages(best))
            tables.append(best.fullest.table())
            tables.append(best.decode.table())
            tables.append(best.prefill.table(f"Where the time of {self.objective.chunk:,} prompt tokens goes"))
        if self.refused:
            tables.append(self._refusals())
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join([self.explain(), *(table.render() for table in self.tables())])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{_escape(line)}</p>" for line in self.explain().splitlines())
        return lines + "".join(table.to_html() for table in self.tables())

    def to_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "model": self.model,
            "topology": self.topology,
            "engine": {"name": self.engine.name, "version": self.engine.version},
            "objective": self.objective.to_json(),
            "efficiency": self.efficiency.to_json(),
            "best": None if self.best is None else self.best.to_json(),
            "candidates": [_short(x) for x in self.candidates],
            "uncosted": [str(x) for x in self.uncosted],
            "refused": [x.to_json() for x in nearest_first(self.refused)],
            "num_layouts": self.num_layouts,
            "seconds": self.seconds,
            "claims": list(self.claims),
            "explain": self.explain(),
        }

    def _why_none(self) -> list[str]:
        """The nearest miss of every kind of reason."""
        lines = []
        for kind, number in Counter(x.kind for x in self.refused).most_common():
            nearest, *_ = nearest_first(x for x in self.refused if x.kind == kind)
            lines.append(f"{number} refused for {kind}; nearest: {nearest}")
        if self.uncosted:
            lines.append(f"{len(self.uncosted)} fit in memory and were not costed; raise trace_limit to go on.")
        return lines

    def _rest(self) -> str:
        if not self.uncosted:
            return f"{len(self.refused)} of {self.num_layouts} were refused."
        lowest = min(x.cost_bound for x in self.uncosted)
        best = self.best
        assert best is not None
        is_closed = lowest >= best.cost
        why = (
            "even by their lower bound they cost more" if is_closed else "by their bounds they are not expected to win"
        )
        return f"{len(self.refused)} of {self.num_layouts} were refused, {len(self.uncosted)} not costed: {why}."

    def _binding(self, best: Candidate) -> str:
        assert best.decode is not None
        top, ledger = best.decode.lines()[0], best.fullest
        whole = sum(line.estimate.value for line in best.decode.lines())
        text = f"What binds: {top.name} takes {top.estimate.value / whole:.0%} of a step's work"
        if best.decode.share("collectives") > 0.02:
            text += f", collectives together {best.decode.share('collectives'):.0%}"
        if best.decode.idle_share > 0.02:
            text += f"; stages wait {best.decode.idle_share:.0%} of the time"
        if ledger.free is not None and ledger.capacity is not None:
            groups = ", ".join(f"{name} {human(size, 'B')}" for name, size in by_group(ledger).items())
            text += f". Memory: {human(ledger.free, 'B')} of {human(ledger.capacity.value, 'B')} free ({groups})"
        return text + "."

    def _loss(self, best: Candidate, second: Candidate) -> str:
        assert best.decode is not None
        assert second.decode is not None
        text = (
            f"Next best by its decode step: {second} on {second.num_devices}, "
            f"{second.cost / best.cost - 1:+.1%} device seconds per token"
        )
        ours = {line.name.partition(" (")[0]: line.estimate.value * best.num_devices for line in best.decode.lines()}
        theirs = {
            line.name.partition(" (")[0]: line.estimate.value * second.num_devices for line in second.decode.lines()
        }
        waits = "stages waiting for one another"
        for times, x in ((ours, best), (theirs, second)):
            assert x.decode is not None
            times[waits] = x.decode.idle_share * len(x.decode.stages) * x.per_token.value * x.num_devices
        worse = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
        if theirs[worse] > ours.get(worse, 0.0):
            text += f"; it loses most on {worse}"
        return text + "."

    def _plans(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (
                str(x),
                x.num_devices,
                x.tokens_per_s,
                x.tokens_per_s_per_device,
                human(x.per_token.value, "s"),
                None if x.first_token is None else human(x.first_token.value, "s"),
                human(x.fullest.weights, "B"),
                human(x.fullest.cache, "B"),
                None if x.fullest.free is None else human(x.fullest.free, "B"),
                x.vision,
            )
            for x in self.candidates[:SHOWN_PLANS]
        ]
        columns = (
            "plan",
            "devices",
            "tokens/s",
            "per device",
            "per token",
            "first token",
            "weights",
            "caches",
            "free",
            "vision",
        )
        goal = self.objective
        title = f"Plans for {self.model} on {self.topology}: {goal.concurrency} sequences of {goal.context:,} tokens"
        rates = f"{self.efficiency.basis}: {self.efficiency.source}"
        note = f"{self.num_layouts} considered in {self.seconds:.1f} s; efficiencies {rates}"
        return Table(title=title, columns=columns, rows=tuple(rows), note=note)

    def _stages(self, best: Candidate) -> Table:
        assert best.decode is not None
        num_layers = sum(best.layout.stages) if best.layout.stages else None
        rows: list[tuple[Cell, ...]] = []
        for ledger, stage in zip(best.ledgers, best.decode.stages, strict=True):
            layers = best.layout.stages[ledger.stage] if num_layers and best.layout.stages else None
            rows.append(
                (
                    ledger.stage,
                    layers,
                    human(ledger.weights, "B"),
                    human(ledger.cache, "B"),
                    human(ledger.load_peak, "B"),
                    human(ledger.serving_peak, "B"),
                    None if ledger.free is None else human(ledger.free, "B"),
                    human(stage.seconds().value, "s"),
                )
            )
        columns = ("stage", "layers", "weights", "caches", "peak at load", "peak serving", "free", "decode")
        return Table(title=f"Stages of {best}, per rank", columns=columns, rows=tuple(rows))

    def _refusals(self) -> Table:
        rows: list[tuple[Cell, ...]] = []
        groups: dict[tuple[str, str], list[Refusal]] = {}
        for x in nearest_first(self.refused):
            groups.setdefault((x.kind, x.reason if x.kind == "divisibility" else str(x)), []).append(x)
        for (kind, _), members in list(groups.items())[:SHOWN_REFUSALS]:
            first = members[0]
            name = str(first.layout) if len(members) == 1 else f"{first.layout} and {len(members) - 1} more"
            beyond = None if first.excess is None else f"{first.excess:.1%}"
            rows.append((name, first.precision, kind, beyond, first.reason))
        more = len(groups) - len(rows)
        note = f"and {more} more reasons (--json has them all)" if more > 0 else ""
        columns = ("layout", "precision", "kind", "beyond", "reason")
        return Table(title="Refused, nearest to fitting first", columns=columns, rows=tuple(rows), note=note)


def _short(x: Candidate) -> dict[str, object]:
    return {
        "text": str(x),
        "num_devices": x.num_devices,
        "tokens_per_s_per_device": x.tokens_per_s_per_device,
        "per_token_s": x.per_token.value,
        "first_token_s": None if x.first_token is None else x.first_token.value,
        "peak_bytes": x.fullest.peak,
    }


def _escape(text: str) -> str:
    import html

    return html.escape(text)
