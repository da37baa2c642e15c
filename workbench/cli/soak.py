"""soak: many users at once for a long time against N ranks behind the server, every answer checked, nothing kept."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base import plain
from workbench.cli.arguments import (
    Commands,
    UsageError,
    cache_arguments,
    chosen_layout,
    command,
    count,
    deployment_arguments,
    deployment_options,
    limit,
    seconds,
)
from workbench.cli.show import say, show

if TYPE_CHECKING:
    from workbench.deployment import RestartEvent
    from workbench.profiling.soak import SoakRecord


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "soak",
        _soak,
        "many users for a long time: are answers their own, is everything given back, is a dead rank replaced? "
        "Exit code 1 where a promise is broken or could not be shown",
    )
    deployment_arguments(parser)
    cache_arguments(parser)
    parser.set_defaults(precision="fp32")
    parser.add_argument("--streams", type=count, default=64, help="users at once (default 64)")
    parser.add_argument("--minutes", type=seconds, default=10.0, help="length of the measured part (default 10)")
    parser.add_argument("--slots", type=count, default=8, help="answers under way at once, per replica (default 8)")
    parser.add_argument("--questions", type=count, default=2, help="questions of each user (default 2)")
    parser.add_argument("--answer-tokens", type=count, default=24, help="length of the longest answers (default 24)")
    parser.add_argument("--prefix-pages", type=limit, default=16, help="as for `serve` (default 16)")
    parser.add_argument("--page-tokens", type=count, default=64, help="tokens of such a page (default 64)")
    parser.add_argument("--kill-rank-after", type=seconds, metavar="S", help="kill the last rank after so many seconds")
    parser.add_argument(
        "--restart-within", type=seconds, default=15.0, metavar="S", help="until answers come again (default 15)"
    )
    parser.add_argument(
        "--spare", action="store_true", help="keep started ranks without a model in reserve, as `serve --spare` does"
    )
    parser.add_argument("--seed", type=int, default=0, help="of questions and of what users do (default 0)")
    parser.add_argument("--record", type=Path, help="write the whole record, memory over time included, as JSON")
    parser.add_argument("--figure", type=Path, help="write memory over time as SVG")


def _soak(args: argparse.Namespace) -> int:
    try:
        from workbench.serving.http import HttpServer, ServerSettings
        from workbench.serving.http.watch import LOG
    except ImportError as error:
        raise UsageError(
            f"the server needs more packages ({error.name}): pip install 'day0-workbench[serve]'"
        ) from None
    from workbench.deployment import RestartingDeployment
    from workbench.profiling.soak import SoakSettings, Subject, soak
    from workbench.serving import open_service
    from workbench.serving.invariance import tolerance_of
    from workbench.view import terminal_progress

    settings = SoakSettings(
        num_streams=args.streams,
        seconds=60 * args.minutes,
        questions_per_stream=args.questions,
        max_answer_tokens=args.answer_tokens,
        tolerance=2 * tolerance_of(args.precision),
        kill_after_s=args.kill_rank_after,
        restart_within_s=args.restart_within,
        seed=args.seed,
    )
    layout = chosen_layout(args)
    events: list[tuple[float, RestartEvent]] = []

    def tell(words: str) -> None:
        if not args.json:
            say(words, sys.stderr)

    def note(event: RestartEvent) -> None:
        events.append((time.monotonic(), event))
        tell(f"ranks {event.kind}" + ("" if event.error is None else f": {event.error.message}".partition("\n")[0]))

    LOG.addHandler(logging.NullHandler())  # a line for every request that meets no rank would drown the verdicts
    with (
        terminal_progress(layout.world_size) as progress,
        RestartingDeployment.start(
            args.path,
            layout,
            has_spare=args.spare,
            on_event=note,
            on_progress=None if args.json else progress,
            **deployment_options(args, num_slots=args.slots),
        ) as deployment,
        open_service(deployment, args.path, prefix_pages=args.prefix_pages, page_tokens=args.page_tokens) as service,
        HttpServer(
            service, ServerSettings(model=args.path.resolve().name, port=0, max_waiting=2 * args.streams)
        ) as server,
    ):
        subject = Subject.of(
            deployment,
            service,
            server,
            place=f"{args.path.resolve().name}, {layout}, {args.precision}, {deployment.current.stats()[0].device}",
            prefix_pages=args.prefix_pages,
            events=events,
        )
        record = soak(subject, settings, tell=tell)
    _save(args, record)
    show(args, record)
    return 0 if record.ok else 1


def _save(args: argparse.Namespace, record: SoakRecord) -> None:
    if args.record is not None:
        args.record.parent.mkdir(parents=True, exist_ok=True)
        args.record.write_text(json.dumps(plain(record.to_json())) + "\n")
    if args.figure is not None:
        from workbench.view import draw_svg, memory_over_time

        args.figure.parent.mkdir(parents=True, exist_ok=True)
        args.figure.write_text(draw_svg(memory_over_time(plain(record.to_json())), standalone=True))
