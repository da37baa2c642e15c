"""The exam of a trained model: held-out questions, controls without the picture, expert load, and rounding's price.

Names are loaded on first use; the records load without torch.
"""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    "CONTROLS": "workbench.exam.record",
    "EXAM_NAME": "workbench.exam.record",
    "ExamReport": "workbench.exam.record",
    "TARGETS": "workbench.exam.record",
    "PairedMarks": "workbench.exam.paired",
    "compare_replies": "workbench.exam.paired",
    "held_out_passes": "workbench.exam.held_out",
    "is_trained_here": "workbench.exam.trained",
    "load_masters": "workbench.exam.masters",
    "read_exam": "workbench.exam.record",
    "run_exam": "workbench.exam.run",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench.exam' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
