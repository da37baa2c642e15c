"""The probe's child: `python -m workbench.operators.child` tries operators so that a crash or hang costs one answer.

Speaks the protocol of `workbench.cluster.child`: a JSON object on standard input, marked lines on standard output.
"""

from __future__ import annotations

import json
import sys
import time

from workbench.cluster.child import MARK

__all__ = ["main"]


def main() -> int:
    request = json.load(sys.stdin)
    _say({"event": "ready"})
    from workbench.cluster import tasks
    from workbench.operators import trial

    for kind, argument in request["tasks"]:
        _say({"event": "start", "kind": kind, "argument": argument})
        began = time.perf_counter()
        value: object = None
        error = ""
        try:
            if kind == "operator":
                value = trial.try_operator(json.loads(argument), request["device"])
            elif kind == "matmul":
                value = tasks.matmul_rate(argument, request["device"])
            elif kind == "copy":
                value = trial.measure_copy(request["device"])
            else:
                raise ValueError(f"unknown task {kind!r}")
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        done = {"event": "done", "kind": kind, "argument": argument, "value": value, "error": error}
        _say({**done, "seconds": time.perf_counter() - began})
    return 0


def _say(event: dict[str, object]) -> None:
    print(MARK + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
