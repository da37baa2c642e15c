"""Expected vision outputs of a golden folder, and the vision weights that produced them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from workbench.nn.projector import Projector
from workbench.nn.vision import VisionTower
from workbench.serving.inputs import ImageInput, ImageProcessor, normalise
from workbench.spec import ImageSpec, ModelSpec, published_tensors, read_json, read_spec

RELATIVE_FP32 = 2e-5  # the goldens' own limit for a float32 implementation


@dataclass
class VisionGolden:
    """Expected outputs of one folder, and the vision weights that produced them."""

    root: Path

    @cached_property
    def spec(self) -> ModelSpec:
        return read_spec(self.root)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.root / "golden/vision.json").read_text())

    @cached_property
    def fp32(self) -> dict[str, Tensor]:
        return load_file(self.root / "golden/vision_fp32.safetensors")

    @cached_property
    def image_spec(self) -> ImageSpec:
        assert self.spec.image is not None
        return self.spec.image

    @cached_property
    def inputs(self) -> dict[str, ImageInput]:
        processor = ImageProcessor(self.image_spec)
        return {name: processor.process(self.root / facts["file"]) for name, facts in self.facts["images"].items()}

    def pixels(self, name: str) -> Tensor:
        return torch.from_numpy(normalise(self.inputs[name].patches, self.image_spec))

    def vision(self, dtype: torch.dtype) -> tuple[VisionTower, Projector]:
        assert self.spec.vision is not None
        assert self.spec.projector is not None
        tower, projector = VisionTower(self.spec.vision, dtype), Projector(self.spec.projector, dtype)
        index = read_json(self.root / "model.safetensors.index.json")["weight_map"]
        assert isinstance(index, dict)
        weights: dict[str, Tensor] = {}
        for tensor in published_tensors(self.spec):
            if tensor.role in ("vision", "projector"):
                with safe_open(self.root / index[tensor.name], framework="pt") as file:
                    weights[tensor.param] = file.get_tensor(tensor.name).to(dtype)
        for prefix, module in (("vision.", tower), ("projector.", projector)):
            own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            module.load_state_dict(own, strict=True)
        return tower.requires_grad_(False), projector.requires_grad_(False)


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (tuple(found.shape), tuple(expected.shape))
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_close(name: str, found: Tensor, expected: Tensor, limit: float = RELATIVE_FP32) -> None:
    error = relative(found, expected)
    worst = (found.double() - expected.double()).abs().max().item()
    assert error <= limit, f"{name}: relative {error:.2e}, max|d| {worst:.2e}, limit {limit:.1e}"
