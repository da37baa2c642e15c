"""Suspects of feed-forward blocks: activations, the router, the routed and the shared experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.align import mistakes
from workbench.align.equations import Facts
from workbench.align.suspect import Suspect, matrix_suspects, next_row, norm_suspects, put, put_all, set_to

__all__ = ["ffn_suspects", "moe_suspects"]


def ffn_suspects(where: str, words: str, shown: str, prefix: str) -> Iterator[Suspect]:
    shows_in = (shown,)

    def activation(name: str, text: str, function: Callable[[Tensor, Tensor], Tensor]) -> Suspect:
        return Suspect(
            name=f"{name}.{where}",
            text=f"{words}: {text}",
            shows_in=shows_in,
            change=put("activation", where, function),
        )

    yield activation("silu", "SiLU in place of SiTU", lambda gate, up: F.silu(gate) * up)
    yield activation("gelu", "GELU in place of SiTU", lambda gate, up: F.gelu(gate) * up)
    yield Suspect(
        name=f"gate_up_swapped.{where}",
        text=f"{words}: gate and up exchanged",
        shows_in=shows_in,
        change=lambda bench: bench.activation.__setitem__(where, _exchanged(bench)),
    )
    yield Suspect(
        name=f"up_not_bounded.{where}",
        text=f"{words}: up without its tanh",
        shows_in=shows_in,
        change=lambda bench: bench.activation.__setitem__(where, _situ(bench, bounds_up=False)),
    )
    yield Suspect(
        name=f"gate_not_bounded.{where}",
        text=f"{words}: gate without its tanh",
        shows_in=shows_in,
        change=lambda bench: bench.activation.__setitem__(where, _situ(bench, bounds_gate=False)),
    )
    for one, other in (("up", "gate"), ("gate", "up")):
        yield Suspect(
            name=f"{one}_is_{other}.{where}",
            text=f"{words}: {one} holds the values of {other}, as from a buffer used twice",
            shows_in=shows_in,
            change=_used_twice(where, one == "up"),
        )
    for part in ("gate", "up", "down"):
        yield from matrix_suspects(f"{where}.{part}_proj", f"{prefix}{part}_proj.weight", shows_in)


def _situ(bench: Any, *, bounds_gate: bool = True, bounds_up: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    a, b = bench.facts.text["activation_situ_beta"], bench.facts.text["activation_situ_linear_beta"]

    def act(gate: Tensor, up: Tensor) -> Tensor:
        bounded = a * torch.tanh(gate / a) if bounds_gate else gate
        return bounded * torch.sigmoid(gate) * (b * torch.tanh(up / b) if bounds_up else up)

    return act


def _used_twice(where: str, uses_gate: bool) -> Callable[[Any], None]:
    return lambda bench: bench.activation.__setitem__(where, _one_twice(bench, uses_gate))


def _one_twice(bench: Any, uses_gate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    act = _situ(bench)
    return lambda gate, up: act(gate, gate) if uses_gate else act(up, up)


def _exchanged(bench: Any) -> Callable[[Tensor, Tensor], Tensor]:
    act = _situ(bench)
    return lambda gate, up: act(up, gate)


def moe_suspects(facts: Facts) -> Iterator[Suspect]:
    yield from _router_suspects()
    yield from matrix_suspects("latent_in", "block_sparse_moe.routed_expert_down_proj.weight", ("moe_latent_in",))
    yield from matrix_suspects("latent_out", "block_sparse_moe.routed_expert_up_proj.weight", ("moe_routed_out",))
    routed = ("moe_routed_out",)
    yield from norm_suspects("latent_norm", "the norm of the summed experts", routed, facts.text["rms_norm_eps"])
    prefix = "block_sparse_moe.shared_experts."
    yield from ffn_suspects("shared", "the shared experts", "moe_shared_out", prefix)
    for suspect in ffn_suspects("experts", "the routed experts", "moe_combined", "experts."):
        if "_proj" not in suspect.name:
            yield suspect
    combined = ("moe_combined",)
    for part in ("w1", "w2", "w3"):
        yield from matrix_suspects(f"experts.{part}", f"experts.{part}.weight", combined)
    parts = [f"experts.{part}.weight" for part in ("w1", "w2", "w3")]
    for name, text, change in (
        ("nibble_order", "the two codes of a byte exchanged", mistakes.swap_nibbles),
        ("nibble_order_awq", "codes read in the interleaved order of AWQ", mistakes.awq_order),
        ("scale_missing", "scales not applied", _without_scale),
        ("scale_linear", "exponent bytes of scales taken for numbers", _linear_scale),
        ("scale_doubled", "scales off by one power of two, too large", lambda w: 2 * w),
        ("scale_halved", "scales off by one power of two, too small", lambda w: w / 2),
        ("scale_neighbour", "scales of the next group", _neighbour_scale),
    ):
        yield Suspect(
            name=f"{name}.experts",
            text=f"routed experts: {text}",
            shows_in=combined,
            change=put_all("weight", dict.fromkeys(parts, change)),
        )
    for name, text, where in (
        ("shifted_up", "each expert with the weights of the next", lambda e, n: (e + 1) % n),
        ("shifted_down", "each expert with the weights of the one before", lambda e, n: (e - 1) % n),
        ("ranks_exchanged", "the experts of two ranks exchanged", lambda e, n: (e + n // 2) % n),
        ("reversed", "experts in reverse order", lambda e, n: n - 1 - e),
    ):
        yield Suspect(
            name=f"expert_ids.{name}",
            text=f"routed experts: {text}",
            shows_in=combined,
            change=set_to("expert_of", where),
        )
    for name, text, keep in (
        ("second", "of the second expert-parallel rank", lambda e, n: e < n // 2),
        ("first", "of the first expert-parallel rank", lambda e, n: e >= n // 2),
    ):
        yield Suspect(
            name=f"experts_missing.{name}",
            text=f"routed experts {text} missing from the sum",
            shows_in=combined,
            change=set_to("is_summed", keep),
        )
    yield Suspect(
        name="weights_missing",
        text="routed experts summed without their weights",
        shows_in=combined,
        change=lambda bench: setattr(bench, "chosen", (bench.chosen[0], torch.ones_like(bench.chosen[1]))),
    )
    yield Suspect(
        name="weights_misordered",
        text="router weights in another order than the experts",
        shows_in=combined,
        change=lambda bench: setattr(bench, "chosen", (bench.chosen[0], bench.chosen[1].flip(-1))),
    )
    for name, kept in (("shared_missing", "moe_routed_out"), ("routed_missing", "moe_shared_out")):
        yield Suspect(
            name=name,
            text=f"{name.split('_')[0]} experts left out of the block's output",
            shows_in=("ffn_out",),
            change=_only(kept),
        )


def _only(kept: str) -> Callable[[Any], None]:
    return lambda bench: bench.result.__setitem__("ffn_out", lambda x: bench.x(kept))


def _groups(w: Tensor) -> Tensor:
    return w.unflatten(-1, (-1, 32)) if w.shape[-1] % 32 == 0 else w.unsqueeze(-2)


def _scale(w: Tensor) -> Tensor:
    """(..., groups, 1): the power of two of each group, from its largest value, which lies in [4, 8) of it or below."""
    largest = _groups(w).abs().amax(-1, keepdim=True)
    return torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - 2)


def _without_scale(w: Tensor) -> Tensor:
    return (_groups(w) / _scale(w)).reshape(w.shape)


def _linear_scale(w: Tensor) -> Tensor:
    scale = _scale(w)
    return (_groups(w) / scale * (torch.log2(scale) + 127)).reshape(w.shape)


def _neighbour_scale(w: Tensor) -> Tensor:
    scale = _scale(w)
    return (_groups(w) / scale * scale.roll(-1, -2)).reshape(w.shape)


def _router_suspects() -> Iterator[Suspect]:
    bias, both = "block_sparse_moe.gate.e_score_correction_bias", ("topk_idx", "topk_w")
    matrix = "block_sparse_moe.gate.weight"

    def suspect(name: str, text: str, shows_in: tuple[str, ...], change: Callable[[Any], None]) -> Suspect:
        return Suspect(name=f"router.{name}", text=f"router: {text}", shows_in=shows_in, change=change)

    yield suspect("bias_bf16", "correction bias in bf16", ("topk_idx",), put("weight", bias, mistakes.as_bf16))
    yield suspect("bias_missing", "no correction bias", ("topk_idx",), put("weight", bias, torch.zeros_like))
    yield suspect("bias_negated", "correction bias subtracted", ("topk_idx",), put("weight", bias, torch.neg))
    yield suspect("bias_shifted", "bias of the next expert", ("topk_idx",), put("weight", bias, lambda b: b.roll(-1)))
    yield suspect(
        "logits_bf16", "logits rounded to bf16", both, set_to("logits_of", lambda x, w: mistakes.as_bf16(x @ w.T))
    )
    yield suspect("softmax", "softmax in place of the sigmoid", both, set_to("scores", lambda x: torch.softmax(x, -1)))
    yield suspect("bias_in_weights", "weights from biased scores", ("topk_w",), set_to("weigh", lambda s, b: b))
    yield suspect("not_renormalised", "weights not renormalised", ("topk_w",), set_to("renormalises", False))
    for scale in (0.5, 2.0, 2.5, 2.827):
        yield suspect("scale", f"weights scaled by {scale:g}", ("topk_w",), set_to("routed_scale", scale))
    yield suspect("scale_missing", "weights not scaled", ("topk_w",), set_to("routed_scale", 1.0))
    yield suspect("rows_shifted", "rows of the matrix shifted by one expert", both, put("weight", matrix, next_row))
    yield from matrix_suspects("router", matrix, both)
