"""Quantised matrices for `make.py`: random pieces of every scheme, and what public code makes of them.

compressed-tensors 0.20 unpacks its own INT4 and NVFP4 and the AWQ order; nothing light reads GPTQ, so that is a loop
over single weights. Scales are such that every product is exact in float32.
"""

from __future__ import annotations

import math

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from workbench.spec import SCHEMES, TensorSpec

__all__ = ["expand_pieces", "module_sizes", "random_piece"]

Sizes = dict[str, tuple[int, int]]
READ_HERE = (
    "int4_packed",
    "nvfp4",
    "nvfp4_packed",
    "int4_awq",
    "int4_gptq",
    "fp8_tensor",
    "fp8_channel",
    "int8_channel",
)
INT4 = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
FP4 = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)


def module_of(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix(tensor.part).rstrip("._")


def module_sizes(tensors: list[TensorSpec]) -> Sizes:
    """(rows, columns) of every quantised matrix, by module name."""
    sizes = {}
    for tensor in tensors:
        if tensor.scheme in READ_HERE and tensor.weights:
            scheme = SCHEMES[tensor.scheme]
            shape = tensor.shape[::-1] if scheme.is_transposed else tensor.shape
            sizes[module_of(tensor)] = (shape[0] * scheme.per_item[0], shape[1] * scheme.per_item[1])
    return sizes


def random_piece(tensor: TensorSpec, g: torch.Generator, sizes: Sizes) -> Tensor:
    rows, columns = sizes[module_of(tensor)]
    size = columns**-0.5  # of the weights, for outputs as large as the inputs
    spread = torch.rand(tensor.shape, generator=g) + 0.5
    if tensor.weights or tensor.part == "qzeros":
        if tensor.dtype == "F8_E4M3":
            return (torch.randn(tensor.shape, generator=g) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        low, high, dtype = {
            "I32": (-(2**31), 2**31, torch.int32),
            "I8": (-127, 128, torch.int8),
            "U8": (0, 256, torch.uint8),
        }[tensor.dtype]
        return torch.randint(low, high, tensor.shape, generator=g, dtype=torch.int64).to(dtype)
    power = 2.0 ** round(math.log2(size / 300))
    return {
        "weight_shape": lambda: torch.tensor([rows, columns], dtype=torch.int32),
        "weight_scale": lambda: {
            "F8_E4M3": (spread * 150).to(torch.float8_e4m3fn),
            "BF16": (spread * size * (0.3 if tensor.scheme == "int4_packed" else 0.02)).bfloat16(),
            "F32": spread * size / 45,
        }[tensor.dtype],
        "weight_scale_2": lambda: torch.tensor(power),
        "weight_global_scale": lambda: torch.tensor([1 / power]),
        "input_scale": lambda: torch.tensor(0.25),
        "input_global_scale": lambda: torch.tensor([4.0]),
        "scales": lambda: (spread * size * 0.2).half(),
        "g_idx": lambda: torch.arange(columns, dtype=torch.int32) // tensor.group_size,
    }[tensor.part]()


def expand_pieces(stored: dict[str, Tensor], tensors: list[TensorSpec]) -> dict[str, Tensor]:
    """All tensors with each quantised matrix of `READ_HERE` in their place as one float32 `weight`."""
    out, own = dict(stored), {}
    for tensor in tensors:
        if tensor.scheme in READ_HERE:
            own.setdefault((module_of(tensor), tensor.scheme, tensor.group_size), {})[tensor.part] = out.pop(
                tensor.name
            )
    for (module, scheme, group_size), parts in own.items():
        out[f"{module}.weight"] = expanded(scheme, group_size, parts).float().contiguous()
    return out


def expanded(scheme: str, group_size: int, parts: dict[str, Tensor]) -> Tensor:
    if scheme == "int4_packed":
        return _by_library("pack-quantized", INT4, parts | {"weight_scale": parts["weight_scale"].float()})
    if scheme == "nvfp4_packed":
        return _by_library("nvfp4-pack-quantized", FP4, parts)
    if scheme == "nvfp4":
        theirs = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"]}
        return _by_library("nvfp4-pack-quantized", FP4, theirs | {"weight_global_scale": 1 / parts["weight_scale_2"]})
    if scheme == "int4_awq":
        codes, scale, zeros = AutoAWQConverter(group_size=group_size)._convert_gemm_module(
            parts["qweight"], parts["scales"], parts["qzeros"]
        )
        apart = (codes.float() - zeros.float().repeat_interleave(group_size, 1)).unflatten(1, (-1, group_size))
        return (apart * scale.float()[..., None]).flatten(1)
    if scheme == "int4_gptq":
        return _gptq(parts)
    return parts["weight"].float() * parts["weight_scale"].float()


def _by_library(name: str, args: QuantizationArgs, parts: dict[str, Tensor]) -> Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    if "weight_packed" in parts and "weight_global_scale" in parts:
        parts = {key: x.float() if x.dtype == torch.float8_e4m3fn else x for key, x in parts.items()}
    return BaseCompressor.get_value_from_registry(name).decompress(dict(parts), scheme)["weight"]


def _gptq(parts: dict[str, Tensor]) -> Tensor:
    words, zeros, scales = parts["qweight"].tolist(), parts["qzeros"].tolist(), parts["scales"].tolist()
    columns, rows = len(words) * 8, len(words[0])
    result = torch.empty(rows, columns)
    for column, group in enumerate(parts["g_idx"].tolist()):
        for row in range(rows):
            code = words[column // 8][row] >> 4 * (column % 8) & 15
            zero = (zeros[group][row // 8] >> 4 * (row % 8) & 15) + 1
            result[row, column] = (code - zero) * scales[group][row]
    return result
