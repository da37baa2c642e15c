"""Checkpoints in the published layout of Qwen3-MoE, bf16, of any size: what our loader and other engines all read."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["qwen3_moe_config", "shards", "write_qwen3_moe"]


def qwen3_moe_config(
    *,
    hidden: int,
    layers: int,
    experts: int,
    expert_width: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    top_k: int = 4,
    head_dim: int = 128,
    dense_width: int = 6144,
) -> dict[str, object]:
    """config.json by the published names; `dense_width` is told and not used, since every layer has experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "bos_token_id": 3, "eos_token_id": 5, "decoder_sparse_step": 1, "head_dim": head_dim, "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": dense_width, "max_position_embeddings": 40960,
        "mlp_only_layers": [], "moe_intermediate_size": expert_width, "norm_topk_prob": True,
        "num_attention_heads": heads, "num_experts": experts, "num_experts_per_tok": top_k,
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "vocab_size": vocab,
    }  # fmt: skip


def write_qwen3_moe(root: Path, config: dict[str, object], *, deviation: float = 1.0) -> None:
    """A folder of random values, one layer a file, by the list of tensors that the family publishes.

    Every tensor is a window of one run of normal numbers of this standard `deviation`; with one below 1 norms are ones,
    so that the network computes with numbers of a usual size. shapes.json holds the shape of each tensor.
    """
    import torch
    from safetensors.torch import save_file

    from workbench.spec import parse_config, published_tensors

    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    tensors = list(published_tensors(parse_config(config)))
    shift = 1 << 20
    largest = max(torch.Size(tensor.shape).numel() for tensor in tensors)
    values = torch.randn(largest + shift, generator=torch.Generator().manual_seed(1)).mul_(deviation)
    values = values.to(torch.bfloat16)
    layers = int(str(config["num_hidden_layers"]))
    files: dict[int, dict[str, torch.Tensor]] = {}
    for number, tensor in enumerate(tensors):
        begin = number * 7919 % shift
        own = values[begin : begin + torch.Size(tensor.shape).numel()].view(tensor.shape)
        if deviation < 1 and "norm" in tensor.name:
            own = torch.ones(tensor.shape, dtype=torch.bfloat16)
        files.setdefault(layers if tensor.layer is None else tensor.layer, {})[tensor.name] = own
    weight_map, shapes = {}, {}
    for number, layer in sorted(files.items()):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        save_file({key: x.clone() for key, x in layer.items()}, root / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(layer, name)
        shapes |= {key: list(x.shape) for key, x in layer.items()}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "shapes.json").write_text(json.dumps(shapes))
    os.sync()


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))
