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
    command,
    count,
    deploy,
    deployment_arguments,
    limit,
    seconds,
    temperature,
)
from workbench.cli.copies import CopyMaker, log_copies
from workbench.cli.show import print_json, say
from workbench.spec import read_spec

if TYPE_CHECKING:
    from workbench.cli.terminal import ChatService


def add(commands: Commands) -> None:
    serve = command(commands, "serve", _serve, "an OpenAI-compatible server over N ranks; Ctrl-C ends it in order")
    deployment_arguments(serve, spans_hosts=True)
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
    serve.add_argument(
        "--copies",
        type=count,
        default=1,
        help="copies of the model, each on ranks of its own; requests go to the least busy one (default 1)",
    )
    serve.add_argument(
        "--admin-key-file",
        type=Path,
        help="one `holder:key` a line, for /admin/copies, which changes the number of copies while serving "
        "(default: nobody may)",
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
    from workbench.serving import Copies, Fleet, open_service
    from workbench.serving.copies import MOST

    if args.copies > MOST:
        raise UsageError(f"--copies {args.copies}: at most {MOST}")
    keys = read_api_keys(args.api_key_file) if args.api_key_file is not None else {}
    if not keys and not args.open and not _is_loopback(args.host):
        raise UsageError(f"--host {args.host} lets other machines in: give --api-key-file, or --open if that is meant")
    settings = ServerSettings(
        model=args.model_name or args.path.resolve().name,
        host=args.host,
        port=args.port,
        api_keys=keys,
        admin_keys=read_api_keys(args.admin_key_file) if args.admin_key_file is not None else {},
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
    with contextlib.closing(bind_address(settings)) as bound, CopyMaker(args) as maker:
        first = maker.first()
        if args.copies > 1:
            maker.check_room(args.copies - 1)
        fleet = Fleet([first], make=maker.engine)
        copies = Copies(
            fleet,
            [first],
            start=maker.another,
            check=maker.check_room,
            close_runner=maker.close,
            on_event=log_copies,
            drain_s=args.request_timeout,
        )
        with contextlib.closing(copies), open_service(fleet, args.path) as service:
            server = HttpServer(service, settings, bound=bound, copies=copies)
            if args.copies > 1:
                copies.change(args.copies)
            if args.json:
                print_json({"url": server.url, "model": settings.model})
            else:
                say(f"{settings.model} is served at {server.url} (Ctrl-C ends it after the answers under way)")
            server.run()
    return 0


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
