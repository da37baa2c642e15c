"""The mistakes that implementations make, one suspect each: what it is, which results it changes, and how to make it.

Drawn from the published history of ports of models of this kind. A suspect changes one attribute of a bench; the
counter-test compares what the bench then makes with what was observed. Here: which suspects a layer has, and those of
the model's ends; `suspects_mixer.py` and `suspects_ffn.py` hold those of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from workbench.align.equations import Facts
from workbench.align.reference import normalise
from workbench.align.suspect import Suspect, matrix_suspects, next_row, norm_suspects, put, set_to
from workbench.align.suspects_ffn import ffn_suspects, moe_suspects
from workbench.align.suspects_mixer import kda_suspects, mla_suspects

__all__ = ["edge_suspects", "layer_suspects"]

KDA_BY_NORM = ("kda_conv", "kda_q", "kda_k", "kda_v", "kda_g", "kda_beta_logit", "kda_gated")
MLA_BY_NORM = ("mla_q", "latent", "mla_gated")
MOE_BY_NORM = ("topk_idx", "topk_w", "moe_latent_in", "moe_shared_out")


def layer_suspects(facts: Facts, layer_idx: int) -> Iterator[Suspect]:
    """Suspects for layer `layer_idx`, by its kinds of mixer and feed-forward block."""
    is_kda, is_moe = facts.mixer(layer_idx) == "kda", facts.ffn(layer_idx) == "moe"
    by_ffn_norm = MOE_BY_NORM if is_moe else ("ffn_out",)
    main = facts.text["rms_norm_eps"]
    yield from norm_suspects("mixer_norm", "the norm before the mixer", KDA_BY_NORM if is_kda else MLA_BY_NORM, main)
    yield from norm_suspects("ffn_norm", "the norm before the feed-forward block", by_ffn_norm, main)
    yield from _residual_suspects({"attn_in": "before the mixer", "mlp_in": "before the feed-forward block"})
    yield from _block_suspects()
    yield from kda_suspects(facts) if is_kda else mla_suspects(facts)
    yield from moe_suspects(facts) if is_moe else ffn_suspects("mlp", "the dense block", "ffn_out", "mlp.")
    for name in ("attn_out", "ffn_out", *(("moe_combined", "moe_routed_out", "moe_shared_out") if is_moe else ())):
        yield Suspect(
            name=f"reduced_twice.{name}",
            text=f"{name} summed over tensor-parallel ranks that already held the sum",
            shows_in=(name,),
            change=put("result", name, lambda x: 2 * x),
        )
    for by in (1, -1):
        if 0 <= layer_idx + by < facts.num_layers:
            yield from _neighbour_suspects(facts, layer_idx, by)


def _neighbour_suspects(facts: Facts, layer_idx: int, by: int) -> Iterator[Suspect]:
    """Weights of the layer before or after, for the modules that both have."""
    other = layer_idx + by
    is_kda, is_moe = facts.mixer(layer_idx) == "kda", facts.ffn(layer_idx) == "moe"
    groups: list[tuple[str, tuple[str, ...]]] = [
        ("input_layernorm", KDA_BY_NORM if is_kda else MLA_BY_NORM),
        ("post_attention_layernorm", MOE_BY_NORM if is_moe else ("ffn_out",)),
        ("self_attention_res", ("attn_in",)),
        ("mlp_res", ("mlp_in",)),
    ]
    if facts.mixer(other) == facts.mixer(layer_idx):
        own = (*KDA_BY_NORM, "kda_o", "kda_state") if is_kda else MLA_BY_NORM
        groups.append(("self_attn.", (*own, "attn_out")))
    if facts.ffn(other) == facts.ffn(layer_idx):
        moe = (*MOE_BY_NORM, "moe_combined", "moe_routed_out")
        groups.append(("block_sparse_moe." if is_moe else "mlp.", moe if is_moe else ("ffn_out",)))
        if is_moe:
            groups.append(("block_sparse_moe.experts.", ("moe_combined",)))
    for prefix, shows_in in groups:

        def change(bench: Any, prefix: str = prefix) -> None:
            here, there = bench.read, bench.layer(other)
            bench.read = lambda name: there(name) if name.startswith(prefix) else here(name)

        yield Suspect(
            name=f"layer_off_by_one.{prefix.rstrip('.')}",
            text=f"{prefix.rstrip('.')} with the weights of layer {other}",
            shows_in=shows_in,
            change=change,
        )


def _residual_suspects(sites: dict[str, str]) -> Iterator[Suspect]:
    """`sites`: the tensor that a mix makes, and where it is read. A mistake may be made at one of them or at all."""
    wholes = {", ".join(sites): "everywhere"} if len(sites) > 1 else {}
    for names, where in {**sites, **wholes}.items():
        suspect = partial(_residual_suspect, tuple(names.split(", ")), f"residual mix {where}")
        yield suspect(
            "newest_overwritten", "the newest saved sum overwritten by the running one", set_to("sources", _reused)
        )
        yield suspect("running_missing", "the running sum left out", set_to("sources", lambda s: s[:-1] or s))
        yield suspect("oldest_missing", "the oldest saved sum left out", set_to("sources", lambda s: s[1:] or s))
        yield suspect("mean", "a plain mean in place of the softmax", set_to("residual_scale", 0.0))
        yield suspect("norm_missing", "scores of sources that are not normalised", set_to("mix_norm", lambda x, eps: x))
        yield suspect("normed_values", "normalised sources mixed", set_to("mixes", lambda x: normalise(x, 1e-5)))
        yield suspect(
            "scaled", "scores divided by the root of the width", lambda b: setattr(b, "residual_scale", _root_width(b))
        )


def _residual_suspect(
    shows_in: tuple[str, ...], where: str, name: str, text: str, change: Callable[[Any], None]
) -> Suspect:
    return Suspect(name=f"residual.{name}", text=f"{where}: {text}", shows_in=shows_in, change=change)


def _block_suspects() -> Iterator[Suspect]:
    suspect = partial(_residual_suspect, ("attn_in", "mlp_in", "sum"), "residual blocks")
    yield suspect(
        "block_flipped",
        "this layer restarts the running sum where it should not, or does not where it should",
        lambda bench: setattr(bench, "starts_block", _flipped_at(bench.idx)),
    )
    yield suspect("block_never", "no block starts after the first", set_to("starts_block", _first))
    for by in (1, -1):
        yield suspect("block_shifted", f"block starts shifted by {by:+d} layer", set_to("starts_block", _shifted(by)))


def _flipped_at(idx: int) -> Callable[[int, int], bool]:
    return lambda layer, size: (layer % size == 0) != (layer == idx)


def _root_width(bench: Any) -> float:
    return float(bench.facts.text["hidden_size"] ** -0.5)


def _first(layer: int, size: int) -> bool:
    return layer == 0


def _shifted(by: int) -> Callable[[int, int], bool]:
    return lambda layer, size: layer == 0 or (layer + by) % size == 0


def _reused(sources: list[Tensor]) -> list[Tensor]:
    return [*sources[:-2], sources[-1], sources[-1]] if len(sources) > 1 else sources


def edge_suspects(facts: Facts) -> Iterator[Suspect]:
    """Suspects outside the layers."""
    yield from norm_suspects("final_norm", "the last norm", ("final_hidden",), facts.text["rms_norm_eps"])
    yield from _residual_suspects({"final_mix": "at the end"})
    for module, name, shown in (
        ("head", "lm_head.weight", "logits"),
        ("embed", "model.embed_tokens.weight", "inputs_embeds"),
    ):
        for suspect in matrix_suspects(module, name, (shown,)):
            if not suspect.name.startswith(("transposed", "columns_missing")):
                yield suspect
        yield Suspect(
            name=f"ids_shifted.{module}",
            text=f"{module}: rows shifted by one token",
            shows_in=(shown,),
            change=put("weight", name, next_row),
        )
        other = "model.embed_tokens.weight" if module == "head" else "lm_head.weight"
        yield Suspect(
            name=f"tied.{module}",
            text=f"{module}: embedding and head taken for one matrix",
            shows_in=(shown,),
            change=_taken_from(name, other),
        )
    yield Suspect(
        name="embed_scaled",
        text="embedding scaled by the root of the width",
        shows_in=("inputs_embeds",),
        change=put("weight", "model.embed_tokens.weight", lambda w: w * w.shape[-1] ** 0.5),
    )


def _taken_from(name: str, other: str) -> Callable[[Any], None]:
    return lambda bench: bench.weight.__setitem__(name, lambda w: bench.read(other))
