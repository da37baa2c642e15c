"""What several tests of real ranks need."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from serving_fakes import byte_tokenizer

from workbench.serving import Engine, GenerationRequest, MultimodalInferenceService, SamplingParams
from workbench.serving.steps import Runner


def greedy_tokens(runner: Runner, prompts: Iterable[dict], *, step_tokens: int = 512) -> list[list[int]]:
    """Greedy continuations of prompts that run together."""
    engine = Engine(runner, step_tokens=step_tokens)
    requests = [
        GenerationRequest(token_ids=tuple(prompt["token_ids"]), sampling=SamplingParams(max_tokens=16))
        for prompt in prompts
    ]
    generations = [engine.submit(request) for request in requests]
    while engine.step_once():
        engine.scheduler.check()
    return [[event.token_id for event in generation] for generation in generations]


def picture_tokens(runner, picture_prompt, *, step_tokens: int = 512) -> list[int]:
    """Greedy continuation of the prompt with two pictures, through the service."""
    prompt, images, _ = picture_prompt
    tokenizer = byte_tokenizer(runner.info.vocab_size, runner.spec.tokens.bos)
    with MultimodalInferenceService(runner, tokenizer, None, step_tokens=step_tokens) as service:
        return list(service.generate(prompt, images, SamplingParams(max_tokens=16)).result().token_ids)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet collected counts as gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: Iterable[int], limit_s: float) -> float:
    """Seconds until all processes are gone. Fails after `limit_s`."""
    pids, began = list(pids), time.monotonic()
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() - began < limit_s, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)
    return time.monotonic() - began


def environment(pid: int) -> str:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().decode("utf-8", "replace")


def command_line(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode("utf-8", "replace")


def session_of(pid: int) -> int:
    return os.getsid(pid)
