"""Who drives a runner. Its slots know no request, so two drivers would write into each other's sequences unseen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from workbench.base import DeploymentError

__all__ = ["claim_runner", "driving", "release_runner"]

_owners: dict[int, tuple[object, str]] = {}  # by id, so that any runner will do; held until released, so ids stay apart
_changing = threading.Lock()


def claim_runner(runner: object, name: str) -> None:
    """Make `name` the one driver of `runner`. Raises DeploymentError where it has one."""
    with _changing:
        if id(runner) in _owners:
            raise DeploymentError(
                f"{name} cannot use this runner: its slots are in use",
                found=_owners[id(runner)][1],
                expected="one driver at a time",
                next_step="Stop the other one, or ask through its service: it takes requests from many threads",
            )
        _owners[id(runner)] = (runner, name)


def release_runner(runner: object) -> None:
    """Free `runner` for the next driver; harmless where it has none."""
    with _changing:
        _owners.pop(id(runner), None)


@contextlib.contextmanager
def driving(runner: object, name: str) -> Iterator[None]:
    """Drive `runner` inside the block. Raises as `claim_runner`."""
    claim_runner(runner, name)
    try:
        yield
    finally:
        release_runner(runner)
