"""What the tests of the simulated accelerator share: a process on the card, and the gaps that are planted."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY, NANO = ROOT / "data" / "k3-tiny", ROOT / "data" / "k3-nano"

OnCard = Callable[..., "subprocess.CompletedProcess[str]"]

# Operators of the router, of the experts and of the decay of linear attention; no feature of the device needs them.
GAPS = "missing:topk,host:silu,wrong:exp"
PLANTED = {"topk": "missing", "silu": "fell back", "exp": "approximate"}


def named(evidence: str) -> dict[str, str]:
    """Operators that the coverage gate names, by their own name, with what it says of each."""
    found = re.findall(r"(?:^|; )aten\.(\w+?)_?\.\w+ (missing|fell back|approximate|failed|not tried): ", evidence)
    return dict(found)
