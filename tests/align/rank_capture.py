"""What one rank does in the capture tests: load its share, run its stage, return its local trace. Free of pytest."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.align import Capture, Trace
from workbench.loading import load_sharded_weights
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.parallel import Pipeline
from workbench.placement import Layout


def capture_on_rank(
    root: str, layout: Layout, sequences: list[list[int]], forget_reduce: bool = False, precision: str = "fp32"
) -> list[Trace]:
    """Local traces of `sequences`; with `forget_reduce` one layer's feed-forward block leaves out its reduction."""
    loaded = load_sharded_weights(Path(root), precision=precision, layout=layout, device="cpu")
    model, ctx = loaded.model, loaded.ctx
    if forget_reduce and "0" in model.layers:
        tp = model.layers["0"].ffn.tp
        model.layers["0"].ffn.tp = _WithoutReduce(tp)
    batch = TokenBatch.whole(sequences, all_logits=True)
    cache = StateCache(
        loaded.spec,
        model.layer_range,
        num_slots=len(sequences),
        max_tokens=max(map(len, sequences)),
        dtype=model.dtype,
        tp_size=layout.tp,
    )
    pipeline = Pipeline(loaded.spec, ctx, model.dtype)
    with torch.no_grad(), Capture(model) as capture:
        out = model(batch, pipeline.receive(batch.num_tokens), cache)
        if not ctx.is_last_stage:
            pipeline.send(out)
    ctx.close()
    return capture.traces(batch, cache)


class _WithoutReduce:
    def __init__(self, tp: object) -> None:
        self.tp = tp

    def __getattr__(self, name: str) -> object:
        return getattr(self.tp, name)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x
