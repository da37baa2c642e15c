"""Faults in files: each changes what it says and nothing else, in a copy, and leaves the folder it began from alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from acceptance import TINY

from workbench.base import CheckpointError
from workbench.checkpoint import Checkpoint, audit
from workbench.day0.faults.files import choose_matrix, double_matrix, flip_weight, link_folder, tear_shard

LLAMA = Path(__file__).resolve().parents[1] / "golden" / "families" / "llama"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def changed(folder: Path, root: Path) -> dict[str, np.ndarray]:
    """Tensors of `folder` whose bytes are not those of `root`, each with what differs."""
    one, other = Checkpoint.open(folder), Checkpoint.open(root)
    found = {}
    for entry in one:
        a, b = (np.frombuffer(checkpoint.read_bytes(entry.name), np.uint8) for checkpoint in (one, other))
        if not np.array_equal(a, b):
            found[entry.name] = a ^ b
    return found


@pytest.fixture
def links(tmp_path: Path) -> Path:
    return link_folder(TINY, tmp_path / "links")


def test_a_folder_of_links_is_the_checkpoint_and_holds_no_copy(links: Path) -> None:
    assert all(path.is_symlink() for path in links.iterdir())
    assert digests(links) == digests(TINY)
    assert audit(links).ok


def test_a_torn_shard_is_found_by_name_and_its_original_is_whole(links: Path) -> None:
    before = digests(TINY)
    shard = tear_shard(links)
    assert [(finding.kind, finding.file) for finding in audit(links).errors] == [("torn", shard)]
    assert sum(not path.is_symlink() for path in links.iterdir()) == 1
    assert digests(TINY) == before


def test_one_bit_of_one_expert_is_flipped(links: Path) -> None:
    before = digests(TINY)
    tensor = choose_matrix(TINY, "weight_packed")
    assert (tensor.role, tensor.part) == ("routed_expert", "weight_packed")
    flip_weight(links, tensor)
    assert digests(TINY) == before
    ((name, difference),) = changed(links, TINY).items()
    assert name == tensor.name
    assert sorted(difference)[-2:] == [0, 8]  # the sign of a low nibble, in one byte


def test_scales_one_higher_double_every_weight_of_a_matrix(links: Path) -> None:
    tensor = choose_matrix(TINY, "weight_scale")
    assert tensor.part == "weight_scale"
    double_matrix(links, tensor)
    assert list(changed(links, TINY)) == [tensor.name]
    one, other = (np.frombuffer(Checkpoint.open(x).read_bytes(tensor.name), np.uint8) for x in (links, TINY))
    assert (one == other + 1).all()


def test_plain_floats_are_flipped_and_doubled_as_well(tmp_path: Path) -> None:
    before = digests(LLAMA)
    tensor = choose_matrix(LLAMA, "weight_packed")
    assert tensor.part == "weight"
    kinds = {"F32": np.float32, "F16": np.float16}
    values = {}
    for name, fault in (("flipped", flip_weight), ("doubled", double_matrix)):
        folder = link_folder(LLAMA, tmp_path / name)
        fault(folder, tensor)
        assert list(changed(folder, LLAMA)) == [tensor.name]
        values[name] = floats(Checkpoint.open(folder).read_bytes(tensor.name), tensor.dtype, kinds)
    sound = floats(Checkpoint.open(LLAMA).read_bytes(tensor.name), tensor.dtype, kinds)
    assert np.array_equal(values["doubled"], 2 * sound)
    (place,) = (values["flipped"] != sound).nonzero()[0]
    assert values["flipped"][place] == -sound[place]
    assert abs(sound[place]) == abs(sound).max()
    assert digests(LLAMA) == before


def floats(data: bytes, dtype: str, kinds: dict[str, type]) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, kinds[dtype])


def test_a_checkpoint_without_a_known_matrix_is_refused(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.day0.faults.files.published_tensors", lambda spec: ())
    with pytest.raises(CheckpointError, match="no matrix in which a fault could be planted"):
        choose_matrix(links, "weight_packed")
