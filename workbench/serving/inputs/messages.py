"""K3's message form: chats into prompt ids, and generated ids back into the parts of an answer.

An element is  <|open|> name attributes <|sep|> body <|close|> name <|sep|>  and a message is the element
`message role="..."` followed by <|end_of_msg|>:

    <|open|>message role="user"<|sep|> ... <|close|>message<|sep|><|end_of_msg|>
    <|open|>message role="assistant"<|sep|><|open|>response<|sep|>          the model goes on from here

Only the markers are reserved ids. Names, attributes and bodies are ordinary text, each encoded for itself as published
(joining neighbours would merge across their border), so nothing a user writes can open or close an element.

Checkpoints of other families bring a template instead (see `chat_template`): `render_chat` and `AnswerStream` ask the
tokenizer which form is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from workbench.base import PromptTooLongError, RequestError, short_repr
from workbench.serving.inputs.chat_template import THINK_NAMES, Turn
from workbench.serving.inputs.images import ImageInput
from workbench.serving.inputs.tokenizer import TemplateForm, Tokenizer

__all__ = [
    "Answer",
    "AnswerDelta",
    "AnswerStream",
    "ContentPart",
    "ImagePart",
    "Message",
    "PromptImage",
    "PromptTokens",
    "Role",
    "TextPart",
    "check_chat",
    "check_text",
    "expand_images",
    "parse_answer",
    "render_chat",
]

Role = Literal["system", "user", "assistant"]
Channel = Literal["thinking", "response"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of one image inside a message; the images themselves are given in the same order."""


ContentPart = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `thinking` is what an assistant thought before it answered; `kind` marks a system message of a special
    type, such as `thinking-effort`."""

    role: Role
    content: str | Sequence[ContentPart] = ""
    thinking: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise RequestError("unknown role", found=repr(self.role), expected=" or ".join(get_args(Role)))
        if not isinstance(self.thinking, str) or not isinstance(self.kind, str):
            found = f"{type(self.thinking).__name__} and {type(self.kind).__name__}"
            raise RequestError("thinking and kind of a message are text", found=found)
        if self.thinking and self.role != "assistant":
            raise RequestError("only an assistant's message carries thinking", found=self.role)
        if not isinstance(self.content, str) and not _are_parts(self.content):
            found = f"{type(self.content).__name__} {str(self.content)[:80]}"
            raise RequestError("message content is text, or a list of TextPart and ImagePart", found=found)

    @property
    def parts(self) -> tuple[ContentPart, ...]:
        return (TextPart(self.content),) if isinstance(self.content, str) else tuple(self.content)


def _are_parts(content: object) -> bool:
    return isinstance(content, Sequence) and all(
        isinstance(x, ImagePart) or (isinstance(x, TextPart) and isinstance(x.text, str)) for x in content
    )


@dataclass(frozen=True, slots=True)
class PromptImage:
    """Where one image's features go: `count` pad tokens from `start` on."""

    key: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as the model reads it; `image_spans` lie in order and do not overlap."""

    token_ids: tuple[int, ...]
    image_spans: tuple[PromptImage, ...] = ()


# No text comes near this many characters per token: a longer one cannot fit, and need not be cut to know it.
MAX_CHARS_PER_TOKEN = 16


def check_chat(messages: Sequence[Message], *, num_images: int, room: int) -> None:
    """What can be said of a chat before its text is cut into tokens, of which `room` have a place in the cache.

    Raises RequestError for anything but messages and where there are more or fewer images than places for them,
    PromptTooLongError for a chat that is too long for any tokenizer.
    """
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Message) for message in messages):
        found = f"{type(messages).__name__} {short_repr(messages)}"
        raise RequestError("a question is text, a chat a list of Message", found=found)
    places = sum(isinstance(part, ImagePart) for message in messages for part in message.parts)
    if places != num_images:
        raise RequestError("images and their places in the chat differ in number", found=num_images, expected=places)
    num_parts = sum(max(1, len(message.parts)) for message in messages)
    if num_parts > room:
        raise PromptTooLongError(f"a chat of {num_parts:,} messages and parts does not fit into {room:,} tokens")
    texts = (part.text for message in messages for part in message.parts if isinstance(part, TextPart))
    check_text(sum(map(len, texts)) + sum(len(message.thinking) + len(message.kind) for message in messages), room=room)


def check_text(num_chars: int, *, room: int) -> None:
    """Raises PromptTooLongError for more characters than `room` tokens could ever hold."""
    if num_chars > MAX_CHARS_PER_TOKEN * room:
        raise PromptTooLongError(
            f"a text of {num_chars:,} characters does not fit into {room:,} tokens",
            expected=f"at most {MAX_CHARS_PER_TOKEN * room:,} characters",
            next_step="Shorten the prompt",
        )


def render_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, images: Sequence[ImageInput] = (), *, thinking: bool = False
) -> PromptTokens:
    """A chat as prompt ids that end where the assistant's answer begins.

    `images` are those of all ImageParts in order of appearance. With `thinking` the answer opens the think channel, and
    every earlier assistant message shows that channel, empty or not; without it the channel is left out everywhere.
    Raises RequestError for anything but messages, and where there are more or fewer images than places for them.
    """
    check_chat(messages, num_images=len(images), room=sys.maxsize)
    if tokenizer.form is not None:
        return _render_template(messages, tokenizer, tokenizer.form, images, thinking=thinking)
    writer = _Writer(tokenizer, images)
    for message in messages:
        writer.open("message", role=message.role, **({"type": message.kind} if message.kind else {}))
        if message.role == "assistant":
            if thinking:
                writer.open("think")
                writer.text(message.thinking if message.thinking.strip() else "")
                writer.close("think")
            writer.open("response")
            writer.content(message.parts)
            writer.close("response")
        else:
            writer.content(message.parts)
        writer.close("message")
        writer.ids.append(tokenizer.markers.end_of_msg)
    writer.open("message", role="assistant")
    writer.open("think" if thinking else "response")
    return expand_images(writer.ids, images, media_pad=tokenizer.markers.media_pad)


def _render_template(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    form: TemplateForm,
    images: Sequence[ImageInput],
    *,
    thinking: bool,
) -> PromptTokens:
    if isinstance(form.template, str):
        raise RequestError(
            "this checkpoint has no chat template that can be used",
            found=form.template,
            next_step="Put a chat_template.jinja into its folder, or ask for a completion of plain text",
        )
    turns: list[Turn] = []
    for message in messages:
        if message.kind:
            continue  # a way of K3's to ask for a kind of thinking; templates are told by `thinking`
        turn: dict[str, object] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        turns.append(turn)
    ids = form.template.token_ids(turns, encode=tokenizer.encode, reserved=tokenizer.reserved, thinking=thinking)
    if not images or form.media is None:
        return expand_images(ids, images, media_pad=-1)
    return expand_images(ids, images, media_pad=form.media)


def _content(message: Message) -> str | list[dict[str, str]]:
    """Text alone as text, which every template takes; parts where one of them is an image."""
    if not any(isinstance(part, ImagePart) for part in message.parts):
        return "".join(part.text for part in message.parts if isinstance(part, TextPart))
    return [{"type": "text", "text": x.text} if isinstance(x, TextPart) else {"type": "image"} for x in message.parts]


def expand_images(token_ids: Iterable[int], images: Sequence[ImageInput], *, media_pad: int) -> PromptTokens:
    """A prompt with one pad token per image -> the same with one per image token.

    Raises RequestError where pad tokens and images differ in number.
    """
    expanded: list[int] = []
    spans: list[PromptImage] = []
    waiting = list(reversed(images))
    num_places = 0
    for token_id in token_ids:
        if token_id != media_pad:
            expanded.append(token_id)
            continue
        num_places += 1
        if waiting:
            image = waiting.pop()
            spans.append(PromptImage(image.key, len(expanded), image.num_tokens))
            expanded.extend([media_pad] * image.num_tokens)
    if num_places != len(images):
        raise RequestError("images and pad tokens differ in number", found=len(images), expected=num_places)
    return PromptTokens(tuple(expanded), tuple(spans))


class _Writer:
    """Collects prompt ids, element by element, with one pad token per image."""

    def __init__(self, tokenizer: Tokenizer, images: Sequence[ImageInput]) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._waiting = list(reversed(images))

    def text(self, text: str) -> None:
        self.ids += self._tokenizer.encode(text)

    def open(self, name: str, **attributes: str) -> None:
        self.ids.append(self._tokenizer.markers.open)
        self.text(name)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"'):
                self.text(piece)
        self.ids.append(self._tokenizer.markers.sep)

    def close(self, name: str) -> None:
        self.ids.append(self._tokenizer.markers.close)
        self.text(name)
        self.ids.append(self._tokenizer.markers.sep)

    def content(self, parts: Iterable[ContentPart]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self.text(part.text)
            else:
                self._image(self._waiting.pop())

    def _image(self, image: ImageInput) -> None:
        markers = self._tokenizer.markers
        self.ids.append(markers.media_begin)
        self.text(f"image {image.size[0]}x{image.size[1]}")  # the original size, not the resized one
        self.ids += (markers.media_content, markers.media_pad, markers.media_end)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an assistant said. `is_complete` is False where generation ended before the message was closed."""

    thinking: str
    response: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of one channel."""

    channel: Channel
    text: str


_CHANNELS: dict[str, Channel] = {"think": "thinking", "response": "response"}


class AnswerStream:
    """Sorts generated ids into channels as they arrive; `thinking` must be what the prompt was rendered with.

    Never fails on what a model writes: markers out of place, unknown elements and text between channels are dropped,
    and nothing after the end of the message is read. No marker or element name ever shows up as text.
    """

    shows_markers = False

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = False) -> None:
        self.is_complete = False
        self._tokenizer = tokenizer
        self._thoughts: dict[int, Channel] = {}  # of a template's answers: what comes after these ids
        if tokenizer.form is not None:
            thinking = _opens_thinking(tokenizer.form, thinking)
            after: dict[str, Channel] = {THINK_NAMES[0]: "thinking", THINK_NAMES[1]: "response"}
            self._thoughts = {i: after[name] for name, i in tokenizer.reserved.items() if name in after}
        self._channel: Channel | None = "thinking" if thinking else "response"
        self._text = tokenizer.stream()
        self._tag: list[int] | None = None  # ids of the name between an open or close marker and its separator
        self._tag_opens = False

    @property
    def channel(self) -> Channel | None:
        """Where an ordinary id pushed now would go; None between channels and inside a marker's name."""
        return self._channel if self._tag is None and not self.is_complete else None

    def push(self, token_id: int) -> list[AnswerDelta]:
        """Text that became whole with this id, at most one delta: a marker may bring out the rest of its channel."""
        if self.is_complete:
            return []
        if token_id in self._tokenizer.stop_ids:
            self.is_complete = True
            return self._leave()
        if self._tokenizer.form is not None:
            return self._push_of_template(token_id)
        markers = self._tokenizer.markers
        if token_id in (markers.open, markers.close):
            left = self._leave()
            self._tag, self._tag_opens = [], token_id == markers.open
            return left
        if self._tag is not None:
            if token_id == markers.sep:
                self._enter(self._tokenizer.decode(self._tag))
            else:
                self._tag.append(token_id)
            return []
        if self._channel is None or self._tokenizer.is_reserved(token_id):
            return []
        return self._delta(self._text.push(token_id))

    def flush(self) -> list[AnswerDelta]:
        """The remainder after the last id."""
        return self._leave()

    def _push_of_template(self, token_id: int) -> list[AnswerDelta]:
        if token_id in self._thoughts:
            left = self._leave()
            self._channel, self._text = self._thoughts[token_id], self._tokenizer.stream()
            return left
        return [] if self._tokenizer.is_reserved(token_id) else self._delta(self._text.push(token_id))

    def _enter(self, tag: str) -> None:
        name = tag.split(" ", 1)[0]
        self._channel = _CHANNELS.get(name) if self._tag_opens else None
        self._text, self._tag = self._tokenizer.stream(), None

    def _leave(self) -> list[AnswerDelta]:
        left = self._delta(self._text.flush())
        self._channel = None
        return left

    def _delta(self, text: str) -> list[AnswerDelta]:
        return [AnswerDelta(self._channel, text)] if text and self._channel else []


def _opens_thinking(form: TemplateForm, thinking: bool) -> bool:
    return not isinstance(form.template, str) and form.template.opens_thinking(thinking=thinking)


def parse_answer(ids: Iterable[int], tokenizer: Tokenizer, *, thinking: bool = False) -> Answer:
    """Parts of an answer from all its ids: those generated after a prompt of `render_chat` with the same `thinking`."""
    stream = AnswerStream(tokenizer, thinking=thinking)
    deltas = [delta for token_id in ids for delta in stream.push(token_id)] + stream.flush()
    texts = {channel: "".join(d.text for d in deltas if d.channel == channel) for channel in get_args(Channel)}
    return Answer(thinking=texts["thinking"], response=texts["response"], is_complete=stream.is_complete)
