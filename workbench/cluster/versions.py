"""Which software produced a number: Python, torch, packages, the kernel, and the commit of this source tree."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import workbench
from workbench.base import Table

__all__ = ["Versions", "read_versions"]

# Packages whose version changes results or speed; those not installed are left out.
PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "tiktoken",
    "pillow",
    "plotly",
    "gradio",
    "ipywidgets",
    "triton",
)
GIT_SECONDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """`git_commit` is None where the package does not run from a git checkout of its own; `git_dirty` says whether
    tracked files differ from that commit."""

    workbench: str
    python: str
    packages: tuple[tuple[str, str], ...]
    kernel: str
    machine: str
    git_commit: str | None
    git_dirty: bool | None

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "packages": dict(self.packages)}

    def table(self) -> Table:
        commit = "–" if self.git_commit is None else self.git_commit + (" with local changes" if self.git_dirty else "")
        rows = (
            ("workbench", self.workbench),
            ("git commit", commit),
            ("python", self.python),
            *self.packages,
            ("kernel", self.kernel),
            ("machine", self.machine),
        )
        return Table(columns=("software", "version"), rows=rows)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def read_versions() -> Versions:
    """Versions of what runs now, from package metadata: nothing is imported, no device is touched."""
    packages = []
    for name in PACKAGES:
        try:
            packages.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    commit, is_dirty = _git_state(Path(workbench.__file__).resolve().parent)
    return Versions(
        workbench=workbench.__version__,
        python=platform.python_version(),
        packages=tuple(packages),
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        git_commit=commit,
        git_dirty=is_dirty,
    )


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    """(commit, has local changes) of the checkout that tracks `package`; (None, None) where there is none.

    An installed copy may lie inside somebody else's repository (a virtual environment in a project folder), whose
    commit would be a wrong answer: git must track the package itself.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments],
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None, None
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or changes is None else bool(changes)
