"""The probe's child: `python -m workbench.operators.child` tries operators so that a crash or hang costs one answer.

Speaks the protocol of `workbench.cluster.child`: a JSON object on standard input, marked lines on standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from workbench.cluster.child import answer_tasks

__all__ = ["main"]


def main() -> int:
    return answer_tasks(_load)


def _load() -> Callable[[str, str, str], object]:
    from workbench.cluster import tasks
    from workbench.operators import trial

    def perform(kind: str, argument: str, device: str) -> object:
        if kind == "operator":
            return trial.try_operator(json.loads(argument), device)
        if kind == "cold":
            use, between = json.loads(argument)
            return trial.try_operator(use, device, weights_between=between)
        if kind == "untimed":
            return trial.try_operator(json.loads(argument), device, is_timed=False)
        if kind == "matmul":
            return tasks.matmul_rate(argument, device)
        if kind == "copy":
            return trial.measure_copy(device)
        raise ValueError(f"unknown task {kind!r}")

    return perform


if __name__ == "__main__":
    sys.exit(main())
