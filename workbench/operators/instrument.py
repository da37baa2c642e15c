"""Hooks a recorder to a model: which module an operator belongs to, and parts of equal shape that run only once.

Nothing in `nn` knows of this. Forwards are wrapped on the instances and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from workbench.nn.delta_net import DeltaNet
from workbench.nn.gqa import GQA
from workbench.nn.kda import KDA
from workbench.nn.linear import MatrixStore
from workbench.nn.mla import MLA
from workbench.nn.model import DecoderLayer, Embedding, Head, Model, TiedHead
from workbench.nn.moe import Experts, MoE, Router
from workbench.nn.norm import AcrossHeadsRMSNorm, GatedRMSNorm, HeadRMSNorm, RMSNorm
from workbench.nn.projector import Projector
from workbench.nn.residual import ResidualMix
from workbench.nn.short_conv import ShortConv
from workbench.nn.vision import VisionBlock, VisionTower
from workbench.operators.recorder import Recorder
from workbench.operators.routing import ExpertTraffic

__all__ = ["instrument"]

AREAS: dict[type[nn.Module], str] = {
    KDA: "linear_attention",
    DeltaNet: "linear_attention",
    MLA: "attention",
    GQA: "attention",
    Router: "routing",
    Experts: "experts",
    RMSNorm: "norm",
    GatedRMSNorm: "norm",
    HeadRMSNorm: "norm",
    AcrossHeadsRMSNorm: "norm",
    ResidualMix: "norm",
    ShortConv: "conv",
    VisionTower: "vision",
    Projector: "vision",
}
LABELS: dict[type[nn.Module], str] = {
    Embedding: "embed",
    Head: "head",
    TiedHead: "head",
    VisionTower: "vision",
    Projector: "vision",
}
# Parts that repeat beside the mixers: equal shapes of parameters and arguments make equal operators.
REPEATED = (MoE, RMSNorm, ResidualMix, VisionBlock)

# Layer number -> traffic of its experts; None leaves routing and index tables as they are (a real run).
Traffic = Callable[[int], ExpertTraffic]


@contextmanager
def instrument(model: Model, recorder: Recorder, traffic: Traffic | None = None) -> Iterator[dict[str, int]]:
    """While open, the recorder knows where in `model` it is; yields what one layer of each kind adds to the peak.

    With `traffic` (a trace without contents) routing is the given one. Layers need not be distinct objects.
    """
    peaks: dict[str, int] = {}
    wrapped: list[tuple[nn.Module, str]] = []
    tables: set[str] = set()  # schemes whose look-up tables are made; they are kept for ever, no part of a pass

    def wrap(module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(module, name)
        setattr(module, name, partial(around, inner))
        wrapped.append((module, name))

    try:
        mixers = {layer.mixer for layer in model.modules() if isinstance(layer, DecoderLayer)}
        for name, module in model.named_modules():
            layer_idx = int(name.split(".")[1]) if name.startswith("layers.") else -1
            experts_of = traffic(layer_idx) if traffic is not None and isinstance(module, MoE) else None
            if recorder.memo is not None and (module in mixers or isinstance(module, REPEATED)):
                among = None if experts_of is None else experts_of.among
                # Parameters are asked for once: they are the same at every call, and there are thousands.
                what = (type(module), getattr(module, "spec", None), _parameters(module), among)
                wrap(module, "forward", partial(_repeated, recorder, what, module in mixers))
            area = AREAS.get(type(module), "attention" if module in mixers else None)
            label = LABELS.get(type(module))
            if area is not None or label is not None:
                wrap(module, "forward", partial(_in_area, recorder, label, area))
            if isinstance(module, MatrixStore) and module.scheme is not None:
                if module.scheme.name not in tables:
                    module.dense(model.dtype, *([0] if len(module.logical_shape) == 3 else []))
                    tables.add(module.scheme.name)
                wrap(module, "dense", partial(_in_area, recorder, None, "dequantise"))
            if isinstance(module, DecoderLayer):
                wrap(module, "forward", partial(_layer, recorder, model.spec.layers[layer_idx].kind, peaks))
            if isinstance(module, MoE) and experts_of is not None:
                wrap(module.router, "forward", partial(_routed, recorder, experts_of, layer_idx))
                wrap(module.experts, "forward", partial(_arrived, experts_of, layer_idx))
                wrap(module.experts, "each", partial(_each, recorder, module.experts))
        yield peaks
    finally:
        for module, name in wrapped:
            if name in vars(module):
                delattr(module, name)


def _in_area(recorder: Recorder, label: str | None, area: str | None, inner: Any, *args: Any, **kwargs: Any) -> Any:
    with recorder.within(label=label, area=area):
        return inner(*args, **kwargs)


def _layer(recorder: Recorder, kind: str, peaks: dict[str, int], inner: Any, *args: Any) -> Any:
    outer, live = recorder.peak, recorder.live
    recorder.peak = live
    with recorder.within(label=kind):
        out = inner(*args)
    peaks[kind] = max(peaks.get(kind, 0), recorder.peak - live)
    recorder.peak = max(outer, recorder.peak)
    return out


def _repeated(recorder: Recorder, what: tuple[object, ...], is_mixer: bool, inner: Any, *args: Any) -> Any:
    """A mixer makes index tables that the mixers after it share: they are no part of what is repeated."""
    return recorder.once((*what, _describe(args)), lambda: inner(*args), warm_up=is_mixer)


def _parameters(module: nn.Module) -> tuple[object, ...]:
    named = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, tuple(x.shape), x.dtype) for name, x in named)


def _describe(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_describe(item) for item in value)
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


def _routed(recorder: Recorder, traffic: ExpertTraffic, layer_idx: int, inner: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The router's operators, and the given choice instead of its own, which has no contents."""
    ids, weights = inner(x)
    del ids  # the given one takes its place in memory
    recorder.moe_layer = layer_idx
    with _disable_current_modes():
        known = traffic.ids(layer_idx).clone()
    recorder.track(known)
    return known, weights


def _arrived(traffic: ExpertTraffic, layer_idx: int, inner: Any, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Slots that came from other ranks have no contents: what those ranks would have sent."""
    if slots.device.type == "meta":
        with _disable_current_modes():
            is_exchange = traffic.layout.dispatch == "all_to_all"
            slots = traffic.received_slots(layer_idx) if is_exchange else traffic.gathered_slots(layer_idx)
        assert len(slots) == len(x), (len(slots), len(x))
    out: Tensor = inner(x, slots, weights)
    return out


def _each(recorder: Recorder, experts: Experts, _inner: Any, grouped: Tensor, counts: list[int]) -> list[Tensor]:
    """`Experts.each`, running one expert for every number of rows: experts differ in nothing else."""
    weights_of = experts.weights_of(grouped.dtype)
    shapes = _parameters(experts), grouped.dtype, grouped.shape[1]

    def one(expert: int, own: Tensor) -> Tensor:
        return experts.one(own, *weights_of(expert))

    return [
        recorder.once((Experts, shapes, counts[expert]), partial(one, expert, own))
        for expert, own in enumerate(grouped.split(counts))
        if counts[expert]
    ]
