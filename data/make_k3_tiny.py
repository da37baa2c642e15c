"""Makes the embedded checkpoint `data/k3-tiny`: Kimi K3 in every structural part, small enough to live in the repo.

    python data/make_k3_tiny.py [--out data/k3-tiny]

The weights are random, drawn from a fixed seed: the checkpoint proves the machinery and cannot answer meaningfully.
The tokenizer is real: byte-level BPE over 256 bytes and 1,024 merges, learned from `data/corpus.txt`, followed by a
block of 256 marker ids in the places K3 gives them. The same versions of the packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from workbench.checkpoint.synthetic import k3_config, write_checkpoint

__all__ = ["CORPUS", "MARKERS", "NUM_BASE_TOKENS", "SIZES", "make_checkpoint", "train_tokenizer"]

CORPUS = Path(__file__).parent / "corpus.txt"

NUM_MERGES = 1024
NUM_BASE_TOKENS = 256 + NUM_MERGES
NUM_MARKERS = 256

# Offsets inside the block of markers that follows the ordinary tokens, as in the published vocabulary; ids without a
# name are reserved.
MARKERS: dict[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
