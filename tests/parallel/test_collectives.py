"""Collectives over real processes: values, gradients, uneven and empty rows, counts, and the record of the last one."""

from __future__ import annotations

import collective_tasks as tasks
import pytest
import torch
from ranks import shared_ranks

from workbench.parallel import CollectiveLog, Group, GroupTensorParallel
from workbench.parallel.functions import pack_rows, unpack_rows


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_matrices_give_the_values_and_gradients_of_whole_ones(world_size: int) -> None:
    torch.manual_seed(3)
    x, up, down, target = torch.randn(7, 10), torch.randn(18, 10), torch.randn(6, 18), torch.randn(7, 6)
    results = shared_ranks().run(tasks.sharded_mlp, x, up, down, target, world_size=world_size)
    leaves = [t.clone().requires_grad_() for t in (x, up, down)]
    out = (torch.tanh(leaves[0] @ leaves[1].T) @ leaves[2].T).square()
    (out * target).sum().backward()
    for result in results:
        torch.testing.assert_close(result["out"], out.detach())
        torch.testing.assert_close(result["x"], leaves[0].grad)
    torch.testing.assert_close(torch.cat([r["up"] for r in results], 0), leaves[1].grad)
    torch.testing.assert_close(torch.cat([r["down"] for r in results], 1), leaves[2].grad)


@pytest.mark.ranks
@pytest.mark.parametrize("counts", [(3, 5), (0, 4), (2, 0, 1), (0, 0), (4, 4)])
def test_rows_of_uneven_number_gather_in_rank_order_and_their_gradients_return(counts: tuple[int, ...]) -> None:
    results = shared_ranks().run(tasks.uneven_rows, counts, world_size=len(counts))
    expected = torch.tensor([100.0 * rank + r for rank, count in enumerate(counts) for r in range(count)])
    start = 0
    for result, count in zip(results, counts, strict=True):
        assert torch.equal(result["whole"], expected[:, None].expand(-1, 3))
        assert torch.equal(result["own"], result["whole"][start : start + count])
        assert torch.equal(result["grad"], result["whole"][start : start + count])
        start += count


@pytest.mark.ranks
@pytest.mark.parametrize(
    "sends", [[[1, 2], [3, 0]], [[0, 0], [1, 1]], [[0, 0], [0, 0]], [[0, 1, 2], [1, 0, 1], [3, 0, 0]]]
)
def test_one_exchange_carries_bf16_fp32_and_ids_and_its_gradient_takes_one_more(sends: list[list[int]]) -> None:
    results = shared_ranks().run(tasks.mixed_exchange, sends, world_size=len(sends))
    for rank, result in enumerate(results):
        for part, name in enumerate(("values", "weights", "ids")):
            sent = [r[name].split(row) for r, row in zip(results, sends, strict=True)]
            expected = torch.cat([pieces[rank] for pieces in sent])
            assert result["got"][part].dtype == expected.dtype
            assert torch.equal(result["got"][part], expected)
        assert torch.equal(result["grads"][0], torch.full_like(result["values"], 2.0))
        assert torch.equal(result["grads"][1], result["weights"])
        assert result["calls"] == {("tp", "all_to_all"): 2}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_runs_without_warnings_and_is_counted(world_size: int) -> None:
    results = shared_ranks().run(tasks.every_operation_without_warnings, world_size=world_size)
    for rank, result in enumerate(results):
        expected = [[[0.5, -2.0], [448.0, float(r)]] for r in range(world_size)]
        assert result["gathered"].tolist() == expected  # 8-bit floats, which gloo itself refuses
        assert result["exchanged"].tolist() == [row for piece in expected for row in piece]
        assert result["summed"].tolist() == [1.5 * world_size, sum(range(world_size))]
        assert result["told"].tolist() == [world_size - 1, 7]
        assert result["counts"] == tuple(3 * r for r in range(world_size))
        assert result["nothing"] == [(0, 4), (world_size, 0, 4)]
        assert result["totals"] == {
            "all_gather": (3, 4 + 8),
            "all_to_all": (1, 4 * world_size),
            "all_reduce": (2, 8),
            "broadcast": (1, 16),
            "barrier": (1, 0),
        }, rank
        assert "all_gather float32[0, 4] over tp" in result["last"]
        assert ", finished" in result["last"]


def test_packed_rows_unpack_to_the_same_values_at_every_row_count() -> None:
    for num_rows in (0, 1, 3):  # one row is contiguous whatever its offset, and then misaligned
        parts = (
            torch.randn(num_rows, 5).to(torch.bfloat16),
            torch.randn(num_rows, 2, 3),
            torch.arange(num_rows, dtype=torch.int32)[:, None],
        )
        for before, after in zip(parts, unpack_rows(pack_rows(*parts), *parts), strict=True):
            assert torch.equal(before, after)


def test_a_group_of_one_does_nothing_and_counts_nothing() -> None:
    log = CollectiveLog()
    group = Group("tp", log=log)
    x = torch.randn(3, 4, requires_grad=True)
    tp = GroupTensorParallel(group)
    for y in (tp.enter(x), tp.reduce(x), tp.gather(x, -1), tp.split(x, 0), group.all_reduce(x)):
        assert y is x
    assert group.row_counts(5, x.device) == (5,)
    assert log.count() == 0
    assert log.describe_last() == "no collective was started"


def test_the_log_shows_the_operation_that_a_stuck_or_failed_rank_is_in() -> None:
    log, group, heard = CollectiveLog(), Group("tp"), []
    log.listener = heard.append
    with log.record("all_reduce", group, torch.zeros(2, 3)):
        assert not log.is_last_finished
        assert "#0 all_reduce float32[2, 3] over tp ranks [0], not finished" in log.describe_last()
    assert log.is_last_finished
    with pytest.raises(RuntimeError), log.record("all_to_all", group, torch.zeros(4, dtype=torch.uint8)):
        raise RuntimeError("connection closed by peer")
    assert "#1 all_to_all uint8[4] over tp ranks [0], not finished" in log.describe_last()
    assert [record.name for record in heard] == ["all_reduce", "all_to_all"]
    assert (log.count(), log.num_bytes("all_reduce"), log.count("all_to_all")) == (1, 24, 0)
    log.reset()
    assert (log.count(), log.num_operations) == (0, 2)
