"""Stand-ins of other rooms that serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("serving", "parallel"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / room))
