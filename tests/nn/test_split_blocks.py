"""Blocks holding a rank's share of the weights: their partial outputs add up to the whole block's output."""

from __future__ import annotations

import pytest
import torch
from nn_tiny import DENSE, KDA, MLA, MOE, assert_near, fill, tiny_spec
from torch import Tensor, nn

from workbench.nn import LOCAL, MatrixStore, MoE, Precision, Segments, SingleRank, TokenBatch
from workbench.nn.ffn import GatedFFN
from workbench.nn.kda import KDA as KDABlock
from workbench.nn.mla import MLA as MLABlock
from workbench.nn.model import Head
from workbench.placement import Layout, rule_for

DIM, RANKS = 40, 2
FLOAT64 = Precision("fp32", torch.float64)


class PretendRank(SingleRank):
    """One rank of two whose sums and joins are done by the test."""

    def __init__(self, rank: int):
        self.rank, self.size = rank, RANKS

    def split(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(RANKS, dim)[self.rank]


def build(kind: str) -> nn.Module:
    blocks: dict[str, nn.Module] = {
        "kda": KDABlock(KDA, DIM, 0, FLOAT64),
        "mla": MLABlock(MLA, DIM, 0, FLOAT64),
        "dense": GatedFFN(DIM, DENSE.width, DENSE.activation, FLOAT64),
        "moe": MoE(MOE, DIM, FLOAT64),
    }
    block = blocks[kind]
    fill(block)
    return block.requires_grad_(False)


def share_of(kind: str, rank: int) -> nn.Module:
    """The block with every weight cut to one rank's piece, by the placement table; experts stay whole."""
    block, layout = build(kind), Layout(tp=RANKS)
    prefix = f"layers.0.{'mixer' if kind in ('kda', 'mla') else 'ffn'}."
    for name, parameter in block.named_parameters():
        rule = rule_for(tiny_spec(), layout, prefix + name)
        if rule.dim is None or "experts." in name:
            continue
        piece = parameter.data.chunk(RANKS, rule.dim)[rank].clone()
        owner = block.get_submodule(name.rpartition(".")[0]) if "." in name else block
        if isinstance(owner, MatrixStore):
            owner.narrow_(tuple(piece.shape))
            owner.write(piece)
        else:
            parameter.data = piece
    for module in block.modules():
        if getattr(module, "tp", None) is LOCAL:
            module.tp = PretendRank(rank)
    return block.requires_grad_(False)


def run(block: nn.Module, x: Tensor) -> Tensor:
    if isinstance(block, KDABlock | MLABlock):
        return block(x, Segments(TokenBatch.whole([[0] * 9, [0] * 4])), None)
    return block(x)


@pytest.mark.parametrize("kind", ["kda", "mla", "dense", "moe"])
def test_the_shares_of_all_ranks_add_up_to_the_whole(kind: str) -> None:
    x = torch.randn(13, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parts = [run(share_of(kind, rank), x) for rank in range(RANKS)]
    whole = run(build(kind), x)
    assert_near(sum(parts), whole)
    with pytest.raises(AssertionError, match="max"):  # a share alone is not the whole
        assert_near(parts[0], whole, 1e-2)


def test_the_shares_of_the_head_join_to_all_logits() -> None:
    whole = Head(52, DIM, torch.float64)
    fill(whole)
    x, pieces = torch.randn(3, DIM, dtype=torch.float64), []
    for rank in range(RANKS):
        part = Head(52, DIM, torch.float64)
        part.narrow_((26, DIM))
        part.write(whole.weight[26 * rank : 26 * (rank + 1)])
        part.tp = PretendRank(rank)
        pieces.append(part(x))
    assert_near(torch.cat(pieces, -1), whole(x))
