"""The real network behind the engine, in this process, against the expected outputs of the tiny K3 checkpoint."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from serving_fakes import byte_tokenizer

from workbench.base import ConfigError, LayoutError, RequestError
from workbench.parallel import single_context
from workbench.placement import Layout
from workbench.serving import (
    Engine,
    GenerationRequest,
    ImageProcessor,
    ImageSpan,
    LocalRunner,
    MultimodalInferenceService,
    SamplingParams,
    SequenceStep,
)
from workbench.serving import runner as runner_module
from workbench.serving.inputs import expand_images
from workbench.serving.runner import build_batch
from workbench.serving.steps import runner_info
from workbench.spec import read_spec

LOGITS_LIMIT = 1e-3  # absolute, as tests/golden/k3-tiny-a allows for a float32 implementation


@pytest.fixture(scope="module")
def root(pytestconfig):
    return pytestconfig.getoption("--golden")


@pytest.fixture(scope="module")
def prompts(root):
    return json.loads((root / "golden" / "text.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def runner(root):
    return LocalRunner.load(root, precision="fp32", num_slots=5, max_tokens=200)


@pytest.fixture(scope="module")
def picture_prompt(root, runner):
    """Prompt, images and expected tokens of the prompt with two pictures."""
    golden = json.loads((root / "golden" / "vision.json").read_text())
    processor = ImageProcessor(runner.rank.spec.image)
    images = [processor.process(root / golden["images"][n]["file"]) for n in golden["prompt"]["images_in_order"]]
    prompt = expand_images(golden["prompt"]["token_ids"], images, media_pad=runner.rank.spec.tokens.media)
    assert list(prompt.token_ids) == golden["prompt"]["token_ids_with_placeholders_expanded"]
    return prompt, images, golden["prompt"]["greedy_fp32"]


def greedy(ids, max_tokens=16, **options) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(ids), sampling=SamplingParams(max_tokens=max_tokens, **options))


def run(runner, requests, step_tokens=512) -> list[list[int]]:
    engine = Engine(runner, step_tokens=step_tokens)
    generations = [engine.submit(request) for request in requests]
    while engine.step_once():
        pass
    return [[event.token_id for event in generation] for generation in generations]


def test_all_prompts_together_give_the_expected_tokens(runner, prompts):
    requests = [greedy(prompt["token_ids"]) for prompt in prompts.values()]
    assert run(runner, requests) == [prompt["greedy_fp32"] for prompt in prompts.values()]


def test_each_prompt_alone_gives_the_expected_tokens_in_a_slot_used_before(runner, prompts):
    for prompt in reversed(prompts.values()):
        assert run(runner, [greedy(prompt["token_ids"])]) == [prompt["greedy_fp32"]]


@pytest.mark.parametrize("step_tokens", [5, 16, 63, 64, 65])
def test_prompts_read_in_chunks_give_the_expected_tokens(runner, prompts, step_tokens):
    requests = [greedy(prompt["token_ids"]) for prompt in prompts.values()]
    assert run(runner, requests, step_tokens) == [prompt["greedy_fp32"] for prompt in prompts.values()]


def test_logits_of_whole_prompts_match_the_reference(root, runner, prompts):
    expected = load_file(root / "golden" / "text_fp32.safetensors")
    names = ["p1", "p7", "p64"]
    steps = tuple(
        SequenceStep(slot=slot, start=0, token_ids=tuple(prompts[name]["token_ids"])) for slot, name in enumerate(names)
    )
    for use_cache in (True, False):
        logits, cache = runner.rank.logits_of(steps, use_cache=use_cache)
        assert (cache is not None) == use_cache
        for name, part in zip(names, logits.split([len(step.token_ids) for step in steps]), strict=True):
            worst = (part - expected[f"{name}.logits"]).abs().max()
            assert worst < LOGITS_LIMIT, f"{name}, cache {use_cache}: {worst:.2e}"


@pytest.mark.parametrize("step_tokens", [7, 512])
def test_the_prompt_with_two_pictures_gives_the_expected_tokens_through_the_service(
    runner, picture_prompt, step_tokens
):
    prompt, images, expected = picture_prompt
    tokenizer = byte_tokenizer(runner.info.vocab_size, runner.rank.spec.tokens.bos)
    with MultimodalInferenceService(runner, tokenizer, None, step_tokens=step_tokens) as service:
        answer = service.generate(prompt, images, SamplingParams(max_tokens=16)).result()
        assert list(answer.token_ids) == expected
        assert answer.usage.image_tokens == sum(image.num_tokens for image in images)
        service.infer("text only", max_tokens=1)
    assert runner.rank.features == {}, "features were dropped"


def test_features_spliced_one_row_off_are_noticed(runner, picture_prompt, monkeypatch):
    prompt, images, expected = picture_prompt
    rows_of = runner_module._rows_of

    def shifted(features, key, first, count):
        return rows_of(features, key, first, count).roll(1, 0)

    monkeypatch.setattr(runner_module, "_rows_of", shifted)
    tokenizer = byte_tokenizer(runner.info.vocab_size, runner.rank.spec.tokens.bos)
    with MultimodalInferenceService(runner, tokenizer, None) as service:
        answer = service.generate(prompt, images, SamplingParams(max_tokens=16)).result()
    assert list(answer.token_ids) != expected


def test_sixty_four_requests_at_once_are_answered_as_each_alone(runner):
    rng = random.Random(3)
    requests = [greedy([rng.randrange(500) for _ in range(rng.randrange(1, 12))], max_tokens=3) for _ in range(64)]
    together = run(runner, requests, step_tokens=24)
    for request, tokens in zip(requests[::4], together[::4], strict=True):
        assert run(runner, [request]) == [tokens]
    assert len({tuple(tokens) for tokens in together}) > 55, "prompts lead to different answers"


def test_sampled_tokens_do_not_depend_on_company_or_chunks(runner, prompts):
    sampled = greedy(prompts["p7"]["token_ids"], max_tokens=12, temperature=1.0, top_p=0.95, seed=5)
    others = [greedy(prompts[name]["token_ids"], temperature=0.9, seed=5) for name in ("p1", "p64")]
    alone = run(runner, [sampled])[0]
    assert run(runner, [*others, sampled], step_tokens=9)[-1] == alone
    another_seed = GenerationRequest(
        token_ids=sampled.token_ids, sampling=SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=6)
    )
    assert run(runner, [another_seed])[0] != alone


def test_a_batch_packs_sequences_and_marks_rows(root):
    spec = read_spec(root)
    features = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2, 3)}
    pad = spec.tokens.pad
    steps = (
        SequenceStep(slot=4, start=10, token_ids=(pad, 6, 7), sample=SamplingParams()),
        SequenceStep(
            slot=1,
            start=2,
            token_ids=(1, 2, pad, 3),
            images=(ImageSpan(key="a", row=0, first=2, count=2), ImageSpan(key="b", row=3, first=0, count=1)),
            has_images=True,
        ),
        SequenceStep(slot=0, start=0, token_ids=(9,), sample=SamplingParams()),
    )
    batch = build_batch(spec, steps, features)
    assert batch.token_ids.tolist() == [pad, 6, 7, 1, 2, pad, 3, 9]
    assert (batch.lengths, batch.starts, batch.slots) == ((3, 4, 1), (10, 2, 0), (4, 1, 0))
    assert batch.logit_rows.tolist() == [2, 7]
    assert batch.image_rows.tolist() == [3, 4, 6]
    assert batch.image_features.tolist() == [[6, 7, 8], [9, 10, 11], [1, 1, 1]]
    assert batch.zero_rows.tolist() == [5], "pad tokens are zeroed in prompts with images only"
    assert build_batch(spec, steps, None).image_rows is None, "later stages embed nothing"
    assert build_batch(spec, steps, features, all_logits=True).logit_rows.tolist() == list(range(8))
    assert build_batch(spec, (), features).num_tokens == 0


@pytest.mark.parametrize(("key", "count", "words"), [("absent", 1, "not encoded"), ("a", 5, "has 4 feature rows")])
def test_a_step_that_names_features_that_are_not_there_is_refused(root, key, count, words):
    step = SequenceStep(slot=0, start=0, token_ids=(1,) * 5, images=(ImageSpan(key=key, row=0, first=0, count=count),))
    with pytest.raises(RequestError, match=words):
        build_batch(read_spec(root), (step,), {"a": torch.zeros(4, 3)})


@pytest.mark.parametrize("size", [1, 50])
def test_a_picture_that_is_encoded_a_part_a_step_has_the_features_of_one_at_once(runner, picture_prompt, size):
    rank = runner.rank
    for image in picture_prompt[1]:
        runner.encode_images(0, [("whole", image.patches, image.grid)])
        num_rows = runner.info.encoding.num_rows(len(image.patches))
        for first in range(0, num_rows, size):
            assert "parts" not in rank.features
            patches = image.patches if first == 0 else image.patches[:0]
            runner.encode_rows(0, ("parts", patches, image.grid), first, min(num_rows, first + size))
        assert not rank.begun
        torch.testing.assert_close(rank.features["parts"], rank.features["whole"], rtol=1e-5, atol=1e-5)
        runner.drop_images(0, ["parts", "whole"])


def test_a_part_of_a_picture_that_does_not_go_on_from_the_last_is_refused(runner, picture_prompt):
    image = picture_prompt[1][0]
    own = ("parts", image.patches, image.grid)
    with pytest.raises(RequestError, match="cannot go on from row 3"):
        runner.encode_rows(0, own, 3, 5)
    runner.encode_rows(0, own, 0, 4)
    for first in (3, 5):
        with pytest.raises(RequestError, match=f"cannot go on from row {first}"):
            runner.encode_rows(0, own, first, 9)
    runner.drop_images(0, ["parts"])
    assert not runner.rank.begun


def test_sizes_beyond_the_model_are_refused(root):
    spec = read_spec(root)
    with pytest.raises(RequestError, match="the model's context"):
        runner_info(spec, Layout(), num_slots=1, max_tokens=spec.max_context + 1)
    with pytest.raises(RequestError, match="at least one slot"):
        runner_info(spec, Layout(), num_slots=0, max_tokens=5)
    with pytest.raises(ConfigError, match="auto, fp8, int8"):
        runner_info(spec, Layout(), num_slots=1, max_tokens=5, kv_dtype="fp4")


def test_a_local_runner_refuses_a_rank_of_a_larger_layout(runner):
    with pytest.raises(LayoutError, match="needs 2 ranks"):
        single_context(layout=Layout(tp=2))
    rank = runner.rank
    ctx, rank.ctx = rank.ctx, type("Ctx", (), {"layout": Layout(tp=2)})()
    try:
        with pytest.raises(LayoutError, match="Use a Deployment"):
            LocalRunner(rank)
    finally:
        rank.ctx = ctx
