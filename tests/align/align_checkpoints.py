"""Copies of the tiny checkpoint with one thing changed, and models loaded from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from workbench.align import ParityPrompt, reference_patches
from workbench.loading import load_sharded_weights
from workbench.nn.model import Model

TINY = Path(__file__).resolve().parents[1] / "golden" / "k3-tiny-a"
TEXT_IDS = tuple(json.loads((TINY / "golden/text.json").read_text())["prompts"]["p64"]["token_ids"][:23])
VISION = json.loads((TINY / "golden/vision.json").read_text())


def load_fp32(root: Path = TINY) -> Model:
    return load_sharded_weights(root, precision="fp32", device="cpu").model.requires_grad_(False).eval()


def text_prompt(label: str = "text", length: int = len(TEXT_IDS)) -> ParityPrompt:
    return ParityPrompt(label=label, token_ids=TEXT_IDS[:length])


def picture_prompt() -> ParityPrompt:
    names = VISION["prompt"]["images_in_order"]
    return ParityPrompt(
        label="pictures",
        token_ids=tuple(VISION["prompt"]["token_ids_with_placeholders_expanded"]),
        images=tuple(reference_patches(TINY, TINY / VISION["images"][name]["file"]) for name in names),
    )


def damaged_copy(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A checkpoint like TINY in `folder` whose published tensor `name` went through `change`."""
    damaged_file = json.loads((TINY / "model.safetensors.index.json").read_text())["weight_map"][name]
    for path in TINY.iterdir():
        if path.is_file() and path.name != damaged_file:
            (folder / path.name).symlink_to(path)
    tensors = load_file(TINY / damaged_file)
    changed = change(tensors[name].clone())
    assert not torch.equal(changed, tensors[name]), "the planted fault changes nothing"
    save_file({**tensors, name: changed}, folder / damaged_file, metadata={"format": "pt"})
    return folder
