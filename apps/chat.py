"""Chat with a loaded model in the browser: text and pictures in, streamed text out.

    python -m apps.chat --model data/k3-nano --ranks 2
    python -m apps.chat --url http://HOST:8000/v1           any server of the OpenAI interface

Layout, events and the start are here; what a question does is in `apps.conversation`. The page talks to this machine
alone, and it shows what the model wrote letter by letter, never as markup.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from apps.conversation import ChatService, Conversation, Options, stream_answer
from apps.panel import Panel, Sight
from workbench.base import RequestError, WorkbenchError
from workbench.checkpoint import read_origin
from workbench.deployment import Deployment
from workbench.exam.trained import is_trained_here
from workbench.placement import Layout, choose_layout
from workbench.serving import MultimodalInferenceService
from workbench.serving.client import RemoteService, read_api_key
from workbench.serving.open import open_service
from workbench.spec import read_spec
from workbench.view import terminal_progress

__all__ = ["build_app", "examples_for", "launch", "main", "read_logins", "running_service"]

DATA = Path(__file__).resolve().parents[1] / "data"
IMAGES, SCENES = DATA / "images", DATA / "scenes"
Example = tuple[str, tuple[Path, ...]]  # a question and its pictures
EXAMPLES: tuple[Example, ...] = (
    ("What does the picture show?", (IMAGES / "red_circle.png",)),
    ("Which bar is the tallest?", (IMAGES / "three_bars.png",)),
    ("Compare the two pictures.", (IMAGES / "house.png", IMAGES / "transparent_triangle.png")),
    ("What is a shard, and what is a rank?", ()),
)
MAX_UPLOAD = "20mb"
KEEP_UPLOADS_S = 3600
REFRESH_S = 2.0  # of the side panel, while it is open
# Pictures in a conversation come with buttons that send them to a service on the internet.
# Now and then a cancelled answer leaves "Error" over the window, where it takes the clicks on what it covers; what went
# wrong stands in the conversation, and errors of a handler come as messages of their own.
CSS = """
#chat button[title="Share"], #chat button[aria-label="Share"] { display: none; }
#chat [data-testid="status-tracker"], #note [data-testid="status-tracker"] { display: none; }
"""


def examples_for(model: Path) -> tuple[Example, ...]:
    """Questions to try: about held-out scenes where the model was trained on others, else about plain drawings."""
    if not is_trained_here(model):
        return EXAMPLES
    records = json.loads((SCENES / "questions.json").read_text(encoding="utf-8"))
    scenes = [(record["question"], (SCENES / record["picture"],)) for record in records]
    return (*scenes, ("Describe the picture.", scenes[0][1]), ("What is tensor parallelism?", ()))


def build_app(
    service: ChatService,
    *,
    facts: str,
    examples: Sequence[Example] = EXAMPLES,
    max_tokens: int = 512,
    num_parallel: int = 4,
    panel: Panel | None = None,
) -> gr.Blocks:
    """The page over a service that is already running; `facts` (Markdown) says what is being talked to, and `panel`
    what stands at its side: it is asked when a page opens, again and again while it is unfolded, and after each answer.
    The load of experts is asked for while the visitor wants to see it, and counted no longer.

    At most `num_parallel` answers are under way at once, the others wait in the page's queue. Visitors share nothing
    but the service.
    """

    def accept(box: dict[str, Any], conversation: Conversation, event: gr.EventData) -> tuple[Any, ...]:
        try:
            if event.target is not None and event.target._id == chat._id:
                conversation = conversation.asked_again()
            else:
                conversation = conversation.stopped().ask(box["text"], box["files"])
        except WorkbenchError as error:
            raise gr.Error(str(error), title="Not sent") from None  # the box keeps its text, nothing is started
        return (
            conversation,
            conversation.shown(),
            gr.MultimodalTextbox(value=None, interactive=False),
            gr.Button(interactive=True),
        )

    def take_back(conversation: Conversation) -> tuple[Any, ...]:
        try:
            conversation, turn = conversation.taken_back()
        except WorkbenchError as error:
            raise gr.Error(str(error), title="Not taken back") from None
        question = gr.MultimodalTextbox(value={"text": turn.text, "files": list(turn.images)})
        return conversation, conversation.shown(), conversation.note, question

    visitors = Visitors()

    def answer(
        conversation: Conversation, tokens: float, temperature: float, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        options = Options(max_tokens=int(tokens), temperature=float(temperature))
        with contextlib.closing(stream_answer(service, conversation, options)) as steps:
            for step in steps:
                if visitors.has_left(request.session_hash):
                    return
                yield step, step.shown(), step.note

    def leave(request: gr.Request) -> None:
        visitors.leave(request.session_hash)

    def figures(before: Sight | None, wants_experts: bool) -> tuple[str, Sight | None, str]:
        assert panel is not None
        try:
            text, sight = panel.look(before)
            return text, sight, panel.heat() if wants_experts else ""
        except WorkbenchError as error:
            return str(error), None, ""

    def ready() -> tuple[Any, ...]:
        return gr.MultimodalTextbox(interactive=True), gr.Button(interactive=False)

    def stop(conversation: Conversation) -> tuple[Any, ...]:
        conversation = conversation.stopped()
        return conversation, conversation.shown(), conversation.note, *ready()

    def clear() -> tuple[Any, ...]:
        return Conversation(), [], "", *ready()

    uploads = (KEEP_UPLOADS_S, KEEP_UPLOADS_S)  # look this often, delete what is older
    with gr.Blocks(title="workbench chat", analytics_enabled=False, fill_height=True, delete_cache=uploads) as app:
        if panel is not None:
            with gr.Sidebar(position="right", open=False, width=320, elem_id="side") as sidebar:
                side = gr.Markdown(elem_id="panel")
                refresh = gr.Button("Refresh", size="sm", elem_id="refresh")
                wants_experts = gr.Checkbox(
                    False, label="Load of experts", visible=panel.experts is not None, elem_id="wants-experts"
                )
                heat = gr.HTML(elem_id="experts")
            sight = gr.State(None)
            timer = gr.Timer(REFRESH_S, active=False)
        gr.Markdown(facts, elem_id="facts")
        conversation = gr.State(Conversation())
        chat = gr.Chatbot(
            label="Conversation",
            scale=1,
            min_height=360,
            render_markdown=False,
            latex_delimiters=[],
            buttons=[],
            feedback_options=None,
            elem_id="chat",
        )
        note = gr.Markdown(elem_id="note")
        box = gr.MultimodalTextbox(
            show_label=False,
            placeholder="Ask something, with or without pictures",
            file_types=["image"],
            file_count="multiple",
            sources=["upload"],
            elem_id="question",
        )
        with gr.Row():
            stop_button = gr.Button("Stop", variant="stop", size="sm", interactive=False, elem_id="stop")
            clear_button = gr.Button("New conversation", size="sm", elem_id="clear")
        with gr.Accordion("Settings", open=False):
            tokens = gr.Slider(
                1, max_tokens, value=min(256, max_tokens), step=1, label="Longest answer, tokens", elem_id="tokens"
            )
            temperature = gr.Slider(
                0, 2, value=0, step=0.05, label="Temperature (0 takes the likeliest token)", elem_id="temperature"
            )
        gr.Examples(
            [[{"text": text, "files": [str(path) for path in pictures]}] for text, pictures in examples],
            inputs=[box],
            cache_examples=False,
        )

        page: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        asked = gr.on(
            [box.submit, chat.retry],
            accept,
            [box, conversation],
            [conversation, chat, box, stop_button],
            **page,
        )
        running = asked.success(
            answer,
            [conversation, tokens, temperature],
            [conversation, chat, note],
            concurrency_limit=num_parallel,
            concurrency_id="engine",
            **page,
        )
        running.then(ready, None, [box, stop_button], **page)
        if panel is not None:
            for trigger in (running.then, refresh.click, wants_experts.change, timer.tick, app.load):
                trigger(figures, [sight, wants_experts], [side, sight, heat], **page)
            sidebar.expand(lambda: gr.Timer(active=True), None, [timer], **page)
            sidebar.collapse(lambda: gr.Timer(active=False), None, [timer], **page)
        # Into the box, where it can be changed: what the chat window offers for that fails on questions with pictures.
        chat.undo(take_back, [conversation], [conversation, chat, note, box], **page)
        everything = [conversation, chat, note, box, stop_button]
        # Cancel first: run beside it, the handler would be overtaken by the last update of the answer.
        for event, handler, inputs in (
            (stop_button.click, stop, [conversation]),
            (clear_button.click, clear, None),
            (chat.clear, clear, None),
        ):
            event(None, cancels=[running], api_visibility="private").then(handler, inputs, everything, **page)
        # The queue notices that nobody listens between two messages, and not at all before somebody has listened.
        app.unload(leave)
    return app.queue(max_size=32)


class Visitors:
    """Who has closed the page, by the number of the page's session. Of very many the first are forgotten."""

    MOST = 10_000

    def __init__(self) -> None:
        self._left: OrderedDict[str | None, None] = OrderedDict()

    def leave(self, session: str | None) -> None:
        self._left[session] = None
        if len(self._left) > self.MOST:
            self._left.popitem(last=False)

    def has_left(self, session: str | None) -> bool:
        return session in self._left


def launch(
    app: gr.Blocks,
    *,
    port: int | None = None,
    wait: bool = True,
    root_path: str | None = None,
    logins: Sequence[tuple[str, str]] = (),
) -> str:
    """Serve the page on this machine only and return its address; with `wait`, first when it is interrupted.

    `root_path`: where a proxy shows it, such as /chat. With `logins` (name, password) nobody else sees anything of it.
    """
    _, url, _ = app.launch(
        server_name="127.0.0.1",
        server_port=port,
        root_path=root_path,
        auth=list(logins) or None,
        share=False,
        ssr_mode=False,
        max_file_size=MAX_UPLOAD,
        footer_links=[],
        css=CSS,
        quiet=True,
        prevent_thread_lock=True,
    )
    if wait:
        print(f"chat is at {url} (Ctrl-C ends it)", flush=True)
        app.block_thread()
    return url


def read_logins(path: Path) -> list[tuple[str, str]]:
    """One `name:password` a line. Raises RequestError for a file that holds none, or a line that is none of them; it
    never repeats what stands there."""
    logins = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the logins cannot be read: {type(error).__name__}", where=path) from None
    for number, line in enumerate(lines, start=1):
        name, colon, password = line.strip().partition(":")
        if line.strip() and not (name and colon and password):
            raise RequestError(f"line {number} is no login", where=path, expected="name:password")
        if line.strip():
            logins.append((name, password))
    if not logins:
        raise RequestError("the file holds no login", where=path, expected="one name:password a line")
    return logins


@contextmanager
def running_service(
    model: Path,
    layout: Layout,
    *,
    precision: str = "mxfp4",
    device: str = "auto",
    num_slots: int = 4,
    context: int = 4096,
) -> Iterator[tuple[MultimodalInferenceService, str]]:
    """A service over the ranks of `layout`, with the facts to show about it; ends the processes on leaving.

    Raises WorkbenchError where the model cannot be read, spread or loaded.
    """
    context = min(context, read_spec(model).max_context)
    with (
        terminal_progress(layout.world_size) as progress,
        Deployment.start(
            model,
            layout,
            precision=precision,
            device=device,
            num_slots=num_slots,
            max_tokens=context,
            on_progress=progress,
        ) as deployment,
        open_service(deployment, model) as service,
    ):
        ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
        yield (
            service,
            f"**{model}** · {read_origin(model).note} · {ranks} ({layout}) on {deployment.stats()[0].device}, "
            f"{precision} · conversations of up to {context:,} tokens",
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat with a checkpoint on several ranks of this machine.")
    parser.add_argument("--model", type=Path, default=Path("data/k3-nano"), help="checkpoint folder")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes; a layout is chosen")
    parser.add_argument("--layout", help="layout such as tp2 or pp2xtp4 (instead of --ranks)")
    parser.add_argument("--precision", default="mxfp4", help="fp32, bf16, fp8, int8, int4 or mxfp4")
    parser.add_argument("--device", default="auto", help="device type of the ranks (default: an accelerator, else cpu)")
    parser.add_argument("--slots", type=int, default=4, help="answers under way at the same time")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a conversation, answer included")
    parser.add_argument("--url", help="talk to a server of the OpenAI interface instead, such as http://HOST:8000/v1")
    parser.add_argument("--model-name", help="model to ask for (with --url; default: the first it offers)")
    parser.add_argument("--api-key-file", type=Path, help="file whose first line is the key (with --url)")
    parser.add_argument("--port", type=int, default=None, help="port on 127.0.0.1 (default: a free one from 7860)")
    parser.add_argument("--root-path", help="path under which a proxy shows the page, such as /chat")
    parser.add_argument("--login-file", type=Path, help="one `name:password` a line: nobody else gets in")
    args = parser.parse_args(arguments)
    try:
        logins = read_logins(args.login_file) if args.login_file is not None else []
        with _page(args) as app:
            launch(app, port=args.port, root_path=args.root_path, logins=logins)
    except WorkbenchError as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def _page(args: argparse.Namespace) -> Iterator[gr.Blocks]:
    if args.url is not None:
        key = read_api_key(args.api_key_file) if args.api_key_file is not None else None
        remote = RemoteService(args.url, api_key=key, model=args.model_name)
        # The server names itself: as code no name can become a link or a picture.
        facts = " at ".join(f"`{text.replace('`', '')}`" for text in (remote.model, remote.url))
        yield build_app(remote, facts=facts, num_parallel=args.slots)
        return
    layout = Layout.parse(args.layout) if args.layout else choose_layout(read_spec(args.model), args.ranks)
    with running_service(
        args.model,
        layout,
        precision=args.precision,
        device=args.device,
        num_slots=args.slots,
        context=args.context,
    ) as (service, facts):
        yield build_app(
            service,
            facts=facts,
            examples=examples_for(args.model),
            max_tokens=min(512, service.model.info.max_tokens),
            num_parallel=args.slots,
            panel=Panel.of(service),
        )


if __name__ == "__main__":
    main()
