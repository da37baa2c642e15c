"""The handle of a deployment: N ranks behind one object that a notebook can hold, run and throw away."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np

from workbench.base import DeploymentError, RequestError, WorkbenchError
from workbench.deployment.control import Control
from workbench.deployment.gather import gather_ranks
from workbench.deployment.protocol import Address, Door
from workbench.deployment.records import ForwardResult, LoadProgress, LoadReport, Phase, RankStats, slowest_phases
from workbench.deployment.started import StartedRanks, Timeouts, end_ranks
from workbench.deployment.supervise import WORKER
from workbench.placement import Layout, check_layout
from workbench.serving.owner import driving
from workbench.serving.requests import PlacedImage, SamplingParams
from workbench.serving.steps import (
    EncodeImage,
    ImageSpan,
    RunnerInfo,
    SampledToken,
    SequenceStep,
    StepInput,
    runner_info,
)
from workbench.spec import ModelSpec, read_spec, require_runnable

if TYPE_CHECKING:
    from workbench.loading import ExpertMemory

__all__ = ["Deployment", "Timeouts", "check_start"]

STEPS = ("encode", "drop", "step", "ping")  # commands that every answer waits for


class Deployment:
    """A model spread over worker processes; drives like any other `Runner`.

        with Deployment.start("path/to/checkpoint", Layout(tp=2)) as deployment:
            service = MultimodalInferenceService(deployment, tokenizer, ImageProcessor(deployment.spec.image))

    `start` makes the ranks on this machine, `attach` takes ranks that torchrun started on one or several. A rank that
    dies or hangs ends the deployment: the call in hand raises WorkerDiedError or DeploymentError with the rank's last
    operation, collective and log lines, and so does every later call. Nothing outlives the handle: `close`, the end of
    a `with` block, garbage collection, the end of the interpreter and even its sudden death all end the ranks. An
    interrupted call leaves them alive; the next one waits until they are done with it.
    """

    def __init__(
        self, control: Control, reports: Sequence[LoadReport], layout: Layout, timeouts: Timeouts, folder: Path | None
    ) -> None:
        self.layout, self.timeouts = layout, timeouts
        self.reports = tuple(reports)
        self.folder = folder
        self._control = control
        self._coords = [layout.coords(rank) for rank in range(layout.world_size)]
        self._resets: list[tuple[int, int]] = []
        self._finalizer = weakref.finalize(self, end_ranks, control, folder)

    @classmethod
    def start(
        cls,
        model_path: Path | str,
        layout: Layout | None = None,
        *,
        precision: str = "bf16",
        dtype: object = None,
        device: str = "cpu",
        num_slots: int = 8,
        max_tokens: int = 4096,
        kv_dtype: str = "auto",
        cache_tokens: int | None = None,
        num_snapshots: int = 0,
        expert_memory: ExpertMemory | None = None,
        window_bytes: int | None = None,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        timeouts: Timeouts | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        module: str = WORKER,
        started: StartedRanks | None = None,
    ) -> Deployment:
        """Start one worker per rank of `layout` on this machine and load the model onto them.

        `device`: "cpu", "auto" (the accelerator where there is one) or a device type. `dtype`: of activations, by torch
        dtype or its name. `num_slots` sequences of `max_tokens` tokens per replica, whose rows are cached as `kv_dtype`
        ("auto": in the activation dtype; see `nn.rows`), or, with `cache_tokens`, a pool of so many rows that the slots
        of a replica share (see `nn.cache`); beside it is room for `num_snapshots` recurrent states of kept prefixes.
        `expert_memory`: hold only so much of the routed experts on each rank and fetch the rest when they are used (see
        `nn.expert_pool`). `window_bytes`: host memory that a rank's load may take beside its weights (64 MiB).
        `threads` per rank: the cores divided among them, unless OMP_NUM_THREADS says otherwise. `env` adds variables
        for the ranks. `on_progress` is called in this thread. `module`: what a rank runs in place of the worker, ending
        in its `main`. `started`: ranks that wait for a model already, started for this layout; they are this
        deployment's from now on. Raises a rank's
        own LoadError, CheckpointError, LayoutError, ... with the rank named, WorkerDiedError for one that ended,
        DeploymentError for one that hangs; nothing is left running then.
        """
        layout, timeouts = layout or Layout(), timeouts or Timeouts()
        check_start(
            model_path,
            layout,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
        )
        if started is None:
            started = StartedRanks.start(layout, timeouts=timeouts, threads=threads, env=env, module=module)
        init_method = started.init_method
        control, folder = started.hand_over()
        return cls._load(
            control,
            layout,
            timeouts,
            folder,
            model_path=str(Path(model_path).absolute()),
            precision=precision,
            dtype=dtype,
            device=device,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
            expert_memory=expert_memory,
            window_bytes=window_bytes,
            init_method=init_method,
            on_progress=on_progress,
        )

    @classmethod
    def attach(
        cls,
        address: Address,
        authkey: bytes,
        model_path: Path | str,
        layout: Layout,
        *,
        precision: str = "bf16",
        dtype: object = None,
        device: str = "auto",
        num_slots: int = 8,
        max_tokens: int = 4096,
        kv_dtype: str = "auto",
        cache_tokens: int | None = None,
        num_snapshots: int = 0,
        expert_memory: ExpertMemory | None = None,
        window_bytes: int | None = None,
        timeouts: Timeouts | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_listening: Callable[[Address], None] | None = None,
    ) -> Deployment:
        """Wait at `address` for the ranks of `layout` that torchrun starts, on this machine or others, and load.

            torchrun --nproc-per-node=8 -m workbench.deployment.worker --controller HOST:PORT --authkey-file FILE

        FILE holds `authkey` in hexadecimal, readable by its owner only. `model_path` is read by every rank, on its own
        machine. Port 0 takes a free one, which `on_listening` is told. Raises as `start`.
        """
        timeouts = timeouts or Timeouts()
        if not authkey:
            raise DeploymentError("an empty key keeps nobody out", next_step="Use secrets.token_bytes(32)")
        entries: SimpleQueue[Connection] = SimpleQueue()
        door = Door(address, authkey, entries.put, send_timeout_s=timeouts.command_s)
        try:
            if on_listening is not None:
                on_listening(door.address)
            members = gather_ranks(entries, layout.world_size, timeouts.start_s, [])
        finally:
            door.close()
        return cls._load(
            Control(members),
            layout,
            timeouts,
            None,
            model_path=str(model_path),
            precision=precision,
            dtype=dtype,
            device=device,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
            expert_memory=expert_memory,
            window_bytes=window_bytes,
            init_method="env://",
            on_progress=on_progress,
        )

    @classmethod
    def _load(
        cls,
        control: Control,
        layout: Layout,
        timeouts: Timeouts,
        folder: Path | None,
        *,
        dtype: object,
        on_progress: Callable[[LoadProgress], None] | None,
        **args: object,
    ) -> Deployment:
        try:
            reports = control.request(
                "load",
                {
                    **args,
                    "layout": layout,
                    "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
                    "collective_timeout_s": timeouts.collective_s,
                },
                timeout_s=timeouts.load_s,
                on_progress=cast(Callable[[object], None] | None, on_progress),
            )
        except BaseException:
            end_ranks(control, folder)
            raise
        return cls(control, cast(list[LoadReport], reports), layout, timeouts, folder)

    @property
    def info(self) -> RunnerInfo:
        return self.reports[0].info

    @property
    def spec(self) -> ModelSpec:
        return self.reports[0].spec

    @property
    def failure(self) -> WorkbenchError | None:
        """What has ended the ranks, as soon as it is noticed; None while they are there."""
        return self._control.broken

    @property
    def is_intact(self) -> bool:
        """Whether all ranks are there and in step with each other, as far as is known."""
        return self._control.broken is None and self._finalizer.alive

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank, each on its own host."""
        return tuple(member.hello.pid for member in self._control.members)

    @property
    def phases(self) -> dict[str, Phase]:
        """Where the ranks' start spent its time, in order, each phase as the slowest rank had it."""
        return slowest_phases(self.reports)

    @property
    def load_stats(self) -> tuple[dict[str, float], ...]:
        """What loading cost, by rank: bytes read and assigned, seconds, peak host bytes."""
        return tuple(report.stats for report in self.reports)

    @property
    def load_stages(self) -> tuple[dict[str, object], ...]:
        """Where the time of loading went, by rank, as `workbench.loading.StageTimes.to_json` tells it."""
        return tuple(report.stages for report in self.reports)

    @property
    def ledgers(self) -> tuple[dict[str, object], ...]:
        """The full ledger of every rank, fetched now: each parameter with its sources, transform and norm."""
        return tuple(cast(list[dict[str, object]], self._request("ledger")))

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        # Patches are large: they go to the ranks that embed them only.
        self._request(
            "encode", [{"images": list(images) if (at.dp, at.pp) == (replica, 0) else []} for at in self._coords]
        )

    def encode_rows(self, replica: int, image: EncodeImage, first: int, stop: int) -> None:
        nothing: dict[str, object] = {"images": []}
        own: dict[str, object] = {"images": [image], "rows": (first, stop)}
        self._request("encode", [own if (at.dp, at.pp) == (replica, 0) else nothing for at in self._coords])

    def drop_images(self, replica: int, keys: Collection[str]) -> None:
        self._request("drop", [{"keys": list(keys) if at.dp == replica else []} for at in self._coords])

    def reset_slot(self, replica: int, slot: int) -> None:
        """Takes effect with the next step, which saves a round to all ranks."""
        self._resets.append((replica, slot))

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken | WorkbenchError]]:
        if len(inputs) != self.layout.dp:
            raise RequestError(f"{len(inputs)} inputs", expected=f"one for each of {self.layout.dp} replicas")
        resets, self._resets = self._resets, []
        slots = [[slot for replica, slot in resets if replica == dp] for dp in range(self.layout.dp)]
        answers = self._request("step", [{"resets": slots[at.dp], "steps": inputs[at.dp]} for at in self._coords])
        return [cast(list[SampledToken | WorkbenchError], answers[rank]) for rank in self._samplers()]

    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        images: Sequence[Sequence[PlacedImage]] | None = None,
        *,
        capture: Sequence[str] = (),
        use_cache: bool = True,
        given: Sequence[Mapping[str, np.ndarray]] | None = None,
    ) -> ForwardResult:
        """Logits of every token of whole sequences, without touching the slots; for comparison with a reference.

        Sequences are dealt over the replicas in turn; `images` has those of each sequence, placed. `capture` names
        values as `workbench.deployment.capture` describes; a replica's captured rows are those of its sequences, one
        behind another. `use_cache=False` computes as training does, without writing state. `given` has for each rank
        values to go on with in place of its own, by source, as `workbench.align.replay` makes them.
        """
        inputs: list[list[SequenceStep]] = [[] for _ in range(self.layout.dp)]
        encode: list[dict[str, EncodeImage]] = [{} for _ in range(self.layout.dp)]
        for number, ids in enumerate(sequences):
            placed = images[number] if images is not None else ()
            replica = number % self.layout.dp
            encode[replica].update({image.key: (image.key, image.patches, image.grid) for image in placed})
            inputs[replica].append(
                SequenceStep(
                    slot=len(inputs[replica]),
                    start=0,
                    token_ids=tuple(ids),
                    images=tuple(ImageSpan(key=x.key, row=x.row, first=0, count=x.count) for x in placed),
                    has_images=bool(placed),
                )
            )
        answers = cast(
            list[tuple[list[np.ndarray] | None, dict[str, np.ndarray]]],
            self._request(
                "forward",
                [
                    {
                        "steps": tuple(inputs[at.dp]),
                        "images": list(encode[at.dp].values()),
                        "capture": list(capture),
                        "use_cache": use_cache,
                        "given": {} if given is None else dict(given[rank]),
                    }
                    for rank, at in enumerate(self._coords)
                ],
            ),
        )
        by_replica = [answers[rank][0] or [] for rank in self._samplers()]
        logits = [by_replica[n % self.layout.dp][n // self.layout.dp] for n in range(len(sequences))]
        return ForwardResult(logits=logits, captured=[values for _, values in answers])

    def capture(
        self, names: Sequence[str], token_ids: Sequence[int], images: Sequence[PlacedImage] = ()
    ) -> list[dict[str, np.ndarray]]:
        """Named values of one whole prompt, by rank; see `forward`."""
        return self.forward([token_ids], [images], capture=names).captured

    def generate(self, token_ids: Sequence[int], sampling: SamplingParams | None = None) -> list[int]:
        """Tokens that follow a text prompt, alone in slot 0; for trying things out while no engine uses this handle.

        Raises DeploymentError while one does.
        """
        with driving(self, "Deployment.generate"):
            return self._generate(token_ids, sampling or SamplingParams(max_tokens=16))

    def _generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        self.reset_slot(0, 0)
        idle: list[StepInput] = [()] * (self.layout.dp - 1)
        tokens: list[int] = []
        new, start = tuple(token_ids), 0
        while len(tokens) < sampling.max_tokens:
            step = SequenceStep(slot=0, start=start, token_ids=new, sample=sampling, step_idx=len(tokens))
            (token,) = self.step([(step,), *idle])[0]
            if isinstance(token, WorkbenchError):
                raise token
            start, new = start + len(new), (token.token_id,)
            if token.token_id in sampling.stop_ids:
                break
            tokens.append(token.token_id)
        return tokens

    def stats(self) -> list[RankStats]:
        """Memory and collectives of every rank, now."""
        return cast(list[RankStats], self._request("stats"))

    def call(self, function: str, args: Mapping[str, object] | None = None) -> list[object]:
        """Answers of all ranks, by rank, of a function of this package, "workbench.ROOM:NAME", called on each.

        It gets the rank's `RankCommands` and `args`, all plain data, between two commands. Raises what it raises.
        """
        return self._request("call", [{"function": function, "args": dict(args or {})}] * self.world_size)

    def ping(self) -> float:
        """Seconds for one round to all ranks. Raises where one is dead or does not answer."""
        began = time.perf_counter()
        self._request("ping")
        return time.perf_counter() - began

    def log_text(self, rank: int) -> str:
        """Everything a rank has printed. Raises DeploymentError for ranks that were started elsewhere."""
        process = self._control.members[rank].process
        if process is None:
            raise DeploymentError(f"the log of rank {rank} is where torchrun was started")
        return process.log_text()

    def close(self) -> None:
        """End all ranks. Safe to call more than once."""
        self._finalizer()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if not self._finalizer.alive else "broken" if self._control.broken else "running"
        return f"<Deployment {self.layout} of {self.world_size} ranks, {state}>"

    def _samplers(self) -> list[int]:
        last = self.layout.pp - 1
        return [self.layout.rank_at(pp=last, dp=dp, tp=0) for dp in range(self.layout.dp)]

    def _request(self, name: str, args: Sequence[Mapping[str, object]] = ()) -> list[object]:
        """Answers by rank; `args` by rank, or none for all."""
        step_s = self.timeouts.step_s if name in STEPS else None
        return self._control.request(name, args, timeout_s=step_s or self.timeouts.command_s)


def check_start(
    model_path: Path | str,
    layout: Layout | None = None,
    *,
    num_slots: int = 8,
    max_tokens: int = 4096,
    kv_dtype: str = "auto",
    cache_tokens: int | None = None,
    num_snapshots: int = 0,
    **_: object,
) -> None:
    """Raises as `Deployment.start` for what is wrong without any process."""
    spec = read_spec(model_path)
    require_runnable(spec)
    check_layout(spec, layout or Layout())
    runner_info(
        spec,
        layout or Layout(),
        num_slots=num_slots,
        max_tokens=max_tokens,
        kv_dtype=kv_dtype,
        cache_tokens=cache_tokens,
        num_snapshots=num_snapshots,
    )
