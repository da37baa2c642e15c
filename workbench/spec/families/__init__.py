"""One file per family: `matches(config)`, `parse(config, image_config)`, `tensors(spec)`. Adding a family adds a line."""

from __future__ import annotations

from workbench.spec.families import kimi_k3

FAMILIES = (kimi_k3,)
