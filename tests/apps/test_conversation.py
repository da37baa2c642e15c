"""What a question does, without a browser: streaming, stopping, failing, and what the model is given to read."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
from scripted import ScriptedService, Thought

from apps import conversation as module
from apps.conversation import Conversation, Options, stream_answer
from workbench.base import QueueFullError, RequestError, WorkerDiedError
from workbench.serving import ImagePart, TextPart


def asked(text: str = "What is it?", images: tuple[str, ...] = ()) -> Conversation:
    return Conversation().ask(text, images)


def test_answer_grows_and_ends_with_its_figures() -> None:
    steps = list(stream_answer(ScriptedService(), asked(), Options()))
    texts = [step.turns[-1].answer for step in steps]
    assert texts[-1] == "one two three"
    assert all(late.startswith(early) for early, late in pairwise(texts))
    assert steps[-1].turns[-1].state == "done"
    assert steps[-1].note == (
        "40 tokens read (12 of pictures); 3 written; the first after 250 ms; then one every 50.0 ms; "
        "cut at the longest answer allowed"
    )


def test_pieces_are_shown_before_the_answer_is_whole() -> None:
    gate = threading.Semaphore(0)
    steps = stream_answer(ScriptedService(gate=gate), asked(), Options())
    assert next(steps).turns[-1].answer == ""
    for expected in ("one ", "one two "):
        gate.release()
        shown = [next(steps).turns[-1] for _ in range(2)]
        assert shown[-1].answer == expected
        assert shown[-1].state == "answering"
    steps.close()


@pytest.mark.timeout(30)
def test_waiting_for_the_first_piece_still_yields_so_that_it_can_be_stopped() -> None:
    service = ScriptedService(gate=threading.Semaphore(0))
    steps = stream_answer(service, asked(), Options())
    notes = [next(steps).note for _ in range(3)]
    assert all(note.startswith("reading the question") for note in notes)
    assert not service.replies[0].is_closed.is_set()
    steps.close()
    assert service.replies[0].is_closed.is_set()


def test_fast_pieces_are_gathered_into_few_updates() -> None:
    script = ["x"] * 2000
    steps = list(stream_answer(ScriptedService(script), asked(), Options()))
    assert steps[-1].turns[-1].answer == "x" * 2000
    assert len(steps) < 40


@pytest.mark.parametrize("after", [1, 2, 3])
def test_closing_the_stream_anywhere_frees_the_request(after: int) -> None:
    gate = threading.Semaphore(2)
    service = ScriptedService(gate=gate)
    steps = stream_answer(service, asked(), Options())
    for _ in range(after):
        next(steps)
    steps.close()
    assert service.replies[0].is_closed.is_set()
    assert service.replies[0].num_read < 3


def test_reply_is_closed_after_its_own_end_too() -> None:
    service = ScriptedService()
    list(stream_answer(service, asked(), Options()))
    assert service.replies[0].is_closed.is_set()


def test_refused_request_becomes_a_message_and_leaves_the_prompt() -> None:
    service = ScriptedService(refusal=QueueFullError("256 requests wait already", next_step="Try again later"))
    (last,) = stream_answer(service, asked(), Options())
    assert last.turns[-1].state == "failed"
    assert last.shown()[-1]["content"] == "⚠ 256 requests wait already. Try again later"
    assert last.prompt() == ([], [])
    messages, _ = last.ask("And now?").prompt()
    assert [message.parts for message in messages] == [(TextPart("And now?"),)]


def test_rank_that_dies_in_the_middle_keeps_the_text_so_far_and_says_what_happened() -> None:
    service = ScriptedService(["half ", WorkerDiedError("rank 1 was killed by SIGKILL in all_reduce")])
    last = list(stream_answer(service, asked(), Options()))[-1]
    assert last.turns[-1].answer == "half "
    assert last.turns[-1].state == "failed"
    assert "rank 1 was killed by SIGKILL in all_reduce" in str(last.shown()[-1]["content"])
    assert service.replies[0].is_closed.is_set()


def test_bug_is_not_dressed_up_as_a_message() -> None:
    service = ScriptedService(["half ", ZeroDivisionError("ours")])
    with pytest.raises(ZeroDivisionError, match="ours"):
        list(stream_answer(service, asked(), Options()))
    assert service.replies[0].is_closed.is_set()


def test_options_reach_the_service() -> None:
    service = ScriptedService()
    list(stream_answer(service, asked(), Options(max_tokens=7, temperature=0.5)))
    assert service.asked[0][2:] == (7, 0.5)


def test_model_reads_the_whole_conversation_with_pictures_in_their_places() -> None:
    service = ScriptedService(["A house."])
    first = list(stream_answer(service, asked("What?", ("/a.png", "/b.png")), Options()))[-1]
    list(stream_answer(service, first.ask("And this?", ("/c.png",)), Options()))
    messages, images, _, _ = service.asked[1]
    assert images == [Path("/a.png"), Path("/b.png"), Path("/c.png")]
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert messages[0].parts == (ImagePart(), ImagePart(), TextPart("What?"))
    assert messages[1].parts == (TextPart("A house."),)
    assert messages[2].parts == (ImagePart(), TextPart("And this?"))


def test_stopped_answer_stays_in_the_conversation_as_far_as_it_came() -> None:
    gate = threading.Semaphore(1)
    steps = stream_answer(ScriptedService(gate=gate), asked(), Options())
    while (step := next(steps)).turns[-1].answer != "one ":
        pass
    steps.close()
    stopped = step.stopped()
    assert stopped.turns[-1].state == "stopped"
    assert stopped.stopped() == stopped
    messages, _ = stopped.ask("Go on").prompt()
    assert [message.parts[0] for message in messages][1] == TextPart("one ")


@pytest.mark.parametrize("text", ["", "   \n"])
def test_question_without_words_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="there is no question"):
        Conversation().ask(text, ("/a.png",))


def test_too_many_pictures_are_refused() -> None:
    with pytest.raises(RequestError, match="too many pictures"):
        Conversation().ask("What?", [f"/{i}.png" for i in range(module.MAX_IMAGES + 1)])


def test_text_is_escaped_and_pictures_go_by_path() -> None:
    hostile = "<img src='http://198.51.100.7/x.png'> & <script>"
    shown = asked(hostile, ("/a.png",)).answered(hostile, "done", "").shown()
    assert shown[0]["content"] == {"path": "/a.png", "alt_text": "picture"}
    for entry in shown[1:]:
        assert entry["content"] == "&lt;img src='http://198.51.100.7/x.png'&gt; &amp; &lt;script&gt;"


def test_a_thought_is_shown_apart_and_read_again_with_the_next_question() -> None:
    service = ScriptedService([Thought("Top left: "), Thought("<b>"), "A star."])
    first = list(stream_answer(service, asked(), Options()))[-1]
    assert first.shown()[1:] == [
        {"role": "assistant", "content": "Top left: &lt;b&gt;", "metadata": {"title": module.THOUGHT}},
        {"role": "assistant", "content": "A star."},
    ]
    messages, _ = first.ask("Why?").prompt()
    assert (messages[1].content, messages[1].thinking) == ("A star.", "Top left: <b>")


def test_while_it_only_thinks_the_thought_grows_and_can_be_stopped() -> None:
    gate = threading.Semaphore(1)
    steps = stream_answer(ScriptedService([Thought("hm"), "said"], gate=gate), asked(), Options())
    while not (step := next(steps)).turns[-1].thinking:
        pass
    assert step.note.startswith("thinking")
    assert [entry["content"] for entry in step.shown()[1:]] == ["hm"]
    steps.close()
    assert step.stopped().turns[-1].thinking == "hm"


def test_two_visitors_share_nothing() -> None:
    service = ScriptedService()
    one, other = asked("one"), asked("other")
    for first, second in zip(
        stream_answer(service, one, Options()), stream_answer(service, other, Options()), strict=False
    ):
        assert [turn.text for turn in first.turns] == ["one"]
        assert [turn.text for turn in second.turns] == ["other"]
    assert len({id(reply) for reply in service.replies}) == 2
