"""Parity of the fast model with the reference, and that each planted fault is found by layer and tensor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from align_checkpoints import TEXT_IDS, TINY, damaged_copy, load_fp32, picture_prompt, text_prompt

from workbench.align import (
    Capture,
    ParityPrompt,
    ParityReport,
    Trace,
    check_parity,
    compare_traces,
    model_forward,
    reference_traces,
)
from workbench.align.reference import ReferencePrompt
from workbench.base import RequestError
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model

PROMPTS = (text_prompt("long"), text_prompt("short", 2))


@pytest.fixture(scope="module")
def sound() -> Model:
    return load_fp32()


def parity_of(model: Model, prompts: Sequence[ParityPrompt] = PROMPTS) -> ParityReport:
    return check_parity(model_forward(model), TINY, prompts)


def test_sound_model_agrees_on_text_and_pictures(sound: Model) -> None:
    report = parity_of(sound, [*PROMPTS, picture_prompt()])
    assert report.passed, report.render()
    assert report.suspect is None
    assert report.num_tensors == 3 * len(report.comparisons[0].diffs)
    names = {diff.name for diff in report.comparisons[2].diffs}
    assert {"inputs_embeds", "L0.kda_state", "L0.kda_conv", "L3.latent", "L1.topk_idx", "blocks", "logits"} <= names
    assert "tensors of 3 prompts" in report.verdict()
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert record["passed"] is True
    assert len(record["prompts"]) == 3
    assert "<table>" in report._repr_html_()
    assert len(report.by_layer().rows) == sound.spec.num_layers


PUBLISHED = "language_model.model.layers."


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """All bytes of some rows with their two columns exchanged."""
    packed[:5] = (packed[:5] << 4) | (packed[:5] >> 4)
    return packed


def bump(row: int, column: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight[row, column] += 0.5
        return weight

    return change


@pytest.mark.parametrize(
    ("name", "change", "suspect"),
    [
        (f"{PUBLISHED}2.self_attn.v_proj.weight", bump(7, 11), "L2.kda_conv"),
        (f"{PUBLISHED}5.self_attn.f_b_proj.weight", bump(3, 2), "L5.kda_g"),
        (f"{PUBLISHED}3.self_attn.kv_b_proj.weight", bump(9, 4), "L3.mla_gated"),
        (f"{PUBLISHED}6.self_attn.o_proj.weight", bump(9, 4), "L6.attn_out"),
        (f"{PUBLISHED}4.block_sparse_moe.routed_expert_up_proj.weight", bump(1, 2), "L4.moe_routed_out"),
        (f"{PUBLISHED}4.block_sparse_moe.shared_experts.down_proj.weight", bump(1, 2), "L4.moe_shared_out"),
        (f"{PUBLISHED}3.block_sparse_moe.experts.1.w3.weight_packed", swap_nibbles, "L3.moe_combined"),
        (f"{PUBLISHED}5.block_sparse_moe.experts.2.w2.weight_scale", lambda s: s + 1, "L5.moe_combined"),
        (f"{PUBLISHED}1.mlp_res_norm.weight", lambda w: w * 1.25, "L1.mlp_in"),
        ("language_model.lm_head.weight", bump(17, 3), "logits"),
        ("vision_tower.encoder.blocks.1.wo.weight", bump(5, 6), "inputs_embeds"),
    ],
)
def test_a_damaged_weight_is_found_where_it_first_shows(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], suspect: str
) -> None:
    prompts = [picture_prompt()] if name.startswith("vision") else [text_prompt()]
    report = parity_of(load_fp32(damaged_copy(tmp_path, name, change)), prompts)
    assert not report.passed
    assert report.suspect is not None
    assert report.suspect.name == suspect, report.render()
    assert suspect.rpartition(".")[2] in report.verdict()


def wrong_query_norm_eps(model: Model) -> None:
    model.layers["3"].mixer.q_a_norm.eps = 1e-5


def wrong_latent_norm_eps(model: Model) -> None:
    model.layers["6"].mixer.kv_a_norm.eps = 1e-5


def l2_eps_on_the_mean(model: Model) -> None:
    mixer = model.layers["2"].mixer
    mixer.spec = dataclasses.replace(mixer.spec, l2_eps=mixer.spec.l2_eps * mixer.spec.head_dim)


def block_not_restarted(model: Model) -> None:
    model.layers["3"].starts_block = False


def swiglu_in_a_shared_expert(model: Model) -> None:
    shared = model.layers["2"].ffn.shared
    shared.activation = dataclasses.replace(shared.activation, kind="silu")


def no_renormalisation(model: Model) -> None:
    router = model.layers["5"].ffn.router
    router.spec = dataclasses.replace(router.spec, renormalize=False)


def no_norm_after_the_experts(model: Model) -> None:
    model.layers["4"].ffn.latent_norm = torch.nn.Identity()


@pytest.mark.parametrize(
    ("fault", "suspect"),
    [
        (wrong_query_norm_eps, "L3.mla_q"),
        (wrong_latent_norm_eps, "L6.latent"),
        (l2_eps_on_the_mean, "L2.kda_o"),
        (block_not_restarted, "L3.mlp_in"),
        (swiglu_in_a_shared_expert, "L2.moe_shared_out"),
        (no_renormalisation, "L5.topk_w"),
        (no_norm_after_the_experts, "L4.moe_routed_out"),
    ],
)
def test_wrong_arithmetic_is_found_where_it_first_shows(fault: Callable[[Model], None], suspect: str) -> None:
    model = load_fp32()
    fault(model)
    report = parity_of(model)
    assert report.suspect is not None
    assert report.suspect.name == suspect, report.render()


def test_a_correction_bias_rounded_to_bf16_is_found_at_the_first_other_choice(sound: Model) -> None:
    model = load_fp32()
    for layer in model.layers.values():
        if hasattr(layer.ffn, "router"):
            layer.ffn.router.bias.copy_(layer.ffn.router.bias.bfloat16().float())
    report = parity_of(model, [text_prompt()])
    assert report.suspect is not None
    assert report.suspect.name.endswith("topk_idx"), report.render()
    assert report.suspect.unexplained > 0
    # The reference followed the wrong choices, so that nothing but choices differs.
    wrong = {diff.name.rpartition(".")[2] for diff in report.comparisons[0].diffs if not diff.passed}
    assert wrong == {"topk_idx"}
    assert "beyond a near tie" in report.verdict()


def test_a_wrong_generated_token_is_found_with_the_gap(sound: Model) -> None:
    logits = reference_traces(TINY, [ReferencePrompt(token_ids=TEXT_IDS)])[0]["logits"]
    best, second = logits[-1].topk(2).indices.tolist()
    gap = float(logits[-1, best] - logits[-1, second])
    right = ParityPrompt(label="right", token_ids=(*TEXT_IDS, best), num_generated=1)
    wrong = ParityPrompt(label="wrong", token_ids=(*TEXT_IDS, second, 3), num_generated=2)
    report = parity_of(sound, [right, wrong])
    assert report.suspect is None
    assert not report.passed
    assert report.greedy[0].passed
    assert report.greedy[0].num_equal == 1
    assert report.greedy[1].first_wrong == 0
    assert report.greedy[1].gap >= gap
    assert "generated token 0 is not the reference's choice" in report.verdict()


def test_a_forward_that_captures_too_little_does_not_pass(sound: Model) -> None:
    def forgetful(prompts: Sequence[ParityPrompt]) -> list[Trace]:
        traces = model_forward(sound)(prompts)
        return [{name: x for name, x in trace.items() if not name.startswith("L5.kda")} for trace in traces]

    report = check_parity(forgetful, TINY, PROMPTS)
    assert not report.passed
    assert "were not captured, first L5.kda_conv" in report.verdict()
    with pytest.raises(RequestError, match="1 traces for 2 prompts"):
        check_parity(lambda prompts: model_forward(sound)(prompts)[:1], TINY, PROMPTS)


def test_the_earliest_suspect_over_all_prompts_is_named(sound: Model) -> None:
    def faulty(prompts: Sequence[ParityPrompt]) -> list[Trace]:
        first, second = model_forward(sound)(prompts)
        first["L5.sum"] += 1.0
        second["L2.attn_out"] += 1.0
        return [first, second]

    report = check_parity(faulty, TINY, PROMPTS)
    assert report.suspect is not None
    assert report.suspect.name == "L2.attn_out"
    assert report.verdict().startswith("short: first wrong: layer 2, tensor attn_out")


def test_capturing_in_chunks_through_a_cache_leaves_the_same_state(sound: Model) -> None:
    """The state after a prompt run in two pieces equals that of the whole: what decoding goes on from."""
    ids, cut = TEXT_IDS[:11], 4
    cache = StateCache(sound.spec, sound.layer_range, num_slots=2, max_tokens=11, dtype=torch.float32)
    for start, piece in ((0, ids[:cut]), (cut, ids[cut:])):
        batch = TokenBatch(
            token_ids=torch.tensor(piece),
            lengths=(len(piece),),
            starts=(start,),
            slots=(1,),
            logit_rows=torch.arange(len(piece)),
        )
        with Capture(sound) as capture:
            sound(batch, cache=cache)
    (found,) = capture.traces(batch, cache)
    expected = reference_traces(TINY, [ReferencePrompt(token_ids=tuple(ids))])[0]
    recent = {name: value[-len(found[name]) :] for name, value in expected.items() if name in found}
    comparison = compare_traces(recent, found)
    assert comparison.passed, comparison.render()
    assert found["L3.latent"].shape[0] == 11
    assert found["L3.attn_in"].shape[0] == 7
    with pytest.raises(RequestError, match="another batch"):
        capture.traces(TokenBatch.whole([ids]), cache)


def test_hooks_are_gone_after_the_block(sound: Model) -> None:
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in sound.modules())
