"""A copy of a checkpoint with a longer context than it was trained for: shards linked, one number of its config is new.

K3's attention knows no positions, so that nothing else depends on that number. What the copy says is of no interest;
how long it takes is that of the model.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["long_context"]


def long_context(model: Path, folder: Path, max_tokens: int) -> Path:
    """`folder`, made as a copy of `model` for `max_tokens` tokens a sequence, or for as many as it has if more."""
    folder.mkdir(parents=True)
    for file in sorted(model.resolve().iterdir()):
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text("utf-8"))
    text = config["text_config"]
    text["max_position_embeddings"] = max(text["max_position_embeddings"], max_tokens)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
