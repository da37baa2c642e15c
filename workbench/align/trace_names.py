"""Which of our tensors a module of someone else's model computes.

Others name modules as the published files do, with or without what wraps them ("model.layers.3.self_attn",
"language_model.model.layers.3.self_attn"); we name them by canonical parameters ("layers.3.mixer"). Both names of a
module follow from the tensors below it, whatever the family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from workbench.align.sources import CACHE_SOURCE, trace_sources
from workbench.align.trace import layer_of, short_name
from workbench.spec import ModelSpec, published_tensors

__all__ = ["foreign_names"]

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "module", "language_model", "model", "base_model", "text_model")


def foreign_names(captured: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Captured name -> trace name, for those that are ours: trace names themselves, and "MODULE:in", "MODULE:out".

    The first element of a tuple stands for the output where the module returns one. What nothing is known of is left
    out; so is a module that two captured names would fill.
    """
    wanted: dict[str, list[str]] = {}
    for name, source in trace_sources(spec).items():
        if source.startswith(CACHE_SOURCE) or ".running" in source or ".saved" in source:
            continue
        for alias in _aliases(source, _published_modules(spec)):
            wanted.setdefault(alias, []).append(name)
    wanted.setdefault("embed_tokens:out", []).append("inputs_embeds")
    own = set(trace_sources(spec))
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key in sorted(captured):
        if key in own or (layer_of(key) is not None and short_name(key) in ("kda_state", "latent", "router_scores")):
            found[key] = key
            continue
        for name in wanted.get(_unwrapped(key), ()):
            # The embedding is also the first layer's input; a router returns ids and weights where K3's does.
            if name not in taken:
                found[key], taken[name] = name, key
                break
    return found


def _published_modules(spec: ModelSpec) -> Mapping[str, str]:
    """Canonical module -> published module, for every module that holds tensors, directly or below it."""
    members: dict[str, list[str]] = {}
    for tensor in published_tensors(spec):
        if tensor.expert is not None and tensor.expert > 0:
            continue
        parts = tensor.param.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            members.setdefault(".".join(parts[:depth]), []).append(tensor.name)
    return {module: _common(names) for module, names in members.items()}


def _common(names: list[str]) -> str:
    """The longest path that all tensors lie below: the module that holds them."""
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for pieces in zip(*paths, strict=False):
        if len(set(pieces)) > 1:
            break
        common.append(pieces[0])
    return ".".join(common)


def _aliases(source: str, published: Mapping[str, str]) -> Iterable[str]:
    module, _, side = source.partition(":")
    name = published.get(module, "")
    if not name:
        return
    yield f"{_unwrapped(name)}:{side}"
    if "." not in side:
        yield f"{_unwrapped(name)}:{side}.0"
    yield f"{module}:{side}"  # a capture of a model of ours


def _unwrapped(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)
