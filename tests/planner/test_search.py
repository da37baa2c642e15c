"""The search: what is refused and why, what wins, and when the winner changes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from planner_samples import given, machine, miniature, published, simple_trace, simple_vision

from workbench.base import ConfigError, plain
from workbench.cluster.topology import Topology
from workbench.operators import Inventory, Workload
from workbench.placement import Layout, check_layout
from workbench.planner import VLLM, Candidate, Objective, PlanReport, Reserve, all_layouts, plan
from workbench.planner.candidates import divisors, nearest_first
from workbench.spec import ModelSpec

RESERVE = Reserve(other=given(2e9, "B"), communicator=given(1e8, "B"))
SMALL = Reserve(other=given(1e5, "B"), communicator=given(1e4, "B"), window_bytes=1 << 16)
GIB = 1 << 30


def search(spec: ModelSpec, topology: Topology, objective: Objective, **options: object) -> PlanReport:
    chosen = {"trace": simple_trace, "trace_vision": simple_vision, "reserve": RESERVE, **options}
    return plan(spec, topology, objective, **chosen)  # type: ignore[arg-type]


def h200(num_devices: int, between: float = 5e10) -> Topology:
    return machine(num_devices, memory=140.4 * GIB, bandwidth=4.8e12, rate=9.9e14, within=4.5e11, between=between)


def test_all_layouts_are_distinct_and_use_a_divisor_of_the_devices() -> None:
    found = list(all_layouts(miniature(), 12))
    assert len(found) == len(set(found))
    assert {layout.world_size for layout in found} == set(divisors(12))
    assert {layout.dispatch for layout in found} == {"replicated", "all_to_all"}
    assert Layout(pp=3, dp=2, tp=2, ep=4) in found
    assert Layout(tp=4, ep=2) in found


def test_every_layout_is_costed_refused_or_left_at_its_bound() -> None:
    report = search(miniature(), machine(8), Objective(context=256, concurrency=4), reserve=SMALL)
    layouts = list(all_layouts(miniature(), 8))
    answered = Counter(
        [str(x.layout) for x in (*report.candidates, *report.uncosted)] + [str(x.layout) for x in report.refused]
    )
    assert report.num_layouts == len(layouts)
    assert answered == Counter(str(layout) for layout in layouts)
    assert all(x.reason and "\n" not in x.reason for x in report.refused)


def test_what_the_model_does_not_divide_is_refused_in_the_words_of_the_placement_table() -> None:
    report = search(miniature(), machine(8), Objective(context=256, concurrency=4), reserve=SMALL)
    (refusal,) = report.refusals("tp8")
    assert refusal.kind == "divisibility"
    with pytest.raises(Exception, match="does not divide") as caught:
        check_layout(miniature(), Layout(tp=8))
    assert refusal.reason in str(caught.value)


def test_idle_replicas_are_refused() -> None:
    report = search(miniature(), machine(4), Objective(context=64, concurrency=2), reserve=SMALL)
    (refusal,) = report.refusals("dp4")
    assert "4 replicas for 2 sequences" in refusal.reason


def test_memory_refusals_say_how_much_is_missing() -> None:
    report = search(published(), h200(8), Objective(context=8192, concurrency=8))
    assert not report.ok
    (refusal,) = report.refusals("tp8xep8")
    assert refusal.kind == "memory"
    assert "short" in refusal.reason
    assert "weights 202 GB" in refusal.reason
    assert report.explain().startswith("No plan fits.")


def test_refusals_stand_nearest_to_fitting_first_with_how_much_is_missing() -> None:
    """Memory by the share that is missing, then what no memory would help, each kind of reason once."""
    layouts = [Layout(tp=8, ep=8), Layout(tp=64), Layout(pp=2, tp=16), Layout(tp=16, ep=16), Layout(tp=32, ep=32)]
    machines = machine(64, memory=40e9)
    report = search(published(), machines, Objective(context=4096, concurrency=1), layouts=layouts)
    assert not report.ok
    (table,) = (x for x in report.tables() if x.title.startswith("Refused"))
    rows = [(row[0], row[2], row[3]) for row in table.rows]
    assert rows[-1][1:] == ("divisibility", None), "96 heads do not divide by 64 however much memory there is"
    assert all(kind == "memory" for _, kind, _ in rows[:-1])
    # By the peak of the fullest stage, worked out anew.
    peaks = {}
    for layout in layouts:
        if layout.tp != 64:
            found = search(published(), machine(64, memory=1e15), report.objective, layouts=[layout]).candidates[0]
            peaks[str(layout)] = max(x.peak - x.of("working", "serving") for x in found.ledgers)
    assert [name for name, _, _ in rows[:-1]] == sorted(peaks, key=lambda name: peaks[name])
    beyond = [float(text.rstrip("%")) / 100 for _, _, text in rows[:-1]]  # type: ignore[union-attr]
    assert beyond == pytest.approx([peaks[name] / 40e9 - 1 for name, _, _ in rows[:-1]], rel=0.01)
    assert f"nearest: {rows[0][0]} " in report.explain()
    assert [x["layout"] for x in report.to_json()["refused"]] == [name for name, _, _ in rows]  # type: ignore[attr-defined]


def test_a_limit_of_time_is_missed_by_its_share() -> None:
    objective = Objective(context=4096, concurrency=16, max_per_token_s=1e-5)
    report = search(published(), h200(16), objective, layouts=[Layout(tp=16, ep=16), Layout(pp=2, tp=8, ep=8)])
    by_layout = {str(x.layout): x for x in report.refused}
    loose = search(published(), h200(16), Objective(context=4096, concurrency=16), layouts=[Layout(tp=16, ep=16)])
    assert by_layout["tp16xep16"].excess == pytest.approx(loose.candidates[0].bound_s / 1e-5 - 1)
    shares = [x.excess for x in nearest_first(report.refused)]
    assert shares == sorted(shares)  # type: ignore[type-var]


def test_a_costed_plan_fits_its_devices_and_keeps_its_limits() -> None:
    objective = Objective(context=4096, concurrency=16, max_per_token_s=0.2, max_first_token_s=60.0)
    report = search(published(), h200(32), objective)
    assert report.ok
    for candidate in report.candidates:
        assert all(ledger.fits for ledger in candidate.ledgers)
        assert candidate.per_token.value <= 0.2
    costs = [candidate.cost for candidate in report.candidates]
    assert costs[0] == min(costs)


def test_limits_refuse_with_the_time_and_the_limit() -> None:
    loose = search(published(), h200(16), Objective(context=4096, concurrency=16))
    assert loose.best is not None
    limit = loose.best.per_token.value * 0.5
    tight = search(published(), h200(16), Objective(context=4096, concurrency=16, max_per_token_s=limit))
    late = [x for x in tight.refused if x.kind == "latency"]
    assert late
    assert all("limit" in x.reason for x in late)
    first = loose.best.first_token
    assert first is not None
    slow = search(published(), h200(16), Objective(context=4096, concurrency=16, max_first_token_s=first.value / 100))
    assert any("first token of a prompt of 2,048" in x.reason for x in slow.refused)
    assert not slow.ok


def each_alone(objective: Objective) -> list[Candidate]:
    """Every layout that fits, costed for itself: what the search would find without pruning."""
    reports = [
        search(miniature(), machine(8), objective, reserve=SMALL, layouts=[layout])
        for layout in all_layouts(miniature(), 8)
    ]
    return [report.best for report in reports if report.best is not None]


def test_the_bound_is_below_the_traced_time_of_every_layout() -> None:
    costed = each_alone(Objective(context=256, concurrency=8))
    assert len(costed) > 20
    for x in costed:
        assert x.bound_s <= x.per_token.value * (1 + 1e-9), str(x)


def test_pruning_by_the_bound_does_not_change_the_winner() -> None:
    objective = Objective(context=256, concurrency=8)
    report = search(miniature(), machine(8), objective, reserve=SMALL)
    costed = each_alone(objective)
    assert report.best is not None
    assert len(report.candidates) < len(costed)
    assert report.best.cost == pytest.approx(min(x.cost for x in costed))


def test_the_plan_leaves_cross_node_tensor_parallelism_when_the_link_is_slow_and_returns_to_it_when_fast() -> None:
    """Two hosts of eight: one host does not hold the model, so it is TP over both or a pipeline between them."""
    objective = Objective(context=8192, concurrency=8)
    candidates = [Layout(tp=16, ep=16), Layout(pp=2, tp=8, ep=8)]

    def best(topology: Topology) -> Layout:
        report = search(published(), topology, objective, layouts=candidates)
        assert report.best is not None
        return report.best.layout

    fast = h200(16, between=2e11)
    assert best(fast).tp == 16
    slow = best(fast.with_inter_node(1 / 20))
    assert (slow.pp, slow.tp) == (2, 8)
    assert best(fast.with_inter_node(1 / 20).with_inter_node(20)).tp == 16


def test_the_whole_search_flips_as_well() -> None:
    objective = Objective(context=8192, concurrency=1)
    fast = h200(16, between=2e11)
    slow = fast.with_inter_node(1 / 20)
    spans = []
    for topology in (fast, slow):
        report = search(published(), topology, objective)
        assert report.best is not None
        spans.append(topology.spans_hosts(range(report.best.layout.tp)))
    assert spans == [True, False]


def test_pipeline_cuts_weigh_embeddings_and_caches() -> None:
    report = search(published(), h200(16), Objective(context=8192, concurrency=8), layouts=[Layout(pp=2, tp=8, ep=8)])
    assert report.best is not None
    weights = [ledger.weights + ledger.cache for ledger in report.best.ledgers]
    even = search(
        published(),
        h200(16),
        Objective(context=8192, concurrency=8),
        layouts=[Layout(pp=2, tp=8, ep=8, stages=(47, 46))],
    )
    assert even.best is not None
    assert max(weights) <= max(ledger.weights + ledger.cache for ledger in even.best.ledgers)


def test_another_precision_is_searched_only_when_asked_for() -> None:
    spec = miniature()
    objective = Objective(context=256, concurrency=4)
    default = search(spec, machine(4), objective, reserve=SMALL)
    assert {x.precision for x in (*default.candidates, *default.uncosted)} == {"mxfp4"}
    both = search(spec, machine(4), objective, reserve=SMALL, precisions=("mxfp4", "bf16"))
    assert {x.precision for x in (*both.candidates, *both.uncosted)} == {"mxfp4", "bf16"}
    assert both.num_layouts == 2 * default.num_layouts


def test_a_narrow_cache_is_refused_where_the_engine_has_none() -> None:
    objective = Objective(context=256, concurrency=4)
    kinds = ("auto", "fp8", "int8")
    own = search(miniature(), machine(2), objective, reserve=SMALL, kv_dtypes=kinds)
    assert {x.kv_dtype for x in (*own.candidates, *own.uncosted)} == set(kinds)
    other = search(miniature(), machine(2), objective, reserve=SMALL, kv_dtypes=kinds, engine=VLLM)
    assert {x.kv_dtype for x in (*other.candidates, *other.uncosted)} == {"auto", "fp8"}
    reasons = {x.reason for x in other.refused if x.kv_dtype == "int8" and x.kind == "engine"}
    assert reasons == {"vllm keeps its cache as auto, fp8, not in int8"}


def test_links_that_nobody_knows_are_a_refusal_not_a_guess() -> None:
    import dataclasses

    blind = dataclasses.replace(h200(16), between=None)
    report = search(published(), blind, Objective(context=8192, concurrency=8), layouts=[Layout(tp=16, ep=16)])
    (refusal,) = report.refused
    assert refusal.kind == "topology"
    assert "between hosts" in refusal.reason


def test_activations_of_a_long_prompt_can_refuse_a_plan_that_weights_alone_would_not() -> None:
    def greedy(
        spec: ModelSpec, layout: Layout, workload: Workload, *, stage: int = 0, precision: str = "bf16"
    ) -> Inventory:
        import dataclasses

        found = simple_trace(spec, layout, workload, stage=stage, precision=precision)
        size = 10**12 if workload.phase == "prefill" else 1
        return dataclasses.replace(found, activation_peak_bytes=size)

    report = search(miniature(), machine(2), Objective(context=256, concurrency=2), reserve=SMALL, trace=greedy)
    assert not report.ok
    assert any("activations of a prompt counted" in x.reason for x in report.refused)


def test_explain_says_why_what_binds_and_what_the_next_best_loses() -> None:
    report = search(published(), h200(16), Objective(context=8192, concurrency=8))
    text = report.explain()
    for phrase in ("Chosen:", "What binds:", "Next best by its decode step:", "Vision:", "A request pins at least"):
        assert phrase in text, phrase
    rendered = report.render()
    for title in ("Plans for", "Memory of each rank", "Where the time of a decode step goes", "Refused"):
        assert title in rendered
    assert "<table>" in report._repr_html_()


def test_records_are_json_with_every_refusal() -> None:
    report = search(published(), h200(16), Objective(context=8192, concurrency=8))
    record = json.loads(json.dumps(plain(report.to_json()), allow_nan=False))
    assert record["ok"] is True
    assert len(record["refused"]) == len(report.refused)
    assert record["best"]["memory"][0]["free"] > 0


def test_a_context_beyond_the_models_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        search(miniature(), machine(1), Objective(context=5000))


@pytest.mark.parametrize(
    "wrong", [{"context": 0}, {"concurrency": 0}, {"prompt": 9000}, {"max_per_token_s": 0.0}, {"chunk_tokens": 0}]
)
def test_objectives_make_sense_or_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Objective(**wrong)  # type: ignore[arg-type]
