"""Routed experts of which only some are resident: slots shared by all layers, filled when a token needs an expert.

A model whose experts do not fit a device still answers, and says the very same tokens: an expert in a slot is the bytes
that an ordinary load would have put into the stack. What it costs is the waiting for experts that are not there.

- Which stay is decided by use (segmented LRU: an expert that came back once outlives those that were used once).
- What is missing is fetched while those that are there compute.
- The next layer's are fetched ahead: those that followed the experts of this layer when they were last used.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.base import LoadError, human
from workbench.nn.linear import StackedLinear
from workbench.nn.moe import Experts

__all__ = ["ExpertKey", "ExpertParts", "ExpertPool", "ExpertSource", "ExpertUse", "PagedExperts", "expert_parts"]

ExpertKey = tuple[int, int]  # layer, row of that layer's stack
ExpertParts = Mapping[str, Tensor]  # "w1.weight_packed" -> that expert's part, in host memory
PROTECTED_SHARE = 0.8  # of the slots, at most, hold experts that came back
AHEAD_SHARE = 0.5  # of what the source holds is fetched ahead, at most: the rest is for what is asked for now


class ExpertSource(Protocol):
    """Brings experts into host memory. `room`: how many it holds there at one time."""

    room: int

    def request(self, key: ExpertKey) -> Future[ExpertParts]:
        """Begin to bring an expert, or name what has come already. Its result raises LoadError where it cannot come."""

    def is_here(self, key: ExpertKey) -> bool:
        """Whether it has come, so that nobody would wait for it."""

    def prefer(self, keys: Collection[ExpertKey]) -> None:
        """These are needed now: what else has been requested and not begun is forgotten."""


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """What was asked of a pool. An expert counts once a step and layer, however many tokens it has there."""

    num_used: int = 0
    num_resident: int = 0  # were in a slot
    num_ahead: int = 0  # were not, and had been fetched by the time they were needed
    num_waited: int = 0  # had to be waited for
    seconds_waited: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of uses that found their expert in a slot; 1 where nothing was used."""
        return self.num_resident / self.num_used if self.num_used else 1.0

    def __str__(self) -> str:
        parts = ((self.num_resident, "resident"), (self.num_ahead, "came ahead"), (self.num_waited, "waited for"))
        shares = ", ".join(f"{num / max(1, self.num_used):.1%} {what}" for num, what in parts)
        return f"{self.num_used:,} uses of experts: {shares} ({self.seconds_waited:.2f} s)"

    def __sub__(self, before: ExpertUse) -> ExpertUse:
        return ExpertUse(
            self.num_used - before.num_used,
            self.num_resident - before.num_resident,
            self.num_ahead - before.num_ahead,
            self.num_waited - before.num_waited,
            self.seconds_waited - before.seconds_waited,
        )


class ExpertPool:
    """Slots for experts of equal shape, whichever layer they are of. One thread uses it, that of the forward pass.

    `template`: experts of any of the layers, for shapes and storage; nothing of it is kept. `num_bytes`: what the slots
    may take on `device`. Raises LoadError where that is less than one expert.
    """

    def __init__(
        self, template: Experts, layers: Sequence[int], num_bytes: int, source: ExpertSource, device: torch.device
    ) -> None:
        self.expert_bytes = sum(x.nbytes for x in expert_parts(template).values())
        self.num_slots = min(num_bytes // self.expert_bytes, template.num_local * len(layers))
        if self.num_slots < 1:
            raise LoadError(
                "the memory for experts holds none",
                found=human(num_bytes, "B"),
                expected=f"at least {human(self.expert_bytes, 'B')}, one expert",
                next_step="Give more memory to experts, or use a larger tp or ep",
            )
        with torch.device(device):
            self.stores = {name: _slots_like(store, self.num_slots) for name, store in _stores(template).items()}
        self.source = source
        self.use = ExpertUse()
        self._tensors = {f"{name}.{leaf}": x for name, store in self.stores.items() for leaf, x in _parts(store)}
        self._free = list(range(self.num_slots))
        # Least recently used first; an expert enters the one and, used again, the other.
        self._once: OrderedDict[ExpertKey, int] = OrderedDict()
        self._again: OrderedDict[ExpertKey, int] = OrderedDict()
        self._following = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._followers: dict[ExpertKey, tuple[int, ...]] = {}  # of the next layer, when this one was last used
        self._last: tuple[int, tuple[int, ...]] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.expert_bytes

    def is_resident(self, key: ExpertKey) -> bool:
        return key in self._once or key in self._again

    def serve(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(expert, slot) of each of `experts`, which are distinct: first those that are here, then each as it comes.

        A slot is the expert's until the next one is asked for. Raises LoadError where one cannot be brought.
        """
        resident = [x for x in experts if self.is_resident((layer, x))]
        missing = [x for x in experts if not self.is_resident((layer, x))]
        # In an order in which what has come already keeps its place and everything else is asked for in time.
        missing.sort(key=lambda x: not self.source.is_here((layer, x)))
        self.source.prefer({(layer, x) for x in missing})
        waiting: OrderedDict[int, tuple[Future[ExpertParts], bool]] = OrderedDict()
        upcoming = iter(missing)
        self._ask(layer, upcoming, waiting)
        for expert in resident:
            yield expert, self._touch((layer, expert))
        num_ahead, seconds = 0, 0.0
        while waiting:
            expert, (future, was_here) = waiting.popitem(last=False)
            began = time.perf_counter()
            parts = future.result()
            if not was_here:
                seconds += time.perf_counter() - began
            num_ahead += was_here
            slot = self._install((layer, expert), parts)
            self._ask(layer, upcoming, waiting)
            yield expert, slot
        self.use = replace(
            self.use,
            num_used=self.use.num_used + len(experts),
            num_resident=self.use.num_resident + len(resident),
            num_ahead=self.use.num_ahead + num_ahead,
            num_waited=self.use.num_waited + len(missing) - num_ahead,
            seconds_waited=self.use.seconds_waited + seconds,
        )
        self._fetch_ahead(layer, tuple(experts))

    def _ask(
        self, layer: int, upcoming: Iterator[int], waiting: OrderedDict[int, tuple[Future[ExpertParts], bool]]
    ) -> None:
        """Request as many as the source has room for at one time."""
        while len(waiting) < self.source.room:
            expert = next(upcoming, None)
            if expert is None:
                return
            was_here = self.source.is_here((layer, expert))
            waiting[expert] = self.source.request((layer, expert)), was_here

    def _touch(self, key: ExpertKey) -> int:
        """The slot of a resident expert, which has been used again."""
        if key in self._again:
            self._again.move_to_end(key)
            return self._again[key]
        slot = self._again[key] = self._once.pop(key)
        if len(self._again) > max(1, int(PROTECTED_SHARE * self.num_slots)):
            oldest, its_slot = self._again.popitem(last=False)
            self._once[oldest] = its_slot
        return slot

    @torch.no_grad()
    def _install(self, key: ExpertKey, parts: ExpertParts) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            _, slot = (self._once or self._again).popitem(last=False)
        try:
            for name, target in self._tensors.items():
                target[slot].copy_(parts[name])
        except BaseException:
            self._free.append(slot)  # half of one and half of another: nobody's
            raise
        self._once[key] = slot
        return slot

    def _fetch_ahead(self, layer: int, experts: tuple[int, ...]) -> None:
        """Learn what followed, and begin to fetch what is likely to follow now."""
        if self._last is not None:
            before, used = self._last
            if self._following[before] == layer:
                self._followers.update(((before, expert), experts) for expert in used)
        self._last = layer, experts
        following = self._following[layer]
        votes = Counter(x for expert in experts for x in self._followers.get((layer, expert), ()))
        likely = [x for x, _ in votes.most_common() if not self.is_resident((following, x))]
        for expert in likely[: int(AHEAD_SHARE * self.source.room)]:
            self.source.request((following, expert))


class PagedExperts(Experts):
    """The experts of one layer, in the slots of a pool. Same results as `Experts`, to the bit; no gradients."""

    def __init__(self, experts: Experts, layer: int, pool: ExpertPool):
        nn.Module.__init__(self)
        self.activation, self.scales_input = experts.activation, experts.scales_input
        self.adds_down_bias = experts.adds_down_bias
        self.layer, self.pool = layer, pool
        self._num_local = experts.num_local

    @property
    def num_local(self) -> int:
        return self._num_local

    def at_once(
        self, x: Tensor, slots: Tensor, weights: Tensor | None = None, *, is_summed: bool = False
    ) -> Tensor | None:
        """Never: experts come one by one."""
        return None

    def each(self, grouped: Tensor, counts: list[int]) -> list[Tensor]:
        rows = grouped.split(counts)
        results: dict[int, Tensor] = {}
        w1, w2, w3 = (self.pool.stores[name] for name in ("w1", "w2", "w3"))
        dtype = grouped.dtype
        for expert, slot in self.pool.serve(self.layer, [x for x, count in enumerate(counts) if count]):
            b1, b2, b3 = (None if w.bias is None else w.bias[slot].to(dtype) for w in (w1, w2, w3))
            own_b2 = b2 if self.adds_down_bias else None
            m1, m2, m3 = (w.dense(dtype, slot) for w in (w1, w2, w3))
            results[expert] = self.one(rows[expert], m1, m2, m3, b1, own_b2, b3)
        return [results[expert] for expert in sorted(results)]

    def extra_repr(self) -> str:
        return f"{self._num_local} experts, {self.pool.num_slots} slots shared with other layers"


def expert_parts(experts: Experts) -> dict[str, Tensor]:
    """The tensors of the first expert by the names they have in a pool and from its source: "w1.weight_packed"."""
    return {f"{name}.{leaf}": x[0] for name, store in _stores(experts).items() for leaf, x in _parts(store)}


def _stores(experts: Experts) -> dict[str, StackedLinear]:
    return {"w1": experts.w1, "w2": experts.w2, "w3": experts.w3}


def _parts(store: StackedLinear) -> list[tuple[str, Tensor]]:
    bias = [] if store.bias is None else [("bias", store.bias)]
    return [*store.parts.items(), *bias]


def _slots_like(store: StackedLinear, num: int) -> StackedLinear:
    _, rows, columns = store.logical_shape
    dtype = store.weight.dtype if store.scheme is None else torch.float32
    if store.bias is not None:
        dtype = store.bias.dtype
    slots = StackedLinear(num, rows, columns, scheme=store.scheme, dtype=dtype, has_bias=store.bias is not None)
    return slots.requires_grad_(False)
