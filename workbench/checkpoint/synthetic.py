"""Small random checkpoints in the published K3 format, with numpy alone: for tests, rehearsals and demonstrations.

Values are drawn per tensor from (seed, name): the same seed gives the same tensors however they are dealt to files.
They are drawn so that mistakes show: logits have a standard deviation of about 6 (an argmax means something), latents
and the vision tower's activations are small enough for the epsilon of their norms to matter, correction biases lie at
7 ± 0.25 where rounding to bf16 changes the chosen experts, and experts hold minus zeros and all-zero groups.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.base import CheckpointError
from workbench.checkpoint.checkpoint import list_shards
from workbench.checkpoint.synthetic_config import k3_config, preprocessor_config
from workbench.checkpoint.writer import deal_per_layer, encode_array, write_index, write_shard
from workbench.spec import ModelSpec, TensorSpec, parse_config, published_tensors

__all__ = ["pack_nibbles", "write_checkpoint"]

FileLayout = Literal["per_layer", "mixed"]
E2M1_RMS = 2.926  # root mean square of the sixteen FP4 values, drawn evenly


def write_checkpoint(
    root: Path | str,
    config: Mapping[str, object] | None = None,
    *,
    seed: int = 0,
    shards: int | None = None,
    layout: FileLayout = "per_layer",
    a_log_padding: int | None = None,
    mtp_layers: int = 0,
) -> Path:
    """Write a random checkpoint folder: config files, safetensors files, index. Returns the folder.

    `per_layer`: files as published, one layer each, then head, projector and tower; `shards` joins neighbours.
    `mixed`: tensors are dealt to the files at random, so that a layer, even codes and scales of an expert, spans files.
    `a_log_padding`: zeros stored behind the real entries of every A_log; None fills up to a power of two as published.
    `mtp_layers`: draft layers beyond the last one, which K3's config does not announce.
    Raises CheckpointError where the folder already holds safetensors files, ConfigError for an unsound config.
    """
    root = Path(root)
    config = k3_config() if config is None else config
    image_config = preprocessor_config()
    spec = parse_config(config, image_config)
    root.mkdir(parents=True, exist_ok=True)
    if list_shards(root):
        raise CheckpointError("folder already holds safetensors files", where=root, next_step="Choose an empty folder")

    tensors = [_with_padding(tensor, a_log_padding) for tensor in published_tensors(spec)]
    tensors += [tensor for extra in range(mtp_layers) for tensor in _mtp_tensors(spec, spec.num_layers + extra)]
    groups = _deal(tensors, shards, layout, seed)
    index: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        total += write_shard(root / file, group, lambda tensor: _draw(spec, tensor, seed))
        index |= {tensor.name: file for tensor in group}
    write_index(root, index, total)
    generation = {"max_length": spec.max_context, "eos_token_id": spec.tokens.eos}
    for name, record in (
        ("config.json", config),
        ("preprocessor_config.json", image_config),
        ("generation_config.json", generation),
    ):
        (root / name).write_text(json.dumps(record, indent=2) + "\n")
    return root


def _with_padding(tensor: TensorSpec, padding: int | None) -> TensorSpec:
    if tensor.used_rows is None or padding is None:
        return tensor
    return dataclasses.replace(tensor, shape=(tensor.used_rows + padding, *tensor.shape[1:]))


def _mtp_tensors(spec: ModelSpec, layer_idx: int) -> list[TensorSpec]:
    d = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"enorm": (d,), "hnorm": (d,), "input_layernorm": (d,), "eh_proj": (d, 2 * d)}
    return [
        TensorSpec(
            name=f"language_model.model.layers.{layer_idx}.{module}.weight",
            shape=shape,
            dtype=spec.dtype,
            role="norm" if len(shape) == 1 else "dense_ffn",
            param=f"layers.{layer_idx}.{module}.weight",
            layer=layer_idx,
        )
        for module, shape in shapes.items()
    ]


def _deal(tensors: list[TensorSpec], shards: int | None, layout: FileLayout, seed: int) -> list[list[TensorSpec]]:
    if layout == "per_layer":
        return deal_per_layer(tensors, shards)
    shuffled = random.Random(seed).sample(tensors, len(tensors))
    count = len(deal_per_layer(tensors)) if shards is None else shards
    return [shuffled[number::count] for number in range(count)]


def _draw(spec: ModelSpec, tensor: TensorSpec, seed: int) -> bytes:
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    if tensor.part == "weight_packed":
        codes = rng.integers(0, 16, (*tensor.shape[:-1], tensor.shape[-1] * 2), np.uint8)
        is_empty = rng.random((tensor.shape[0], -(-codes.shape[1] // 32))) < 0.02
        is_empty[:, 0] = False  # a whole row of zeros would look like a hole in the file
        codes[np.repeat(is_empty, 32, axis=1)[:, : codes.shape[1]]] = 0
        return pack_nibbles(codes).tobytes()
    if tensor.part == "weight_scale":
        assert spec.quant is not None
        columns = tensor.shape[1] * spec.quant.group_size
        middle = 127 - round(math.log2(E2M1_RMS * math.sqrt(columns)))
        return rng.integers(middle - 1, middle + 2, tensor.shape, np.uint8).tobytes()
    values = _draw_values(tensor, rng)
    if tensor.used_rows is not None:
        values[tensor.used_rows :] = 0
    return encode_array(values, tensor.dtype)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """FP4 codes (..., columns) to bytes (..., columns / 2): the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _draw_values(tensor: TensorSpec, rng: np.random.Generator) -> NDArray[np.float64]:
    """Values by parameter: norms near one, matrices with unit gain, and the exceptions that the module text names."""
    name, shape = tensor.param, tensor.shape
    if name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
        return 1 + 0.1 * rng.standard_normal(shape)
    if name.endswith("router.bias"):
        return rng.uniform(6.75, 7.25, shape)
    if name.endswith("A_log"):
        return 0.3 * rng.standard_normal(shape)
    if name.endswith("dt_bias"):
        return rng.standard_normal(shape) - 2
    if name.endswith("_conv.weight"):
        return 0.5 * rng.standard_normal(shape)
    if name == "vision.pos_embed.weight":
        return 0.01 * rng.standard_normal(shape)
    fan_in = 1 if name == "embed.weight" else math.prod(shape[1:])
    return _GAINS.get(name.removesuffix(".weight").rpartition(".")[2], 1.0) * rng.standard_normal(shape) / fan_in**0.5


_GAINS = {
    "head": 6.0,  # peaked logits
    "q_a_proj": 0.02,  # mean square 4e-4: norms with eps 1e-5 and 1e-6 differ by a percent
    "kv_a_proj": 0.03,
    "patch_embed": 0.02,  # a small stream through the tower, kept small by what its blocks add
    "wo": 0.02,
    "fc1": 0.02,
}
