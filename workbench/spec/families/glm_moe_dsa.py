"""GLM-5, 5.1 and 5.2.

What is new against DeepSeek-V3.2:
  [G5-1] from 5.2 on only some layers own an indexer (`indexer_types`); the others read the tokens that the last
         owner chose. The index frequency keys beside the list repeat what it says.
  [G5-2] one group of experts; the layer kinds may also be listed (`mlp_layer_types`) and must agree with the prefix.
  [G5-3] plain rotary settings in `rope_parameters`, interleaved in the indexer as well; bf16 files.
Source: configs of zai-org/GLM-5.1 and GLM-5.2, transformers' glm_moe_dsa.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from workbench.base import ConfigError
from workbench.spec.dialect import decoder, is_named, num_layers, open_config
from workbench.spec.families.deepseek_v3 import draft_tensors, read_layers, read_mla, tensors
from workbench.spec.families.deepseek_v32 import read_indexer
from workbench.spec.model import ModelSpec

__all__ = ["ARCHITECTURES", "FAMILY", "draft_tensors", "matches", "parse", "tensors"]

FAMILY = "glm_moe_dsa"
ARCHITECTURES = ("GlmMoeDsaForCausalLM",)


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a GLM-5 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    count, indexer = num_layers(text), read_indexer(text)
    text.skip("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    text.skip("moe_router_dtype")
    kinds = text.str_list("indexer_types", default=("full",) * count)
    if len(kinds) != count or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(
            "indexer_types does not give every layer an indexer or one before it to follow",
            found=f"{len(kinds)} entries, first {kinds[:3]}",
            expected=f'{count} of "full" or "shared", "full" first',
        )
    own = read_mla(text, indexer)
    follow = read_mla(text, dataclasses.replace(indexer, owns_choice=False))
    layers, draft = read_layers(text, [own if kind == "full" else follow for kind in kinds], own)  # [G5-1]
    listed = text.str_list("mlp_layer_types", default=())
    if listed and [kind == "sparse" for kind in listed] != [layer.is_moe for layer in layers]:  # [G5-2]
        raise ConfigError("mlp_layer_types and first_k_dense_replace say different things")
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=layers,
        norm_eps=text.number("rms_norm_eps"),
        draft=draft,
    )
