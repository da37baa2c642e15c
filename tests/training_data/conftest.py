"""Made once for all tests of this folder: the facts, and a tokenizer trained and read back as serving reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.serving.inputs.tokenizer import Tokenizer
from workbench.serving.inputs.tokenizer_files import read_tokenizer_json
from workbench.training.data.domain import Fact, read_facts
from workbench.training.data.tokenizer import corpus_lines, train_tokenizer, write_tokenizer


@pytest.fixture(scope="session")
def facts() -> tuple[Fact, ...]:
    return read_facts()


@pytest.fixture(scope="session")
def tokenizer_root(facts: tuple[Fact, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(train_tokenizer(corpus_lines(facts)), root)
    return root


@pytest.fixture(scope="session")
def tokenizer(tokenizer_root: Path) -> Tokenizer:
    return Tokenizer(read_tokenizer_json(tokenizer_root / "tokenizer.json"))
