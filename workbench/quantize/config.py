"""The `quantization_config` of a converted checkpoint, as compressed-tensors reads it.

One scheme for everything is one group that targets every Linear, with what stays plain as ignore rules; a mix is one
group per scheme whose patterns name its modules. Patterns are kept short and without nested repeats: readers that do
not trust a config refuse the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.spec import module_kind

__all__ = ["quantization_config"]

_FORMATS = {
    "mxfp4": "mxfp4-pack-quantized",
    "fp8": "float-quantized",
    "int8": "int-quantized",
    "int4": "pack-quantized",
}
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
MAX_PATTERN = 180
PLAIN = "bf16"


def quantization_config(modules: Mapping[str, str]) -> dict[str, Any] | None:
    """Block for `modules`, published module name -> scheme name ("bf16": plain), of every matrix of the model.

    None where nothing is quantised.
    """
    schemes = [name for name in _FORMATS if name in modules.values()]
    if not schemes:
        return None
    groups = {}
    for n, scheme in enumerate(schemes):
        targets = ["Linear"] if len(schemes) == 1 else _patterns(modules, scheme)
        groups[f"group_{n}"] = {
            "targets": targets,
            "weights": _weights(scheme),
            "input_activations": None,
            "output_activations": None,
            "format": _FORMATS[scheme],
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[schemes[0]] if len(schemes) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": _patterns(modules, PLAIN) if len(schemes) == 1 else [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "quantization_status": "compressed",
    }


def _weights(scheme: str) -> dict[str, Any]:
    """A weight block: symmetric, static, by group of columns or by output channel."""
    is_float, bits = scheme in ("mxfp4", "fp8"), 4 if scheme in ("mxfp4", "int4") else 8
    return {
        "num_bits": bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "group" if bits == 4 else "channel",
        "group_size": 32 if bits == 4 else None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
        "scale_dtype": "torch.uint8" if scheme == "mxfp4" else None,
        "zp_dtype": None,
    }


def _patterns(modules: Mapping[str, str], scheme: str) -> list[str]:
    """Rules that name exactly the modules of `scheme`: by kind where all layers that have it agree, else by layer."""
    layers: dict[tuple[str, str], dict[str, set[str]]] = {}
    rules: list[str] = []
    for name, own in modules.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            if own == scheme:
                rules.append(f"re:{re.escape(module_kind(name)).replace(re.escape('*'), '[0-9]+')}$")
            continue
        # Experts of a layer differ in their number only and are stored alike.
        kind = re.escape(module_kind(match[3])).replace(re.escape("*"), "[0-9]+")
        layers.setdefault((re.escape(match[1]), kind), {}).setdefault(own, set()).add(match[2])
    for (prefix, kind), by_scheme in layers.items():
        if scheme not in by_scheme:
            continue
        if len(by_scheme) == 1:
            rules.append(f"re:{prefix}[0-9]+{kind}$")
            continue
        room = MAX_PATTERN - len(prefix) - len(kind)
        chunk: list[str] = []
        for layer in sorted(by_scheme[scheme], key=int):
            if chunk and len("|".join([*chunk, layer])) > room:
                rules.append(f"re:{prefix}({'|'.join(chunk)}){kind}$")
                chunk = []
            chunk.append(layer)
        rules.append(f"re:{prefix}({'|'.join(chunk)}){kind}$")
    return list(dict.fromkeys(rules))
