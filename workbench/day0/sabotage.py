"""Sabotaged runs: for each gate a fault, and the very code of an acceptance run that must see it.

A run plants its faults in a folder of its own, in a child process or in ranks that are started for it, and then calls
the function that enters the gate in an ordinary run. Gates share a run where each is failed by another fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.cluster import list_devices
from workbench.day0.devices import measure_features
from workbench.day0.faults.files import choose_matrix, double_matrix, flip_weight, link_folder, tear_shard
from workbench.day0.faults.ranks import REFUSED_PICTURE, REFUSED_TEXT
from workbench.day0.files import measure_files
from workbench.day0.gates import GateBook, GateForm
from workbench.day0.known import measure_known_answers
from workbench.day0.load import measure_loading
from workbench.day0.operators import measure_coverage
from workbench.day0.serve import measure_answers
from workbench.day0.verify import measure_parity, start_in_fp32
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.serving import GenerationRequest, MultimodalInferenceService, SamplingParams, open_service
from workbench.spec import ModelSpec

__all__ = ["ALONE", "ON_RANKS", "Bench", "Fault", "RankRuns", "SabotagedRun", "Site", "wrong_probe"]

FAULTS = "workbench.day0.faults"
WRONG_OPERATOR = "aten.mm.default"
ANSWER_TOKENS = 3  # the fewest that have a time per token which is an average
LONG_TEXT = 3  # of the text requests: the slowest already


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What is accepted, and how, as `run_day0` was told; `folder` is where copies may lie until the proof ends."""

    root: Path
    spec: ModelSpec
    layout: Layout
    precision: str
    device: str
    max_tokens: int
    forms: Mapping[str, GateForm]
    limits: Mapping[str, float]
    folder: Path

    def start(self, root: Path, **options: Any) -> Deployment:
        """Ranks as they serve in the ordinary run, with the files of `root`."""
        return Deployment.start(
            root,
            self.layout,
            precision=self.precision,
            device=self.device,
            max_tokens=self.max_tokens,
            **options,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What was planted, and the words by which the evidence of the gate must name it."""

    what: str
    words: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Bench:
    """One sabotaged run: the gates it enters, and the fault that each of those it proves must fail by."""

    site: Site
    gates: GateBook
    faults: dict[str, Fault] = field(default_factory=dict)

    def plant(self, gate_id: str, what: str, *words: str) -> None:
        """Note the fault that `gate_id` must fail by."""
        self.faults[gate_id] = Fault(what=what, words=words)

    def plant_in_ranks(self, ranks: Deployment, fault: str, **options: object) -> None:
        ranks.call(f"{FAULTS}.ranks:plant", {"fault": fault, **options})


@dataclass(frozen=True, kw_only=True, slots=True)
class SabotagedRun:
    """A run that proves `gate_ids`; it raises what its measurement raises."""

    gate_ids: tuple[str, ...]
    run: Callable[[Bench], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRuns:
    """Runs on the same ranks, one after another; what one plants in them is lifted before the next. `start` makes the
    ranks, whose own faults it may plant in files or in how they load."""

    start: Callable[[Site], Deployment]
    runs: tuple[tuple[tuple[str, ...], Callable[[Bench, Deployment], None]], ...]

    @property
    def gate_ids(self) -> tuple[str, ...]:
        return tuple(gate_id for gate_ids, _ in self.runs for gate_id in gate_ids)


def _quiet(line: str) -> None:
    """Sabotaged runs say nothing of their own: their verdict does."""


# -- without ranks -----------------------------------------------------------------------------------------------------


def wrong_probe(device_type: str, module: str) -> tuple[str, ...]:
    """The command of a probe child that runs `module` on a device whose matrix products are wrong."""
    return (sys.executable, "-m", f"{FAULTS}.device", WRONG_OPERATOR, device_type, module)


def _wrong_device(bench: Bench) -> None:
    device = bench.site.device
    bench.plant("device.features", f"matrix products of {device} come out an eighth too large", "fp32 matmul")
    measure_features(bench.gates, list_devices(features=True, command=wrong_probe(device, "workbench.cluster.child")))


def _wrong_operator(bench: Bench) -> None:
    site = bench.site
    bench.plant("operators.coverage", f"{WRONG_OPERATOR} comes out an eighth too large", WRONG_OPERATOR)
    measure_coverage(
        bench.gates,
        [],
        site.spec,
        site.layout,
        precision=site.precision,
        device=site.device,
        say=_quiet,
        command=wrong_probe(site.device, "workbench.operators.child"),
    )


def _torn_shard(bench: Bench) -> None:
    folder = link_folder(bench.site.root, bench.site.folder / "torn")
    shard = tear_shard(folder)
    bench.plant("checkpoint.audit", f"the end of {shard} is cut off", "torn", shard)
    measure_files(bench.gates, [], folder, say=_quiet)


ALONE = (
    SabotagedRun(gate_ids=("device.features",), run=_wrong_device),
    SabotagedRun(gate_ids=("operators.coverage",), run=_wrong_operator),
    SabotagedRun(gate_ids=("checkpoint.audit",), run=_torn_shard),
)


# -- ranks that load carelessly ----------------------------------------------------------------------------------------


def _start_careless(site: Site) -> Deployment:
    return site.start(site.root, module=f"{FAULTS}.loading")


def _careless_load(bench: Bench, ranks: Deployment) -> None:
    last = ranks.world_size - 1
    bench.plant("loading.rows", "rank 0 leaves rows of a parameter out, unheard by its ledger", "rank 0 lacks")
    bench.plant("loading.read_ratio", "every rank reads its bytes twice", "rank 0 read 2.")
    bench.plant("loading.memory", f"rank {last} holds memory that no window accounts for", f"rank {last} grew")
    measure_loading(bench.gates, [], ranks.reports, samples={}, on_host=bench.site.device == "cpu", say=_quiet)


# -- ranks in fp32, with one weight of another sign --------------------------------------------------------------------


def _flipped(site: Site) -> Path:
    return site.folder / "flipped"


def _start_flipped(site: Site) -> Deployment:
    flip_weight(link_folder(site.root, _flipped(site)), choose_matrix(site.root, "weight_packed"))
    return start_in_fp32(_flipped(site), site.layout, site.device)


def _wrong_weight(bench: Bench, ranks: Deployment) -> None:
    """The reference reads the files as they are. The two runs after this one have it read those of the ranks."""
    site = bench.site
    tensor = choose_matrix(site.root, "weight_packed")
    what = f"one weight of {tensor.name} has the other sign on the ranks"
    bench.plant("parity.fp32", what, f"layer {tensor.layer}", tensor.name)
    measure_parity(bench.gates, [], ranks, _flipped(site), precision="fp32", published=site.root, say=_quiet)


def _misread_token(bench: Bench, ranks: Deployment) -> None:
    bench.plant("parity.fp32_tokens", "a generated token is read as its neighbour in the vocabulary", "first apart")
    bench.plant_in_ranks(ranks, "misread")
    measure_parity(bench.gates, [], ranks, _flipped(bench.site), precision="fp32", say=_quiet)


def _mixed_up_batch(bench: Bench, ranks: Deployment) -> None:
    bench.plant("parity.batch", "tokens of sequences that step together go to the wrong ones", "apart: those of")
    bench.plant_in_ranks(ranks, "mix up")
    measure_parity(bench.gates, [], ranks, _flipped(bench.site), precision="fp32", say=_quiet)


# -- ranks as they serve, with one matrix twice as large ---------------------------------------------------------------


def _doubled(site: Site) -> Path:
    return site.folder / "doubled"


def _start_doubled(site: Site) -> Deployment:
    double_matrix(link_folder(site.root, _doubled(site)), choose_matrix(site.root, "weight_scale"))
    return site.start(_doubled(site))


def _wrong_matrix(bench: Bench, ranks: Deployment) -> None:
    site = bench.site
    tensor = choose_matrix(site.root, "weight_scale")
    bench.plant("parity.serving", f"{tensor.name} is doubled on the ranks", f"layer {tensor.layer}", tensor.name)
    measure_parity(
        bench.gates,
        [],
        ranks,
        _doubled(site),
        precision=site.precision,
        is_served=True,
        published=site.root,
        say=_quiet,
    )


def _refused_requests(bench: Bench, ranks: Deployment) -> None:
    bench.plant("answers.text", "ranks have no token for a text request", REFUSED_TEXT)
    bench.plant("answers.image", "the vision tower refuses every picture", REFUSED_PICTURE)
    bench.plant("serving.slots", "a request that nobody waits for is never ended", "1 still running")
    bench.plant_in_ranks(ranks, "refuse text", num_tokens=ANSWER_TOKENS)
    bench.plant_in_ranks(ranks, "refuse pictures")
    measure_answers(
        bench.gates,
        [],
        [],
        ranks,
        bench.site.root,
        say=_quiet,
        answer_tokens=ANSWER_TOKENS,
        opens=_open_with_a_request_left_behind,
    )


def _open_with_a_request_left_behind(ranks: Deployment, root: Path) -> MultimodalInferenceService:
    service = open_service(ranks, root)
    room = ranks.info.max_tokens - 1
    service.engine.submit(GenerationRequest(token_ids=(0,), sampling=SamplingParams(max_tokens=room)))
    return service


def _blind_and_late(bench: Bench, ranks: Deployment) -> None:
    first_s, next_s = (1.05 * float(bench.gates.threshold(f"latency.{x}")) for x in ("first_token", "per_token"))
    bench.plant("answers.looks", "every picture is black before the vision tower sees it", "the same first token")
    bench.plant("latency.first_token", f"the long text waits {first_s:.3g} s more for its first token", "text, long")
    bench.plant("latency.per_token", f"the long text waits {next_s:.3g} s more for each further token", "text, long")
    bench.plant_in_ranks(ranks, "blind")
    bench.plant_in_ranks(ranks, "late", first_s=first_s, next_s=next_s, num_tokens=ANSWER_TOKENS, number=LONG_TEXT)
    measure_answers(bench.gates, [], [], ranks, bench.site.root, say=_quiet, answer_tokens=ANSWER_TOKENS)


# -- ranks with the weights as they are, where right answers are known -------------------------------------------------


def _start_sound(site: Site) -> Deployment:
    return site.start(site.root)


def _blind_exam(bench: Bench, ranks: Deployment) -> None:
    bench.plant("answers.correct", "every picture is black before the vision tower sees it", "expected")
    bench.plant_in_ranks(ranks, "blind")
    with open_service(ranks, bench.site.root) as service:
        measure_known_answers(bench.gates, [], [], service, say=_quiet)


def _seen_after_all(bench: Bench, ranks: Deployment) -> None:
    bench.plant("answers.blank", "the pictures are shown where they should be empty", "right with an empty picture")
    with open_service(ranks, bench.site.root) as service:
        measure_known_answers(
            bench.gates, [], [], service, say=_quiet, blanked=lambda items: [x for x in items if x.scene]
        )


ON_RANKS = (
    RankRuns(start=_start_careless, runs=((("loading.rows", "loading.read_ratio", "loading.memory"), _careless_load),)),
    RankRuns(
        start=_start_flipped,
        runs=(
            (("parity.fp32",), _wrong_weight),
            (("parity.fp32_tokens",), _misread_token),
            (("parity.batch",), _mixed_up_batch),
        ),
    ),
    RankRuns(
        start=_start_doubled,
        runs=(
            (("parity.serving",), _wrong_matrix),
            (("answers.text", "answers.image", "serving.slots"), _refused_requests),
            (("answers.looks", "latency.first_token", "latency.per_token"), _blind_and_late),
        ),
    ),
    RankRuns(start=_start_sound, runs=((("answers.correct",), _blind_exam), (("answers.blank",), _seen_after_all))),
)
