"""The reference, written from the equations alone, against the stored outputs of the published network.

Any folder of the layout of `k3-tiny-a` works: `pytest tests/golden --golden DIR`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench.align import (
    BF16_GRIDS,
    FP32_TOLERANCE,
    Comparison,
    PublishedWeights,
    ReferenceImage,
    ReferencePrompt,
    choices_of,
    compare_traces,
    noisy_references,
    reference_patches,
    reference_traces,
    reference_vision,
)
from workbench.align.reference_weights import read_reference_config

Trace = dict[str, torch.Tensor]

# The stored outputs are fp32, the reference is float64: what remains is the rounding of the stored side alone.
STORED_FP32 = dataclasses.replace(FP32_TOLERANCE, relative=2e-5, peak=2e-4)


def agree(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], label: str = "") -> Comparison:
    return compare_traces(expected, found, STORED_FP32, label=label)


class Golden:
    """Stored outputs, and the reference's traces of every prompt: alone, continued greedily, and with pictures."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.text = json.loads((root / "golden/text.json").read_text())
        self.vision = json.loads((root / "golden/vision.json").read_text())
        self.text_tensors = load_file(root / "golden/text_fp32.safetensors")
        self.vision_tensors = load_file(root / "golden/vision_fp32.safetensors")
        self.images = {name: reference_patches(root, root / x["file"]) for name, x in self.vision["images"].items()}
        prompts = {name: tuple(x["token_ids"]) for name, x in self.text["prompts"].items()}
        greedy = {name: tuple(x["greedy_fp32"]) for name, x in self.text["prompts"].items()}
        pictures = tuple(self.images[name] for name in self.vision["prompt"]["images_in_order"])
        whole = [ReferencePrompt(token_ids=ids) for ids in prompts.values()]
        continued = [ReferencePrompt(token_ids=ids + greedy[name][:-1]) for name, ids in prompts.items()]
        merged = [
            ReferencePrompt(token_ids=tuple(self.vision["prompt"][key]), images=pictures)
            for key in ("token_ids", "token_ids_with_placeholders_expanded")
        ]
        traces = reference_traces(root, [*whole, *continued, *merged])
        self.whole = dict(zip(prompts, traces, strict=False))
        self.continued = dict(zip(prompts, traces[len(prompts) :], strict=False))
        self.compact, self.expanded = traces[-2:]

    def of(self, prompt: str) -> Trace:
        return {k.removeprefix(f"{prompt}."): v for k, v in self.text_tensors.items() if k.startswith(f"{prompt}.")}


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> Golden:
    return Golden(golden_dir)


@pytest.fixture(params=["p1", "p7", "p64", "p150"])
def prompt(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_stored_text_tensor_agrees(golden: Golden, prompt: str) -> None:
    stored = {k: v for k, v in golden.of(prompt).items() if "greedy" not in k}
    comparison = agree(stored, golden.whole[prompt], label=prompt)
    assert comparison.passed, comparison.render()
    assert len(comparison.diffs) == len(stored) > 30


def test_greedy_tokens_and_their_logits_agree(golden: Golden, prompt: str) -> None:
    expected = golden.text["prompts"][prompt]
    logits = golden.continued[prompt]["logits"][expected["length"] - 1 :]
    assert logits.argmax(-1).tolist() == expected["greedy_fp32"]
    comparison = agree({"greedy_logits": golden.of(prompt)["greedy_logits"]}, {"greedy_logits": logits}, label=prompt)
    assert comparison.passed, comparison.render()


def test_state_after_decoding_agrees(golden: Golden) -> None:
    stored = {
        name.partition("after_greedy.")[2]: value
        for name, value in golden.text_tensors.items()
        if name.startswith("p7.after_greedy.")
    }
    assert len(stored) == len(golden.text["kda_layers_0based"])
    comparison = agree(stored, golden.continued["p7"])
    assert comparison.passed, comparison.render()


def test_a_ragged_batch_ends_like_each_prompt_alone(golden: Golden) -> None:
    rows = golden.text["batch"]["fp32"]["rows"]
    last = torch.stack([golden.whole[name]["logits"][-1] for name in rows])
    comparison = agree({"logits": golden.text_tensors["batch.last_logits"]}, {"logits": last})
    assert comparison.passed, comparison.render()


def test_picture_patches_are_byte_identical(golden: Golden) -> None:
    for name, facts in golden.vision["images"].items():
        image = golden.images[name]
        assert [1, *image.grid] == facts["grid_thw"], name
        assert hashlib.sha256(image.patches.tobytes()).hexdigest() == facts["sha256_patches_u8"], name


def test_every_stored_vision_tensor_agrees(golden: Golden) -> None:
    config, _, vision = read_reference_config(golden.root)
    with PublishedWeights(golden.root) as weights:
        for name, image in golden.images.items():
            trace = reference_vision(weights, config, vision, image)
            stored = {
                key.removeprefix(f"{name}."): value
                for key, value in golden.vision_tensors.items()
                if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") in trace
            }
            assert {"tower", "projector"} <= stored.keys(), name
            comparison = agree(stored, trace, label=name)
            assert comparison.passed, comparison.render()


def test_picture_prompt_agrees_with_placeholders_compact_or_expanded(golden: Golden) -> None:
    stored = {k.removeprefix("mm."): v for k, v in golden.vision_tensors.items() if k.startswith("mm.")}
    for trace in (golden.compact, golden.expanded):
        kept = {k: v for k, v in stored.items() if "greedy" not in k}
        comparison = agree(kept, trace, label="mm")
        assert comparison.passed, comparison.render()


def test_normalised_pictures_give_the_same_features_as_bytes(golden: Golden) -> None:
    name = golden.vision["prompt"]["images_in_order"][0]
    pixels = golden.vision_tensors[f"{name}.pixel_values"].numpy()
    config, _, vision = read_reference_config(golden.root)
    with PublishedWeights(golden.root) as weights:
        image = ReferenceImage(patches=pixels, grid=golden.images[name].grid)
        trace = reference_vision(weights, config, vision, image)
    comparison = agree({"projector": golden.vision_tensors[f"{name}.projector"]}, trace)
    assert comparison.passed, comparison.render()


class Rounded:
    """The published network in bf16, and the reference with roundings beside it, following the same experts."""

    def __init__(self, root: Path) -> None:
        self.facts = json.loads((root / "golden/text.json").read_text())["prompts"]
        stored = load_file(root / "golden/text_bf16.safetensors")
        self.stored = {
            prompt: {k.removeprefix(f"{prompt}."): v for k, v in stored.items() if k.startswith(f"{prompt}.")}
            for prompt in self.facts
        }
        prompts = [ReferencePrompt(token_ids=tuple(fact["token_ids"])) for fact in self.facts.values()]
        followed = [choices_of(trace) for trace in self.stored.values()]
        found = noisy_references(root, prompts, grids=BF16_GRIDS, follow=followed)
        self.references = dict(zip(self.facts, found, strict=True))
        rounded = [dataclasses.replace(prompt, bf16_grid=1.0) for prompt in prompts]
        self.first_draw = dict(zip(self.facts, reference_traces(root, rounded, follow=followed), strict=True))
        continued = [
            dataclasses.replace(prompt, token_ids=prompt.token_ids + tuple(fact["greedy_bf16"][:-1]))
            for prompt, fact in zip(rounded, self.facts.values(), strict=True)
        ]
        free = reference_traces(root, [*rounded, *continued], keep=lambda name: name.endswith(("topk_idx", "logits")))
        self.free = dict(zip(self.facts, free, strict=False))
        self.continued = dict(zip(self.facts, free[len(prompts) :], strict=True))


@pytest.fixture(scope="module")
def rounded(golden_dir: Path) -> Rounded:
    return Rounded(golden_dir)


def rows_like(name: str, found: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The rows that the stored tensor kept: the last ones of a long prompt."""
    is_state = name.endswith(("kda_state", "kda_conv"))
    return found if is_state else found[-stored.shape[0] :]


def test_the_first_draw_rounds_where_the_published_network_rounds(rounded: Rounded) -> None:
    """Independent draws lie 1.4 yardsticks apart; the same roundings in the same places agree but for a stray bit."""
    reference = rounded.references["p1"]
    names = [
        name for name in rounded.stored["p1"] if name.startswith(("L0.", "L1.")) and name in reference.noise.relative
    ]
    assert {"L0.attn_out", "L0.sum", "L1.attn_out", "L1.sum"} <= set(names)
    for name in names:
        stored, exact = rounded.stored["p1"][name].double(), reference.trace[name]
        apart = (rounded.first_draw["p1"][name] - stored).norm() / exact.norm()
        assert apart < 0.5 * reference.noise.relative[name], name


def test_yardsticks_have_the_size_of_the_published_noise(rounded: Rounded, prompt: str) -> None:
    reference = rounded.references[prompt]
    compared = 0
    for name, stored in rounded.stored[prompt].items():
        if name not in reference.noise.relative or stored.dtype is not torch.bfloat16:
            continue
        exact = rows_like(name, reference.trace[name], stored)
        if len(exact) != len(reference.trace[name]):
            continue  # some rows of a long prompt: their noise is not that of all
        distance = (stored.double() - exact).norm() / exact.norm()
        assert 0.5 < distance / reference.noise.relative[name] < 2.0, name
        compared += 1
    assert compared > 0 or prompt == "p150"


def test_the_rounded_reference_makes_the_published_choices(rounded: Rounded, prompt: str) -> None:
    fact, logits = rounded.facts[prompt], rounded.continued[prompt]["logits"]
    assert logits[fact["length"] - 1 :].argmax(-1).tolist() == fact["greedy_bf16"]
    choices = choices_of(rounded.stored[prompt])
    differ = sum(int((rounded.free[prompt][name] != ids.long()).any(-1).sum()) for name, ids in choices.items())
    assert differ <= fact["bf16_vs_fp32"]["routing_sets_that_differ"]


def test_rounded_pictures_are_as_far_from_exact_ones_as_published(golden: Golden) -> None:
    stored = load_file(golden.root / "golden/vision_bf16.safetensors")
    config, _, vision = read_reference_config(golden.root)
    compared = 0
    with PublishedWeights(golden.root) as weights:
        for name, image in golden.images.items():
            exact = reference_vision(weights, config, vision, image)
            draw = reference_vision(weights, config, vision, image, bf16_grid=1.0)
            for kind in ("tower", "projector"):
                if (published := stored.get(f"{name}.{kind}")) is not None:
                    ours, theirs = ((x.double() - exact[kind]).norm().item() for x in (draw[kind], published))
                    assert 0.8 < ours / theirs < 1.25, f"{name}.{kind}"
                    compared += 1
    assert compared > 0
