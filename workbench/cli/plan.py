"""plan: which layout, and why, for a model on machines that need not be here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.arguments import PRECISIONS, Commands, UsageError, command, count, seconds
from workbench.cli.show import print_json, say

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology
    from workbench.planner import LaunchPlan


def add(commands: Commands) -> None:
    plan = command(commands, "plan", _plan, "which layout, and why; exit code 1 where nothing fits")
    plan.add_argument("path", type=Path, help="checkpoint folder; one that holds only config.json will do")
    plan.add_argument("--hardware", help="device of the catalogue, or a TOML file of the same form")
    plan.add_argument("--devices", type=count, help="how many of them")
    plan.add_argument("--topology", type=Path, help="measured machines (instead of --hardware and --devices)")
    plan.add_argument("--context", type=count, help="tokens of one sequence (default 8192, at most the model's own)")
    plan.add_argument("--concurrency", type=count, default=16, help="sequences at once (default 16)")
    plan.add_argument("--prompt", type=count, help="tokens of a new prompt (default half of the context)")
    plan.add_argument("--chunk-tokens", type=count, default=2048, help="prompt tokens of one step (default 2048)")
    plan.add_argument("--max-first-token-s", type=seconds, help="limit of the time to a prompt's first token")
    plan.add_argument("--max-per-token-s", type=seconds, help="limit of the time between two tokens of a sequence")
    plan.add_argument(
        "--precision",
        choices=PRECISIONS,
        action="append",
        help="how weights are held; may be repeated (default: as published)",
    )
    plan.add_argument(
        "--kv", choices=("auto", "fp8", "int8"), action="append", help="how the cache is held (default auto)"
    )
    plan.add_argument(
        "--engine", choices=("workbench", "vllm", "sglang"), default="workbench", help="whose memory rules"
    )
    plan.add_argument("--layout", action="append", help="consider only this layout; may be repeated")
    plan.add_argument("--launch", action="store_true", help="also print the commands that start the best plan")


def _plan(args: argparse.Namespace) -> int:
    from workbench.placement import Layout
    from workbench.planner import ENGINES, Objective, default_precision, launch_all, plan
    from workbench.spec import read_spec

    spec = read_spec(args.path)
    topology = _machines(args)
    report = plan(
        spec,
        topology,
        Objective(
            context=args.context or min(8192, spec.max_context),
            concurrency=args.concurrency,
            prompt=args.prompt,
            chunk_tokens=args.chunk_tokens,
            max_first_token_s=args.max_first_token_s,
            max_per_token_s=args.max_per_token_s,
        ),
        precisions=args.precision,
        kv_dtypes=args.kv or ("auto",),
        layouts=None if args.layout is None else [Layout.parse(text) for text in args.layout],
        engine=ENGINES[args.engine],
    )
    launches: tuple[LaunchPlan, ...] = ()
    if args.launch and report.best is not None:
        launches = launch_all(report.best, topology, str(args.path), published=default_precision(spec))
    if args.json:
        print_json({**report.to_json(), "launch": [x.to_json() for x in launches]})
    else:
        say("\n\n".join([report.render(), *(x.render() for x in launches)]))
    return 0 if report.ok else 1


def _machines(args: argparse.Namespace) -> Topology:
    from workbench.cluster import Topology, hardware_names, read_hardware, read_topology

    if args.topology is not None:
        if args.hardware is not None or args.devices is not None:
            raise UsageError("--topology already says which devices; leave out --hardware and --devices")
        return read_topology(args.topology)
    if args.hardware is None:
        raise UsageError(
            f"name the machines: --hardware NAME --devices N with one of {', '.join(hardware_names())}; or --topology "
            "FILE, which `workbench topology --ranks N --out FILE` measures on this one"
        )
    hardware = read_hardware(args.hardware)
    return Topology.of_hardware(hardware, args.devices or hardware.devices_per_node)
