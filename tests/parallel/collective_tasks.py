"""What a rank does in the tests of collectives and expert dispatch."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from workbench.nn.moe import Experts
from workbench.nn.precision import Precision
from workbench.parallel import (
    AllToAllDispatch,
    GroupTensorParallel,
    Pipeline,
    RankContext,
    ReplicatedDispatch,
    make_context,
    make_mesh,
)
from workbench.parallel.functions import exchange_rows, gather_rows, split_rows
from workbench.parallel.mesh import layout_of
from workbench.placement import Layout
from workbench.spec import Activation, ModelSpec, MoESpec

MOE = MoESpec(
    num_experts=8, top_k=3, width=12, latent_dim=10, has_latent_norm=True, num_shared=1, shared_width=12,
    renormalize=True, routed_scale=1.0, norm_eps=1e-5, activation=Activation(kind="situ", beta=4.0, linear_beta=25.0),
)  # fmt: skip


def sharded_mlp(x: Tensor, up: Tensor, down: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Two matrices split by their inner width, a split and a gather after them; loss = sum(output * target)."""
    ctx = make_context(Layout(tp=torch.distributed.get_world_size()))
    tp = GroupTensorParallel(ctx.tp)
    x = x.clone().requires_grad_()
    own_up = up.chunk(tp.size, 0)[tp.rank].clone().requires_grad_()
    own_down = down.chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    y = tp.reduce(torch.tanh(tp.enter(x) @ own_up.T) @ own_down.T)
    out = tp.gather(tp.split(y, -1).square(), -1)
    (out * target).sum().backward()
    log = ctx.log.render()
    ctx.close()
    return {"out": out.detach(), "x": x.grad, "up": own_up.grad, "down": own_down.grad, "log": log}


def uneven_rows(counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Row r of rank k is 100 k + r; gather all, then split again by the same counts; gradient is the row's square."""
    ctx = make_context(Layout(tp=len(counts)))
    rows = (100.0 * ctx.rank + torch.arange(counts[ctx.rank]))[:, None].repeat(1, 3).requires_grad_()
    whole = gather_rows(rows, counts, ctx.tp)
    own = split_rows(whole.detach().requires_grad_(), counts, ctx.tp)
    (whole * whole.detach()).sum().backward()
    ctx.close()
    return {"whole": whole.detach(), "own": own.detach(), "grad": rows.grad}


def mixed_exchange(sends: list[list[int]]) -> dict[str, object]:
    """Rank k sends sends[k][j] rows to rank j: an odd number of bf16 columns, fp32 columns and int32 ids together."""
    ctx = make_context(Layout(tp=len(sends)))
    rank, mine = ctx.rank, sends[ctx.rank]
    receives = [row[rank] for row in sends]
    total = sum(mine)
    values = (torch.arange(total)[:, None] + 1000.0 * rank).to(torch.bfloat16).repeat(1, 5).requires_grad_()
    weights = (torch.arange(total)[:, None] / 7.0 + rank).repeat(1, 2).requires_grad_()
    ids = torch.arange(total, dtype=torch.int32)[:, None] + 10 * rank
    got = exchange_rows(ctx.tp, mine, receives, values, weights, ids)
    (got[0].float().sum() * 2 + (got[1] * got[1].detach()).sum()).backward()
    log = dict(ctx.log.totals)
    ctx.close()
    return {
        "got": [part.detach() for part in got],
        "values": values.detach(),
        "weights": weights.detach(),
        "ids": ids,
        "grads": [values.grad, weights.grad],
        "calls": {key: total.count for key, total in log.items()},
    }


def every_operation_without_warnings() -> dict[str, object]:
    """Each kind of collective once, warnings as errors; a float8 tensor travels too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctx = make_context(Layout(tp=torch.distributed.get_world_size()))
        group, rank, size = ctx.tp, ctx.rank, ctx.tp.size
        eighth = torch.tensor([[0.5, -2.0], [448.0, float(rank)]]).to(torch.float8_e4m3fn)
        gathered = group.all_gather(eighth)
        exchanged = group.exchange(eighth.repeat(size, 1), [2] * size, [2] * size)
        summed = group.all_reduce(torch.tensor([1.5, float(rank)]))
        told = group.broadcast(torch.tensor([rank, 7]), size - 1)
        counts = group.row_counts(rank * 3, torch.device("cpu"))
        group.barrier()
        nothing = group.all_reduce(torch.empty(0, 4)), group.all_gather(torch.empty(0, 4))
        totals = {name: (total.count, total.num_bytes) for (_, name), total in ctx.log.totals.items()}
        last = ctx.log.describe_last()
        ctx.close()
    return {
        "gathered": gathered.float(),
        "exchanged": exchanged.float(),
        "summed": summed,
        "told": told,
        "counts": counts,
        "nothing": [tuple(x.shape) for x in nothing],
        "totals": totals,
        "last": last,
    }


def dispatch(
    layout: Layout, weights: dict[str, Tensor], replicas: list[dict[str, Tensor]], announce: bool
) -> dict[str, object]:
    """The dispatch of `layout` on this rank's replica; loss = sum(result * target). Gradients of everything."""
    ctx = make_context(layout)
    experts = local_experts(ctx, weights)
    tokens = replicas[ctx.coords.dp]
    latent, gate = tokens["latent"].clone().requires_grad_(), tokens["weights"].clone().requires_grad_()
    kind = AllToAllDispatch if layout.dispatch == "all_to_all" else ReplicatedDispatch
    run = kind(ctx, experts.num_local)
    if announce:
        with ctx.tokens(len(latent)):
            result = run(latent, tokens["ids"], gate, experts)
    else:
        result = run(latent, tokens["ids"], gate, experts)
    forward_calls = {name: total.count for (_, name), total in ctx.log.totals.items()}
    (result * tokens["target"]).sum().backward()
    ctx.close()
    return {
        "coords": ctx.coords,
        "result": result.detach(),
        "latent": latent.grad,
        "weights": gate.grad,
        "experts": {name: p.grad for name, p in experts.named_parameters()},
        "calls": forward_calls,
    }


def local_experts(ctx: RankContext, weights: dict[str, Tensor]) -> Experts:
    """The slice of the stacked experts that a rank holds: a run of experts, and a run of their inner width."""
    experts = Experts(MOE, Precision("fp32", torch.float32))
    layout, at = ctx.layout, ctx.coords
    num, width = MOE.num_experts // layout.ep, MOE.width // layout.expert_tp
    rows, columns = slice(at.ep * num, (at.ep + 1) * num), slice(at.expert_tp * width, (at.expert_tp + 1) * width)
    experts.w1.narrow_((num, width, MOE.latent_dim))
    experts.w3.narrow_((num, width, MOE.latent_dim))
    experts.w2.narrow_((num, MOE.latent_dim, width))
    with torch.no_grad():
        experts.w1.weight.copy_(weights["w1"][rows, columns])
        experts.w3.weight.copy_(weights["w3"][rows, columns])
        experts.w2.weight.copy_(weights["w2"][rows, :, columns])
    return experts


def pass_payload(spec: ModelSpec, layout: Layout, num_tokens: int) -> dict[str, object]:
    """Send a payload down the stages, each adding 1, and a gradient back up, each doubling it."""
    ctx = make_context(layout)
    pipeline = Pipeline(spec, ctx, torch.bfloat16)
    got = pipeline.receive(num_tokens)
    back = None
    if not ctx.is_last_stage:
        base = float(ctx.rank) if got is None else float(got.float().amax()) + 1 if got.numel() else 0.0
        pipeline.send(torch.full((pipeline.vectors_out, num_tokens, spec.hidden_size), base, dtype=torch.bfloat16))
        back = pipeline.receive_gradient(num_tokens)
    if not ctx.is_first_stage:
        ones = torch.ones(pipeline.vectors_in, num_tokens, spec.hidden_size, dtype=torch.bfloat16)
        pipeline.send_gradient(ones if back is None else ones * back.flatten()[0] * 2 if back.numel() else ones)
    calls = ctx.log.count()
    ctx.close()
    return {
        "got": None if got is None else (tuple(got.shape), got.flatten()[:1].tolist()),
        "back": None if back is None else (tuple(back.shape), back.flatten()[:1].tolist()),
        "calls": calls,
    }


def meshes() -> dict[str, object]:
    """A mesh made here, one given by the caller with fewer dimensions, and what each says of this rank."""
    layout = Layout(dp=2, tp=2, ep=4)
    mesh = make_mesh(layout)
    ctx = make_context(layout, mesh=mesh)
    groups = {name: getattr(ctx, name).ranks for name in ("pp", "dp", "tp", "experts", "expert_gather")}
    with torch.no_grad():
        total = ctx.experts.all_reduce(torch.tensor([float(ctx.rank)]))
    ctx.close()
    plain = torch.distributed.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    from_plain = layout_of(plain)
    refused = {}
    for name, call in {
        "names": lambda: layout_of(
            torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        ),
        "layout": lambda: layout_of(plain, Layout(tp=2, dp=2)),
        "world": lambda: make_context(Layout(tp=2)),
    }.items():
        try:
            call()
            refused[name] = "accepted"
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return {"text": str(ctx), "groups": groups, "total": float(total), "plain": from_plain, "refused": refused}


def skip_a_collective(step: int) -> str:
    """Rank 1 leaves out one all_reduce of four and returns; the others wait for it."""
    ctx = make_context(Layout(tp=torch.distributed.get_world_size()))
    for i in range(4):
        if ctx.rank == 1 and i == step:
            break
        ctx.tp.all_reduce(torch.ones(3))
    return ctx.log.describe_last()


def raise_on_rank(rank: int) -> int:
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"planted on rank {rank}")
    return torch.distributed.get_rank()
