"""Compiles the card once per version of its sources and of torch, into a cache folder of the user."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
MODULE = "_simcard"


class BuildError(RuntimeError):
    """The card cannot be compiled here; the text says why."""


def load() -> ModuleType:
    """The compiled module, built where that has not happened yet. Raises BuildError."""
    spec = importlib.util.spec_from_file_location(MODULE, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> Path:
    """The shared library; other processes that want it wait for the one that compiles. Raises BuildError."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = caches / "simcard" / _digest(Path(__file__), *sorted(SOURCES.iterdir()))
    library = cache / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists():
        return library
    if reason := why_not():
        raise BuildError(reason)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(cache, library)
    return library


def why_not() -> str:
    """What is missing for a build; "" where nothing is."""
    if _compiler() is None:
        return "no C++ compiler (c++, g++ or clang++) here"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no headers of Python here"
    return ""


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def _digest(*paths: Path) -> str:
    """Of the contents of files, of torch and of this Python."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(cache: Path, library: Path) -> None:
    root = Path(torch.__file__).parent
    folders = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    options = ["-std=c++20", "-O1", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={MODULE}", *(f"-I{x}" for x in folders)]
    options.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")

    def compiled(source: Path) -> str:
        target = cache.parent / f"{source.stem}-{_digest(source, SOURCES / 'card.h')}.o"  # shared by versions
        if not target.exists():
            partial = cache / f"{source.stem}.o"
            _run([*options, "-c", str(source), "-o", str(partial)])
            partial.rename(target)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
    partial = library.with_suffix(".partial")
    names = ("torch_python", "torch", "torch_cpu", "c10")
    links = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in names)]
    _run(["-shared", *objects, *links, "-o", str(partial)])
    partial.rename(library)


def _run(arguments: list[str]) -> None:
    done = subprocess.run([str(_compiler()), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"the simulated accelerator does not compile: {done.stderr[-4000:]}")
