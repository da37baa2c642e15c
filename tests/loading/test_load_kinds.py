"""Known ways in which loading goes wrong, planted one by one; the kind's number is in the name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import surgery
import torch
from torch import Tensor

from workbench.base import CheckpointError, LoadError
from workbench.checkpoint import Checkpoint
from workbench.loading import LoadedModel, LoadProgress, ShardReader, load_rank, load_sharded_weights
from workbench.loading import load as load_module
from workbench.loading import stream as stream_module
from workbench.loading.reader import Places
from workbench.loading.schedule import Batch, Chunk
from workbench.loading.stream import Filled, staged_parts
from workbench.placement import Layout

LAYER = "language_model.model.layers.1"
MOE = f"{LAYER}.block_sparse_moe"

CopyOf = Callable[[str], Path]


def load(root: Path, precision: str = "bf16", **options: object) -> LoadedModel:
    return load_sharded_weights(root, precision=precision, device="cpu", **options)  # type: ignore[arg-type]


def tensors_of(loaded: LoadedModel) -> dict[str, Tensor]:
    return {**dict(loaded.model.named_parameters()), **dict(loaded.model.named_buffers())}


def replace(root: Path, name: str, data: bytes) -> None:
    def change(tensors: dict[str, surgery.Stored]) -> None:
        dtype, shape, before = tensors[name]
        assert len(before) == len(data)
        tensors[name] = (dtype, shape, data)

    surgery.edit(surgery.holder(root, name), change)


def stored(root: Path, name: str) -> bytes:
    return Checkpoint.open(root).read_bytes(name)


def test_l01_a_missing_shard_stops_the_load_and_names_the_tensors_lost(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    gone = surgery.shards(root)[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"{gone.name}: missing, and with it \d+ tensors: language_model"):
        load(root)


def test_l02_a_second_copy_in_another_file_never_wins_and_order_does_not_matter(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    expected = tensors_of(load(root))
    name = f"{MOE}.experts.3.w2.weight_packed"
    for path in surgery.shards(root):  # a stale copy in the first, the last, every other file
        if path != surgery.holder(root, name):
            dtype, shape, data = surgery.load(surgery.holder(root, name))[name]
            stale = (dtype, shape, bytes([0x77]) * len(data))
            surgery.edit(path, lambda tensors, stale=stale: tensors.update({name: stale}))
    loaded = load(root)
    for key, value in expected.items():
        assert torch.equal(tensors_of(loaded)[key], value), key
    assert sum("tensors that the index does not count there, not read" in w for w in loaded.ledger.warnings) == 2
    # The same tensors under other file names, so that they are read in another order.
    renamed = {path.name: f"z{9 - i}.safetensors" for i, path in enumerate(surgery.shards(root))}
    for before, after in renamed.items():
        (root / before).rename(root / after)
    surgery.edit_index(root, lambda index: index.update({k: renamed[v] for k, v in index.items()}))
    for key, value in tensors_of(load(root)).items():
        assert torch.equal(value, expected[key]), key


def test_l02_the_same_name_in_two_files_without_an_index_is_refused(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    first, second = surgery.shards(root)[:2]
    name, value = next(iter(surgery.load(first).items()))
    surgery.edit(second, lambda t: t.update({name: value}))
    (root / surgery.INDEX).unlink()
    with pytest.raises(CheckpointError, match="stands in two files and no index"):
        load(root)


def test_l04_a_torn_file_is_refused_by_size_and_a_hole_by_content(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    name = f"{MOE}.shared_experts.gate_proj.weight"
    replace(root, name, bytes(len(stored(root, name))))  # full length, one tensor never downloaded
    with pytest.raises(LoadError, match=rf"all zero: layers.1.ffn.shared.gate_proj.weight \(from {name}\)"):
        load(root)
    load(root, check=False)
    data = bytearray(stored(copy_of("mixed"), name))  # a hole inside a tensor shows as rows of zeros
    data[1024:5120] = bytes(4096)
    replace(root, name, bytes(data))
    assert load(root).ledger.warnings == ["layers.1.ffn.shared.gate_proj.weight has 16 of 256 rows all zero"]
    torn = surgery.shards(root)[0]
    os.truncate(torn, torn.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match=rf"{torn.name}.*4096 are missing"):
        load(root)


def test_l05_l06_index_and_headers_that_disagree_are_refused_before_any_data(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    held = surgery.shards(root)[0].name
    surgery.edit_index(root, lambda index: index.update({"mtp.fc.weight": held}))
    with pytest.raises(CheckpointError, match=rf"{held}: index says that this file holds mtp.fc.weight"):
        load(root)
    surgery.edit_index(root, lambda index: index.pop("mtp.fc.weight"))
    for path in surgery.shards(root):  # L06: files renamed after re-quantising, index left over
        path.rename(root / path.name.replace("-of-000003", "-of-000002"))
    with pytest.raises(CheckpointError, match=r"-of-000003.safetensors: missing"):
        load(root)


@pytest.mark.parametrize("precision", ["mxfp4", "bf16", "int4"])
@pytest.mark.parametrize("expert", [0, 5])
def test_l08_zero_scales_are_named_also_for_expert_zero(copy_of: CopyOf, expert: int, precision: str) -> None:
    root = copy_of("F0")
    loaded = load(root, precision)
    experts = [e for e in loaded.ledger.entries if ".experts." in e.name]
    assert {e.slot for e in experts} == set(range(8))
    assert all(not e.missing_rows() for e in experts)
    name = f"{MOE}.experts.{expert}.w1.weight_scale"
    replace(root, name, bytes(len(stored(root, name))))
    with pytest.raises(LoadError, match=rf"all zero: the scale of layers.1.ffn.experts.w1.\w+\[{expert}\] .*{name}"):
        load(root, precision)


def test_l09_the_router_stays_plain_in_every_precision_and_its_norm_is_that_of_the_file(sound: Path) -> None:
    raw = np.frombuffer(stored(sound / "F0", f"{MOE}.gate.weight"), np.uint16).astype(np.uint32) << 16
    in_file = float(np.linalg.norm(raw.view(np.float32).astype(np.float64)))
    for precision in ("fp32", "fp8", "int8", "int4", "mxfp4"):
        entry = load(sound / "F0", precision).ledger.entry("layers.1.ffn.router.weight")
        assert entry.norm == pytest.approx(in_file, rel=1e-5)
        assert entry.norm > 0


def test_l14_square_matrices_are_taken_as_they_stand(sound: Path) -> None:
    """L14: orientation is never guessed from a shape; where both fit, the values are those of the file."""
    loaded = load(sound / "F2", "fp32")
    for ours, published in (
        ("ffn.latent_in.weight", "block_sparse_moe.routed_expert_down_proj.weight"),
        ("mixer.o_proj.weight", "self_attn.o_proj.weight"),
    ):
        raw = np.frombuffer(stored(sound / "F2", f"{LAYER}.{published}"), np.uint16).astype(np.uint32) << 16
        in_file = torch.from_numpy(raw.view(np.float32).reshape(128, 128).copy())
        found = loaded.model.get_parameter(f"layers.1.{ours}")
        assert torch.equal(found, in_file)
        assert not torch.equal(found, in_file.T)


def test_l16_l17_codes_and_scales_of_known_bytes_give_known_weights(copy_of: CopyOf) -> None:
    """L16: low nibble first. L17: scale bytes are exponents, 115 is 2^-12, never the number 115."""
    root = copy_of("F0")
    name = f"{MOE}.experts.0.w1"
    packed = bytearray(stored(root, f"{name}.weight_packed"))
    packed[:16] = bytes(range(0x10, 0x20))  # codes 0 1, 1 1, 2 1, ... of the first row's first group
    scale = bytearray(stored(root, f"{name}.weight_scale"))
    scale[0] = 115
    replace(root, f"{name}.weight_packed", bytes(packed))
    replace(root, f"{name}.weight_scale", bytes(scale))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    even = [sign * m for sign in (1, -1) for m in magnitudes]
    expected = torch.tensor([x for value in even for x in (value, 0.5)]) * 2.0**-12
    for precision in ("fp32", "bf16"):
        row = load(root, precision).model.get_parameter("layers.1.ffn.experts.w1.weight")[0, 0, :32]
        assert row.tolist() == expected.tolist()
    kept = load(root, "mxfp4").model.get_buffer("layers.1.ffn.experts.w1.weight_packed")[0, 0, :16]
    assert kept.tolist() == list(range(0x10, 0x20))


class Scribbling(ShardReader):
    """Overwrites the whole slot with garbage before each read into it, as any reused buffer may be."""

    def fill(self, batch: Batch, slot: memoryview, places: Places | None = None) -> None:
        slot[:] = b"\xa5" * len(slot)
        super().fill(batch, slot, places)


class Keeping(load_module.Writer):
    """Stages everything, and stores a view of the staged bytes where it can, instead of copying them."""

    def places(self, chunk: Chunk) -> dict[str, Tensor]:
        return {}

    def _write_chunk(self, chunk: Chunk, staged: Tensor, filled: Filled) -> None:
        super()._write_chunk(chunk, staged, filled)
        x = chunk.assignment
        for name, part in x.transform.targets.items():
            target = self.targets[name]
            if x.slot is None and x.transform.name == "copy" and target.shape[0] == chunk.last:
                target.data = staged_parts(chunk, staged)[part].view(target.shape)


@pytest.mark.parametrize("precision", ["bf16", "mxfp4", "int8"])
def test_l20_nothing_keeps_a_view_of_the_reused_buffer(
    sound: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    expected = dict(load(sound / "F0", precision).model.named_parameters())

    def differing() -> list[str]:
        checkpoint = Checkpoint.open(sound / "F0")
        reader = Scribbling(checkpoint.root)
        model = load_rank(checkpoint, Layout(), 0, precision=precision, window_bytes=1 << 20, reader=reader)[0]
        return [name for name, value in model.named_parameters() if not torch.equal(value, expected[name])]

    assert differing() == []
    monkeypatch.setattr(load_module, "Writer", Keeping)
    assert differing(), "a writer that keeps views goes unnoticed"


def test_l22_a_file_cut_short_during_the_load_is_an_error_and_not_a_signal(copy_of: CopyOf) -> None:
    """L22: the file shrinks between two reads; the loader maps nothing, so this is an exception with an offset."""
    root = copy_of("F0")
    last = surgery.shards(root)[-1]
    mapped: list[bool] = []

    def cut(progress: LoadProgress) -> None:
        mapped.append(str(root) in Path("/proc/self/maps").read_text())
        os.truncate(last, 4096)

    with pytest.raises(LoadError, match=rf"{last.name}: file ends at byte 4096.*rank 0, file now 4096 bytes"):
        load(root, window_bytes=1 << 18, progress=cut)
    assert mapped == [False] * len(mapped) != []


def test_l22_a_mapping_of_the_same_file_dies_by_signal(copy_of: CopyOf) -> None:
    """L22: what the loader avoids. A child that maps a shard, and touches it after it was cut, ends by SIGBUS."""
    path = surgery.shards(copy_of("F0"))[0]
    code = (
        "import mmap, os, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0);"
        "os.truncate(sys.argv[1], 4096); m[100_000]"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == -7


def test_l26_padding_of_a_log_is_named_verified_zero_and_trimmed(copy_of: CopyOf) -> None:
    root = copy_of("F1")  # 6 heads stored as 8
    loaded = load(root)
    entry = loaded.ledger.entry("layers.0.mixer.A_log")
    assert (entry.num_rows, entry.transform) == (6, "copy, zero padding trimmed")
    name = "language_model.model.layers.0.self_attn.A_log"
    values = np.frombuffer(stored(root, name), np.float32)
    assert loaded.model.get_parameter("layers.0.mixer.A_log").tolist() == values[:6].tolist()
    dirty = values.copy()
    dirty[7] = 1e-3
    replace(root, name, dirty.tobytes())
    with pytest.raises(LoadError, match=rf"{name}: the rows beyond 6 that pad it are not zero"):
        load(root)
    with pytest.raises(LoadError, match="the rows beyond 6"):  # also by the rank that holds the first three
        load_rank(Checkpoint.open(root), Layout(tp=2, ep=2), 0)


def test_the_router_bias_may_be_zero_and_is_only_mentioned(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    replace(root, f"{MOE}.gate.e_score_correction_bias", bytes(32))
    assert load(root).ledger.warnings == [
        f"layers.1.ffn.router.bias is all zero (from {MOE}.gate.e_score_correction_bias)"
    ]


def test_a_weight_that_is_not_a_number_is_refused_by_name(copy_of: CopyOf) -> None:
    root = copy_of("F0")
    data = bytearray(stored(root, f"{LAYER}.self_attn.q_proj.weight"))
    data[10:12] = b"\xc0\x7f"
    replace(root, f"{LAYER}.self_attn.q_proj.weight", bytes(data))
    for precision in ("bf16", "int8"):
        with pytest.raises(LoadError, match=r"not finite: layers.1.mixer.q_proj.weight"):
            load(root, precision)


def test_a_plan_that_doubles_or_forgets_a_tensor_is_caught_by_the_ledger(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger knows the model, not the plan: a fault in planning or scheduling cannot pass."""
    schedule = stream_module.schedule

    def doubled(plan: object, window: object) -> object:
        batches = list(schedule(plan, window))  # type: ignore[arg-type]
        return iter([*batches, batches[0]])

    def shortened(plan: object, window: object) -> object:
        batches = list(schedule(plan, window))  # type: ignore[arg-type]
        kept = [c for c in batches[0].chunks if c.assignment.param != "layers.0.mixer_norm.weight"]
        return iter([Batch(batches[0].reads, tuple(kept), batches[0].used_bytes), *batches[1:]])

    monkeypatch.setattr(stream_module, "schedule", doubled)
    with pytest.raises(LoadError, match=r"written twice: rows 0..128 of layers.0"):
        load(sound / "F0")
    monkeypatch.setattr(stream_module, "schedule", shortened)
    with pytest.raises(LoadError, match=r"2 problems: missing: layers.0.mixer_norm.weight rows 0..128; left over"):
        load(sound / "F0")
