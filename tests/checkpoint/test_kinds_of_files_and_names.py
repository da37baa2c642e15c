"""Broken checkpoints seen in the field, by their files and names: each planted, each named by the audit.

The opening of a checkpoint must refuse those that would put wrong weights into a model.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import surgery
from surgery import EXPERT, PREFIX, error_kinds, only

from workbench.base import CheckpointError
from workbench.checkpoint import Checkpoint, audit, k3_config, write_checkpoint

SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]


@pytest.mark.parametrize("name", ["f0", "f1", "f2"])
def test_a_sound_checkpoint_has_no_errors_and_no_warnings(name: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(name)
    report = audit(root)
    assert report.ok
    assert report.warnings == ()
    assert report.skipped == {}
    assert report.num_files == 3
    assert len(Checkpoint.open(root)) == report.num_tensors


@pytest.mark.parametrize("layout", ["per_layer", "mixed"])
def test_a_sound_checkpoint_is_sound_however_its_tensors_are_dealt(tmp_path: Path, layout: str) -> None:
    def told(root: Path) -> set[tuple[str, str, tuple[str, ...]]]:
        return {(f.kind, f.message, tuple(sorted(f.tensors))) for f in audit(root).findings}

    dealt = write_checkpoint(tmp_path / "dealt", k3_config(), shards=5, layout=layout)  # type: ignore[arg-type]
    published = write_checkpoint(tmp_path / "published", k3_config())
    assert audit(dealt).ok
    assert told(dealt) == told(published)


# L01 a shard is absent


def test_l01_missing_shard_is_named_with_every_tensor_lost(f0: Path) -> None:
    lost = set(surgery.load(f0 / SHARDS[1]))
    (f0 / SHARDS[1]).unlink()
    report = audit(f0)
    finding = only(report, "missing_shard")
    assert finding.file == SHARDS[1]
    assert set(finding.tensors) == lost
    assert report.errors == (finding,)  # said once, not again as hundreds of missing tensors
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]}: missing, and with it {len(lost)} tensors"):
        Checkpoint.open(f0)


def test_l01_missing_numbered_shard_is_noticed_without_an_index(f0: Path) -> None:
    (f0 / surgery.INDEX).unlink()
    (f0 / SHARDS[1]).unlink()
    finding = only(audit(f0), "missing_shard")
    assert "1 of 3 numbered files are not here, the first is number 2" in finding.message


def test_l01_unfinished_download_is_noticed(f0: Path) -> None:
    download = f0 / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    (download / "abc.incomplete").touch()
    assert only(audit(f0), "partial_file").file == ".cache/huggingface/download/abc.incomplete"


# L02 a second copy of a tensor in another file


def plant_second_copy(root: Path, name: str) -> bytes:
    dtype, shape, data = surgery.load(surgery.holder(root, name))[name]
    other = bytes(b ^ 0x11 for b in data)
    surgery.edit(root / SHARDS[2], lambda tensors: tensors.update({name: (dtype, shape, other)}))
    return data


def test_l02_second_copy_in_another_shard_is_an_error_naming_both_files(f0: Path) -> None:
    name = f"{EXPERT}3.w2.weight_packed"
    plant_second_copy(f0, name)
    finding = only(audit(f0), "duplicate")
    assert (finding.file, finding.tensor) == (SHARDS[2], name)
    assert f"the index says {SHARDS[0]}; their bytes differ" in finding.message


def test_l02_the_copy_that_the_index_names_is_the_one_that_counts_in_any_order(f0: Path) -> None:
    name = f"{EXPERT}3.w2.weight_packed"
    true = plant_second_copy(f0, name)
    for seed in range(4):

        def shuffle(files: dict[str, str], seed: int = seed) -> None:
            items = random.Random(seed).sample(sorted(files.items()), len(files))
            files.clear()
            files.update(items)

        surgery.edit_index(f0, shuffle)
        checkpoint = Checkpoint.open(f0)
        assert checkpoint.tensor(name).file == SHARDS[0]
        assert checkpoint.read_bytes(name) == true


def test_l02_equal_copies_are_said_to_begin_alike_and_without_an_index_neither_counts(f0: Path) -> None:
    name = f"{PREFIX}1.input_layernorm.weight"
    tensor = surgery.load(f0 / SHARDS[0])[name]
    surgery.edit(f0 / SHARDS[2], lambda tensors: tensors.update({name: tensor}))
    assert "they begin with the same bytes" in only(audit(f0), "duplicate").message
    (f0 / surgery.INDEX).unlink()
    assert "no index says which one counts" in only(audit(f0), "duplicate").message
    with pytest.raises(CheckpointError, match="stands in two files"):
        Checkpoint.open(f0)


def test_l02_tensors_outside_the_index_are_strays(f0: Path) -> None:
    surgery.edit(f0 / SHARDS[2], lambda tensors: tensors.update({"old.qweight": ("I32", [2], bytes(8))}))
    finding = only(audit(f0), "stray_tensor")
    assert (finding.severity, finding.file, finding.tensor) == ("warning", SHARDS[2], "old.qweight")
    with pytest.raises(CheckpointError, match=r"no tensor 'old\.qweight'"):
        Checkpoint.open(f0).tensor("old.qweight")


def test_l02_a_needed_tensor_that_the_index_forgot_is_an_error(f0: Path) -> None:
    name = f"{PREFIX}2.input_layernorm.weight"
    surgery.edit_index(f0, lambda files: files.pop(name))
    finding = only(audit(f0), "stray_tensor")
    assert (finding.severity, finding.tensor) == ("error", name)
    assert error_kinds(f0) == {"stray_tensor"}


# L04 torn and zero-holed shards


def test_l04_shard_shorter_than_its_header_is_torn_and_names_the_tensors_cut(f0: Path) -> None:
    path = f0 / SHARDS[1]
    last = max(surgery.read_raw(path)[0].items(), key=lambda item: item[1].get("data_offsets", [0])[0])[0]
    os.truncate(path, path.stat().st_size - 4096)
    finding = only(audit(f0), "torn")
    assert finding.file == SHARDS[1]
    assert finding.tensors[-1] == last
    assert "4096 are missing" in finding.message
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]}.*4096 are missing"):
        Checkpoint.open(f0)


def test_l04_shard_longer_than_its_header_is_refused(f0: Path) -> None:
    with (f0 / SHARDS[0]).open("ab") as file:
        file.write(bytes(12))
    assert "12 too many" in only(audit(f0), "overlong").message
    with pytest.raises(CheckpointError, match="12 too many"):
        Checkpoint.open(f0)


@pytest.mark.parametrize("punched", [False, True])
def test_l04_full_length_shard_with_a_zero_filled_hole_is_found_by_its_contents(f0: Path, punched: bool) -> None:
    """`punched`: the file system knows that the extent was never written; else the zeros are real bytes."""
    path = f0 / SHARDS[1]
    raw = path.read_bytes()
    begin, end = 50 * 4096, 66 * 4096
    path.unlink()
    with path.open("wb") as file:
        file.write(raw[:begin])
        if punched:
            file.seek(end)
        else:
            file.write(bytes(end - begin))
        file.write(raw[end:])
    report = audit(f0)
    finding = only(report, "zero_extent")
    assert finding.file == SHARDS[1]
    assert f"{end - begin} bytes at {begin}..{end} are zero" in finding.message
    hit = [e for e in Checkpoint.open(f0).headers[SHARDS[1]].entries.values() if e.begin < end and e.end > begin]
    assert set(finding.tensors) == {entry.name for entry in hit}
    shallow = audit(f0, deep=False)
    assert shallow.ok
    assert shallow.skipped["contents"]  # a check that was not made is not a check passed


# L05 the index lists a tensor that the named shard does not hold


def test_l05_index_entry_that_no_header_backs_is_reported_before_any_byte_moves(f0: Path) -> None:
    surgery.edit_index(f0, lambda files: files.update({"mtp.fc.weight": SHARDS[1]}))
    finding = only(audit(f0, deep=False), "not_held")
    assert (finding.file, finding.tensor) == (SHARDS[1], "mtp.fc.weight")
    with pytest.raises(CheckpointError, match=r"this file holds mtp\.fc\.weight, its header does not"):
        Checkpoint.open(f0)


def test_l05_tensor_in_another_shard_than_the_index_says_is_misplaced(f0: Path) -> None:
    name = f"{PREFIX}1.input_layernorm.weight"
    surgery.edit_index(f0, lambda files: files.update({name: SHARDS[2]}))
    finding = only(audit(f0), "misplaced")
    assert (finding.file, finding.tensor) == (SHARDS[2], name)
    assert f"it lies in {SHARDS[0]}" in finding.message


# L06 an index left over from another sharding


def test_l06_index_of_another_sharding_is_named_as_the_cause_first(f0: Path) -> None:
    for n in (1, 2):
        (f0 / SHARDS[n - 1]).rename(f0 / f"model-{n:05d}-of-000002.safetensors")
    (f0 / SHARDS[2]).unlink()
    report = audit(f0)
    assert report.findings[0].kind == "stale_index"
    assert "it names files of a 3-file sharding" in report.findings[0].message
    assert "the folder holds those of a 2-file sharding" in report.findings[0].message
    assert len(report.of_kind("missing_shard")) == 3
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoint.open(f0)


def test_l06_left_over_files_of_another_sharding_beside_whole_ones_are_only_ballast(f0: Path) -> None:
    (f0 / "model-00001-of-000002.safetensors").write_bytes((f0 / SHARDS[0]).read_bytes())
    report = audit(f0)
    assert report.ok
    assert only(report, "stray_file").file == "model-00001-of-000002.safetensors"


def test_l06_total_size_of_other_files_is_noticed(f0: Path) -> None:
    path = f0 / surgery.INDEX
    path.write_text(path.read_text().replace('"total_size": ', '"total_size": 1'))
    assert "metadata.total_size" in only(audit(f0), "total_size").message


# L10 a parameter that nothing fills


def test_l10_missing_norm_weight_is_named_exactly(f0: Path) -> None:
    name = f"{PREFIX}3.self_attn.kv_a_layernorm.weight"
    surgery.edit(surgery.holder(f0, name), lambda tensors: tensors.pop(name))
    surgery.edit_index(f0, lambda files: files.pop(name))
    finding = only(audit(f0), "missing_tensor")
    assert finding.tensors == (name,)
    assert "layers.3.mixer.kv_a_norm.weight would stay empty" in finding.message
    assert error_kinds(f0) == {"missing_tensor"}


def test_l10_a_whole_missing_layer_is_one_finding_with_all_its_names(f0: Path) -> None:
    names = [name for name in surgery.load(f0 / SHARDS[0]) if name.startswith(f"{PREFIX}2.")]
    surgery.edit(f0 / SHARDS[0], lambda tensors: [tensors.pop(name) for name in names])
    surgery.edit_index(f0, lambda files: [files.pop(name) for name in names])
    finding = only(audit(f0), "missing_tensor")
    assert sorted(finding.tensors) == sorted(names)


# L11 layers beyond the last


def test_l11_draft_layer_beyond_the_last_is_named_as_such_and_is_no_error(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path, k3_config(), mtp_layers=1)
    report = audit(root)
    finding = only(report, "mtp_layer")
    assert report.ok
    assert len(finding.tensors) == 4
    assert all(name.startswith(f"{PREFIX}8.") for name in finding.tensors)
    assert "multi-token-prediction" in finding.message
    assert len(Checkpoint.open(root)) == report.num_tensors


def test_l11_ordinary_layer_beyond_the_last_means_the_config_is_too_short(f0: Path) -> None:
    def shorten(config: dict[str, dict[str, object]]) -> None:
        config["text_config"]["num_hidden_layers"] = 7
        linear = config["text_config"]["linear_attn_config"]
        assert isinstance(linear, dict)
        linear["full_attn_layers"].remove(8)

    surgery.edit_config(f0, shorten)
    finding = only(audit(f0), "layer_beyond_last")
    assert finding.severity == "error"
    assert "7 layers (0..6) and this is layer 7" in finding.message


# L12 names rewritten twice


def test_l12_doubled_segment_is_unknown_and_the_real_name_is_suggested(f0: Path) -> None:
    name = f"{EXPERT}2.w3.weight_packed"
    doubled = name.replace("block_sparse_moe.", "block_sparse_moe.block_sparse_moe.")
    path = surgery.holder(f0, name)
    surgery.edit(path, lambda tensors: tensors.update({doubled: tensors.pop(name)}))
    surgery.edit_index(f0, lambda files: files.update({doubled: files.pop(name)}))
    unknown = only(audit(f0), "unknown_tensor")
    assert unknown.tensor == doubled
    assert f"is it {name}, which is missing?" in unknown.message


# L13 fused against per-expert names


def test_l13_stacked_experts_are_refused_as_such(f0: Path) -> None:
    stacked = f"{EXPERT}w1.weight_packed"

    def stack(tensors: dict[str, surgery.Stored]) -> None:
        pieces = [tensors.pop(f"{EXPERT}{e}.w1.weight_packed") for e in range(8)]
        tensors[stacked] = ("U8", [8, *pieces[0][1]], b"".join(data for _, _, data in pieces))

    def rename(files: dict[str, str]) -> None:
        for e in range(8):
            files[stacked] = files.pop(f"{EXPERT}{e}.w1.weight_packed")

    surgery.edit(f0 / SHARDS[0], stack)
    surgery.edit_index(f0, rename)
    finding = only(audit(f0), "stacked_experts")
    assert finding.tensors == (stacked,)
    assert finding.severity == "error"
