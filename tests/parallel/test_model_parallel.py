"""A whole model under a layout: gradients of every parameter, images on split and whole towers, narrowing."""

from __future__ import annotations

import math
from pathlib import Path

import model_tasks as tasks
import pytest
import torch
from pieces import local_piece
from ranks import shared_ranks
from torch import Tensor, nn

from workbench.base import LayoutError
from workbench.checkpoint import k3_config, write_checkpoint
from workbench.loading import load_sharded_weights
from workbench.nn.linear import Linear
from workbench.parallel import (
    AllToAllDispatch,
    GroupTensorParallel,
    ReplicatedDispatch,
    build_stage,
    narrow,
    share_images,
    single_context,
)
from workbench.placement import Layout, owned_shards, vision_is_sharded
from workbench.spec import read_spec

GRIDS = [(1, 2, 4), (1, 6, 4), (1, 2, 2)]  # different sizes, the largest in the middle
SIZES = {"num_layers": 4, "full_attn_layers": (2, 4), "residual_block": 2, "num_experts": 4, "max_context": 64}


@pytest.fixture(scope="module")
def split_tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two vision heads: the tower splits over two ranks, and is whole on four."""
    return write_checkpoint(tmp_path_factory.mktemp("split"), k3_config(**SIZES), seed=11)


@pytest.fixture(scope="module")
def whole_tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three vision heads: images are shared out."""
    config = k3_config(**SIZES, vision_heads=3, vision_qkv_width=60, vision_width=52)
    return write_checkpoint(tmp_path_factory.mktemp("whole"), config, seed=12)


SEQUENCES = [[[5, 9, 200, 31], [7]], [[11, 400]], [], [[3, 3, 8]]]  # per replica; one without tokens


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=2, ep=2),
        Layout(pp=2, stages=(1, 3)),
        Layout(dp=2, ep=2),
        Layout(dp=2, ep=2, dispatch="all_to_all"),
        Layout(dp=2, tp=2, ep=4),
        Layout(dp=4, ep=4, dispatch="all_to_all"),
    ],
    ids=str,
)
def test_gradients_of_every_parameter_equal_those_of_one_rank(split_tower: Path, layout: Layout) -> None:
    torch.manual_seed(2)
    spec, target = read_spec(split_tower), torch.randn(8, 512) / 30
    replicas = SEQUENCES[: layout.dp]
    whole: dict[str, Tensor] = {}
    for sequences in replicas:
        (one,) = [tasks.train_step(split_tower, Layout(), [sequences], target)] if sequences else [{"grads": {}}]
        for name, grad in one["grads"].items():  # type: ignore[attr-defined]
            if grad is not None:
                whole[name] = whole.get(name, torch.zeros(())) + grad
    results = shared_ranks().run(tasks.train_step, split_tower, layout, replicas, target, world_size=layout.world_size)
    found: dict[tuple[str, int, int], Tensor] = {}
    for result in results:
        at = result["coords"]
        for name, grad in result["grads"].items():
            if grad is None:
                continue
            # Replicas that hold the same piece see other tokens: their gradients add up.
            key = (name, at.ep, at.expert_tp) if ".experts." in name else (name, at.tp, 0)
            found[key] = found.get(key, torch.zeros(())) + grad
    assert {name for name, *_ in found} == set(whole)
    checked = 0
    for result in results:
        at = result["coords"]
        for name, grad in whole.items():
            key = (name, at.ep, at.expert_tp) if ".experts." in name else (name, at.tp, 0)
            if key in found:
                expected = local_piece(spec, layout, at, name, grad)
                error = (found[key] - expected).norm() / (grad.norm() + 1e-12)
                assert found[key].shape == expected.shape, name
                assert error < 1e-4, f"{name} on {at}: relative {error:.2e}"
                checked += 1
    assert checked >= len(whole)


@pytest.mark.ranks
def test_gradients_differ_where_a_sharded_region_forgets_to_sum_them(split_tower: Path) -> None:
    torch.manual_seed(2)
    target, sequences = torch.randn(8, 512) / 30, SEQUENCES[0]
    one = tasks.train_step(split_tower, Layout(), [sequences], target)["grads"]
    sound = shared_ranks().run(tasks.train_step, split_tower, Layout(tp=2), [sequences], target, world_size=2)
    faulty = shared_ranks().run(tasks.train_step, split_tower, Layout(tp=2), [sequences], target, True, world_size=2)
    name = "layers.0.mixer_norm.weight"
    errors = [((r[0]["grads"][name] - one[name]).norm() / one[name].norm()).item() for r in (sound, faulty)]
    assert errors[0] < 1e-4 < 0.1 < errors[1]


def run_images(root: Path, layout: Layout, grids: list[tuple[int, int, int]]) -> tuple[dict, list[dict]]:
    torch.manual_seed(1)
    pixels = torch.rand(sum(math.prod(grid) for grid in grids), 3, 14, 14) * 2 - 1
    target = torch.randn(sum(math.prod(grid) // 4 for grid in grids), 128)
    one = tasks.encode(root, Layout(), pixels, grids, target)
    return one, shared_ranks().run(tasks.encode, root, layout, pixels, grids, target, world_size=layout.world_size)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tower", "tp"),
    [
        ("split_tower", 2),
        ("whole_tower", 2),
        ("whole_tower", 4),
        pytest.param("split_tower", 4, marks=pytest.mark.slow),
    ],
)
def test_images_give_the_same_features_and_gradients_on_every_rank(
    request: pytest.FixtureRequest, tower: str, tp: int
) -> None:
    root, layout = request.getfixturevalue(tower), Layout(tp=tp)
    spec = read_spec(root)
    one, results = run_images(root, layout, GRIDS)
    for result in results:
        for found in (result["features"], result["parts"]):
            torch.testing.assert_close(found, one["features"], rtol=1e-4, atol=1e-5)
        for name, grad in one["grads"].items():
            expected = local_piece(spec, layout, result["coords"], name, grad)
            error = (result["grads"][name] - expected).norm() / (grad.norm() + 1e-12)
            assert error < 1e-4, f"{name}: relative {error:.2e}"
    patches = [result["patches"] for result in results]
    if vision_is_sharded(spec, layout):
        assert patches == [36] * tp  # every rank sees all patches, with its heads
    else:
        assert patches == [24, 12] if tp == 2 else patches == [24, 8, 4, 0]  # shared out; one rank has none


@pytest.mark.ranks
def test_a_single_image_reaches_ranks_that_encoded_nothing(whole_tower: Path) -> None:
    one, results = run_images(whole_tower, Layout(tp=2), [(1, 4, 2)])
    for result in results:
        torch.testing.assert_close(result["features"], one["features"], rtol=1e-4, atol=1e-5)
    assert [result["patches"] for result in results] == [8, 0]


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [([8, 24, 4], 2, [[1], [0, 2]]), ([5, 5, 5, 5], 2, [[0, 2], [1, 3]]), ([], 2, [[], []]), ([7], 3, [[0], [], []])],
)
def test_images_are_shared_out_by_patches(sizes: list[int], ranks: int, expected: list[list[int]]) -> None:
    assert share_images(sizes, ranks) == expected


@pytest.mark.parametrize("precision", ["fp32", "mxfp4", "int4"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, ep=2), Layout(pp=3, tp=2), Layout(dp=2, tp=2, ep=4)], ids=str
)
def test_stage_on_meta_has_the_shapes_of_the_placement_table(split_tower: Path, layout: Layout, precision: str) -> None:
    spec = read_spec(split_tower)
    for rank in range(layout.world_size):
        model = build_stage(spec, layout, rank, precision=precision)
        assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in owned_shards(spec, layout, rank):
            columns = shard.shape[1:] if shard.tensor.part == "weight" else (shard.shape[1] * 2,)
            if shard.tensor.part != "weight_scale":
                shapes[shard.tensor.param] = (shard.shape[0], *columns)
        found = {}
        for prefix, module in model.named_modules():
            if hasattr(module, "logical_shape"):
                shape = module.logical_shape
                found[f"{prefix}.weight"] = shape if len(shape) == 2 else shape[1:]
            else:
                found.update({f"{prefix}.{n}": tuple(p.shape) for n, p in module.named_parameters(recurse=False)})
        assert found == shapes


def test_narrowing_refuses_an_unknown_parameter_and_a_cut_inside_a_group(split_tower: Path) -> None:
    spec = read_spec(split_tower)
    with pytest.raises(LayoutError, match=r"no placement rule for parameter 'surprise.weight'"):
        narrow(nn.ModuleDict({"surprise": Linear(4, 6)}), spec, Layout(tp=2))
    odd = read_spec(split_tower)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict({"mixer": nn.ModuleDict()})})})
    from workbench.nn.quant import SCHEMES

    model["layers"]["0"]["mixer"]["o_proj"] = Linear(8, 96, scheme=SCHEMES["mxfp4"])  # type: ignore[index]
    with pytest.raises(LayoutError, match=r"o_proj.weight: 48 columns on one rank are not a multiple of 32"):
        narrow(model, odd, Layout(tp=2))


def test_attaching_sets_every_hook_and_leaves_a_whole_tower_alone(whole_tower: Path) -> None:
    loaded = load_sharded_weights(whole_tower, precision="bf16", device="cpu")
    hooks = {name: module.tp for name, module in loaded.model.named_modules() if hasattr(module, "tp")}
    text = {name for name in hooks if not name.startswith("vision")}
    assert {"embed", "head", "layers.0.mixer", "layers.1.ffn", "layers.1.ffn.shared"} <= text
    assert all(isinstance(hooks[name], GroupTensorParallel) for name in text)
    assert not any(isinstance(hook, GroupTensorParallel) for name, hook in hooks.items() if name.startswith("vision"))
    assert isinstance(loaded.model.layers["1"].ffn.dispatch, ReplicatedDispatch)
    assert not isinstance(loaded.model.layers["1"].ffn.dispatch, AllToAllDispatch)
    assert loaded.ctx.layout == single_context().layout
