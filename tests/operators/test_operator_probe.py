"""Operators tried on devices: the host, and a simulated accelerator whose faults are known."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.base import DeploymentError, UnsupportedModelError
from workbench.cluster.probe import ProbeResult
from workbench.operators import (
    Coverage,
    Inventory,
    OperatorResult,
    OperatorUse,
    Roofline,
    Workload,
    probe_operators,
    trace_inventory,
)
from workbench.operators.formats import choose_precision
from workbench.operators.probe import together
from workbench.operators.trial import Trial, try_operator
from workbench.placement import Layout
from workbench.spec import ModelSpec, read_spec

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[1] / "data" / "k3-tiny"
CARD = (sys.executable, str(HERE / "fake_device.py"))
BF16, FP32 = "bfloat16", "float32"
X = {"t": 0}


def use(
    name: str, call: object, *inputs: tuple[str, tuple[int, ...]], flops: int = 0, view: bool = False
) -> OperatorUse:
    return OperatorUse(
        name=name,
        category="elementwise",
        layer_kind="layer",
        input_shapes=tuple(shape for _, shape in inputs),
        input_dtypes=tuple(dtype for dtype, _ in inputs),
        flops=flops,
        bytes_read=4096,
        bytes_written=2048,
        weight_bytes=0,
        count=2,
        call=json.dumps(call),
        is_view=view,
    )


MM = use("aten.mm.default", [[X, {"t": 1, "stride": [1, 50]}], {}], (BF16, (30, 50)), (BF16, (50, 40)), flops=120_000)
SIGMOID = use("aten.sigmoid.default", [[X], {}], (FP32, (30, 50)))
EXP = use("aten.exp.default", [[X], {}], (FP32, (30, 51)))
TANH = use("aten.tanh_.default", [[X], {}], (FP32, (30, 50)))
TOPK = use("aten.topk.default", [[X, 3], {}], (FP32, (30, 16)))
CAT = use("aten.cat.default", [[[X, {"t": 1}], 1], {}], (BF16, (30, 5)), (BF16, (30, 2)))
CAST = use("aten._to_copy.default", [[X], {"dtype": {"dtype": FP32}}], (BF16, (30, 5)))
NEG = use("aten.neg.default", [[X], {}], (FP32, (7, 5)))
ABS = use("aten.abs.default", [[X], {}], (FP32, (7, 6)))
SIN = use("aten.sin.default", [[X], {}], (FP32, (7, 6)))
ALL = (MM, SIGMOID, EXP, TANH, TOPK, CAT, CAST, NEG, ABS, SIN)


def inventory(*uses: OperatorUse) -> Inventory:
    return Inventory(
        model="model",
        layout=Layout(),
        stage=0,
        precision="bf16",
        workload=Workload(phase="decode"),
        operators=uses,
        collectives=(),
        activation_peak_bytes=0,
    )


def on_card(
    monkeypatch: pytest.MonkeyPatch, uses: tuple[OperatorUse, ...], **faults: tuple[OperatorUse, ...]
) -> Coverage:
    faulty = [u.name for named in faults.values() for u in named]
    plan = {fault: [u.name for u in named] for fault, named in faults.items() if fault != "missing"}
    plan["operators"] = [u.name for u in uses if u.name not in faulty]
    monkeypatch.setenv("FAKE_DEVICE", json.dumps(plan))
    return probe_operators(inventory(*uses), "fakecard", command=CARD, roofline=False, time_limit_s=90.0)


def test_each_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = on_card(
        monkeypatch, ALL, to_host=(SIGMOID,), wrong=(EXP,), missing=(TOPK,), broken=(NEG,), crashing=(ABS,)
    )
    found = {result.use.name.split(".")[1]: result for result in coverage.results}
    assert {name: result.status for name, result in found.items()} == {
        "mm": "ran",
        "sigmoid": "fell back",
        "exp": "approximate",
        "tanh_": "ran",
        "topk": "missing",
        "cat": "ran",
        "_to_copy": "ran",
        "neg": "failed",
        "abs": "failed",
        "sin": "ran",
    }
    assert not coverage.ok
    assert {gap.use.name for gap in coverage.gaps} == {u.name for u in (SIGMOID, EXP, TOPK, NEG, ABS)}
    assert "through the host" in found["sigmoid"].detail
    assert found["exp"].error == pytest.approx(0.02, rel=0.01)
    assert "SIGABRT" in found["abs"].detail
    assert "fakecard" in found["topk"].detail
    assert found["topk"].replacement.startswith("sort")
    text = coverage.render()
    assert "FAIL: 5 of 10 do not" in text
    assert "aten.topk.default" in text


def test_without_the_faults_the_device_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = on_card(monkeypatch, ALL)
    assert [result.status for result in coverage.results] == ["ran"] * len(ALL)
    assert coverage.ok
    assert coverage.gaps == ()


def test_an_operator_without_a_kernel_is_seen_to_go_through_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = on_card(monkeypatch, (MM, TOPK), missing=(TOPK,), fallback=())
    assert [result.status for result in coverage.results] == ["ran", "fell back"]
    assert "no kernel" in coverage.results[1].detail


@pytest.mark.slow
def test_an_operator_that_hangs_costs_its_time_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"operators": [MM.name], "hanging": [EXP.name]}))
    coverage = probe_operators(inventory(EXP, MM), "fakecard", command=CARD, roofline=False, time_limit_s=20.0)
    assert [result.status for result in coverage.results] == ["failed", "ran"]
    assert "timed out" in coverage.results[0].detail


def test_a_child_that_does_not_start_is_an_error_and_no_coverage() -> None:
    with pytest.raises(DeploymentError, match="cannot be tried"):
        probe_operators(inventory(MM), command=("/no/such/python",), roofline=False)


@pytest.mark.parametrize("each", ["kind of dtypes", pytest.param("shape", marks=pytest.mark.slow)])
def test_the_host_runs_what_the_model_needs_of_it(each: str) -> None:
    spec = read_spec(TINY)
    traced = trace_inventory(
        spec, Layout(tp=2), Workload(phase="decode", num_sequences=2, context=9), precision="mxfp4"
    )
    if each != "shape":
        by_kind = {(u.name, u.input_dtypes, bool(u.flops)): u for u in traced.operators}
        assert len(by_kind) < len(traced.operators)
        traced = replace(traced, operators=tuple(by_kind.values()))
    told: list[tuple[int, int]] = []
    coverage = probe_operators(traced, progress=lambda done, total: told.append((done, total)))
    assert [str(gap) for gap in coverage.gaps] == []
    assert coverage.ok
    assert told[-1][0] == told[-1][1] == len(coverage.results)
    compared = [result for result in coverage.results if result.error is not None and not result.use.is_view]
    assert len(compared) > 0.9 * sum(not result.use.is_view for result in coverage.results)
    assert all(result.error <= result.tolerance for result in compared)
    products = [result for result in coverage.results if result.use.flops]
    assert products
    for (
        result
    ) in products:  # how fast they are is the machine's matter; that the share is made of these figures is ours
        least = coverage.roofline.least_seconds(result.use)
        assert result.seconds
        assert least
        assert result.share == pytest.approx(least / result.seconds)
    known = [coverage.seconds(u) for u in traced.operators if not u.is_view]
    assert all(seconds is not None and seconds.basis == "measured" for seconds in known)


def test_one_call_speaks_for_each_operator_and_dtypes_where_shapes_are_not_all_tried() -> None:
    """The largest that is cheap to compare, or the smallest where none is; and nothing is timed."""
    small, large = (use("aten.exp.default", [[X], {}], (FP32, shape)) for shape in ((3, 5), (30, 50)))
    huge = replace(use("aten.exp.default", [[X], {}], (FP32, (3000, 5000))), bytes_read=1 << 40)
    wide = replace(use("aten.neg.default", [[X], {}], (FP32, (7, 5))), bytes_read=1 << 28)
    wider = replace(use("aten.neg.default", [[X], {}], (FP32, (70, 5))), bytes_read=1 << 29)
    half = use("aten.exp.default", [[X], {}], (BF16, (2, 2)))
    coverage = probe_operators(inventory(small, huge, large, wider, wide, half), roofline=False, each_shape=False)
    tried = {(r.use.name, r.use.input_dtypes): r.use.input_shapes for r in coverage.results}
    assert tried == {
        ("aten.exp.default", (FP32,)): ((30, 50),),
        ("aten.neg.default", (FP32,)): ((7, 5),),
        ("aten.exp.default", (BF16,)): ((2, 2),),
    }
    assert coverage.ok
    assert all(result.seconds is None and result.error is not None for result in coverage.results)


# one operator at a time, in this process


@pytest.fixture
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_o01_an_operator_is_looked_up_when_it_is_tried_and_not_before() -> None:
    """A plug-in may register its operators after everything was imported; until then they are missing, by name."""
    late = use("late_plugin.double.default", [[X], {}], (FP32, (4, 3)))
    before = try_operator(late.to_json(), "cpu")
    assert before["status"] == "missing"
    assert "late_plugin" in str(before["detail"])
    library = torch.library.Library("late_plugin", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: 2 * x, "CPU")
    assert try_operator(late.to_json(), "cpu")["status"] == "ran"


@pytest.mark.parametrize("sizes", [(2, 96), (96, 2), (4, 6), (7, 1)])
def test_writes_to_places_that_several_indices_name_do_not_meet(sizes: tuple[int, int]) -> None:
    """Which of two writes to one place wins depends on threads, so a right kernel would be called wrong."""
    count = sizes[0] * sizes[1]
    call = [[X, [{"t": 1}, {"t": 2}], {"t": 3}], {}]
    indices = (("int64", (count,)), ("int64", (count,)))
    put = use("aten.index_put_.default", call, (BF16, (*sizes, 5)), *indices, (BF16, (count, 5)))
    _, first, second, _ = Trial(put.to_json(), "cpu").inputs()
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == set(itertools.product(*map(range, sizes)))
    assert try_operator(put.to_json(), "cpu")["status"] == "ran"


@pytest.mark.parametrize(
    "tried",
    [
        use("aten.index_select.default", [[X, 0, {"t": 1}], {}], (BF16, (9, 5)), ("int64", (30,))),
        use("aten.index.Tensor", [[X, [None, {"t": 1}]], {}], (FP32, (9, 5)), ("int64", (4,))),
        use(
            "aten.index_put_.default", [[X, [{"t": 1}], {"t": 2}], {}], (BF16, (9, 5)), ("int64", (4,)), (BF16, (4, 5))
        ),
        use(
            "aten.index_copy_.default",
            [[X, 0, {"t": 1}, {"t": 2}], {}],
            (BF16, (9, 5)),
            ("int64", (4,)),
            (BF16, (4, 5)),
        ),
        use("aten.gather.default", [[X, 1, {"t": 1}], {}], (FP32, (9, 5)), ("int64", (9, 2))),
        use("aten.embedding.default", [[X, {"t": 1}], {}], (BF16, (11, 3)), ("int64", (4,))),
        use("aten.rsqrt.default", [[X], {}], (FP32, (9, 5))),
        use("aten.sort.stable", [[X], {"stable": True, "dim": -1}], ("int64", (40,))),
        use("aten.view.default", [[X, [3, 10]], {}], (BF16, (6, 5)), view=True),
        use("aten._to_copy.default", [[X], {"dtype": {"dtype": FP32}}], ("float8_e4m3fn", (6, 5))),
        use("aten.mul.Tensor", [[X, {"t": 1, "stride": [1, 0]}], {}], (BF16, (6, 5)), (BF16, (6, 5))),
        use("aten.view_as_complex.default", [[X], {}], (FP32, (6, 5, 2)), view=True),
    ],
    ids=lambda tried: tried.name,
)
@pytest.mark.usefixtures("_one_thread")
def test_inputs_fit_operators_that_are_choosy(tried: OperatorUse) -> None:
    outcome = try_operator(tried.to_json(), "cpu")
    assert outcome["status"] == "ran", outcome
    assert outcome["error"] <= outcome["tolerance"]


@pytest.mark.usefixtures("_one_thread")
def test_large_products_are_compared_by_some_rows() -> None:
    large = use("aten.mm.default", [[X, {"t": 1}], {}], (BF16, (256, 512)), (BF16, (512, 128)), flops=3 * 10**9)
    outcome = try_operator(large.to_json(), "cpu")
    assert outcome["status"] == "ran"
    assert 0 < outcome["error"] <= outcome["tolerance"]


@pytest.mark.usefixtures("_one_thread")
def test_what_is_too_large_is_a_gap_and_not_a_pass() -> None:
    huge = use("aten.exp.default", [[X], {}], (FP32, (4, 3))).to_json() | {"bytes_read": 1 << 40}
    outcome = try_operator(huge, "cpu")
    assert outcome["status"] == "not tried"
    result = OperatorResult(use=OperatorUse.from_json(huge), **outcome)
    coverage = Coverage(device="cpu", device_name="host", taken_at="now", results=(result,), roofline=Roofline())
    assert not coverage.ok


# formats


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return read_spec(TINY)


def probe_without(*bad: str):
    """A device that lacks operators on these dtypes."""

    def probe(traced: Inventory, device: str) -> Coverage:
        results = tuple(
            OperatorResult(use=u, status="missing" if set(u.input_dtypes) & set(bad) else "ran", detail="no such cast")
            for u in traced.operators
        )
        return Coverage(device=device, device_name="card", taken_at="now", results=results, roofline=Roofline())

    return probe


@pytest.mark.parametrize(
    ("bad", "precision"),
    [
        ((), "mxfp4"),
        (("uint8",), "fp8"),
        (("uint8", "float8_e4m3fn"), "int8"),
        (("uint8", "float8_e4m3fn", "int8"), "bf16"),
    ],
)
def test_o05_the_format_is_the_first_that_the_device_can_expand(
    tiny: ModelSpec, bad: tuple[str, ...], precision: str
) -> None:
    choice = choose_precision(tiny, Layout(), "card", probe=probe_without(*bad))
    assert choice.precision == precision
    assert [trial.is_supported for trial in choice.trials] == [False] * (len(choice.trials) - 1) + [True]
    assert all("no such cast" in trial.reason for trial in choice.trials[:-1])
    assert precision in choice.render()


def test_o05_no_path_for_any_format_is_an_error_that_names_each(tiny: ModelSpec) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mxfp4: .*fp8: .*int8: .*int4: .*bf16: "):
        choose_precision(tiny, Layout(), "card", probe=probe_without("uint8", "float8_e4m3fn", "int8", "bfloat16"))


# how fast inside a pass


@pytest.mark.parametrize(("between", "turns"), [(0, 1), (1, 1), (4 * 9000, 4), (4 * 9000 + 1, 5), (1 << 40, 1024)])
def test_a_weight_is_as_cold_as_the_pass_leaves_it(between: int, turns: int) -> None:
    """Timed calls take turns with as many copies of the weight as are read between two uses of it; what a pass has just
    computed stays where it is. Beyond the caches' size more copies change nothing."""
    product = replace(
        use("aten.mm.default", [[X, {"t": 1, "stride": [1, 50]}], {}], (BF16, (30, 50)), (BF16, (50, 90))),
        weight_bytes=50 * 90 * 2,
    )
    trial = Trial(product.to_json(), "cpu", weights_between=between)
    calls = trial.calls(trial.inputs())
    assert len(calls) == turns
    assert len({args[0].data_ptr() for args, _ in calls}) == 1
    assert len({args[1].data_ptr() for args, _ in calls}) == turns
    assert all(torch.equal(args[1], calls[0][0][1]) for args, _ in calls[:5])
    assert {args[1].stride() for args, _ in calls[:5]} == {(1, 50)}


def test_a_table_that_is_read_in_part_and_an_operator_without_weights_stay_as_they_lie() -> None:
    lookup = replace(
        use("aten.embedding.default", [[X, {"t": 1}], {}], (BF16, (11, 3)), ("int64", (4,))), weight_bytes=4 * 3 * 2
    )
    for each in (lookup, SIGMOID):
        trial = Trial(each.to_json(), "cpu", weights_between=1 << 20)
        assert len(trial.calls(trial.inputs())) == 1


def test_ranks_side_by_side_count_by_the_mean_of_their_times_and_a_gap_of_one_is_a_gap() -> None:
    def answer(seconds: float, status: str = "ran", error: str = "") -> ProbeResult:
        value = None if error else {"status": status, "seconds": seconds}
        return ProbeResult(kind="cold", argument="", value=value, error=error, seconds=0.1)

    assert together([answer(1.0), answer(3.0)]).value == {"status": "ran", "seconds": 2.0}
    assert together([answer(1.0)]).value == {"status": "ran", "seconds": 1.0}
    assert together([answer(1.0), answer(3.0, "approximate")]).value == {"status": "approximate", "seconds": 3.0}
    assert together([answer(1.0), answer(0.0, error="timed out")]).error == "timed out"
