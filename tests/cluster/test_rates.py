"""Measured rates, versions and the survey that holds them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from workbench.base import ConfigError
from workbench.cluster import (
    measure_copy,
    measure_disk_read,
    measure_matmul,
    measure_memory_copy,
    read_versions,
    survey_machine,
    versions,
)


def test_memory_copy_is_a_measured_rate_with_its_conditions() -> None:
    rate = measure_memory_copy(threads=1, size_bytes=4 << 20, repeats=3)
    assert rate.unit == "B/s"
    assert rate.basis == "measured"
    assert rate.value > 1e8
    assert rate.source == "copy of 4 MiB per thread, 1 threads, p10 of 3 windows"


def test_disk_read_covers_the_files_and_says_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"y" * 1_000_000)
    (tmp_path / "sub").mkdir()
    rate = measure_disk_read(tmp_path)
    assert rate.unit == "B/s"
    assert "4,000,000 bytes of 2 files" in rate.source
    limited = measure_disk_read(tmp_path, max_bytes=1 << 20, block_bytes=1 << 19, evict=False)
    assert "1,048,576 bytes of 1 files" in limited.source
    assert "maybe in the page cache" in limited.source


def test_disk_read_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bytes to read"):
        measure_disk_read(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        measure_disk_read(tmp_path / "missing")


def test_matmul_rate_is_measured_in_a_child_and_a_failure_is_a_gap() -> None:
    good, bad = measure_matmul("cpu", ("float32", "no_such_dtype"))
    assert good.rate is not None
    assert good.rate.unit == "FLOP/s"
    assert good.rate.value > 1e8
    assert "threads" in good.rate.source
    assert bad.rate is None
    assert "no_such_dtype" in bad.reason
    assert bad.to_json()["flops_per_s"] is None


def test_versions_name_the_packages_and_the_commit_of_this_tree() -> None:
    found = read_versions()
    assert dict(found.packages)["torch"].startswith("2.")
    assert "triton" not in dict(found.packages) or dict(found.packages)["triton"]
    record = json.loads(json.dumps(found.to_json()))
    assert record["packages"]["torch"] == dict(found.packages)["torch"]
    assert found.python in found.render()


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_and_local_changes_are_those_of_the_checkout(tmp_path: Path) -> None:
    package = tmp_path / "repo" / "pkg"
    package.mkdir(parents=True)
    assert versions._git_state(package) == (None, None)
    (package / "__init__.py").write_text("")
    git(tmp_path / "repo", "init", "-q")
    assert versions._git_state(package) == (None, None), "git does not track the package yet"
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-q", "-m", "first")
    head = git(tmp_path / "repo", "rev-parse", "HEAD")
    assert versions._git_state(package) == (head, False)
    (package / "__init__.py").write_text("changed = True\n")
    assert versions._git_state(package) == (head, True)


def test_a_copy_installed_inside_another_repository_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "theirs").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    package = tmp_path / ".venv" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert versions._git_state(package) == (None, None)


def test_survey_prints_and_saves_what_was_found() -> None:
    survey = survey_machine(features=False, rates=False)
    record = json.loads(json.dumps(survey.to_json(), allow_nan=False))
    assert record["devices"][-1]["type"] == "cpu"
    assert record["memory_copy"] is None
    text = survey.render()
    assert survey.host in text
    assert "torch" in text
    assert survey._repr_html_().count("<table>") == len(survey.tables()) >= 3, "devices, where they sit, software"


def test_direct_reads_go_past_the_page_cache_whatever_the_sizes(tmp_path: Path) -> None:
    """Whole blocks, a last part of a block, and a file smaller than a sector."""
    (tmp_path / "a").write_bytes(b"x" * (3 * 4096 * 16))
    (tmp_path / "b").write_bytes(b"y" * 70_001)
    (tmp_path / "c").write_bytes(b"z" * 7)
    try:
        os.close(os.open(tmp_path / "a", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system does not read directly")
    rate = measure_disk_read(tmp_path, block_bytes=4096 * 16, is_direct=True)
    assert f"{3 * 4096 * 16 + 70_001 + 7:,} bytes of 3 files" in rate.source
    assert "O_DIRECT" in rate.source


def test_a_file_system_that_reads_nothing_directly_is_refused_and_left_out_of_the_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    sound = os.open

    def refusing(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return sound(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ConfigError, match="not read directly"):
        measure_disk_read(tmp_path, is_direct=True)
    survey = survey_machine(folder=tmp_path, features=False, rates=False)
    assert survey.disk_read is not None
    assert survey.disk_direct is None


def test_device_memory_copy_is_measured_in_a_child_and_a_failure_is_a_gap() -> None:
    rate = measure_copy("cpu")
    assert rate is not None
    assert rate.unit == "B/s"
    assert rate.value > 1e7
    assert measure_copy("no_such_device") is None
