"""Records every operator and collective of a pass through the model, with its shapes, work, bytes and memory.

A dispatch mode sees each operator as the device would: composite ones are taken apart first (attention excepted, whose
parts depend on the device). Tensors are on the meta device and have no contents, except index tables, which stay on the
CPU with their values: so everything that depends on values, the number of rows an expert gets for example, comes out of
the code that runs. Where the two meet, the table is replaced by its shape.

The same mode records a real run, which is how the tests show that an inventory equals the execution.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.operators.arguments import (
    as_fused,
    call_text,
    empty_meta,
    flatten,
    is_mixed,
    on_meta,
    only_changes_place,
    tensors_in,
    without_values,
)
from workbench.operators.inventory import Category, CollectiveUse, OperatorUse
from workbench.operators.work import ATTENTION, categorise, count_bytes, count_flops, is_view
from workbench.parallel.collectives import CollectiveRecord

__all__ = ["Recorder"]


class _Call(NamedTuple):
    """One operator at one set of arguments."""

    name: str
    category: Category
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    call: str
    is_view: bool
    flops: int
    bytes_read: int
    bytes_written: int
    weight_bytes: int


class _Sent(NamedTuple):
    operation: str
    group: str
    num_bytes: int
    dtype: str


Event = _Call | _Sent


@dataclass
class _Segment:
    """What happened while a part of the model ran: events in order of first appearance, and the memory it took."""

    events: Counter[Event] = field(default_factory=Counter)
    peak: int = 0
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()


class Memo:
    """Parts of the model that ran before, by what determines their operators."""

    def __init__(self) -> None:
        self.segments: dict[Hashable, _Segment] = {}


class Recorder(TorchDispatchMode):
    """`label` is where events count: the kind of layer, or the part of the stage outside layers.

    `weights` gives the storages that are parameters. Peaks are of tensors made while the mode is on.
    """

    def __init__(self, model: nn.Module, memo: Memo | None = None) -> None:
        super().__init__()
        self.memo = memo
        self.label = "stage"
        self.area = ""
        self.moe_layer = -1  # whose tokens are on their way
        self.labelled: dict[str, Counter[Event]] = {}
        self.live = 0
        self.peak = 0
        self._frames: list[_Segment] = []
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
        self._calls: dict[Hashable, _Known] = {}
        self._views: dict[_Call, _Call] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled under a recorder; asked to guard against it, torch imports its compiler: 1 to 2 s.
        return False

    # what runs

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # collectives are heard through their log
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        inputs: list[Tensor] = []
        described = (flatten(args, inputs), flatten(tuple(kwargs.items()), inputs) if kwargs else ())
        if func is _TO_COPY and only_changes_place(inputs[0], kwargs):
            return without_values(inputs[0])
        weights = [x.untyped_storage()._cdata in self._weights for x in inputs]
        tensors = tuple((x.shape, x.dtype, x.stride(), x.device, w) for x, w in zip(inputs, weights, strict=True))
        key = (func, self.area, tensors, described)
        known = self._calls.get(key)
        if known is not None and known.outputs is not None:
            out = known.outputs(inputs)
        else:
            if inputs and is_mixed(inputs):
                args, kwargs = on_meta(args), {name: on_meta(value) for name, value in kwargs.items()}
            out = func(*args, **kwargs)
            if func.overloadpacket is ATTENTION and out.device.type == "meta":
                out = as_fused(out)
            if known is None:
                known = self._calls[key] = self._merged(_learn(func, self.area, inputs, weights, args, kwargs, out))
        self._events[known.call] += 1
        if known.is_new:
            for x in out if isinstance(out, (list, tuple)) else (out,):
                self.track(x)
        return out

    def _merged(self, known: _Known) -> _Known:
        """Views of equal shapes count together whatever they select: the first one speaks for all."""
        if not known.call.is_view:
            return known
        same = known.call._replace(call="")
        return known._replace(call=self._views.setdefault(same, known.call))

    def heard(self, record: CollectiveRecord) -> None:
        """Listener of the collective log."""
        self._events[_Sent(record.name, record.group, record.num_bytes, record.dtype)] += 1

    @property
    def _events(self) -> Counter[Event]:
        if self._frames:
            return self._frames[-1].events
        return self.labelled.setdefault(self.label, Counter())

    # what is alive

    def track(self, x: Tensor) -> None:
        """Count the storage of a tensor from now until nobody holds it."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages or key in self._weights:
            return
        size = storage.nbytes()
        self._storages[key] = (weakref.ref(storage, partial(self._release, key)), size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, _reference: object) -> None:
        _, size = self._storages.pop(key)
        self.live -= size

    # where it runs

    @contextmanager
    def within(self, *, label: str | None = None, area: str | None = None) -> Iterator[None]:
        """Events in this block belong to a kind of layer or to an area of the model ("attention", "norm", ...)."""
        before = self.label, self.area
        self.label = self.label if label is None else label
        # a vision block's norms are vision, and what takes a quantised matrix apart is that wherever it stands
        self.area = self.area if area is None or self.area in ("vision", "dequantise") else area
        try:
            yield
        finally:
            self.label, self.area = before

    @contextmanager
    def segment(self) -> Iterator[_Segment]:
        """Collect what happens in this block; it is counted where the block stands as well."""
        found = _Segment()
        outer_peak, live = self.peak, self.live
        self.peak = live
        self._frames.append(found)
        try:
            yield found
        finally:
            self._frames.pop()
            found.peak = self.peak - live
            self.peak = max(outer_peak, self.peak)
        self._events.update(found.events)

    def once(self, key: Hashable, run: Callable[[], Any], *, warm_up: bool = False) -> Any:
        """`run()`, or what it did when it ran with the same `key`: its events, its memory, empty outputs.

        With `warm_up` it runs twice the first time: what only happens then (tables that the rest of the pass shares)
        is counted, but is no part of what is repeated.
        """
        if self.memo is None:
            return run()
        key = (key, self.area)
        known = self.memo.segments.get(key)
        if known is None:
            first = _Segment()
            if warm_up:
                with self._aside() as first:
                    run()
            with self.segment() as known:
                out = run()
            self._events.update(first.events - known.events)
            known.outputs = tuple((tuple(x.shape), x.dtype) for x in tensors_in(out))
            self.memo.segments[key] = known
            return out
        self._events.update(known.events)
        self.peak = max(self.peak, self.live + known.peak)
        outputs = [empty_meta(shape, dtype) for shape, dtype in known.outputs]
        for x in outputs:
            self.track(x)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @contextmanager
    def _aside(self) -> Iterator[_Segment]:
        found, peak = _Segment(), self.peak
        self._frames.append(found)
        try:
            yield found
        finally:
            self._frames.pop()
            self.peak = peak

    # what came of it

    def operators(self) -> tuple[OperatorUse, ...]:
        return tuple(
            OperatorUse(
                name=event.name,
                category=event.category,
                layer_kind=label,
                input_shapes=event.shapes,
                input_dtypes=event.dtypes,
                flops=event.flops,
                bytes_read=event.bytes_read,
                bytes_written=event.bytes_written,
                weight_bytes=event.weight_bytes,
                count=count,
                call=event.call,
                is_view=event.is_view,
            )
            for label, events in self.labelled.items()
            for event, count in events.items()
            if isinstance(event, _Call)
        )

    def collectives(self, groups: Mapping[str, tuple[int, ...]]) -> tuple[CollectiveUse, ...]:
        """`groups` gives the ranks of each group: what is repeated may have run first on another stage."""
        return tuple(
            CollectiveUse(
                operation=event.operation,
                group=event.group,
                group_size=len(groups[event.group]),
                num_bytes=event.num_bytes,
                dtype=event.dtype,
                layer_kind=label,
                count=count,
                ranks=groups[event.group],
            )
            for label, events in self.labelled.items()
            for event, count in events.items()
            if isinstance(event, _Sent)
        )


class _Known(NamedTuple):
    """An operator that ran before with these arguments. `outputs` makes its result without running it again, where that
    result is one tensor without contents: a new one, or the first input, changed in place."""

    call: _Call
    is_new: bool  # the results are tensors of their own
    outputs: Callable[[list[Tensor]], Tensor] | None


def _learn(
    func: Any,
    area: str,
    inputs: list[Tensor],
    weights: list[bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> _Known:
    results = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
    read, written, from_weights = count_bytes(func, inputs, weights, results)
    call = _Call(
        name=str(func),
        category=categorise(func, area),
        shapes=tuple(tuple(x.shape) for x in inputs),
        dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in inputs),
        call=call_text(args, kwargs),
        is_view=_is_view(func),
        flops=count_flops(func, inputs, args, kwargs),
        bytes_read=read,
        bytes_written=written,
        weight_bytes=from_weights,
    )
    is_new = bool(results) and not _is_view(func) and not any(_same_storage(x, y) for x in inputs for y in results)
    outputs: Callable[[list[Tensor]], Tensor] | None = None
    if isinstance(out, Tensor) and out.device.type == "meta":
        if is_new:
            outputs = partial(_make, tuple(out.shape), out.stride(), out.dtype)
        elif inputs and out is inputs[0]:
            outputs = _first
    return _Known(call, is_new, outputs)


def _first(inputs: list[Tensor]) -> Tensor:
    return inputs[0]


def _make(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, _inputs: list[Tensor]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_TO_COPY = torch.ops.aten._to_copy.default
_composite: dict[Any, bool] = {}
_views: dict[Any, bool] = {}


def _is_composite(func: Any) -> bool:
    known = _composite.get(func)
    if known is None:
        has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        known = _composite[func] = has_parts and func.overloadpacket is not ATTENTION
    return known


def _is_view(func: Any) -> bool:
    known = _views.get(func)
    if known is None:
        known = _views[func] = is_view(func)
    return known
