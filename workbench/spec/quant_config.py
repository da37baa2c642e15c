"""From a `quantization_config` block in any known dialect to a QuantSpec. What is not known is refused by name."""

from __future__ import annotations

from collections.abc import Collection

from workbench.base import UnsupportedModelError
from workbench.spec.config import ConfigReader
from workbench.spec.quant import QuantGroup, QuantSpec
from workbench.spec.storage import SchemeName

__all__ = ["read_quant"]

METHODS = ("compressed-tensors", "fp8", "mxfp4", "modelopt", "awq", "gptq")


def read_quant(*readers: ConfigReader, families: Collection[str] = METHODS) -> QuantSpec | None:
    """The block of the first reader that has one (it may stand outside or inside `text_config`), None without any.

    Raises UnsupportedModelError for a method, or a setting of it, that is not known.
    """
    for reader in readers:
        if reader.has("quantization_config"):
            block = reader.child("quantization_config")
            method = block.one_of("quant_method", tuple(families))
            return {
                "compressed-tensors": _compressed_tensors,
                "fp8": _fp8,
                "mxfp4": _mxfp4,
                "modelopt": _modelopt,
                "awq": _awq,
                "gptq": _gptq,
            }[method](block)
    return None


def _compressed_tensors(block: ConfigReader) -> QuantSpec:
    block.skip("global_compression_ratio", "kv_cache_scheme", "quantization_status", "sparsity_config", "version")
    default_format = block.string("format")
    ignore = block.str_list("ignore", default=())
    all_groups = block.child("config_groups")
    groups = []
    for name in all_groups.names():
        group = all_groups.child(name)
        group.skip("output_activations", "input_activations")
        weights = group.child("weights")
        weights.skip("actorder", "block_structure", "dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        weights.require("symmetric", True, default=True)
        stored = group.string("format", default=default_format)
        if default_format not in (stored, "mixed-precision"):
            block.refuse("format", f"{name} says {stored}")
        scheme, size = _scheme_of(weights, stored)
        groups.append(QuantGroup(targets=group.str_list("targets"), scheme=scheme, group_size=size))
    if not groups:
        block.refuse("config_groups", "no group says how anything is stored")
    return QuantSpec(
        scheme=groups[0].scheme,
        group_size=groups[0].group_size,
        ignore=ignore,
        groups=() if len(groups) == 1 and groups[0].targets == ("Linear",) else tuple(groups),
    )


def _scheme_of(weights: ConfigReader, stored: str) -> tuple[SchemeName, int]:
    """Scheme and group size of a compressed-tensors weight block under a format name."""
    kind, bits = weights.string("type"), weights.integer("num_bits")
    strategy = weights.string("strategy", default="group")
    known: dict[tuple[str, str, int, str], SchemeName] = {
        ("pack-quantized", "int", 4, "group"): "int4_packed",
        ("mxfp4-pack-quantized", "float", 4, "group"): "mxfp4",
        ("nvfp4-pack-quantized", "float", 4, "tensor_group"): "nvfp4_packed",
        ("float-quantized", "float", 8, "tensor"): "fp8_tensor",
        ("float-quantized", "float", 8, "channel"): "fp8_channel",
        ("int-quantized", "int", 8, "channel"): "int8_channel",
    }
    scheme = known.get((stored, kind, bits, strategy))
    if scheme is None:
        raise UnsupportedModelError(
            "this combination of format, type, bits and strategy is not known",
            where="quantization_config",
            found=f"{stored}, {kind}, {bits}, {strategy}",
            expected="; ".join(", ".join(map(str, key)) for key in known),
        )
    if strategy in ("tensor", "channel"):
        weights.skip("group_size")
        return scheme, 1
    size = weights.integer("group_size", default=16 if scheme == "nvfp4_packed" else None)
    if (fixed := {"mxfp4": 32, "nvfp4_packed": 16}.get(scheme, size)) != size:
        weights.refuse("group_size", f"{scheme} shares one scale among {fixed} columns")
    return scheme, size


def _fp8(block: ConfigReader) -> QuantSpec:
    block.skip("activation_scheme")
    block.one_of("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    is_power_of_two = block.one_of("scale_fmt", ("ue8m0", "float"), default="float") == "ue8m0"
    size = 1
    if block.has("weight_block_size"):
        tile = block.int_list("weight_block_size")
        if len(tile) != 2 or tile[0] != tile[1] or tile[0] < 1:
            block.refuse("weight_block_size", "square tiles are expected")
        size = tile[0]
    return QuantSpec(
        scheme="fp8_block" if size > 1 else "fp8_tensor",
        group_size=size,
        ignore=block.str_list("modules_to_not_convert", default=()),
        grammar="transformers",
        method="fp8",
        quantises_head=False,
        has_power_of_two_scales=is_power_of_two,
    )


def _mxfp4(block: ConfigReader) -> QuantSpec:
    return QuantSpec(
        scheme="mxfp4_blocks",
        group_size=32,
        ignore=block.str_list("modules_to_not_convert", default=()),
        grammar="transformers",
        method="mxfp4",
        quantises_head=False,
    )


def _modelopt(block: ConfigReader) -> QuantSpec:
    block.skip("kv_cache_scheme", "producer", "config_groups")  # config_groups repeats what quant_algo says
    algorithm = block.one_of("quant_algo", ("NVFP4", "FP8"))
    return QuantSpec(
        scheme="nvfp4" if algorithm == "NVFP4" else "fp8_tensor",
        group_size=16 if algorithm == "NVFP4" else 1,
        ignore=block.str_list("ignore", default=()),
        grammar="glob",
        method="modelopt",
    )


def _awq(block: ConfigReader) -> QuantSpec:
    block.skip("do_fuse", "backend", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    block.require("bits", 4)
    block.require("zero_point", True, default=True)
    block.require("version", "gemm", default="gemm")
    return QuantSpec(
        scheme="int4_awq",
        group_size=block.integer("group_size"),
        ignore=block.str_list("modules_to_not_convert", default=()),
        grammar="transformers",
        method="awq",
        quantises_head=False,
    )


def _gptq(block: ConfigReader) -> QuantSpec:
    block.skip("damp_percent", "true_sequential", "static_groups", "sym", "meta", "model_name_or_path")
    block.require("bits", 4)
    block.require("lm_head", False, default=False)
    block.require("checkpoint_format", "gptq", default="gptq")
    return QuantSpec(
        scheme="int4_gptq",
        group_size=block.integer("group_size"),
        ignore=block.str_list("modules_in_block_to_not_quantize", default=()),
        grammar="transformers",
        method="gptq",
        quantises_head=False,
        has_column_order=block.boolean("desc_act", default=False),
    )
