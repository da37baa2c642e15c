"""The tokenizer of the models trained here: byte-level BPE over the generated language, and K3's reserved block.

    [0, 256)                     the single bytes: any text can be written
    [256, first)                 merges
    [first, first + 256)         reserved ids in K3's published places; <|open|>, <|media_pad|>, ... among them

Text is cut as Kimi cuts it, with one change: digits stand alone, so that a number is read and written digit by digit
and a number never seen before is made of tokens that were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from workbench.base import TokenizerError
from workbench.serving.inputs.tokenizer_files import K3_RESERVED_OFFSETS, KIMI_SPLIT, RESERVED_BLOCK
from workbench.training.data.domain import Fact
from workbench.training.data.looking import caption
from workbench.training.data.questions import ask, kinds_of
from workbench.training.data.scenes import COLOURS, SHAPES, SIZES, WORDS, make_scene

__all__ = ["VOCAB_SIZE", "corpus_lines", "train_tokenizer", "write_tokenizer"]

VOCAB_SIZE = 3072
_SPLIT = KIMI_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_ENVELOPE = ("message", " role", '="', "system", "user", "assistant", '"', "response", "think", "image ", "x")
_SCENES, _DOMAIN_TIMES = 4000, 6


def corpus_lines(facts: Sequence[Fact], seed: int = 0) -> Iterator[str]:
    """Lines to learn merges from: the texts of generated scenes, the facts, and the pieces of the message form.

    Held-out phrasings are left out, so that their words are as new to the tokenizer as to the model.
    """
    rng = np.random.default_rng(seed)
    for _ in range(_SCENES):
        scene = make_scene(rng)
        yield caption(scene)
        for kind in kinds_of(scene):
            if (question := ask(scene, kind, rng)) is not None:
                yield question.text
                yield question.answer
                yield question.thought
    for _ in range(_DOMAIN_TIMES):
        for fact in facts:
            yield from fact.questions(is_held_out=False)
            yield fact.answer
            yield fact.answer
        yield from (f" {word} {word.capitalize()}" for word in (*WORDS, *COLOURS, *SHAPES, *SIZES))
    yield from (piece for piece in _ENVELOPE for _ in range(_SCENES))


def train_tokenizer(lines: Iterable[str], vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    """Tokenizer with `vocab_size - 512` merges. Raises TokenizerError where the text holds fewer different pairs."""
    first = vocab_size - RESERVED_BLOCK
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=first, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != first:
        raise TokenizerError(
            "the text holds too few different pairs for this vocabulary",
            found=f"{tokenizer.get_vocab_size() - 256} merges",
            expected=f"{first - 256}",
            next_step="Ask for a smaller vocabulary or give more text",
        )
    names = {offset: name for name, offset in K3_RESERVED_OFFSETS.items()}
    tokenizer.add_special_tokens(
        [
            AddedToken(names.get(offset, f"<|reserved_token_{first + offset}|>"), normalized=False)
            for offset in range(RESERVED_BLOCK)
        ]
    )
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, root: Path | str) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into an existing folder."""
    root = Path(root)
    first = tokenizer.get_vocab_size() - RESERVED_BLOCK
    tokenizer.save(str(root / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",  # K3 calls the end of a message its end of sequence
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(first + offset): {"content": name, "special": True} for name, offset in K3_RESERVED_OFFSETS.items()
        },
    }
    (root / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
