"""Where the time of a load goes: counted by stage and piece, in bounded memory, and laid at the right stage's door."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.checkpoint import Checkpoint
from workbench.loading import STAGES, Ledger, LoadProgress, ShardReader, StageTimes, Transform, load_rank
from workbench.loading.stages import FIRST_BIN_S, MAX_BINS
from workbench.placement import Layout


class Clock:
    """Seconds that only a test moves, each thread its own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self) -> float:
        return getattr(self._own, "now", 0.0)

    def advance(self, seconds: float) -> None:
        self._own.now = self() + seconds


def busy_seconds(record: dict[str, object], stage: str) -> float:
    return sum(record["busy"][stage]) * record["bin_s"]  # type: ignore[index, operator]


def test_time_and_bytes_are_added_by_stage_and_shared_over_pieces_by_bytes() -> None:
    clock = Clock()
    times = StageTimes(rank=3, clock=clock)
    began = times.now()
    clock.advance(3.0)
    at = times.add("read", began, {"embed": 100, "layers.0": 200})
    clock.advance(0.5)
    times.add("bind", at, {"layers.0": 400})
    clock.advance(0.25)
    times.finish()
    clock.advance(9.0)
    record = json.loads(json.dumps(times.to_json()))
    assert (record["rank"], record["seconds"]) == (3, 3.75)
    assert record["seconds_by_stage"] == {**dict.fromkeys(STAGES, 0.0), "read": 3.0, "bind": 0.5}
    assert (record["bytes_by_stage"]["read"], record["bytes_by_stage"]["bind"]) == (300, 400)
    embed, layer = record["pieces"]
    assert embed == {"name": "embed", "seconds_by_stage": {"read": 1.0}, "bytes_by_stage": {"read": 100}}
    assert layer["seconds_by_stage"] == {"read": 2.0, "bind": 0.5}


def test_bins_widen_and_lose_nothing() -> None:
    clock = Clock()
    times = StageTimes(clock=clock)
    for _ in range(1000):
        at = times.now()
        clock.advance(0.3)
        at = times.add("transform", at, {"layers.1": 1})
        clock.advance(0.1)
        times.add("bind", at, {"layers.1": 1})
    record = times.to_json()
    assert record["bin_s"] == FIRST_BIN_S * 512  # 1/128 s, doubled until 128 of them hold 400 s
    assert MAX_BINS // 2 < len(record["busy"]["bind"]) <= MAX_BINS  # type: ignore[index]
    assert busy_seconds(record, "transform") == pytest.approx(300.0, rel=1e-3)
    assert busy_seconds(record, "bind") == pytest.approx(100.0, rel=1e-3)
    assert record["busy"]["bind"][10] == pytest.approx(0.25, abs=0.03)  # type: ignore[index]
    assert busy_seconds(record, "read") == 0.0


def test_an_interval_lies_in_the_bins_that_it_touches() -> None:
    clock = Clock()
    times = StageTimes(clock=clock)
    clock.advance(0.5 * FIRST_BIN_S)
    at = times.now()
    clock.advance(2.25 * FIRST_BIN_S)
    times.add("check", at, {"head": 1})
    clock.advance(1.0 * FIRST_BIN_S)
    assert times.to_json()["busy"]["check"] == [0.5, 1.0, 0.75, 0.0]  # type: ignore[index]


def test_memory_is_flat_however_long_a_load_takes() -> None:
    clock = Clock()
    times = StageTimes(clock=clock)

    def run(count: int) -> None:
        for n in range(count):
            at = times.now()
            clock.advance(0.1)
            times.add(STAGES[n % len(STAGES)], at, {f"layers.{n % 93}": 1})

    tracemalloc.start()
    try:
        run(2000)
        before = tracemalloc.get_traced_memory()[0]
        run(18_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 50_000, f"{grown} bytes more after 18,000 steps, each of which would take 32 if it were kept"
    assert len(json.dumps(times.to_json())) < 60_000


class SlowReads:
    """A second for every call."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.clock.advance(1.0)
        return os.preadv(fd, buffers, offset)


def test_each_slow_part_of_a_load_shows_in_its_own_stage(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts = Clock(), {"transform": 0, "bind": 0, "check": 0}
    transform, record, observe = Transform.apply, Ledger.record, Ledger.observe

    def slow(stage: str, seconds: float) -> None:
        counts[stage] += 1
        clock.advance(seconds)

    def slow_transform(self: Transform, parts: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
        slow("transform", 10.0)
        return transform(self, parts)

    def slow_record(self: Ledger, *args: object, **options: object) -> None:
        slow("bind", 100.0)
        record(self, *args, **options)  # type: ignore[arg-type]

    def slow_observe(self: Ledger, *args: object) -> None:
        slow("check", 1000.0)
        observe(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Transform, "apply", slow_transform)
    monkeypatch.setattr(Ledger, "record", slow_record)
    monkeypatch.setattr(Ledger, "observe", slow_observe)
    checkpoint, times = Checkpoint.open(sound / "F0"), StageTimes(rank=1, clock=clock)
    reader = ShardReader(checkpoint.root, rank=1, preadv=SlowReads(clock))
    _, _, stats = load_rank(
        checkpoint, Layout(tp=2, ep=2), 1, precision="int8", window_bytes=1 << 20, reader=reader, stages=times
    )
    seconds = times.by_stage()
    assert seconds["read"] == stats.num_reads  # the reading thread's own clock
    assert (seconds["wait"], seconds["transfer"]) == (0.0, 0.0)
    for stage, each in (("transform", 10.0), ("bind", 100.0), ("check", 1000.0)):
        assert counts[stage] > 20
        assert seconds[stage] == each * counts[stage]
    assert stats.seconds == times.seconds == sum(seconds.values()) - seconds["read"]


def test_bytes_of_a_load_are_those_of_its_stats_and_pieces_those_of_the_model(sound: Path) -> None:
    checkpoint, times, heard = Checkpoint.open(sound / "F1"), StageTimes(), list[LoadProgress]()
    model, _, stats = load_rank(checkpoint, Layout(), 0, precision="bf16", stages=times, progress=heard.append)
    record = times.to_json()
    num_bytes = record["bytes_by_stage"]
    assert num_bytes["read"] == num_bytes["transfer"] == stats.bytes_read  # type: ignore[index]
    assert 0 < stats.bytes_read - num_bytes["transform"] < 100  # type: ignore[index]  # the padding of A_log
    assert num_bytes["bind"] == stats.resident_bytes  # type: ignore[index]
    names = {piece["name"] for piece in record["pieces"]}  # type: ignore[attr-defined]
    assert names == {"embed", "head", "final_norm", "final_res", "vision", "projector"} | {
        f"layers.{n}" for n in range(checkpoint.spec.num_layers)
    }
    seconds = times.by_stage()
    assert sum(seconds.values()) - seconds["read"] <= stats.seconds
    assert heard[-1].stages == seconds
    for stage in STAGES:
        pieces = sum(p["seconds_by_stage"].get(stage, 0.0) for p in record["pieces"])  # type: ignore[attr-defined]
        assert pieces == pytest.approx(seconds[stage])
    assert all(torch.isfinite(x).all() for x in model.parameters() if x.is_floating_point())
