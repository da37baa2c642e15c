"""The published client against the server, end to end; runs where the `openai` package is installed."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
from http_served import MARKS, Served, said, served, thought
from serving_fakes import EchoRunner, ScriptRunner

from workbench.serving import open_service
from workbench.serving.http import HttpServer, ServerSettings

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
TINY, CIRCLE = ROOT / "data" / "k3-tiny", ROOT / "data" / "images" / "red_circle.png"
HI = [{"role": "user", "content": "hi"}]


def client_of(server: Served, **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.server.url, api_key="none", **{"max_retries": 0, **options})


def picture() -> dict[str, object]:
    data = base64.b64encode(CIRCLE.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "high"}}


def test_a_chat_whole_and_streamed():
    with served(said("grüße 한")) as server, client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["k3"]
        whole = client.chat.completions.create(model="k3", messages=HI, logprobs=True, top_logprobs=0, n=2)
        stream = client.chat.completions.create(
            model="k3", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    assert [choice.message.content for choice in whole.choices] == ["grüße 한"] * 2
    assert bytes(b for entry in whole.choices[0].logprobs.content for b in entry.bytes).decode() == "grüße 한"
    assert text == "grüße 한"
    assert usage.completion_tokens == 12
    assert whole.usage.completion_tokens == 24


def test_the_helper_for_streams_and_the_one_for_typed_answers():
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str

    with served(said('{"name": "Ada"}')) as server, client_of(server) as client:
        with client.chat.completions.stream(model="k3", messages=HI) as stream:
            assert stream.get_final_completion().choices[0].message.content == '{"name": "Ada"}'
        pytest.importorskip("llguidance")
        parsed = client.chat.completions.parse(model="k3", messages=HI, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ada")


def test_thinking_stop_strings_and_completions():
    with served(thought("well", "one STOP two")) as server, client_of(server) as client:
        answer = client.chat.completions.create(model="k3", messages=HI, stop=["STOP"], reasoning_effort="high")
        assert answer.choices[0].message.content == "one "
        assert answer.choices[0].message.model_extra == {"reasoning_content": "well"}
    with served(EchoRunner()) as server, client_of(server) as client:
        got = client.completions.create(model="k3", prompt=["ab", "xyz"], max_tokens=5, logprobs=1)
        assert [choice.text for choice in got.choices] == ["ababa", "xyzxy"]


def test_errors_have_their_classes_and_a_full_server_is_tried_again():
    runner = ScriptRunner([97], num_slots=1)
    with served(runner, max_waiting=0) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=HI)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="k3", messages=HI, max_tokens=10**6)
        assert caught.value.code == "context_length_exceeded"
        server.server.api.gate.num_inside += 1
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="k3", messages=HI, max_tokens=1)
        waits: list[str | None] = []

        def leave(response) -> None:
            waits.append(response.headers.get("retry-after"))
            server.server.api.gate.num_inside = 0

        patient = client_of(server, max_retries=2)
        patient._client.event_hooks["response"].append(leave)
        answer = patient.chat.completions.create(model="k3", messages=HI, max_tokens=2)
        assert answer.choices[0].message.content == "aa"
        assert waits[0] == "1", "the first answer told when to come back, and the client did"


def test_many_questions_at_once_by_the_asynchronous_client():
    async def ask_all(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = [client.completions.create(model="k3", prompt=f"secret-{n} ", max_tokens=30) for n in range(16)]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    with served(EchoRunner(num_slots=4)) as server:
        answers = asyncio.run(ask_all(server.server.url))
    assert answers == [(f"secret-{n} " * 9)[:30] for n in range(16)]


def test_a_real_checkpoint_answers_about_text_and_a_picture_as_the_service_does():
    pytest.importorskip("torch")
    from workbench.serving import LocalRunner

    content = [{"type": "text", "text": "What is it?"}, picture()]
    runner = LocalRunner.load(TINY, precision="fp32", max_tokens=512)
    with open_service(runner, TINY) as service:
        expected = service.infer("What is a shard?", max_tokens=8)
        with HttpServer(service, ServerSettings(model="k3-tiny", port=0)) as server:
            client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
            options = {"model": "k3-tiny", "max_tokens": 8, "temperature": 0}
            text = client.chat.completions.create(
                messages=[{"role": "user", "content": "What is a shard?"}], logprobs=True, top_logprobs=3, **options
            )
            seen = client.chat.completions.create(messages=[{"role": "user", "content": content}], **options)
            chunks = client.chat.completions.create(
                messages=[{"role": "user", "content": content}], stream=True, **options
            )
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            client.close()
    assert text.choices[0].message.content == expected.text
    for entry in text.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes, "at temperature 0 the likeliest token is taken"
        assert entry.top_logprobs[0].logprob == entry.logprob
    assert seen.usage.prompt_tokens_details.image_tokens > 0
    assert streamed == seen.choices[0].message.content


def test_a_failure_in_a_stream_reaches_the_caller_as_an_error():
    runner = EchoRunner()

    def gate() -> None:
        if len(runner.steps) == 3:
            raise RuntimeError("broken")

    runner.gate = gate
    with served(runner) as server, client_of(server) as client:
        stream = client.chat.completions.create(model="k3", messages=HI, stream=True)
        with pytest.raises(openai.APIError) as caught:
            json.dumps([chunk.id for chunk in stream])
        assert caught.value.code == "model_failed"
    assert MARKS.end_of_msg
