"""Small problems that a library must solve: odd sizes, every kind of number, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.nn.activation import gated_activation
from workbench.nn.native.calls import KINDS, Held, Kernels
from workbench.nn.quant import MXFP4
from workbench.spec import Activation

__all__ = ["attend_reference", "experts_reference", "faults", "wide"]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest result
ACTIVATIONS = (
    Activation(kind="silu"),
    Activation(kind="situ", beta=3.0, linear_beta=20.0),
    Activation(kind="swiglu_oai", alpha=1.7, limit=2.0),
)


def faults(kernels: Kernels) -> list[str]:
    """What comes out wrong, by name; empty where all is right."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(), torch.device("cpu"):
        torch.manual_seed(7)
        found = []
        for dtype in KINDS:
            for name, result, expected in _cases(kernels, dtype):
                error = (result.double() - expected).abs().max() / expected.abs().max()
                if not error <= TOLERANCE[dtype]:
                    found.append(f"{name} in {str(dtype).removeprefix('torch.')} by {error:.1e}")
        return found


def _cases(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, result, float64 reference)."""
    for num, rows, columns in ((1, 103, 70), (2, 5, 33), (3, 50, 64), (7, 9, 44)):
        x, dense = torch.randn(num, columns).to(dtype), torch.randn(rows, columns)
        kinds: list[Held] = [(dense.to(dtype), None)]
        if columns % 2 == 0:
            packed = MXFP4().encode(dense)
            kinds.append((packed["weight_packed"], packed["weight_scale"]))
        for held in kinds:
            yield f"linear ({num} rows)", kernels.linear(x, held), x.double() @ wide(held).mT
    for number, activation in enumerate(ACTIVATIONS):
        num, top_k, width, latent = 6, 2, 36, 66
        slots = torch.tensor([[0, 2], [2, -1], [0, 1], [2, 0], [2, 1], [2, 0]])
        x = torch.randn(num * (top_k if number == 1 else 1), latent).to(dtype)
        shapes = ((3, width, latent), (3, latent, width), (3, width, latent))
        stacks = [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]
        biases = [torch.randn(shape[:2]).to(dtype) if number else None for shape in shapes]
        packed_all = [MXFP4().encode(w) for w in stacks]
        for matrices in (
            tuple((w.to(dtype), None) for w in stacks),
            tuple((p["weight_packed"], p["weight_scale"]) for p in packed_all),
        ):
            result = kernels.experts(x, slots, matrices, biases, activation)  # type: ignore[arg-type]
            expected = experts_reference(x, slots, matrices, biases, activation)  # type: ignore[arg-type]
            yield f"experts ({activation.kind})", result, expected
    lengths, heads, kv_heads, width, v_width = (1, 70, 9), 6, 2, 20, 45
    q = torch.randn(3, heads, width).to(dtype)
    keys = list(torch.randn(3, 80, kv_heads, width).to(dtype))
    values = list(torch.randn(3, 80, kv_heads, v_width).to(dtype))
    keys, values = ([x[:n] for x, n in zip(table, lengths, strict=True)] for table in (keys, values))
    for sinks in (None, torch.randn(heads)):
        yield "attend", kernels.attend(q, keys, values, 0.3, sinks), attend_reference(q, keys, values, 0.3, sinks)


def wide(held: Held) -> Tensor:
    """A matrix or stack in float64."""
    codes, scales = held
    if scales is None:
        return codes.double()
    return MXFP4().decode({"weight_packed": codes, "weight_scale": scales}, torch.float32).double()


def experts_reference(
    x: Tensor,
    slots: Tensor,
    matrices: tuple[Held, Held, Held],
    biases: list[Tensor | None],
    activation: Activation,
) -> Tensor:
    """`Kernels.experts` in float64, one visit at a time."""
    (num, top_k), (w1, w2, w3) = slots.shape, (wide(held) for held in matrices)
    b1, b2, b3 = (torch.zeros(w.shape[:2]) if b is None else b for b, w in zip(biases, (w1, w2, w3), strict=True))
    y = torch.zeros(num, top_k, x.shape[1], dtype=torch.float64)
    for t in range(num):
        for k in range(top_k):
            row, e = x[t if len(x) == num else t * top_k + k].double(), int(slots[t, k])
            if e >= 0:
                inner = gated_activation(activation, w1[e] @ row + b1[e], w3[e] @ row + b3[e])
                y[t, k] = w2[e] @ inner + b2[e]
    return y


def attend_reference(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, sinks: Tensor | None) -> Tensor:
    """`Kernels.attend` in float64, one head at a time."""
    num, num_heads, _ = q.shape
    share = num_heads // keys[0].shape[1]
    y = torch.zeros(num, num_heads, values[0].shape[-1], dtype=torch.float64)
    for s in range(num):
        for h in range(num_heads):
            scores = keys[s][:, h // share].double() @ q[s, h].double() * scale
            extra = torch.full((1,), -torch.inf) if sinks is None else sinks[h : h + 1]
            weights = torch.softmax(torch.cat([scores, extra.double()]), 0)[:-1]
            y[s, h] = weights @ values[s][:, h // share].double()
    return y
