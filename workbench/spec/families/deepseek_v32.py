"""DeepSeek-V3.2.

What is new against DeepSeek-V3:
  [V32-1] sparse attention: an indexer of its own heads scores all tokens, and latent attention reads the best 2048.
          Its query comes from the query latent, its one key is cached (in FP8), its rotation does not interleave.
  [V32-2] FP8 scales are powers of two (`scale_fmt` ue8m0), still stored as F32.
Source: config and inference code of deepseek-ai/DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.spec.config import ConfigReader
from workbench.spec.dialect import decoder, is_named, num_layers, open_config
from workbench.spec.families.deepseek_v3 import draft_tensors, read_layers, read_mla, tensors
from workbench.spec.mixers import IndexerSpec
from workbench.spec.model import ModelSpec

__all__ = ["ARCHITECTURES", "FAMILY", "draft_tensors", "matches", "parse", "read_indexer", "tensors"]

FAMILY = "deepseek_v32"
ARCHITECTURES = ("DeepseekV32ForCausalLM",)


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a DeepSeek-V3.2 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    mixer = read_mla(text, read_indexer(text))
    layers, draft = read_layers(text, [mixer] * num_layers(text), mixer)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=layers,
        norm_eps=text.number("rms_norm_eps"),
        draft=draft,
    )


def read_indexer(text: ConfigReader) -> IndexerSpec:  # [V32-1]
    return IndexerSpec(
        num_heads=text.integer("index_n_heads"),
        head_dim=text.integer("index_head_dim"),
        top_k=text.integer("index_topk"),
        rope_dim=text.integer("qk_rope_head_dim"),
        is_interleaved=text.boolean("indexer_rope_interleave", default=False),
    )
