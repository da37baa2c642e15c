"""Answers held to a form: whatever the model would rather say, what comes out fits, and one failure stays one."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("llguidance")

import torch
from http_served import MARKS, TOKENIZER
from serving_fakes import EchoRunner, ScriptRunner, byte_tokenizer

from workbench.base import RequestError
from workbench.serving import ImageProcessor, MultimodalInferenceService
from workbench.serving.constraint import Grammars
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.sampler import sample_steps
from workbench.spec import ImageSpec

pytestmark = pytest.mark.timeout(120)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class NoiseRunner(EchoRunner):
    """Real sampling over random logits: without a constraint it says anything at all, structure included."""

    def step(self, inputs):
        super().step(inputs)
        out = []
        for steps in inputs:
            sampling = [step for step in steps if step.sample is not None]
            rows = [
                torch.randn(
                    TOKENIZER.vocab_size, generator=torch.Generator().manual_seed(step.sample.seed + step.step_idx)
                )
                for step in sampling
            ]
            out.append(sample_steps(torch.stack(rows), sampling) if rows else [])
        return out


def service_of(runner) -> MultimodalInferenceService:
    return MultimodalInferenceService(runner, TOKENIZER, ImageProcessor(ImageSpec()))


def bits(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("seed", range(6))
def test_noise_is_held_to_a_schema(seed):
    with service_of(NoiseRunner()) as service:
        answer = service.infer("hi", json_schema=SCHEMA, max_tokens=400, temperature=1.0, seed=seed)
        free = service.infer("hi", max_tokens=40, temperature=1.0, seed=seed)
    assert answer.finish_reason == "stop"
    document = json.loads(answer.text)
    assert set(document) == {"name", "age"}
    assert 0 <= document["age"] <= 99
    assert len(document["name"]) <= 6
    with pytest.raises(json.JSONDecodeError):
        json.loads(free.text)


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_held_to_an_expression_and_to_choices(seed):
    grammars = Grammars(TOKENIZER)
    with service_of(NoiseRunner()) as service:
        answer = service.infer("hi", regex=r"[ab]{3}-\d\d", max_tokens=40, temperature=1.0, seed=seed)
        assert re.fullmatch(r"[ab]{3}-\d\d", answer.text)
        prompt, _ = service.prepare("hi")
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, stop_ids=TOKENIZER.stop_ids)
        reply = service.generate(prompt, [], sampling, constraint=grammars.choice(["yes", "no", "é (a+b)"]))
        assert reply.result().text in ("yes", "no", "é (a+b)")


def test_the_answer_may_end_only_where_the_grammar_is_satisfied_and_then_must():
    constraint = Grammars(TOKENIZER).regex("ab?")
    assert bits(constraint.allowed()) == {ord("a")}
    constraint.accept(ord("a"))
    ends = {MARKS.end_of_msg, MARKS.eos, MARKS.close}
    assert bits(constraint.allowed()) == {ord("b")} | ends
    constraint.accept(MARKS.close)
    assert bits(constraint.allowed()) == {MARKS.end_of_msg, MARKS.eos}


def test_words_longer_than_the_way_are_not_allowed_and_those_inside_it_are():
    constraint = Grammars(TOKENIZER).regex("xw30[0-9] y")
    constraint.accept(ord("x"))
    allowed = bits(constraint.allowed())
    assert allowed == {ord("w"), *range(300, 310)}, "each of these words begins what may come"
    constraint.accept(305)
    assert bits(constraint.allowed()) == {ord("y")}


def test_thinking_is_free_and_the_response_is_held():
    script = [*b"no form at all", MARKS.close, *b"think", MARKS.sep, MARKS.open, *b"response", MARKS.sep]
    constraint = Grammars(TOKENIZER).regex("[0-9]", thinking=True)
    for token_id in script:
        assert constraint.allowed() == b""
        constraint.accept(token_id)
    assert bits(constraint.allowed()) == set(range(ord("0"), ord("9") + 1))


def test_another_answer_starts_from_the_beginning():
    constraint = Grammars(TOKENIZER).regex("ab")
    constraint.accept(ord("a"))
    other = constraint.anew()
    assert bits(other.allowed()) == {ord("a")}
    assert bits(constraint.allowed()) == {ord("b")}


def test_no_reserved_id_is_ever_part_of_a_text():
    tokenizer = byte_tokenizer()
    constraint = Grammars(tokenizer).regex(r"(.|\n)*")
    allowed = bits(constraint.allowed()) - {tokenizer.markers.close, *tokenizer.stop_ids}
    assert allowed
    assert not any(tokenizer.is_reserved(i) for i in allowed)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: g.regex("("),
        lambda g: g.regex("a" * 300_000),
        lambda g: g.json_schema({"type": "nonsense"}),
        lambda g: g.json_schema({"type": object}),
        lambda g: g.json_schema({"$ref": "file:///etc/passwd"}),
        lambda g: g.choice([]),
        lambda g: g.choice([""]),
    ],
)
def test_a_form_that_is_wrong_is_refused(make):
    with pytest.raises(RequestError):
        make(Grammars(TOKENIZER))


def test_a_constraint_that_gives_up_ends_its_own_request_alone():
    runner = ScriptRunner(list(b"zzzz"))  # never looks at what is allowed
    engine = Engine(runner)
    sampling = SamplingParams(max_tokens=4)
    constraint = Grammars(TOKENIZER).regex("ab")
    held = engine.submit(GenerationRequest(token_ids=(1,), sampling=sampling, constraint=constraint))
    free = engine.submit(GenerationRequest(token_ids=(1,), sampling=sampling))
    while engine.step_once():
        pass
    with pytest.raises(RequestError, match="held to its grammar"):
        list(held)
    assert len(list(free)) == 4
    assert engine.error is None
    assert engine.stats().num_free_slots == 3


def test_the_server_takes_the_usual_forms():
    pytest.importorskip("uvicorn")
    from http_served import ask, served

    with served(NoiseRunner(), prepare_threads=1) as server:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        got = server.post(ask(response_format=form, n=2, seed=3, max_tokens=400))
        documents = [choice["message"]["content"] for choice in got.json["choices"]]
        assert len(set(documents)) == 2
        assert all(set(json.loads(text)) == {"name", "age"} for text in documents)
        got = server.post(ask(structured_outputs={"choice": ["left", "right"]}, seed=1, stream=True))
        assert got.text in ("left", "right")
        got = server.post(ask(structured_outputs={"regex": "("}))
        assert (got.status, got.error["code"]) == (400, "invalid_value")
        assert server.post(ask(response_format={"type": "json_schema"})).status == 400
        assert server.post(ask(response_format={"type": "text"}, max_tokens=1)).status == 200
