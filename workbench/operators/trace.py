"""The inventory of a model under a layout: the model itself, run once on tensors without contents.

One rank of the stage is built on the meta device with the real placement and the real collectives, and one layer of
each kind stands for all of that kind. No process is started and no weight is read, so any layout of any model can be
asked about anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from workbench.base import ConfigError, UnsupportedModelError
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import DecoderLayer, Model
from workbench.operators.instrument import instrument
from workbench.operators.inventory import Inventory, Workload
from workbench.operators.recorder import Memo, Recorder
from workbench.operators.routing import ExpertTraffic, Routing
from workbench.operators.silent import silent_context
from workbench.parallel import Pipeline, RankContext, attach, encode_images, group_members, narrow
from workbench.placement import Layout, check_layout
from workbench.spec import ModelSpec, MoESpec

__all__ = ["record_pass", "trace_inventory", "trace_vision"]

EVEN_ROUTING = (
    "routing assumed even: every expert gets the same number of tokens, a token meets as many ranks as it can"
)
GIVEN_ROUTING = "routing as given"
NUM_MEMOS = 64


def trace_inventory(
    spec: ModelSpec,
    layout: Layout,
    workload: Workload,
    *,
    stage: int = 0,
    precision: str = "bf16",
    dtype: torch.dtype | None = None,
    rank: int | None = None,
    routing: Routing | None = None,
) -> Inventory:
    """What one rank of pipeline stage `stage` runs in one pass: by default its first rank, with even routing.

    `dtype` is that of activations and plain weights where `precision` leaves it open. `routing(layer, dp, tokens)`
    gives expert ids instead. All replicas are taken to have the same workload. Results are kept: asking again is free.
    Raises LayoutError where the layout does not fit the model, LoadError for an unknown precision, ConfigError for a
    workload in phase "vision" (see `trace_vision`) or beyond the model's context.
    """
    if workload.phase == "vision":
        raise ConfigError("a text pass has phase prefill or decode", next_step="Use trace_vision for images")
    if workload.context + workload.new_tokens > spec.max_context:
        raise ConfigError(
            f"{workload.context + workload.new_tokens} tokens in one sequence", expected=f"at most {spec.max_context}"
        )
    if not 0 <= stage < layout.pp:
        raise ConfigError(f"no pipeline stage {stage} in layout {layout}", expected=f"0..{layout.pp - 1}")
    rank = layout.rank_at(pp=stage) if rank is None else rank
    if layout.coords(rank).pp != stage:
        raise ConfigError(f"rank {rank} is not of stage {stage}")
    key = _Key(_hashable(spec), layout, workload, rank, precision, dtype)
    return _trace_evenly(key) if routing is None else _trace(key, routing)


def trace_vision(
    spec: ModelSpec,
    layout: Layout,
    image_grid: tuple[int, int, int],
    *,
    num_images: int = 1,
    precision: str = "bf16",
    dtype: torch.dtype | None = None,
) -> Inventory:
    """What the first rank of stage 0 runs to encode `num_images` images of one (frames, rows, columns) patch grid.

    Raises UnsupportedModelError for a model without a vision tower, ImageError for a grid that it does not take.
    """
    if spec.vision is None or spec.projector is None:
        raise UnsupportedModelError("this model has no vision tower")
    _, rows, columns = image_grid
    tokens = max(1, rows * columns // spec.vision.merge_size**2)
    workload = Workload(phase="vision", num_sequences=num_images, new_tokens=tokens)
    key = _Key(_hashable(spec), layout, workload, layout.rank_at(), precision, dtype)
    return _trace_images(key, image_grid)


def record_pass(
    model: Model,
    ctx: RankContext,
    batch: TokenBatch,
    cache: StateCache | None,
    workload: Workload,
    payload: Tensor | None = None,
) -> Inventory:
    """The inventory of a pass that really runs, on a loaded model and with its own routing; its results are dropped."""
    recorder = Recorder(model)
    with torch.inference_mode(), _listening(ctx, recorder), instrument(model, recorder) as peaks, recorder:
        _run_stage(model, ctx, batch, cache, payload)
    key = _Key(model.spec, ctx.layout, workload, ctx.rank, model.precision.name, model.dtype)
    return _inventory(key, recorder, peaks, ("recorded from a run",))


@dataclass(frozen=True)
class _Key:
    spec: ModelSpec
    layout: Layout
    workload: Workload
    rank: int
    precision: str
    dtype: torch.dtype | None


@lru_cache(maxsize=4096)
def _trace_evenly(key: _Key) -> Inventory:
    """Replicas beyond those that an expert group spans change nothing but the numbers of the ranks in a group."""
    coords, needed = key.layout.coords(key.rank), replace(key.layout, dp=key.layout.expert_dp)
    rank = needed.rank_at(pp=coords.pp, dp=coords.dp % needed.dp, tp=coords.tp)
    if needed == key.layout:
        return _trace(key, None)
    inventory = _trace_evenly(replace(key, layout=needed, rank=rank))
    groups = group_members(key.layout, key.rank)
    collectives = tuple(replace(use, ranks=groups[use.group]) for use in inventory.collectives)
    return replace(inventory, layout=key.layout, collectives=collectives)


def _trace(key: _Key, routing: Routing | None) -> Inventory:
    spec, layout, workload = key.spec, key.layout, key.workload
    traffic = _traffic(key, routing)
    moe_layers = [layer.layer_idx for layer in spec.layers if layer.is_moe]
    recorder: Recorder | None = None

    def arriving(_: Tensor) -> Tensor:
        assert recorder is not None
        return traffic(recorder.moe_layer).received_counts(recorder.moe_layer)

    ctx = silent_context(layout, key.rank, exchange_counts=arriving)
    model = _stage(key, ctx, shared=routing is None)
    memo = _memo(spec, workload, layout.tp, key.precision, key.dtype) if routing is None else None
    recorder = Recorder(model, memo)
    layers = layout.stage_layers(spec.num_layers)[ctx.coords.pp]
    cache = StateCache(
        spec,
        layers if routing is not None else set(_stand_ins(spec, layers).values()),
        num_slots=workload.num_sequences,
        max_tokens=workload.context + workload.new_tokens,
        dtype=model.dtype,
        device="meta",
        tp_size=layout.tp,
    )
    batch = _batch(workload)
    with torch.inference_mode(), _listening(ctx, recorder), instrument(model, recorder, traffic) as peaks, recorder:
        _run_stage(model, ctx, batch, cache, None)
    notes = (EVEN_ROUTING if routing is None else GIVEN_ROUTING,) if moe_layers else ()
    return _inventory(key, recorder, peaks, notes)


@lru_cache(maxsize=256)
def _trace_images(key: _Key, grid: tuple[int, int, int]) -> Inventory:
    spec, vision = key.spec, key.spec.vision
    assert vision is not None
    ctx = silent_context(key.layout, key.rank)
    check_layout(spec, key.layout)
    with torch.device("meta"):
        model = Model(spec, layers=range(0), has_embed=False, has_head=False, precision=key.precision, dtype=key.dtype)
    narrow(model, spec, key.layout)
    attach(model, ctx)
    recorder = Recorder(model, Memo())
    frames, rows, columns = grid
    num = key.workload.num_sequences
    shape = (num * frames * rows * columns, 3, vision.patch_size, vision.patch_size)
    patches = torch.empty(shape, dtype=torch.float32, device="meta")
    listening, hooks = _listening(ctx, recorder), instrument(model, recorder)
    with torch.inference_mode(), listening, hooks as peaks, recorder, recorder.within(label="vision"):
        encode_images(model, ctx, patches, [grid] * num)
    return _inventory(key, recorder, peaks, ())


def _run_stage(
    model: Model, ctx: RankContext, batch: TokenBatch, cache: StateCache | None, payload: Tensor | None
) -> None:
    """One forward pass of a stage with the exchange of payloads, as the runner makes it."""
    pipeline = Pipeline(model.spec, ctx, model.dtype)
    if payload is None:
        payload = pipeline.receive(batch.num_tokens)
    out = model(batch, payload, cache)
    if not ctx.is_last_stage:
        pipeline.send(out)


def _stage(key: _Key, ctx: RankContext, *, shared: bool) -> Model:
    """The stage on meta. With `shared` one layer object stands for all layers of equal kind."""
    spec, layout = key.spec, key.layout
    check_layout(spec, layout)
    pp = ctx.coords.pp
    layers = layout.stage_layers(spec.num_layers)[pp]
    with torch.device("meta"):
        model = Model(
            spec,
            layers=range(0),
            has_embed=pp == 0,
            has_head=pp == layout.pp - 1,
            has_vision=False,
            precision=key.precision,
            dtype=key.dtype,
        )
        built = _stand_ins(spec, layers) if shared else {i: i for i in layers}
        own = {i: DecoderLayer(spec, i, model.precision) for i in dict.fromkeys(built.values())}
    model.layers.update({str(i): layer for i, layer in own.items()})
    narrow(model, spec, layout)
    attach(model, ctx)
    model.layers = nn.ModuleDict({str(i): own[stand_in] for i, stand_in in built.items()})
    return model


def _stand_ins(spec: ModelSpec, layers: range) -> dict[int, int]:
    """For every layer the first one of the stage that runs the same operators."""
    first: dict[object, int] = {}
    return {i: first.setdefault(_layer_key(spec, i), i) for i in layers}


def _layer_key(spec: ModelSpec, layer_idx: int) -> object:
    layer = spec.layers[layer_idx]
    starts_block = spec.residual is not None and layer_idx % spec.residual.block_size == 0
    return layer.mixer, layer.ffn, starts_block


def _batch(workload: Workload) -> TokenBatch:
    """Index tables keep their values and therefore stay on the CPU, the token ids among them."""
    num, new = workload.num_sequences, workload.new_tokens
    return TokenBatch(
        token_ids=torch.zeros(num * new, dtype=torch.int64),
        lengths=(new,) * num,
        starts=(workload.context,) * num,
        slots=tuple(range(num)),
        logit_rows=torch.arange(new - 1, num * new, new),
    )


def _traffic(key: _Key, routing: Routing | None) -> Any:
    coords = key.layout.coords(key.rank)

    def of(layer_idx: int) -> ExpertTraffic:
        moe = key.spec.layers[layer_idx].ffn
        assert isinstance(moe, MoESpec)
        return ExpertTraffic(
            layout=key.layout, coords=coords, num_tokens=key.workload.num_tokens, moe=moe, routing=routing
        )

    return of


@contextmanager
def _listening(ctx: RankContext, recorder: Recorder) -> Iterator[None]:
    outer, ctx.log.listener = ctx.log.listener, recorder.heard
    try:
        yield
    finally:
        ctx.log.listener = outer


@lru_cache(maxsize=NUM_MEMOS)
def _memo(_spec: ModelSpec, _workload: Workload, _tp: int, _precision: str, _dtype: torch.dtype | None) -> Memo:
    """What ran before with the same tokens and slices, shared by all stages, stage cuts and expert layouts."""
    return Memo()


def _hashable(spec: ModelSpec) -> ModelSpec:
    """Without the config keys that nobody reads, whose values need not be hashable."""
    return replace(spec, unknown_keys=())


def _inventory(key: _Key, recorder: Recorder, peaks: dict[str, int], notes: tuple[str, ...]) -> Inventory:
    return Inventory(
        model=key.spec.architecture,
        layout=key.layout,
        stage=key.layout.coords(key.rank).pp,
        precision=key.precision,
        workload=key.workload,
        operators=recorder.operators(),
        collectives=recorder.collectives(group_members(key.layout, key.rank)),
        activation_peak_bytes=recorder.peak,
        layer_peaks=tuple(peaks.items()),
        notes=notes,
    )
