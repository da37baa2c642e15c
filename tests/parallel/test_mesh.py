"""Groups of a layout, from arithmetic alone and over real processes."""

from __future__ import annotations

import collective_tasks as tasks
import pytest
from ranks import shared_ranks

from workbench.base import LayoutError
from workbench.parallel import group_members, make_context, make_mesh, single_context
from workbench.placement import Layout

LAYOUTS = [
    Layout(),
    Layout(tp=4),
    Layout(pp=3),
    Layout(tp=4, ep=2),
    Layout(dp=4, tp=2, ep=4),
    Layout(pp=2, dp=3, tp=2, ep=6),
    Layout(pp=2, dp=4, tp=1, ep=2, dispatch="all_to_all"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_members_of_a_group_agree_on_it_and_groups_cover_all_ranks(layout: Layout) -> None:
    members = [group_members(layout, rank) for rank in range(layout.world_size)]
    for purpose in members[0]:
        for rank, groups in enumerate(members):
            assert rank in groups[purpose]
            assert list(groups[purpose]) == sorted(groups[purpose])
            assert all(members[other][purpose] == groups[purpose] for other in groups[purpose])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_expert_groups_hold_every_expert_slice_once_and_replicas_hold_the_same(layout: Layout) -> None:
    for rank in range(layout.world_size):
        groups = group_members(layout, rank)
        slices = [(c.ep, c.expert_tp) for c in map(layout.coords, groups["experts"])]
        assert len(slices) == len(set(slices)) == layout.ep * layout.expert_tp
        mine = layout.coords(rank)
        for other in map(layout.coords, groups["expert_replicas"]):
            assert (other.ep, other.expert_tp, other.pp) == (mine.ep, mine.expert_tp, mine.pp)
        # Ranks that see the same tokens lie in tp; ranks that an expert group spans see others.
        assert len(groups["expert_gather"]) * layout.tp == len(groups["experts"])


def test_expert_group_of_a_wide_ep_counts_its_ranks_in_the_order_of_expert_runs() -> None:
    layout = Layout(dp=4, tp=2, ep=4)
    assert group_members(layout, 5)["experts"] == (4, 5, 6, 7)
    assert [layout.coords(r).ep for r in (4, 5, 6, 7)] == [0, 1, 2, 3]
    assert group_members(layout, 5)["expert_gather"] == (5, 7)
    assert group_members(layout, 5)["expert_replicas"] == (1, 5)


def test_one_process_needs_no_group_and_refuses_to_be_several() -> None:
    ctx = make_context(Layout())
    assert (ctx.rank, ctx.is_first_stage, ctx.is_last_stage, ctx.tp.size) == (0, True, True, 1)
    with ctx.tokens(5):
        assert ctx.token_counts == (5,)
    assert ctx.token_counts is None
    ctx.close()
    with pytest.raises(LayoutError, match=r"needs 4 ranks.*no process group"):
        single_context(layout=Layout(tp=4))
    with pytest.raises(LayoutError, match="needs 2 ranks"):
        make_mesh(Layout(tp=2))


@pytest.mark.ranks
def test_meshes_over_processes_carry_the_groups_of_their_layout() -> None:
    results = shared_ranks().run(tasks.meshes, world_size=4)
    assert results[3]["groups"] == {
        "pp": (3,), "dp": (1, 3), "tp": (2, 3), "experts": (0, 1, 2, 3), "expert_gather": (1, 3),
    }  # fmt: skip
    assert "rank 3 of 4 (pp0 dp1 tp1 ep3) on cpu" in results[3]["text"]
    for result in results:
        assert result["total"] == 6.0
        assert result["plain"] == Layout(tp=4)
        assert "names out of pp, dp, tp" in result["refused"]["names"]
        assert "disagree" in result["refused"]["layout"]
        assert "layout tp2 has 2 ranks (found 4 in the process group" in result["refused"]["world"]
