"""Seconds of each notebook at its published parameters, from top to bottom in a kernel of its own, and of all together.

    python tests/benchmarks/bench_notebooks.py [NAME ...] [--slowest 3]

Asked: each within two minutes, all within fifteen. Nothing is written; a cell that fails ends the run with its error.
What a notebook takes includes the start of its kernel. NAME is a beginning such as 07.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import datetime
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from workbench.base import Cell, Table

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
MOST_S, MOST_IN_ALL_S = 120.0, 900.0


def run(path: Path) -> tuple[float, list[tuple[float, str]]]:
    """Seconds in all, and of each code cell with its first line, the slowest first."""
    notebook = nbformat.read(path, as_version=4)
    began = time.perf_counter()
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources, record_timing=True).execute()
    seconds = time.perf_counter() - began
    cells = []
    for cell in notebook.cells:
        times = cell.metadata.get("execution", {})
        if "iopub.execute_input" in times and "shell.execute_reply" in times:
            first, last = (datetime.fromisoformat(times[x]) for x in ("iopub.execute_input", "shell.execute_reply"))
            cells.append(((last - first).total_seconds(), cell.source.partition("\n")[0]))
    return seconds, sorted(cells, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names, such as 07 (default: every notebook)")
    parser.add_argument("--slowest", type=int, default=3, help="cells of each that are shown (default 3)")
    args = parser.parse_args()
    paths = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.name.startswith(tuple(args.names) or ("",))]
    load = os.getloadavg()[0]
    rows: list[tuple[Cell, ...]] = []
    record: dict[str, float] = {}
    for path in paths:
        seconds, cells = run(path)
        record[path.stem] = seconds
        slowest = "; ".join(f"{took:.1f} s {line[:48]}" for took, line in cells[: args.slowest])
        rows.append((path.stem, f"{seconds:.1f}", "yes" if seconds <= MOST_S else "NO", slowest))
        print(f"{path.stem}: {seconds:.1f} s", flush=True)
    total = sum(record.values())
    rows.append(("all", f"{total:.1f}", "yes" if total <= MOST_IN_ALL_S else "NO", ""))
    title = f"{len(paths)} notebooks in {total:.0f} s (asked: {MOST_S:g} s each, {MOST_IN_ALL_S:g} s in all)"
    note = f"{os.cpu_count()} cores, load before {load:.1f}"
    print(
        Table(
            columns=("notebook", "seconds", "in time", "slowest cells"), rows=tuple(rows), title=title, note=note
        ).render()
    )
    print(json.dumps({"benchmark": "notebooks", "seconds": record, "total_s": total, "load": load}))


if __name__ == "__main__":
    main()
