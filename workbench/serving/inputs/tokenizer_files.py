"""The two kinds of tokenizer file, read into one record: byte-level `tokenizer.json`, and tiktoken ranks.

Both kinds end as the same three things: a function from ordinary text to ids, the bytes behind each ordinary id, and
the names of the reserved ids. The function knows no reserved name at all, so no text can produce a reserved id. Files
are treated as hostile: sizes are bounded, every number is checked, and a file that would lose text is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tiktoken
import tokenizers

from workbench.base import TokenizerError, read_small_file

__all__ = [
    "K3_RESERVED_OFFSETS",
    "KIMI_SPLIT",
    "MAX_RUN",
    "RESERVED_BLOCK",
    "Vocabulary",
    "read_named_ids",
    "read_tiktoken",
    "read_tokenizer_json",
]

MAX_FILE_BYTES = 128 << 20  # published vocabularies stay under 40 MB; a hostile file must not fill memory
MAX_ID = 1 << 24

RESERVED_BLOCK = 256  # ids that Kimi models keep free behind the ranks, named or not
# Published places of the named ones inside that block, counted from its start.
K3_RESERVED_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}

_Core = TypeVar("_Core")

# How Kimi K2 and K3 cut text before merging; the first alternative that fits wins. Han runs come first and are kept out
# of words, a word may carry one leading sign and an English contraction, and numbers go in groups of three digits.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# A run of one class (blank or not) is cut every this many characters, as published: it bounds the work per merge.
MAX_RUN = 25_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer file as the rest of the workbench sees it.

    `encode` maps well-formed text to ordinary ids only. `pieces` holds the bytes of each ordinary id, `reserved` the
    name of each reserved one; ids below `size` that stand in neither are unnamed reserved ids.
    """

    encode: Callable[[str], list[int]]
    pieces: Mapping[int, bytes]
    reserved: Mapping[int, str]
    size: int
    source: Path


def read_tiktoken(path: Path, named: Mapping[int, str] | None = None) -> Vocabulary:
    """Vocabulary of a `tiktoken.model` file, a base64 token and its rank a line, with Kimi's split and reserved block.

    `named` gives the reserved ids by name where a `tokenizer_config.json` does; otherwise the published K3 places are
    used. Raises TokenizerError for a malformed line, a rank twice or missing, or a byte that has no token.
    """
    ranks = dict(_rank_lines(path))
    first = len(ranks)
    if sorted(ranks.values()) != list(range(first)):
        raise TokenizerError("ranks are not 0, 1, 2, ... each once", where=path, found=f"{first} distinct tokens")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError("single bytes without a token: text would be lost", where=path, found=missing[:8])
    if named is None:
        named = {first + offset: name for name, offset in K3_RESERVED_OFFSETS.items()}
    outside = {i: name for i, name in named.items() if not first <= i < first + RESERVED_BLOCK}
    if outside:
        raise TokenizerError(
            "reserved ids lie outside the block behind the ranks",
            where=path,
            found=outside,
            expected=f"{first} to {first + RESERVED_BLOCK - 1}",
        )
    core = _built(
        path,
        lambda: tiktoken.Encoding(name="kimi", pat_str=KIMI_SPLIT, mergeable_ranks=ranks, special_tokens={}),
    )

    def encode(text: str) -> list[int]:
        return [token for part in _bounded_runs(text, MAX_RUN) for token in core.encode_ordinary(part)]

    return Vocabulary(
        encode=encode,
        pieces={rank: token for token, rank in ranks.items()},
        reserved=dict(named),
        size=first + RESERVED_BLOCK,
        source=path,
    )


def _rank_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    seen: set[bytes] = set()
    for number, line in enumerate(_read_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                "not a base64 token and a rank", where=f"{path}, line {number}", found=repr(line[:60])
            ) from None
        if not token or token in seen or not 0 <= rank < MAX_ID:
            raise TokenizerError(
                "token is empty, stands twice, or has an unusable rank",
                where=f"{path}, line {number}",
                found=f"{token[:40]!r}, rank {rank}",
            )
        seen.add(token)
        yield token, rank


def _bounded_runs(text: str, limit: int) -> Iterator[str]:
    """Cuts inside runs of blanks or of non-blanks that are longer than `limit`, and nowhere else."""
    start = 0
    for run in re.finditer(rf"\s{{{limit + 1},}}|\S{{{limit + 1},}}", text):
        for cut in range(run.start() + limit, run.end(), limit):
            yield text[start:cut]
            start = cut
    yield text[start:]


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Vocabulary of a Hugging Face `tokenizer.json` with byte-level BPE; every added token is a reserved id.

    Added tokens are reserved whether or not the file calls them special: the published K3 table leaves that mark off
    `<|close|>` and `<|sep|>`. Raises TokenizerError for another kind of tokenizer, an id twice, or a byte without one.
    """
    content = _json_object(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        found = model.get("type") if isinstance(model, dict) else model
        raise TokenizerError("not a BPE tokenizer", where=path, found=found, expected="model of type BPE with a vocab")
    for stage in ("pre_tokenizer", "decoder"):
        if not _is_byte_level(content.get(stage)):
            raise TokenizerError(f"{stage} is not byte-level", where=path, expected="ByteLevel")
    reserved = _named_ids(path, content.get("added_tokens") or [], of=lambda x: (x["id"], x["content"]))
    names = set(reserved.values())
    ordinary = {token: _checked_id(path, i) for token, i in model["vocab"].items() if token not in names}
    taken = set(ordinary.values())
    if len(taken) != len(ordinary) or taken & set(reserved):
        raise TokenizerError("an id stands for two tokens", where=path)
    pieces = {i: _piece(token) for token, i in ordinary.items()}
    missing = set(range(256)) - {piece[0] for piece in pieces.values() if len(piece) == 1}
    if missing:
        raise TokenizerError("single bytes without a token: text would be lost", where=path, found=sorted(missing)[:8])
    # What is left knows no reserved name: neither as an added token nor, for files that list them twice, in the vocab.
    plain = {
        **content,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": {**model, "vocab": ordinary, "unk_token": None},
    }
    core = _built(path, lambda: tokenizers.Tokenizer.from_str(json.dumps(plain)))

    def encode(text: str) -> list[int]:
        return list(core.encode(text, add_special_tokens=False).ids)

    size = max(max(taken), max(reserved, default=0)) + 1
    return Vocabulary(encode=encode, pieces=pieces, reserved=reserved, size=size, source=path)


def _built(path: Path, build: Callable[[], _Core]) -> _Core:
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # both libraries raise bare Exception, and panics that are no Exception
        raise TokenizerError(f"tokenizer cannot be built: {error}", where=path) from None


def read_named_ids(path: Path) -> dict[int, str] | None:
    """Reserved ids by the `added_tokens_decoder` of a `tokenizer_config.json`; None where there is no such table."""
    if not os.path.lexists(path):
        return None
    table = _json_object(path).get("added_tokens_decoder")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise TokenizerError("added_tokens_decoder is not an object", where=path)
    return _named_ids(path, table.items(), of=lambda x: (int(x[0]), x[1]["content"]))


def _named_ids(path: Path, entries: object, *, of: Callable[..., tuple[object, object]]) -> dict[int, str]:
    named: dict[int, str] = {}
    try:
        pairs = [of(entry) for entry in entries]  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise TokenizerError(f"added tokens are malformed: {error!r}", where=path) from None
    for token_id, name in pairs:
        checked = _checked_id(path, token_id)
        if not isinstance(name, str) or not name or checked in named or name in named.values():
            raise TokenizerError("an added token is unnamed or stands twice", where=path, found=f"{name!r} = {checked}")
        named[checked] = name
    return named


def _checked_id(path: Path, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_ID:
        raise TokenizerError("not a usable token id", where=path, found=repr(value)[:60])
    return value


def _is_byte_level(stage: object) -> bool:
    if not isinstance(stage, dict):
        return False
    inner = [*(stage.get("pretokenizers") or ()), *(stage.get("decoders") or ())]
    return stage.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in inner)


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where printable, else one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def _piece(token: str) -> bytes:
    # A token with a letter outside the alphabet is plain text, as the byte-level decoder of the library has it.
    if all(letter in _BYTE_OF_LETTER for letter in token):
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    return token.encode("utf-8", "replace")


def _read_bytes(path: Path) -> bytes:
    return read_small_file(path, max_bytes=MAX_FILE_BYTES, error=TokenizerError)


def _json_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"not readable as JSON: {error}", where=path) from None
    if not isinstance(content, dict):
        raise TokenizerError("not a JSON object", where=path, found=type(content).__name__)
    return content
