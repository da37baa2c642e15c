"""A notebook of one cell, executed by a real kernel, with what the kernel sent while the cell ran."""

from __future__ import annotations

import time
from typing import Any

import nbclient
import nbformat


def run_cell(source: str) -> tuple[Any, list[tuple[float, str]]]:
    """The executed notebook, and (time, kind) of every message the kernel sent about its one cell."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client = nbclient.NotebookClient(book, timeout=120, kernel_name="python3")
    messages: list[tuple[float, str]] = []
    process = client.process_message

    def recording(message: dict[str, Any], cell: Any, idx: int) -> Any:
        messages.append((time.monotonic(), message["msg_type"]))
        return process(message, cell, idx)

    client.process_message = recording  # type: ignore[method-assign]
    client.execute()
    return book, messages
