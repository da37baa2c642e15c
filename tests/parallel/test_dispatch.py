"""Expert dispatch over real processes equals all experts on one rank: results and every gradient."""

from __future__ import annotations

import collective_tasks as tasks
import pytest
import torch
from collective_tasks import MOE
from ranks import shared_ranks
from torch import Tensor

from workbench.nn.moe import Experts
from workbench.nn.precision import Precision
from workbench.parallel import share_sizes
from workbench.placement import Layout

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, ep=2),
    Layout(tp=2, ep=2, dispatch="all_to_all"),
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, dispatch="all_to_all"),
    Layout(tp=4, ep=2),
    Layout(dp=2, tp=2, ep=2),
    Layout(dp=2, tp=2, ep=4),
    Layout(dp=2, tp=2, ep=4, dispatch="all_to_all"),
    Layout(dp=4, ep=2, dispatch="all_to_all"),
]
TOKENS = (5, 2, 0, 7)  # per replica: uneven, and one without


def replica(count: int) -> dict[str, Tensor]:
    ids = torch.stack([torch.randperm(MOE.num_experts)[: MOE.top_k].sort().values for _ in range(count)] or [])
    return {
        "latent": torch.randn(count, MOE.latent_dim),
        "ids": ids,
        "weights": torch.rand(count, MOE.top_k),
        "target": torch.randn(count, MOE.latent_dim),
    }


def replicas(layout: Layout, counts: tuple[int, ...]) -> list[dict[str, Tensor]]:
    empty = torch.empty(0, MOE.top_k, dtype=torch.int64)
    made = [replica(count) if count else {**replica(1), "ids": empty} for count in counts[: layout.dp]]
    return [{k: v[:count] for k, v in r.items()} for r, count in zip(made, counts, strict=False)]


def stacked_weights() -> dict[str, Tensor]:
    up = (MOE.num_experts, MOE.width, MOE.latent_dim)
    return {
        "w1": torch.randn(up) / 3,
        "w2": torch.randn(MOE.num_experts, MOE.latent_dim, MOE.width) / 3,
        "w3": torch.randn(up) / 3,
    }


def on_one_rank(weights: dict[str, Tensor], tokens: list[dict[str, Tensor]]) -> tuple[list[dict], dict[str, Tensor]]:
    experts = Experts(MOE, Precision("fp32", torch.float32))
    with torch.no_grad():
        for name, value in weights.items():
            getattr(experts, name).weight.copy_(value)
    outcomes = []
    for part in tokens:
        latent, gate = part["latent"].clone().requires_grad_(), part["weights"].clone().requires_grad_()
        result = experts(latent, part["ids"], gate)
        if len(latent):
            (result * part["target"]).sum().backward()
        zero = torch.zeros_like
        outcomes.append(
            {
                "result": result.detach(),
                "latent": latent.grad if latent.grad is not None else zero(latent),
                "weights": gate.grad if gate.grad is not None else zero(gate),
            }
        )
    return outcomes, {name.split(".")[0]: p.grad for name, p in experts.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dispatch_equals_all_experts_on_one_rank(layout: Layout) -> None:
    torch.manual_seed(layout.world_size + layout.ep)
    weights, tokens = stacked_weights(), replicas(layout, TOKENS if layout.dp > 1 else (6,))
    expected, grads = on_one_rank(weights, tokens)
    results = shared_ranks().run(tasks.dispatch, layout, weights, tokens, True, world_size=layout.world_size)
    num, width = MOE.num_experts // layout.ep, MOE.width // layout.expert_tp
    summed: dict[tuple[int, int], dict[str, Tensor]] = {}
    for result in results:
        at, want = result["coords"], expected[result["coords"].dp]
        for name in ("result", "latent", "weights"):
            torch.testing.assert_close(
                result[name], want[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        mine = summed.setdefault((at.ep, at.expert_tp), {})  # ranks with the same slice, each for its own tokens
        for name, grad in result["experts"].items():
            mine[name] = mine.get(name, torch.zeros(())) + (torch.zeros(()) if grad is None else grad)
    assert len(summed) == layout.ep * layout.expert_tp
    for (ep, part), mine in summed.items():
        rows, columns = slice(ep * num, (ep + 1) * num), slice(part * width, (part + 1) * width)
        torch.testing.assert_close(mine["w1.weight"], grads["w1"][rows, columns], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine["w3.weight"], grads["w3"][rows, columns], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine["w2.weight"], grads["w2"][rows, :, columns], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, ep=2), Layout(dp=2, ep=2), Layout(dp=2, ep=2, dispatch="all_to_all")],
    ids=str,
)
def test_a_rank_whose_experts_nobody_chose_still_takes_part_in_the_backward_pass(layout: Layout) -> None:
    torch.manual_seed(5)
    weights, tokens = stacked_weights(), replicas(layout, (3, 2))
    for part in tokens:
        part["ids"] = torch.tensor([[0, 1, 3]] * len(part["ids"]))  # all on the first half of the experts
    expected, _ = on_one_rank(weights, tokens)
    for result in shared_ranks().run(tasks.dispatch, layout, weights, tokens, True, world_size=2):
        want = expected[result["coords"].dp]
        torch.testing.assert_close(result["latent"], want["latent"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["weights"], want["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_all_to_all_takes_one_exchange_out_one_back_and_one_for_the_sizes() -> None:
    torch.manual_seed(0)
    layout = Layout(dp=2, tp=2, ep=4, dispatch="all_to_all")
    weights, tokens = stacked_weights(), replicas(layout, (0, 3))  # one whole replica without tokens
    for result in shared_ranks().run(tasks.dispatch, layout, weights, tokens, False, world_size=4):
        assert result["calls"] == {"all_to_all": 3, "all_gather": 1}


@pytest.mark.ranks
def test_replicated_dispatch_across_replicas_takes_one_gather_and_one_sum_once_counts_are_announced() -> None:
    torch.manual_seed(0)
    layout = Layout(dp=2, ep=2)
    weights, tokens = stacked_weights(), replicas(layout, (4, 1))
    announced = shared_ranks().run(tasks.dispatch, layout, weights, tokens, True, world_size=2)
    alone = shared_ranks().run(tasks.dispatch, layout, weights, tokens, False, world_size=2)
    assert [r["calls"] for r in announced] == [r["calls"] for r in alone] == [{"all_gather": 2, "all_reduce": 1}] * 2
    for a, b in zip(announced, alone, strict=True):
        assert torch.equal(a["result"], b["result"])


def test_rows_are_shared_out_in_order_with_the_remainder_first() -> None:
    assert share_sizes(7, 3) == (3, 2, 2)
    assert share_sizes(2, 4) == (1, 1, 0, 0)
    assert share_sizes(0, 2) == (0, 0)
