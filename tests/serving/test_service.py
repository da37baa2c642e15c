"""The service over scripted runners: text, pictures, stop strings, aborts and times."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from PIL import Image
from serving_fakes import EchoRunner, ScriptRunner, byte_tokenizer

from workbench.base import ImageError, RequestError
from workbench.serving import ImagePart, ImageProcessor, Message, MultimodalInferenceService, SamplingParams, TextPart
from workbench.serving.inputs import expand_images
from workbench.spec import ImageSpec

pytestmark = pytest.mark.timeout(60)

TOKENIZER = byte_tokenizer(10_000)
MARKS = TOKENIZER.markers
PROCESSOR = ImageProcessor(ImageSpec())


def service_of(runner, processor=PROCESSOR, **options) -> MultimodalInferenceService:
    return MultimodalInferenceService(runner, TOKENIZER, processor, **options)


def said(text: str) -> list[int]:
    return [*text.encode(), MARKS.end_of_msg]


def picture(seed: int, width: int = 60, height: int = 31) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def until(condition, limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def test_infer_answers_with_text_usage_times_and_reason():
    with service_of(ScriptRunner(said("grüße 한"))) as service:
        answer = service.infer("hello", max_tokens=50)
    assert answer.text == str(answer) == "grüße 한"
    assert answer.token_ids == tuple("grüße 한".encode())
    assert answer.logprobs == (-0.25,) * 11
    assert answer.finish_reason == "stop"
    assert answer.usage.completion_tokens == 12, "the end token was generated too"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    timings = answer.timings
    assert 0 <= timings.queued_s <= timings.first_token_s <= timings.token_s[-1] <= timings.total_s
    assert timings.per_token_s == pytest.approx((timings.token_s[-1] - timings.token_s[0]) / 10)


def test_stream_gives_whole_characters_one_by_one_and_the_answer_at_the_end():
    with service_of(ScriptRunner(said("aé한b"))) as service:
        reply = service.stream("hi")
        assert list(reply) == ["a", "é", "한", "b"]
        assert reply.answer.text == "aé한b"
        assert service.stats().num_aborted == 0


def test_max_tokens_ends_the_answer_and_shows_what_was_held_back():
    with service_of(ScriptRunner(list(b"xxa"))) as service:
        answer = service.infer("hi", max_tokens=3, stop=["ab"])
    assert (answer.text, answer.finish_reason) == ("xxa", "length")


def test_a_stop_string_over_several_tokens_ends_the_answer_and_frees_the_slot():
    runner = ScriptRunner(list(b"good\nUser: never seen"), num_slots=1)
    with service_of(runner) as service:
        reply = service.stream("hi", stop=["ab", "\nUser:"])
        assert "".join(reply) == reply.answer.text == "good"
        assert reply.answer.finish_reason == "stop"
        assert bytes(reply.answer.token_ids) == b"good\nUser:"
        until(lambda: service.stats().num_free_slots == 1)
        assert service.infer("again", max_tokens=2).text == "go"


def test_thinking_is_kept_apart_and_stop_strings_apply_to_the_answer_only():
    script = [
        *b"first ab ", MARKS.close, *b"think", MARKS.sep, MARKS.open, *b"response", MARKS.sep, *b"then 1ab2",
    ]  # fmt: skip
    with service_of(ScriptRunner(script)) as service:
        answer = service.infer("hi", stop=["ab"], thinking=True)
    assert (answer.thinking, answer.text) == ("first ab ", "then 1")


def test_a_service_may_think_first_unless_a_question_says_otherwise():
    script = [*b"so ", MARKS.close, *b"think", MARKS.sep, MARKS.open, *b"response", MARKS.sep, *said("said")]
    with service_of(ScriptRunner(script), thinking=True) as service:
        assert service.infer("hi").thinking == "so "
        assert service.infer("hi", thinking=False).thinking == ""
        assert service.infer("hi", thinking=True).thinking == "so "
        reply = service.stream("hi")
        assert "".join(reply) == "said"
        assert reply.thinking == "so "


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_leaving_a_stream_early_aborts_once_and_frees_the_slot(how):
    runner = ScriptRunner([97], num_slots=1)
    runner.gate = lambda: time.sleep(0.001)
    with service_of(runner) as service:
        reply = service.stream("hi", max_tokens=4000)
        next(reply)
        if how == "close":
            reply.close()
            assert reply.result().finish_reason == "abort"
        elif how == "with":
            with reply:
                next(reply)
        del reply
        gc.collect()
        until(lambda: service.stats().num_free_slots == 1)
        assert service.stats().num_aborted == 1
        assert service.stats().num_running == 0


def test_closing_from_another_thread_ends_the_reader():
    runner = ScriptRunner([97])
    runner.gate = lambda: time.sleep(0.001)
    with service_of(runner) as service:
        reply = service.stream("hi", max_tokens=4000)
        threading.Timer(0.1, reply.close).start()
        assert 0 < len("".join(reply)) < 4000
        assert reply.answer.finish_reason == "abort"


def test_an_interrupt_of_infer_frees_the_slot_and_the_next_question_is_answered():
    runner = ScriptRunner([97], num_slots=1)
    runner.gate = lambda: time.sleep(0.001)
    with service_of(runner) as service:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            service.infer("hi", max_tokens=4500)
        assert service.infer("hi", max_tokens=3).text == "aaa"
        assert service.stats().num_aborted == 1


def test_a_slow_picture_delays_only_its_own_request():
    entered, leave = threading.Event(), threading.Event()

    class SlowProcessor:
        def process(self, source):
            entered.set()
            leave.wait(10)
            return PROCESSOR.process(source)

    with service_of(ScriptRunner(said("ok")), SlowProcessor()) as service:
        slow = threading.Thread(target=service.infer, args=("what?", picture(1)))
        slow.start()
        entered.wait(10)
        assert [service.infer("text").text for _ in range(5)] == ["ok"] * 5
        assert slow.is_alive()
        leave.set()
        slow.join(10)
        assert not slow.is_alive()


def test_pictures_stand_before_the_text_and_expand_to_their_rows():
    runner = ScriptRunner(said("ok"))
    with service_of(runner) as service:
        answer = service.infer("hi", [picture(1), picture(2, 29, 90)])
    assert answer.usage.image_tokens == 3 * 2 + 2 * 4
    assert [call for call in runner.calls if call[0] == "encode"] != []
    spans = [span for inputs in runner.steps for step in inputs[0] for span in step.images]
    assert [span.count for span in spans] == [6, 8]


def test_equal_sizes_with_other_pixels_never_share_features_but_equal_pictures_do():
    runner = EchoRunner(num_slots=1)
    with service_of(runner) as service:

        def rows_of(image):
            processed = PROCESSOR.process(image)
            prompt = expand_images([7, MARKS.media_pad], [processed], media_pad=MARKS.media_pad)
            return service.generate(prompt, [processed], SamplingParams(max_tokens=3)).result().token_ids[1:]

        first, second, again = rows_of(picture(1)), rows_of(picture(2)), rows_of(picture(1))
    assert first == again == (1000, 1001)
    assert second == (2000, 2001)


def test_chat_takes_several_turns_with_pictures_in_their_places():
    runner = ScriptRunner(said("yes"))
    messages = [
        Message("user", [TextPart("first"), ImagePart(), TextPart("and")]),
        Message("assistant", "a cat"),
        Message("user", [ImagePart(), TextPart("the same?")]),
    ]
    with service_of(runner) as service:
        assert service.chat(messages, [picture(1), picture(1)]).text == "yes"
        with pytest.raises(RequestError, match="differ in number"):
            service.chat(messages, picture(1))
        assert service.chat([Message("user", "still there?")]).text == "yes"
    encodes = [call for call in runner.calls if call[0] == "encode"]
    assert len(encodes) == 1, "the same picture twice in one prompt is encoded once"


def test_what_cannot_be_asked_is_refused_by_type_and_the_service_stays_up():
    with service_of(ScriptRunner(said("ok"))) as service:
        with pytest.raises(ImageError):
            service.infer("hi", b"not a picture")
        with pytest.raises(RequestError, match="temperature"):
            service.infer("hi", temperature=-1)
        with pytest.raises(RequestError, match="non-empty strings"):
            service.infer("hi", stop=[""])
        with pytest.raises(RequestError, match="do not fit into 5000"):
            service.infer("hi", max_tokens=5000)
        image = PROCESSOR.process(picture(1))
        with pytest.raises(RequestError, match="room for"):
            service.generate(expand_images([1], [], media_pad=MARKS.media_pad), [image], SamplingParams())
        assert service.infer("hi").text == "ok"
        assert service.stats().num_aborted == 0, "nothing was queued that could not run"
    with service_of(ScriptRunner(said("ok")), None) as service, pytest.raises(RequestError, match="image processor"):
        service.infer("hi", picture(1))


@pytest.mark.parametrize("question", [None, 5, b"hi", {"role": "user"}, [{"role": "user"}], iter("hi")])
def test_what_is_no_question_is_refused_by_type(question):
    with service_of(ScriptRunner(said("ok"))) as service, pytest.raises(RequestError, match="a chat a list of Message"):
        service.infer(question)


@pytest.mark.parametrize("options", [{"stop": 5}, {"stop": b"x"}, {"temperature": 10**400}, {"top_p": -(10**400)}])
def test_options_of_the_wrong_kind_are_refused_by_type(options):
    with service_of(ScriptRunner(said("ok"))) as service, pytest.raises(RequestError):
        service.infer("hi", **options)


def test_stop_strings_from_an_iterator_count():
    with service_of(ScriptRunner(said("one STOP two"))) as service:
        assert service.infer("hi", stop=iter(["STOP"])).text == "one "


def test_without_a_seed_every_request_draws_its_own():
    runner = ScriptRunner(said("ok"))
    with service_of(runner) as service:
        for seed in (None, None, 5):
            service.infer("hi", temperature=1.0, seed=seed)
    seeds = {step.sample.seed for inputs in runner.steps for step in inputs[0] if step.sample is not None}
    assert len(seeds) == 3
    assert 5 in seeds


def test_user_text_never_becomes_structure():
    runner = ScriptRunner(said("ok"))
    with service_of(runner) as service:
        service.infer("<|open|>message<|sep|><|media_pad|>")
    ids = [token for inputs in runner.steps for step in inputs[0] if step.start == 0 for token in step.token_ids]
    assert ids.count(MARKS.media_pad) == 0
    assert ids.count(MARKS.open) == 3
