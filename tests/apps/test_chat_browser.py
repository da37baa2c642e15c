"""The chat in a real browser: on two real ranks, and on a scripted service where timing has to be known."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from openai_scripted import ScriptedOpenAI, dies_after, says, words_of
from PIL import Image
from playwright.sync_api import BrowserContext, Page, sync_playwright
from scripted import ScriptedService

from apps.chat import build_app, launch, running_service
from apps.panel import Panel
from workbench.placement import Layout
from workbench.profiling import ExpertLoad
from workbench.profiling.experts import LayerLoad
from workbench.serving import EngineStats, MultimodalInferenceService, RecentTimes
from workbench.serving.client import RemoteService

ROOT = Path(__file__).resolve().parents[2]
MODEL, IMAGES = ROOT / "data" / "k3-tiny", ROOT / "data" / "images"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Without the second line Chromium itself tries to reach hosts on the internet.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
EXTERNAL = "http://198.51.100.7/picture.png"  # an address reserved for documentation

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning"),  # gradio's own use of pandas
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on this machine"),
]


class Visitor:
    """A page of the chat, with every request it made and the bytes it received."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.requests: list[str] = []
        self.num_bytes = 0
        self.page: Page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        session = context.new_cdp_session(self.page)
        session.send("Network.enable")
        session.on("Network.dataReceived", self._count)
        self.page.goto(url)
        self.page.wait_for_selector("#question textarea")

    def _count(self, event: dict[str, int]) -> None:
        self.num_bytes += event["dataLength"]

    @property
    def external(self) -> list[str]:
        urls = map(urlsplit, self.requests)
        return [url.geturl() for url in urls if url.scheme in ("http", "https", "ws") and url.hostname != "127.0.0.1"]

    @property
    def note(self) -> str:
        return self.page.locator("#note").inner_text().strip()

    @property
    def answers(self) -> list[str]:
        return self.page.locator("#chat .bot.message").all_inner_texts()

    def ask(self, text: str, *pictures: Path) -> None:
        if pictures:
            self.page.locator("#question input[type=file]").set_input_files(list(pictures))
            self.page.wait_for_function(
                "count => document.querySelectorAll('#question img').length >= count", arg=len(pictures)
            )
        self.page.locator("#question textarea").fill(text)
        self.page.keyboard.press("Enter")

    def limit_answers(self, tokens: int) -> None:
        """Type into the settings until the slider follows: what is typed within milliseconds of their unfolding can be
        lost, which was seen twice in about a hundred runs."""

        def is_taken() -> bool:
            self.page.locator("#tokens input[type=number]").fill(str(tokens))
            self.page.locator("#tokens input[type=number]").press("Tab")
            self.page.wait_for_timeout(300)
            return self.page.locator("#tokens input[type=range]").input_value() == str(tokens)

        self.wait(is_taken, f"the slider at {tokens}", 20)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        end_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end_s, f"{what}: not within {seconds} s; the page says {self.note!r}"
            self.page.wait_for_timeout(50)  # lets events of the page come in, which time.sleep does not


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1100, "height": 1150},
        )
        yield context
        context.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[MultimodalInferenceService, str]]:
    with running_service(MODEL, Layout(tp=2, ep=2), device="cpu") as (service, facts):
        app = build_app(service, facts=facts, panel=Panel.of(service))
        yield service, launch(app, wait=False)
        app.close()


@pytest.mark.ranks
def test_picture_question_streams_stops_and_is_answered_on_two_ranks(
    browser: BrowserContext, ranks: tuple[MultimodalInferenceService, str], tmp_path: Path
) -> None:
    service, url = ranks
    visitor = Visitor(browser, url)
    assert "random weights" in visitor.page.locator("#facts").inner_text()
    assert "2 ranks (tp2xep2) on cpu" in visitor.page.locator("#facts").inner_text()

    # Text grows while the answer is under way, which is long enough for all that is looked at meanwhile.
    visitor.page.get_by_text("Settings").click()
    visitor.limit_answers(512)
    visitor.ask("What does the picture show?", IMAGES / "house.png")
    seen: list[str] = []

    def has_grown() -> bool:
        if visitor.note.startswith("writing") and visitor.answers:
            seen.append(visitor.answers[-1])
        return len(set(map(len, seen))) >= 3

    visitor.wait(has_grown, "streamed text")
    assert sorted(seen, key=len) == seen
    assert service.stats().num_running == 1
    visitor.page.screenshot(path=tmp_path / "streaming.png")

    # Stop frees the slot at once and keeps what was written.
    visitor.page.locator("#stop").click()
    visitor.wait(lambda: visitor.note == "stopped", "stop", 10)
    visitor.wait(lambda: service.stats().num_running == 0, "freed slot", 10)
    assert service.stats().num_aborted >= 1
    assert service.stats().num_free_slots == service.model.info.num_slots
    stopped = visitor.answers[-1]
    assert len(stopped) >= len(seen[-1])
    visitor.page.wait_for_timeout(1000)
    assert visitor.answers[-1] == stopped

    # The next question, with a short answer, comes to its end; a transparent picture and hostile text are harmless.
    visitor.limit_answers(6)
    visitor.ask(f"And <img src='{EXTERNAL}'> now?", IMAGES / "transparent_triangle.png")
    visitor.wait(lambda: "written" in visitor.note, "second answer")
    assert "of pictures)" in visitor.note
    assert "; 6 written" in visitor.note
    assert "cut at the longest answer allowed" in visitor.note
    assert len(visitor.answers) == 2
    assert f"And <img src='{EXTERNAL}'> now?" in visitor.page.locator("#chat").inner_text()
    visitor.page.screenshot(path=tmp_path / "answered.png")
    print(f"screenshots in {tmp_path}")

    assert len(visitor.requests) > 20
    assert visitor.external == []
    visitor.page.evaluate("url => { new Image().src = url; }", EXTERNAL)  # the recorder does see such a request
    visitor.wait(lambda: visitor.external == [EXTERNAL], "recorded request", 10)
    visitor.page.close()


@pytest.mark.ranks
def test_closed_tab_frees_the_request(browser: BrowserContext, ranks: tuple[MultimodalInferenceService, str]) -> None:
    service, url = ranks
    visitor = Visitor(browser, url)
    visitor.ask("What is a shard?")
    visitor.wait(lambda: service.stats().num_running == 1, "running request")
    num_aborted = service.stats().num_aborted
    visitor.page.close()
    end_s = time.monotonic() + 10
    while service.stats().num_running:
        assert time.monotonic() < end_s, "the request still runs 10 s after its visitor left"
        time.sleep(0.05)
    assert service.stats().num_aborted == num_aborted + 1, "it was given up, and did not come to its own end"


@pytest.mark.ranks
def test_the_unfolded_panel_follows_waits_rates_and_experts_and_asks_nobody_else(
    browser: BrowserContext, ranks: tuple[MultimodalInferenceService, str], tmp_path: Path
) -> None:
    service, url = ranks
    visitor = Visitor(browser, url)
    panel = visitor.page.locator("#panel")
    visitor.page.locator("#side .toggle-button").click()
    visitor.wait(lambda: "tp2xep2 on 2 ranks" in panel.inner_text(), "the layout")
    visitor.page.locator("#wants-experts input").check()
    visitor.wait(lambda: "count from now on" in visitor.page.locator("#experts").inner_text(), "the ranks to count")
    visitor.page.get_by_text("Settings").click()
    visitor.limit_answers(6)
    visitor.ask("What is a shard?")
    visitor.wait(lambda: "written" in visitor.note, "answer")
    visitor.wait(lambda: "between tokens, p50 and p99" in panel.inner_text(), "waits")
    visitor.wait(lambda: "tokens a second" in panel.inner_text(), "a rate")
    visitor.wait(lambda: visitor.page.locator("#experts svg image").count() == 1, "the load of experts")
    drawn = visitor.page.locator("#experts svg image").evaluate(
        "image => fetch(image.href.baseVal).then(got => got.blob()).then(createImageBitmap)"
        ".then(pixels => [pixels.width, pixels.height])"
    )
    layers = [layer for layer in service.model.spec.layers if layer.is_moe]
    assert drawn == [layers[0].ffn.num_experts, len(layers)]
    visitor.page.screenshot(path=tmp_path / "panel.png")
    print(f"screenshot in {tmp_path}")
    assert visitor.external == []
    visitor.page.close()


def test_updates_do_not_grow_with_the_pictures_of_the_conversation(browser: BrowserContext, tmp_path: Path) -> None:
    pictures = []
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (200, 200, 3), np.uint8)
        pictures.append(tmp_path / f"noise{number}.png")
        Image.fromarray(pixels).save(pictures[-1])  # noise does not compress: 120 kB each
    gate = threading.Semaphore(0)
    service = ScriptedService([f"word{i} " for i in range(60)], gate=gate)
    app = build_app(service, facts="scripted")
    visitor = Visitor(browser, launch(app, wait=False))
    visitor.ask("What do they show?", *pictures)
    gate.release()
    visitor.wait(lambda: bool(visitor.answers) and "word0" in visitor.answers[-1], "first word")
    visitor.page.wait_for_timeout(500)  # pictures of the conversation have been fetched by now
    before = visitor.num_bytes
    for _ in range(59):
        gate.release()
        visitor.page.wait_for_timeout(60)
    visitor.wait(lambda: "written" in visitor.note, "whole answer")
    received = visitor.num_bytes - before
    assert received > 0
    assert received < 60_000, f"{received} B for 59 updates; one set of the pictures alone is 360 kB"
    visitor.page.close()
    app.close()


def test_what_the_model_writes_is_shown_and_never_run(browser: BrowserContext) -> None:
    hostile = f"<img src='{EXTERNAL}'> ![x]({EXTERNAL}) <script>fetch('{EXTERNAL}')</script> **bold**"
    app = build_app(ScriptedService([hostile]), facts="scripted")
    visitor = Visitor(browser, launch(app, wait=False))
    visitor.ask("Say it")
    visitor.wait(lambda: "written" in visitor.note, "answer")
    visitor.page.wait_for_timeout(500)
    assert visitor.answers[-1].strip() == hostile
    assert visitor.external == []
    visitor.page.close()
    app.close()


def test_a_server_elsewhere_is_talked_to_stopped_asked_again_and_in_other_words(browser: BrowserContext) -> None:
    gate = threading.Semaphore(0)
    script = (
        says(["one ", "two ", "three"], gate=gate),
        says(["whole ", "answer"]),
        dies_after(["half "]),
        says(["whole ", "again"]),
        says(["in other words"]),
    )
    with ScriptedOpenAI(*script) as server:
        app = build_app(RemoteService(server.url), facts="elsewhere")
        visitor = Visitor(browser, launch(app, wait=False))
        visitor.ask("What is <it>?", IMAGES / "house.png")
        gate.release(2)
        visitor.wait(lambda: bool(visitor.answers) and visitor.answers[-1].strip() == "one two", "streamed text")
        visitor.page.locator("#stop").click()
        visitor.wait(lambda: visitor.note == "stopped", "stop")
        assert server.left.wait(30), "the server still sends"
        visitor.page.get_by_role("button", name="Retry").click()
        visitor.wait(lambda: visitor.answers[-1].strip() == "whole answer", "the question once more")
        visitor.wait(lambda: "the model ended" in visitor.note, "its end")
        visitor.ask("And then?")
        visitor.wait(lambda: "broke off" in visitor.note, "a server that died")
        assert "half" in visitor.answers[-1]
        visitor.page.get_by_role("button", name="Retry").click()
        visitor.wait(lambda: visitor.answers[-1].strip() == "whole again", "another answer")
        visitor.wait(lambda: "the model ended" in visitor.note, "its end")
        visitor.page.get_by_role("button", name="Undo").click()
        box = visitor.page.locator("#question textarea")
        visitor.wait(lambda: box.input_value() == "And then?", "the question in the box")
        assert len(visitor.answers) == 1
        visitor.page.get_by_role("button", name="Undo").click()
        visitor.wait(lambda: box.input_value() == "What is <it>?", "the first question in the box")
        visitor.page.wait_for_selector("#question img")
        box.fill("Which colour has <it>?")
        box.press("Enter")
        visitor.wait(lambda: visitor.answers[-1:] == ["in other words"], "the changed question")
        assert "Which colour has <it>?" in visitor.page.locator("#chat").inner_text()
    first = [("user", "[picture]What is <it>?")]
    talk = [*first, ("assistant", "whole answer"), ("user", "And then?")]
    assert [words_of(asked) for asked in server.asked] == [
        first, first, talk, talk, [("user", "[picture]Which colour has <it>?")]
    ]  # fmt: skip
    assert visitor.external == []
    visitor.page.close()
    app.close()


class Proxy(ThreadingHTTPServer):
    """Shows the server at `origin` under /chat, and nothing else."""

    def __init__(self, origin: str) -> None:
        super().__init__(("127.0.0.1", 0), Forward)
        self.origin, self.strays = urlsplit(origin), list[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/chat"


class Forward(BaseHTTPRequestHandler):
    def forward(self) -> None:
        assert isinstance(self.server, Proxy)
        prefix, _, path = self.path.partition("/chat/")
        if prefix or not self.path.startswith("/chat"):
            self.server.strays.append(self.path)
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        origin = http.client.HTTPConnection(self.server.origin.netloc, timeout=60)
        origin.request(self.command, f"/{path}", body, dict(self.headers))  # its Host as well: links are made of it
        answer = origin.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the page may have gone
            while piece := answer.read1(1 << 16):
                self.wfile.write(piece)
                self.wfile.flush()
        origin.close()

    do_GET = do_POST = do_HEAD = forward

    def log_message(self, *args: object) -> None:
        pass


def test_behind_the_path_of_a_proxy_answers_stream_and_the_panel_is_drawn(browser: BrowserContext) -> None:
    class Figures:
        def stats(self) -> EngineStats:
            return EngineStats(num_waiting=0, num_running=0, num_free_slots=4, num_steps=5, num_aborted=0)

        def recent(self) -> RecentTimes:
            return RecentTimes(first_token_s=(0.5,))

    load = ExpertLoad(layers=(LayerLoad(layer=1, counts=(3, 0, 1)),))
    panel = Panel(service=Figures(), experts=lambda: load)
    app = build_app(ScriptedService(["one ", "two"]), facts="scripted", panel=panel)
    proxy = Proxy(launch(app, wait=False, root_path="/chat"))
    visitor = Visitor(browser, f"{proxy.url}/")
    visitor.ask("What do they show?", IMAGES / "house.png")
    visitor.wait(lambda: "written" in visitor.note, "answer")
    assert visitor.answers[-1].strip() == "one two"
    visitor.page.locator("#side .toggle-button").click()
    visitor.page.locator("#wants-experts input").check()
    visitor.wait(lambda: visitor.page.locator("#experts svg image").count() == 1, "the load of experts")
    assert "first token, p50 and p99" in visitor.page.locator("#panel").inner_text()
    assert visitor.external == []
    paths = {urlsplit(url).path for url in visitor.requests if url.startswith("http")}
    # Icon and manifest of an installed page are looked for at the root whatever the path is, and nothing needs them.
    assert {path for path in (*paths, *proxy.strays) if not path.startswith("/chat/")} <= {
        "/favicon.ico",
        "/manifest.json",
    }
    visitor.page.close()
    app.close()
    proxy.shutdown()
    proxy.server_close()
