"""Greedy answers in batches equal those made one token at a time without a cache; and the loop can learn."""

from __future__ import annotations

import time

import numpy as np
import torch
from tiny_runs import tiny_config, tiny_tokenizer

from workbench.nn.batch import TokenBatch
from workbench.nn.model import Model
from workbench.parallel import attach, build_stage, single_context
from workbench.placement import Layout
from workbench.serving.inputs import ImageProcessor, Message, normalise, parse_answer, render_chat
from workbench.training.answers import MAX_NEW_TOKENS, answer_items
from workbench.training.data.chats import Chat
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import ExamItem, fact_exam, picture_exam
from workbench.training.data.samples import Sample, pack_samples, tokenise_chat
from workbench.training.data.scenes import scene_image
from workbench.training.initial import initialise
from workbench.training.masters import Masters
from workbench.training.optimiser import Optimiser
from workbench.training.step import compute_gradients

CONFIG = tiny_config(steps=200, adam_lr=8e-3, muon_lr=8e-3)
SPEC = CONFIG.spec()


def fresh_model() -> Model:
    model = build_stage(SPEC, Layout(), 0, precision="fp32")
    model.to_empty(device="cpu")
    initialise(model, Layout(), 0, CONFIG.seed)
    attach(model, single_context())
    return model


def items() -> list[ExamItem]:
    pictures = picture_exam(1, kinds=("colour", "digit", "word", "count", "position"))
    return [*pictures, *fact_exam(read_facts())[:40:13]][:8]


def as_sample(item: ExamItem) -> Sample:
    assert SPEC.image is not None
    chat = Chat(
        kind="picture" if item.scene else "facts",
        messages=(*item.messages, Message("assistant", item.answer)),
        scenes=(item.scene,) if item.scene else (),
    )
    return tokenise_chat(chat, tiny_tokenizer(), ImageProcessor(SPEC.image))


@torch.no_grad()
def slow_answer(model: Model, item: ExamItem, most: int) -> str:
    """The whole sequence anew for every token."""
    assert SPEC.image is not None
    tokenizer = tiny_tokenizer()
    images = [ImageProcessor(SPEC.image).process(scene_image(item.scene))] if item.scene else []
    prompt = render_chat(item.messages, tokenizer, images)
    ids, new = list(prompt.token_ids), []
    rows = [r for span in prompt.image_spans for r in range(span.start, span.start + span.count)]
    features = None
    if images:
        pixels = torch.from_numpy(normalise(np.concatenate([i.patches for i in images]), SPEC.image))
        features = model.encode_images(pixels, [i.grid for i in images])
    while len(new) < most:
        whole = TokenBatch.whole([ids])
        batch = TokenBatch(
            token_ids=whole.token_ids,
            lengths=whole.lengths,
            starts=(0,),
            slots=(0,),
            logit_rows=whole.logit_rows,
            image_rows=torch.tensor(rows) if images else None,
            image_features=features,
        )
        token = int(model(batch).argmax())
        new.append(token)
        ids.append(token)
        if token in tokenizer.stop_ids:
            break
    return parse_answer(new, tokenizer).response


def test_eight_samples_are_learnt_by_heart_and_said_again() -> None:
    """Loss near zero within seconds, and the answers then come out word for word, batched or one by one."""
    exam, ctx, started = items(), single_context(), time.monotonic()
    model = fresh_model()
    pack = pack_samples([as_sample(item) for item in exam])
    masters = Masters(model, ctx)
    masters.take_from_model()
    optimiser = Optimiser(masters, CONFIG.optimiser)
    losses: list[float] = []
    while not losses or (losses[-1] > 0.01 and len(losses) < CONFIG.steps):
        masters.publish()
        losses.append(compute_gradients(model, masters, ctx, [pack]).mean_loss)
        optimiser.step(1.0)
    assert losses[0] > 5
    assert losses[-1] <= 0.01, f"after {len(losses)} steps and {time.monotonic() - started:.0f} s: {losses[::20]}"
    masters.publish()

    replies = answer_items(model, ctx, tiny_tokenizer(), exam, batch_size=3)
    assert replies == [item.answer for item in exam]
    assert [slow_answer(model, item, 60) for item in exam[::3]] == replies[::3]


def test_an_untrained_model_says_the_same_batched_and_alone() -> None:
    model, exam = fresh_model(), items()[:4]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.5)  # less even logits
    batched = answer_items(model, single_context(), tiny_tokenizer(), exam, max_new_tokens=12)
    assert batched == [slow_answer(model, item, 12) for item in exam]


def test_no_questions_get_no_answers() -> None:
    assert answer_items(fresh_model(), single_context(), tiny_tokenizer(), []) == []


def test_every_answer_fits_into_the_limit() -> None:
    tokenizer = tiny_tokenizer()
    answers = [item.answer for item in picture_exam(60, kinds=("caption",))] + [fact.answer for fact in read_facts()]
    closing = 6  # of the channel and the message
    assert max(len(tokenizer.encode(answer)) for answer in answers) + closing <= MAX_NEW_TOKENS
