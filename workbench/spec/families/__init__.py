"""One file per family, with `matches(config)`, `parse(config, image_config)` and `tensors(spec)`."""

from __future__ import annotations

from workbench.spec.families import kimi_k3

FAMILIES = (kimi_k3,)
