"""Real ranks over the tiny K3 checkpoint with expected outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))  # its stand-ins serve here too


@pytest.fixture(scope="session")
def golden_root(pytestconfig) -> Path:
    return pytestconfig.getoption("--golden")


@pytest.fixture(scope="session")
def prompts(golden_root):
    return json.loads((golden_root / "golden" / "text.json").read_text())["prompts"]


@pytest.fixture(scope="session")
def picture_prompt(golden_root):
    """Prompt, images and expected tokens of the prompt with two pictures."""
    from workbench.serving import ImageProcessor
    from workbench.serving.inputs import expand_images
    from workbench.spec import read_spec

    spec = read_spec(golden_root)
    golden = json.loads((golden_root / "golden" / "vision.json").read_text())
    processor = ImageProcessor(spec.image)
    images = [processor.process(golden_root / golden["images"][n]["file"]) for n in golden["prompt"]["images_in_order"]]
    prompt = expand_images(golden["prompt"]["token_ids"], images, media_pad=spec.tokens.media)
    return prompt, images, golden["prompt"]["greedy_fp32"]
