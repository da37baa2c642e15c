"""Commands under torchrun: rank 0 runs them, the ranks of all hosts are its ranks."""

from __future__ import annotations

import argparse
import os

from workbench.cli.arguments import UsageError

__all__ = ["is_torchrun", "run_on_hosts"]


def is_torchrun() -> bool:
    """Whether torchrun started this process; known without loading anything."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_on_hosts(args: argparse.Namespace) -> int:
    """Run a command on rank 0, with the ranks that torchrun has started on all hosts; wait for orders on the others.

    Commands that start no ranks run as they are. Raises UsageError for one that starts them on this host alone.
    """
    spans = getattr(args, "spans_hosts", None)
    if spans is None:
        return int(args.run(args))
    if not spans:
        raise UsageError(f"`{args.command}` starts its ranks itself, on one host: call it without torchrun")
    from workbench.deployment.hosts import follow, leading

    if int(os.environ.get("RANK", "0")) > 0:
        return follow()
    with leading():
        return int(args.run(args))
