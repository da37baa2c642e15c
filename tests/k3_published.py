"""The published sizes of Kimi K3, and where a copy of its published files may lie."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.checkpoint import K3
from workbench.spec import SpecialTokens

# A folder with `configs/moonshotai__Kimi-K3.json` and the published index; tests that need it are skipped without.
REFERENCE = Path(os.environ.get("WORKBENCH_REFERENCE", Path(__file__).resolve().parents[2] / "shared" / "reference"))
CONFIG = REFERENCE / "configs" / "moonshotai__Kimi-K3.json"
INDEX = REFERENCE / "kimi-k3.model.safetensors.index.json.gz"

TOKENS = SpecialTokens(bos=163584, eos=163586, pad=163839, media=163605)
SIZES = K3
