"""Experts from the shard files one at a time, when they are asked for: the same reads and transforms as a load's."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from workbench.base import LoadError
from workbench.loading.plan import Assignment, LoadPlan
from workbench.loading.reader import ReadPolicy, ShardReader
from workbench.loading.schedule import Window, schedule
from workbench.loading.stream import staged_parts
from workbench.nn.expert_pool import ExpertKey, ExpertParts, ExpertPool, PagedExperts, expert_parts
from workbench.nn.model import Model
from workbench.nn.moe import Experts, MoE

__all__ = ["ExpertMemory", "ShardExperts", "page_experts"]

FEWEST_HELD = 4  # experts in host memory: one is used, one comes, and what is fetched ahead is not lost between


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """How much of the routed experts one rank holds, in bytes: `num_bytes` of them ready for use on its device, and
    `host_bytes` more in host memory, from where they come faster than from the files (at least FEWEST_HELD experts)."""

    num_bytes: int
    host_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or self.host_bytes < 0:
            raise LoadError("memory for experts", found=str(self), expected="bytes above 0, and 0 or more in the host")


class ShardExperts:
    """Reads experts on a thread of its own and keeps the last ones: `room` of them, those on their way included.

    `assignments` by expert are those of the load plan; `shapes` are the shapes and dtypes of one expert's tensors by
    their name in the pool. `host_bytes` is what may be kept in host memory, at least FEWEST_HELD experts.
    """

    def __init__(
        self,
        root: Path,
        assignments: Mapping[ExpertKey, tuple[Assignment, ...]],
        *,
        expert_bytes: int,
        shapes: Mapping[str, Tensor],
        rank: int = 0,
        host_bytes: int = 0,
        window_bytes: int,
        is_pinned: bool = False,
    ) -> None:
        self.room = max(FEWEST_HELD, host_bytes // expert_bytes)
        self.bytes_read = 0
        self._assignments, self._shapes, self._rank, self._is_pinned = assignments, shapes, rank, is_pinned
        self._window = Window.of(window_bytes)
        self._slot = torch.empty(self._window.slot, dtype=torch.uint8)
        self._reader = ShardReader(root, rank=rank, scratch_bytes=self._window.scratch, policy=ReadPolicy())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-experts")
        self._held: OrderedDict[ExpertKey, Future[ExpertParts]] = OrderedDict()
        self._end = weakref.finalize(self, _close, self._pool, self._reader)

    def is_here(self, key: ExpertKey) -> bool:
        future = self._held.get(key)
        return future is not None and future.done() and future.exception() is None

    def request(self, key: ExpertKey) -> Future[ExpertParts]:
        future = self._held.get(key)
        if future is not None and not (future.done() and future.exception() is not None):  # a failed read is tried anew
            self._held.move_to_end(key)
            return future
        future = self._held[key] = self._pool.submit(self._read, key)
        self._held.move_to_end(key)
        for old in [x for x, each in self._held.items() if each.done()]:
            if len(self._held) <= self.room:
                break
            del self._held[old]
        return future

    def prefer(self, keys: Collection[ExpertKey]) -> None:
        for key in [key for key, each in self._held.items() if key not in keys and each.cancel()]:
            del self._held[key]

    def close(self) -> None:
        """End the thread and close the files. Safe to call more than once."""
        self._end()

    @torch.no_grad()
    def _read(self, key: ExpertKey) -> ExpertParts:
        targets = {
            name: torch.empty_like(x, device="cpu", pin_memory=self._is_pinned) for name, x in self._shapes.items()
        }
        before = self._reader.bytes_read
        plan = LoadPlan(rank=self._rank, assignments=self._assignments[key], bytes_assigned=0)
        for batch in schedule(plan, self._window):
            self._reader.fill(batch, self._slot.numpy().data)
            for chunk in batch.chunks:
                for name, (rows, _) in chunk.assignment.transform.apply(staged_parts(chunk, self._slot)).items():
                    target = targets[name][chunk.first : chunk.last]
                    target.copy_(rows.reshape(target.shape))
        self.bytes_read += self._reader.bytes_read - before
        return targets


def page_experts(
    root: Path,
    model: Model,
    plan: LoadPlan,
    *,
    memory: ExpertMemory,
    window_bytes: int,
    device: torch.device,
) -> tuple[LoadPlan, ExpertPool | None]:
    """Give all routed experts of `model`, which lies on meta, a pool in `memory` instead of their stacks.

    Returns the plan of what is left to load, and the pool; None for a model without experts, which stays as it is.
    Raises LoadError where layers have experts of different shapes, or the pool has no room for one.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not found:
        return plan, None
    layers = {f"{name}.experts.": int(name.split(".")[1]) for name in found}
    template = next(iter(found.values())).experts
    for name, module in found.items():
        if _form(module.experts) != _form(template):
            raise LoadError(
                "experts of different shapes or storage cannot share slots",
                where=name,
                found=str(_form(module.experts)),
                expected=str(_form(template)),
                next_step="Load without a limit for experts, or in one precision",
            )
    rest: list[Assignment] = []
    own: dict[ExpertKey, list[Assignment]] = {}
    for x in plan.assignments:
        prefix = next((p for p in layers if x.param.startswith(p)), None)
        if prefix is None or x.slot is None:
            rest.append(x)
        else:
            own.setdefault((layers[prefix], x.slot), []).append(_without_prefix(x, prefix))
    shapes = expert_parts(template)
    source = ShardExperts(
        root,
        {key: tuple(each) for key, each in own.items()},
        expert_bytes=sum(x.nbytes for x in shapes.values()),
        shapes=shapes,
        rank=plan.rank,
        host_bytes=memory.host_bytes,
        window_bytes=window_bytes,
        is_pinned=device.type != "cpu",
    )
    pool = ExpertPool(template, sorted(layers.values()), memory.num_bytes, source, device)
    for name, module in found.items():
        module.experts = PagedExperts(module.experts, layers[f"{name}.experts."], pool)
    left = plan.bytes_assigned - _source_bytes(x for each in own.values() for x in each)
    return replace(plan, assignments=tuple(rest), bytes_assigned=left), pool


def _form(experts: Experts) -> tuple[object, ...]:
    stores = (experts.w1, experts.w2, experts.w3)
    return tuple((x.scheme.name if x.scheme else "dense", *x.logical_shape[1:], x.bias is not None) for x in stores)


def _without_prefix(x: Assignment, prefix: str) -> Assignment:
    """The same for a tensor of one expert: "layers.3.ffn.experts.w1.weight" of a stack is "w1.weight" of its own."""

    def short(targets: Mapping[str, str]) -> dict[str, str]:
        return {name.removeprefix(prefix): part for name, part in targets.items()}

    transform = replace(x.transform, targets=short(x.transform.targets), twin_targets=short(x.transform.twin_targets))
    return replace(x, param=x.param.removeprefix(prefix), slot=None, transform=transform)


def _source_bytes(assignments: Iterable[Assignment]) -> int:
    return sum(source.num_bytes for x in assignments for source in x.sources.values())


def _close(pool: ThreadPoolExecutor, reader: ShardReader) -> None:
    try:
        pool.shutdown(wait=True, cancel_futures=True)
    except RuntimeError:  # garbage is collected in any thread: this is the reading one, which reads nothing now
        pool.shutdown(wait=False, cancel_futures=True)
    reader.close()
