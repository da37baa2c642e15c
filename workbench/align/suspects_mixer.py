"""Suspects of the two mixers: the delta rule of KDA and its convolutions, the latent attention of MLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.align import mistakes
from workbench.align.equations import Facts, delta_step
from workbench.align.reference import LATENT_NORM_EPS
from workbench.align.suspect import Suspect, matrix_suspects, norm_suspects, put, put_all, set_to

__all__ = ["kda_suspects", "mla_suspects"]


def kda_suspects(facts: Facts) -> Iterator[Suspect]:
    heads, width = facts.kda_heads
    recurrent = ("kda_o", "kda_state")
    for part in "qkv":
        yield from matrix_suspects(f"{part}_proj", f"self_attn.{part}_proj.weight", ("kda_conv", f"kda_{part}"))
        for way in ("reversed", "interleaved"):
            yield Suspect(
                name=f"head_order.{part}",
                text=f"heads of {part}_proj {way}",
                shows_in=("kda_conv", f"kda_{part}"),
                change=put("weight", f"self_attn.{part}_proj.weight", mistakes.permute_heads(heads, way)),
            )
    for pair in ("qk", "kv", "qv"):
        a, b = (f"self_attn.{part}_proj.weight" for part in pair)
        yield Suspect(
            name=f"swapped.{pair}",
            text=f"{pair[0]}_proj and {pair[1]}_proj exchanged",
            shows_in=("kda_conv", *(f"kda_{part}" for part in pair)),
            change=_exchange(a, b),
        )
    convolved = ("kda_q", "kda_k", "kda_v")
    taps = {f"self_attn.{part}_conv1d.weight": lambda w: w.flip(-1) for part in "qkv"}
    late = {f"self_attn.{part}_conv1d.weight": lambda w: w.roll(1, -1) for part in "qkv"}
    early = {f"self_attn.{part}_conv1d.weight": lambda w: w.roll(-1, -1) for part in "qkv"}
    yield Suspect(
        name="conv_order",
        text="taps of the short convolutions in reverse order, the newest first",
        shows_in=convolved,
        change=put_all("weight", taps),
    )
    for shift, text in ((late, "late"), (early, "early")):
        yield Suspect(
            name="conv_shift",
            text=f"short convolutions one token {text}",
            shows_in=convolved,
            change=put_all("weight", shift),
        )
    yield Suspect(
        name="conv_act_missing",
        text="short convolutions without their activation",
        shows_in=convolved,
        change=set_to("conv_act", lambda x: x),
    )
    for low, shown in (("f_a_proj", "kda_g"), ("f_b_proj", "kda_g"), ("b_proj", "kda_beta_logit")):
        yield from matrix_suspects(low, f"self_attn.{low}.weight", (shown,))
    yield from _recurrence_suspects(recurrent, width)
    gated = ("kda_gated",)
    yield from norm_suspects("o_norm", "the norm of each head's output", gated, facts.text["rms_norm_eps"])
    yield from _gate_suspects(gated, heads)
    yield from matrix_suspects("o_proj", "self_attn.o_proj.weight", ("attn_out",))


def _exchange(a: str, b: str) -> Callable[[Any], None]:
    return lambda bench: bench.weight.update({a: lambda w: bench.read(b), b: lambda w: bench.read(a)})


def _recurrence_suspects(shows_in: tuple[str, ...], width: int) -> Iterator[Suspect]:
    def suspect(name: str, text: str, change: Callable[[Any], None]) -> Suspect:
        return Suspect(name=name, text=f"delta rule: {text}", shows_in=shows_in, change=change)

    def decay(change: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Callable[[Any], None]:
        return set_to("log_decay", change)

    def heads(x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    yield suspect("l2_eps_mean", "epsilon on the mean of squares", set_to("unit", mistakes.unit_with_mean))
    yield suspect("l2_missing", "queries and keys not brought to unit length", set_to("unit", lambda x: x))
    yield suspect("q_scale_missing", "queries not scaled", set_to("q_scale", 1.0))
    yield suspect("q_scale_wrong", "queries scaled by one over the width", set_to("q_scale", 1.0 / width))
    yield suspect("decay_bias_missing", "decay without dt_bias", put("weight", "self_attn.dt_bias", torch.zeros_like))
    yield suspect("decay_rate_missing", "decay without exp(A_log)", put("weight", "self_attn.A_log", torch.zeros_like))
    yield suspect(
        "decay_rate_not_exp",
        "A_log taken for the rate itself",
        decay(lambda z, a, b, bound: bound * torch.sigmoid(heads(a) * (z + b))),
    )
    yield suspect("decay_softplus", "the unbounded decay of Kimi Linear", decay(mistakes.softplus_decay))
    yield suspect(
        "decay_bias_late",
        "dt_bias added after the rate",
        decay(lambda z, a, b, bound: bound * torch.sigmoid(heads(torch.exp(a)) * z + b)),
    )
    yield suspect("decay_missing", "no decay", decay(lambda z, a, b, bound: torch.zeros_like(z)))
    yield suspect(
        "decay_shared",
        "one decay per head in place of one per channel",
        decay(
            lambda z, a, b, bound: (
                bound * torch.sigmoid(heads(torch.exp(a)) * (z + b)).mean(-1, keepdim=True).expand_as(z)
            )
        ),
    )
    yield suspect("beta_sigmoid_missing", "beta without its sigmoid", set_to("beta", lambda x: x))
    yield suspect("beta_doubled", "beta twice its sigmoid", set_to("beta", lambda x: 2 * torch.sigmoid(x)))
    yield suspect("no_correction", "values added without the correction", set_to("step", mistakes.gated_linear_step))
    yield suspect(
        "read_before_write", "output read before the token is written", set_to("step", mistakes.late_read_step)
    )
    yield suspect("state_bf16", "state kept in bf16", set_to("step", _step_in_bf16))
    for tokens in (4, 8, 16, 32, 64):
        yield suspect("state_lost", f"state not carried over chunks of {tokens} tokens", set_to("reset_every", tokens))


def _step_in_bf16(state: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
    state, out = delta_step(state, *args)
    return mistakes.as_bf16(state), out


def _gate_suspects(shows_in: tuple[str, ...], heads: int) -> Iterator[Suspect]:
    yield Suspect(name="gate_missing", text="no output gate", shows_in=shows_in, change=set_to("gate", torch.ones_like))
    yield Suspect(
        name="gate_sigmoid_missing",
        text="output gate without its sigmoid",
        shows_in=shows_in,
        change=set_to("gate", lambda x: x),
    )
    yield Suspect(
        name="gate_silu",
        text="output gate through SiLU, not a sigmoid",
        shows_in=shows_in,
        change=set_to("gate", F.silu),
    )
    for way in ("reversed", "interleaved"):
        yield Suspect(
            name="head_order.g",
            text=f"heads of the output gate {way}",
            shows_in=shows_in,
            change=put("weight", "self_attn.g_proj.weight", mistakes.permute_heads(heads, way)),
        )
    yield from matrix_suspects("g_proj", "self_attn.g_proj.weight", shows_in)


def mla_suspects(facts: Facts) -> Iterator[Suspect]:
    text = facts.text
    heads, nope, shared = text["num_attention_heads"], text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    gated, scale = ("mla_gated",), (nope + shared) ** -0.5
    for norm, where, shown in (
        ("q_a_norm", "the norm of the query latent", "mla_q"),
        ("kv_a_norm", "the norm of the key-value latent", "latent"),
    ):
        yield from norm_suspects(norm, where, (shown,), LATENT_NORM_EPS)
    for module, shown in (
        ("q_a_proj", "mla_q"),
        ("q_b_proj", "mla_q"),
        ("kv_a_proj_with_mqa", "latent"),
        ("kv_b_proj", "mla_gated"),
        ("o_proj", "attn_out"),
    ):
        yield from matrix_suspects(module, f"self_attn.{module}.weight", (shown,))
    for name, words, value in (
        ("nope", "from the part without the shared key", nope**-0.5),
        ("values", "from the width of values", text["v_head_dim"] ** -0.5),
        ("missing", "missing", 1.0),
        ("twice", "applied twice", scale**2),
        *(
            (f"yarn{s}", f"with the YaRN factor of a {s}-fold context", scale * mistakes.yarn_factor(s))
            for s in (4, 40)
        ),
    ):
        yield Suspect(
            name=f"softmax_scale.{name}",
            text=f"softmax scale {words}",
            shows_in=gated,
            change=set_to("softmax_scale", value),
        )
    for is_paired in (True, False):
        way = "neighbouring pairs" if is_paired else "halves"
        yield Suspect(
            name=f"rotary.{'pairs' if is_paired else 'halves'}",
            text=f"rotary positions ({way}) on a model without positions",
            shows_in=gated,
            change=set_to("rotate", partial(mistakes.half_turn, is_paired=is_paired)),
        )
    yield Suspect(name="not_causal", text="no causal mask", shows_in=gated, change=set_to("is_causal", False))
    yield Suspect(
        name="kv_order",
        text="values before keys in kv_b_proj",
        shows_in=gated,
        change=set_to("split_kv", lambda x, n, v: (x[..., v:], x[..., :v])),
    )
    yield Suspect(
        name="q_part_order",
        text="the shared part first in each query head",
        shows_in=("mla_q",),
        change=put("weight", "self_attn.q_b_proj.weight", partial(_roll_heads, heads=heads, by=shared)),
    )
    for module, shown in (("q_b_proj", "mla_q"), ("kv_b_proj", "mla_gated")):
        for way in ("reversed", "interleaved"):
            yield Suspect(
                name=f"head_order.{module}",
                text=f"heads of {module} {way}",
                shows_in=(shown,),
                change=put("weight", f"self_attn.{module}.weight", mistakes.permute_heads(heads, way)),
            )
    yield Suspect(
        name="shared_key_missing",
        text="the shared part of keys left out",
        shows_in=("latent",),
        change=put("result", "latent", lambda x: torch.cat((x[..., :-shared], torch.zeros_like(x[..., -shared:])), -1)),
    )
    yield from _gate_suspects(gated, heads)


def _roll_heads(w: Tensor, *, heads: int, by: int) -> Tensor:
    return w.unflatten(0, (heads, -1)).roll(by, 1).flatten(0, 1)
