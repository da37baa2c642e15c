"""What a rank can be told to do, by name. Runs in workers only, and is the first thing there to import torch."""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from workbench.base import (
    DeploymentError,
    LoadError,
    WorkbenchError,
    peak_resident_bytes,
    private_resident_bytes,
    resident_bytes,
)
from workbench.deployment.capture import capturing, read_cache, to_numpy
from workbench.deployment.records import LoadProgress, LoadReport, RankStats
from workbench.loading import ExpertMemory, LoadedModel, load_sharded_weights
from workbench.loading.load import WINDOW_BYTES
from workbench.loading.load import LoadProgress as RawProgress
from workbench.parallel import join_processes
from workbench.placement import Layout
from workbench.serving.runner import RankRunner
from workbench.serving.steps import EncodeImage, SampledToken, StepInput

if TYPE_CHECKING:
    from workbench.deployment.worker import Worker

__all__ = ["RankCommands", "choose_device"]

COMMANDS = ("load", "ledger", "encode", "drop", "step", "forward", "stats", "ping", "call")
PACKAGE = __name__.partition(".")[0]


class RankCommands:
    """The commands of one rank. All ranks get each command together, each with what its own replica needs."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loaded: LoadedModel | None = None
        self._runner: RankRunner | None = None
        self.private_bytes = 0  # of this process right after loading, caches not yet touched
        self.extensions: dict[str, object] = {}  # what called functions leave here for the next one

    def carry_out(self, name: str, args: Mapping[str, object]) -> object:
        if name not in COMMANDS:
            raise DeploymentError(f"no command {name!r}", expected=", ".join(COMMANDS))
        return getattr(self, f"_{name}")(**args)

    def _load(
        self,
        *,
        model_path: str,
        layout: Layout,
        precision: str,
        dtype: str | None,
        device: str,
        num_slots: int,
        max_tokens: int,
        kv_dtype: str,
        cache_tokens: int | None,
        num_snapshots: int,
        expert_memory: ExpertMemory | None,
        window_bytes: int | None,
        init_method: str,
        collective_timeout_s: float,
    ) -> LoadReport:
        worker = self._worker
        if self._loaded is not None:
            raise DeploymentError("this rank holds a model already")
        if worker.world_size != layout.world_size:
            raise DeploymentError(
                f"layout {layout} needs {layout.world_size} ranks", found=f"{worker.world_size} were started"
            )
        place = choose_device(device, worker.local_rank)
        if layout.world_size > 1:
            worker.slate.operation("joining the other ranks")
            join_processes(
                worker.rank,
                layout.world_size,
                init_method=init_method,
                device_type=place.type,
                timeout_s=collective_timeout_s,
            )
        worker.phases.end("joining")

        def progress(raw: RawProgress) -> None:
            worker.slate.operation(f"loading, {raw.bytes_read} of {raw.bytes_total} bytes read, up to {raw.tensor}")
            worker.progress(
                LoadProgress(
                    rank=raw.rank,
                    bytes_read=raw.bytes_read,
                    bytes_total=raw.bytes_total,
                    seconds=raw.seconds,
                    tensor=raw.tensor,
                    stages=raw.stages,
                )
            )

        worker.slate.operation(f"loading {model_path}")
        loaded = load_sharded_weights(
            model_path,
            precision=precision,
            layout=layout,
            dtype=_dtype(dtype),
            device=place,
            progress=progress,
            expert_memory=expert_memory,
            window_bytes=WINDOW_BYTES if window_bytes is None else window_bytes,
        )
        loaded.model.eval().requires_grad_(False)
        worker.phases.end("weights")
        worker.watch(loaded.ctx.log)
        self._runner = RankRunner(
            loaded.model,
            loaded.ctx,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
        )
        worker.phases.end("cache")
        self._loaded, self.private_bytes = loaded, private_resident_bytes()[0]
        print(f"{loaded.ctx}: {loaded.stats.resident_bytes:,} bytes of weights in {loaded.stats.seconds:.1f} s")
        return LoadReport(
            rank=worker.rank,
            place=str(loaded.ctx),
            info=self._runner.info,
            spec=loaded.spec,
            ledger=loaded.ledger.summary(),
            stats=loaded.stats.to_dict(),
            stages=loaded.stages.to_json(),
            phases=dict(worker.phases.phases),
        )

    def _ledger(self) -> dict[str, object]:
        result: dict[str, object] = json.loads(self._model.ledger.to_json())
        return result

    def _encode(self, *, images: Sequence[EncodeImage], rows: tuple[int, int] | None = None) -> None:
        """Whole images, or some rows of one."""
        if rows is None:
            self.runner.encode_images(images)
        else:
            self.runner.encode_images(images, rows)

    def _drop(self, *, keys: Collection[str]) -> None:
        self.runner.drop_images(keys)

    def _step(self, *, resets: Sequence[int], steps: StepInput) -> list[SampledToken | WorkbenchError] | None:
        """Tokens on the rank that samples for its replica, None elsewhere."""
        for slot in resets:
            self.runner.reset_slot(slot)
        tokens = self.runner.step(steps)
        return tokens if self.runner.is_sampler else None

    def _forward(
        self,
        *,
        steps: StepInput,
        images: Sequence[EncodeImage],
        capture: Sequence[str],
        use_cache: bool,
        given: Mapping[str, np.ndarray],
    ) -> tuple[list[np.ndarray] | None, dict[str, np.ndarray]]:
        """Whole sequences of this replica: logits (n, V) float32 of each on the sampler, and captured values."""
        from workbench.align.replay import replaying  # a rank that only serves never needs it

        runner = self.runner
        kept = dict(runner.features)
        try:
            runner.encode_images(images)
            with capturing(self._model.model, capture) as values, replaying(self._model.model, given):
                logits, cache = runner.logits_of(steps, use_cache=use_cache)
        finally:
            runner.features = kept
        if cache is not None:
            values.update(read_cache(cache, capture))
        if logits is None or not runner.is_sampler:
            return None, values
        parts = logits.float().split([len(step.token_ids) for step in steps])
        return [to_numpy(part) for part in parts], values

    def _stats(self) -> RankStats:
        log, runner = self._model.ctx.log, self.runner
        device = self._model.ctx.device
        return RankStats(
            rank=self._worker.rank,
            place=str(self._model.ctx),
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(device),
            resident_bytes=resident_bytes() or 0,
            peak_resident_bytes=peak_resident_bytes(),
            device_bytes=None if device.type == "cpu" else torch.accelerator.memory_allocated(device),
            cache_bytes=runner.cache.num_bytes,
            num_images=len(runner.features) + len(runner.begun),
            num_pages=len(runner.pages),
            collectives={key: (total.count, total.num_bytes) for key, total in log.totals.items()},
            last_collective=log.describe_last(),
        )

    def _ping(self) -> int:
        return os.getpid()

    def _call(self, *, function: str, args: Mapping[str, object]) -> object:
        """A function of this package that a room above brings: it gets these commands and `args`."""
        module, colon, name = function.partition(":")
        if not colon or module.partition(".")[0] != PACKAGE:
            raise DeploymentError("not a function of this package", found=function, expected=f"{PACKAGE}.ROOM:NAME")
        return getattr(importlib.import_module(module), name)(self, **args)

    @property
    def rank(self) -> int:
        return self._worker.rank

    @property
    def loaded(self) -> LoadedModel:
        return self._model

    @property
    def runner(self) -> RankRunner:
        if self._runner is None:
            raise DeploymentError("no model is loaded", next_step="Send 'load' first")
        return self._runner

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise DeploymentError("no model is loaded", next_step="Send 'load' first")
        return self._loaded


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank: "cpu", "auto" for the accelerator where there is one, or a device type by name.

    Ranks of one machine are dealt over its devices in turn. Raises DeploymentError where the device is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or name not in ("auto", accelerator.type):
        raise DeploymentError(f"device {name!r} is not available", found=f"{accelerator or 'cpu only'} here")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise LoadError(f"no activation dtype {name!r}", expected="float32, bfloat16, float16 or float64")
    return dtype
