"""From the sources beside this file to a library that fits this processor, kept for the next process."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["BuildError", "SOURCES", "cache_folder", "load_library"]

NAMES = ("kernels.cpp", "experts.h", "norms.h", "router.h", "matrices.h", "vectors.h")
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
# Products are rounded before they are added, as torch does, except where a kernel asks for both at once.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
COMPILERS = ("g++", "clang++", "c++")
LIMIT_S = 300.0  # for one compilation, and for waiting for another process that compiles the same


class BuildError(Exception):
    """Why there is no library."""


def cache_folder() -> Path:
    """`day0-workbench/native` in the user's cache folder. Raises BuildError where the user has none."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(str(error)) from None
    return base / "day0-workbench" / "native"


def load_library(sources: tuple[Path, ...] = SOURCES, folder: Path | None = None) -> ctypes.CDLL:
    """The library of `sources`, the first of which is compiled; from `folder` where it lies there already.

    Its name is a sum over sources, flags, compiler and processor. Raises BuildError.
    """
    folder = cache_folder() if folder is None else folder
    compiler = _compiler()
    try:
        key = hashlib.sha256()
        for part in (*(path.read_bytes() for path in sources), *_circumstances(compiler)):
            key.update(len(part).to_bytes(8, "little") + part)
        path = folder / f"kernels-{key.hexdigest()[:24]}.so"
        if not path.is_file():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(folder / "lock"):
                if not path.is_file():
                    _compile(compiler, sources[0], path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{type(error).__name__}: {error}") from None


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")


def _circumstances(compiler: str) -> Iterator[bytes]:
    yield " ".join(FLAGS).encode()
    yield subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    yield platform.machine().encode()
    with suppress(OSError):  # -march=native: a library of another processor may hold instructions that this one lacks
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        yield b"\n".join(sorted({x for x in lines if x.startswith((b"model name", b"flags", b"Features", b"CPU"))}))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile under a name of its own and rename: nobody ever loads half a library."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, str(source), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise BuildError(f"{compiler}: {next((x for x in lines if 'error' in x), lines[-1])[:300]}")
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go where one dies. Raises BuildError after LIMIT_S."""
    with path.open("w") as file:
        ends = time.monotonic() + LIMIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise BuildError(f"another process has held {path} for {LIMIT_S:.0f} s") from None
                time.sleep(0.05)
        yield
