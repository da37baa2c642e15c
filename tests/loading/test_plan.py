"""The dry run: exact bytes of every rank, held against a brute-force reading of the placement, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import surgery
from numpy.typing import NDArray

from workbench.base import DTYPE_BITS, LoadError
from workbench.checkpoint import Checkpoint
from workbench.loading import LoadPlan, load_sharded_weights, plan_load
from workbench.parallel import build_stage
from workbench.placement import Layout, Shard, owned_shards
from workbench.spec import published_tensors, read_spec

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=3),
    Layout(pp=2, stages=(7, 1)),
    Layout(tp=2, ep=2),
    Layout(tp=4, ep=2),
    Layout(dp=2, ep=2),
    Layout(dp=2, tp=2, ep=4, dispatch="all_to_all"),
    Layout(pp=2, tp=2, ep=2),
]


def make_plan(root: Path, layout: Layout, rank: int, precision: str = "mxfp4") -> LoadPlan:
    checkpoint = Checkpoint.open(root)
    return plan_load(checkpoint, build_stage(checkpoint.spec, layout, rank, precision=precision), layout, rank)


Counts = dict[str, NDArray[np.uint8]]  # file -> how often each of its bytes is taken


def no_counts(checkpoint: Checkpoint) -> Counts:
    return {file: np.zeros(header.file_bytes, np.uint8) for file, header in checkpoint.headers.items()}


def add_shard(counts: Counts, checkpoint: Checkpoint, shard: Shard) -> None:
    """Count every byte of a shard: index the tensor as an array of byte positions."""
    entry = checkpoint.tensor(shard.tensor.name)
    item = DTYPE_BITS[entry.dtype] // 8
    positions = np.arange(entry.begin, entry.end).reshape(*entry.shape, item)
    for dim, ranges in enumerate(shard.ranges):
        kept = [i for start, stop in ranges for i in range(start, stop)]
        positions = np.take(positions, kept, axis=dim)
    counts[entry.file][positions.ravel()] += 1


@pytest.mark.parametrize("folder", ["F0", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_planned_bytes_are_those_of_the_placement_byte_for_byte(sound: Path, layout: Layout, folder: str) -> None:
    checkpoint = Checkpoint.open(sound / folder)
    for rank in range(layout.world_size):
        plan = make_plan(sound / folder, layout, rank)
        planned, expected = no_counts(checkpoint), no_counts(checkpoint)
        for x in plan.assignments:
            for source in x.sources.values():
                for extent in source.extents(0, source.num_rows):
                    for i in range(extent.count):
                        start = extent.offset + i * extent.stride
                        planned[extent.file][start : start + extent.length] += 1
        for shard in owned_shards(checkpoint.spec, layout, rank):
            add_shard(expected, checkpoint, shard)
        for file in expected:
            assert np.array_equal(planned[file], expected[file])
            assert expected[file].max(initial=0) <= 1
        assert sum(int(x.sum()) for x in planned.values()) == plan.bytes_assigned


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_together_cover_every_stored_byte_but_padding(sound: Path, layout: Layout) -> None:
    checkpoint = Checkpoint.open(sound / ("F1" if layout.expert_tp == 1 and layout.world_size <= 3 else "F0"))
    covered = no_counts(checkpoint)
    for rank in range(layout.world_size):
        for shard in owned_shards(checkpoint.spec, layout, rank):
            add_shard(covered, checkpoint, shard)
    padding = sum(
        (checkpoint.tensor(t.name).shape[0] - t.used_rows) * 4
        for t in published_tensors(checkpoint.spec)
        if t.used_rows is not None
    )
    assert sum(int((x > 0).sum()) for x in covered.values()) == checkpoint.total_bytes - padding


def test_l11_ranks_skip_by_ownership_and_an_extra_draft_block_is_refused(sound: Path, tmp_path: Path) -> None:
    """L11: with two stages and ep, a rank plans its own layers and experts only; a layer beyond the last is refused."""
    from workbench.checkpoint import k3_config, write_checkpoint

    layout = Layout(pp=2, dp=2, ep=2)
    for rank in range(4):
        at = layout.coords(rank)
        for x in make_plan(sound / "F0", layout, rank).assignments:
            if x.param.startswith("layers."):
                assert int(x.param.split(".")[1]) in range(4 * at.pp, 4 * at.pp + 4)
            for name in x.names:
                if ".experts." in name:
                    assert int(name.split(".experts.")[1].split(".")[0]) // 4 == at.ep
    extra = write_checkpoint(tmp_path / "mtp", k3_config(), seed=4, mtp_layers=1)
    with pytest.raises(LoadError, match=r"no place in the model for \(4\): language_model.model.layers.8.eh_proj"):
        make_plan(extra, layout, 3)


def test_l12_published_names_map_one_to_one_onto_the_parameters_of_the_model(sound: Path) -> None:
    """L12: every published name fills one place, and every place is filled once."""
    spec = read_spec(sound / "F1")
    tensors = list(published_tensors(spec))
    places = [(t.param, t.expert, t.part) for t in tensors]
    assert len(places) == len(set(places)) == len({t.name for t in tensors})
    model = build_stage(spec, Layout(), 0, precision="fp32")
    assert {t.param for t in tensors} == {name for name, _ in model.named_parameters()}
    assert not {t.param for t in tensors} & {t.name for t in tensors}  # applying the mapping twice finds nothing
    targets = [
        (target, x.slot) for x in make_plan(sound / "F1", Layout(), 0).assignments for target in x.transform.targets
    ]
    assert len(targets) == len(set(targets))


LAYER = "language_model.model.layers.1"


def change_one(
    tensors: dict[str, surgery.Stored], name: str, change: Callable[[str, list[int], bytes], surgery.Stored]
) -> None:
    tensors[f"{LAYER}.{name}"] = change(*tensors[f"{LAYER}.{name}"])


FAULTS: dict[str, tuple[Callable[[dict[str, surgery.Stored]], object], str]] = {
    "L10 a norm is left out": (
        lambda t: t.pop(f"{LAYER}.post_attention_layernorm.weight"),
        r"missing \(1\): language_model.model.layers.1.post_attention_layernorm.weight",
    ),
    "L19 a scale is left out": (
        lambda t: t.pop(f"{LAYER}.block_sparse_moe.experts.3.w2.weight_scale"),
        r"missing \(1\): .*experts.3.w2.weight_scale",
    ),
    "L19 a scale without its matrix": (
        lambda t: t.update({f"{LAYER}.self_attn.q_proj.weight_scale": ("U8", [64, 4], bytes(256))}),
        r"no place in the model for \(1\): .*q_proj.weight_scale",
    ),
    "L09 a packed router": (
        lambda t: t.update(
            {
                f"{LAYER}.block_sparse_moe.gate.weight_packed": ("U8", [8, 64], bytes(512)),
                f"{LAYER}.block_sparse_moe.gate.weight_scale": ("U8", [8, 4], bytes(32)),
            }
        )
        or t.pop(f"{LAYER}.block_sparse_moe.gate.weight"),
        r"no place in the model for \(2\): .*gate.weight_packed.*missing \(1\): .*gate.weight",
    ),
    "L13 experts stacked under one name": (
        lambda t: t.update(
            {
                f"{LAYER}.block_sparse_moe.experts.w1.weight_packed": (
                    "U8", [8, 128, 48], b"".join(
                        t.pop(f"{LAYER}.block_sparse_moe.experts.{e}.w1.weight_packed")[2]
                        for e in range(8)
                    ),
                )
            }
        ),
        r"no place in the model for \(1\): .*experts.w1.weight_packed; missing \(8\): .*experts.0.w1.weight_packed",
    ),
    "L14 a transposed projection": (
        lambda t: change_one(t, "self_attn.f_a_proj.weight", lambda dtype, shape, data: (dtype, shape[::-1], data)),
        r"wrong shape \(1\): .*layers.1.self_attn.f_a_proj.weight is \(128, 16\) .* not \(16, 128\)",
    ),
    "a matrix in float16": (
        lambda t: change_one(t, "self_attn.q_proj.weight", lambda _dtype, shape, data: ("F16", shape, data)),
        r"wrong dtype \(1\): .*layers.1.self_attn.q_proj.weight is F16 .* not BF16",
    ),
    "A_log shorter than the heads": (
        lambda t: change_one(t, "self_attn.A_log", lambda dtype, _shape, data: (dtype, [3], data[:12])),
        r"wrong shape \(1\): .*layers.1.self_attn.A_log is \(3,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_l25_a_misfit_is_refused_by_name_before_a_byte_of_data_is_read(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """L25: everything is resolved from headers alone. L09, L10, L13, L14, L19 are refused there."""
    root = copy_of("F0")
    change, message = FAULTS[fault]
    name = f"{LAYER}.input_layernorm.weight"
    surgery.edit(surgery.holder(root, name), change)
    held = {k: path.name for path in surgery.shards(root) for k in surgery.load(path)}
    surgery.edit_index(root, lambda index: (index.clear(), index.update(held)))

    def no_data(*_args: object) -> int:
        raise AssertionError("data was read")

    monkeypatch.setattr(os, "preadv", no_data)
    for layout in (Layout(), Layout(tp=2, ep=2)):  # also on ranks that do not hold the tensor
        for rank in range(layout.world_size):
            with pytest.raises(LoadError, match=message):
                make_plan(root, layout, rank)
    with pytest.raises(LoadError, match=message):
        load_sharded_weights(root, device="cpu")


def test_the_trap_for_reads_would_notice_one(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_data(*_args: object) -> int:
        raise AssertionError("data was read")

    monkeypatch.setattr(os, "preadv", no_data)
    with pytest.raises(AssertionError, match="data was read"):
        load_sharded_weights(sound / "F0", device="cpu")


def test_assignments_come_in_file_order(sound: Path) -> None:
    for folder in ("F0", "mixed"):
        positions = [x.position for x in make_plan(sound / folder, Layout(tp=2), 1).assignments]
        assert positions == sorted(positions)


def test_a_layout_that_cuts_columns_too_finely_is_remarked_on(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.loading import plan

    assert make_plan(sound / "F0", Layout(tp=4), 0).notes == ()
    monkeypatch.setattr(plan, "MANY_SEGMENTS", 1000)
    (note,) = make_plan(sound / "F0", Layout(tp=4), 0).notes
    assert "13,696 segments of 22 bytes" in note
    assert "a larger ep would join them" in note
    assert make_plan(sound / "F0", Layout(), 0).notes == ()  # nothing is cut
