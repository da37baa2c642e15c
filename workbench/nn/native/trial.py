"""Small problems that a library must solve: odd sizes, every kind of number, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.nn.activation import gated_activation
from workbench.nn.native.calls import KINDS, HeadNorm, Held, Kernels, RotaryTable
from workbench.nn.pages import PageTables
from workbench.nn.quant import MXFP4
from workbench.spec import Activation, MoESpec
from workbench.spec.routing import choose_experts

__all__ = [
    "attend_reference",
    "experts_reference",
    "faults",
    "rms_norm_reference",
    "route_reference",
    "routing",
    "seen_rows",
    "turn_reference",
    "wide",
]

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
            weights = torch.rand(num, top_k)
            result = kernels.experts(x, slots, matrices, biases, activation, weights=weights, is_summed=True)  # type: ignore[arg-type]
            yield f"sum of experts ({activation.kind})", result, (expected * weights[..., None]).sum(1)
    yield from _cases_between(kernels, dtype)
    lengths, heads, kv_heads, width, v_width = (1, 70, 9), 6, 2, 20, 45
    q = torch.randn(3, heads, width).to(dtype)
    keys = list(torch.randn(3, 80, kv_heads, width).to(dtype))
    values = list(torch.randn(3, 80, kv_heads, v_width).to(dtype))
    keys, values = ([x[:n] for x, n in zip(table, lengths, strict=True)] for table in (keys, values))
    for sinks in (None, torch.randn(heads)):
        yield "attend", kernels.attend(q, keys, values, 0.3, sinks), attend_reference(q, keys, values, 0.3, sinks)
    # Pages out of order and side by side; one sequence begins within a page; what is not seen is no number.
    tables = PageTables(torch.tensor([[4, 9, 9], [7, 2, 3], [0, 9, 9]]), 11)
    seen = torch.tensor([(0, 0, 1), (1, 5, 29), (2, 3, 10)])
    pools = [torch.full((110, kv_heads, each), float("nan")).to(dtype) for each in (width, v_width)]
    seen_by = [seen_rows(tables, slot, first, stop) for slot, first, stop in seen.tolist()]
    for pool in pools:
        pool[torch.cat(seen_by)] = torch.randn(sum(map(len, seen_by)), *pool.shape[1:]).to(dtype)
    own_keys, own_values = ([pool[each] for each in seen_by] for pool in pools)
    result = kernels.attend(q, pools[:1], pools[1:], 0.3, None, tables, seen)
    yield "attend in pages", result, attend_reference(q, own_keys, own_values, 0.3, None)


def seen_rows(tables: PageTables, slot: int, first: int, stop: int) -> Tensor:
    """Rows of tokens [first, stop) of a slot, one at a time: (stop - first,)."""
    pages, size = tables.pages[slot].tolist(), tables.tokens
    return torch.tensor([pages[t // size] * size + t % size for t in range(first, stop)])


def _cases_between(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What stands between the products of a layer."""
    for num, columns, offset in ((1, 70, 0.0), (5, 33, 1.0), (3, 200, 0.0)):
        x, weight = 3 * torch.randn(num, columns).to(dtype), torch.randn(columns).to(dtype)
        expected = rms_norm_reference(x, weight, 1e-3, offset)
        yield "rms_norm", kernels.rms_norm(x, weight, 1e-3, offset), expected
    for width, pairs, is_interleaved in ((44, 22, False), (38, 9, True)):
        xs = [torch.randn(3, heads, width).to(dtype) for heads in (5, 2)]
        norms: list[HeadNorm | None] = [(torch.randn(width).to(dtype), 1e-3, 0.0), None]
        angles = torch.randn(3, pairs)
        table = angles.cos(), angles.sin()
        turned = kernels.turn_heads(xs, norms, table, is_interleaved=is_interleaved)
        for x, norm, y in zip(xs, norms, turned, strict=True):
            expected = x if norm is None else rms_norm_reference(x, *norm)
            yield "turn_heads", y, turn_reference(expected, table, is_interleaved)
    for number, spec in enumerate(
        (routing(11, 3), routing(50, 8, scoring="softmax"), routing(9, 9, scoring="softmax_topk"))
    ):
        x, weight = torch.randn(5, 70).to(dtype), torch.randn(spec.num_experts, 70).to(dtype) / 8
        bias = torch.randn(spec.num_experts).to(dtype) if number else None
        correction = None if number else torch.randn(spec.num_experts)
        ids, weights = kernels.route(x, weight, bias, correction, spec)
        found = torch.zeros(5, spec.num_experts).scatter(1, ids, weights)
        yield f"route ({spec.scoring})", found, route_reference(x, weight, bias, correction, spec)


def routing(num_experts: int, top_k: int, *, scoring: str = "sigmoid", renormalize: bool = True) -> MoESpec:
    """A description of experts for its router's sake."""
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        width=1,
        latent_dim=1,
        has_latent_norm=False,
        num_shared=0,
        shared_width=0,
        renormalize=renormalize,
        routed_scale=1.25,
        norm_eps=0.0,
        activation=ACTIVATIONS[0],
        scoring=scoring,  # type: ignore[arg-type]
    )


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


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`Kernels.rms_norm` in float64, unrounded."""
    own = x.double()
    return own / torch.sqrt((own * own).mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def turn_reference(x: Tensor, table: RotaryTable, is_interleaved: bool) -> Tensor:
    """`Kernels.turn_heads` of one table without a norm in float64, one pair at a time."""
    out, pairs = x.double().clone(), table[0].shape[1]
    for pair in range(pairs):
        i, j = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + pairs)
        cos, sin = (each[:, pair, None].double() for each in table)
        a, b = out[..., i].clone(), out[..., j].clone()
        out[..., i], out[..., j] = a * cos - b * sin, b * cos + a * sin
    return out


def route_reference(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, spec: MoESpec) -> Tensor:
    """`Kernels.route` in float64, one token at a time: weights of all experts (T, E), zero where it does not go."""
    logits = x.double() @ weight.double().mT + (0.0 if bias is None else bias.double())
    out = torch.zeros(len(x), spec.num_experts, dtype=torch.float64)
    for token, row in enumerate(logits.tolist()):
        ids, weights = choose_experts(spec, row, None if correction is None else correction.tolist())
        out[token, list(ids)] = torch.tensor(weights, dtype=torch.float64)
    return out
