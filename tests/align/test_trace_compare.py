"""Comparison of two traces: order, limits, router choices, and what the verdict says."""

from __future__ import annotations

import json
import math

import pytest
import torch

from workbench.align import BF16_TOLERANCE, FP32_TOLERANCE, compare_traces, forward_order, tolerance_for
from workbench.align.trace import IN_LAYER_ORDER, layer_of, produced_by

Trace = dict[str, torch.Tensor]


def some_trace(seed: int = 3) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    names = ("inputs_embeds", "L0.attn_in", "L0.attn_out", "L0.ffn_out", "L0.sum", "L1.attn_in", "logits")
    trace = {name: torch.randn(5, 7, generator=generator) for name in names}
    trace["L0.topk_idx"] = torch.tensor([[0, 1, 4], [1, 2, 3], [0, 2, 5], [3, 4, 5], [0, 1, 2]])
    trace["L0.topk_w"] = torch.rand(5, 3, generator=generator)
    trace["L0.route_margin"] = torch.tensor([0.3, 0.2, 1e-9, 0.1, 0.4])
    return trace


def test_names_sort_in_the_order_of_the_forward_pass() -> None:
    shuffled = ["logits", "L10.attn_in", "blocks", "L2.sum", "L2.attn_in", "image0.block1", "image0.block0", "odd"]
    assert forward_order([*shuffled, "inputs_embeds", "image0.tower", "p7.L2.kda_q"]) == [
        "image0.block0",
        "image0.block1",
        "image0.tower",
        "inputs_embeds",
        "L2.attn_in",
        "p7.L2.kda_q",
        "L2.sum",
        "L10.attn_in",
        "blocks",
        "logits",
        "odd",
    ]


def test_every_name_in_a_layer_says_what_computes_it() -> None:
    for name in IN_LAYER_ORDER:
        assert produced_by(f"L4.{name}").startswith("layer 4: ")
    assert layer_of("p150.L12.sum") == 12
    assert layer_of("logits") is None
    assert produced_by("image1.block3") == "vision.blocks.3"


def test_equal_traces_agree_in_every_tensor() -> None:
    comparison = compare_traces(some_trace(), some_trace())
    assert comparison.passed
    assert comparison.suspect is None
    assert len(comparison.diffs) == 10
    assert comparison.worst is not None
    assert comparison.worst.relative == 0.0
    assert "10 tensors agree" in comparison.verdict()


def test_first_wrong_tensor_is_the_suspect_even_if_a_later_one_is_worse() -> None:
    found = some_trace()
    found["L0.attn_out"][3, 2] += 0.01
    found["logits"] += 5.0
    comparison = compare_traces(some_trace(), found, label="p7")
    assert comparison.suspect is not None
    assert comparison.suspect.name == "L0.attn_out"
    assert comparison.suspect.worst == (3, 2)
    assert comparison.suspect.found == pytest.approx(comparison.suspect.expected + 0.01)
    verdict = comparison.verdict()
    assert verdict.startswith("p7: first wrong: layer 0, tensor attn_out: max|d|=1.000e-02 at [3, 2]")
    assert "mixer.o_proj" in verdict
    assert [diff.name for diff in comparison.diffs if not diff.passed] == ["L0.attn_out", "logits"]


def test_one_wrong_element_does_not_hide_in_a_large_tensor() -> None:
    expected = {"logits": torch.ones(1000, 1000)}
    found = {"logits": torch.ones(1000, 1000)}
    found["logits"][17, 4] += 0.01  # relative 1e-5 of the norm, yet a thousand times rounding
    comparison = compare_traces(expected, found)
    assert comparison.diffs[0].relative < FP32_TOLERANCE.relative
    assert not comparison.passed


def test_values_that_are_not_finite_fail_and_are_located() -> None:
    found = some_trace()
    found["L0.sum"][4, 1] = math.nan
    comparison = compare_traces(some_trace(), found)
    assert comparison.suspect is not None
    assert comparison.suspect.name == "L0.sum"
    assert comparison.suspect.worst == (4, 1)
    assert comparison.suspect.relative == math.inf
    assert "not finite" in comparison.suspect.note


def test_a_missing_tensor_fails_unless_it_was_not_required() -> None:
    found = some_trace()
    del found["L1.attn_in"]
    comparison = compare_traces(some_trace(), found)
    assert not comparison.passed
    assert comparison.missing == ("L1.attn_in",)
    assert "L1.attn_in" in comparison.verdict()
    assert compare_traces(some_trace(), found, required=lambda name: name != "L1.attn_in").passed


def test_comparing_nothing_does_not_pass() -> None:
    assert not compare_traces({}, some_trace()).passed
    assert not compare_traces({"a": torch.ones(2)}, {"b": torch.ones(2)}, required=lambda name: False).passed


def test_a_wrong_shape_fails_with_both_shapes() -> None:
    found = some_trace() | {"L0.sum": torch.zeros(5, 8)}
    suspect = compare_traces(some_trace(), found).suspect
    assert suspect is not None
    assert suspect.note == "shape (5, 8) instead of (5, 7)"


def test_a_trace_that_kept_only_last_rows_is_compared_on_them() -> None:
    stored = some_trace()
    stored["logits"] = stored["logits"][-2:].clone()
    assert compare_traces(stored, some_trace()).passed
    wrong = some_trace()
    wrong["logits"][-1, 0] += 1.0
    assert not compare_traces(stored, wrong).passed


def test_convolution_inputs_are_compared_where_both_keep_them() -> None:
    inputs = torch.randn(3, 6, 4)
    assert compare_traces({"L0.kda_conv": inputs}, {"L0.kda_conv": inputs[..., 1:]}).passed
    assert not compare_traces({"L0.kda_conv": inputs}, {"L0.kda_conv": inputs[..., :3]}).passed


def test_router_choices_are_sets_and_their_order_does_not_matter() -> None:
    found = some_trace()
    found["L0.topk_idx"] = found["L0.topk_idx"].flip(-1)
    assert compare_traces(some_trace(), found).passed


def test_another_choice_passes_only_at_a_near_tie() -> None:
    near, far = some_trace(), some_trace()
    near["L0.topk_idx"][2] = torch.tensor([0, 2, 3])  # margin 1e-9
    comparison = compare_traces(some_trace(), near)
    assert comparison.passed
    diff = next(diff for diff in comparison.diffs if diff.name == "L0.topk_idx")
    assert "1 of 5 tokens chose other experts, 0 of them beyond a near tie" in diff.note
    far["L0.topk_idx"][1] = torch.tensor([1, 2, 5])  # margin 0.2
    comparison = compare_traces(some_trace(), far)
    assert comparison.suspect is not None
    assert comparison.suspect.name == "L0.topk_idx"
    assert comparison.suspect.worst == (1,)
    assert comparison.suspect.unexplained == 1
    assert "[1, 2, 3] became [1, 2, 5]" in comparison.suspect.note


def test_without_a_margin_no_other_choice_is_excused() -> None:
    expected, found = some_trace(), some_trace()
    del expected["L0.route_margin"]
    found["L0.topk_idx"][2] = torch.tensor([0, 2, 3])
    assert not compare_traces(expected, found).passed


def test_weights_of_tokens_with_other_experts_are_left_out_and_said_so() -> None:
    found = some_trace()
    found["L0.topk_idx"][2] = torch.tensor([0, 2, 3])
    found["L0.topk_w"][2] = 9.0
    comparison = compare_traces(some_trace(), found)
    assert comparison.passed
    weights = next(diff for diff in comparison.diffs if diff.name == "L0.topk_w")
    assert "1 of 5 tokens left out" in weights.note
    found["L0.topk_w"][3, 0] += 0.5
    assert not compare_traces(some_trace(), found).passed


def test_what_follows_a_near_tie_is_named_as_such() -> None:
    found = some_trace()
    found["L0.topk_idx"][2] = torch.tensor([0, 2, 3])
    found["L0.ffn_out"] += 1.0
    assert "follows other experts after a near tie in L0.topk_idx" in compare_traces(some_trace(), found).verdict()


def test_record_is_json_and_prints_in_both_forms() -> None:
    found = some_trace()
    found["L0.sum"][0, 0] = math.inf
    comparison = compare_traces(some_trace(), found)
    record = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert record["suspect"] == "L0.sum"
    assert record["passed"] is False
    text = comparison.render()
    assert "WRONG" in text
    assert FP32_TOLERANCE.reason in text
    assert "<table>" in comparison._repr_html_()


def test_zero_tensors_compare_without_dividing_by_zero() -> None:
    zero = {"logits": torch.zeros(2, 3)}
    assert compare_traces(zero, zero).diffs[0].relative == 0.0
    assert compare_traces(zero, {"logits": torch.full((2, 3), 1e-30)}).diffs[0].relative == math.inf


def test_each_precision_has_a_limit_or_none() -> None:
    assert tolerance_for("fp32") is FP32_TOLERANCE
    assert tolerance_for("bf16") is BF16_TOLERANCE
    assert tolerance_for("mxfp4") is BF16_TOLERANCE
    assert tolerance_for("int4") is None
