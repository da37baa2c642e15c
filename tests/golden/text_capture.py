"""Everything the text goldens name, taken from one pass of our model by hooks on its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.kda import KDA
from workbench.nn.model import DecoderLayer, Model
from workbench.nn.moe import MoE

Hook = Callable[[tuple[Any, ...], Any], Tensor]


def new_cache(model: Model, num_slots: int, max_tokens: int) -> StateCache:
    return StateCache(
        model.spec, model.layer_range, num_slots=num_slots, max_tokens=max_tokens, dtype=model.dtype, device="cpu"
    )


def batch_of(ids: list[int], *, start: int = 0, slot: int = 0, all_logits: bool = False) -> TokenBatch:
    rows = range(len(ids)) if all_logits else [len(ids) - 1]
    return TokenBatch(
        token_ids=torch.tensor(ids),
        lengths=(len(ids),),
        starts=(start,),
        slots=(slot,),
        logit_rows=torch.tensor(list(rows)),
    )


def capture_prompt(model: Model, token_ids: list[int]) -> dict[str, Tensor]:
    """Golden name without the prompt ("L3.attn_in", "logits") -> our tensor, all rows."""
    values: dict[str, Tensor] = {}
    cache = new_cache(model, 1, len(token_ids))
    with hooked(model, values):
        values["logits"] = model(batch_of(token_ids, all_logits=True), cache=cache)
    for layer_idx, state in cache.state.items():
        values[f"L{layer_idx}.kda_state"] = state[0]
        values[f"L{layer_idx}.kda_conv"] = cache.conv[layer_idx][0]
    for layer_idx, latent in cache.latent.items():
        values[f"L{layer_idx}.latent"] = latent.dense()[0]
    return values


@contextmanager
def hooked(model: Model, values: dict[str, Tensor]) -> Iterator[None]:
    handles = []

    def keep(name: str, module: nn.Module, pick: Hook) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            values[name] = pick(args, output).detach().clone()

        handles.append(module.register_forward_hook(hook))

    keep("final_mix", model.final_norm, first_input)
    keep("final_hidden", model.final_norm, output_of)
    for key, layer in model.layers.items():
        keep(f"L{key}.sum", layer, lambda _, stream: stream.running)
        keep_layer(f"L{key}.", layer, keep)
    keep("blocks", layer, lambda _, stream: torch.stack(stream.saved, 1))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_input(args: tuple[Any, ...], _: Any) -> Tensor:
    return args[0]


def output_of(_: tuple[Any, ...], output: Any) -> Tensor:
    return output


def keep_layer(prefix: str, layer: DecoderLayer, keep: Callable[[str, nn.Module, Hook], None]) -> None:
    table: list[tuple[str, nn.Module, Hook]] = [
        ("attn_in", layer.mixer_norm, first_input),
        ("attn_out", layer.mixer, output_of),
        ("mlp_in", layer.ffn_norm, first_input),
        ("ffn_out", layer.ffn, output_of),
    ]
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, KDA):
        table += [
            ("kda_q", mixer.q_conv, output_of),
            ("kda_k", mixer.k_conv, output_of),
            ("kda_v", mixer.v_conv, output_of),
            ("kda_g", mixer.f_b_proj, output_of),
            ("kda_beta_logit", mixer.b_proj, output_of),
            ("kda_o", mixer.o_norm, first_input),
            ("kda_gated", mixer.o_proj, first_input),
        ]
    else:
        table += [("mla_q", mixer.q_b_proj, output_of), ("mla_gated", mixer.o_proj, first_input)]
    if isinstance(ffn, MoE):
        router = ffn.router

        def margin(args: tuple[Any, ...], _: Any) -> Tensor:
            best = (router.scores(args[0]) + router.bias).topk(router.spec.top_k + 1, -1).values
            return best[:, -2] - best[:, -1]

        table += [
            ("topk_idx", router, lambda _, output: output[0]),
            ("topk_w", router, lambda _, output: output[1]),
            ("router_scores", router, lambda args, _: router.scores(args[0])),
            ("route_margin", router, margin),
            ("moe_latent_in", ffn.latent_in, output_of),
            ("moe_combined", ffn.latent_norm, first_input),
            ("moe_routed_out", ffn.latent_out, output_of),
            ("moe_shared_out", ffn.shared, output_of),
        ]
    for name, module, pick in table:
        keep(prefix + name, module, pick)
