"""align, quantize and sweep as commands."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "align"))

from planted import write_model

from workbench.checkpoint import audit
from workbench.cli import main
from workbench.nn.precision_map import read_precision_map

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Exit code and output of the alignment of a sound deployment, and the folder of its trace."""
    output, folder = io.StringIO(), tmp_path_factory.mktemp("saved") / "trace"
    with contextlib.redirect_stdout(output):
        code = main(["align", str(root), "--precision", "fp32", "--device", "cpu", "--save", str(folder), "--json"])
    return code, output.getvalue(), folder


@pytest.mark.ranks
def test_a_sound_deployment_aligns_and_leaves_a_trace(
    call: Call, root: Path, saved: tuple[int, str, Path], tmp_path: Path
) -> None:
    code, output, trace = saved
    assert code == 0, output
    assert json.loads(output)["passed"] is True
    assert json.loads(output)["guilty"] is None
    assert json.loads((trace / "trace.json").read_text())["dtype"] == "float32"
    again = call("align", root, "--reference", trace, "--precision", "bf16", "--device", "cpu")
    assert again.code == 0, again.out + again.err
    assert "agrees with trace trace" in again.out
    assert "errors by layer" in again.out
    assert call("align", root, "--reference", tmp_path / "none").code == 2


@pytest.mark.ranks
def test_a_weight_that_differs_from_the_trace_is_named(
    call: Call, saved: tuple[int, str, Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    done = call("align", other, "--reference", saved[2], "--precision", "fp32", "--device", "cpu", "--json")
    assert done.code == 1
    assert done.record["guilty"]["name"] == "inputs_embeds"
    assert done.record["guilty"]["side"] == "reference"


def test_a_checkpoint_is_converted_once(call: Call, root: Path, tmp_path: Path) -> None:
    done = call("quantize", root, tmp_path / "fp8", "--precision", "fp8", "--json")
    assert done.code == 0, done.err
    assert done.record["quantised_ratio"] < 0.56
    assert audit(tmp_path / "fp8").ok
    assert call("quantize", root, tmp_path / "fp8", "--precision", "fp8").code == 2
    assert "cannot store precision" in call("quantize", root, tmp_path / "x", "--precision", "int3").err


def test_a_sweep_writes_the_map_that_quantize_takes(call: Call, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "map.json"
    done = call(
        "sweep", root, "--kl", "0.1", "--tokens", "12", "--formats", "fp8,int4", "--device", "cpu", "--map", target,
        "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.record["chosen"]["kl"] <= 0.1
    assert read_precision_map(target).to_json() == done.record["precision_map"]
    converted = call("quantize", root, tmp_path / "mix", "--precision", target, "--json")
    assert converted.code == 0, converted.err
    assert converted.record["ratio"] == pytest.approx(done.record["chosen"]["ratio"], abs=0.03)
    assert call("sweep", root, "--memory", "10", "--tokens", "4", "--formats", "fp8", "--device", "cpu").code == 1
    assert call("sweep", root, "--kl", "0.1", "--formats", "nf4").code == 2
