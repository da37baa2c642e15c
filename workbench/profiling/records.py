"""Under which circumstances a figure was taken: hardware, software, commit, command, date. Kept with every record."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from workbench.cluster import host_device, read_versions
from workbench.deployment import Deployment

__all__ = ["environment_of"]


def environment_of(
    *, target: str, deployment: Deployment | None = None, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a reader needs to trust a figure. `target` is what was measured: a checkpoint folder or an address.

    Hardware is that of this machine, and of the ranks where there is a `deployment`; of a server elsewhere nothing is
    known but its address, which is said.
    """
    host = host_device()
    versions = read_versions().to_json()
    ranks: dict[str, Any] = {}
    if deployment is not None:
        stats = deployment.stats()
        ranks = {
            "layout": str(deployment.layout),
            "devices": [each.device for each in stats],
            "hosts": sorted({each.host for each in stats}),
            "load_s": max(each["seconds"] for each in deployment.load_stats),  # what a start costs before any request
        }
    return {
        "taken_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": target,
        "hardware": {
            "host": platform.node(),
            "cpu": host.name,
            "cores": host.cores,
            "memory_bytes": None if host.memory_total is None else int(host.memory_total.value),
            **(ranks or {"ranks": "unknown: a server was asked"}),
        },
        "versions": versions,
        "commit": versions["git_commit"],
        "command": shlex.join(command if command is not None else sys.argv),
    }
