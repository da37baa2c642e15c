"""Any value, and any exception, as short text for messages and tables."""

from __future__ import annotations

import reprlib

__all__ = ["error_text", "short_repr"]

# Bounded in length and depth: a hostile value nested a thousand deep must not break the message about it.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def short_repr(value: object) -> str:
    """`repr` cut to a line, whatever the value."""
    text = _REPR.repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def error_text(error: BaseException) -> str:
    """Kind and message; some errors of libraries come without one, and an empty reason reads like a mistake of ours."""
    return f"{type(error).__name__}: {str(error).strip() or '(no message)'}"
