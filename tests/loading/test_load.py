"""Loading whole and in parts: equal to a plain loader in every precision, every rank's part a piece of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_model import load_golden_model
from pieces import local_piece
from torch import Tensor

from workbench.base import LayoutError, LoadError
from workbench.checkpoint import Checkpoint, k3_config, write_checkpoint
from workbench.loading import LoadProgress, load_rank, load_sharded_weights, stream
from workbench.nn.batch import TokenBatch
from workbench.nn.model import Model
from workbench.placement import Layout

PRECISIONS = ["fp32", "bf16", "mxfp4", "fp8", "int8", "int4"]


def tensors_of(model: Model) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), f"{name} differs"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("folder", ["F1", "mixed"])
def test_every_precision_equals_a_plain_loader_bit_for_bit(sound: Path, folder: str, precision: str) -> None:
    loaded = load_sharded_weights(sound / folder, precision=precision, device="cpu")
    assert_same(tensors_of(loaded.model), tensors_of(load_golden_model(sound / folder, precision)))
    bias = loaded.model.get_parameter("layers.1.ffn.router.bias")
    assert (bias.dtype, bias.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize("precision", ["bf16", "mxfp4", "int4"])
def test_the_window_does_not_change_what_is_loaded(sound: Path, precision: str) -> None:
    wide = load_sharded_weights(sound / "mixed", precision=precision, device="cpu")
    narrow = load_sharded_weights(sound / "mixed", precision=precision, device="cpu", window_bytes=1 << 17)
    assert narrow.stats.num_reads > 2 * wide.stats.num_reads
    assert_same(tensors_of(narrow.model), tensors_of(wide.model))


@pytest.mark.parametrize("precision", ["fp32", "mxfp4"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=4, ep=2),
        Layout(pp=3),
        Layout(dp=2, tp=2, ep=4),
        Layout(pp=2, stages=(1, 7), tp=2, ep=2),
    ],
    ids=str,
)
def test_every_rank_holds_its_piece_of_the_whole(sound: Path, layout: Layout, precision: str) -> None:
    checkpoint = Checkpoint.open(sound / "F0")
    whole = tensors_of(load_rank(checkpoint, Layout(), 0, precision=precision)[0])
    seen: set[str] = set()
    read = assigned = 0
    for rank in range(layout.world_size):
        model, ledger, stats = load_rank(checkpoint, layout, rank, precision=precision)
        for name, tensor in tensors_of(model).items():
            param = name.replace(".weight_packed", ".weight").replace(".weight_scale", ".weight")
            expected = local_piece(checkpoint.spec, layout, layout.coords(rank), param, whole[name])
            assert torch.equal(tensor, expected), f"{name} on rank {rank}"
            seen.add(name)
        read, assigned = read + stats.bytes_read, assigned + stats.bytes_assigned
        assert ledger.summary()["rows"] == ledger.summary()["rows_written"]
    assert seen == set(whole)
    assert read / assigned <= 1.02


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2)], ids=str)
def test_norms_in_the_ledgers_of_all_ranks_add_up_to_those_of_the_whole(sound: Path, layout: Layout) -> None:
    checkpoint = Checkpoint.open(sound / "F0")
    whole = load_rank(checkpoint, Layout(), 0, precision="fp32")[1]
    squares: dict[tuple[str, int | None], float] = {}
    for rank in range(layout.world_size):
        ep = layout.coords(rank).ep
        for entry in load_rank(checkpoint, layout, rank, precision="fp32")[1].entries:
            slot = None if entry.slot is None else entry.slot + ep * 8 // layout.ep
            assert entry.norm is not None
            squares[entry.name, slot] = squares.get((entry.name, slot), 0.0) + entry.norm**2
    for name in ("layers.0.mixer.q_proj.weight", "layers.3.mixer.o_proj.weight", "embed.weight"):
        assert squares[name, None] == pytest.approx(whole.entry(name).norm ** 2, rel=1e-5)  # type: ignore[operator]
    for slot in (0, 5):
        norm = whole.entry("layers.2.ffn.experts.w2.weight", slot).norm
        assert squares["layers.2.ffn.experts.w2.weight", slot] == pytest.approx(norm**2, rel=1e-5)  # type: ignore[operator]


def test_the_ledger_names_file_offset_bytes_and_transform_of_every_parameter(sound: Path) -> None:
    checkpoint = Checkpoint.open(sound / "mixed")
    loaded = load_sharded_weights(sound / "mixed", precision="int8", device="cpu")
    transforms = set()
    for entry in loaded.ledger.entries:
        for source in entry.sources:
            stored = checkpoint.tensor(source.name)
            assert source.file == stored.file
            used = stored.num_bytes if "A_log" not in source.name else 4 * 4
            assert (source.offset, source.num_bytes) == (stored.begin, used)
        transforms.add(entry.transform)
    assert transforms == {"copy", "encode int8", "expand mxfp4, encode int8"}  # four heads need no padding
    packed = loaded.ledger.entry("layers.1.ffn.experts.w3.weight_packed", 7)
    assert [s.name.rsplit(".", 1)[1] for s in packed.sources] == ["weight_packed", "weight_scale"]
    assert "layers.1.ffn.experts.w3.weight_packed[7]" in loaded.ledger.render(limit=None)
    bf16 = load_sharded_weights(sound / "F1", precision="fp32", device="cpu").ledger.summary()["transforms"]
    assert set(bf16) == {"copy", "copy, zero padding trimmed", "cast bfloat16 to float32", "expand mxfp4 to float32"}  # type: ignore[call-overload]


def test_a_checkpoint_without_packed_experts_loads_to_the_same_kinds(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "plain", k3_config(is_quantised=False), seed=6)
    for precision, transform in (("bf16", "copy"), ("mxfp4", "encode mxfp4"), ("fp8", "encode fp8")):
        loaded = load_sharded_weights(root, precision=precision, device="cpu")
        name = "weight" if precision == "bf16" else "weight_packed"
        assert loaded.ledger.entry(f"layers.1.ffn.experts.w1.{name}", 3).transform == transform


def test_one_process_needs_nothing_but_a_path_and_answers(sound: Path) -> None:
    loaded = load_sharded_weights(sound / "F0")
    with torch.no_grad():
        logits = loaded.model(TokenBatch.whole([[5, 7, 11], [3]], device=loaded.ctx.device))
    assert logits.shape == (2, loaded.spec.vocab_size)
    assert logits.isfinite().all()
    assert loaded.layout == Layout()
    assert loaded.stats.read_ratio == pytest.approx(1.0, abs=1e-4)
    assert loaded.stats.resident_bytes == sum(t.nbytes for t in tensors_of(loaded.model).values())
    assert loaded.stats.to_dict()["bytes_per_s"] > 0


def test_a_layout_of_several_ranks_without_a_process_group_says_what_to_do(sound: Path) -> None:
    with pytest.raises(LayoutError, match=r"needs 2 ranks.*Start the ranks with torchrun"):
        load_sharded_weights(sound / "F0", layout=Layout(tp=2), device="cpu")


def test_unknown_precision_and_unfit_layout_are_refused(sound: Path) -> None:
    with pytest.raises(LoadError, match="unknown precision 'fp6'"):
        load_sharded_weights(sound / "F0", precision="fp6", device="cpu")
    with pytest.raises(LayoutError, match="tp=3 does not divide"):
        load_rank(Checkpoint.open(sound / "F0"), Layout(tp=3), 0)


def test_progress_is_throttled_ascends_and_ends_with_everything(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for interval, most in ((0.0, 10_000), (3600.0, 2)):
        monkeypatch.setattr(stream, "PROGRESS_INTERVAL_S", interval)
        heard: list[LoadProgress] = []
        loaded = load_sharded_weights(sound / "F0", device="cpu", window_bytes=1 << 17, progress=heard.append)
        assert 2 <= len(heard) <= most
        assert [p.bytes_read for p in heard] == sorted(p.bytes_read for p in heard)
        assert (heard[-1].bytes_read, heard[-1].fraction) == (loaded.stats.bytes_read, 1.0)
        assert {p.bytes_total for p in heard} == {loaded.stats.bytes_read}
        assert all(p.tensor for p in heard)
        if interval == 0.0:
            assert len(heard) > 20


def test_an_error_in_the_progress_callback_ends_the_load(sound: Path) -> None:
    def refuse(progress: LoadProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_sharded_weights(sound / "F0", device="cpu", progress=refuse)
