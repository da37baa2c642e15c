"""Text to ids and back. Structure is made of reserved ids, and text never becomes a reserved id.

Two forms of chats: Kimi K3's, made of markers (`messages`), and the Jinja template that other checkpoints ship
(`chat_template`). A tokenizer has one of them, or says why it has neither.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workbench.base import RequestError, TokenizerError
from workbench.serving.inputs.chat_template import ChatTemplate, read_chat_template
from workbench.serving.inputs.tokenizer_files import Vocabulary, read_named_ids, read_tiktoken, read_tokenizer_json
from workbench.spec import ModelSpec, read_json

__all__ = ["MARKER_NAMES", "Markers", "TemplateForm", "TextStream", "Tokenizer", "read_tokenizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Markers:
    """Ids that structure a prompt or an answer."""

    bos: int
    eos: int
    pad: int
    end_of_msg: int  # what K3's config calls its end-of-sequence id
    open: int
    close: int
    sep: int
    media_begin: int
    media_content: int
    media_end: int
    media_pad: int


MARKER_NAMES = {
    "bos": "[BOS]",
    "eos": "[EOS]",
    "pad": "[PAD]",
    "end_of_msg": "<|end_of_msg|>",
    "open": "<|open|>",
    "close": "<|close|>",
    "sep": "<|sep|>",
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "media_pad": "<|media_pad|>",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateForm:
    """Chats of a checkpoint whose structure is a Jinja template, or the reason why it has none that can be used.

    `stop_ids` end an answer; `bos` and `media` are the config's ids, None where it names none.
    """

    template: ChatTemplate | str
    stop_ids: tuple[int, ...]
    bos: int | None = None
    media: int | None = None


class Tokenizer:
    """A vocabulary with its markers. Holds no state between calls: safe to share between threads.

    Without `form` the vocabulary must have the markers of Kimi K3. `vocab_size`: that of the model, where it has more
    ids than the vocabulary; those are structure without a name.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, form: TemplateForm | None = None, vocab_size: int | None = None
    ) -> None:
        self.vocab_size = vocab_size or vocabulary.size
        self.form = form
        self._markers = _markers(vocabulary) if form is None else None
        self._encode = vocabulary.encode
        self._pieces = [vocabulary.pieces.get(i) for i in range(self.vocab_size)]
        self._names = dict(vocabulary.reserved)

    @property
    def markers(self) -> Markers:
        """Markers of K3's message form. Raises RequestError for a tokenizer of another form."""
        if self._markers is None:
            raise RequestError("this checkpoint has a chat template, not the message form of Kimi K3")
        return self._markers

    @property
    def reserved(self) -> dict[str, int]:
        """Named reserved ids."""
        return {name: token_id for token_id, name in self._names.items()}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids after which an answer is over."""
        return (self.markers.end_of_msg, self.markers.eos) if self.form is None else self.form.stop_ids

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """Ids after which the text of an answer is over: those that stop it, and K3's end of an element."""
        return self.stop_ids if self.form is not None else (*self.stop_ids, self.markers.close)

    @property
    def bos_id(self) -> int | None:
        return self.markers.bos if self.form is None else self.form.bos

    @property
    def media_id(self) -> int | None:
        """The id that holds the place of an image."""
        return self.markers.media_pad if self.form is None else self.form.media

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. A marker's name in `text` is spelled out like any other text, never as its id."""
        ids = self._encode(_well_formed(text))
        assert all(self._pieces[i] is not None for i in ids), "text became a reserved id"
        return ids

    def is_reserved(self, token_id: int) -> bool:
        """Whether the id is structure rather than text; unnamed ids of the vocabulary count as structure."""
        return self._pieces[self._checked(token_id)] is None

    def name(self, token_id: int) -> str:
        """Printable name of an id: a marker's name, or the text of an ordinary token."""
        piece = self._pieces[self._checked(token_id)]
        return self._reserved_name(token_id) if piece is None else piece.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, show_markers: bool = False) -> bytes:
        """Bytes that the token adds to a text; none for a reserved id unless its name is wanted.

        Raises TokenizerError for an id outside the vocabulary.
        """
        piece = self._pieces[self._checked(token_id)]
        if piece is not None:
            return piece
        return self._reserved_name(token_id).encode() if show_markers else b""

    def decode(self, ids: Iterable[int], *, show_markers: bool = False) -> str:
        """Text of all ids together, with U+FFFD for bytes that are no UTF-8; reserved ids are left out or named."""
        data = b"".join(self.token_bytes(i, show_markers=show_markers) for i in ids)
        return data.decode("utf-8", "replace")

    def stream(self, *, show_markers: bool = False) -> TextStream:
        """A decoder for ids that arrive one by one; reserved ids are left out or named."""
        return TextStream(self, show_markers=show_markers)

    def _reserved_name(self, token_id: int) -> str:
        return self._names.get(token_id, f"<|reserved_token_{token_id}|>")

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError("id outside the vocabulary", found=token_id, expected=f"0 to {self.vocab_size - 1}")
        return token_id


class TextStream:
    """Text as its tokens arrive: each character is given out once, when its last byte is there.

    The pieces from `push` and the last one from `flush` join to exactly `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, show_markers: bool = False) -> None:
        self._tokenizer, self._show_markers = tokenizer, show_markers
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often none. Raises TokenizerError outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, show_markers=self._show_markers))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character whose last bytes never came, else nothing."""
        return self._decoder.decode(b"", final=True)


def read_tokenizer(root: Path | str, spec: ModelSpec) -> Tokenizer:
    """Tokenizer of a checkpoint folder, checked against the model.

    `tokenizer.json` is preferred; otherwise `tiktoken.model` with the reserved ids of `tokenizer_config.json` or, where
    that names none, at K3's published places. A family other than Kimi K3 whose vocabulary lacks K3's markers takes the
    chat template of the folder. Raises TokenizerError where no file is there, where one is unusable, or where it
    disagrees with `spec` in vocabulary size or special ids.
    """
    root = Path(root)
    config_path = root / "tokenizer_config.json"
    named = read_named_ids(config_path)
    if os.path.lexists(root / "tokenizer.json"):  # a link into nothing is a broken file, not an absent one
        vocabulary = read_tokenizer_json(root / "tokenizer.json")
        differing = {i: name for i, name in (named or {}).items() if vocabulary.reserved.get(i) != name}
        if differing:
            raise TokenizerError(
                "names reserved ids that tokenizer.json does not have", where=config_path, found=differing
            )
    elif os.path.lexists(root / "tiktoken.model"):
        vocabulary = read_tiktoken(root / "tiktoken.model", named)
    else:
        raise TokenizerError(
            "no tokenizer file", where=root, expected="tokenizer.json or tiktoken.model", next_step="Copy it there"
        )
    if spec.family != "kimi_k3" and not set(MARKER_NAMES.values()) <= set(vocabulary.reserved.values()):
        return _of_template(root, spec, vocabulary)
    tokenizer = Tokenizer(vocabulary)
    _check(tokenizer, spec, vocabulary.source)
    return tokenizer


def _of_template(root: Path, spec: ModelSpec, vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.size > spec.vocab_size:
        raise TokenizerError(
            "has more ids than the model",
            where=vocabulary.source,
            found=vocabulary.size,
            expected=f"at most {spec.vocab_size}",
            next_step="Is this the tokenizer of another model?",
        )
    stops = _stop_ids(root, spec)
    tokens = {"bos_token": spec.tokens.bos, "eos_token": spec.tokens.eos, "pad_token": spec.tokens.pad}
    names = {key: vocabulary.reserved[token_id] for key, token_id in tokens.items() if token_id in vocabulary.reserved}
    form = TemplateForm(
        template=read_chat_template(root, names),
        stop_ids=stops,
        bos=spec.tokens.bos if spec.tokens.bos >= 0 else None,
        media=spec.tokens.media,
    )
    return Tokenizer(vocabulary, form=form, vocab_size=spec.vocab_size)


def _stop_ids(root: Path, spec: ModelSpec) -> tuple[int, ...]:
    """Ids that end an answer, of the config and of the generation config. TokenizerError where neither names one."""
    found: list[object] = [spec.tokens.eos, *spec.tokens.more_eos]
    path = root / "generation_config.json"
    if path.is_file():
        entry = read_json(path).get("eos_token_id")
        found += entry if isinstance(entry, list) else [entry]
    stops = [x for x in found if isinstance(x, int) and not isinstance(x, bool) and 0 <= x < spec.vocab_size]
    if not stops:
        raise TokenizerError(
            "no id ends an answer", where=root, expected="eos_token_id in config.json or generation_config.json"
        )
    return tuple(dict.fromkeys(stops))


def _markers(vocabulary: Vocabulary) -> Markers:
    ids = {name: i for i, name in vocabulary.reserved.items()}
    missing = [name for name in MARKER_NAMES.values() if name not in ids]
    if missing:
        raise TokenizerError("structure markers are missing", where=vocabulary.source, found=f"no {', '.join(missing)}")
    return Markers(**{attribute: ids[name] for attribute, name in MARKER_NAMES.items()})


def _check(tokenizer: Tokenizer, spec: ModelSpec, source: Path) -> None:
    markers, tokens = tokenizer.markers, spec.tokens
    if tokenizer.vocab_size != spec.vocab_size:
        raise TokenizerError(
            "vocabulary size differs from the model's",
            where=source,
            found=tokenizer.vocab_size,
            expected=spec.vocab_size,
            next_step="Is this the tokenizer of another model?",
        )
    wanted = {"bos": tokens.bos, "end_of_msg": tokens.eos, "pad": tokens.pad, "media_pad": tokens.media}
    for attribute, expected in wanted.items():
        found = getattr(markers, attribute)
        if expected is not None and found != expected:
            raise TokenizerError(
                f"id of {MARKER_NAMES[attribute]} differs from the model's",
                where=source,
                found=found,
                expected=expected,
            )


def _well_formed(text: str) -> str:
    """Text without lone surrogates, which have no UTF-8 form: a pair becomes its character, a half one U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
