"""The text network against the published one: every stored tensor, greedy decoding, a ragged batch; in fp32 and bf16.

Works for any folder of the golden layout (`--golden DIR`): prompts, layers and sizes come from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_model import load_golden_model
from safetensors.torch import load_file
from text_capture import batch_of, capture_prompt, new_cache
from torch import Tensor, nn

from workbench.nn.batch import TokenBatch
from workbench.nn.kda import KDA
from workbench.nn.mla import MLA
from workbench.nn.model import Model
from workbench.nn.moe import MoE
from workbench.nn.quant.mxfp4 import MXFP4

RELATIVE_FP32 = 2e-5  # the goldens' own limits for a float32 implementation
LOGITS_ABSOLUTE = 1e-3
MARGIN_ABSOLUTE = 4e-5  # a margin is the difference of two scores of at most 1, each within RELATIVE_FP32
# The reference's bf16 error and ours are two draws of the same rounding noise (see test_bf16_...).
BF16_MEDIAN_RATIO, BF16_RATIO = 2.0, 3.0


@dataclass
class Golden:
    root: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.root / "golden/text.json").read_text())

    @cached_property
    def fp32(self) -> dict[str, Tensor]:
        return load_file(self.root / "golden/text_fp32.safetensors")

    @cached_property
    def model(self) -> Model:
        return load_golden_model(self.root)

    @cached_property
    def bf16_model(self) -> Model:
        return load_golden_model(self.root, "bf16")

    def ids(self, prompt: str) -> list[int]:
        return self.facts["prompts"][prompt]["token_ids"]

    def expected(self, prompt: str) -> dict[str, Tensor]:
        """Stored tensors of one pass over the prompt, without the prompt's name."""
        own = {k.removeprefix(f"{prompt}."): v for k, v in self.fp32.items() if k.startswith(f"{prompt}.")}
        return {k: v for k, v in own.items() if not k.startswith(("greedy_logits", "after_greedy."))}


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> Golden:
    return Golden(golden_dir)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "prompt" in metafunc.fixturenames:
        text = json.loads((metafunc.config.getoption("--golden") / "golden/text.json").read_text())
        metafunc.parametrize("prompt", list(text["prompts"]))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def compare(name: str, found: Tensor, expected: Tensor) -> None:
    """Raises AssertionError with the numbers unless `found` is the stored tensor within the limit for its kind."""
    kind = name.rpartition(".")[2]
    if kind == "kda_conv":
        expected = expected[..., -found.shape[-1] :]  # the reference keeps one input more than it needs
    if found.shape[0] > expected.shape[0]:
        found = found[-expected.shape[0] :]  # of long prompts the last rows are stored
    assert found.numel() == expected.numel(), f"{name}: {tuple(found.shape)}, stored {tuple(expected.shape)}"
    found = found.reshape(expected.shape)
    if kind == "topk_idx":
        wrong = (found != expected).any(-1).nonzero().flatten().tolist()
        assert not wrong, f"{name}: other experts for tokens {wrong}"
        return
    worst, error = (found.double() - expected.double()).abs().max().item(), relative(found, expected)
    message = f"{name}: relative {error:.2e} (limit {RELATIVE_FP32:.0e}), max|d| {worst:.2e}"
    if kind == "route_margin":
        assert worst <= MARGIN_ABSOLUTE, message
        return
    assert error <= RELATIVE_FP32, message
    if kind in ("logits", "greedy_logits", "last_logits"):
        assert worst <= LOGITS_ABSOLUTE, message


def compare_all(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing = sorted(set(expected) - set(found))
    assert not missing, f"stored but not captured: {missing}"
    for name, value in expected.items():
        compare(name, found[name], value)


def decode_greedily(model: Model, token_ids: list[int], num_tokens: int) -> tuple[list[int], Tensor, dict[int, Tensor]]:
    """Prefill, then token by token with the cache: tokens, the logits each was taken from, and the last KDA states."""
    cache = new_cache(model, 3, len(token_ids) + num_tokens)
    slot, ids, tokens, logits = 1, token_ids, [], []
    for _ in range(num_tokens):
        start = len(token_ids) + len(tokens) - len(ids)
        logits.append(model(batch_of(ids, start=start, slot=slot), cache=cache)[0])
        tokens.append(int(logits[-1].argmax()))
        ids = [tokens[-1]]
    return tokens, torch.stack(logits), {i: state[slot] for i, state in cache.state.items()}


def test_every_stored_tensor_of_a_prompt_agrees_in_fp32(golden: Golden, prompt: str) -> None:
    expected = golden.expected(prompt)
    assert {"logits"} | {f"L{i}.sum" for i in range(golden.model.spec.num_layers)} <= set(expected)
    compare_all(capture_prompt(golden.model, golden.ids(prompt)), expected)


def test_greedy_decoding_with_the_cache_gives_the_same_tokens_and_logits(golden: Golden, prompt: str) -> None:
    expected = golden.facts["prompts"][prompt]["greedy_fp32"]
    tokens, logits, states = decode_greedily(golden.model, golden.ids(prompt), len(expected))
    assert tokens == expected
    compare(f"{prompt}.greedy_logits", logits, golden.fp32[f"{prompt}.greedy_logits"])
    prefix = f"{prompt}.after_greedy."
    for name, value in golden.fp32.items():
        if name.startswith(prefix):
            layer, kind = name.removeprefix(prefix).split(".")
            assert kind == "kda_state", name
            compare(name, states[int(layer[1:])], value)


def test_a_ragged_batch_of_all_prompts_gives_the_stored_last_logits(golden: Golden) -> None:
    rows = golden.facts["batch"]["fp32"]["rows"]
    found = golden.model(TokenBatch.whole([golden.ids(prompt) for prompt in rows]))
    compare("batch.last_logits", found, golden.fp32["batch.last_logits"])


def test_no_stored_tensor_goes_uncompared(golden: Golden) -> None:
    prompts = tuple(f"{prompt}." for prompt in golden.facts["prompts"])
    assert {name for name in golden.fp32 if not name.startswith(prompts)} == {"batch.last_logits"}


def test_bf16_errs_as_much_as_the_reference_does_in_bf16(golden: Golden, prompt: str) -> None:
    """Against fp32, on all rows (our own fp32 run, which equals the stored one): the same kind and size of error.

    A bf16 run is fp32 plus rounding noise plus now and then another expert for a token; where an implementation rounds
    decides which tokens these are. So the median over tokens is compared closely, sums over tokens more loosely, and
    states, which hang on the last few tokens, only where no expert changed.
    """
    reference = golden.facts["prompts"][prompt]["bf16_vs_fp32"]
    found = capture_prompt(golden.bf16_model, golden.ids(prompt))
    expected = capture_prompt(golden.model, golden.ids(prompt))
    assert_bf16_like(found, expected, reference)


def assert_bf16_like(found: dict[str, Tensor], expected: dict[str, Tensor], reference: dict[str, Any]) -> None:
    logits, exact = found["logits"].double(), expected["logits"].double()
    median = ((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()
    assert median <= BF16_MEDIAN_RATIO * reference["logits_rel_median_per_token"], f"median per token {median:.3f}"
    assert relative(logits, exact) <= BF16_RATIO * reference["logits_rel"]
    changed = sum((found[k] != expected[k]).any(-1).sum().item() for k in found if k.endswith("topk_idx"))
    # Two more than twice: small counts of rare events scatter.
    assert changed <= 2 * reference["routing_sets_that_differ"] + 2, f"{changed} expert sets changed"
    kinds = [("sum", reference["sum_rel_per_layer"])]
    if not changed:
        kinds.append(("kda_state", reference["kda_state_rel_per_layer"]))
    for kind, errors in kinds:
        names = [name for name in found if name.endswith(f".{kind}")]
        assert len(names) == len(errors)
        names.sort(key=lambda name: int(name[1:].partition(".")[0]))
        for name, error in zip(names, errors, strict=True):
            assert relative(found[name], expected[name]) <= BF16_RATIO * error, f"{name}, reference {error:.3f}"


def test_greedy_tokens_in_bf16_are_the_references(golden: Golden, prompt: str) -> None:
    expected = golden.facts["prompts"][prompt]["greedy_bf16"]
    assert decode_greedily(golden.bf16_model, golden.ids(prompt), len(expected))[0] == expected


def modules_of(model: Model, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def plant_latent_norm_eps(model: Model) -> None:
    for mixer in modules_of(model, MLA):
        mixer.q_a_norm.eps = mixer.kv_a_norm.eps = 1e-5


def plant_l2_eps(model: Model) -> None:
    for mixer in modules_of(model, KDA):
        mixer.spec = replace(mixer.spec, l2_eps=1e-5)


def plant_shifted_decays(model: Model) -> None:
    for mixer in modules_of(model, KDA):
        mixer.A_log.copy_(mixer.A_log.roll(1))


def plant_rounded_correction_bias(model: Model) -> None:
    for block in modules_of(model, MoE):
        block.router.bias.copy_(block.router.bias.bfloat16())


def plant_swapped_nibbles(model: Model) -> None:
    for block in modules_of(model, MoE):
        for store in (block.experts.w1, block.experts.w2, block.experts.w3):
            store.weight.copy_(store.weight.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def plant_missing_last_mix(model: Model) -> None:
    model.final_res = None


FAULTS = [
    plant_latent_norm_eps,
    plant_l2_eps,
    plant_shifted_decays,
    plant_rounded_correction_bias,
    plant_swapped_nibbles,
    plant_missing_last_mix,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_mistake_is_seen_in_the_logits(golden: Golden, plant: Callable[[Model], None]) -> None:
    wrong = load_golden_model(golden.root)
    plant(wrong)
    prompt = max(golden.facts["prompts"], key=lambda name: len(golden.ids(name)))
    logits = capture_prompt(wrong, golden.ids(prompt))["logits"]
    with pytest.raises(AssertionError, match="relative"):
        compare("logits", logits, golden.expected(prompt)["logits"])


def test_a_rounded_correction_bias_is_seen_in_the_chosen_experts(golden: Golden) -> None:
    wrong = load_golden_model(golden.root)
    plant_rounded_correction_bias(wrong)
    for prompt, facts in golden.facts["prompts"].items():
        expected = {k: v for k, v in golden.expected(prompt).items() if k.endswith("topk_idx")}
        found = capture_prompt(wrong, golden.ids(prompt))
        differing = sum((found[k] != v).any(-1).sum().item() for k, v in expected.items())
        # Two more or fewer: with rounded biases a choice may hang on the last bit of a score.
        assert differing == pytest.approx(facts["if_correction_bias_were_bf16"]["routing_sets_that_differ"], abs=2)


def test_a_scale_lost_after_renormalising_is_seen_in_the_expert_weights(golden: Golden) -> None:
    """The norm after the experts hides it from the logits, so the weights themselves are compared."""
    prompt = max(golden.facts["prompts"], key=lambda name: len(golden.ids(name)))
    found = capture_prompt(golden.model, golden.ids(prompt))
    name = next(k for k in golden.expected(prompt) if k.endswith("topk_w"))
    with pytest.raises(AssertionError, match="relative"):
        compare(name, found[name] * 1.001, golden.expected(prompt)[name])


def test_the_bf16_check_sees_a_mistake(golden: Golden) -> None:
    wrong = load_golden_model(golden.root, "bf16")
    plant_shifted_decays(wrong)
    prompt = max(golden.facts["prompts"], key=lambda name: len(golden.ids(name)))
    ids, reference = golden.ids(prompt), golden.facts["prompts"][prompt]["bf16_vs_fp32"]
    with pytest.raises(AssertionError, match="median per token"):
        assert_bf16_like(capture_prompt(wrong, ids), capture_prompt(golden.model, ids), reference)


def test_mxfp4_kept_packed_computes_what_the_expanded_experts_compute(golden: Golden, prompt: str) -> None:
    """The published bytes pass through unchanged and decode exactly, so even the last bit agrees."""
    packed = load_golden_model(golden.root, "mxfp4", dtype=torch.float32)
    assert isinstance(modules_of(packed, MoE)[0].experts.w1.scheme, MXFP4)
    batch = batch_of(golden.ids(prompt), all_logits=True)
    assert torch.equal(packed(batch), golden.model(batch))
