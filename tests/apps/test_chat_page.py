"""The page without a browser: its handlers as plain functions, and what its server gives away."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import httpx
import psutil
import pytest
from scripted import ScriptedService, handlers, submitted

from apps.chat import EXAMPLES, build_app, examples_for, launch, main, read_logins
from apps.conversation import Conversation
from apps.panel import Panel, Sight
from workbench.base import DeploymentError, RequestError
from workbench.deployment import RankStats
from workbench.profiling import ExpertLoad
from workbench.profiling.experts import LayerLoad
from workbench.serving import EngineStats, RecentTimes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def app(service: ScriptedService) -> gr.Blocks:
    return build_app(service, facts="a **model**", max_tokens=64)


def test_question_empties_the_box_and_arms_the_stop_button(app: gr.Blocks) -> None:
    conversation, shown, box, stop = handlers(app)["accept"](
        {"text": "What?", "files": ["/a.png"]}, Conversation(), submitted()
    )
    assert conversation.turns[0].images == ("/a.png",)
    assert [entry["role"] for entry in shown] == ["user", "user", "assistant"]
    assert (box.value, box.interactive, stop.interactive) == ({"text": "", "files": []}, False, True)


def test_empty_question_is_a_message_and_nothing_is_asked(app: gr.Blocks, service: ScriptedService) -> None:
    with pytest.raises(gr.Error, match="there is no question"):
        handlers(app)["accept"]({"text": " ", "files": []}, Conversation(), submitted())
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


class Busy:
    num_generated = 1000

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=7, num_running=3, num_free_slots=1, num_steps=1234, num_aborted=2, num_cached_tokens=512,
            num_drafted=8, num_accepted=6, num_prompt_tokens=2048, num_generated=self.num_generated,
        )  # fmt: skip

    def recent(self) -> RecentTimes:
        return RecentTimes(first_token_s=(0.25,), token_gap_s=(*[0.02] * 98, 0.5, 0.75), window_s=180.0)


class Idle:
    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=0, num_running=0, num_free_slots=4, num_steps=0, num_aborted=0)

    def recent(self) -> RecentTimes:
        return RecentTimes()


def told(text: str) -> dict[str, str]:
    lines = text.splitlines()
    assert lines[:2] == ["| engine | now |", "|---|---|"]
    return dict(line.strip("| ").split(" | ") for line in lines[2:])


def test_the_panel_has_the_figures_of_the_engine_and_of_each_rank() -> None:
    ranks = [rank_stats(0, device_bytes=None), rank_stats(1, device_bytes=9_000_000)]
    now, busy = [10.0], Busy()
    panel = Panel(service=busy, runs_on="tp2 on 2 ranks", ranks=lambda: ranks, clock=lambda: now[0])
    text, sight = panel.look()
    rows = told(text)
    assert rows["layout"] == "tp2 on 2 ranks"
    assert rows["answers under way"] == "3 of 4"
    assert (rows["waiting"], rows["steps"]) == ("7", "1,234")
    assert rows["first token, p50 and p99"] == "250 ms, 250 ms"
    assert rows["between tokens, p50 and p99"] == "20 ms, 500 ms"
    assert rows["of the last"] == "180 s"
    assert rows["prefix hits"] == "25% of 2,048 prompt tokens"
    assert rows["guesses that held"] == "75% of 8"
    assert (rows["rank 0 (cpu)"], rows["rank 1 (card)"]) == ("3 MB", "9 MB")
    assert rows["rank 1, cache"] == "70 kB"
    assert "tokens a second" not in rows, "there is nothing yet to take a rate from"

    now[0], busy.num_generated = 12.0, 1090
    text, sight = panel.look(sight)
    assert told(text)["tokens a second"] == "45.0 over 2 s"
    assert sight == Sight(12.0, 1090)
    now[0], busy.num_generated = 14.0, 5  # another engine
    assert told(panel.look(sight)[0])["tokens a second"] == "0.0 over 2 s"


def test_the_panel_of_an_idle_service_has_no_rows_for_what_has_not_happened() -> None:
    rows = told(Panel(service=Idle()).look()[0])
    assert {"guesses that held", "prefix hits", "first token, p50 and p99", "of the last", "layout"}.isdisjoint(rows)
    assert rows["answers under way"] == "0 of 4"


def test_experts_are_asked_for_only_while_somebody_wants_to_see_them(service: ScriptedService) -> None:
    loads = [ExpertLoad(layers=(LayerLoad(layer=3, counts=counts),)) for counts in ((0, 0), (1, 5))]
    asked: list[int] = []

    def experts() -> ExpertLoad:
        asked.append(1)
        return loads[min(len(asked), 2) - 1]

    panel = Panel(service=Busy(), experts=experts)
    figures = handlers(build_app(service, facts="", panel=panel))["figures"]
    _, sight, heat = figures(None, False)
    assert (heat, asked) == ("", [])
    assert figures(sight, True)[2] == "Ranks count from now on."
    heat = figures(sight, True)[2]
    assert heat.startswith("<svg")
    assert "busiest: 1.7 times its share, layer 3" in heat
    assert Panel(service=Busy()).heat() == "No experts to look at."


def test_the_panel_says_why_it_has_no_figures_and_a_page_without_one_has_no_side(service: ScriptedService) -> None:
    def lost() -> list[RankStats]:
        raise DeploymentError("rank 1 died")

    page = handlers(build_app(service, facts="", panel=Panel(service=Busy(), ranks=lost)))
    text, sight, heat = page["figures"](None, True)
    assert "rank 1 died" in text
    assert (sight, heat) == (None, "")
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


@pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # gradio's own use of pandas
def test_a_picture_is_an_upload_of_the_page_and_never_a_file_of_the_machine(app: gr.Blocks, url: str) -> None:
    """Names of uploads that climb lose their way, and a question that names a file of the host is refused."""
    (accept,) = (number for number, block in app.fns.items() if block.fn is not None and block.fn.__name__ == "accept")
    with httpx.Client(base_url=url, timeout=30) as client:
        (stored,) = client.post("/gradio_api/upload", files={"files": ("../../../../etc/x.png", b"x")}).json()
        assert stored.startswith(tempfile.gettempdir())
        assert ".." not in stored
        for path in ("/etc/passwd", str(ROOT / "pyproject.toml"), stored + "/../../../../../etc/passwd"):
            question = {"text": "What?", "files": [{"path": path, "meta": {"_type": "gradio.FileData"}}]}
            asked = {"data": [question, None], "fn_index": accept, "session_hash": "stranger"}
            assert client.post("/gradio_api/queue/join", json=asked).status_code == 200
            with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "stranger"}) as events:
                said = "".join(events.iter_text())
            assert '"success":false' in said, said
            assert "root:" not in said
        question["files"] = [{"path": stored, "meta": {"_type": "gradio.FileData"}}]
        client.post("/gradio_api/queue/join", json=asked)
        with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "stranger"}) as events:
            assert '"success":true' in "".join(events.iter_text()), "an upload of the page is taken"


def test_with_logins_nothing_is_shown_to_anybody_else(service: ScriptedService, tmp_path: Path) -> None:
    (tmp_path / "logins").write_text("ann:word:with colon\n\nbob:other\n")
    logins = read_logins(tmp_path / "logins")
    assert logins == [("ann", "word:with colon"), ("bob", "other")]
    app = build_app(service, facts="secret facts")
    url = launch(app, wait=False, logins=logins)
    with httpx.Client(base_url=url, timeout=30) as client:
        assert "secret facts" not in client.get("/").text
        assert client.get("/config").status_code == 401
        assert client.post("/gradio_api/upload", files={"files": ("a.png", b"x")}).status_code == 401
        assert client.post("/login", data={"username": "ann", "password": "other"}).status_code == 400
        assert client.post("/login", data={"username": "bob", "password": "other"}).status_code == 200
        assert "secret facts" in client.get("/config").text
    app.close()


@pytest.mark.parametrize(("text", "message"), [("", "no login"), ("ann:\n", "line 1"), ("ann:x\nhunter2\n", "line 2")])
def test_an_unusable_file_of_logins_is_refused_and_not_repeated(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "logins").write_text(text)
    with pytest.raises(RequestError, match=message) as caught:
        read_logins(tmp_path / "logins")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(RequestError, match="cannot be read"):
        read_logins(tmp_path / "none")


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
        (["--url", "127.0.0.1:8000"], "not the address of a server"),
        (["--url", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--login-file", "no/such/file"], "cannot be read"),
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
