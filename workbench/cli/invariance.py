"""invariance: the same requests alone and in every kind of company, answers compared."""

from __future__ import annotations

import argparse
import math

from workbench.cli.arguments import (
    Commands,
    cache_arguments,
    chosen_layout,
    command,
    count,
    deploy,
    deployment_arguments,
    number,
)
from workbench.cli.show import show


def add(commands: Commands) -> None:
    parser = command(
        commands, "invariance", _invariance, "are answers independent of batch, chunks, kept pages and pauses?"
    )
    deployment_arguments(parser)
    cache_arguments(parser)
    parser.set_defaults(precision="fp32")
    parser.add_argument("--slots", type=count, default=4, help="sequences at once, per replica (default 4)")
    parser.add_argument("--requests", type=count, default=6, help="how many are compared (default 6)")
    parser.add_argument("--tokens", type=count, default=12, help="length of each answer (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn prompts (default 0)")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        help="largest |Δ log p| that rounding may make, in nats (default 1e-3 in fp32, else 0.25)",
    )


def _tolerance(text: str) -> float:
    return float(number(text, float, "a number above 0", lambda value: 0 < value < math.inf))


def _invariance(args: argparse.Namespace) -> int:
    from workbench.serving.invariance import check_invariance, invariance_requests, tolerance_of
    from workbench.spec import read_spec

    layout = chosen_layout(args)
    with deploy(args, num_slots=args.slots) as deployment:
        report = check_invariance(
            deployment,
            invariance_requests(
                read_spec(args.path),
                deployment.info,
                num_requests=args.requests,
                max_tokens=args.tokens,
                seed=args.seed,
            ),
            tolerance=args.tolerance or tolerance_of(args.precision),
            place=f"{args.path.resolve().name}, {layout}, {args.precision}",
        )
    show(args, report)
    return 0 if report.ok else 1
