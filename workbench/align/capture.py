"""What the fast model computes on the way: forward hooks that collect a trace, and undoing the split over ranks.

A hook sees what its rank holds. `undo_split` puts the pieces of one tensor together again; which dimension was split is
read from the placement table, through the weight that made the tensor (its rows) or that consumes it (its columns).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.align.reference import Trace
from workbench.align.trace import layer_of, short_name
from workbench.base import DeploymentError, RequestError
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model
from workbench.nn.residual import ResidualStream
from workbench.placement import Layout, rule_for
from workbench.spec import KDASpec, MLASpec, ModelSpec, MoESpec

__all__ = ["Capture", "merge_ranks", "undo_split"]

REPLICA_TOLERANCE = 1e-2  # relative; beyond it two copies of one value have parted, whatever the device's rounding


@dataclass(frozen=True, slots=True)
class _Split:
    """The weight that decides how a tensor is split: it is made by the weight's rows, made by columns (each rank then
    holds a partial sum), or consumed by its columns. `dim` is the dimension of the tensor that follows the weight."""

    param: str
    relation: Literal["made by rows", "summed over columns", "consumed by columns"]
    dim: int


_SPLITS: dict[str, _Split] = {
    "kda_conv": _Split("mixer.q_conv.weight", "made by rows", 1),
    "kda_q": _Split("mixer.q_conv.weight", "made by rows", 1),
    "kda_k": _Split("mixer.k_conv.weight", "made by rows", 1),
    "kda_v": _Split("mixer.v_conv.weight", "made by rows", 1),
    "kda_g": _Split("mixer.f_b_proj.weight", "made by rows", 1),
    "kda_beta_logit": _Split("mixer.b_proj.weight", "made by rows", 1),
    "kda_o": _Split("mixer.v_conv.weight", "made by rows", 1),
    "kda_state": _Split("mixer.A_log", "made by rows", 0),
    "kda_gated": _Split("mixer.o_proj.weight", "consumed by columns", 1),
    "mla_q": _Split("mixer.q_b_proj.weight", "made by rows", 1),
    "mla_gated": _Split("mixer.o_proj.weight", "consumed by columns", 1),
    "moe_routed_out": _Split("ffn.latent_out.weight", "summed over columns", 1),
    "moe_shared_out": _Split("ffn.shared.down_proj.weight", "summed over columns", 1),
}


def undo_split(name: str, pieces: Sequence[Tensor], spec: ModelSpec, layout: Layout) -> Tensor:
    """One tensor from the pieces that the tp ranks of one stage and replica captured, in tp order.

    Split pieces are joined, partial sums are added, and copies must agree: raises DeploymentError where ranks hold
    different values of what they replicate, which points at a missing or doubled reduction.
    """
    if len(pieces) == 1:
        return pieces[0]
    split, layer = _SPLITS.get(short_name(name)), layer_of(name)
    if split is not None and layer is not None:
        rule = rule_for(spec, layout, f"layers.{layer}.{split.param}")
        if rule.dim == 0 and split.relation == "made by rows":
            return torch.cat(list(pieces), split.dim)
        if rule.dim == 1 and split.relation == "consumed by columns":
            return torch.cat(list(pieces), split.dim)
        if rule.dim == 1 and split.relation == "summed over columns":
            return torch.stack([piece.to(torch.float64) for piece in pieces]).sum(0).to(pieces[0].dtype)
    for tp_rank, piece in enumerate(pieces[1:], 1):
        _check_copy(name, pieces[0], piece, tp_rank)
    return pieces[0]


def _check_copy(name: str, first: Tensor, other: Tensor, tp_rank: int) -> None:
    if first.shape == other.shape:
        gap = (first.double() - other.double()).norm().item()
        limit = REPLICA_TOLERANCE * first.double().norm().item() if first.is_floating_point() else 0.0
        if gap <= limit:
            return
    raise DeploymentError(
        f"tp ranks 0 and {tp_rank} hold different values of {name}, which each should hold whole",
        found=f"{tuple(other.shape)}, |difference| {gap:.3e}" if first.shape == other.shape else tuple(other.shape),
        expected=f"{tuple(first.shape)}, equal",
        next_step="Look for a missing or doubled reduction in what computes it",
    )


def merge_ranks(traces: Mapping[int, Trace], spec: ModelSpec, layout: Layout, *, dp: int = 0) -> Trace:
    """One trace of a sequence that replica `dp` ran, from what each global rank captured of it.

    Ranks of other replicas may be absent from `traces`. Raises DeploymentError where a rank of this replica is missing,
    or captured other names than its tp neighbours.
    """
    merged: Trace = {}
    for stage in range(layout.pp):
        ranks = [layout.rank_at(pp=stage, dp=dp, tp=tp) for tp in range(layout.tp)]
        if absent := [rank for rank in ranks if rank not in traces]:
            raise DeploymentError(f"no trace of ranks {absent}", expected=f"ranks {ranks} for stage {stage}")
        names = traces[ranks[0]].keys()
        for rank in ranks[1:]:
            if traces[rank].keys() != names:
                odd = sorted(traces[rank].keys() ^ names)
                raise DeploymentError(f"ranks {ranks[0]} and {rank} captured different tensors", found=odd[:3])
        merged.update({n: undo_split(n, [traces[rank][n] for rank in ranks], spec, layout) for n in names})
    return merged


def _keep_all(name: str) -> bool:
    return True


class Capture:
    """Forward hooks on a model (or one rank's stage of it) while the `with` block runs.

        with Capture(model) as capture:
            model(batch, payload, cache)
        traces = capture.traces(batch, cache)          # one per sequence of the batch, local pieces

    Names are those of the reference traces, plus the state that a cache holds after the pass. `final_mix`,
    `final_hidden` and `logits` hold the rows of `batch.logit_rows`. A later pass overwrites an earlier one.
    `keep(name)` chooses what is copied: everything of a large model is a large trace.
    """

    def __init__(self, model: Model, *, keep: Callable[[str], bool] = _keep_all) -> None:
        self.model = model
        self.keep = keep
        self._packed: Trace = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Capture:
        model = self.model
        for idx, layer in model.layers.items():
            self._hook_layer(int(idx), layer)
        if model.embed is not None and len(model.layers):
            first = next(iter(model.layers.values()))
            self._before(first, lambda args: {"inputs_embeds": args[0].running})
        if model.final_norm is not None:
            self._before(model.final_norm, lambda args: {"final_mix": args[0]})
            self._after(model.final_norm, lambda args, out: {"final_hidden": out})
        if model.head is not None:
            self._after(model.head, lambda args, out: {"logits": out})
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
                is_final = name in ("final_mix", "final_hidden", "logits")
                expected = len(rows) if is_final else batch.num_tokens
                if packed.shape[0] != expected:
                    raise RequestError(
                        f"{name} was captured from another batch: {packed.shape[0]} rows, not {expected}"
                    )
                trace[name] = packed[wanted] if is_final else packed[start:stop]
            if cache is not None:
                trace.update(self._state(cache, slot, position + length))
            traces.append(trace)
        return traces

    def _state(self, cache: StateCache, slot: int, num_tokens: int) -> Trace:
        """What the cache holds of one slot: kda_state (H, value, key), kda_conv (3, C, K-1), latent (tokens, R + P)."""
        found: Trace = {f"L{idx}.kda_state": x[slot] for idx, x in cache.state.items()}
        found |= {f"L{idx}.kda_conv": x[slot] for idx, x in cache.conv.items()}
        found |= {f"L{idx}.latent": x[slot, :num_tokens] for idx, x in cache.latent.items()}
        return {name: _copy(x) for name, x in found.items() if self.keep(name)}

    def _hook_layer(self, idx: int, layer: Any) -> None:
        spec, at = self.model.spec.layers[idx], f"L{idx}."
        self._before(layer.mixer_norm, lambda args: {f"{at}attn_in": args[0]})
        self._before(layer.ffn_norm, lambda args: {f"{at}mlp_in": args[0]})
        self._after(layer.mixer, lambda args, out: {f"{at}attn_out": out})
        self._after(layer.ffn, lambda args, out: {f"{at}ffn_out": out})
        is_last = idx == self.model.spec.num_layers - 1
        self._after(layer, lambda args, out: _stream(at, out, is_last))
        if isinstance(spec.mixer, KDASpec):
            self._hook_kda(at, layer.mixer, spec.mixer.head_dim)
        elif isinstance(spec.mixer, MLASpec):
            self._hook_mla(at, layer.mixer, spec.mixer.kv_rank)
        if isinstance(spec.ffn, MoESpec):
            self._hook_moe(at, layer.ffn)

    def _hook_kda(self, at: str, mixer: Any, head_dim: int) -> None:
        def by_head(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, head_dim))

        self._after(mixer.q_conv, lambda args, out: {f"{at}kda_q": by_head(out)})
        self._after(mixer.k_conv, lambda args, out: {f"{at}kda_k": by_head(out)})
        self._after(mixer.v_conv, lambda args, out: {f"{at}kda_v": by_head(out)})
        self._after(mixer.f_b_proj, lambda args, out: {f"{at}kda_g": by_head(out)})
        self._after(mixer.b_proj, lambda args, out: {f"{at}kda_beta_logit": out})
        self._before(mixer.o_norm, lambda args: {f"{at}kda_o": args[0]})
        self._before(mixer.o_proj, lambda args: {f"{at}kda_gated": args[0]})

    def _hook_mla(self, at: str, mixer: Any, rank: int) -> None:
        shared_key: list[Tensor] = []  # kv_a_proj runs before the norm of its first part

        def keep_shared(args: tuple[Any, ...], out: Tensor) -> dict[str, Tensor]:
            shared_key[:] = [out[..., rank:]]
            return {}

        self._after(mixer.kv_a_proj, keep_shared)
        self._after(mixer.kv_a_norm, lambda args, out: {f"{at}latent": torch.cat((out, shared_key.pop()), -1)})
        self._after(mixer.q_b_proj, lambda args, out: {f"{at}mla_q": out})
        self._before(mixer.o_proj, lambda args: {f"{at}mla_gated": args[0]})

    def _hook_moe(self, at: str, moe: Any) -> None:
        self._after(
            moe.router,
            lambda args, out: {
                f"{at}router_scores": moe.router.scores(args[0]),
                f"{at}topk_idx": out[0],
                f"{at}topk_w": out[1],
            },
        )
        self._after(moe.latent_in, lambda args, out: {f"{at}moe_latent_in": out})
        self._before(moe.latent_norm, lambda args: {f"{at}moe_combined": args[0]})
        self._after(moe.latent_out, lambda args, out: {f"{at}moe_routed_out": out})
        self._after(moe.shared, lambda args, out: {f"{at}moe_shared_out": out})

    def _before(self, module: nn.Module, take: Callable[[tuple[Any, ...]], dict[str, Tensor | None]]) -> None:
        self._handles.append(module.register_forward_pre_hook(lambda module, args: self._store(take(args))))

    def _after(self, module: nn.Module, take: Callable[[tuple[Any, ...], Any], Mapping[str, Tensor | None]]) -> None:
        self._handles.append(module.register_forward_hook(lambda module, args, out: self._store(take(args, out))))

    def _store(self, found: Mapping[str, Tensor | None]) -> None:
        # Copied at once: a later in-place step must not reach back into the trace.
        self._packed.update({n: _copy(x) for n, x in found.items() if x is not None and self.keep(n)})


def _stream(at: str, stream: ResidualStream, is_last: bool) -> dict[str, Tensor | None]:
    found = {f"{at}sum": stream.running}
    if is_last and stream.saved:
        found["blocks"] = torch.stack(stream.saved, dim=1)
    return found


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)
