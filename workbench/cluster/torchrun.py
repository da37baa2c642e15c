"""Where torchrun has put this process, and the store through which the processes that it started find each other."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from workbench.base import ConfigError

__all__ = ["TorchrunPlace", "free_port", "is_torchrun", "torchrun_store"]

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunPlace:
    """`node` numbers the hosts, `leader` is the host of rank 0. `agent` is the process of torchrun that started us."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int
    leader: str
    agent: int

    @property
    def is_beside_leader(self) -> bool:
        """Whether rank 0 is on this host, started by the same torchrun, which numbers ranks host by host."""
        return self.node == 0

    @classmethod
    def of_environment(cls) -> TorchrunPlace:
        """Raises ConfigError where torchrun did not start this process."""
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            raise ConfigError("not started by torchrun", found=f"no {', '.join(missing)} in the environment")
        rank, world_size, local_rank, local_size, node = (int(os.environ[name]) for name in NEEDED[:5])
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_size=local_size,
            node=node,
            leader=os.environ["MASTER_ADDR"],
            agent=os.getppid(),
        )


def is_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and all(os.environ.get(name) for name in NEEDED)


def torchrun_store() -> Any:
    """The store that torchrun offers its ranks. Anybody who reaches its port can read it."""
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous("env://")))
    return store


def free_port() -> int:
    """A port of this host that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
