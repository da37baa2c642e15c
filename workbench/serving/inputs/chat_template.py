"""Chat templates that ship with a checkpoint: Jinja text, rendered in a sandbox, then cut into ids.

A template is text of a download and only ever filled in: the sandbox gives it no attribute, call or name beyond those
of the messages. Chats that a publisher lays out in Python code are refused, since that code is not run.

What a user wrote never becomes structure. Before rendering, the first letter of every reserved name is replaced in the
messages by a stand-in that no text has; after the structure has been found, the stand-ins are turned back.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.base import RequestError, TokenizerError, read_small_file

__all__ = ["ChatTemplate", "Turn", "read_chat_template"]

MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
STAND_INS = range(0xE000, 0xF900)  # private use: no character has these
THINK_NAMES = ("<think>", "</think>")
Turn = Mapping[str, Any]  # "role", "content" (text, or parts of type "text" and "image"), maybe "reasoning_content"


class ChatTemplate:
    """One template with the names of the tokens it may write. Raises TokenizerError where it cannot be compiled."""

    def __init__(self, source: str, *, where: Path, names: Mapping[str, str] | None = None) -> None:
        self.where, self._names = where, dict(names or {})
        self._opens: dict[bool, bool] = {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(
                f"chat template cannot be read: {error}",
                where=where,
                expected="Jinja with the filters, tests and names of the library; code that it needs is not run",
            ) from None

    def render(self, turns: Sequence[Turn], *, thinking: bool = False, continues: bool = True) -> str:
        """Text of a chat, up to where the answer begins. Raises RequestError where the template refuses these turns."""
        try:
            return self._template.render(
                messages=list(turns),
                add_generation_prompt=continues,
                enable_thinking=thinking,
                thinking=thinking,
                tools=None,
                documents=None,
                **self._names,
            )
        except jinja2.exceptions.SecurityError as error:
            raise TokenizerError(
                f"chat template asks for what the sandbox does not give: {error}",
                where=self.where,
                next_step="Code that it needs is not run; ask for completions of plain text",
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}"[:300]) from None

    def token_ids(
        self,
        turns: Sequence[Turn],
        *,
        encode: Callable[[str], list[int]],
        reserved: Mapping[str, int],
        thinking: bool = False,
    ) -> list[int]:
        """Ids of a chat: the template's own reserved names become ids, text of the messages never does."""
        guard = _Guard(reserved, turns)
        text = self.render([guard.turn(turn) for turn in turns], thinking=thinking)
        ids: list[int] = []
        for piece in guard.split(text):
            ids += [reserved[piece]] if piece in reserved else encode(guard.restored(piece))
        return ids

    def opens_thinking(self, *, thinking: bool) -> bool:
        """Whether an answer begins inside the thoughts: the generation prompt has opened them and not closed them."""
        if thinking not in self._opens:
            try:
                text = self.render([{"role": "user", "content": "?"}], thinking=thinking)
            except RequestError:  # a template for chats of another shape, which have their say when they are rendered
                text = ""
            opened, closed = (text.rfind(name) for name in THINK_NAMES)
            self._opens[thinking] = opened > closed
        return self._opens[thinking]


class _Guard:
    """Stand-ins for the first letters of reserved names."""

    def __init__(self, reserved: Iterable[str], turns: Sequence[Turn]) -> None:
        used = set(json.dumps(list(map(dict, turns)), ensure_ascii=False))
        free = (chr(code) for code in STAND_INS if chr(code) not in used)
        letters = sorted({name[0] for name in reserved})
        self._to = {ord(letter): stand_in for letter, stand_in in zip(letters, free, strict=False)}
        if len(self._to) < len(letters):
            raise RequestError("messages are full of characters of private use")
        self._back = {ord(stand_in): chr(letter) for letter, stand_in in self._to.items()}
        longest_first = sorted(reserved, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def turn(self, turn: Turn) -> Turn:
        return {key: value if key == "role" else self._masked(value) for key, value in turn.items()}

    def split(self, text: str) -> list[str]:
        """Reserved names and the text between them."""
        return [piece for piece in (self._names.split(text) if self._names else [text]) if piece]

    def restored(self, text: str) -> str:
        return text.translate(self._back)

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(self._to)
        return [{**part, "text": self._masked(part["text"])} if "text" in part else part for part in value]


def read_chat_template(root: Path, names: Mapping[str, str]) -> ChatTemplate | str:
    """The template of a checkpoint folder, or the reason why there is none.

    `chat_template.jinja` is preferred to the entry of `tokenizer_config.json`, of which a list has one called
    "default". `names` are the tokens a template may write: "bos_token" and the like. Raises TokenizerError for one that
    cannot be compiled.
    """
    path = root / TEMPLATE_FILE
    if os.path.lexists(path):
        return ChatTemplate(_text(path), where=path, names=names)
    config = root / CONFIG_FILE
    content: Any = {}
    if os.path.lexists(config):
        try:
            content = json.loads(_text(config, max_bytes=16 * MAX_TEMPLATE_BYTES))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"not readable as JSON: {error}", where=config) from None
    entry = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(entry, list):
        named = {x.get("name"): x.get("template") for x in entry if isinstance(x, dict)}
        entry = named.get("default")
    if isinstance(entry, str):
        if len(entry) > MAX_TEMPLATE_BYTES:
            raise TokenizerError("chat template is too long", where=config, found=len(entry))
        return ChatTemplate(entry, where=config, names=names)
    code = sorted(path.name for path in root.glob("*.py"))
    if code or (isinstance(content, dict) and content.get("auto_map")):
        return f"its chats are laid out by code that is not run ({', '.join(code) or 'auto_map of ' + CONFIG_FILE})"
    return f"neither {TEMPLATE_FILE} nor a chat_template in {CONFIG_FILE} is there"


def _text(path: Path, max_bytes: int = MAX_TEMPLATE_BYTES) -> str:
    try:
        return read_small_file(path, max_bytes=max_bytes, error=TokenizerError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"not UTF-8: {error}", where=path) from None


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a trainer looks at; the text inside stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the library)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
