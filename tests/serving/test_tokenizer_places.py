"""A tokenizer file that is a broken link, a pipe or a folder is refused by name, not passed over for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_tokenizer import SPEC

from workbench.base import TokenizerError
from workbench.serving import read_tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tiktoken.model"])
@pytest.mark.parametrize("kind", ["link into nothing", "pipe", "folder"])
def test_what_stands_under_a_tokenizer_files_name_never_counts_as_absent(tmp_path: Path, name: str, kind: str) -> None:
    make: dict[str, Callable[[Path], None]] = {
        "link into nothing": lambda path: path.symlink_to("/nowhere/blob"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }
    make[kind](tmp_path / name)
    with pytest.raises(TokenizerError, match=rf"{name}: (file is missing|not a regular file)"):
        read_tokenizer(tmp_path, SPEC)
