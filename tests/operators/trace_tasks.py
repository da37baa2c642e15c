"""What a rank does in the tests of inventories: run one pass for real, recorded, and tell which experts it visited."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.loading import load_sharded_weights
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model
from workbench.nn.moe import Router
from workbench.operators import Inventory, Workload, record_pass
from workbench.parallel import RankContext
from workbench.placement import Layout

__all__ = ["real_batch", "run_recorded", "run_rank"]

Visits = dict[int, Tensor]  # layer -> expert ids (T, K)


def run_rank(root: Path, layout: Layout, workload: Workload, precision: str) -> dict[str, Any]:
    """One rank of `layout`: its recorded inventory, coordinates and expert choices."""
    loaded = load_sharded_weights(root, precision=precision, layout=layout, device="cpu")
    loaded.model.eval().requires_grad_(False)
    inventory, visits = run_recorded(loaded.model, loaded.ctx, workload)
    coords = loaded.ctx.coords
    loaded.ctx.close()
    return {"inventory": inventory.to_json(), "coords": coords, "visits": visits}


def run_recorded(model: Model, ctx: RankContext, workload: Workload) -> tuple[Inventory, Visits]:
    """A pass on random tokens (the same ones on every rank of a replica), recorded; and the routers' own choices."""
    chosen: dict[int, list[list[int]]] = {}

    def keep(layer_idx: int, _module: object, _args: object, out: tuple[Tensor, Tensor]) -> None:
        chosen[layer_idx] = out[0].tolist()  # a tensor kept, or copied, would be memory and an operator of the pass

    handles = [
        module.register_forward_hook(partial(keep, int(name.split(".")[1])))
        for name, module in model.named_modules()
        if isinstance(module, Router)
    ]
    cache = StateCache(
        model.spec,
        model.layer_range,
        num_slots=workload.num_sequences,
        max_tokens=workload.context + workload.new_tokens,
        dtype=model.dtype,
        tp_size=ctx.layout.tp,
    )
    batch = real_batch(workload, model.spec.vocab_size, seed=ctx.coords.dp)
    inventory = record_pass(model, ctx, batch, cache, workload)
    for handle in handles:
        handle.remove()
    return inventory, {layer: torch.tensor(ids) for layer, ids in chosen.items()}


def real_batch(workload: Workload, vocab_size: int, *, seed: int) -> TokenBatch:
    num, new = workload.num_sequences, workload.new_tokens
    ids = torch.randint(0, vocab_size, (num * new,), generator=torch.Generator().manual_seed(11 + seed))
    return TokenBatch(
        token_ids=ids,
        lengths=(new,) * num,
        starts=(workload.context,) * num,
        slots=tuple(range(num)),
        logit_rows=torch.arange(new - 1, num * new, new),
    )
