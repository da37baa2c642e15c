"""Penalties, min-p, log probabilities and constraints of the sampler, each against the obvious loop."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_fakes import EchoRunner, ScriptRunner

from workbench.base import DeploymentError, RequestError
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.sampler import keep_mask, penalised, sample_row, sample_steps, unpacked
from workbench.serving.steps import SequenceStep

VOCAB = 11
patient = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
rows = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def packed(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def penalised_reference(row: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    out = list(row)
    for i in set(prompt) | set(answer):
        out[i] = out[i] / params.repetition_penalty if out[i] > 0 else out[i] * params.repetition_penalty
    for i in set(answer):
        out[i] -= params.presence_penalty + params.frequency_penalty * answer.count(i)
    return out


@patient
@given(rows, ids, ids, st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_do_what_the_obvious_loop_does(row, prompt, answer, repetition, presence, frequency):
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    found = penalised(torch.tensor(row), params, packed(prompt + answer), len(answer))
    assert found.tolist() == pytest.approx(penalised_reference(row, params, prompt, answer), abs=1e-4)


def test_presence_and_frequency_look_at_the_answer_and_repetition_at_the_prompt_too():
    row = torch.tensor([1.0, 0.9, 0.5, -5.0])
    history = packed([0, 1, 1])  # prompt [0], answer [1, 1]
    assert sample_row(row, SamplingParams(repetition_penalty=2.0), 2, history=history).token_id == 0
    assert sample_row(row, SamplingParams(repetition_penalty=3.0), 2, history=history).token_id == 2
    presence = SamplingParams(presence_penalty=0.3)
    assert penalised(row, presence, history, 2).tolist() == pytest.approx([1.0, 0.6, 0.5, -5.0])
    frequency = SamplingParams(frequency_penalty=0.3)
    assert penalised(row, frequency, history, 2).tolist() == pytest.approx([1.0, 0.3, 0.5, -5.0])


def test_the_reported_log_probability_is_that_of_the_model_whatever_is_done_to_the_choice():
    row = torch.tensor([3.0, 1.0, 0.0])
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, num_logprobs=2)
    token = sample_row(row, params, 1, history=packed([0]))
    total = math.exp(3) + math.exp(1) + 1
    assert token.token_id == 1
    assert token.logprob == pytest.approx(1 - math.log(total))
    assert [i for i, _ in token.top] == [0, 1]
    assert [p for _, p in token.top] == pytest.approx([3 - math.log(total), 1 - math.log(total)])


def test_as_many_log_probabilities_are_told_as_asked_for_of_equal_ones_those_with_smaller_ids():
    row = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert sample_row(row, SamplingParams(), 0).top == ()
    assert [i for i, _ in sample_row(row, SamplingParams(num_logprobs=3), 0).top] == [1, 2, 3]
    assert len(sample_row(row, SamplingParams(num_logprobs=20), 0).top) == 4


@patient
@given(rows, st.floats(0, 1), st.sampled_from([0, 1, 4]), st.sampled_from([0.5, 1.0]))
def test_min_p_drops_what_is_unlikely_beside_the_likeliest_and_never_all(row, min_p, top_k, top_p):
    scaled = torch.tensor(row).double()
    scaled -= scaled.max()
    kept = keep_mask(scaled, top_k, top_p, min_p)
    expected = keep_mask(scaled, top_k, top_p) & torch.tensor([math.exp(v) >= min_p for v in scaled.tolist()])
    near = torch.tensor([abs(math.exp(v) - min_p) < 1e-9 for v in scaled.tolist()])
    assert bool(((kept == expected) | near).all())
    assert bool(kept[int(torch.argmax(scaled))])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_ids_are_chosen_however_unlikely(temperature):
    row = torch.tensor([9.0, 8.0, 7.0, -9.0, -8.5, 6.0, 5.0, 4.0, -7.0])
    allowed = np.packbits([i in (3, 8) for i in range(32)], bitorder="little").tobytes()
    assert unpacked(allowed, 9).tolist() == [i in (3, 8) for i in range(9)]
    drawn = {
        sample_row(row, SamplingParams(temperature=temperature, seed=5), i, allowed=allowed).token_id for i in range(60)
    }
    assert drawn == ({8} if temperature == 0 else {3, 8})


def test_a_constraint_that_leaves_nothing_is_named():
    with pytest.raises(DeploymentError, match="no token may be chosen"):
        sample_row(torch.zeros(9), SamplingParams(), 0, allowed=bytes(4))


def test_rows_meet_their_own_steps_and_reading_steps_have_none():
    logits = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]])
    free = SequenceStep(slot=0, start=1, token_ids=(5,), sample=SamplingParams(), step_idx=1)
    tired = SequenceStep(
        slot=1, start=1, token_ids=(5,), sample=SamplingParams(presence_penalty=1.0), step_idx=1, history=packed([5, 0])
    )
    logits = torch.cat([logits, torch.zeros(2, 3)], 1)
    logits = torch.nn.functional.pad(logits, (0, 1), value=-9.0)
    assert [token.token_id for token in sample_steps(logits, [free, tired])] == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [{"min_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"presence_penalty": math.inf}, {"num_logprobs": 21},
     {"frequency_penalty": "1"}, {"num_logprobs": True}, {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8}],
)  # fmt: skip
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(RequestError):
        SamplingParams(**wrong)


def test_an_answer_does_not_end_before_it_is_long_enough_unless_nothing_else_may_come():
    row, only_the_end = torch.tensor([0.5, 3.0, 1.0, 2.0]), bytes([0b0010, 0, 0, 0])
    params = SamplingParams(min_tokens=2, stop_ids=(1, 3))
    assert [sample_row(row, params, idx).token_id for idx in range(3)] == [2, 2, 1]
    assert sample_row(row, params, 0, allowed=only_the_end).token_id == 1
    warm = SamplingParams(min_tokens=2, stop_ids=(1, 3), temperature=2.0)
    drawn = [{sample_row(row, replace(warm, seed=seed), idx).token_id for seed in range(200)} for idx in (1, 2)]
    assert drawn == [{0, 2}, {0, 1, 2, 3}]


def test_the_history_reaches_the_runner_step_by_step_only_where_it_is_needed():
    runner = ScriptRunner([7, 8, 9])
    engine = Engine(runner, step_tokens=4)
    plain = engine.submit(GenerationRequest(token_ids=(1, 2), sampling=SamplingParams(max_tokens=3)))
    tired = engine.submit(
        GenerationRequest(token_ids=(3, 4, 5, 6, 1), sampling=SamplingParams(max_tokens=3, presence_penalty=0.5))
    )
    while engine.step_once():
        pass
    assert len(list(plain)) == len(list(tired)) == 3
    histories: dict[bool, list[list[int]]] = {True: [], False: []}
    for inputs in runner.steps:
        for step in inputs[0]:
            if step.sample is not None:
                assert len(step.history) % 4 == 0
                needed = step.sample.needs_history
                histories[needed].append(np.frombuffer(step.history, np.int32).tolist())
            else:
                assert step.history == b""
    assert histories[False] == [[], [], []]
    assert histories[True] == [[3, 4, 5, 6, 1], [3, 4, 5, 6, 1, 7], [3, 4, 5, 6, 1, 7, 8]]


def test_the_echo_runner_ignores_what_it_does_not_need():
    engine = Engine(EchoRunner())
    generation = engine.submit(GenerationRequest(token_ids=(4,), sampling=SamplingParams(max_tokens=2, min_p=0.5)))
    while engine.step_once():
        pass
    assert [event.token_id for event in generation] == [4, 4]
