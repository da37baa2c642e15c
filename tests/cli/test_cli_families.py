"""`workbench families`: the list of families, and a table of many configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_configs import CONFIGS

from workbench.cli import main


def test_without_a_folder_every_family_is_listed_with_the_length_of_its_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["families", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["families"]
    folder = Path(__file__).resolve().parents[2] / "workbench" / "spec" / "families"
    files = {path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.py") if path.stem != "__init__"}
    assert {entry["family"]: entry["lines"] for entry in listed} == files


def test_a_folder_of_configs_becomes_one_table_with_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("gpt_oss", "deepseek_v32", "minimax_m3"):
        (tmp_path / f"{name}.json").write_text(json.dumps(CONFIGS[name]))
    assert main(["families", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 GQA window+MoE" not in printed
    assert "2 GQA window+MoE, 1 GQA+MoE" in printed
    assert "block-sparse reading" in printed
    (tmp_path / "strange.json").write_text(json.dumps({"model_type": "whirl"}))
    assert main(["families", str(tmp_path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in record["models"]] == ["deepseek_v32", "gpt_oss", "minimax_m3"]
    assert record["models"][0]["index_bytes_per_token"] == 60
    assert record["refused"][0][0] == "strange.json"


def test_an_empty_or_absent_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", str(tmp_path)]) == 2
    assert main(["families", str(tmp_path / "no")]) == 2
    assert "no such file" in capsys.readouterr().err
