"""Small tokenizer files of both kinds, made from nothing, with merges that matter."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.serving.inputs import Tokenizer, read_tokenizer
from workbench.serving.inputs.tokenizer_files import K3_RESERVED_OFFSETS
from workbench.spec import ModelSpec, SpecialTokens, read_spec

BASE_SPEC = read_spec(Path(__file__).resolve().parents[1] / "golden" / "k3-tiny-a")

# Pieces longer than a byte, each reachable by merging two earlier ones. Some end inside a character.
MERGED = [
    b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"us", b"er", b"user", b"ro", b"le",
    b" ro", b" role", b'="', b"me", b"ss", b"ag", b"mess", b"age", b"message", b"th", b"in", b"ink", b"think", b"im",
    b"imag", b"image", b"12", b"123", b"\n\n", b"  ",
    b"\xed\x95", b"\xed\x95\x9c",  # 한 in two steps
    b"\xf0\x9f", b"\x99\x82",  # halves of an emoji
    b"\xe4\xb8", b"\xe4\xb8\xad", b"\xe4\xb8\xada",  # a Han letter, and one glued to a Latin letter
    b"<|", b"|>", b"op", b"en", b"open", b"<|open",  # most of a marker's name as ordinary text
]  # fmt: skip
PIECES = [bytes([b]) for b in range(256)] + MERGED
FIRST_RESERVED = len(PIECES)


def spec_for(vocab_size: int, ids: dict[str, int]) -> ModelSpec:
    tokens = SpecialTokens(bos=ids["[BOS]"], eos=ids["<|end_of_msg|>"], pad=ids["[PAD]"], media=ids["<|media_pad|>"])
    return replace(BASE_SPEC, vocab_size=vocab_size, tokens=tokens)


PUBLISHED_IDS = {name: FIRST_RESERVED + offset for name, offset in K3_RESERVED_OFFSETS.items()}
SPEC = spec_for(FIRST_RESERVED + 256, PUBLISHED_IDS)


def rank_lines(pieces: Iterable[bytes] = PIECES) -> list[str]:
    return [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]


def write_tiktoken(root: Path, *, lines: Iterable[str] | None = None, named: dict[int, str] | None = None) -> Path:
    (root / "tiktoken.model").write_text("\n".join(rank_lines() if lines is None else lines) + "\n")
    if named is not None:
        table = {str(i): {"content": name, "special": True} for i, name in named.items()}
        (root / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    return root


def letters() -> dict[int, str]:
    """Byte-level alphabet, as GPT-2 defined it."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(rest)}


def tokenizer_json() -> dict[str, Any]:
    """A byte-level BPE with the same pieces, and K3's reserved ids; two of them not marked special, as published."""
    alphabet = letters()
    names = ["".join(alphabet[b] for b in piece) for piece in PIECES]
    known, merges = set(names[:256]), []
    for name in names[256:]:
        cut = next(i for i in range(1, len(name)) if name[:i] in known and name[i:] in known)
        merges.append([name[:cut], name[cut:]])
        known.add(name)
    added = [
        {
            "id": i,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": name not in ("<|close|>", "<|sep|>"),
        }
        for name, i in PUBLISHED_IDS.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": merges,
        },
    }


def write_json(root: Path, content: object) -> Path:
    (root / "tokenizer.json").write_text(json.dumps(content))
    return root


def both_kinds(root: Path) -> dict[str, Tokenizer]:
    """The same vocabulary, read from either kind of file."""
    (root / "ranks").mkdir()
    (root / "json").mkdir()
    return {
        "tiktoken.model": read_tokenizer(write_tiktoken(root / "ranks"), SPEC),
        "tokenizer.json": read_tokenizer(write_json(root / "json", tokenizer_json()), SPEC),
    }
