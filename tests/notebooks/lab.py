"""A JupyterLab of its own over copies of the notebooks, and a page of a real Chromium that looks at one of them.

Whatever a kernel starts inherits a mark in its environment, so what is left of a deployment can be found by it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from playwright.sync_api import BrowserContext, Page

ROOT = Path(__file__).resolve().parents[2]
MARK = "WORKBENCH_LAB_MARK"
DONE = "every cell has run"
PANEL = ".widget-html-content"
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'  # tracebacks as well
SETTINGS = {
    # Cells out of view would otherwise be taken out of the page.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# An HTML widget is drawn anew by one replacement of what is in it; each is one record here.
COUNT_REDRAWS = f"""() => {{
    window.redraws = 0;
    new MutationObserver(records => {{
        for (const record of records)
            if (record.target.matches?.("{PANEL}") && record.removedNodes.length && record.addedNodes.length)
                window.redraws += 1;
    }}).observe(document.body, {{subtree: true, childList: true}});
}}"""


@dataclass(frozen=True)
class Lab:
    """A running server. `folder` holds the notebooks that it shows, `mark` is on whatever their kernels start."""

    url: str
    token: str
    folder: Path
    mark: str

    def ranks(self) -> list[int]:
        """Processes of deployments that kernels of this server have started, and that are still there."""
        return [pid for pid, line in self._marked() if " -m workbench." in line]

    def kernels(self) -> list[int]:
        return [pid for pid, line in self._marked() if "ipykernel" in line]

    def _marked(self) -> Iterator[tuple[int, str]]:
        wanted = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it may end while it is looked at
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()


@contextlib.contextmanager
def running_lab(home: Path) -> Iterator[Lab]:
    """JupyterLab on a port of its own, with its settings and files under `home`; ended with all its kernels."""
    folder, mark = home / "root" / "notebooks", secrets.token_hex(8)
    folder.mkdir(parents=True)
    for name in ("data", "tests"):  # what notebooks read beside themselves
        (home / "root" / name).symlink_to(ROOT / name)
    for name, content in SETTINGS.items():
        path = home / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    places = {
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_CONFIG_DIR": "config",
        "IPYTHONDIR": "ipython",
    }
    environment = {**os.environ, **{name: str(home / place) for name, place in places.items()}, MARK: mark}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={home / 'root'}"]
    with (home / "lab.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        told = _told(home / "runtime", process, home / "lab.log")
        yield Lab(url=told["url"], token=told["token"], folder=folder, mark=mark)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _told(folder: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    """What the server says of itself once it listens."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and process.poll() is None:
        for path in folder.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):
                told: dict[str, str] = json.loads(path.read_text())
                return told
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


def add_notebook(lab: Lab, name: str, notebook: nbformat.NotebookNode) -> str:
    """Put a copy without outputs before the server, with a last cell that says when all have run."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.metadata.setdefault("kernelspec", {"name": "python3", "display_name": "Python 3", "language": "python"})
    notebook.cells.append(nbformat.v4.new_code_cell(f'print("{DONE}")'))
    nbformat.write(notebook, lab.folder / f"{name}.ipynb")
    return name


def notebook_of(*sources: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


class OpenNotebook:
    """One notebook in the page. Waits are bounded; what the page shows is told where one ends in vain."""

    def __init__(self, context: BrowserContext, lab: Lab, name: str) -> None:
        self.lab = lab
        self.page: Page = context.new_page()
        self.requests: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{lab.url}lab/tree/notebooks/{name}.ipynb?reset&token={lab.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.wait(self.is_ready, "a kernel", 60)
        self.page.evaluate(COUNT_REDRAWS)

    def is_ready(self) -> bool:
        """Whether there is a kernel and it waits for something to do."""
        return (
            bool(self.lab.kernels())
            and self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').count() > 0
        )

    def menu(self, menu: str, item: str) -> None:
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.get_by_role("menuitem", name=item).first.click()

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")

    def interrupt(self) -> None:
        self.menu("Kernel", "Interrupt Kernel")

    def restart(self) -> None:
        self.menu("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    @property
    def num_redraws(self) -> int:
        """How often a live panel was drawn anew in the page, seen by the page itself."""
        return int(self.page.evaluate("window.redraws"))

    @property
    def errors(self) -> list[str]:
        texts = self.page.locator(STDERR).all_inner_texts()
        return [text for text in texts if "Traceback (most recent call last)" in text]

    @property
    def is_done(self) -> bool:
        return self.page.locator(".jp-OutputArea-output", has_text=DONE).count() > 0

    def wait_until_done(self, seconds: float) -> None:
        self.wait(lambda: self.is_done or bool(self.errors), "the end of the notebook", seconds)
        assert self.errors == [], self.errors[0][-2000:]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end_s, f"{what}: not within {seconds} s; errors in the page: {self.errors}"
            self.page.wait_for_timeout(100)  # lets the page work, which time.sleep does not

    def __enter__(self) -> OpenNotebook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the page and end its kernel, which JupyterLab itself leaves running."""
        self.menu("Kernel", "Shut Down Kernel")
        self.wait(lambda: not self.lab.kernels() and not self.lab.ranks(), "the end of kernel and ranks", 30)
        self.page.close()
