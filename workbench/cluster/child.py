"""The probe child: `python -m workbench.cluster.child` touches devices so that no other process has to.

Reads one JSON object from standard input, {"device": name, "tasks": [[kind, argument], ...]}, and answers with one line
per event on standard output, each led by MARK (libraries may print there too): a task's start, and its result.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from workbench.base import error_text

__all__ = ["MARK", "answer_tasks", "main"]

MARK = "@probe "


def answer_tasks(load: Callable[[], Callable[[str, str, str], object]]) -> int:
    """Read the request, answer each task. `load()` gives (kind, argument, device) -> value; it is called after the
    child has said that it is ready, so that torch comes in late: a broken installation is a result of the probe."""
    request = json.load(sys.stdin)
    _say({"event": "ready"})
    perform = load()
    for kind, argument in request["tasks"]:
        _say({"event": "start", "kind": kind, "argument": argument})
        began = time.perf_counter()
        value: object = None
        error = ""
        try:
            value = perform(kind, argument, request["device"])
        except Exception as caught:  # the device's answer, whatever it is, is the result
            error = error_text(caught)
        done = {"event": "done", "kind": kind, "argument": argument, "value": value, "error": error}
        _say({**done, "seconds": time.perf_counter() - began})
    return 0


def main() -> int:
    return answer_tasks(_load)


def _load() -> Callable[[str, str, str], object]:
    from workbench.cluster import tasks

    def perform(kind: str, argument: str, device: str) -> object:
        if kind == "accelerators":
            return tasks.describe_accelerators()
        if kind == "feature":
            tasks.run_feature(argument, device)
            return None
        if kind == "matmul":
            return tasks.matmul_rate(argument, device)
        if kind == "copy":
            return tasks.copy_rate(device)
        raise ValueError(f"unknown task {kind!r}")

    return perform


def _say(event: dict[str, object]) -> None:
    print(MARK + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
