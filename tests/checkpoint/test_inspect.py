"""Inspection from as little as a config, and the real index of half a million names within its limits."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import surgery
from k3_published import CONFIG, INDEX

from workbench.base import CheckpointError, ConfigError
from workbench.checkpoint import F1, audit, inspect_checkpoint, k3_config, write_checkpoint


def test_a_bare_config_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "some_model.json"
    path.write_text(json.dumps(k3_config(sizes=F1)))
    report = inspect_checkpoint(path)
    assert report.sources == ("some_model.json",)
    assert report.names is None
    assert report.shards is None
    text = report.render()
    assert f"{report.counts.num_params:,}" in text
    assert "KDA+dense" in text
    assert "MLA+MoE" in text
    assert "Files" not in text


def test_index_alone_compares_names(f0: Path) -> None:
    for path in surgery.shards(f0):
        path.unlink()
    report = inspect_checkpoint(f0)
    assert report.sources == ("config.json", "preprocessor_config.json", surgery.INDEX)
    assert report.shards is None
    assert report.names is not None
    assert report.names.is_bijection
    assert (report.names.num_names, report.names.num_files) == (560, 3)


def test_gzipped_index_serves_as_well(f0: Path) -> None:
    index = f0 / surgery.INDEX
    (f0 / "any.safetensors.index.json.gz").write_bytes(gzip.compress(index.read_bytes()))
    index.unlink()
    names = inspect_checkpoint(f0).names
    assert names is not None
    assert (names.source, names.is_bijection) == ("any.safetensors.index.json.gz", True)


def test_headers_give_bytes_by_dtype_and_stand_in_for_an_index(f0: Path) -> None:
    report = inspect_checkpoint(f0)
    assert report.shards is not None
    assert report.shards.bytes_by_dtype == report.counts.bytes_by_dtype
    (f0 / surgery.INDEX).unlink()
    names = inspect_checkpoint(f0).names
    assert names is not None
    assert (names.source, names.num_names, names.is_bijection) == ("headers", 560, True)


def test_names_that_do_not_match_are_counted_and_shown(f0: Path) -> None:
    surgery.edit_index(f0, lambda files: files.update({"visual.proj": files.pop("mm_projector.proj.0.weight")}))
    report = inspect_checkpoint(f0)
    assert report.names is not None
    assert report.names.missing == ("mm_projector.proj.0.weight",)
    assert report.names.unknown == ("visual.proj",)
    assert "1: mm_projector.proj.0.weight" in report.render()


def test_draft_layers_count_as_names_without_a_place(tmp_path: Path) -> None:
    names = inspect_checkpoint(write_checkpoint(tmp_path, mtp_layers=2)).names
    assert names is not None
    assert len(names.unknown) == 8


def test_unreadable_shards_are_listed_not_fatal(f0: Path) -> None:
    path = surgery.shards(f0)[1]
    path.write_bytes(b"<html>404</html>")
    report = inspect_checkpoint(f0)
    assert report.shards is not None
    assert report.shards.unreadable.keys() == {path.name}
    assert f"unreadable: {path.name}" in report.render()


def test_unknown_keys_are_the_news_and_cannot_spoil_the_terminal(f0: Path) -> None:
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    surgery.edit_config(f0, lambda config: config["text_config"].update({"new_\x1b[31m": deep}))
    report = inspect_checkpoint(f0)
    assert "text_config.new_" in report.render()
    assert "\x1b" not in report.render()
    assert json.loads(json.dumps(report.to_json()))["spec"]["unknown_keys"]


def test_html_is_escaped(f0: Path) -> None:
    surgery.edit_config(f0, lambda config: config.update({"<script>x</script>": 1}))
    html = inspect_checkpoint(f0)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    stray = "<b>evil</b>"
    surgery.edit_index(f0, lambda files: files.update({stray: next(iter(files.values()))}))
    page = audit(f0)._repr_html_()
    assert stray not in page
    assert "&lt;b&gt;evil" in page


def test_report_of_an_audit_reads_well_and_survives_json(f0: Path) -> None:
    surgery.shards(f0)[1].unlink()
    report = audit(f0)
    text = report.render()
    assert "NOT sound: 1 errors" in text
    assert "FAIL" in text
    assert "error: missing_shard  model-00002-of-000003.safetensors" in text
    record = json.loads(json.dumps(report.to_json()))
    assert record["ok"] is False
    assert record["findings"][0]["tensors"] == list(report.findings[0].tensors)
    assert max(len(line) for line in text.splitlines()) < 400


def test_a_flood_of_findings_is_cut_in_the_text_and_whole_in_the_record(f0: Path) -> None:
    def rename(files: dict[str, str]) -> None:
        for name in list(files):
            files[f"x.{name}"] = files.pop(name)

    surgery.edit_index(f0, rename)
    report = audit(f0)
    assert len(report.findings) < 60
    assert len(report.render().splitlines()) < 250
    not_held = [name for finding in report.of_kind("not_held") for name in finding.tensors]
    assert len(not_held) == 560


@pytest.mark.parametrize(("path", "error"), [("nowhere", ConfigError), ("nowhere/config.json", ConfigError)])
def test_absent_paths_are_refused(tmp_path: Path, path: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="file is missing"):
        inspect_checkpoint(tmp_path / path)


def test_ambiguous_index_is_refused(f0: Path) -> None:
    (f0 / surgery.INDEX).rename(f0 / "a.index.json")
    shutil.copy(f0 / "a.index.json", f0 / "b.index.json")
    with pytest.raises(CheckpointError, match="several index files"):
        inspect_checkpoint(f0)


# the published checkpoint


@pytest.fixture
def published(tmp_path: Path) -> Path:
    if not (CONFIG.is_file() and INDEX.is_file()):
        pytest.skip("no copy of the published config and index here")
    shutil.copyfile(CONFIG, tmp_path / "config.json")
    shutil.copyfile(INDEX, tmp_path / INDEX.name)
    return tmp_path


def test_published_index_is_read_counted_and_mapped_in_two_gib(published: Path) -> None:
    code = (
        "import json, sys\n"
        "from workbench.base import peak_resident_bytes\n"
        "from workbench.checkpoint import inspect_checkpoint\n"
        "r = inspect_checkpoint(sys.argv[1])\n"
        "print(json.dumps([r.names.num_names, r.names.num_files, r.names.num_matched, r.names.is_bijection,\n"
        "  r.names.total_size, r.counts.weight_bytes, r.counts.num_params, peak_resident_bytes()]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(published)], capture_output=True, text=True, check=True)
    *found, peak = json.loads(done.stdout)
    assert found == [
        497_220, 96, 497_220, True, 1_560_860_324_864, 1_560_860_324_864, 2_779_931_837_184,
    ]  # fmt: skip
    assert peak < 2 << 30


@pytest.mark.slow
def test_published_index_without_its_files_is_one_error_per_file(published: Path) -> None:
    report = audit(published)
    assert {finding.kind for finding in report.errors} == {"missing_shard"}
    assert len(report.errors) == 96
    assert sum(len(finding.tensors) for finding in report.errors) == 497_220
    assert report.warnings == ()


def test_storage_is_shown_module_by_module_with_the_rule_that_keeps_one_plain() -> None:
    root = Path(__file__).resolve().parents[1] / "golden" / "families" / "kimi_k25-int4"
    (table,) = (table for table in inspect_checkpoint(root).tables() if table.title == "Storage by module")
    rows = {row[0]: row[1:] for row in table.rows}
    layers = "language_model.model.layers.*"
    assert rows[f"{layers}.mlp.experts.*.up_proj"] == (4, "int4_packed", "quantised", "", "")
    assert rows[f"{layers}.self_attn.o_proj"] == (2, "plain", "plain", "re:.*self_attn.*", "")
    assert rows["language_model.lm_head"] == (1, "plain", "plain", "lm_head", "")
    assert not any("storage" in table.title.lower() for table in inspect_checkpoint(root.parent / "llama").tables())
