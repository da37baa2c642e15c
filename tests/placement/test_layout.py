from __future__ import annotations

from pathlib import Path

import pytest

from workbench.base import LayoutError
from workbench.placement import Layout, choose_layout
from workbench.spec import read_spec

TINY = Path(__file__).resolve().parents[1] / "golden" / "k3-tiny-a"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "at least 1"),
        ({"tp": 4, "ep": 3}, "does not divide tp"),
        ({"tp": 3, "dp": 2, "ep": 2}, "one must divide the other"),
        ({"tp": 4, "ep": 2, "dispatch": "all_to_all"}, "multiple of tp"),
        ({"dispatch": "scatter"}, "dispatch"),
        ({"pp": 2, "stages": (3,)}, "must name at least one layer"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_layers", range(1, 101))
def test_stages_are_disjoint_complete_and_ordered(num_layers: int) -> None:
    for pp in range(1, min(num_layers, 16) + 1):
        stages = Layout(pp=pp).stage_layers(num_layers)
        assert [i for stage in stages for i in stage] == list(range(num_layers))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_given_stages_are_kept_and_must_hold_every_layer() -> None:
    assert Layout(pp=2, stages=(1, 4)).stage_layers(5) == (range(1), range(1, 5))
    with pytest.raises(LayoutError, match="hold 5 layers"):
        Layout(pp=2, stages=(1, 4)).stage_layers(8)
    with pytest.raises(LayoutError, match="empty stages"):
        Layout(pp=3).stage_layers(2)


def test_rank_and_coordinates_are_inverse() -> None:
    layout = Layout(pp=2, dp=3, tp=4, ep=12)
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        assert layout.rank_at(pp=at.pp, dp=at.dp, tp=at.tp) == rank
    with pytest.raises(LayoutError, match="outside"):
        layout.coords(24)


@pytest.mark.parametrize(
    ("layout", "ep", "expert_tp"),
    [
        (Layout(tp=4), [0, 0, 0, 0], [0, 1, 2, 3]),
        (Layout(tp=4, ep=2), [0, 0, 1, 1], [0, 1, 0, 1]),
        (Layout(tp=2, dp=2, ep=4), [0, 1, 2, 3], [0, 0, 0, 0]),
        (Layout(tp=2, dp=2, ep=2), [0, 1, 0, 1], [0, 0, 0, 0]),
        (Layout(dp=4, ep=2), [0, 1, 0, 1], [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_expert_coordinates(layout: Layout, ep: list[int], expert_tp: list[int]) -> None:
    coords = [layout.coords(rank) for rank in range(layout.world_size)]
    assert [c.ep for c in coords] == ep
    assert [c.expert_tp for c in coords] == expert_tp


@pytest.mark.parametrize("text", ["tp2", "tp1", "pp3", "pp2xtp2", "dp2xtp2xep4", "dp2xep2:all_to_all"])
def test_text_of_a_layout_is_read_back(text: str) -> None:
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["", "tp", "tp2xtp2", "2tp", "tp2*ep2", "cp2", "tp-1", "dp2xep2:broadcast"])
def test_unreadable_layout_text_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [(1, "tp1"), (2, "tp2xep2"), (4, "tp4xep4"), (3, "pp3"), (6, "pp3xtp2xep2"), (8, "pp2xtp4xep4")],
)
def test_chosen_layout_uses_every_rank_and_divides_the_model(num_ranks: int, expected: str) -> None:
    assert str(choose_layout(read_spec(TINY), num_ranks)) == expected


def test_no_dividing_layout_is_refused_with_a_reason_for_each_candidate() -> None:
    with pytest.raises(LayoutError, match=r"pp11: pp=11 stages for 8 layers"):
        choose_layout(read_spec(TINY), 11)


@pytest.mark.parametrize("text", ["dp100000", "tp999999xdp999999xep7", "pp999999"])
def test_a_mistyped_degree_is_refused_at_once(text: str) -> None:
    with pytest.raises(LayoutError, match="too many ranks"):
        Layout.parse(text)


@pytest.mark.parametrize("num_ranks", [0, -1, 10**12])
def test_a_number_of_ranks_out_of_range_has_no_layout(num_ranks: int) -> None:
    with pytest.raises(LayoutError, match="not a number of ranks"):
        choose_layout(read_spec(TINY), num_ranks)
