"""serve, chat: N ranks behind an OpenAI-compatible address, and a conversation in the terminal with them or others."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.arguments import (
    Commands,
    UsageError,
    cache_arguments,
    chosen_layout,
    command,
    count,
    deploy,
    deployment_arguments,
    deployment_options,
    limit,
    seconds,
    temperature,
)
from workbench.cli.show import print_json, say
from workbench.spec import read_spec

if TYPE_CHECKING:
    from workbench.cli.terminal import ChatService
    from workbench.deployment import LoadProgress, RestartingDeployment
    from workbench.serving import Drafter, RunnerInfo


def add(commands: Commands) -> None:
    serve = command(commands, "serve", _serve, "an OpenAI-compatible server over N ranks; Ctrl-C ends it in order")
    deployment_arguments(serve)
    cache_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    serve.add_argument("--model-name", help="name that clients ask for (default: name of the folder)")
    serve.add_argument("--api-key-file", type=Path, help="one `holder:key` a line; every question then needs a key")
    serve.add_argument(
        "--quota-file",
        type=Path,
        help="one `holder weight=2 requests_per_minute=60 at_once=4` a line, each optional, for holders of keys",
    )
    serve.add_argument("--open", action="store_true", help="listen beyond this machine without keys")
    serve.add_argument("--slots", type=count, default=8, help="answers under way at once, per replica (default 8)")
    serve.add_argument(
        "--prefix-pages",
        type=int,
        default=0,
        help="pages of common beginnings of prompts to keep, per replica; each costs one recurrent state (default 0)",
    )
    serve.add_argument("--page-tokens", type=count, default=256, help="tokens of such a page (default 256)")
    serve.add_argument("--max-waiting", type=int, default=64, help="requests that may wait for a slot (default 64)")
    serve.add_argument("--requests-per-minute", type=count, help="per key, or per address where there are no keys")
    serve.add_argument("--request-timeout", type=seconds, default=600.0, help="longest answer, seconds (default 600)")
    serve.add_argument(
        "--image-origin",
        action="append",
        default=[],
        metavar="https://HOST",
        help="site whose pictures may be fetched; may be repeated (default: only pictures inside the request)",
    )
    serve.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let the model think first, or not, unless a request says so (default: as its generation config says)",
    )
    serve.add_argument(
        "--speculate",
        metavar="lookup|DIR",
        help="guess the next tokens from the text so far, or by a small model of the same tokenizer (default: not)",
    )
    serve.add_argument("--speculate-tokens", type=count, default=4, help="tokens to guess at a time (default 4)")
    serve.add_argument(
        "--step-timeout",
        type=seconds,
        default=120.0,
        help="longest step of the ranks before they count as hung, seconds (default 120)",
    )
    serve.add_argument(
        "--max-restarts",
        type=limit,
        default=3,
        help="how often within ten minutes ranks that died or hang are started again (default 3; 0: never)",
    )
    serve.add_argument(
        "--spare",
        action="store_true",
        help="keep started ranks without a model in reserve: a restart is then little more than loading, and costs "
        "the host memory of their libraries meanwhile",
    )

    chat = command(commands, "chat", _chat, "a conversation in the terminal, with N ranks or with a server")
    deployment_arguments(chat, path_type=str, path_help="checkpoint folder, or address such as http://HOST:8000/v1")
    chat.add_argument("--model-name", help="model to ask for (with an address; default: the first it offers)")
    chat.add_argument("--api-key-file", type=Path, help="file whose first line is the key (with an address)")
    chat.add_argument("--system", default="", help="what the model is told before the conversation")
    chat.add_argument("--max-tokens", type=count, default=512, help="longest answer (default 512)")
    chat.add_argument("--temperature", type=temperature, default=0.0, help="0 takes the likeliest token (default)")


def _serve(args: argparse.Namespace) -> int:
    try:
        from workbench.serving.http import (
            HttpServer,
            ServerSettings,
            bind_address,
            log_to_stderr,
            read_api_keys,
            read_quotas,
        )
    except ImportError as error:
        raise UsageError(
            f"the server needs more packages ({error.name}): pip install 'day0-workbench[serve]'"
        ) from None
    from workbench.serving import open_service

    keys = read_api_keys(args.api_key_file) if args.api_key_file is not None else {}
    if not keys and not args.open and not _is_loopback(args.host):
        raise UsageError(f"--host {args.host} lets other machines in: give --api-key-file, or --open if that is meant")
    settings = ServerSettings(
        model=args.model_name or args.path.resolve().name,
        host=args.host,
        port=args.port,
        api_keys=keys,
        max_waiting=args.max_waiting,
        requests_per_minute=args.requests_per_minute,
        quotas=read_quotas(args.quota_file) if args.quota_file is not None else {},
        request_timeout_s=args.request_timeout,
        image_origins=tuple(args.image_origin),
        thinking=args.thinking,
    )
    if args.speculate not in (None, "lookup"):
        _check_draft_model(args)
    log_to_stderr()
    # The address is taken before the weights are loaded, which may take an hour.
    with (
        contextlib.closing(bind_address(settings)) as bound,
        _restarting(args) as deployment,
        _drafting(args, deployment.info) as drafter,
        open_service(
            deployment,
            args.path,
            prefix_pages=max(0, args.prefix_pages),
            page_tokens=args.page_tokens,
            drafter=drafter,
        ) as service,
    ):
        server = HttpServer(service, settings, bound=bound)
        if args.json:
            print_json({"url": server.url, "model": settings.model})
        else:
            say(f"{settings.model} is served at {server.url} (Ctrl-C ends it after the answers under way)")
        server.run()
    return 0


@contextlib.contextmanager
def _restarting(args: argparse.Namespace) -> Iterator[RestartingDeployment]:
    from workbench.deployment import RestartEvent, RestartingDeployment, RestartPolicy, Timeouts
    from workbench.serving.http.watch import LOG
    from workbench.view import terminal_progress

    def tell(event: RestartEvent) -> None:
        # The error names the rank, its process and its last command; it holds nothing of any request.
        fields = {"attempt": event.attempt, "seconds": round(event.seconds, 3)}
        told = {**fields, **({"error": str(event.error)} if event.error is not None else {})}
        (LOG.info if event.kind == "restarted" else LOG.error)(f"ranks {event.kind}", extra={"fields": told})

    layout = chosen_layout(args)
    bar = terminal_progress(layout.world_size)
    bars = [] if args.json else [bar]

    def show_progress(progress: LoadProgress) -> None:
        for each in bars:
            each(progress)

    with (
        bar,
        RestartingDeployment.start(
            args.path,
            layout,
            policy=RestartPolicy(max_restarts=args.max_restarts),
            has_spare=args.spare,
            on_event=tell,
            on_progress=show_progress,
            timeouts=Timeouts(step_s=args.step_timeout),
            **deployment_options(args, num_slots=args.slots),
        ) as deployment,
    ):
        bars.clear()  # a restart is told in the log, not drawn into it
        yield deployment


@contextlib.contextmanager
def _drafting(args: argparse.Namespace, target: RunnerInfo) -> Iterator[Drafter | None]:
    from workbench.deployment import Deployment, Timeouts
    from workbench.serving import ModelDrafter, PromptLookup

    if args.speculate is None:
        yield None
        return
    if args.speculate == "lookup":
        yield PromptLookup(args.speculate_tokens)
        return
    options = deployment_options(args, num_slots=args.slots * target.dp)
    options["cache_tokens"], options["num_snapshots"] = (
        None,
        0,
    )  # it has a slot for each of the target's, and no prefixes
    options["max_tokens"] = min(target.max_tokens, read_spec(args.speculate).max_context)
    timeouts = Timeouts(step_s=args.step_timeout)
    with Deployment.start(args.speculate, timeouts=timeouts, **options) as draft:
        yield ModelDrafter(draft, target, args.speculate_tokens)


def _check_draft_model(args: argparse.Namespace) -> None:
    """Its tokenizer must be that of the model: a guess is an id. Raises UsageError where it is not."""
    from workbench.serving import read_tokenizer

    ours, theirs = (read_tokenizer(Path(path), read_spec(path)) for path in (args.path, args.speculate))
    is_same = ours.vocab_size == theirs.vocab_size and all(
        ours.token_bytes(i, show_markers=True) == theirs.token_bytes(i, show_markers=True)
        for i in range(ours.vocab_size)
    )
    if not is_same:
        raise UsageError(f"--speculate {args.speculate}: its tokenizer is not that of {args.path}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _chat(args: argparse.Namespace) -> int:
    from workbench.cli.terminal import Terminal

    with _chat_service(args) as service:
        terminal = Terminal(
            service,
            system=args.system,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            as_json=args.json,
        )
        return terminal.run()


@contextlib.contextmanager
def _chat_service(args: argparse.Namespace) -> Iterator[ChatService]:
    if args.path.startswith(("http://", "https://")):
        from workbench.serving.client import RemoteService, read_api_key

        if args.layout is not None or args.ranks is not None:
            raise UsageError("--layout and --ranks are for a checkpoint folder, not for an address")
        key = read_api_key(args.api_key_file) if args.api_key_file is not None else None
        yield RemoteService(args.path, api_key=key, model=args.model_name)
        return
    from workbench.serving import open_service

    args.path = Path(args.path)
    with deploy(args) as deployment, open_service(deployment, args.path) as service:
        yield service
