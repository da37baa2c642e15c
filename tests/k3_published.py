"""The published sizes of Kimi K3, and where a copy of its published files may lie."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.checkpoint import Sizes
from workbench.spec import SpecialTokens

# A folder with `configs/moonshotai__Kimi-K3.json` and the published index; tests that need it are skipped without.
REFERENCE = Path(os.environ.get("WORKBENCH_REFERENCE", Path(__file__).resolve().parents[2] / "shared" / "reference"))
CONFIG = REFERENCE / "configs" / "moonshotai__Kimi-K3.json"
INDEX = REFERENCE / "kimi-k3.model.safetensors.index.json.gz"

TOKENS = SpecialTokens(bos=163584, eos=163586, pad=163839, media=163605)
SIZES = Sizes(
    num_layers=93,
    full_attn_layers=(*range(4, 93, 4), 93),
    num_dense_layers=1,
    residual_block=12,
    hidden_size=7168,
    vocab_size=163840,
    max_context=1 << 20,
    dense_width=33792,
    kda_heads=96,
    kda_head_dim=128,
    conv_size=4,
    mla_heads=96,
    q_rank=1536,
    kv_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    num_experts=896,
    top_k=16,
    expert_width=3072,
    latent_dim=3584,
    num_shared=2,
    vision_layers=27,
    vision_heads=12,
    vision_width=1024,
    vision_qkv_width=1536,
    vision_ffn_width=4096,
    grid_height=64,
    grid_width=64,
)
