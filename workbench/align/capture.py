"""What the fast model computes on the way: forward hooks in this process that collect a trace."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from workbench.align.reference import Trace
from workbench.align.sources import CACHE_SOURCE, FINAL_NAMES, in_trace_form, trace_sources
from workbench.base import RequestError
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model

__all__ = ["Capture"]


def _keep_all(name: str) -> bool:
    return True


class Capture:
    """Forward hooks on a model (or one rank's stage of it) while the `with` block runs.

        with Capture(model) as capture:
            model(batch, payload, cache)
        traces = capture.traces(batch, cache)          # one per sequence of the batch, local pieces

    Names are those of the reference traces; the states and latents come from the cache. `final_mix`, `final_hidden` and
    `logits` hold the rows of `batch.logit_rows`. A later pass overwrites an earlier one. `keep(name)` chooses what is
    copied: everything of a large model is a large trace.
    """

    def __init__(self, model: Model, *, keep: Callable[[str], bool] = _keep_all) -> None:
        self.model = model
        self.sources = {name: source for name, source in trace_sources(model.spec).items() if keep(name)}
        self._packed: Trace = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Capture:
        modules = dict(self.model.named_modules())
        for name, source in self.sources.items():
            path, _, side = source.partition(":")
            if path in modules and not source.startswith(CACHE_SOURCE):  # another stage has the other layers
                side, *steps = side.split(".")
                hook = self._hook(name, steps)
                # An input is read before others may replace it (see `replay.py`).
                self._handles.append(
                    modules[path].register_forward_pre_hook(lambda _module, args, hook=hook: hook(args[0]))
                    if side == "in"
                    else modules[path].register_forward_hook(lambda _module, _args, output, hook=hook: hook(output))
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def traces(self, batch: TokenBatch, cache: StateCache | None = None) -> list[Trace]:
        """The trace of each sequence of `batch`, as this rank saw it, on the CPU in the dtypes it had.

        Raises RequestError where the batch is not the one that was run.
        """
        rows = batch.logit_rows.tolist()
        traces: list[Trace] = []
        stop = 0
        for length, position, slot in zip(batch.lengths, batch.starts, batch.slots, strict=True):
            start, stop = stop, stop + length
            wanted = torch.tensor([n for n, row in enumerate(rows) if start <= row < stop], dtype=torch.long)
            trace: Trace = {}
            for name, packed in self._packed.items():
                expected = len(rows) if name in FINAL_NAMES else batch.num_tokens
                if packed.shape[0] != expected:
                    raise RequestError(
                        f"{name} was captured from another batch: {packed.shape[0]} rows, not {expected}"
                    )
                trace[name] = packed[wanted] if name in FINAL_NAMES else packed[start:stop]
            if cache is not None:
                trace.update(self._state(cache, slot, position + length))
            traces.append(trace)
        return traces

    def _state(self, cache: StateCache, slot: int, num_tokens: int) -> Trace:
        """What the cache holds of one slot: kda_state (H, value, key), kda_conv (3, C, K-1), latent (tokens, R + P)."""
        found: Trace = {}
        for name, source in self.sources.items():
            if source.startswith(CACHE_SOURCE):
                _, table, layer = source.split(".")
                if table == "latent":
                    if int(layer) in cache.latent:
                        found[name] = _copy(cache.latent[int(layer)].of_slot(slot, num_tokens))
                    continue
                states: dict[int, Tensor] = getattr(cache, table)
                if int(layer) in states:
                    found[name] = _copy(states[int(layer)][slot])
        return found

    def _hook(self, name: str, steps: list[str]) -> Callable[[Any], None]:
        def hook(value: Any) -> None:
            for step in steps:
                value = value[int(step)] if step.isdecimal() else getattr(value, step)
            if isinstance(value, tuple):
                value = torch.stack(value)
            # Copied at once: a later in-place step must not reach back into the trace.
            self._packed[name] = _copy(in_trace_form(name, value, self.model.spec))

        return hook


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)
