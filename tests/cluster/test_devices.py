"""Devices of the machine: listed in a child, described without guesses, features tried and not believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from workbench.base import DeploymentError
from workbench.cluster import FEATURE_NAMES, devices, host_device, list_devices, measure_features, tasks
from workbench.cluster.probe import ProbeResult


def test_importing_the_room_loads_no_torch_and_touches_no_device() -> None:
    code = "import sys, workbench.cluster; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_listing_devices_keeps_torch_out_of_this_process() -> None:
    code = (
        "import sys\n"
        "from workbench.cluster import default_device, list_devices\n"
        "found = list_devices()\n"
        "assert found[-1].type == 'cpu' and default_device() == found[0].type\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_host_is_listed_last_with_memory_and_cores() -> None:
    host = list_devices()[-1]
    assert host.type == host.torch_name == "cpu"
    assert host.backend == "gloo"
    assert host.cores is not None
    assert host.cores >= 1
    assert host.memory_total is not None
    assert host.memory_free is not None
    assert 0 < host.memory_free.value <= host.memory_total.value
    assert host.memory_total.basis == "measured"
    assert host.memory_total.unit == "B"
    json.dumps(host.to_json(), allow_nan=False)
    assert host.name in host.render()


def fake_machine(folder: Path, *, limit: str | None) -> tuple[Path, Path]:
    proc, cgroup = folder / "proc", folder / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal:  2000 kB\nMemFree: 100 kB\nMemAvailable:  1500 kB\nHugePages_Total: 0\n")
    (proc / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU 9000\nmodel name\t: Some CPU 9000\n")
    if limit is not None:
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text("400000\n")
    return proc, cgroup


@pytest.mark.parametrize(
    ("limit", "total", "free", "source"),
    [
        (None, 2048000, 1536000, "/proc/meminfo"),
        ("max", 2048000, 1536000, "/proc/meminfo"),
        ("9999999999", 2048000, 1536000, "/proc/meminfo"),
        ("1000000", 1000000, 600000, "cgroup memory.max"),
    ],
)
def test_a_container_limit_counts_where_it_is_smaller(
    tmp_path: Path, limit: str | None, total: int, free: int, source: str
) -> None:
    proc, cgroup = fake_machine(tmp_path, limit=limit)
    host = host_device(proc=proc, cgroup=cgroup)
    assert host.memory_total is not None
    assert host.memory_free is not None
    assert (host.memory_total.value, host.memory_free.value) == (total, free)
    assert host.memory_total.source == source
    assert host.name == "Some CPU 9000"


def test_a_machine_without_proc_shows_gaps_instead_of_guesses(tmp_path: Path) -> None:
    host = host_device(proc=tmp_path / "none", cgroup=tmp_path / "none")
    assert host.memory_total is None
    assert host.memory_free is None
    assert "not offered" in host.render()
    assert host.to_json()["memory_total_bytes"] is None


def accelerator_answer(**changes: object) -> list[ProbeResult]:
    entry = {"type": "npu", "index": 1, "name": "Chip X", "memory_total": 64, "memory_free": 60, "backend": "hccl"}
    value = [{**entry, **changes}]
    return [ProbeResult(kind="accelerators", argument="", value=value, error="", seconds=0.1)]


def test_accelerators_come_first_under_the_name_torch_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "run_probe", lambda *args, **kwargs: accelerator_answer())
    devices.default_device.cache_clear()
    chip, host = list_devices()
    assert (chip.torch_name, chip.name, chip.backend, chip.is_accelerator) == ("npu:1", "Chip X", "hccl", True)
    assert chip.memory_free is not None
    assert chip.memory_free.value == 60
    assert not host.is_accelerator
    assert devices.default_device() == "npu"
    devices.default_device.cache_clear()


def test_memory_that_is_not_offered_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = accelerator_answer(memory_total=None, memory_free=None, backend=None)
    monkeypatch.setattr(devices, "run_probe", lambda *args, **kwargs: answer)
    chip = list_devices()[0]
    assert chip.memory_total is None
    assert chip.backend is None
    assert "not offered" in chip.render()


def test_a_driver_that_does_not_answer_is_an_error_not_an_empty_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [ProbeResult(kind="accelerators", argument="", value=None, error="timed out after 120 s", seconds=120.0)]
    monkeypatch.setattr(devices, "run_probe", lambda *args, **kwargs: failed)
    with pytest.raises(DeploymentError, match="could not list accelerators: timed out"):
        list_devices()


def test_the_child_describes_accelerators_through_torch_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("privateuseone"))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda idx: (10 + idx, 20 + idx))
    module = SimpleNamespace(get_device_properties=lambda idx: SimpleNamespace(name=f"Chip {idx}"))
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    first, second = tasks.describe_accelerators()
    assert first["name"] == "Chip 0"
    assert (second["index"], second["memory_free"], second["memory_total"]) == (1, 11, 21)
    assert "backend" not in first or isinstance(first["backend"], str)


def test_feature_names_are_those_the_child_can_try() -> None:
    assert tuple(tasks.FEATURES) == FEATURE_NAMES


def test_features_of_the_host_are_tried_in_a_child() -> None:
    found = measure_features("cpu", ("fp32 matmul", "bf16 matmul", "fp8 e4m3 cast", "grouped matmul", "no such thing"))
    assert [x.is_supported for x in found] == [True, True, True, True, False]
    assert "KeyError" in found[-1].detail
    assert all(x.seconds >= 0 for x in found)


def test_a_device_that_answers_wrongly_counts_as_no(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = torch._int_mm
    tasks.run_feature("int8 matmul", "cpu")
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: sound(a, b) + 1)
    with pytest.raises(ArithmeticError, match="wrong numbers"):
        tasks.run_feature("int8 matmul", "cpu")
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: sound(a, b) * float("nan"))
    with pytest.raises(ArithmeticError, match="wrong numbers"):
        tasks.run_feature("int8 matmul", "cpu")


@pytest.mark.parametrize("name", FEATURE_NAMES)
def test_every_feature_task_runs_on_the_host(name: str) -> None:
    tasks.run_feature(name, "cpu")
