"""A share loaded piece by piece is the share; a rehearsal says what it read, what it kept and what it was made of."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.base import CheckpointError, HostBytes, LayoutError, LoadError
from workbench.checkpoint import F0, GHOST_NAME, Checkpoint, k3_config, write_checkpoint, write_ghost
from workbench.cli import main
from workbench.loading import load_in_pieces, load_rank, pieces, prepare_load
from workbench.loading.load import tensors_of
from workbench.placement import Layout, owned_shards
from workbench.rehearsal import all_ranks_bytes, check_ledger, read_plan, rehearse, stage_shares
from workbench.spec import parse_config

sys.path.append(str(Path(__file__).resolve().parents[1]))
import k3_published

LAYOUTS = ("tp1", "tp2xep2", "dp2xtp2xep4", "pp2xtp2", "dp2xep2")
WINDOW = 1 << 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("weights") / "F0", k3_config(sizes=F0), seed=5, shards=3)


@pytest.fixture
def spooky(weights: Path, tmp_path: Path) -> Path:
    return write_ghost(weights, tmp_path / "ghost").root


@pytest.mark.parametrize("precision", ["mxfp4", "bf16", "int8"])
def test_pieces_put_together_are_the_ordinary_load(weights: Path, precision: str) -> None:
    checkpoint, layout = Checkpoint.open(weights), Layout.parse("tp2xep2")
    whole, ledger, stats = load_rank(checkpoint, layout, 1, precision=precision)
    done = load_in_pieces(prepare_load(checkpoint, layout, 1, precision=precision, window_bytes=WINDOW), keep=True)
    assert done.model is not None
    ours, theirs = tensors_of(done.model), tensors_of(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert [(e.label, e.norm, e.written) for e in done.ledger.entries] == [
        (e.label, pytest.approx(e.norm, rel=1e-5), e.written) for e in ledger.entries
    ]
    assert done.stats.bytes_read == stats.bytes_read == stats.bytes_assigned


def test_ledger_sees_every_value_of_pieces_that_are_let_go(weights: Path) -> None:
    checkpoint = Checkpoint.open(weights)
    kept, passed = (
        load_in_pieces(prepare_load(checkpoint, Layout(), 0, precision="mxfp4", window_bytes=WINDOW), keep=keep)
        for keep in (True, False)
    )
    assert passed.model is None
    assert [(e.label, e.norm, e.sources) for e in passed.ledger.entries] == [
        (e.label, e.norm, e.sources) for e in kept.ledger.entries
    ]
    assert sum(piece.resident_bytes for piece in passed.pieces) == passed.stats.resident_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan_counts_what_is_then_read(spooky: Path, layout: str) -> None:
    checkpoint, parsed = Checkpoint.open(spooky), Layout.parse(layout)
    for rank in range(parsed.world_size):
        prepared = prepare_load(checkpoint, parsed, rank, precision="mxfp4", window_bytes=WINDOW)
        plan = read_plan(prepared, "mxfp4")
        stats = load_in_pieces(prepared).stats
        assert (plan.num_bytes, plan.num_reads) == (stats.bytes_read, stats.num_reads)
        assert sum(plan.bytes_by_role.values()) == stats.bytes_assigned == plan.num_bytes
        assert sum(file.num_reads for file in plan.files) == plan.num_reads
        assert sum(file.num_tensors for file in plan.files) == plan.num_tensors == sum(plan.tensors_by_role.values())


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2xtp2", "dp4xtp2xep2", "tp4xep2"])
def test_bytes_of_all_ranks_are_the_sum_over_ranks(layout: str) -> None:
    spec, parsed = parse_config(k3_config(sizes=F0)), Layout.parse(layout)
    summed = sum(x.num_bytes for rank in range(parsed.world_size) for x in owned_shards(spec, parsed, rank))
    # Only padding is counted by one and not by the other: A_log is stored for more heads than there are.
    assert all_ranks_bytes(spec, parsed) == summed


def test_padding_is_counted_as_read(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "padded", k3_config(sizes=F0), a_log_padding=3)
    prepared = prepare_load(Checkpoint.open(root), Layout(), 0, precision="mxfp4")
    plan, num_kda = read_plan(prepared, "mxfp4"), 5
    assert plan.num_bytes - sum(plan.bytes_by_role.values()) == num_kda * 3 * 4
    assert load_in_pieces(prepared).stats.bytes_read == plan.num_bytes


def test_rehearsal_of_a_config_alone_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k3_config(sizes=F0)))
    told: list[str] = []
    report = rehearse(tmp_path / "config.json", Layout.parse("tp2xep2"), rank=1, measure_disk=False, say=told.append)
    assert report.ok
    assert report.origin.is_ghost
    assert report.load is not None
    assert report.load.ledger["rows"] == report.load.ledger["rows_written"]
    assert report.load.ledger["is_ghost"] is True
    assert told[0].startswith("ghost: ")
    assert not Path(report.root).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_report_says_that_there_are_no_weights_and_what_was_kept(spooky: Path, weights: Path) -> None:
    passed = rehearse(spooky, Layout(), measure_disk=False)
    text = passed.render()
    assert "weights: ghost: no weights" in text
    assert "nothing was kept: 14 pieces" in text
    assert passed.to_json()["weights"]["is_ghost"] is True  # type: ignore[index]
    json.dumps(passed.to_json())
    kept = rehearse(weights, Layout(), keep=True, measure_disk=False)
    assert "the whole share was held at once" in kept.render()
    assert "weights as published" in kept.render()
    assert "ghost: no weights" not in kept.render()


def test_plan_only_reads_nothing(spooky: Path) -> None:
    report = rehearse(spooky, Layout.parse("pp2xtp2"), rank=3, plan_only=True, measure_disk=False)
    assert report.ok
    assert report.load is None
    assert report.plan is not None
    assert report.plan.place == "pp1 dp0 tp1 ep0"
    assert [share.ranks for share in report.shares] == [(0, 1), (2, 3)]
    assert "Collectives of one step" in report.render()
    json.dumps(report.to_json())


def test_disk_of_the_ghost_is_measured_and_nothing_stays_on_it(spooky: Path) -> None:
    report = rehearse(spooky, Layout(), plan_only=True)
    rate = report.estimates["rate of this disk"]
    assert rate.basis == "measured"
    alone = report.estimates["load of one rank alone on such a disk"]
    assert report.plan is not None
    assert (alone.basis, alone.value) == ("modelled", pytest.approx(report.plan.num_bytes / rate.value))
    assert "start of the cluster, hosts of 1 with such a disk each" in report.estimates
    assert [path.name for path in spooky.parent.iterdir()] == [spooky.name]


# ---------------------------------------------------------------------------------- faults


def test_ghost_that_lost_a_file_is_not_loaded(spooky: Path) -> None:
    next(iter(sorted(spooky.glob("*.safetensors")))).unlink()
    report = rehearse(spooky, Layout(), measure_disk=False)
    assert (report.ok, report.plan, report.load) == (False, None, None)
    assert "NOT ready" in report.summary()
    assert "missing_shard" in report.render()


def test_mark_on_weights_ends_the_rehearsal(weights: Path, spooky: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(weights, tmp_path / "copy"))
    shutil.copy(spooky / GHOST_NAME, root)
    report = rehearse(root, Layout(), measure_disk=False)
    assert not report.ok
    assert {finding.kind for finding in report.audit.errors} == {"ghost_mark"}


def test_loader_itself_refuses_values_in_a_ghost(weights: Path, spooky: Path) -> None:
    """Whatever the look at holes missed: the ledger of a ghost lets no value pass."""
    mark = Checkpoint.open(spooky).ghost
    pretender = dataclasses.replace(Checkpoint.open(weights), ghost=mark)
    with pytest.raises(LoadError, match="not zero, in files that are marked as a ghost"):
        load_rank(pretender, Layout(), 0, precision="mxfp4")
    with pytest.raises(LoadError, match="not zero, in files that are marked as a ghost"):
        load_in_pieces(prepare_load(pretender, Layout(), 0, precision="mxfp4"))


@pytest.mark.parametrize("precision", ["mxfp4", "bf16", "int8", "fp8"])
def test_loader_refuses_the_zeros_of_a_ghost_without_its_mark(spooky: Path, precision: str) -> None:
    unmarked = dataclasses.replace(Checkpoint.open(spooky), ghost=None)
    with pytest.raises(LoadError, match="all zero: layers"):
        load_rank(unmarked, Layout(), 0, precision=precision)
    ledger = load_rank(Checkpoint.open(spooky), Layout(), 0, precision=precision)[1]
    assert ledger.warnings == ["a ghost was loaded: there are no weights, every value is zero"]


def test_share_larger_than_the_memory_is_refused_before_reading(spooky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_load(Checkpoint.open(spooky), Layout(), 0, precision="mxfp4", window_bytes=WINDOW)
    between = (prepared.peak_bytes(keep=False) + prepared.peak_bytes(keep=True)) / 2 / pieces.HOST_SHARE
    monkeypatch.setattr(pieces, "host_memory", lambda: HostBytes(total=None, available=int(between)))
    with pytest.raises(LoadError, match=r"this host has no memory for the share.*Load it in pieces"):
        load_in_pieces(prepared, keep=True)
    load_in_pieces(prepare_load(Checkpoint.open(spooky), Layout(), 0, precision="mxfp4", window_bytes=WINDOW))


@pytest.mark.parametrize(("layout", "rank", "match"), [("tp3", 0, "does not divide"), ("tp2", 2, "outside 0..1")])
def test_layout_and_rank_are_checked_before_a_ghost_is_written(
    weights: Path, tmp_path: Path, layout: str, rank: int, match: str
) -> None:
    with pytest.raises(LayoutError, match=match):
        rehearse(weights / "config.json", Layout.parse(layout), rank=rank, out=tmp_path / "ghost")
    assert not (tmp_path / "ghost").exists()


def test_ghost_is_not_asked_of_a_folder_that_has_files(spooky: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no ghost is written"):
        rehearse(spooky, Layout(), out=tmp_path / "second")


def test_command_has_the_exit_codes_of_the_others(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ghost"
    arguments = ["rehearse", "--layout", "tp2xep2", "--rank", "1", "--json"]
    assert main([*arguments, str(weights / "config.json"), "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["ok"], record["plan"]["rank"], record["load"]["kept"]) == (True, 1, False)
    sorted(out.glob("*.safetensors"))[0].unlink()
    assert main([*arguments, str(out)]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main([*arguments, str(weights / "config.json"), "--out", str(out)]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == CheckpointError.__name__


# ---------------------------------------------------------------------------------- memory


PROBE = """
import json, resource, sys
import torch
from workbench.checkpoint import Checkpoint
from workbench.loading import load_in_pieces, prepare_load
from workbench.placement import Layout
torch.set_num_threads(1)
warm, root = sys.argv[1:]
load_in_pieces(prepare_load(Checkpoint.open(warm), Layout(), 0, precision="mxfp4", window_bytes=1 << 16))
prepared = prepare_load(Checkpoint.open(root), Layout(), 0, precision="mxfp4", window_bytes=16 << 20)
predicted = prepared.peak_bytes(keep=False)
stats = load_in_pieces(prepared).stats
print(json.dumps({"predicted": predicted, "measured": stats.peak_host_bytes, "resident": stats.resident_bytes}))
"""


def test_memory_is_that_of_the_largest_piece_as_predicted(spooky: Path, tmp_path: Path) -> None:
    """A share of half a gigabyte passes through a process that grows by a tenth of it."""
    sizes = {**F0, "hidden_size": 1024, "expert_width": 512, "latent_dim": 512, "num_experts": 128, "vocab_size": 16384}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(k3_config(sizes=sizes)))  # type: ignore[arg-type]
    root = write_ghost(config, tmp_path / "large").root
    done = subprocess.run([sys.executable, "-c", PROBE, spooky, root], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["resident"] > 4 * found["measured"]
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.25)


# ---------------------------------------------------------------------------------- every rank


@pytest.mark.parametrize("layout", ["tp2xep2", "dp2xtp2xep4", "pp2xtp2", "dp2xep2:all_to_all"])
def test_share_of_a_stage_is_that_of_each_of_its_ranks(spooky: Path, layout: str) -> None:
    checkpoint, parsed = Checkpoint.open(spooky), Layout.parse(layout)
    shares = stage_shares(checkpoint, parsed, precision="mxfp4")
    assert [share.stage for share in shares] == list(range(parsed.pp))
    for rank in range(parsed.world_size):
        share = shares[parsed.coords(rank).pp]
        assert share.ranks[0] <= rank <= share.ranks[1]
        prepared = prepare_load(checkpoint, parsed, rank, precision="mxfp4")
        assert share.num_bytes == sum(x.num_bytes for x in owned_shards(checkpoint.spec, parsed, rank))
        assert share.resident_bytes == prepared.resident_bytes
    assert sum(share.num_bytes * share.num_ranks for share in shares) == all_ranks_bytes(checkpoint.spec, parsed)
    groups = {use.group for share in shares for use in share.decode}
    assert ("tp" in groups, "pp" in groups) == (parsed.tp > 1, parsed.pp > 1)


def test_ledger_of_a_plan_is_that_of_the_load(spooky: Path) -> None:
    prepared = prepare_load(Checkpoint.open(spooky), Layout.parse("tp2xep2"), 1, precision="mxfp4", window_bytes=WINDOW)
    planned = {(e.label, tuple(e.written)) for e in check_ledger(prepared).entries}
    assert planned == {(e.label, tuple(e.written)) for e in load_in_pieces(prepared).ledger.entries}


def test_plan_that_forgets_or_doubles_a_row_fails_without_a_load(spooky: Path) -> None:
    prepared = prepare_load(Checkpoint.open(spooky), Layout(), 0, precision="mxfp4", window_bytes=WINDOW)
    whole = prepared.plan.assignments
    for assignments, match in ((whole[1:], "missing: "), ((*whole, whole[0]), "written twice: ")):
        faulty = dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, assignments=assignments))
        with pytest.raises(LoadError, match=match):
            check_ledger(faulty)


# ---------------------------------------------------------------------------------- the published model

ROUTED_EXPERTS = 1_446_456_066_048  # bytes of all of them


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not k3_published.INDEX.exists(), reason="the published index is not here")
def test_one_rank_of_k3_over_64_is_planned_and_really_loaded(tmp_path: Path) -> None:
    root = write_ghost(k3_published.CONFIG, tmp_path / "k3", index=k3_published.INDEX).root
    layout = Layout.parse("tp8xdp8xep64")
    prepared = prepare_load(Checkpoint.open(root), layout, 11, precision="mxfp4")
    plan = read_plan(prepared, "mxfp4")
    assert plan.bytes_by_role["routed_expert"] == ROUTED_EXPERTS // 64
    done = load_in_pieces(prepared)
    assert (done.stats.bytes_read, done.stats.num_reads) == (plan.num_bytes, plan.num_reads)
    summary = done.ledger.summary()
    assert summary["rows"] == summary["rows_written"]
    assert done.stats.peak_host_bytes < 1 << 30 < 32 << 30 < done.stats.resident_bytes
    assert done.stats.peak_host_bytes == pytest.approx(prepared.peak_bytes(keep=False), rel=0.25)
