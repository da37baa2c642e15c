"""The page in front of a server of the OpenAI interface: a scripted one, and our own. One case in a real browser."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from openai_scripted import ScriptedOpenAI, Stream, chunk, dies_after, refuses, says, words_of
from scripted import handlers, submitted

from apps.chat import build_app
from apps.conversation import THOUGHT, Conversation
from workbench.base import RequestError
from workbench.serving.client import RemoteService

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "serving"))

from http_served import said, thought  # noqa: E402
from http_served import served as serving  # noqa: E402

HOUSE = ROOT / "data" / "images" / "house.png"

pytestmark = pytest.mark.timeout(120)


class Page:
    """One visitor of a page over a server; each method is an event, by the handlers that the page has for it."""

    def __init__(self, server: ScriptedOpenAI | str, session: str = "one") -> None:
        url = server if isinstance(server, str) else server.url
        self.app = build_app(RemoteService(url, timeout_s=30), facts="remote", max_tokens=64)
        self.calls = handlers(self.app)
        self.session = session
        self.conversation = Conversation()

    def begin(self, text: str, *pictures: Path) -> Iterator[tuple[Any, ...]]:
        files = [str(picture) for picture in pictures]
        self.conversation = self.calls["accept"]({"text": text, "files": files}, self.conversation, submitted())[0]
        return self.answers()

    def answers(self) -> Iterator[tuple[Any, ...]]:
        request = gr.Request(session_hash=self.session)
        return self.calls["answer"](self.conversation, 40, 0.0, request)

    def ask(self, text: str, *pictures: Path) -> str:
        return self.finish(self.begin(text, *pictures))

    def finish(self, steps: Iterator[tuple[Any, ...]]) -> str:
        for self.conversation, _, self.note in steps:
            pass
        return self.conversation.turns[-1].answer

    def again(self) -> str:
        """The last question once more; what stands in the box meanwhile is let be."""
        (chat,) = (block for block in self.app.blocks.values() if isinstance(block, gr.Chatbot))
        box = {"text": "half a thought", "files": []}
        self.conversation = self.calls["accept"](box, self.conversation, gr.EventData(chat, {"index": 0}))[0]
        return self.finish(self.answers())

    def take_back(self) -> dict[str, Any]:
        """The last question, as it comes into the box."""
        self.conversation, _, self.note, box = self.calls["take_back"](self.conversation)
        return box.value


@pytest.fixture
def served() -> Iterator[Callable[..., ScriptedOpenAI]]:
    servers: list[ScriptedOpenAI] = []

    def serve(*script: Stream) -> ScriptedOpenAI:
        servers.append(ScriptedOpenAI(*script))
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_text_is_shown_as_it_comes_and_the_conversation_goes_on(served) -> None:
    gate = threading.Semaphore(0)
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    server = served(says(["one ", "two ", "three"], gate=gate, usage=usage), says(["four"], usage=usage))
    page = Page(server)
    steps = page.begin("Count")
    for expected in ("one ", "one two "):
        gate.release()
        while (step := next(steps))[0].turns[-1].answer != expected:
            assert step[0].turns[-1].state == "answering"
        assert step[1][-1]["content"] == expected
    gate.release()
    assert page.finish(steps) == "one two three"
    assert page.note.startswith("9 tokens read; 3 written; the first after")
    assert page.note.endswith("the model ended its answer")
    assert page.ask("And on?") == "four"
    assert words_of(server.asked[0]) == [("user", "Count")]
    assert words_of(server.asked[1]) == [("user", "Count"), ("assistant", "one two three"), ("user", "And on?")]
    assert (server.asked[0]["model"], server.asked[0]["max_tokens"], server.asked[0]["stream"]) == (
        "scripted",
        40,
        True,
    )


def test_a_picture_goes_inside_the_request_and_stays_in_its_place(served) -> None:
    server = served(says(["A house."]))
    page = Page(server)
    assert page.ask("What is it?", HOUSE) == "A house."
    page.ask("Sure?")
    for asked in server.asked:
        picture, text = asked["messages"][0]["content"]
        assert text == {"type": "text", "text": "What is it?"}
        head, _, data = picture["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data) == HOUSE.read_bytes()
    assert server.asked[1]["messages"][2] == {"role": "user", "content": "Sure?"}


def test_stop_ends_the_answer_at_the_server_and_keeps_what_was_said(served) -> None:
    gate = threading.Semaphore(1)
    server = served(says(["one ", "two "], gate=gate), says(["three"]))
    page = Page(server)
    steps = page.begin("Count")
    while not (step := next(steps))[0].turns[-1].answer:
        pass
    steps.close()  # type: ignore[attr-defined]  # as the page's queue does with a cancelled generator
    assert server.left.wait(30), "the server still sends"
    page.conversation, shown, note, *_ = page.calls["stop"](step[0])
    assert (shown[-1]["content"], note) == ("one ", "stopped")
    assert page.ask("Go on") == "three"
    assert words_of(server.asked[1])[1] == ("assistant", "one ")


def test_a_question_is_asked_once_more_or_changed_with_its_picture_and_without_what_was_answered(served) -> None:
    server = served(says(["first"]), says(["second"]), says(["third"]), says(["fourth"]), says(["fifth"]))
    page = Page(server)
    page.ask("What is it?", HOUSE)
    page.ask("And <b>why</b>?")
    assert page.again() == "third"
    talk = [("user", "[picture]What is it?"), ("assistant", "first"), ("user", "And <b>why</b>?")]
    assert [words_of(asked) for asked in server.asked[1:]] == [talk, talk]
    assert page.take_back() == {"text": "And <b>why</b>?", "files": []}
    assert page.ask("And when?") == "fourth"
    assert words_of(server.asked[3]) == [*talk[:2], ("user", "And when?")]
    page.take_back()
    question = page.take_back()
    assert (question["text"], len(question["files"]), page.conversation) == ("What is it?", 1, Conversation())
    assert page.ask("Which colour?", HOUSE) == "fifth"
    assert words_of(server.asked[4]) == [("user", "[picture]Which colour?")]
    page.conversation = page.conversation.ask("And?")
    for event in (page.again, page.take_back):
        with pytest.raises(gr.Error, match="an answer is under way"):
            event()
    page.conversation = Conversation()
    for event in (page.again, page.take_back):
        with pytest.raises(gr.Error, match="there is no question"):
            event()
    assert len(server.asked) == 5


def test_a_server_that_dies_in_the_middle_keeps_the_text_so_far_and_can_be_asked_again(served) -> None:
    server = served(dies_after(["half "]), says(["whole"]))
    page = Page(server)
    page.ask("What?")
    turn = page.conversation.turns[-1]
    assert (turn.answer, turn.state) == ("half ", "failed")
    assert "the stream broke off before its end" in page.note
    assert "half" in str(page.conversation.shown()[-1]["content"])
    assert page.again() == "whole"
    assert [words_of(asked) for asked in server.asked] == [[("user", "What?")]] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "unknown API key"), (429, "too many requests wait already"), (503, "the model is starting again")],
)
def test_a_refusal_is_told_in_the_servers_own_words_and_leaves_the_conversation(served, status, message) -> None:
    server = served(says(["yes"]), refuses(status, message), says(["again"]))
    page = Page(server)
    page.ask("Are you there?")
    page.ask("And now?")
    assert page.conversation.turns[-1].state == "failed"
    assert message in page.note
    assert f"status {status}" in page.note
    assert page.ask("Now?") == "again"
    assert words_of(server.asked[2]) == [("user", "Are you there?"), ("assistant", "yes"), ("user", "Now?")]


def test_a_server_without_pictures_says_so_and_text_goes_on(served) -> None:
    server = served(refuses(400, "this model takes text only"), says(["text"]))
    page = Page(server)
    page.ask("What is it?", HOUSE)
    assert "this model takes text only" in page.note
    assert page.ask("Hello") == "text"
    assert words_of(server.asked[1]) == [("user", "Hello")], "the refused picture is not sent again"


def test_a_server_that_counts_nothing_and_thinks_nothing_is_shown_without_figures_and_thoughts(served) -> None:
    page = Page(served(says(["yes"])))
    page.ask("Well?")
    assert "tokens read" not in page.note
    assert "written" not in page.note
    assert page.note.endswith("the model ended its answer")
    assert [entry["role"] for entry in page.conversation.shown()] == ["user", "assistant"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_come_under_either_name_and_are_folded(served, name: str) -> None:
    server = served(says([chunk(**{name: "hm, "}), chunk(**{name: "so"}), "yes"]), says(["no"]))
    page = Page(server)
    assert page.ask("Well?") == "yes"
    assert page.conversation.turns[0].thinking == "hm, so"
    assert page.conversation.shown()[1]["metadata"] == {"title": THOUGHT}
    page.ask("And?")
    assert server.asked[1]["messages"][1]["reasoning_content"] == "hm, so"


def test_what_is_no_chunk_ends_the_answer_with_an_error(served) -> None:
    def nonsense(handler: Any) -> None:
        handler.begin()
        handler.event("{nonsense")

    page = Page(served(nonsense, says(["good"])))
    page.ask("What?")
    assert page.conversation.turns[-1].state == "failed"
    assert page.ask("What?") == "good"


def test_two_visitors_of_one_page_never_see_each_other(served) -> None:
    gates = [threading.Semaphore(0), threading.Semaphore(0)]
    server = served(*(says([f"secret {n} ", "end"], gate=gate) for n, gate in enumerate(gates)))
    one = Page(server, "one")
    other = Page(server, "other")
    other.app, other.calls = one.app, one.calls
    first = one.begin("I am one")
    next(first)  # it has asked
    while len(server.asked) < 1:
        next(first)
    second = other.begin("I am the other")
    next(second)
    while len(server.asked) < 2:
        next(second)
    for gate in reversed(gates):
        gate.release(2)
    assert (other.finish(second), one.finish(first)) == ("secret 1 end", "secret 0 end")
    assert [words_of(asked) for asked in server.asked] == [[("user", "I am one")], [("user", "I am the other")]]
    assert [turn.text for turn in one.conversation.turns] == ["I am one"]
    assert [turn.text for turn in other.conversation.turns] == ["I am the other"]


def test_our_own_server_is_talked_to_in_the_same_way() -> None:
    with serving(said("A house.")) as ours:
        page = Page(ours.server.url)
        assert page.ask("What is it?", HOUSE) == "A house."
        assert "of pictures); 9 written" in page.note
        assert page.again() == "A house."
    with serving(thought("hm", "yes"), thinking_first=True) as ours:
        page = Page(ours.server.url)
        assert page.ask("Well?") == "yes"
        assert page.conversation.turns[0].thinking == "hm"
    with serving(said("x"), requests_per_minute=4) as ours:
        page = Page(ours.server.url)
        assert page.ask("One?") == "x"
        page.ask("Two?")
        assert "more than 4 requests per minute" in page.note
        assert page.conversation.turns[-1].state == "failed"


def test_a_key_that_the_server_does_not_know_is_told_before_there_is_a_page() -> None:
    key = "a-key-for-the-tests"
    with serving(said("x"), api_keys={sha256(key.encode()).hexdigest(): "tests"}) as ours:
        with pytest.raises(RequestError, match="unknown API key"):
            RemoteService(ours.server.url, api_key="not-the-key-at-all")
        assert RemoteService(ours.server.url, api_key=key).model == "k3"
