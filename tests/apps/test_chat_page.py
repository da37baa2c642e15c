"""The page without a browser: its handlers as plain functions, and what its server gives away."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import psutil
import pytest
from scripted import ScriptedService

from apps.chat import EXAMPLES, build_app, examples_for, launch, main
from apps.conversation import Conversation
from apps.panel import panel_text
from workbench.base import DeploymentError, RequestError
from workbench.deployment import RankStats
from workbench.serving import EngineStats

ROOT = Path(__file__).resolve().parents[2]


def handlers(app: gr.Blocks) -> dict[str, Callable[..., Any]]:
    return {block.fn.__name__: block.fn for block in app.fns.values() if block.fn is not None}


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def app(service: ScriptedService) -> gr.Blocks:
    return build_app(service, facts="a **model**", max_tokens=64)


def test_question_empties_the_box_and_arms_the_stop_button(app: gr.Blocks) -> None:
    conversation, shown, box, stop = handlers(app)["accept"]({"text": "What?", "files": ["/a.png"]}, Conversation())
    assert conversation.turns[0].images == ("/a.png",)
    assert [entry["role"] for entry in shown] == ["user", "user", "assistant"]
    assert (box.value, box.interactive, stop.interactive) == ({"text": "", "files": []}, False, True)


def test_empty_question_is_a_message_and_nothing_is_asked(app: gr.Blocks, service: ScriptedService) -> None:
    with pytest.raises(gr.Error, match="there is no question"):
        handlers(app)["accept"]({"text": " ", "files": []}, Conversation())
    assert service.asked == []


def test_answer_streams_with_the_settings_of_the_page(app: gr.Blocks, service: ScriptedService) -> None:
    steps = list(handlers(app)["answer"](Conversation().ask("What?"), 33.0, 0.5, gr.Request(session_hash="one")))
    assert service.asked[0][2:] == (33, 0.5)
    assert steps[-1][1][-1]["content"] == "one two three"
    assert steps[-1][2].startswith("40 tokens read")


def test_refusal_of_the_service_is_shown_in_the_conversation(app: gr.Blocks, service: ScriptedService) -> None:
    service.refusal = RequestError("the prompt of 70 tokens does not fit")
    ((conversation, shown, note),) = handlers(app)["answer"](
        Conversation().ask("What?"), 8, 0, gr.Request(session_hash="one")
    )
    assert "does not fit" in shown[-1]["content"]
    assert "does not fit" in note
    assert conversation.turns[-1].state == "failed"


def rank_stats(rank: int, *, device_bytes: int | None) -> RankStats:
    return RankStats(
        rank=rank,
        place="",
        host="here",
        pid=1,
        device="cpu" if device_bytes is None else "card",
        resident_bytes=3_000_000,
        peak_resident_bytes=5_000_000,
        device_bytes=device_bytes,
        cache_bytes=70_000,
        num_images=0,
        num_pages=0,
        collectives={},
        last_collective="",
    )


def test_the_panel_has_the_figures_of_the_engine_and_of_each_rank() -> None:
    class Busy:
        def stats(self) -> EngineStats:
            return EngineStats(
                num_waiting=7, num_running=3, num_free_slots=1, num_steps=1234, num_aborted=2, num_cached_tokens=512,
                num_drafted=8, num_accepted=6,
            )  # fmt: skip

    ranks = [rank_stats(0, device_bytes=None), rank_stats(1, device_bytes=9_000_000)]
    lines = panel_text(Busy(), lambda: ranks).splitlines()
    assert lines[:2] == ["| engine | now |", "|---|---|"]
    told = dict(line.strip("| ").split(" | ") for line in lines[2:])
    assert told["answers under way"] == "3 of 4"
    assert (told["waiting"], told["steps"], told["prompt tokens not read again"]) == ("7", "1,234", "512")
    assert told["guesses that held"] == "75% of 8"
    assert (told["rank 0 (cpu)"], told["rank 1 (card)"]) == ("3 MB", "9 MB")
    assert told["rank 1, cache"] == "70 kB"
    assert "guesses" not in panel_text(Idle())


class Idle:
    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=0, num_running=0, num_free_slots=4, num_steps=0, num_aborted=0)


def test_the_panel_says_why_it_has_no_figures_and_a_page_without_one_has_no_side(service: ScriptedService) -> None:
    def lost() -> str:
        raise DeploymentError("rank 1 died")

    assert "rank 1 died" in handlers(build_app(service, facts="", panel=lost))["figures"]()
    assert "figures" not in handlers(build_app(service, facts=""))


def test_nothing_is_said_to_a_visitor_who_has_left(app: gr.Blocks) -> None:
    answer, leave = handlers(app)["answer"], handlers(app)["leave"]
    leave(gr.Request(session_hash="one"))
    assert list(answer(Conversation().ask("What?"), 8, 0, gr.Request(session_hash="one"))) == []
    assert list(answer(Conversation().ask("What?"), 8, 0, gr.Request(session_hash="other")))[-1][0].turns


def test_stop_closes_the_turn_and_frees_the_box(app: gr.Blocks) -> None:
    open_turn = Conversation().ask("What?").answered("one ", "answering", "writing")
    conversation, shown, note, box, stop = handlers(app)["stop"](open_turn)
    assert conversation.turns[-1].state == "stopped"
    assert shown[-1]["content"] == "one "
    assert (note, box.interactive, stop.interactive) == ("stopped", True, False)


def test_new_conversation_forgets_the_old_one(app: gr.Blocks) -> None:
    conversation, shown, note, *_ = handlers(app)["clear"]()
    assert (conversation, shown, note) == (Conversation(), [], "")


def test_a_stop_event_cancels_the_running_answer(app: gr.Blocks) -> None:
    functions = app.fns
    (answer_idx,) = (i for i, block in functions.items() if block.fn is not None and block.fn.__name__ == "answer")
    cancelling = [block for block in functions.values() if answer_idx in (block.cancels or ())]
    assert len(cancelling) == 3  # stop, new conversation, the bin of the chat window
    assert functions[answer_idx].concurrency_limit == 4


def test_every_example_has_its_pictures(tmp_path: Path) -> None:
    """A model that was trained on generated scenes is offered scenes, any other plain drawings."""
    assert examples_for(ROOT / "data" / "k3-tiny") == EXAMPLES
    (tmp_path / "origin.json").write_text('{"weights": "trained", "recipe": "small"}')
    (tmp_path / "recipe.toml").write_text('name = "small"')
    scenes = examples_for(tmp_path)
    assert {path.parent.name for _, pictures in scenes for path in pictures} == {"scenes"}
    for _, pictures in (*EXAMPLES, *scenes):
        assert all(path.is_file() for path in pictures)


@pytest.fixture
def url(app: gr.Blocks) -> Iterator[str]:
    yield launch(app, wait=False)
    app.close()


def test_server_gives_away_no_files_and_no_private_events(url: str) -> None:
    assert url.startswith("http://127.0.0.1:")
    with httpx.Client(base_url=url, timeout=10) as client:
        assert client.get("/").status_code == 200
        for path in ("/etc/passwd", ROOT / "pyproject.toml", ROOT / "apps" / "chat.py"):
            assert client.get(f"/gradio_api/file={path}").status_code in (403, 404)
        assert client.get("/gradio_api/info").json()["named_endpoints"] == {}
        config = client.get("/config").json()
        assert config["analytics_enabled"] is False


def test_too_large_an_upload_is_refused(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:
        small = client.post("/gradio_api/upload", files={"files": ("a.png", b"x" * 1000)})
        large = client.post("/gradio_api/upload", files={"files": ("a.png", b"x" * (21 << 20))})
    assert small.status_code == 200
    assert large.status_code == 413


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--model", str(ROOT / "data" / "k3-tiny"), "--ranks", "23"], "no layout of 23 ranks"),
        (["--model", str(ROOT / "data" / "k3-tiny"), "--layout", "tq2"], "layout 'tq2' is not readable"),
    ],
)
def test_unusable_arguments_end_with_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert str(caught.value).startswith("error: ")
    assert message in str(caught.value)


@pytest.mark.ranks
def test_interrupt_ends_the_page_and_its_ranks() -> None:
    command = [sys.executable, "-m", "apps.chat", "--device", "cpu", "--layout", "tp2"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("chat is at http://127.0.0.1:"), line + server.stdout.read()
        ranks = psutil.Process(server.pid).children(recursive=True)
        assert len(ranks) == 2
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
        gone, alive = psutil.wait_procs(ranks, timeout=10)
        assert (len(gone), alive) == (2, [])
    finally:
        server.kill()
