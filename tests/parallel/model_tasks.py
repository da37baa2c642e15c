"""What a rank does in the tests of whole models under a layout: gradients of a step, features of images."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from workbench.loading import load_sharded_weights
from workbench.nn.batch import TokenBatch
from workbench.parallel import (
    GroupTensorParallel,
    Pipeline,
    advance_image,
    begin_image,
    encode_images,
    sum_vision_gradients,
)
from workbench.placement import Layout

__all__ = ["encode", "train_step"]


class _NoEnter(GroupTensorParallel):
    def enter(self, x: Tensor) -> Tensor:
        return x


def train_step(
    root: Path, layout: Layout, replicas: list[list[list[int]]], target: Tensor, skip_enter: bool = False
) -> dict[str, object]:
    """Loss = sum(logits * target[:rows]) over this replica's sequences; gradients of everything this rank holds.

    `skip_enter` plants a fault: gradients are not summed where a sharded region begins.
    """
    loaded = load_sharded_weights(root, precision="fp32", layout=layout, device="cpu")
    model, ctx = loaded.model, loaded.ctx
    for module in model.modules():
        if skip_enter and hasattr(module, "tp"):
            module.tp = _NoEnter(ctx.tp)
    pipeline = Pipeline(loaded.spec, ctx, model.dtype)
    batch = TokenBatch.whole(replicas[ctx.coords.dp], all_logits=True)
    payload = pipeline.receive(batch.num_tokens)
    if payload is not None:
        payload.requires_grad_()
    out = model(batch, payload)
    if ctx.is_last_stage:
        (out * target[: len(out)]).sum().backward()
    else:
        pipeline.send(out)
        out.backward(pipeline.receive_gradient(batch.num_tokens))
    if payload is not None:
        assert payload.grad is not None
        pipeline.send_gradient(payload.grad)
    ctx.close()
    return {"coords": ctx.coords, "grads": {name: p.grad for name, p in model.named_parameters()}}


def encode(
    root: Path, layout: Layout, pixels: Tensor, grids: list[tuple[int, int, int]], target: Tensor
) -> dict[str, object]:
    """Features of images, at once and with pauses, and gradients of sum(features * target) for tower and projector."""
    loaded = load_sharded_weights(root, precision="fp32", layout=layout, device="cpu")
    calls: list[int] = []
    assert loaded.model.vision is not None
    loaded.model.vision.register_forward_pre_hook(lambda _module, args: calls.append(len(args[0])))
    features = encode_images(loaded.model, loaded.ctx, pixels, grids)
    (features * target).sum().backward()
    sum_vision_gradients(loaded.model, loaded.ctx)
    parts = []
    with torch.no_grad():
        for own, grid in zip(pixels.split([math.prod(grid) for grid in grids]), grids, strict=True):
            rows, piece, stop = begin_image(loaded.model, loaded.ctx, own, grid), None, 0
            while piece is None:
                stop += 7
                piece = advance_image(loaded.model, loaded.ctx, rows, grid, stop)
            parts.append(piece)
    loaded.ctx.close()
    grads = {n: p.grad for n, p in loaded.model.named_parameters() if n.startswith(("vision.", "projector."))}
    return {
        "coords": loaded.ctx.coords,
        "features": features.detach(),
        "parts": torch.cat(parts),
        "grads": grads,
        "patches": sum(calls),
    }
