"""Traces of several ranks put together again: joined, added or checked as copies, by the placement table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from align_checkpoints import TEXT_IDS, TINY

from workbench.align import compare_traces, merge_ranks, reference_traces, undo_split
from workbench.align.reference import ReferencePrompt
from workbench.base import DeploymentError
from workbench.placement import Layout
from workbench.spec import read_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))
from rank_capture import capture_on_rank
from ranks import shared_ranks

SPEC = read_spec(TINY)
SEQUENCES = [list(TEXT_IDS[:11]), list(TEXT_IDS[3:6])]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("L2.kda_q", 1),
        ("L2.kda_beta_logit", 1),
        ("L2.kda_gated", 1),
        ("L2.kda_conv", 1),
        ("L2.kda_state", 0),
        ("L3.mla_q", 1),
        ("L3.mla_gated", 1),
        ("L1.moe_routed_out", "sum"),
        ("L1.moe_shared_out", "sum"),
        ("L3.latent", "copy"),
        ("L1.moe_combined", "copy"),
        ("L1.topk_idx", "copy"),
        ("L4.attn_out", "copy"),
        ("logits", "copy"),
    ],
)
def test_pieces_join_as_the_placement_table_says(name: str, kind: int | str) -> None:
    layout, pieces = Layout(tp=2), [torch.full((4, 6, 2), 1.0), torch.full((4, 6, 2), 2.0)]
    if kind == "sum":
        assert torch.equal(undo_split(name, pieces, SPEC, layout), torch.full((4, 6, 2), 3.0))
    elif kind == "copy":
        assert undo_split(name, [pieces[0], pieces[0].clone()], SPEC, layout) is pieces[0]
        with pytest.raises(DeploymentError, match=f"tp ranks 0 and 1 hold different values of {name}"):
            undo_split(name, pieces, SPEC, layout)
    else:
        assert isinstance(kind, int)
        assert torch.equal(undo_split(name, pieces, SPEC, layout), torch.cat(pieces, kind))


def test_one_piece_is_returned_as_it_is() -> None:
    piece = torch.ones(3)
    assert undo_split("L2.kda_q", [piece], SPEC, Layout()) is piece


def test_copies_of_different_shape_or_not_finite_are_refused() -> None:
    with pytest.raises(DeploymentError, match=r"found \(4,\)"):
        undo_split("logits", [torch.ones(3), torch.ones(4)], SPEC, Layout(tp=2))
    with pytest.raises(DeploymentError, match="different values"):
        undo_split("logits", [torch.ones(3), torch.full((3,), float("nan"))], SPEC, Layout(tp=2))


def test_an_absent_rank_or_an_odd_capture_is_named() -> None:
    layout = Layout(tp=2, pp=2)
    whole = {rank: {"L0.sum": torch.ones(2)} for rank in range(4)}
    assert set(merge_ranks(whole, SPEC, layout)) == {"L0.sum"}
    with pytest.raises(DeploymentError, match=r"no trace of ranks \[3\]"):
        merge_ranks({rank: whole[rank] for rank in range(3)}, SPEC, layout)
    with pytest.raises(DeploymentError, match="captured different tensors"):
        merge_ranks({**whole, 1: {"L0.attn_in": torch.ones(2)}}, SPEC, layout)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=4), Layout(tp=2, ep=2), Layout(pp=2, tp=2, stages=(5, 3))],
    ids=lambda layout: str(layout),
)
def test_merged_traces_of_real_ranks_equal_the_reference(layout: Layout) -> None:
    per_rank = shared_ranks().run(capture_on_rank, str(TINY), layout, SEQUENCES, world_size=layout.world_size)
    expected = reference_traces(TINY, [ReferencePrompt(token_ids=tuple(ids)) for ids in SEQUENCES])
    for n, want in enumerate(expected):
        merged = merge_ranks({rank: traces[n] for rank, traces in enumerate(per_rank)}, SPEC, layout)
        comparison = compare_traces(want, merged, required=lambda name: "route" not in name)
        assert comparison.passed, comparison.render()


@pytest.mark.ranks
def test_a_forgotten_reduction_shows_as_copies_that_differ() -> None:
    layout = Layout(tp=2)
    per_rank = shared_ranks().run(capture_on_rank, str(TINY), layout, SEQUENCES, True, world_size=2)
    with pytest.raises(DeploymentError, match=r"tp ranks 0 and 1 hold different values of L0\.ffn_out"):
        merge_ranks({rank: traces[0] for rank, traces in enumerate(per_rank)}, SPEC, layout)
