"""Tiny models of other families against what `transformers` computed: layers, experts, logits, greedy tokens.

`families/make.py` made the checkpoints, the expected values and the limits; it says how the limits follow from float32.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import families_table
import family_tasks as tasks
import pytest
import torch
from torch import Tensor, nn

from workbench.nn.delta_net import DeltaNet
from workbench.nn.gqa import GQA
from workbench.nn.indexer import Indexer
from workbench.nn.kda import KDA
from workbench.nn.mla import MLA
from workbench.nn.model import Model
from workbench.nn.moe import Experts, MoE
from workbench.nn.norm import AcrossHeadsRMSNorm, GatedRMSNorm, HeadRMSNorm, RMSNorm
from workbench.nn.projector import Projector
from workbench.nn.router import Router
from workbench.nn.vision import PositionGrid, VisionBlock, VisionTower
from workbench.placement import Layout

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))
from ranks import shared_ranks

MODELS = families_table.models()
WAYS = ("batch", "cached", "decoded")


@cache
def found(name: str) -> dict[str, Tensor]:
    return tasks.results_of(tasks.load(name), tasks.expected_of(name))


def excess(result: dict[str, Tensor], expected: dict[str, Tensor], key: str, own: str) -> float:
    """Largest difference over its limit; a shape or a value that is no number is beyond every limit."""
    a, b = result[own], expected[key]
    if a.shape != b.shape or not a.isfinite().all():
        return float("inf")
    return ((a - b).abs().max() / expected[f"limit.{key}"]).item()


def misses(name: str, result: dict[str, Tensor]) -> list[str]:
    """Everything a rank has that is not as expected, and by how much."""
    expected = tasks.expected_of(name)
    longest = expected["lengths"].argmax().item()
    own_rows = torch.cat([torch.full((n,), i) for i, n in enumerate(expected["lengths"].tolist())]) == longest
    expected |= {"chunk": expected["logits"][own_rows], "limit.chunk": expected["limit.logits"]}
    pairs = [("logits", f"{way}.logits") for way in WAYS] + [("chunk", "chunked.logits")]
    pairs += [(key, key) for key in expected if key.startswith("hidden.")]
    out = [
        f"{own}: {ratio:.2f} of the limit"
        for key, own in pairs
        if own in result and (ratio := excess(result, expected, key, own)) > 1
    ]
    for key, value in expected.items():
        own = result.get(f"batch.{key}") if key.startswith("choice.") else None
        if own is not None and not torch.equal(own, value.long()):
            out.append(f"{key}: other experts")
    if "greedy" in result and not torch.equal(result["greedy"], expected["greedy"]):
        out.append(f"greedy {result['greedy'].tolist()}, expected {expected['greedy'].tolist()}")
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_transformers_does(name: str) -> None:
    result, expected = found(name), tasks.expected_of(name)
    assert {f"{way}.logits" for way in (*WAYS, "chunked")} | {"greedy"} <= result.keys()
    wanted = {key for key in expected if key.startswith("hidden.")}
    wanted |= {f"batch.{key}" for key in expected if key.startswith("choice.")}
    assert wanted <= result.keys()
    assert misses(name, result) == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tp=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2), marks=pytest.mark.slow),
        Layout(tp=2, ep=2),
        pytest.param(Layout(dp=2, ep=2), marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, ep=2, dispatch="all_to_all"), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, pp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_model_on_several_ranks_computes_the_same(layout: Layout) -> None:
    names = [name for name in MODELS if layout.ep == 1 or has_experts(name)]
    ranks = shared_ranks().run(tasks.run_all, names, layout, world_size=layout.world_size, timeout_s=250)
    assert {name: own for rank in ranks for name in names if (own := misses(name, rank[name]))} == {}
    for name in names:
        seen = set().union(*(rank[name].keys() for rank in ranks))
        assert found(name).keys() <= seen
        assert all(rank[name]["bytes_read"] == rank[name]["bytes_assigned"] for rank in ranks)


def test_the_page_of_families_says_what_runs() -> None:
    assert families_table.PAGE.read_text() == families_table.page(), "make it anew: tests/golden/families_table.py"


def has_experts(name: str) -> bool:
    return any(key.startswith("choice.") for key in tasks.expected_of(name))


# Mistakes, each made on a loaded model; what is off by a constant or a flag must show far beyond the limit.


def modules_of(model: Model, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def change_spec(kind: type[nn.Module], **changes: object) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for module in modules_of(model, kind):
            module.spec = dataclasses.replace(module.spec, **changes)

    return change


def change_rope(**changes: object) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for layer in model.layers.values():
            mixer = layer.mixer
            if getattr(mixer.spec, "rope", None) is not None:
                mixer.spec = dataclasses.replace(mixer.spec, rope=dataclasses.replace(mixer.spec.rope, **changes))

    return change


def change_eps(kind: type[nn.Module]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for module in modules_of(model, kind):
            module.eps = 1e-2

    return change


def drop(kind: type[nn.Module], name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for module in modules_of(model, kind):
            setattr(module, name, None)

    return change


def unscaled_softmax(model: Model) -> None:
    for module in modules_of(model, MLA):
        yarn = dataclasses.replace(module.spec.rope.yarn, mscale_all_dim=None, attention_factor=1.0)
        module.spec = dataclasses.replace(module.spec, rope=dataclasses.replace(module.spec.rope, yarn=yarn))


def without_value_bias(model: Model) -> None:
    for module in modules_of(model, GQA):
        module.v_proj.bias = None


def without_down_bias(model: Model) -> None:
    for module in modules_of(model, Experts):
        module.adds_down_bias = False


def unclamped(model: Model) -> None:
    for module in modules_of(model, Experts):
        module.activation = dataclasses.replace(module.activation, limit=None)


def swap_scales(model: Model) -> None:
    for module in modules_of(model, Router):
        module.spec = dataclasses.replace(module.spec, routed_scale=2 * module.spec.routed_scale)


def whole_norms(model: Model) -> None:
    for module in modules_of(model, RMSNorm):
        module.offset = 0.0


def sigmoid_gates(model: Model) -> None:
    for module in modules_of(model, GatedRMSNorm):
        module.activation = torch.sigmoid


def late_decay(model: Model) -> None:
    for module in modules_of(model, DeltaNet):
        module.dt_bias.data.zero_()


def change_tower(**changes: object) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for module in modules_of(model, VisionTower) + modules_of(model, PositionGrid):
            module.spec = dataclasses.replace(module.spec, **changes)

    return change


def rotate_towers_by_neighbours(model: Model) -> None:
    for module in modules_of(model, VisionBlock):
        module.rotates_halves = False


def without_deepstack(model: Model) -> None:
    model._deepstack = lambda batch: []


def first_states_alike(model: Model) -> None:
    """Every state of DeepStack is projected as the first one is."""
    stack = model.projector.deepstack
    for i in range(len(stack)):
        stack[i] = stack[0]


def norm_after_merging(model: Model) -> None:
    for module in modules_of(model, Projector):
        if module.spec.norm_at == "patch":
            module.norm.weight.data = module.norm.weight.data.roll(1)


def one_axis(model: Model) -> None:
    for module in modules_of(model, GQA):
        module.spec = dataclasses.replace(module.spec, rope=dataclasses.replace(module.spec.rope, sections=()))


def in_blocks(model: Model) -> None:
    for module in modules_of(model, GQA):
        rope = dataclasses.replace(module.spec.rope, has_interleaved_sections=False)
        module.spec = dataclasses.replace(module.spec, rope=rope)


def weigh_outputs(model: Model) -> None:
    for module in modules_of(model, Experts):
        module.scales_input = False


def wider_choice(model: Model) -> None:
    for module in modules_of(model, Indexer):
        module.spec = dataclasses.replace(module.spec, top_k=module.spec.top_k + 1)


def turn_indexer(model: Model) -> None:
    for module in modules_of(model, Indexer):
        module.spec = dataclasses.replace(module.spec, is_interleaved=not module.spec.is_interleaved)


FAULTS: dict[str, tuple[str, Callable[[Model], None]]] = {
    "rotation by neighbours for halves": ("llama", change_rope(is_interleaved=True)),
    "a base of 20000 for 10000": ("llama", change_rope(theta=20000.0)),
    "norm eps": ("llama", change_eps(RMSNorm)),
    "no Llama 3 frequencies": ("llama31-tied", change_rope(llama=None)),
    "a rotation in a layer without": ("smollm3", change_spec(GQA, rope=None)),
    "a window one token wider": ("mistral", change_spec(GQA, window=6)),
    "no window": ("mistral", change_spec(GQA, window=None)),
    "head norm eps": ("qwen3", change_eps(HeadRMSNorm)),
    "weights not renormalised": ("mixtral", change_spec(Router, renormalize=False)),
    "softmax over the chosen only": ("olmoe", change_spec(Router, scoring="softmax_topk")),
    "weights renormalised": ("olmoe", change_spec(Router, renormalize=True)),
    "norm across heads: eps": ("olmoe", change_eps(AcrossHeadsRMSNorm)),
    "q, k and v not clipped": ("olmoe", change_spec(GQA, qkv_limit=None)),
    "routed scale": ("qwen3_moe", swap_scales),
    "rotation by halves for neighbours": ("deepseek_v3", change_rope(is_interleaved=False)),
    "no YaRN": ("deepseek_v3", change_rope(yarn=None)),
    "YaRN without its softmax scale": ("deepseek_v3", unscaled_softmax),
    "no groups of experts": ("deepseek_v3", change_spec(Router, num_groups=1)),
    "no correction of the choice": ("kimi_k2", drop(Router, "bias")),
    "latent norm eps": ("kimi_k2", change_eps(RMSNorm)),
    "bounded decay": ("kimi_linear", change_spec(KDA, decay_bound=-5.0)),
    "all columns rotated": ("glm4_moe", change_rope(dim=12)),
    "no bias of the values": ("glm4_moe", without_value_bias),
    "half of the heads' columns rotated, as neighbours": ("minimax_m2", change_rope(is_interleaved=True)),
    "no sinks": ("gpt_oss", drop(GQA, "sinks")),
    "a window in no layer": ("gpt_oss", change_spec(GQA, window=None)),
    "no bias of the router": ("gpt_oss", drop(Router, "logit_bias")),
    "softmax over all experts": ("gpt_oss", change_spec(Router, scoring="softmax", renormalize=False)),
    "no bias of the experts' outputs": ("gpt_oss", without_down_bias),
    "an activation without its limit": ("gpt_oss", unclamped),
    "norms as if stored whole": ("qwen3_5_moe", whole_norms),
    "a sigmoid in the gated norm of the delta net": ("qwen3_5_moe", sigmoid_gates),
    "no bias of the decay": ("qwen3_5_moe", late_decay),
    "no gate of the shared expert": ("qwen3_5_moe", drop(MoE, "shared_gate")),
    "images at one axis of positions": ("qwen3_5_moe-vl", one_axis),
    "axes in blocks": ("qwen3_vl_moe", in_blocks),
    "no states of DeepStack": ("qwen3_vl_moe", without_deepstack),
    "one projector for all states of DeepStack": ("qwen3_vl_moe", first_states_alike),
    "a position grid resized from the middle of its patches": ("qwen3_vl_moe", change_tower(aligns_corners=False)),
    "a tower rotated by neighbours": ("qwen3_5_moe-vl", rotate_towers_by_neighbours),
    "another column's norm before merging": ("kimi_k25", norm_after_merging),
    "a position grid resized bilinearly": ("kimi_k25", change_tower(resize="bilinear")),
    "no chunks": ("llama4", change_spec(GQA, chunk=None)),
    "queries as sharp at every position": ("llama4", change_spec(GQA, temperature=None)),
    "no norm of q and k": ("llama4", change_spec(GQA, qk_norm="none")),
    "weights on the experts' outputs": ("llama4", weigh_outputs),
    "one token more is read": ("deepseek_v32", wider_choice),
    "an indexer rotated by neighbours": ("deepseek_v32", turn_indexer),
    "an indexer rotated by halves": ("glm_moe_dsa", turn_indexer),
    "all columns rotated, half of them should be": ("qwen3_5_moe", change_rope(dim=12, sections=())),
}


@pytest.mark.parametrize("fault", [fault for fault, (name, _) in FAULTS.items() if name in MODELS])
def test_a_planted_mistake_is_seen(fault: str) -> None:
    name, plant = FAULTS[fault]
    loaded, expected = tasks.load(name), tasks.expected_of(name)
    plant(loaded.model)
    worst = excess(tasks.batch_logits(loaded, expected), expected, "logits", "batch.logits")
    if worst <= 10:  # it may still show in another way
        result = tasks.results_of(loaded, expected)
        worst = max(excess(result, expected, "logits", f"{way}.logits") for way in WAYS)
    assert worst > 10, f"{worst:.1f} of the limit"
