"""topology: what the links of this machine do, measured; or what a datasheet says they do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from workbench.cli.arguments import Commands, UsageError, command, count, number
from workbench.cli.show import say, show

DEFAULT_RANKS = 2  # where there are no accelerators to count


def add(commands: Commands) -> None:
    parser = command(commands, "topology", _topology, "devices and links: measured here, or of hardware by datasheet")
    parser.add_argument("--ranks", type=count, help="processes to measure (default: one per accelerator, else 2)")
    parser.add_argument("--device", help="device type; default: the accelerator of this machine, else cpu")
    parser.add_argument(
        "--no-rates", action="store_true", help="links only, not how fast the devices multiply and copy"
    )
    parser.add_argument("--hardware", help="no measurement: a name of data/hardware, or a TOML file of that form")
    parser.add_argument("--devices", type=count, help="how many of --hardware (default: one node)")
    parser.add_argument(
        "--inter-node-scale",
        type=_scale,
        default=1.0,
        metavar="X",
        help="what if links between hosts were X times as fast (0.05: twenty times slower)",
    )
    parser.add_argument("--out", type=Path, help="also save the record as JSON in this file")


def _scale(text: str) -> float:
    return float(number(text, float, "a factor above 0", lambda value: 0 < value < float("inf")))


def _topology(args: argparse.Namespace) -> int:
    from workbench.cluster import Topology, default_device, list_devices, measure_topology, read_hardware
    from workbench.cluster.relay import is_torchrun, measure_torchrun_topology

    if args.hardware is not None:
        if args.ranks is not None or args.device is not None:
            raise UsageError("--ranks and --device measure this machine; --hardware reads a datasheet: choose one")
        hardware = read_hardware(args.hardware)
        topology = Topology.of_hardware(hardware, args.devices or hardware.devices_per_node)
    elif args.devices is not None:
        raise UsageError("--devices says how many of --hardware; --ranks how many to measure")
    elif is_torchrun():
        if args.ranks is not None:
            raise UsageError("torchrun has said how many ranks there are; leave --ranks out")
        found = measure_torchrun_topology(device=args.device, rates=not args.no_rates, on_step=_progress_of(args))
        if found is None:
            return 0  # rank 0 prints
        topology = found
    else:
        kind = args.device or default_device()
        here = sum(device.type == kind for device in list_devices())
        topology = measure_topology(
            args.ranks or (here if here > 1 else DEFAULT_RANKS),
            device=kind,
            rates=not args.no_rates,
            on_step=_progress_of(args),
        )
    if args.inter_node_scale != 1.0:
        topology = topology.with_inter_node(args.inter_node_scale)
    if args.out is not None:
        topology.save(args.out)
    show(args, topology)
    return 0


def _progress_of(args: argparse.Namespace) -> Callable[[str], None] | None:
    """Says on a terminal what is measured next."""
    if args.json or not sys.stderr.isatty():
        return None
    return lambda what: say(f"measuring {what}", sys.stderr)
