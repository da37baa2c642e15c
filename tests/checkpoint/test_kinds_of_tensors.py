"""Broken checkpoints seen in the field, by what the tensors are and hold: each planted, each named by the audit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import surgery
from surgery import EXPERT, PREFIX, error_kinds, only

from workbench.base import CheckpointError
from workbench.checkpoint import F1, Checkpoint, audit, k3_config, write_checkpoint

SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]


# L08 scales of zero


def plant_zero_scales(root: Path, names: list[str]) -> None:
    for name in names:

        def zero(tensors: dict[str, surgery.Stored], name: str = name) -> None:
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, bytes(len(data)))

        surgery.edit(surgery.holder(root, name), zero)


def test_l08_zero_scales_are_an_error_for_each_tensor(f0: Path) -> None:
    names = [f"{PREFIX}{layer}.block_sparse_moe.experts.{e}.w1.weight_scale" for layer in (1, 5) for e in (0, 7)]
    plant_zero_scales(f0, names)
    findings = audit(f0).of_kind("zero_scale")
    assert sorted(name for finding in findings for name in finding.tensors) == sorted(names)


def test_l08_expert_zero_alone_is_not_overlooked(f0: Path) -> None:
    plant_zero_scales(f0, [f"{EXPERT}0.w2.weight_scale"])
    assert only(audit(f0), "zero_scale").tensor == f"{EXPERT}0.w2.weight_scale"


def router_biases(num_layers: int) -> list[str]:
    return [f"{PREFIX}{n}.block_sparse_moe.gate.e_score_correction_bias" for n in range(1, num_layers)]


def test_l08_a_norm_of_zeros_is_an_error_and_biases_of_zeros_are_warnings(f0: Path) -> None:
    norm, biases = f"{PREFIX}4.input_layernorm.weight", router_biases(8)
    plant_zero_scales(f0, [norm, *biases])
    found = {finding.tensor: finding.severity for finding in audit(f0).of_kind("zero_tensor")}
    assert found == {norm: "error", **dict.fromkeys(biases, "warning")}


def test_l08_a_router_bias_of_zeros_is_an_error_where_other_layers_have_one(f0: Path) -> None:
    bias = router_biases(8)[3]
    plant_zero_scales(f0, [bias])
    finding = only(audit(f0), "zero_tensor")
    assert (finding.severity, finding.tensor) == ("error", bias)
    assert "those of 6 other layers are not" in finding.message


def test_l08_scores_of_a_mix_with_one_source_may_be_zero(f0: Path) -> None:
    """Nothing is saved in front of the first sublayer, so these are never trained; those of the next one are."""
    first, second = (f"{PREFIX}{layer}.self_attention_res_proj.weight" for layer in (0, 1))
    plant_zero_scales(f0, [first, second])
    found = {finding.tensor: finding.severity for finding in audit(f0).of_kind("zero_tensor")}
    assert found == {first: "info", second: "warning"}


# L14 transposed weights


# F1: w1 is (160, 96), stored as codes (160, 48); turned after packing (48, 160), turned before it (96, 80).
@pytest.mark.parametrize(
    ("name", "turned"),
    [
        (f"{PREFIX}1.self_attn.q_proj.weight", [152, 156]),
        (f"{PREFIX}1.self_attn.q_conv1d.weight", [4, 1, 156]),
        (f"{EXPERT}1.w1.weight_packed", [48, 160]),
        (f"{EXPERT}1.w1.weight_packed", [96, 80]),
        (f"{EXPERT}1.w2.weight_scale", [5, 96]),
        (f"{EXPERT}1.w2.weight_scale", [160, 3]),
    ],
)
def test_l14_transposed_matrix_is_refused_as_transposed(f1: Path, name: str, turned: list[int]) -> None:
    def turn(tensors: dict[str, surgery.Stored]) -> None:
        dtype, _, data = tensors[name]
        tensors[name] = (dtype, turned, data)

    surgery.edit(surgery.holder(f1, name), turn)
    finding = only(audit(f1), "transposed")
    assert finding.tensor == name
    assert f"{turned} is the transpose, expected" in finding.message
    assert error_kinds(f1) == {"transposed"}


def test_l14_square_matrices_are_listed_as_what_a_shape_cannot_tell(f2: Path, f1: Path) -> None:
    blind = {name for finding in audit(f2).of_kind("square") for name in finding.tensors}
    assert f"{EXPERT}0.w1.weight_packed" in blind
    assert f"{PREFIX}0.mlp.down_proj.weight" in blind
    seeing = {name for finding in audit(f1).of_kind("square") for name in finding.tensors}
    assert seeing == {"mm_projector.proj.0.weight"}  # square by construction in every K3


# L16 order of codes inside a byte


def test_l16_another_packing_order_is_refused_by_the_format_name(f0: Path) -> None:
    """Both orders of nibbles are legal bytes, so only the config can say which: any other format name is refused."""
    surgery.edit_config(
        f0, lambda config: config["text_config"]["quantization_config"].update(format="mxfp4-interleaved")
    )
    finding = only(audit(f0), "config")
    assert "mxfp4-interleaved" in finding.message
    assert audit(f0).skipped["names"]


# L17 scales that are not exponents


@pytest.mark.parametrize(("low", "high"), [(1, 9), (180, 220)])
def test_l17_scale_bytes_that_cannot_be_exponents_are_a_warning(f0: Path, low: int, high: int) -> None:
    name = f"{EXPERT}4.w1.weight_scale"

    def linear(tensors: dict[str, surgery.Stored]) -> None:
        dtype, shape, data = tensors[name]
        values = np.random.default_rng(0).integers(low, high, len(data), np.uint8)
        tensors[name] = (dtype, shape, values.tobytes())

    surgery.edit(surgery.holder(f0, name), linear)
    finding = only(audit(f0), "scale_range")
    assert finding.tensor == name
    assert "or plain numbers?" in finding.message


def test_l17_scale_byte_that_means_nan_is_an_error(f0: Path) -> None:
    name = f"{EXPERT}4.w1.weight_scale"

    def spoil(tensors: dict[str, surgery.Stored]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:5] + b"\xff" + data[6:])

    surgery.edit(surgery.holder(f0, name), spoil)
    assert only(audit(f0), "nan_scale").tensor == name


def test_l17_scales_stored_as_numbers_are_refused_with_the_rule(f0: Path) -> None:
    name = f"{EXPERT}4.w1.weight_scale"

    def as_floats(tensors: dict[str, surgery.Stored]) -> None:
        _, shape, data = tensors[name]
        values = 2.0 ** (np.frombuffer(data, np.uint8).astype(np.float32) - 127)
        tensors[name] = ("F32", shape, values.astype(np.float32).tobytes())

    surgery.edit(surgery.holder(f0, name), as_floats)
    finding = only(audit(f0), "wrong_dtype")
    assert "stored as F32, expected U8" in finding.message
    assert "one exponent byte per 32 columns, value 2**(byte - 127)" in finding.message


# L19 matrices without scales and scales without matrices


@pytest.mark.parametrize(("gone", "left"), [("weight_scale", "weight_packed"), ("weight_packed", "weight_scale")])
def test_l19_half_a_pair_is_an_error_on_the_half_that_is_left(f0: Path, gone: str, left: str) -> None:
    name = f"{EXPERT}6.w3.{gone}"
    surgery.edit(surgery.holder(f0, name), lambda tensors: tensors.pop(name))
    surgery.edit_index(f0, lambda files: files.pop(name))
    report = audit(f0)
    assert only(report, "unpaired").tensor == f"{EXPERT}6.w3.{left}"
    assert {finding.kind for finding in report.errors} == {"unpaired"}


def test_l19_fp8_matrix_without_its_scale_is_an_error_too(f0: Path) -> None:
    name = f"{PREFIX}1.self_attn.q_proj.weight"

    def to_fp8(tensors: dict[str, surgery.Stored]) -> None:
        _, shape, data = tensors[name]
        tensors[name] = ("F8_E4M3", shape, data[::2])

    surgery.edit(surgery.holder(f0, name), to_fp8)
    assert error_kinds(f0) == {"unpaired", "wrong_dtype"}


# L26 padding inside the checkpoint


@pytest.mark.parametrize(("padding", "stored"), [(None, 8), (0, 6), (1, 7), (29, 35)])
def test_l26_zero_padding_of_any_length_is_verified_and_named(tmp_path: Path, padding: int | None, stored: int) -> None:
    root = write_checkpoint(tmp_path, k3_config(sizes=F1), a_log_padding=padding)
    report = audit(root)
    assert report.ok
    assert Checkpoint.open(root).tensor(f"{PREFIX}0.self_attn.A_log").shape == (stored,)
    if padding == 0:
        assert report.of_kind("padding") == ()
    else:
        finding = only(report, "padding")
        assert f"6 of {stored} stored entries are used" in finding.message
        assert len(finding.tensors) == 5  # every KDA layer


def test_l26_padding_that_is_not_zero_is_an_error(f1: Path) -> None:
    name = f"{PREFIX}4.self_attn.A_log"

    def fill(tensors: dict[str, surgery.Stored]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:-4] + np.float32(0.25).tobytes())

    surgery.edit(surgery.holder(f1, name), fill)
    finding = only(audit(f1), "padding_not_zero")
    assert finding.tensor == name
    assert "entries 6..7" in finding.message


def test_l26_a_log_shorter_than_the_heads_is_a_wrong_shape(f1: Path) -> None:
    name = f"{PREFIX}4.self_attn.A_log"

    def cut(tensors: dict[str, surgery.Stored]) -> None:
        dtype, _, data = tensors[name]
        tensors[name] = (dtype, [5], data[:20])

    surgery.edit(surgery.holder(f1, name), cut)
    finding = only(audit(f1), "wrong_shape")
    assert "at least 6 entries" in finding.message


# shapes, ranges and rules besides


def test_overlaid_tensors_are_refused_and_both_named(f0: Path) -> None:
    path = f0 / SHARDS[0]
    header, data = surgery.read_raw(path)
    a, b = f"{EXPERT}0.w1.weight_packed", f"{EXPERT}1.w1.weight_packed"
    header[b]["data_offsets"] = header[a]["data_offsets"]
    surgery.write_raw(path, header, data)
    report = audit(f0)
    assert set(only(report, "overlap").tensors) == {a, b}
    assert report.of_kind("gap")  # the bytes that were b's belong to nobody now
    with pytest.raises(CheckpointError, match="belong to"):
        Checkpoint.open(f0)


def test_wrong_shape_and_wrong_dtype_name_the_rule(f0: Path) -> None:
    conv, norm = f"{PREFIX}1.self_attn.q_conv1d.weight", f"{PREFIX}1.input_layernorm.weight"

    def spoil(tensors: dict[str, surgery.Stored]) -> None:
        _, shape, data = tensors[conv]
        tensors[conv] = ("BF16", shape, data[: len(data) // 2])
        dtype, shape, data = tensors[norm]
        tensors[norm] = (dtype, [shape[0] - 1], data[:-2])

    surgery.edit(f0 / SHARDS[0], spoil)
    report = audit(f0)
    assert "stored as BF16, expected F32 [64, 1, 4] (rule: fills layers.1.mixer.q_conv.weight" in (
        only(report, "wrong_dtype").message
    )
    assert "shape [127], expected BF16 [128]" in only(report, "wrong_shape").message


def test_quantisation_rules_that_disagree_with_names_are_infos_and_the_names_win(f0: Path) -> None:
    report = audit(f0)
    messages = [finding.message for finding in report.of_kind("quant_rule")]
    assert {finding.severity for finding in report.of_kind("quant_rule")} == {"info"}
    assert any("block_sparse_moe.gate (7) is stored plain although no rule ignores it" in text for text in messages)


def test_rules_that_would_leave_packed_experts_plain_are_a_warning(f0: Path) -> None:
    def ignore(config: dict[str, dict[str, dict[str, list[str]]]]) -> None:
        config["text_config"]["quantization_config"]["ignore"].append(r"re:.*experts\.\d$")
        config["text_config"]["quantization_config"]["ignore"].append("re:(x+)+")

    surgery.edit_config(f0, ignore)
    assert "too complex" in only(audit(f0), "quant_rule").message


def test_vocabulary_rows_of_zeros_are_a_warning_elsewhere_they_are_an_error(f0: Path) -> None:
    embed, matrix = "language_model.model.embed_tokens.weight", f"{PREFIX}0.mlp.up_proj.weight"

    def blank(name: str) -> None:
        def change(tensors: dict[str, surgery.Stored]) -> None:
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, data[: 40 * 256] + bytes(60 * 256) + data[100 * 256 :])

        surgery.edit(surgery.holder(f0, name), change)

    blank(embed)
    report = audit(f0)
    assert report.ok
    assert only(report, "zero_rows").tensors == (embed,)
    blank(matrix)
    assert only(audit(f0), "zero_extent").tensors == (matrix,)
