"""Costs of transfers: fits recover what was planted, and estimates keep the bounds that every algorithm keeps."""

from __future__ import annotations

import random

import pytest

from workbench.base import Quantity
from workbench.cluster.cost import OPERATIONS, CollectiveFit, LinkCost, bus_factor, estimate_flat, fit_cost

SIZES = [1 << n for n in range(10, 26, 3)]


def cost(alpha: float = 2e-6, bandwidth: float = 1e9) -> LinkCost:
    return LinkCost(alpha=Quantity(alpha, "s"), bandwidth=Quantity(bandwidth, "B/s", "datasheet", "sheet"))


def test_a_fit_recovers_planted_numbers_exactly() -> None:
    found = fit_cost([(size, 3e-6 + size / 7e9) for size in SIZES], "planted")
    assert found.alpha.value == pytest.approx(3e-6)
    assert found.bandwidth.value == pytest.approx(7e9)
    assert found.residual < 1e-9
    assert found.points[0] == (SIZES[0], 3e-6 + SIZES[0] / 7e9)
    assert str(found.alpha).endswith("(measured: planted)")


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """With plain least squares the planted 2 us would vanish beside the noise of the largest size."""
    noise = random.Random(5)
    points = [(size, (2e-6 + size / 1e9) * noise.uniform(0.97, 1.03)) for size in SIZES]
    found = fit_cost(points, "noisy")
    assert found.alpha.value == pytest.approx(2e-6, rel=0.1)
    assert found.bandwidth.value == pytest.approx(1e9, rel=0.05)
    assert 0.005 < found.residual < 0.1


def test_the_residual_names_the_worst_point() -> None:
    points = [(size, 3e-6 + size / 7e9) for size in SIZES]
    points[2] = (points[2][0], points[2][1] * 3)
    assert fit_cost(points, "one point off").residual > 0.3


def test_between_measured_sizes_the_points_speak_and_beyond_them_the_fit() -> None:
    """A library that changes its algorithm above 4 KiB: no straight line follows the step."""
    points = [(1024, 10e-6), (4096, 12e-6), (8192, 60e-6), (1 << 20, 1e-3)]
    found = fit_cost(points, "a step")
    assert found.residual > 0.3
    for size, seconds in points:
        assert found.time(size).value == pytest.approx(seconds)
    assert found.time(6144).value == pytest.approx(36e-6)
    assert found.time(6144).basis == "measured"
    for size in (0, 512, 1 << 22):
        assert found.time(size).value == pytest.approx(found.alpha.value + size / found.bandwidth.value)
    twice = found.scaled(2.0, "what if")
    assert twice.time(6144).value == pytest.approx(found.alpha.value / 2 + 6144 / found.bandwidth.value / 2)


def test_noise_never_makes_a_negative_start_or_an_endless_bandwidth() -> None:
    falling = fit_cost([(1000, 2e-3), (1_000_000, 1e-3)], "falls")
    assert falling.alpha.value >= 0
    assert falling.bandwidth.value == pytest.approx(1e9)
    steep = fit_cost([(1000, 1e-9), (1_000_000, 1e-3)], "steep")
    assert steep.alpha.value == 0
    assert steep.bandwidth.value > 0


@pytest.mark.parametrize("points", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)], [(4, 1.0), (8, 0.0)], [(4, 1.0), (8, -1.0)]])
def test_a_fit_of_too_little_or_impossible_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="a fit needs"):
        fit_cost(points, "")


def test_a_cost_checks_units_and_bounds() -> None:
    with pytest.raises(ValueError, match="alpha in s and bandwidth in B/s"):
        LinkCost(alpha=Quantity(1, "B/s"), bandwidth=Quantity(1, "s"))
    for alpha, bandwidth in ((-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="alpha >= 0 and bandwidth > 0"):
            cost(alpha, bandwidth)


def test_time_carries_the_weaker_basis() -> None:
    assert cost().time(1000) == Quantity(3e-6, "s", "datasheet", "sheet")


def test_a_scaled_link_is_modelled_and_faster_in_both_numbers() -> None:
    faster = cost().scaled(4, "what if")
    assert (faster.alpha.value, faster.bandwidth.value) == (pytest.approx(5e-7), pytest.approx(4e9))
    assert {faster.alpha.basis, faster.bandwidth.basis} == {"modelled"}
    with pytest.raises(ValueError, match="above 0"):
        cost().scaled(0, "")


@pytest.mark.parametrize(
    ("operation", "put_in", "algorithm", "bus"),
    [
        ("all_reduce", 4000, 4000, 4000 * 2 * 3 / 4),
        ("all_gather", 1000, 4000, 3000),
        ("reduce_scatter", 4000, 4000, 3000),
        ("all_to_all", 4000, 4000, 3000),
        ("broadcast", 4000, 4000, 4000),
    ],
)
def test_bus_bandwidth_counts_the_bytes_that_cross_a_link(
    operation: str, put_in: int, algorithm: float, bus: float
) -> None:
    fit = CollectiveFit(operation=operation, ranks=(0, 1, 2, 3), dtype="int8", cost=cost())  # type: ignore[arg-type]
    seconds = fit.cost.time(put_in).value
    assert fit.algorithm_bandwidth(put_in).value == pytest.approx(algorithm / seconds)
    assert fit.bus_bandwidth(put_in).value == pytest.approx(bus / seconds)
    assert fit.bus_bandwidth(put_in).unit == "B/s"


@pytest.mark.parametrize(
    ("operation", "size"), [(x, n) for x in OPERATIONS for n in (2, 3, 8, 96) if x != "send_recv" or n == 2]
)
def test_estimates_stay_above_what_must_cross_the_link(operation: str, size: int) -> None:
    """No algorithm sends fewer bytes than the bus factor says, or needs no start."""
    for num_bytes in (1, 10_000, 10_000_000):
        seconds = estimate_flat(operation, num_bytes, size, 2e-6, 1e9)  # type: ignore[arg-type]
        crossing = num_bytes * (size if operation == "all_gather" else 1)
        floor = bus_factor(operation, size) * crossing / 1e9  # type: ignore[arg-type]
        assert seconds >= floor * (1 - 1e-12) + 2e-6


def test_one_rank_needs_no_time_and_large_all_reduce_is_a_ring() -> None:
    assert all(estimate_flat(x, 1e6, 1, 1.0, 1.0) == 0 for x in OPERATIONS)
    assert estimate_flat("all_reduce", 1e9, 8, 0.0, 1e9) == pytest.approx(2 * 7 / 8)
    assert estimate_flat("all_reduce", 1, 8, 1e-6, 1e9) == pytest.approx(3e-6, rel=0.01)
