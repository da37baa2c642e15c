"""Makes the embedded checkpoint `data/k3-tiny`: Kimi K3 in every structural part, small enough to live in the repo.

    python data/make_k3_tiny.py [--out data/k3-tiny]

The weights are random, drawn from a fixed seed: the checkpoint proves the machinery and cannot answer meaningfully.
The tokenizer is real: byte-level BPE over 256 bytes and 1,024 merges, learned from `data/corpus.txt`, followed by a
block of 256 reserved ids in the places K3 gives them. The pinned versions of the packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from workbench.base import CheckpointError
from workbench.checkpoint import Sizes, k3_config, write_checkpoint
from workbench.serving.inputs.tokenizer_files import K3_RESERVED_OFFSETS, KIMI_SPLIT, RESERVED_BLOCK
from workbench.spec import SpecialTokens

__all__ = ["CORPUS", "NUM_BASE_TOKENS", "SEED", "SIZES", "make_checkpoint", "train_tokenizer"]

CORPUS = Path(__file__).parent / "corpus.txt"
DEFAULT_OUT = Path(__file__).parent / "k3-tiny"
SEED = 2026

NUM_MERGES = 1024
NUM_BASE_TOKENS = 256 + NUM_MERGES

# K3's structure with no two widths alike: dense first layer, full attention at every fourth and the last two layers,
# residual blocks of unequal length. Heads, experts and tower divide by 2 and 4, an expert's width by 4 groups of 32.
SIZES = Sizes(
    num_layers=9,
    full_attn_layers=(4, 8, 9),
    num_dense_layers=1,
    residual_block=4,
    hidden_size=72,
    vocab_size=NUM_BASE_TOKENS + RESERVED_BLOCK,
    max_context=8192,
    dense_width=208,
    kda_heads=4,
    kda_head_dim=16,
    conv_size=4,
    mla_heads=4,
    q_rank=56,
    kv_rank=40,
    nope_dim=24,
    rope_dim=8,
    v_dim=20,
    num_experts=16,
    top_k=2,
    expert_width=128,
    latent_dim=32,
    num_shared=1,
    vision_layers=2,
    vision_heads=4,
    vision_width=44,
    vision_qkv_width=64,
    vision_ffn_width=104,
    grid_height=10,
    grid_width=12,
)


NAMED = tuple(K3_RESERVED_OFFSETS.items())
OTHER_FILES = frozenset(
    """
    README.md config.json generation_config.json model.safetensors.index.json origin.json preprocessor_config.json
    tokenizer.json tokenizer_config.json
    """.split()  # noqa: SIM905 - a column of names
)
SHARD = re.compile(r"model-\d{5}-of-\d{6}\.safetensors")

README = """\
# k3-tiny

A Kimi K3 in miniature, made by `python data/make_k3_tiny.py`: the published file layout, names, types and structure
(KDA and gated MLA layers, latent mixture of experts in MXFP4, block attention residuals, vision tower, projector), with
other sizes.

**The weights are random.** This checkpoint proves that the machinery works: audit, plan, load, parallel layouts,
caches, pictures, streaming. It cannot answer meaningfully; what it says is noise, the same noise on every layout.

The tokenizer is real but small: 256 bytes and 1,024 merges learned from `data/corpus.txt`, then 256 reserved ids in the
places the published vocabulary gives them. `tests/data` makes the folder anew and compares it byte for byte.
"""


def train_tokenizer(corpus: Path = CORPUS) -> Tokenizer:
    """Byte-level BPE with Kimi's way of cutting text into words, and the block of markers behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus.read_text(encoding="utf-8").splitlines(), trainer)
    if tokenizer.get_vocab_size() != NUM_BASE_TOKENS:
        raise SystemExit(f"{corpus}: only {tokenizer.get_vocab_size() - 256} merges occur, {NUM_MERGES} are wanted")
    names = {offset: name for name, offset in NAMED}
    tokenizer.add_special_tokens(
        [
            AddedToken(names.get(offset, f"<|reserved_token_{NUM_BASE_TOKENS + offset}|>"), normalized=False)
            for offset in range(RESERVED_BLOCK)
        ]
    )
    return tokenizer


def make_checkpoint(out: Path) -> None:
    """Writes weights, configs, tokenizer and README into `out`, over an older set of the same files.

    Raises CheckpointError where `out` holds files that this script did not make.
    """
    _clear(out)
    first = NUM_BASE_TOKENS
    tokens = SpecialTokens(
        bos=first + K3_RESERVED_OFFSETS["[BOS]"],
        eos=first + K3_RESERVED_OFFSETS["<|end_of_msg|>"],  # K3 calls the end of a message its end-of-sequence id
        pad=first + K3_RESERVED_OFFSETS["[PAD]"],
        media=first + K3_RESERVED_OFFSETS["<|media_pad|>"],
    )
    write_checkpoint(out, k3_config(sizes=SIZES, tokens=tokens), seed=SEED)
    tokenizer = train_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2) + "\n")
    origin = {"weights": "random", "made_by": "data/make_k3_tiny.py", "seed": SEED}
    (out / "origin.json").write_text(json.dumps(origin) + "\n")
    (out / "README.md").write_text(README)


def _tokenizer_config() -> dict[str, object]:
    named = {str(NUM_BASE_TOKENS + offset): {"content": name, "special": True} for name, offset in NAMED}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": named,
    }


def _clear(out: Path) -> None:
    if not out.exists():
        return
    present = sorted(path.name for path in out.iterdir())
    strange = [name for name in present if name not in OTHER_FILES and not SHARD.fullmatch(name)]
    if strange:
        raise CheckpointError(
            f"folder holds files that this script did not make: {', '.join(strange[:5])}",
            where=out,
            next_step="Choose another --out",
        )
    for name in present:
        (out / name).unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded checkpoint.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out = parser.parse_args().out
    make_checkpoint(out)
    files = sorted(out.iterdir())
    print(f"{out}: {len(files)} files, {sum(path.stat().st_size for path in files):,} B")


if __name__ == "__main__":
    main()
