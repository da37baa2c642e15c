"""Writes docs/families.md: what runs of each family, from the goldens here, and what keeps the others from running.

    PYTHONPATH=. python tests/golden/families_table.py

A cell says "yes" where a test of `test_families_golden.py` holds that model against transformers in that way; the test
that compares this table with the page is in the same file, so a row cannot outlive its golden.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from family_configs import CONFIGS  # noqa: E402

from workbench.spec import ModelSpec, count_model, missing_blocks, parse_config, read_spec  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "families.md"
GOLDENS = HERE / "families"
WAYS = ("load", "prefill", "decode", "batch")
LAYOUTS = ("tp2", "pp2", "tp2xep2", "dp2xep2")
HEAD = """# Families

Which model families are read, and which run. Made by `PYTHONPATH=. python tests/golden/families_table.py`; everything
here ran on CPUs, in float32, with gloo between ranks.

A row of the first table is a tiny checkpoint under `tests/golden/families`, with random weights under the family's
published names, unequal sizes and peaked logits. `tests/golden/test_families_golden.py` loads it with the sharded
loader and holds the output of every layer, the chosen experts, the logits and the greedy tokens against what
`transformers` 5.24 computes from the same files: whole prompts, chunks, token by token, and four prompts of unequal
length at once; with a tower, one of them holds two images of different size. Sharded, the same on real processes.
Kimi K3, with its tower, has goldens of its own (`tests/golden/k3-tiny-a`).

"""
BETWEEN = """
Families that are read, counted, audited and planned, and are refused for running with this list:

"""
TAIL = """
`stored as` is what the files of that row hold. INT4, NVFP4 and the AWQ order were unpacked for transformers by
compressed-tensors 0.20, GPTQ by a loop over single weights. Such matrices are expanded to the activation dtype, or
encoded anew by `--precision`; MXFP4, INT4 in groups of 32, and FP8 and INT8 by row also stay as they are under the
precision of the same name. A slice that would cut a group of columns, a word of eight rows or a tile is refused before
a load, and so is a slice of the columns of GPTQ with `desc_act`. Static scales of activations (`input_scale`) are not
used.

Chats: Kimi K3's own message form, else the Jinja template that ships with a checkpoint, rendered in a sandbox. Its ids
are those of transformers (`tests/golden/templates`), but the name of a reserved token in a message stays text. Files of
tokenizers: byte-level `tokenizer.json`, and `tiktoken.model` with Kimi's split. A template that needs code, chats laid
out by Python code alone, and vocabularies that are not byte-level (Mixtral's) are refused with the reason.

Images enter these models as patches, at the level of the model (`Model.encode_images`, `TokenBatch`). `serve` takes
images for K3 and, where its preprocessor file is there, for Kimi-K2.5 (`tests/serving/test_other_images.py`); for the
Qwen towers, whose positions have three axes, it does not. Towers take single images, not videos.

Multi-token-prediction layers do not run: a checkpoint may hold them, and they are counted apart and not read. FP8 tiles
are expanded to the activation dtype, or encoded anew row by row (`--precision fp8`), never kept as tiles. A layer with
a window keeps the keys and values of every token. Training, the step-by-step reference (`workbench align`) and parity
gates of `day0` are K3's alone.
"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    return HEAD + _table(_running()) + BETWEEN + _table(_refused()) + TAIL


def models() -> list[str]:
    return sorted(path.parents[1].name for path in GOLDENS.glob("*/golden/expected.safetensors"))


def _running() -> list[tuple[str, ...]]:
    rows = [("model", "architecture", "layers", "parse", "count", *WAYS, "image", *LAYOUTS, "stored as")]
    for name in models():
        spec = read_spec(GOLDENS / name)
        assert missing_blocks(spec) == ()
        assert count_model(spec).num_params > 0
        has_experts = any(layer.is_moe for layer in spec.layers)
        sharded = ["yes" if "ep" not in layout or has_experts else "-" for layout in LAYOUTS]
        image = "yes" if spec.vision is not None else "-"
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in spec.layers))
        rows.append(
            (name, spec.architecture, kinds, "yes", "yes", *["yes"] * len(WAYS), image, *sharded, _format(spec))
        )
    return rows


def _refused() -> list[tuple[str, ...]]:
    rows = [("model", "architecture", "missing")]
    for name in sorted(CONFIGS):
        spec = parse_config(CONFIGS[name])
        if missing := missing_blocks(spec):
            rows.append((name, spec.architecture, "; ".join(missing)))
    return rows


def _format(spec: ModelSpec) -> str:
    return "bf16" if spec.quant is None else f"{', '.join(spec.quant.schemes)}, bf16"


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body)) + "\n"


if __name__ == "__main__":
    main()
