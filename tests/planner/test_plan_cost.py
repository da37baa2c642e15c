"""Times: rooflines by hand, measured seconds first, collectives on their own ranks, pipelines."""

from __future__ import annotations

import dataclasses

import pytest
from planner_samples import collective, given, machine, operator

from workbench.base import Quantity
from workbench.cluster import CollectiveFit, LinkCost
from workbench.operators import CollectiveUse, Inventory, OperatorUse, Workload
from workbench.placement import Layout
from workbench.planner import CostError, Efficiency, StageCost, stage_cost, step_cost

EFFICIENCY = Efficiency(compute={"": 0.5, "attention": 0.25}, memory={"": 0.8}, launch=given(1e-6, "s"))
TOPOLOGY = machine(16)
DEVICE = TOPOLOGY.devices[0]  # 2e12 B/s, 4e14 FLOP/s in bf16, an eighth of it in fp32


def inventory(
    *operators: OperatorUse,
    collectives: tuple[CollectiveUse, ...] = (),
    layout: Layout = Layout(),  # noqa: B008
    stage: int = 0,
) -> Inventory:
    return Inventory(
        model="toy",
        layout=layout,
        stage=stage,
        precision="bf16",
        workload=Workload(phase="decode"),
        operators=operators,
        collectives=collectives,
        activation_peak_bytes=0,
    )


def cost(*operators: OperatorUse, **options: object) -> StageCost:
    what = {name: options.pop(name) for name in ("collectives", "layout", "stage") if name in options}
    return stage_cost(
        inventory(*operators, **what),  # type: ignore[arg-type]
        options.pop("device", DEVICE),  # type: ignore[arg-type]
        TOPOLOGY,
        efficiency=EFFICIENCY,
        **options,  # type: ignore[arg-type]
    )


def test_an_operator_takes_the_longer_of_arithmetic_and_bytes() -> None:
    by_bytes = cost(operator(flops=4 * 10**9, weights=8 * 10**9, count=3))
    assert by_bytes.lower().value == pytest.approx(3 * 8e9 / 2e12)
    assert by_bytes.seconds().value == pytest.approx(3 * (8e9 / 2e12 / 0.8 + 1e-6))
    by_flops = cost(operator(flops=4 * 10**12, weights=8 * 10**6))
    assert by_flops.lower().value == pytest.approx(4e12 / 4e14)
    assert by_flops.seconds().value == pytest.approx(4e12 / 4e14 / 0.5 + 1e-6)


def test_efficiency_may_differ_by_category() -> None:
    found = cost(operator("attention", flops=4 * 10**12))
    assert found.seconds().value == pytest.approx(4e12 / 4e14 / 0.25 + 1e-6)


def test_bytes_that_fusing_would_save_are_in_the_estimate_only() -> None:
    found = cost(operator("elementwise", moved=8 * 10**9))
    assert found.lower().value == 0
    assert found.seconds().value == pytest.approx(8e9 / 2e12 / 0.8 + 1e-6)
    cached = cost(operator("attention", moved=8 * 10**9))
    assert cached.lower().value == pytest.approx(8e9 / 2e12), "what attention reads from its cache must be read"


def test_views_cost_nothing() -> None:
    assert cost(operator("movement", count=1000, is_view=True)).lines == ()


def test_wide_formats_run_at_their_own_rate() -> None:
    found = cost(operator(flops=10**12, input_dtypes=("float32", "float32")))
    assert found.lower().value == pytest.approx(1e12 / (4e14 / 8))


def test_a_format_without_a_figure_runs_in_proportion_to_its_bits() -> None:
    only_8_bits = dataclasses.replace(DEVICE, matmul={"fp8": given(8e14, "FLOP/s")})
    found = cost(operator(flops=10**12), device=only_8_bits)
    assert found.lower().value == pytest.approx(1e12 / 4e14)
    nothing = dataclasses.replace(DEVICE, matmul={})
    with pytest.raises(CostError, match="no matrix rate of toy"):
        cost(operator(flops=10**12), device=nothing)


class Measured:
    def seconds(self, use: OperatorUse) -> Quantity | None:
        return Quantity(0.25, "s", "measured", "a stopwatch") if use.category == "gemm" else None


def test_measured_seconds_go_before_any_model_and_say_so() -> None:
    found = cost(operator(weights=8 * 10**9, count=2), operator("norm", moved=10**6), measured=Measured())
    by_name = {line.name: line for line in found.lines}
    assert by_name["gemm"].estimate == Quantity(0.5, "s", "measured", "a stopwatch")
    assert by_name["norm"].estimate.basis == "assumed"
    assert found.seconds().basis == "assumed", "a sum is as weak as its weakest part"
    assert 0.99 < found.measured_share < 1


def test_the_lower_bound_never_exceeds_what_was_measured() -> None:
    slow_by_the_book = operator(weights=10**13)
    found = cost(slow_by_the_book, measured=Measured())
    assert found.lower().value == found.seconds().value == 0.25


def test_collectives_take_the_time_of_their_own_ranks() -> None:
    reduce_8 = collective("all_reduce", "tp", tuple(range(8)), 10**6, 3)
    near = cost(collectives=(reduce_8,), layout=Layout(tp=8))
    assert near.seconds("collectives").value == pytest.approx(
        3 * TOPOLOGY.collective_time("all_reduce", 10**6, range(8)).value
    )
    assert near.lines[0].calls == 3
    reduce_16 = collective("all_reduce", "tp", tuple(range(16)), 10**6, 3)
    far = cost(collectives=(reduce_16,), layout=Layout(tp=16))
    assert far.seconds().value > 1.5 * near.seconds().value


def test_the_slowest_of_the_groups_that_work_at_the_same_time_counts() -> None:
    """Groups of six on hosts of eight: the first lies in one host, the second in two."""
    use = collective("all_reduce", "tp", tuple(range(6)), 10**6)
    first = TOPOLOGY.collective_time("all_reduce", 10**6, range(6)).value
    second = TOPOLOGY.collective_time("all_reduce", 10**6, range(6, 12)).value
    assert second > first
    assert cost(collectives=(use,), layout=Layout(dp=2, tp=6)).seconds().value == pytest.approx(second)


def test_ranks_follow_the_stage_not_the_rank_that_was_traced() -> None:
    """Layers of equal kind are traced once, in the first stage; the second one lies elsewhere."""
    uneven = machine(8, per_host=5)
    use = collective("all_reduce", "tp", (0, 1, 2, 3), 10**6)
    found = [
        stage_cost(
            inventory(collectives=(use,), layout=Layout(pp=2, tp=4), stage=stage),
            DEVICE,
            uneven,
            efficiency=EFFICIENCY,
        )
        for stage in (0, 1)
    ]
    assert found[1].seconds().value == pytest.approx(uneven.collective_time("all_reduce", 10**6, (4, 5, 6, 7)).value)
    assert found[1].seconds().value > found[0].seconds().value


def test_a_hop_between_stages_is_counted_where_it_arrives_between_neighbours() -> None:
    layout, stages = Layout(pp=4, tp=4), tuple(range(0, 16, 4))
    sender = cost(collectives=(collective("send", "pp", stages, 10**6),), layout=layout)
    assert sender.seconds().value == 0
    hop = collective("receive", "pp", stages, 10**6)
    inside = cost(collectives=(hop,), layout=layout, stage=1)
    outside = cost(collectives=(hop,), layout=layout, stage=2)
    assert inside.seconds().value == pytest.approx(TOPOLOGY.collective_time("send_recv", 10**6, (0, 4)).value)
    assert outside.seconds().value == pytest.approx(TOPOLOGY.collective_time("send_recv", 10**6, (4, 8)).value)
    assert outside.seconds().value > inside.seconds().value


def test_a_collective_is_timed_in_the_format_it_is_made_in() -> None:
    """Where both were measured; a backend may add up one of them far more slowly."""

    def fit(dtype: str, seconds: float) -> CollectiveFit:
        cost = LinkCost(alpha=given(seconds, "s"), bandwidth=given(1e12, "B/s"))
        return CollectiveFit(operation="all_reduce", ranks=(0, 1), dtype=dtype, cost=cost)

    topology = dataclasses.replace(machine(2), collectives=(fit("bfloat16", 3.0), fit("float32", 1.0)))
    found = []
    for dtype in ("float32", "bfloat16", "float16"):
        use = dataclasses.replace(collective("all_reduce", "tp", (0, 1), 8), dtype=dtype)
        whole = inventory(collectives=(use,), layout=Layout(tp=2))
        found.append(round(stage_cost(whole, DEVICE, topology, efficiency=EFFICIENCY).seconds().value))
    assert found == [1, 3, 3]


def test_a_group_of_one_rank_costs_nothing() -> None:
    assert cost(collectives=(collective("all_reduce", "tp", (0,), 10**9),)).lines == ()


def stage(seconds: float) -> StageCost:
    return cost(operator(weights=round((seconds - 1e-6) * 2e12 * 0.8)))


def test_an_unfilled_pipeline_adds_up_and_waits() -> None:
    step = step_cost("decode", [stage(0.3), stage(0.1)])
    assert step.seconds.value == pytest.approx(0.4)
    assert step.idle_share == pytest.approx(0.5)


def test_a_filled_pipeline_goes_at_the_pace_of_its_slowest_stage() -> None:
    step = step_cost("decode", [stage(0.3), stage(0.1)], groups=2)
    assert step.seconds.value == pytest.approx(0.6)
    assert step.idle_share == pytest.approx(1 - 2 * 0.4 / (2 * 0.6))
    even = step_cost("decode", [stage(0.2), stage(0.2)], groups=2)
    assert even.idle_share == pytest.approx(0)


def test_tables_add_up_to_the_step_and_records_too() -> None:
    found = cost(operator(weights=10**9, count=5), operator("norm", moved=10**6))
    step = step_cost("decode", [found])
    text = step.table().render()
    assert "gemm" in text
    assert "norm" in text
    record = step.to_json()
    assert sum(line["estimate_s"] for line in record["lines"]) == pytest.approx(step.seconds.value)


def test_unknown_bandwidth_is_told_not_guessed() -> None:
    with pytest.raises(CostError, match="memory bandwidth"):
        cost(operator(weights=1), device=dataclasses.replace(DEVICE, memory_bandwidth=None))


def test_measured_rates_of_a_device_are_trusted_further_than_a_data_sheet() -> None:
    known = Quantity(1e11, "B/s", "measured", "copy")
    measured = dataclasses.replace(DEVICE, memory_bandwidth=known, matmul={"bf16": Quantity(1e11, "FLOP/s")})
    assert Efficiency.for_device(measured).compute_of("gemm") > Efficiency.for_device(DEVICE).compute_of("gemm")


def test_time_between_operators_counts_every_call_views_too() -> None:
    slow_host = dataclasses.replace(EFFICIENCY, host=given(5e-6, "s"))
    uses = (operator("norm", count=30), operator("movement", count=10, is_view=True))
    with_host = stage_cost(inventory(*uses), DEVICE, TOPOLOGY, efficiency=slow_host)
    without = stage_cost(inventory(*uses), DEVICE, TOPOLOGY, efficiency=EFFICIENCY)
    assert with_host.seconds().value - without.seconds().value == pytest.approx(40 * 5e-6)
    assert with_host.lower().value == without.lower().value
    on_host = dataclasses.replace(DEVICE, device_type="cpu")
    assert Efficiency.for_device(on_host).host.value > Efficiency.for_device(DEVICE).host.value == 0
