"""load, generate: ranks that hold the model, and one question to them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench.base import RequestError
from workbench.cli.arguments import Commands, cache_arguments, command, count, deploy, deployment_arguments, temperature
from workbench.cli.show import show
from workbench.cli.terminal import say


def add(commands: Commands) -> None:
    load = command(commands, "load", _load, "load the shards onto N ranks and print the ledger")
    deployment_arguments(load, spans_hosts=True)

    generate = command(commands, "generate", _generate, "one question, with images, answered by N ranks")
    deployment_arguments(generate, spans_hosts=True)
    cache_arguments(generate)
    generate.add_argument("text", help="the question")
    generate.add_argument("--image", type=Path, action="append", default=[], help="picture to look at; may be repeated")
    generate.add_argument(
        "--max-tokens", type=count, default=128, help="longest answer, thoughts included (default 128)"
    )
    generate.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let the model think first, or not (default: as its generation config says)",
    )
    generate.add_argument("--temperature", type=temperature, default=0.0, help="0 takes the likeliest token (default)")
    generate.add_argument("--seed", type=int, default=0, help="of the draws above temperature 0 (default 0)")


def _load(args: argparse.Namespace) -> int:
    from workbench.deployment import LoadSummary

    with deploy(args) as deployment:
        summary = LoadSummary.of(deployment.reports)
        show(args, summary)
    return 0 if not summary.rows_missing else 1


def _generate(args: argparse.Namespace) -> int:
    from workbench.deployment.experts import expert_use
    from workbench.serving import ImageProcessor, SamplingParams, open_service, read_tokenizer
    from workbench.spec import read_spec

    # What would refuse the question is asked before the weights are loaded, which may take an hour.
    spec = read_spec(args.path)
    read_tokenizer(args.path, spec)
    SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    for path in args.image:
        if spec.image is None or spec.vision is None:
            raise RequestError("this model takes no pictures", where=args.path)
        ImageProcessor(spec.image).process(path)
    with deploy(args) as deployment, open_service(deployment, args.path) as service:
        answer = service.infer(
            args.text,
            args.image or None,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            thinking=args.thinking,
        )
        if args.expert_memory is not None:
            for rank, use in enumerate(expert_use(deployment)):
                say(f"rank {rank}: {use}", sys.stderr)
    show(args, answer)
    return 0
