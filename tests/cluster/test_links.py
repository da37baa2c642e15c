"""Links measured between real ranks, and what is said when ranks hang, skip, crash or answer wrongly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from workbench.base import ConfigError
from workbench.cluster import Device, Locality, Topology, host_device, link_survey, links, measure_topology
from workbench.cluster.locality import LinkFact
from workbench.cluster.rank_process import WORKER

FAULTY = str(Path(__file__).with_name("faulty_link_worker.py"))
SIZES = (1 << 10, 1 << 16)
LIMIT_S = 6.0

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for accelerators takes seconds each time, and these tests run on the host."""
    monkeypatch.setattr(links, "list_devices", lambda: (host_device(),))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer dtypes: each fault is struck in the first."""
    monkeypatch.setattr(link_survey, "COVERAGE_DTYPES", ("float32",))


def measure(*fault: str, num_ranks: int = 2, dtypes: tuple[str, ...] = ("float32",)) -> Topology:
    command = (sys.executable, FAULTY, *fault) if fault else WORKER
    return measure_topology(
        num_ranks, device="cpu", sizes=SIZES, dtypes=dtypes, rates=False, time_limit_s=LIMIT_S, command=command
    )


def operations(topology: Topology) -> set[str]:
    return {fit.operation for fit in topology.collectives}


COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}


def test_two_ranks_are_measured_and_the_record_answers() -> None:
    heard: list[str] = []
    topology = measure_topology(
        2, device="cpu", sizes=SIZES, dtypes=("bfloat16", "float32"), rates=False, on_step=heard.append
    )
    assert topology.claims == ()
    assert {(fit.operation, fit.dtype) for fit in topology.collectives} == {
        (operation, dtype) for operation in COLLECTIVES for dtype in ("bfloat16", "float32")
    }
    for cost in [link.cost for link in topology.pairs] + [fit.cost for fit in topology.collectives]:
        assert [size for size, _ in cost.points] == list(SIZES)
        assert 1e-7 < cost.time(1024).value < 1.0
        assert cost.time(1024).basis == "measured"
    assert topology.collective_time("all_reduce", 4096, (0, 1)).basis == "measured"
    assert "all_to_all in bfloat16 over ranks 0 1" in heard
    supported = {(x.operation, x.dtype): x.is_supported for x in topology.coverage}
    assert all(supported[operation, "bfloat16"] for operation in COLLECTIVES)
    assert not supported["all_reduce", "float8_e4m3fn"]
    words = next(x.detail for x in topology.coverage if (x.operation, x.dtype) == ("all_reduce", "float8_e4m3fn"))
    assert "Invalid scalar type" in words
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert {(x.operation, len(x.candidates)) for x in topology.choices} == {("all_reduce", 2), ("all_to_all", 2)}
    memory = topology.devices[0].memory_total
    assert memory is not None
    assert memory.source.startswith("1/2 of")


@pytest.mark.usefixtures("few")
def test_three_ranks_have_every_pair_and_groups_of_two() -> None:
    topology = measure(num_ranks=3)
    assert [(link.a, link.b) for link in topology.pairs] == [(0, 1), (0, 2), (1, 2)]
    assert {fit.ranks for fit in topology.collectives} == {(0, 1), (0, 1, 2)}
    assert topology.collective_time("all_gather", 4096, (1, 2)).basis == "modelled", "as measured over 0 and 1"


def test_a_single_rank_has_no_links() -> None:
    topology = measure_topology(1, device="cpu", rates=False)
    assert (topology.num_devices, topology.pairs, topology.collectives) == (1, (), ())


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("few")
def test_c03_a_rank_that_never_joins_is_a_claim_and_not_waited_for() -> None:
    topology = measure_topology(
        2,
        device="cpu",
        sizes=SIZES,
        rates=False,
        join_limit_s=8.0,
        command=(sys.executable, FAULTY, "silent at init"),
    )
    assert topology.num_devices == 2
    assert topology.pairs == topology.collectives == topology.coverage == ()
    assert topology.claims[0].startswith(
        "claimed, not measured: joining the group: rank 1 did not answer within 8 s; rank 0 "
    )
    assert topology.claims[1].endswith("more measurements, given up after the ranks broke")


@pytest.mark.usefixtures("few")
def test_a_rank_that_dies_at_init_leaves_its_last_words() -> None:
    topology = measure("exit at init")
    assert "rank 1 ended with exit code 1: driver says: no such device" in topology.claims[0]


@pytest.mark.usefixtures("few")
def test_a_rank_that_skips_a_collective_is_named_with_step_and_operation_within_seconds() -> None:
    topology = measure("skip", "reduce_scatter")
    claim = topology.claims[0]
    assert claim.startswith("claimed, not measured: step 2, reduce_scatter in float32 over ranks 0 1, 1,024 B: rank 1:")
    assert "wrong numbers" in claim
    assert "rank 0 entered and did not come back" in claim
    assert operations(topology) == COLLECTIVES - {"reduce_scatter"}, "the rest is measured with new ranks"
    assert len(topology.pairs) == 1


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_a_rank_that_hangs_before_the_collective_is_told_from_the_one_that_waits() -> None:
    topology = measure("hang before", "all_gather")
    assert "rank 1 began and did not enter within 6 s; rank 0 entered and did not come back" in topology.claims[0]
    assert operations(topology) == COLLECTIVES - {"all_gather"}


@pytest.mark.usefixtures("few")
def test_a_crash_is_named_by_its_signal_and_costs_one_operation() -> None:
    topology = measure("crash", "broadcast")
    assert "broadcast in float32 over ranks 0 1, 1,024 B: rank 1 ended with SIGSEGV" in topology.claims[0]
    assert operations(topology) == COLLECTIVES - {"broadcast"}
    found = [x for x in topology.coverage if x.operation == "broadcast"]
    assert [x.is_supported for x in found] == [False]


@pytest.mark.usefixtures("few")
def test_wrong_numbers_are_no_support_and_no_measurement() -> None:
    topology = measure("wrong", "all_to_all")
    (found,) = [x for x in topology.coverage if x.operation == "all_to_all"]
    assert not found.is_supported
    assert "rank 1: ArithmeticError: wrong numbers: element 0 is" in found.detail
    assert operations(topology) == COLLECTIVES - {"all_to_all"}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("slowed", "best"),
    [
        pytest.param("messages between pairs", "one call", marks=pytest.mark.slow),
        ("all_to_all", "messages between pairs"),
    ],
)
def test_the_faster_way_is_chosen_by_measurement_whatever_its_name(slowed: str, best: str) -> None:
    topology = measure("slow", slowed)
    (choice,) = [x for x in topology.choices if x.operation == "all_to_all"]
    assert choice.best(4096) == best
    assert {name for name, _ in choice.candidates} == {"one call", "messages between pairs"}


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks to measure"):
        measure_topology(0)
    with pytest.raises(ConfigError, match="no such device"):
        measure_topology(2, device="abacus")
    with pytest.raises(ConfigError, match="message sizes"):
        measure_topology(2, device="cpu", sizes=(1024,))


@pytest.mark.usefixtures("few")
def test_a_link_that_the_system_claims_and_nobody_could_measure_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lists two linked accelerators; the ranks on them do not come up."""
    chips = tuple(
        Device(type="npu", index=i, name="Chip", memory_total=None, memory_free=None, backend=None) for i in range(2)
    )
    told = Locality(links=(LinkFact(a="NPU0", b="NPU1", words="HCCS"),), tool="npu-smi")
    monkeypatch.setattr(links, "list_devices", lambda: chips)
    monkeypatch.setattr(links, "read_locality", lambda: told)
    command = (sys.executable, FAULTY, "exit at init")
    topology = measure_topology(2, sizes=SIZES, rates=False, join_limit_s=60, command=command)
    assert [device.name for device in topology.devices] == ["Chip", "Chip"]
    assert any("driver says: no such device" in claim for claim in topology.claims)
    assert topology.claims[-1] == "claimed, not measured: ranks 0 1: npu-smi says HCCS"
