"""Kimi-K2.5: pictures cut by its own budget, asked for over HTTP in a chat of its template."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import config_of
from http_served import CHAT, Served
from PIL import Image
from safetensors.torch import save_file

from workbench.base import ConfigError
from workbench.nn import TokenBatch
from workbench.serving import ImageProcessor, LocalRunner, open_service
from workbench.serving.http import HttpServer, ServerSettings
from workbench.serving.inputs import ImagePart, Message, TextPart, normalise, plan_image, render_chat
from workbench.spec import ModelSpec, parse_config, published_tensors

TEMPLATES = Path(__file__).resolve().parents[1] / "golden" / "templates"
IDS = {x["content"]: x["id"] for x in json.loads((TEMPLATES / "tokenizer.json").read_text())["added_tokens"]}
MEDIA: dict[str, Any] = {
    "in_patch_limit": 12,
    "patch_limit_on_one_side": 8,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fixed_output_tokens": None,
    "patch_size": 14,
    "merge_kernel_size": 2,
}


def config() -> dict[str, Any]:
    end = IDS["<|im_end|>"]
    own = config_of("kimi_k2 wrapped", vocab_size=320, num_hidden_layers=3, eos_token_id=end)
    del own["text_config"]["quantization_config"]
    return own | {"media_placeholder_token_id": IDS["<|image_pad|>"], "eos_token_id": end}


def spec_with(**changes: object) -> ModelSpec:
    return parse_config(config(), {"media_proc_cfg": MEDIA | changes})


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8))


def test_k11_the_budget_is_that_of_its_preprocessor_file_and_nothing_is_assumed_without_one() -> None:
    assert parse_config(config()).image is None
    spec = spec_with(in_patch_limit=16384, patch_limit_on_one_side=512).image
    assert spec is not None
    # 300 x 300 patches: over 16,384, so shrunk by sqrt(16384 / 90000) to 2240 pixels; K3's budget keeps it.
    plan = plan_image(4200, 4200, spec)
    scale = (16384 / 300**2) ** 0.5
    assert plan.resized == (int(4200 * scale), int(4200 * scale))
    assert plan.grid == (1, -(-plan.resized[1] // 28) * 2, -(-plan.resized[0] // 28) * 2)
    with pytest.raises(ConfigError, match="transparent_bg_config"):
        spec_with(transparent_bg_config={"pattern": "chessboard"})


def test_k11_the_alpha_plane_is_dropped_before_anything_else() -> None:
    spec, image = spec_with().image, picture(50, 30, seed=1)
    assert spec is not None
    found = ImageProcessor(spec).process(image)
    pixels = np.zeros((56, 56, 3), np.uint8)
    pixels[:30, :50] = np.asarray(image)[..., :3]  # nothing is resized: 3 x 2 patches are within the budget
    assert found.grid == (1, 4, 4)
    for row in range(4):
        for column in range(4):
            cut = pixels[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14].transpose(2, 0, 1)
            assert np.array_equal(found.patches[row * 4 + column], cut)
    opaque = ImageProcessor(spec).process(image.convert("RGB"))
    assert np.array_equal(opaque.patches, found.patches)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(TEMPLATES / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": MEDIA}))
    g, tensors = torch.Generator().manual_seed(5), {}
    for tensor in published_tensors(spec_with()):
        values = torch.randn(tensor.shape, generator=g) / 4
        values = values + 1 if "norm" in tensor.param and not tensor.param.endswith("bias") else values
        tensors[tensor.name] = values.to(torch.float32 if tensor.dtype == "F32" else torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def directly(runner: LocalRunner, prompt: list[int], spans: list[tuple[int, int]], images: list[Any]) -> list[int]:
    """Greedy tokens of the model itself, features in the places of the images."""
    model, spec = runner.rank.model, runner.rank.spec
    assert spec.image is not None
    ids = list(prompt)
    with torch.no_grad():
        patches = torch.from_numpy(normalise(np.concatenate([x.patches for x in images]), spec.image))
        features = model.encode_images(patches, [x.grid for x in images])
        rows = torch.tensor([row for start, count in spans for row in range(start, start + count)])
        for _ in range(4):
            batch = TokenBatch.whole([ids])
            batch = TokenBatch(
                token_ids=batch.token_ids,
                lengths=batch.lengths,
                starts=batch.starts,
                slots=batch.slots,
                logit_rows=batch.logit_rows,
                image_rows=rows,
                image_features=features,
            )
            ids.append(int(model(batch)[0].argmax()))
    return ids[len(prompt) :]


def test_two_pictures_of_different_size_are_answered_over_http(root: Path) -> None:
    runner = LocalRunner.load(root, precision="fp32", num_slots=2, max_tokens=256)
    pictures = [picture(50, 30, seed=1), picture(100, 140, seed=2)]
    with open_service(runner, root) as service:
        processor = service.image_processor
        assert processor is not None
        images = [processor.process(x) for x in pictures]
        assert images[0].num_tokens != images[1].num_tokens
        message = Message("user", [TextPart("see "), ImagePart(), TextPart(" and "), ImagePart()])
        prompt = render_chat([message], service.tokenizer, images)
        assert [span.count for span in prompt.image_spans] == [x.num_tokens for x in images]
        spans = [(span.start, span.count) for span in prompt.image_spans]
        expected = directly(runner, list(prompt.token_ids), spans, images)
        others = [images[0], processor.process(picture(100, 140, seed=3))]
        assert expected != directly(runner, list(prompt.token_ids), spans, others)
        settings = ServerSettings(model="k2.5", port=0, drain_timeout_s=5.0)
        with HttpServer(service, settings) as server:
            client = Served(service, server, int(server.url.removesuffix("/v1").rpartition(":")[2]))
            content: list[dict[str, Any]] = [{"type": "text", "text": "see "}, part(pictures[0])]
            content += [{"type": "text", "text": " and "}, part(pictures[1])]
            messages = [{"role": "user", "content": content}]
            fields = {"model": "k2.5", "messages": messages, "temperature": 0, "max_tokens": 4, "logprobs": True}
            got = client.post(fields | {"ignore_eos": True, "seed": 1}, CHAT)
    assert got.status == 200, got.body
    assert got.json["usage"]["prompt_tokens"] == len(prompt.token_ids)
    assert got.json["choices"][0]["message"]["content"] == service.tokenizer.decode(expected)


def part(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
