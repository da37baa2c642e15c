"""The OpenAI-compatible routes over scripted runners: forms, channels, log probabilities, keys, figures."""

from __future__ import annotations

import base64
import io
import json
import logging
import threading
import time

import numpy as np
import pytest

pytest.importorskip("uvicorn")

from http_served import CHAT, MARKS, PLAIN, TOKENIZER, ask, said, served, thought, until
from PIL import Image
from serving_fakes import EchoRunner, ScriptRunner

from workbench.serving.http.settings import key_digest

pytestmark = pytest.mark.timeout(120)


def data_uri(seed: int = 1, width: int = 60, height: int = 31) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def picture_part(seed: int = 1) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_uri(seed)}}


@pytest.fixture(scope="module")
def ok_server():
    with served(said("ok")) as server:
        yield server


# forms


def test_special_tokens_are_shown_where_they_are_asked_for_and_every_token_has_its_text_then():
    ids = [*b"ok", MARKS.close, *b"response", MARKS.sep, MARKS.end_of_msg]
    with served(ids) as server:
        shown = server.post(ask(skip_special_tokens=False, logprobs=True)).json["choices"][0]
        usual = server.post(ask(skip_special_tokens=True)).json["choices"][0]
    names = [TOKENIZER.decode([token], show_markers=True) for token in ids if token not in TOKENIZER.stop_ids]
    assert shown["message"]["content"] == "".join(names)
    assert "<|close|>" in shown["message"]["content"]
    assert [entry["token"] for entry in shown["logprobs"]["content"]] == names
    assert usual["message"]["content"] == "ok"


def test_a_chat_is_answered_in_the_published_form():
    with served(said("grüße 한")) as server:
        got = server.post(ask())
    assert got.status == 200
    answer = got.json
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "k3")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "grüße 한", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert abs(answer["created"] - time.time()) < 60


def test_a_stream_says_the_same_piece_by_piece_and_ends_with_its_mark():
    with served(said("aé한b")) as server:
        whole = server.post(ask())
        got = server.post(ask(stream=True))
    deltas = [event["choices"][0]["delta"] for event in got.events]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "é"},
        {"content": "한"},
        {"content": "b"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in got.events] == [None] * 5 + ["stop"]
    assert got.text == whole.json["choices"][0]["message"]["content"]
    assert len({event["id"] for event in got.events}) == 1
    assert got.headers["x-accel-buffering"] == "no"


def test_usage_comes_last_without_choices_where_it_is_asked_for():
    with served(said("ok")) as server:
        got = server.post(ask(stream=True, stream_options={"include_usage": True}))
    *chunks, last = got.events
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


def test_every_chunk_says_how_many_tokens_there_are_where_that_is_asked_for():
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served(said("é!")) as server:
        got = server.post(ask(stream=True, stream_options=options))
        without = server.post(ask(stream=True, stream_options={"continuous_usage_stats": True}))
    opening, two_bytes, mark, closing, last = got.events
    counts = [event["usage"]["completion_tokens"] for event in got.events]
    assert counts == [0, 2, 3, 4, 4], "a character of two tokens comes in one chunk"
    assert [event["choices"][0]["delta"].get("content") for event in (opening, two_bytes, mark)] == ["", "é", "!"]
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert [event["usage"]["completion_tokens"] for event in without.events] == [0, 2, 3, 4]


def test_completions_continue_plain_text_and_token_ids_in_the_order_of_the_prompts():
    with served(EchoRunner()) as server:
        got = server.post({"prompt": ["abc", "xy"], "max_tokens": 4, "n": 2}, PLAIN)
        ids = server.post({"prompt": list(b"abc"), "max_tokens": 4, "stream": True}, PLAIN)
    assert [choice["text"] for choice in got.json["choices"]] == ["abca", "abca", "xyxy", "xyxy"]
    assert [choice["index"] for choice in got.json["choices"]] == [0, 1, 2, 3]
    assert got.json["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        "prompt_tokens_details": {"image_tokens": 0, "cached_tokens": 0},
    }
    assert "".join(event["choices"][0]["text"] for event in ids.events) == "abca"


def test_several_choices_stream_side_by_side_with_seeds_of_their_own():
    runner = ScriptRunner(said("ok"))
    with served(runner) as server:
        got = server.post(ask(n=3, stream=True, seed=2**64 - 2, temperature=1))
    texts = {i: "".join(c["delta"].get("content", "") for e in got.events for c in e["choices"] if c["index"] == i)
             for i in range(3)}  # fmt: skip
    assert texts == {0: "ok", 1: "ok", 2: "ok"}
    seeds = {step.sample.seed for inputs in runner.steps for step in inputs[0] if step.sample is not None}
    assert seeds == {2**64 - 2, 2**64 - 1, 0}


def test_thinking_comes_as_reasoning_content_and_goes_back_into_the_next_prompt():
    runner = ScriptRunner(thought("first this", "then that"))
    with served(runner) as server:
        got = server.post(ask(reasoning_effort="high"))
        stream = server.post(ask(thinking={"type": "enabled"}, stream=True))
        runner.steps.clear()
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "then that", "reasoning_content": "first this"},
            {"role": "user", "content": "on"},
        ]
        server.post(ask(messages=history, thinking={"type": "enabled"}, max_tokens=1))
    message = got.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("first this", "then that")
    deltas = [event["choices"][0]["delta"] for event in stream.events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "first this"
    assert stream.text == "then that"
    prompt = bytes(i for step in runner.steps[0][0] for i in step.token_ids if i < 256)
    assert b"thinkfirst thisthinkresponsethen thatresponse" in prompt


@pytest.mark.parametrize(("settings", "expected"), [({}, "so"), ({"thinking": False}, None)])
def test_a_service_that_thinks_first_does_so_here_too_unless_the_server_is_told_otherwise(settings, expected):
    runner = ScriptRunner(thought("so", "said"))
    with served(runner, thinking_first=True, **settings) as server:
        messages = [
            server.post(ask(**more)).json["choices"][0]["message"] for more in ({}, {"reasoning_effort": "none"})
        ]
    assert [message.get("reasoning_content") for message in messages] == [expected, None]


def test_the_effort_is_told_as_a_system_message_of_its_kind():
    runner = ScriptRunner(said("ok"))
    with served(runner) as server:
        server.post(ask(reasoning_effort="low", max_tokens=1))
        server.post(ask(reasoning_effort="none", max_tokens=1))
    first, second = (
        bytes(i for step in inputs[0] if step.start == 0 for i in step.token_ids if i < 256)
        for inputs in runner.steps
        if any(step.start == 0 for step in inputs[0])
    )
    assert first.startswith(b'message role="system" type="thinking-effort"lowmessage')
    assert b"thinking-effort" not in second


def test_pictures_take_their_rows_and_are_counted():
    runner = ScriptRunner(said("ok"))
    content = [{"type": "text", "text": "compare"}, picture_part(1), picture_part(2)]
    with served(runner) as server:
        got = server.post(ask(content))
    assert got.json["usage"]["prompt_tokens_details"]["image_tokens"] == 12
    assert len([call for call in runner.calls if call[0] == "encode"]) == 2


# log probabilities and stop strings


def test_log_probabilities_stand_beside_the_text_they_belong_to():
    with served(said("aé")) as server:
        got = server.post(ask(logprobs=True))
        stream = server.post(ask(logprobs=True, stream=True))
        plain = server.post({"prompt": "x", "logprobs": 1}, PLAIN)
    entries = got.json["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[97], [0xC3], [0xA9]]
    assert {entry["logprob"] for entry in entries} == {-0.25}
    streamed = [(e["choices"][0]["delta"], e["choices"][0]["logprobs"]) for e in stream.events]
    assert [len(lp["content"]) for delta, lp in streamed if delta.get("content")] == [1, 2]
    assert plain.json["choices"][0]["logprobs"]["token_logprobs"] == [-0.25] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_never_leaks_not_even_through_log_probabilities(stream):
    with served(said("good\nUser: never")) as server:
        got = server.post(ask(stop=["ab", "\nUser:"], logprobs=True, stream=stream))
    if stream:
        choices = [c for event in got.events for c in event["choices"]]
        text = got.text
        shown = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert choices[-1]["finish_reason"] == "stop"
    else:
        (choice,) = got.json["choices"]
        text, shown = choice["message"]["content"], choice["logprobs"]["content"]
        assert choice["finish_reason"] == "stop"
    assert text == "good"
    assert b"".join(bytes(entry["bytes"]) for entry in shown) == b"good"
    assert b"User" not in got.body


# what is refused, and how


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"max_tokens": 10**400}, 400, None),
        ({"n": 1000}, 400, "n"),
        ({"stop": [""]}, 400, "stop.0"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"seed": "7"}, 400, "seed"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"presence_penalty": 3}, 400, "presence_penalty"),
        ({"reasoning_effort": "medium"}, 400, "reasoning_effort"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, 400, "messages"),
    ],
)
def test_a_wrong_field_is_refused_by_name(ok_server, fields, status, param):
    got = ok_server.post(ask(**fields))
    assert ok_server.post(ask()).status == 200
    assert got.status == status
    assert got.error["param"] == param


def test_a_prompt_that_does_not_fit_says_so_with_its_code():
    with served(said("ok")) as server:
        got = server.post(ask("x" * 6000, max_tokens=1))
        assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
        assert server.post(ask(max_completion_tokens=2)).json["choices"][0]["finish_reason"] == "length"


def test_paths_and_methods_that_are_none_are_refused_in_the_same_form():
    with served(said("ok")) as server:
        assert server.get("/v2").error["code"] == "not_found"
        got = server.get(CHAT)
        assert (got.status, got.error["code"]) == (405, "method_not_allowed")
        assert server.call("POST", "/health").status == 405
        assert server.get("/v1/models/other").error["code"] == "model_not_found"
        assert server.call("HEAD", "/health").status == 200


def test_models_are_listed_with_their_room():
    with served(said("ok")) as server:
        (entry,) = server.get("/v1/models").json["data"]
        assert server.get("/v1/models/k3").json == entry
    assert (entry["id"], entry["max_model_len"]) == ("k3", 5000)


# keys, ids, figures, log


def test_a_key_is_needed_where_keys_are_set_but_not_for_health():
    keys = {key_digest("secret-secret-1234"): "alice"}
    with served(said("ok"), api_keys=keys) as server:
        for headers in ({}, {"authorization": "Bearer secret-secret-1235"}, {"authorization": "Basic x"}):
            for got in (server.post(ask(), **headers), server.get("/v1/models", **headers)):
                assert (got.status, got.error["type"]) == (401, "authentication_error")
                assert got.headers["www-authenticate"] == "Bearer"
        good = {"authorization": "Bearer secret-secret-1234"}
        assert server.post(ask(), **good).status == server.get("/v1/models", **good).status == 200
        assert server.get("/health").status == server.get("/ready").status == server.get("/metrics").status == 200


def test_a_request_keeps_its_id_in_the_answer_and_the_log_and_its_words_out_of_it(caplog):
    caplog.set_level(logging.INFO, "workbench.http")
    with served(said("the answer")) as server:
        got = server.post(ask("the question"), x_request_id="mine-1", authorization="Bearer the-key")
        other = server.post(ask(temperature="hotter"), x_request_id="bad id\x01")
    assert got.headers["x-request-id"] == "mine-1"
    assert other.headers["x-request-id"].startswith("req-")
    fields = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert (fields[0]["request_id"], fields[0]["status"]) == ("mine-1", 200)
    assert fields[0]["completion_tokens"] == 11
    assert fields[0]["first_token_s"] >= 0
    for word in ("question", "answer", "the-key", "hotter"):
        assert word not in json.dumps(fields)


def test_figures_count_requests_tokens_and_the_state_of_the_engine():
    with served(said("ok")) as server:
        server.post(ask())
        server.post(ask(temperature=9))
        server.get("/made/up/path")
        until(server.is_idle)
        text = server.get("/metrics").body.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines[f'workbench_http_requests_total{{route="{CHAT}",status="200"}}'] == "1.0"
    assert lines[f'workbench_http_requests_total{{route="{CHAT}",status="400"}}'] == "1.0"
    assert lines['workbench_http_requests_total{route="other",status="404"}'] == "1.0"
    assert lines["workbench_completion_tokens_total"] == "3.0"
    assert lines["workbench_first_token_seconds_count"] == "1.0"
    assert lines["workbench_token_gap_seconds_count"] == "1.0"
    assert (lines["workbench_running"], lines["workbench_free_slots"], lines["workbench_failed"]) == (
        "0.0",
        "3.0",
        "0.0",
    )
    assert "made/up" not in text


def test_many_clients_at_once_get_their_own_answers():
    with served(EchoRunner(num_slots=4)) as server:
        answers: dict[int, str] = {}

        def client(n: int) -> None:
            got = server.post({"prompt": f"secret-{n}-", "max_tokens": 40, "stream": bool(n % 2)}, PLAIN)
            texts = got.events if n % 2 else [got.json]
            answers[n] = "".join(event["choices"][0]["text"] for event in texts)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert answers == {n: (f"secret-{n}-" * 10)[:40] for n in range(24)}


def test_common_beginnings_are_counted_and_shared_by_the_holder_of_a_key_alone():
    keys = {key_digest(name * 16): name for name in "ab"}
    cached = []
    with served(EchoRunner(), api_keys=keys, prefix_pages=20, page_tokens=8) as server:
        for name in "aab":
            got = server.post({"prompt": "c" * 30, "max_tokens": 5}, PLAIN, authorization=f"Bearer {name * 16}")
            assert got.json["choices"][0]["text"] == "ccccc"
            cached.append(got.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        text = server.get("/metrics").body.decode()
    assert cached == [0, 24, 0]
    assert "workbench_prefix_cached_tokens_total 24.0" in text
    assert "workbench_pool_pages_used 6.0" in text, "three pages of each holder"
    assert "workbench_pool_pages_free 1869.0" in text


def test_the_alphabet_of_the_fakes_is_bytes():
    assert TOKENIZER.decode(said("ok")) == "ok"
    assert MARKS.end_of_msg > 255
