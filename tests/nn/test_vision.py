"""The vision tower against a plain re-statement of its equations, and its behaviour at the edges."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from workbench.base import ImageError
from workbench.nn.projector import Projector
from workbench.nn.vision import Grid, VisionTower, frame_table, merge_patches, rotary_angles, rotate_pairs
from workbench.nn.vision_rows import ImageRows
from workbench.spec import ProjectorSpec, VisionSpec

# No two widths are equal, so that a swapped dimension fails.
SPEC = VisionSpec(
    num_layers=2,
    hidden_size=20,
    num_heads=3,
    qkv_width=24,
    ffn_width=42,
    patch_size=5,
    merge_size=2,
    grid_height=6,
    grid_width=9,
    num_frames=4,
    rope_theta=10000.0,
    norm_eps=2.0**-23,
)
PROJECTOR = ProjectorSpec(input_width=80, hidden_width=72, output_width=33, norm_eps=1e-5)
# Near the size of the position grid, as small as can be, wide, and one of several frames.
GRIDS: list[Grid] = [(1, 6, 8), (1, 2, 2), (1, 4, 12), (3, 2, 6)]


def randomise(module: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.4
        if "norm" in name:
            parameter.data += 1


def new_tower(dtype: torch.dtype = torch.float64, spec: VisionSpec = SPEC) -> VisionTower:
    tower = VisionTower(spec, dtype)
    randomise(tower)
    return tower


def patches_of(grids: list[Grid], seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    count = sum(math.prod(grid) for grid in grids)
    return torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference(tower: VisionTower, patches: Tensor, grid: Grid) -> Tensor:
    """One image, patch by patch, from the equations alone."""
    frames, rows, columns = grid
    weights = {name: w.detach() for name, w in tower.named_parameters()}
    C, H, d = SPEC.hidden_size, SPEC.num_heads, SPEC.head_dim

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.square().mean() + SPEC.norm_eps).sqrt() * w

    def position(row: int, column: int) -> Tensor:
        table, at = weights["pos_embed.weight"], []
        for index, size, total in ((row, rows, SPEC.grid_height), (column, columns, SPEC.grid_width)):
            x = min(max((index + 0.5) * total / size - 0.5, 0), total - 1)
            at.append((math.floor(x), min(math.floor(x) + 1, total - 1), x - math.floor(x)))
        (r0, r1, a), (c0, c1, b) = at
        top = (1 - b) * table[r0, c0] + b * table[r0, c1]
        return (1 - a) * top + a * ((1 - b) * table[r1, c0] + b * table[r1, c1])

    def time(frame: int) -> Tensor:
        if frames == 1:
            return torch.zeros(C, dtype=torch.float64)
        angles = [frame * 10000.0 ** (-2 * i / C) for i in range(C // 2)]
        return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)

    def turn(x: Tensor, row: int, column: int) -> Tensor:
        y = x.clone()
        for pair in range(d // 2):
            angle = (column if pair % 2 == 0 else row) * 10000.0 ** (-4 * (pair // 2) / d)
            c, s = math.cos(angle), math.sin(angle)
            y[2 * pair], y[2 * pair + 1] = c * x[2 * pair] - s * x[2 * pair + 1], s * x[2 * pair] + c * x[2 * pair + 1]
        return y

    places = [(t, r, c) for t in range(frames) for r in range(rows) for c in range(columns)]
    embed = weights["patch_embed.weight"]
    x = [
        torch.stack([(patch * kernel).sum() for kernel in embed]) + position(r, c) + time(t)
        for patch, (t, r, c) in zip(patches, places, strict=True)
    ]
    for b in range(SPEC.num_layers):
        w = {name.removeprefix(f"blocks.{b}."): v for name, v in weights.items() if name.startswith(f"blocks.{b}.")}
        qkv = [(w["wqkv.weight"] @ norm(v, w["norm0.weight"])).view(3, H, d) for v in x]
        out = []
        for i, (_, r, c) in enumerate(places):
            heads = []
            for h in range(H):
                q = turn(qkv[i][0, h], r, c)
                keys = [turn(qkv[j][1, h], pr, pc) for j, (_, pr, pc) in enumerate(places)]
                share = torch.softmax(torch.stack([q @ k for k in keys]) * d**-0.5, 0)
                heads.append(sum(s * qkv[j][2, h] for j, s in enumerate(share)))
            out.append(x[i] + w["wo.weight"] @ torch.cat(heads))
        x = []
        for v in out:
            a = w["fc0.weight"] @ norm(v, w["norm1.weight"])
            a = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
            x.append(v + w["fc1.weight"] @ a)
    at = {place: norm(v, weights["final_norm.weight"]) for place, v in zip(places, x, strict=True)}
    return torch.stack(
        [
            torch.stack(
                [sum(at[t, r + dr, c + dc] for t in range(frames)) / frames for dr in range(2) for dc in range(2)]
            )
            for r in range(0, rows, 2)
            for c in range(0, columns, 2)
        ]
    )


@pytest.mark.parametrize("grid", [(1, 2, 4), (1, 4, 2), (3, 2, 4)])
def test_tower_agrees_with_the_equations_in_float64(grid: Grid) -> None:
    tower, patches = new_tower(), patches_of([grid])
    torch.testing.assert_close(tower(patches, [grid]), reference(tower, patches, grid), rtol=1e-6, atol=1e-6)


def test_position_grid_of_equal_size_is_used_as_it_is() -> None:
    spec = VisionSpec(**{f: getattr(SPEC, f) for f in SPEC.__slots__} | {"grid_height": 4, "grid_width": 6})
    tower = new_tower(spec=spec)
    assert torch.equal(tower.pos_embed((1, 4, 6)), tower.pos_embed.weight.flatten(0, 1))
    assert not torch.allclose(tower.pos_embed((1, 6, 4)), tower.pos_embed.weight.flatten(0, 1))


def test_images_packed_together_come_out_as_they_do_alone() -> None:
    tower, patches = new_tower(), patches_of(GRIDS)
    packed = tower(patches, GRIDS)
    parts = patches.split([math.prod(grid) for grid in GRIDS])
    alone = [tower(part, [grid]) for part, grid in zip(parts, GRIDS, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)
    assert [len(x) for x in alone] == [12, 1, 12, 3]


def test_an_image_does_not_see_its_neighbour() -> None:
    tower, patches = new_tower(), patches_of(GRIDS)
    before = tower(patches, GRIDS)
    changed = patches.clone()
    changed[: math.prod(GRIDS[0])] += 1
    after = tower(changed, GRIDS)
    assert not torch.allclose(before[:12], after[:12])
    torch.testing.assert_close(before[12:], after[12:], rtol=1e-12, atol=1e-12)


def test_merge_takes_squares_row_by_row_and_averages_frames() -> None:
    # Each patch of a 4 x 6 grid carries the number 10 * row + column; the second frame is 100 higher.
    numbers = torch.tensor([100.0 * t + 10 * r + c for t in range(2) for r in range(4) for c in range(6)])[:, None]
    merged = merge_patches(numbers, (2, 4, 6), 2).squeeze(-1) - 50
    assert merged.tolist() == [
        [0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15],
        [20, 21, 30, 31], [22, 23, 32, 33], [24, 25, 34, 35],
    ]  # fmt: skip


def test_even_pairs_turn_by_column_and_odd_pairs_by_row() -> None:
    angles = rotary_angles(SPEC, (2, 3, 5), dtype=torch.float64)
    assert angles.shape == (30, 4)
    slow = 10000.0**-0.5  # second frequency of a head of 8: 10000^(-4/8)
    row, column = 2, 4
    expected = torch.tensor([column, row, column * slow, row * slow], dtype=torch.float64)
    for frame in range(2):
        torch.testing.assert_close(angles[frame * 15 + row * 5 + column], expected)


def test_rotation_turns_neighbouring_pairs_and_keeps_lengths() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    turned = rotate_pairs(x, torch.tensor([[math.pi / 2, math.pi / 2]]))
    torch.testing.assert_close(turned, torch.tensor([[[0.0, 1.0, -2.0, 0.0]]]), atol=1e-6, rtol=0)


def test_frame_table_is_sines_then_cosines() -> None:
    table = frame_table(4, 6)
    assert table.shape == (4, 6)
    torch.testing.assert_close(table[0], torch.tensor([0.0, 0, 0, 1, 1, 1]))
    rates = [1.0, 10000.0 ** (-1 / 3), 10000.0 ** (-2 / 3)]
    expected = torch.tensor([math.sin(3 * r) for r in rates] + [math.cos(3 * r) for r in rates])
    torch.testing.assert_close(table[3], expected)


def test_no_images_give_no_tokens() -> None:
    tower = new_tower()
    merged = tower(patches_of([]), [])
    assert merged.shape == (0, 4, 20)
    projector = Projector(PROJECTOR, torch.float64)
    assert projector(merged).shape == (0, 33)


@pytest.mark.parametrize(
    ("grids", "count"),
    [([(1, 3, 4)], 12), ([(1, 4, 3)], 12), ([(5, 2, 2)], 20), ([(0, 2, 2)], 0), ([(1, 0, 2)], 0), ([(1, 2, 2)], 5)],
    ids=["odd rows", "odd columns", "too many frames", "no frame", "no rows", "patches left over"],
)
def test_grids_that_do_not_fit_are_refused_by_name(grids: list[Grid], count: int) -> None:
    with pytest.raises(ImageError, match="grid"):
        new_tower()(torch.zeros(count, 3, 5, 5), grids)


def test_every_vision_parameter_receives_a_gradient() -> None:
    tower, projector = new_tower(), Projector(PROJECTOR, torch.float64)
    randomise(projector)
    projector(tower(patches_of(GRIDS), GRIDS)).square().sum().backward()
    for name, parameter in [*tower.named_parameters(), *projector.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_bf16_tower_stays_near_its_float64_self() -> None:
    exact, rounded = new_tower(), new_tower().to(torch.bfloat16)
    expected, found = exact(patches_of(GRIDS), GRIDS), rounded(patches_of(GRIDS), GRIDS)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() / expected.norm() < 0.03


def test_tower_runs_on_meta_tensors_for_counting() -> None:
    with torch.device("meta"):
        tower, projector = VisionTower(SPEC, torch.bfloat16), Projector(PROJECTOR, torch.bfloat16)
        out = projector(tower(torch.empty(48 + 4, 3, 5, 5), [(1, 6, 8), (1, 2, 2)]))
    assert out.shape == (13, 33)
    assert out.dtype == torch.bfloat16


def test_projector_uses_the_exact_gelu_and_its_own_eps() -> None:
    projector = Projector(PROJECTOR, torch.float64)
    randomise(projector)
    merged = torch.randn(7, 4, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.01
    hidden = merged.flatten(1) @ projector.fc0.weight.T
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    out = hidden @ projector.fc1.weight.T
    expected = out / (out.square().mean(1, keepdim=True) + 1e-5).sqrt() * projector.norm.weight
    torch.testing.assert_close(projector(merged), expected)


class Threads:
    """Tensor parallelism among threads of one process: `reduce` waits for all and sums."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: list[Tensor | None] = [None] * size

    def member(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)


class ThreadRank:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def enter(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor) -> Tensor:
        self.group.parts[self.rank] = x
        self.group.barrier.wait()
        total = sum(part for part in self.group.parts if part is not None)
        self.group.barrier.wait()
        assert isinstance(total, Tensor)
        return total


def packed_by_heads(weight: Tensor, rank: int, size: int) -> Tensor:
    """Rows of packed q | k | v that a rank holds: its heads of each of the three."""
    return weight.unflatten(0, (3, size, -1))[:, rank].flatten(0, 1)


def one_block(weight: Tensor, rank: int, size: int) -> Tensor:
    return weight.chunk(size)[rank]


def run_sharded(
    whole: VisionTower, patches: Tensor, size: int, cut_qkv: Callable[[Tensor, int, int], Tensor]
) -> Tensor:
    group, outputs = Threads(size), [torch.empty(0)] * size
    towers = [new_tower() for _ in range(size)]
    for rank, tower in enumerate(towers):
        for block, source in zip(tower.blocks, whole.blocks, strict=True):
            block.tp = group.member(rank)
            cuts = {
                "wqkv": cut_qkv(source.wqkv.weight, rank, size),
                "wo": source.wo.weight.chunk(size, dim=1)[rank],
                "fc0": source.fc0.weight.chunk(size)[rank],
                "fc1": source.fc1.weight.chunk(size, dim=1)[rank],
            }
            for name, piece in cuts.items():
                matrix = getattr(block, name)
                matrix.narrow_(tuple(piece.shape))
                matrix.write(piece.detach())

    def run(rank: int) -> None:
        with torch.no_grad():
            outputs[rank] = towers[rank](patches, GRIDS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)
    return outputs[0]


def test_tower_split_by_heads_over_three_ranks_equals_one_rank() -> None:
    whole, patches = new_tower(), patches_of(GRIDS)
    found = run_sharded(whole, patches, 3, packed_by_heads)
    torch.testing.assert_close(found, whole(patches, GRIDS), rtol=1e-11, atol=1e-11)


def test_packed_qkv_cut_as_one_block_would_be_seen() -> None:
    whole, patches = new_tower(), patches_of(GRIDS)
    found = run_sharded(whole, patches, 3, one_block)
    assert not torch.allclose(found, whole(patches, GRIDS), rtol=1e-3)


@pytest.mark.parametrize("size", [1, 7, 48, 1000])
@pytest.mark.parametrize("deepstack", [(), (0,)])
def test_an_image_with_pauses_gives_what_it_gives_at_once(size: int, deepstack: tuple[int, ...]) -> None:
    tower = new_tower(spec=replace(SPEC, deepstack=deepstack))
    for grid in GRIDS:
        patches = patches_of([grid])
        rows = ImageRows(tower, patches, grid)
        assert rows.num_rows == 2 * math.prod(grid)
        for stop in range(size, rows.num_rows + size, size):
            rows.advance(stop)
            assert rows.num_done == min(stop, rows.num_rows)
        assert_close(rows.merged(), tower(patches, [grid]), rtol=1e-12, atol=1e-12)


def test_an_image_that_is_not_done_gives_nothing_and_one_that_does_not_fit_is_refused() -> None:
    rows = ImageRows(new_tower(), patches_of([GRIDS[0]]), GRIDS[0])
    rows.advance(rows.num_rows - 1)
    with pytest.raises(AssertionError, match="95 of 96 rows"):
        rows.merged()
    with pytest.raises(ImageError, match="grids and patches differ"):
        ImageRows(new_tower(), patches_of([GRIDS[0]]), GRIDS[1])
