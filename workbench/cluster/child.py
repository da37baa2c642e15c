"""The probe child: `python -m workbench.cluster.child` touches devices so that no other process has to.

Reads one JSON object from standard input, {"device": name, "tasks": [[kind, argument], ...]}, and answers with one line
per event on standard output, each led by MARK (libraries may print there too): a task's start, and its result.
"""

from __future__ import annotations

import json
import sys
import time

__all__ = ["MARK", "main"]

MARK = "@probe "


def main() -> int:
    request = json.load(sys.stdin)
    _say({"event": "ready"})
    from workbench.cluster import tasks  # torch comes in here: a broken installation is a result, not a traceback

    for kind, argument in request["tasks"]:
        _say({"event": "start", "kind": kind, "argument": argument})
        began = time.perf_counter()
        value: object = None
        error = ""
        try:
            if kind == "accelerators":
                value = tasks.describe_accelerators()
            elif kind == "feature":
                tasks.run_feature(argument, request["device"])
            elif kind == "matmul":
                value = tasks.matmul_rate(argument, request["device"])
            elif kind == "copy":
                value = tasks.copy_rate(request["device"])
            else:
                raise ValueError(f"unknown task {kind!r}")
        except Exception as caught:  # the device's answer, whatever it is, is the result
            error = f"{type(caught).__name__}: {caught}"
        done = {"event": "done", "kind": kind, "argument": argument, "value": value, "error": error}
        _say({**done, "seconds": time.perf_counter() - began})
    return 0


def _say(event: dict[str, object]) -> None:
    print(MARK + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
