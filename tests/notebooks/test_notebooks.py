"""Every notebook says the same in both halves, is clean, counts its sections, and runs from top to bottom."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))
MAX_BYTES = 400_000
MAX_CELL_LINES = 40

every_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def heading_faults(notebook: nbformat.NotebookNode, number: str) -> list[str]:
    """Where the title does not carry the file's number, or a section does not follow the one before it."""
    markdown = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^(#+) (.*)$", markdown, flags=re.MULTILINE)
    titles = [text for level, text in headings if level == "#"]
    faults = [] if len(titles) == 1 and titles[0].startswith(f"{number} · ") else [f"titles {titles}"]
    sections = [text for level, text in headings if level == "##"]
    numbered, last = sections[:-1], sections[-1:]
    faults += [
        f"section {text!r} should be number {expected}"
        for expected, text in enumerate(numbered, start=1)
        if not text.startswith(f"{expected} ")
    ]
    return faults if last == ["What we have now"] else [*faults, f"ends with {last}"]


def clutter(notebook: nbformat.NotebookNode) -> list[str]:
    """What a committed notebook must not hold: widget state, versions, times, errors, places on somebody's disk."""
    found = [key for key in ("widgets", "language_info") if key in notebook.metadata]
    for idx, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        text = json.dumps(cell.outputs)
        found += [f"cell {idx}: execution times"] if "execution" in cell.metadata else []
        found += [f"cell {idx}: execution count"] if cell.execution_count is not None else []
        found += [f"cell {idx}: an error"] if any(out.output_type == "error" for out in cell.outputs) else []
        found += [f"cell {idx}: {place}" for place in (str(ROOT), str(Path.home())) if place in text]
        found += [f"cell {idx}: a script"] if "<script" in text or "Plotly.newPlot" in text else []
    return found


def test_there_are_notebooks_and_no_half_ones() -> None:
    assert len(SOURCES) >= 2
    assert {path.stem for path in SOURCES} == {path.stem for path in NOTEBOOKS.glob("*.ipynb")}


@every_notebook
def test_pair_says_the_same(source: Path) -> None:
    assert cells(source) == cells(source.with_suffix(".ipynb")), "edit the .py, then run `make notebooks`"


def test_an_edited_half_is_noticed(tmp_path: Path) -> None:
    for suffix in (".py", ".ipynb"):
        (tmp_path / f"x{suffix}").write_text(SOURCES[0].with_suffix(suffix).read_text())
    edited = tmp_path / "x.py"
    edited.write_text(edited.read_text().replace("from pathlib import Path", "from pathlib import PurePath as Path", 1))
    assert cells(edited) != cells(tmp_path / "x.ipynb")


@every_notebook
def test_headings_increase(source: Path) -> None:
    assert heading_faults(jupytext.read(source), source.stem[:2]) == []


@pytest.mark.parametrize(
    "sections",
    [
        ["# 01 · T", "## 2 A", "## What we have now"],
        ["# 01 · T", "## 1 A", "## 3 B", "## What we have now"],
        ["# 02 · T", "## 1 A", "## What we have now"],
        ["# 01 · T", "## 1 A", "## 2 B"],
        ["# 01 · T", "# 01 · U", "## 1 A", "## What we have now"],
    ],
    ids=["starts late", "skips one", "wrong title", "no ending", "two titles"],
)
def test_heading_check_sees_a_fault(sections: list[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text) for text in sections])
    assert heading_faults(notebook, "01")


@every_notebook
def test_committed_outputs_are_complete_clean_and_small(source: Path) -> None:
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    assert clutter(notebook) == []
    assert sum(bool(cell.outputs) for cell in notebook.cells if cell.cell_type == "code") >= 5
    assert path.stat().st_size < MAX_BYTES


def test_clutter_is_found_where_it_is() -> None:
    outputs = [
        nbformat.v4.new_output("stream", text=f"read {ROOT}/data"),
        nbformat.v4.new_output("display_data", data={"text/html": "<script>Plotly.newPlot()</script>"}),
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]),
    ]
    cell = nbformat.v4.new_code_cell("x", outputs=outputs, execution_count=3, metadata={"execution": {}})
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata = nbformat.from_dict({"widgets": {}, "language_info": {}})
    text = " ".join(clutter(notebook))
    for fault in ("widgets", "language_info", "times", "count", "an error", str(ROOT), "a script"):
        assert fault in text


@every_notebook
def test_cells_are_short_and_define_nothing_large(source: Path) -> None:
    for kind, text in cells(source):
        lines = text.splitlines()
        assert kind != "code" or len(lines) <= MAX_CELL_LINES, text
        assert kind != "code" or not re.search(r"^(class|def) ", text, flags=re.MULTILINE), "belongs into the package"


@every_notebook
def test_parameters_stand_in_one_tagged_cell(source: Path) -> None:
    tagged = [cell for cell in jupytext.read(source).cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1


def execute(path: Path, notebook: nbformat.NotebookNode | None = None) -> nbformat.NotebookNode:
    notebook = notebook or nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.execute()
    return notebook


# Together they take ten minutes of a core: two of them in every run, all of them with `make test-slow`.
IN_EVERY_RUN = ("01_read_a_checkpoint", "02_shard_load_and_answer")


@pytest.mark.notebook
@pytest.mark.ranks
@pytest.mark.parametrize(
    "source",
    [pytest.param(x, marks=() if x.stem in IN_EVERY_RUN else pytest.mark.slow) for x in SOURCES],
    ids=lambda path: path.stem,
)
def test_notebook_runs_from_top_to_bottom(source: Path) -> None:
    executed = execute(source.with_suffix(".ipynb"))
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    for fresh, stored in zip(executed.cells, committed.cells, strict=True):
        kinds = [sorted({out.output_type for out in cell.get("outputs", [])}) for cell in (fresh, stored)]
        assert kinds[0] == kinds[1], f"outputs of another kind than the committed ones:\n{fresh.source}"


@pytest.mark.notebook
def test_a_claim_that_is_wrong_stops_the_notebook() -> None:
    path = NOTEBOOKS / "01_read_a_checkpoint.ipynb"
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "2_779_931_837_184" in cell.source]
    cell.source = cell.source.replace("2_779_931_837_184", "2_779_931_837_185")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(path, notebook)
