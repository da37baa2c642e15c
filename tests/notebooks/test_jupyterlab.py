"""The notebooks in a real JupyterLab in a real browser: panels move in the page, an interrupt leaves a kernel that runs
them again, and no rank outlives the kernel that started it.

    pytest -m slow tests/notebooks/test_jupyterlab.py --screenshots DIR     also keeps pictures of the page
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import nbformat
import pytest
from lab import ROOT, Lab, OpenNotebook, add_notebook, notebook_of, running_lab
from playwright.sync_api import BrowserContext, sync_playwright

NOTEBOOKS = ROOT / "notebooks"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# Redraws of live panels that a page must at least see; the others have no live panel.
LEAST_REDRAWS = {
    "02_shard_load_and_answer": 1,
    "05_shard_and_load": 3,
    "07_latency_profiling": 5,
    "08_serve_text_and_images": 5,
    "10_train": 3,
}
LIVE = """
import time
from types import SimpleNamespace
from workbench.view import LoadView

with LoadView(num_requests=60) as view:
    for i in range(60):
        view(SimpleNamespace(submitted_s=i, arrivals=((i + 0.5, 1), (i + 1.0, 9)), num_tokens=10, first_token_s=0.5,
                             per_token_s=0.05, end_to_end_s=1.0, error="", is_warm_up=False))
        time.sleep(0.05)
print("drawn", view.num_redraws)
"""
# The planted fault: the same cell, and a panel that hears of no news.
STILL = LIVE.replace("        view(SimpleNamespace", "        str(SimpleNamespace")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="JupyterLab is not installed"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab
    assert lab.kernels() == []
    assert lab.ranks() == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1100, "height": 900},
        )
        context.set_default_timeout(60_000)
        yield context
        context.close()


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def opened(browser: BrowserContext, lab: Lab, name: str) -> OpenNotebook:
    return OpenNotebook(browser, lab, add_notebook(lab, name, stored(name)))


def keep_picture(book: OpenNotebook, name: str, request: pytest.FixtureRequest) -> None:
    """A picture of the page with its live panel in the middle, where `--screenshots` asks for it."""
    folder = request.config.getoption("--screenshots")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        book.page.screenshot(path=folder / f"{name}.png")


def test_a_panel_that_moves_is_counted_and_one_that_stands_still_is_not(browser: BrowserContext, lab: Lab) -> None:
    counted = {}
    for name, source in (("live", LIVE), ("still", STILL)):
        with OpenNotebook(browser, lab, add_notebook(lab, name, notebook_of(source))) as book:
            book.run_all()
            book.wait_until_done(60)
            drawn = int(book.page.locator(".jp-OutputArea-output", has_text="drawn").inner_text().split()[1])
            counted[name] = (book.num_redraws, drawn)
    seen, drawn = counted["live"]
    assert 5 <= seen <= drawn, "what the kernel draws, the page shows"
    assert counted["still"][0] == 0


@pytest.mark.ranks
def test_an_interrupted_load_leaves_no_rank_and_the_notebook_runs_again(browser: BrowserContext, lab: Lab) -> None:
    with opened(browser, lab, "05_shard_and_load") as book:
        book.run_all()
        book.wait(lambda: len(lab.ranks()) >= 2, "ranks", 120)
        book.interrupt()
        book.wait(lambda: bool(book.errors), "the interrupt", 60)
        assert "KeyboardInterrupt" in book.errors[0]
        book.wait(lambda: lab.ranks() == [], "the end of the ranks", 60)
        book.page.evaluate("window.redraws = 0")
        book.run_all()
        book.wait(lambda: book.errors == [], "the second run", 60)
        book.wait_until_done(600)
        assert book.num_redraws >= LEAST_REDRAWS["05_shard_and_load"]


@pytest.mark.ranks
def test_a_restarted_kernel_leaves_no_rank_and_runs_again(
    browser: BrowserContext, lab: Lab, request: pytest.FixtureRequest
) -> None:
    with opened(browser, lab, "07_latency_profiling") as book:
        book.run_all()
        book.wait(lambda: book.page.get_by_text("One at a time: ").count() > 0, "the first load", 180)
        before = book.num_redraws
        book.wait(lambda: book.num_redraws >= before + 3, "a panel that moves", 120)
        book.page.get_by_text("One at a time: ").first.scroll_into_view_if_needed()
        keep_picture(book, "jupyterlab-live", request)
        first = lab.ranks()
        assert len(first) >= 2
        book.restart()
        book.wait(lambda: not set(first) & set(lab.ranks()), "the end of the ranks", 60)
        book.wait(book.is_ready, "the new kernel", 60)
        book.run_all()
        book.wait_until_done(600)
        assert lab.ranks() == [], "the notebook ends its ranks itself"


@pytest.mark.ranks
@pytest.mark.parametrize("name", [path.stem for path in sorted(NOTEBOOKS.glob("*.py"))])
def test_every_notebook_runs_in_jupyterlab_and_its_panels_move(browser: BrowserContext, lab: Lab, name: str) -> None:
    with opened(browser, lab, name) as book:
        book.run_all()
        book.wait_until_done(600)
        print(f"{name}: {book.num_redraws} redraws of live panels seen in the page")
        assert book.num_redraws >= LEAST_REDRAWS.get(name, 0)
        outside = [url for url in book.requests if urlsplit(url).hostname not in ("127.0.0.1", "localhost", None)]
        assert outside == []
