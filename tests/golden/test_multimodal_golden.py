"""A prompt with pictures through the whole model, against the published network; for any golden folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from golden_model import load_golden_model
from golden_vision import VisionGolden, assert_close, relative
from text_capture import hooked
from torch import Tensor

from workbench.nn.batch import TokenBatch
from workbench.nn.model import Model
from workbench.serving.inputs import PromptTokens, expand_images

LOGITS_ABSOLUTE = 1e-3
BF16_RATIO = 2.0  # our bf16 error and the reference's are two draws of the same rounding noise


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> VisionGolden:
    return VisionGolden(golden_dir)


@pytest.fixture(scope="module")
def model(golden_dir: Path) -> Model:
    return load_golden_model(golden_dir)


@pytest.fixture(scope="module")
def prompt(golden: VisionGolden) -> PromptTokens:
    """The golden prompt, one pad token per picture as published, expanded by us."""
    facts = golden.facts["prompt"]
    images = [golden.inputs[name] for name in facts["images_in_order"]]
    assert golden.spec.tokens.media is not None
    return expand_images(facts["token_ids"], images, media_pad=golden.spec.tokens.media)


def features(golden: VisionGolden, model: Model) -> Tensor:
    """Rows of all pictures of the prompt, in order; their sizes differ."""
    names = golden.facts["prompt"]["images_in_order"]
    grids = [golden.inputs[name].grid for name in names]
    assert len(set(grids)) == len(grids), "equal pictures would hide a mix-up"
    return model.encode_images(torch.cat([golden.pixels(name) for name in names]), grids)


def batch_of(prompt: PromptTokens, rows: Tensor, pad: int, answer: list[int] | None = None) -> TokenBatch:
    ids = torch.tensor([*prompt.token_ids, *(answer or [])])
    places = torch.cat([torch.arange(span.start, span.start + span.count) for span in prompt.image_spans])
    return TokenBatch(
        token_ids=ids,
        lengths=(len(ids),),
        starts=(0,),
        slots=(0,),
        logit_rows=torch.arange(len(ids)),
        image_rows=places,
        image_features=rows,
        zero_rows=(ids == pad).nonzero().flatten(),
    )


def captured(golden: VisionGolden, model: Model, prompt: PromptTokens, rows: Tensor) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    with hooked(model, values):
        values["logits"] = model(batch_of(prompt, rows, golden.spec.tokens.pad))
    values["inputs_embeds"] = values["L0.attn_in"]  # nothing is saved before layer 0, so it reads the embeddings
    return values


def test_one_pad_token_per_picture_expands_to_the_published_ids(golden: VisionGolden, prompt: PromptTokens) -> None:
    facts = golden.facts["prompt"]
    assert list(prompt.token_ids) == facts["token_ids_with_placeholders_expanded"]
    assert len(prompt.token_ids) == facts["length_after_merge"]
    assert len(prompt.image_spans) == len(facts["images_in_order"]) >= 2
    for span, name in zip(prompt.image_spans, facts["images_in_order"], strict=True):
        assert (span.key, span.count) == (golden.inputs[name].key, facts_of(golden, name)["tokens"])


def facts_of(golden: VisionGolden, name: str) -> dict[str, object]:
    return golden.facts["images"][name]


def test_merged_embeddings_sums_and_logits_match_in_fp32(
    golden: VisionGolden, model: Model, prompt: PromptTokens
) -> None:
    values = captured(golden, model, prompt, features(golden, model))
    expected = {name.removeprefix("mm."): x for name, x in golden.fp32.items() if name.startswith("mm.")}
    assert {"inputs_embeds", "logits", "final_hidden", "L0.sum"} <= set(expected)
    for name, tensor in expected.items():
        assert_close(f"mm.{name}", values[name][-tensor.shape[0] :], tensor)
    assert (values["logits"] - expected["logits"]).abs().max() <= LOGITS_ABSOLUTE


def test_greedy_answer_about_the_pictures_is_the_published_one(
    golden: VisionGolden, model: Model, prompt: PromptTokens
) -> None:
    expected, rows, answer = golden.facts["prompt"]["greedy_fp32"], features(golden, model), []
    for _ in expected:
        logits = model(batch_of(prompt, rows, golden.spec.tokens.pad, answer))
        answer.append(int(logits[-1].argmax()))
    assert answer == expected


def test_pictures_in_the_wrong_order_are_seen(golden: VisionGolden, model: Model, prompt: PromptTokens) -> None:
    rows = features(golden, model)
    swapped = torch.cat(rows.split([span.count for span in prompt.image_spans])[::-1])
    values = captured(golden, model, prompt, swapped)
    assert relative(values["inputs_embeds"], golden.fp32["mm.inputs_embeds"]) > 0.1
    assert relative(values["logits"], golden.fp32["mm.logits"]) > 1e-3


def test_pad_tokens_beside_pictures_have_no_embedding(golden: VisionGolden, model: Model, prompt: PromptTokens) -> None:
    pad, rows = golden.spec.tokens.pad, features(golden, model)
    padded = PromptTokens((*prompt.token_ids, pad, pad), prompt.image_spans)
    embeds = captured(golden, model, padded, rows)["inputs_embeds"]
    assert not embeds[-2:].any()
    kept = dataclasses.replace(batch_of(padded, rows, pad), zero_rows=None)
    assert relative(model(kept)[-1], model(batch_of(padded, rows, pad))[-1]) > 0, "zeroing them changes nothing"
    assert_close("before the pads", embeds[:-2], golden.fp32["mm.inputs_embeds"])


def test_bf16_stays_within_the_noise_of_bf16(golden: VisionGolden, golden_dir: Path, prompt: PromptTokens) -> None:
    model = load_golden_model(golden_dir, "bf16")
    values = captured(golden, model, prompt, features(golden, model))
    assert values["logits"].dtype == torch.bfloat16
    limit = BF16_RATIO * golden.facts["prompt"]["bf16_vs_fp32_logits_rel"]
    assert_close("mm.logits", values["logits"], golden.fp32["mm.logits"], limit)
