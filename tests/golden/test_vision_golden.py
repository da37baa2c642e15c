"""Vision against the published network: pictures to patches byte for byte, tower and projector layer by layer.

Works for any folder of the golden layout (`--golden DIR`); nothing below knows a size, a mode or a name of a picture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_vision import RELATIVE_FP32, VisionGolden, assert_close, relative
from torch import Tensor
from torch.nn import functional

from workbench.nn import vision as vision_room
from workbench.nn.norm import RMSNorm
from workbench.nn.projector import Projector
from workbench.nn.vision import VisionTower
from workbench.serving.inputs import (
    ImageInput,
    ImagePart,
    Message,
    Tokenizer,
    normalise,
    plan_image,
    render_chat,
)
from workbench.serving.inputs.tokenizer import MARKER_NAMES
from workbench.serving.inputs.tokenizer_files import Vocabulary
from workbench.spec import ImageSpec, parse_config, read_json

# bf16 tower and projector of the reference differ from its float32 run by 0.5 to 1.2 percent; twice that is not noise.
RELATIVE_BF16 = 2.4e-2
BF16_RATIO = 2.0  # and per picture: at most twice the reference's own bf16 error


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> VisionGolden:
    return VisionGolden(golden_dir)


@pytest.fixture(scope="module")
def fp32_vision(golden: VisionGolden) -> tuple[VisionTower, Projector]:
    return golden.vision(torch.float32)


def captured(tower: VisionTower, pixels: Tensor, grid: tuple[int, int, int]) -> dict[str, Tensor]:
    """Everything the goldens name inside the tower, for one picture."""
    values: dict[str, Tensor] = {}
    handles = [
        tower.blocks[0].register_forward_pre_hook(lambda _, args: values.update(patch_embed=args[0])),
        tower.final_norm.register_forward_hook(lambda _, args, out: values.update(encoder_out=out)),
    ]
    for i, block in enumerate(tower.blocks):
        handles.append(block.register_forward_hook(lambda _, args, out, name=f"block{i}": values.update({name: out})))
    try:
        values["tower"] = tower(pixels, [grid])
    finally:
        for handle in handles:
            handle.remove()
    return values


def test_every_picture_becomes_the_published_patches_byte_for_byte(golden: VisionGolden) -> None:
    assert golden.inputs, "no pictures in this folder"
    for name, facts in golden.facts["images"].items():
        image = golden.inputs[name]
        plan = plan_image(facts["width"], facts["height"], golden.image_spec)
        pixels = normalise(image.patches, golden.image_spec)
        found = {
            "width": image.size[0],
            "height": image.size[1],
            "resized_to": list(plan.resized),
            "pad_right": plan.padding[0],
            "pad_bottom": plan.padding[1],
            "grid_thw": list(image.grid),
            "patches": image.patches.shape[0],
            "tokens": image.num_tokens,
            "sha256_patches_u8": hashlib.sha256(image.patches.tobytes()).hexdigest(),
            "sha256_pixel_values_f32le": hashlib.sha256(pixels.astype("<f4").tobytes()).hexdigest(),
        }
        assert found == {key: facts[key] for key in found}, name


def test_stored_patches_and_pixel_values_agree_with_ours(golden: VisionGolden) -> None:
    seen = 0
    for name, image in golden.inputs.items():
        stored = golden.fp32.get(f"{name}.patches_u8")
        if stored is not None:
            np.testing.assert_array_equal(image.patches, stored.numpy(), err_msg=name)
        ends = golden.fp32.get(f"{name}.patches_u8_first_last_4")
        if ends is not None:
            np.testing.assert_array_equal(np.concatenate([image.patches[:4], image.patches[-4:]]), ends.numpy())
        pixels = golden.fp32.get(f"{name}.pixel_values")
        if pixels is not None:
            np.testing.assert_array_equal(normalise(image.patches, golden.image_spec), pixels.numpy(), err_msg=name)
        seen += sum(value is not None for value in (stored, ends, pixels))
    assert seen, "this folder stores no patches to compare with"


def size_table(golden_dir: Path) -> Iterator[tuple[ImageSpec, dict[str, Any]]]:
    """(settings, expected) of every listed size, under the published settings and, where given, the folder's own."""
    config = read_json(golden_dir / "config.json")
    for block in json.loads((golden_dir / "golden/processor.json").read_text()).values():
        spec = parse_config(config, {"media_proc_cfg": block["media_proc_cfg"]}).image
        assert spec is not None
        yield from ((spec, size) for size in block["sizes"])


def test_sizes_and_token_counts_follow_the_published_arithmetic(golden_dir: Path) -> None:
    table = list(size_table(golden_dir))
    assert len(table) >= 20
    for spec, expected in table:
        plan = plan_image(expected["width"], expected["height"], spec)
        found = {
            "resized_to": list(plan.resized),
            "pad_right": plan.padding[0],
            "pad_bottom": plan.padding[1],
            "grid_thw": list(plan.grid),
            "tokens": plan.num_tokens,
        }
        assert found == {key: expected[key] for key in found}, expected


def test_tower_and_projector_match_in_fp32_at_every_step(
    golden: VisionGolden, fp32_vision: tuple[VisionTower, Projector]
) -> None:
    tower, projector = fp32_vision
    compared = set()
    for name, image in golden.inputs.items():
        values = captured(tower, golden.pixels(name), image.grid)
        values["projector"] = projector(values["tower"])
        for key, value in values.items():
            expected = golden.fp32.get(f"{name}.{key}")
            if expected is not None:
                assert_close(f"{name}.{key}", value, expected)
                compared.add(key)
    wanted = {"patch_embed", "encoder_out", "tower", "projector", *(f"block{i}" for i in range(len(tower.blocks)))}
    assert compared == wanted


def test_bf16_stays_within_the_noise_of_bf16(golden: VisionGolden) -> None:
    tower, projector = golden.vision(torch.bfloat16)
    for name, facts in golden.facts["images"].items():
        merged = tower(golden.pixels(name), [golden.inputs[name].grid])
        for key, value in (("tower", merged), ("projector", projector(merged))):
            assert value.dtype == torch.bfloat16
            limit = min(RELATIVE_BF16, BF16_RATIO * facts[f"bf16_vs_fp32_{key}_rel"])
            assert_close(f"{name}.{key}", value, golden.fp32[f"{name}.{key}"], limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_pictures_come_out_as_they_do_alone(golden: VisionGolden, dtype: torch.dtype) -> None:
    tower, projector = golden.vision(dtype)
    names = list(golden.inputs)
    grids = [golden.inputs[name].grid for name in names]
    packed = projector(tower(torch.cat([golden.pixels(name) for name in names]), grids))
    parts = packed.split([golden.inputs[name].num_tokens for name in names])
    # Rows may be summed in another order in a larger matrix product; in bf16 that can flip last bits.
    limit = 2e-6 if dtype == torch.float32 else RELATIVE_BF16 / 2
    for name, part, grid in zip(names, parts, grids, strict=True):
        assert_close(name, part, projector(tower(golden.pixels(name), [grid])), limit)


FAULTS = {
    "eps of 0": "norm_eps=0",
    "eps of 1e-6": "norm_eps=1e-6",
    "rows before columns": "rotary_angles",
    "half-split pairs": "rotate_pairs",
    "merge by columns": "merge_patches",
    "position grid with aligned corners": "interpolate",
    "erf GELU in the tower": "gelu",
}


def plant(fault: str, tower: VisionTower, patch: pytest.MonkeyPatch) -> None:
    """Put one typical mistake into the tower's code."""
    m, original = tower.spec.merge_size, getattr(vision_room, fault, getattr(functional, fault, None))
    if fault.startswith("norm_eps="):
        for module in tower.modules():
            if isinstance(module, RMSNorm):
                module.eps = float(fault.removeprefix("norm_eps="))
    elif fault == "rotary_angles":
        patch.setattr(vision_room, fault, lambda *a, **k: original(*a, **k).unflatten(1, (-1, 2)).flip(2).flatten(1))
    elif fault == "rotate_pairs":

        def half_split(x: Tensor, angles: Tensor) -> Tensor:
            pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            return original(pairs, angles).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

        patch.setattr(vision_room, fault, half_split)
    elif fault == "merge_patches":
        patch.setattr(vision_room, fault, lambda *a: original(*a).unflatten(1, (m, m)).transpose(1, 2).flatten(1, 2))
    elif fault == "interpolate":
        patch.setattr(functional, fault, lambda x, **k: original(x, **{**k, "align_corners": True}))
    else:
        patch.setattr(functional, fault, lambda x, **_: original(x))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_typical_mistake_breaks_the_comparison(
    golden: VisionGolden, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, projector = golden.vision(torch.float32)
    plant(FAULTS[fault], tower, monkeypatch)
    errors = {
        name: relative(projector(tower(golden.pixels(name), [image.grid])), golden.fp32[f"{name}.projector"])
        for name, image in golden.inputs.items()
    }
    assert max(errors.values()) > 4 * RELATIVE_FP32, f"{fault} goes unseen: {errors}"


def byte_tokenizer() -> Tokenizer:
    """One token per byte and the markers behind them: enough to see a prompt's text."""
    reserved = {256 + i: name for i, name in enumerate(MARKER_NAMES.values())}
    pieces = {i: bytes([i]) for i in range(256)}
    return Tokenizer(
        Vocabulary(
            encode=lambda text: list(text.encode()),
            pieces=pieces,
            reserved=reserved,
            size=256 + len(reserved),
            source=Path("bytes"),
        )
    )


def prompt_of(image: ImageInput) -> str:
    """The user message that holds one picture and nothing else, as text."""
    tokenizer = byte_tokenizer()
    prompt = render_chat([Message("user", [ImagePart()])], tokenizer, [image])
    (span,) = prompt.image_spans
    pads = prompt.token_ids[span.start : span.start + span.count]
    assert set(pads) == {tokenizer.markers.media_pad}
    assert prompt.token_ids.count(tokenizer.markers.media_pad) == image.num_tokens
    return tokenizer.decode(
        [*prompt.token_ids[: span.start + 1], *prompt.token_ids[span.start + span.count :]], show_markers=True
    )


def test_prompt_text_names_the_original_size_as_published(golden: VisionGolden, golden_dir: Path) -> None:
    before = '<|open|>message role="user"<|sep|>'
    after = "<|close|>message<|sep|><|end_of_msg|>"
    for name, facts in golden.facts["images"].items():
        assert before + facts["prompt_text"] + after in prompt_of(golden.inputs[name]), name
    for spec, expected in size_table(golden_dir):
        plan = plan_image(expected["width"], expected["height"], spec)
        image = ImageInput(
            patches=np.zeros((0, 3, spec.patch_size, spec.patch_size), np.uint8),
            grid=plan.grid,
            size=(expected["width"], expected["height"]),
            num_tokens=plan.num_tokens,
            key="",
        )
        assert before + expected["prompt_text"] + after in prompt_of(image)
