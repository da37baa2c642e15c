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
    FP32_TOLERANCE,
    Comparison,
    PublishedWeights,
    ReferenceImage,
    ReferencePrompt,
    compare_traces,
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
