"""Answers held to a JSON schema, a regular expression or a list of choices. Needs the `structured` extra (llguidance).

The engine asks before each step which ids may come next and tells afterwards which one came. What a model thinks is
free; the response is held to the grammar, and once the grammar is satisfied the message may end.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.base import RequestError
from workbench.serving.inputs import AnswerStream, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["AnswerConstraint", "Grammars"]

# Blanks between the parts of a document: as a pretty printer sets them, but not without end.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
MAX_GRAMMAR = 1 << 18  # characters


class Grammars:
    """Grammars over one tokenizer, whose tokens become a table at the first use. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def json_schema(self, schema: Mapping[str, Any], *, thinking: bool = False) -> AnswerConstraint:
        """Documents that `schema` describes. Raises RequestError for one that is wrong or too large."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema is not JSON: {error}") from None
        return self._start(_library().LLMatcher.grammar_from_json_schema, text, thinking, overrides=JSON_OPTIONS)

    def regex(self, pattern: str, *, thinking: bool = False) -> AnswerConstraint:
        """Texts that `pattern` matches as a whole. Raises RequestError for one that is wrong or too large."""
        return self._start(_library().LLMatcher.grammar_from_regex, pattern, thinking)

    def choice(self, texts: Sequence[str], *, thinking: bool = False) -> AnswerConstraint:
        """One of `texts`, letter by letter."""
        if not texts or not all(texts):
            raise RequestError("choices must be a list of non-empty texts", found=repr(list(texts))[:80])
        return self.regex("|".join(f"(?:{re.escape(text)})" for text in texts), thinking=thinking)

    def _start(self, compile_: Any, source: str, thinking: bool, **options: Any) -> AnswerConstraint:
        if len(source) > MAX_GRAMMAR:
            raise RequestError(
                "the grammar is too large", found=f"{len(source):,} characters", expected=f"{MAX_GRAMMAR:,}"
            )
        try:
            grammar = compile_(source, **options)
        except ValueError as error:
            raise RequestError(f"the grammar is not usable: {error}"[:300]) from None
        matcher = _library().LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar is not usable: {matcher.get_error()}"[:300])
        return AnswerConstraint(self._tokenizer, matcher, thinking=thinking)

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._table is None:
                library = _library()
                self._table = library.LLTokenizer(
                    library.TokenizerWrapper(_Vocabulary(self._tokenizer)), eos_token=list(self._tokenizer.closing_ids)
                )
            return self._table


class AnswerConstraint:
    """One answer under way. `allowed` before each token and `accept` after it, by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, matcher: LLMatcher, *, thinking: bool) -> None:
        self._tokenizer, self._matcher = tokenizer, matcher
        self._thinks_before = thinking
        self._stream = AnswerStream(tokenizer, thinking=thinking)
        self._is_done = False
        flags = np.zeros(-(-tokenizer.vocab_size // 32) * 32, bool)
        flags[list(tokenizer.stop_ids)] = True
        self._stops = np.packbits(flags, bitorder="little").tobytes()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, such as a bound of its size."""
        return self._matcher.get_error() or None if self._matcher.is_error() else None

    def allowed(self) -> bytes:
        """One bit per id that may come next, in little-endian words of 32; empty where all may."""
        if self._is_done or self.error is not None:
            return self._stops
        if self._stream.channel != "response":
            return b""
        return bytes(self._matcher.compute_bitmask())

    def accept(self, token_id: int) -> None:
        """The id that came."""
        is_response = self._stream.channel == "response"
        self._stream.push(token_id)
        if is_response and not self._is_done:
            self._matcher.consume_token(token_id)
            self._is_done = token_id in self._tokenizer.closing_ids

    def anew(self) -> AnswerConstraint:
        """The same grammar for another answer."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return AnswerConstraint(self._tokenizer, matcher, thinking=self._thinks_before)


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = tokenizer.stop_ids[0]
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i, show_markers=True) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_reserved(i)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "this server cannot hold answers to a grammar", next_step="Install the `structured` extra: llguidance"
        ) from None
    return llguidance
