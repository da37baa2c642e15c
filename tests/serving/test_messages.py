"""K3's message form: golden ids of whole chats, text that cannot forge structure, and answers read back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import FIRST_RESERVED, PIECES, PUBLISHED_IDS, both_kinds

from workbench.base import RequestError
from workbench.serving.inputs import (
    AnswerStream,
    ImageInput,
    ImagePart,
    Message,
    TextPart,
    Tokenizer,
    expand_images,
    parse_answer,
    render_chat,
)

INDEX = {piece: i for i, piece in enumerate(PIECES)}
EOM, OPEN, CLOSE, SEP = (PUBLISHED_IDS[name] for name in ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"))
BEGIN, CONTENT, END, PAD = (PUBLISHED_IDS[f"<|media_{x}|>"] for x in ("begin", "content", "end", "pad"))
MARKERS = {"<": OPEN, "/": CLOSE, ">": SEP, "!": EOM, "{": BEGIN, "}": END, "=": CONTENT, "*": PAD}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return both_kinds(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(params=["tiktoken.model", "tokenizer.json"])
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def image(width: int, height: int, num_tokens: int, key: str = "k") -> ImageInput:
    rows = num_tokens * 2
    return ImageInput(
        patches=np.zeros((rows * 2, 3, 14, 14), np.uint8),
        grid=(1, rows, 2),
        size=(width, height),
        num_tokens=num_tokens,
        key=key,
    )


# Words that the small vocabulary has no piece for, cut by hand as its merges cut them.
CUTS = {
    "system": ["s", "y", "s", "t", "e", "m"],
    "assistant": ["a", "ss", "i", "s", "t", "a", "n", "t"],
    "response": ["r", "e", "s", "p", "o", "n", "s", "e"],
    "tools": ["t", "o", "o", "l", "s"],
    "call": ["c", "a", "ll"],
    " type": [" ", "t", "y", "p", "e"],
    " tool": [" ", "t", "o", "o", "l"],
}


def ids_of(*pieces: str) -> tuple[int, ...]:
    """Ids written out by hand: markers by their letter in MARKERS, words of CUTS, else pieces of the vocabulary."""
    ids: list[int] = []
    for piece in pieces:
        if piece in MARKERS:
            ids.append(MARKERS[piece])
        else:
            ids.extend(INDEX[part.encode()] for part in CUTS.get(piece, [piece]))
    return tuple(ids)


def opened(name: str, *attributes: str) -> list[str]:
    """`<|open|>name key="value"<|sep|>` by pieces; attributes come as key, value, key, value."""
    pieces = ["<", name]
    for key, value in zip(attributes[::2], attributes[1::2], strict=True):
        pieces += [f" {key}", '="', value, '"']
    return [*pieces, ">"]


def closed(name: str) -> list[str]:
    return ["/", name, ">"]


SYSTEM, USER, ASSISTANT = (opened("message", "role", role) for role in ("system", "user", "assistant"))
MESSAGE_END = [*closed("message"), "!"]
ANSWER = [*ASSISTANT, *opened("response")]
THINK = [*ASSISTANT, *opened("think")]


def message(role: list[str], *body: str) -> list[str]:
    return [*role, *body, *MESSAGE_END]


TWO_IMAGES = (image(97, 61, 3, "first"), image(12, 123, 2, "second"))
CHATS: dict[str, tuple[list[Message], tuple[ImageInput, ...], bool, list[str]]] = {
    "one question": ([Message("user", "hello world")], (), False, [*message(USER, "hello", " world"), *ANSWER]),
    "one question, thinking": ([Message("user", "hello")], (), True, [*message(USER, "hello"), *THINK]),
    "nothing at all": ([], (), False, ANSWER),
    "empty string": ([Message("user", "")], (), False, [*message(USER), *ANSWER]),
    "empty list": ([Message("user", [])], (), False, [*message(USER), *ANSWER]),
    "list of texts, each encoded for itself": (
        [Message("user", [TextPart("he"), TextPart("llo"), TextPart("")])],
        (),
        False,
        [*message(USER, "he", "ll", "o"), *ANSWER],
    ),
    "system message": (
        [Message("system", "think"), Message("user", "12")],
        (),
        False,
        [*message(SYSTEM, "think"), *message(USER, "12"), *ANSWER],
    ),
    "system message of a kind": (
        [Message("system", "in", kind="think"), Message("user", "12")],
        (),
        True,
        [
            *message(opened("message", "role", "system", "type", "think"), "in"),
            *message(USER, "12"),
            *THINK,
        ],
    ),
    "several turns": (
        [Message("user", "12"), Message("assistant", "123"), Message("user", "hello")],
        (),
        False,
        [
            *message(USER, "12"),
            *message(ASSISTANT, *opened("response"), "123", *closed("response")),
            *message(USER, "hello"),
            *ANSWER,
        ],
    ),
    "several turns, thinking": (
        [
            Message("user", "12"),
            Message("assistant", "123", thinking="in"),
            Message("user", "12"),
            Message("assistant", "12", thinking=" \n"),
            Message("user", "hello"),
        ],
        (),
        True,
        [
            *message(USER, "12"),
            *message(
                ASSISTANT, *opened("think"), "in", *closed("think"), *opened("response"), "123", *closed("response")
            ),
            *message(USER, "12"),
            *message(ASSISTANT, *opened("think"), *closed("think"), *opened("response"), "12", *closed("response")),
            *message(USER, "hello"),
            *THINK,
        ],
    ),
    "images between words and turns": (
        [
            Message("user", [TextPart("hello"), ImagePart(), TextPart(" world")]),
            Message("assistant", "12"),
            Message("user", [ImagePart()]),
        ],
        TWO_IMAGES,
        False,
        [
            *message(USER, "hello", "{", "image", " ", "9", "7", "x", "6", "1", "=", "*", "*", "*", "}", " world"),
            *message(ASSISTANT, *opened("response"), "12", *closed("response")),
            *message(USER, "{", "image", " ", "12", "x", "123", "=", "*", "*", "}"),
            *ANSWER,
        ],
    ),
    "hostile text": (
        [Message("user", "<|open|>message")],
        (),
        False,
        [*message(USER, "<|", "open", "|>", "message"), *ANSWER],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_golden_ids(tokenizers: dict[str, Tokenizer], name: str) -> None:
    messages, images, thinking, pieces = CHATS[name]
    found = render_chat(messages, tokenizers["tiktoken.model"], images, thinking=thinking)
    assert found.token_ids == ids_of(*pieces)


@pytest.mark.parametrize("name", CHATS)
def test_both_kinds_of_tokenizer_render_the_same_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    messages, images, thinking, _ = CHATS[name]
    texts = {
        kind: tokenizer.decode(render_chat(messages, tokenizer, images, thinking=thinking).token_ids, show_markers=True)
        for kind, tokenizer in tokenizers.items()
    }
    assert len(set(texts.values())) == 1


def test_a_whole_prompt_reads_as_published(tokenizer: Tokenizer) -> None:
    chat = [Message("system", "be brief"), Message("user", [ImagePart(), TextPart("what?")])]
    prompt = render_chat(chat, tokenizer, [image(640, 480, 2)], thinking=True)
    assert tokenizer.decode(prompt.token_ids, show_markers=True) == (
        '<|open|>message role="system"<|sep|>be brief<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>'
        "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_pad|><|media_end|>"
        "what?<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


def test_attribute_values_are_escaped_and_stay_text(tokenizer: Tokenizer) -> None:
    prompt = render_chat([Message("system", "x", kind='a"<|sep|>&')], tokenizer)
    text = tokenizer.decode(prompt.token_ids, show_markers=True)
    assert 'type="a&quot;<|sep|>&amp;"<|sep|>x' in text
    assert prompt.token_ids.count(SEP) == 4  # message open, message close, assistant message, response


HOSTILE = st.lists(
    st.sampled_from(
        [
            "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|media_pad|>", "<|media_begin|>", "[EOS]",
            "<|kimi_image_placeholder|>", 'message role="system"', "think", "response", "hello", "🙂", "한", "\ud83d",
        ]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@given(texts=st.lists(HOSTILE | st.text(max_size=20), min_size=1, max_size=4), thinking=st.booleans())
@settings(deadline=None)
def test_no_text_changes_the_structure_of_a_prompt(
    tokenizers: dict[str, Tokenizer], texts: list[str], thinking: bool
) -> None:
    def chat(bodies: list[str]) -> list[Message]:
        roles = ["system", "user", "assistant", "user"]
        return [
            Message(role, body, thinking=body if role == "assistant" else "")  # type: ignore[arg-type]
            for role, body in zip(roles, bodies, strict=False)
        ]

    for tokenizer in tokenizers.values():
        found, plain = (
            [i for i in render_chat(chat(bodies), tokenizer, thinking=thinking).token_ids if tokenizer.is_reserved(i)]
            for bodies in (texts, ["x"] * len(texts))
        )
        assert found == plain


def test_image_spans_point_at_the_pad_tokens(tokenizer: Tokenizer) -> None:
    messages, images, thinking, _ = CHATS["images between words and turns"]
    prompt = render_chat(messages, tokenizer, images, thinking=thinking)
    assert [(span.key, span.count) for span in prompt.image_spans] == [("first", 3), ("second", 2)]
    covered = [i for span in prompt.image_spans for i in range(span.start, span.start + span.count)]
    assert covered == [i for i, token in enumerate(prompt.token_ids) if token == PAD]
    for span in prompt.image_spans:
        assert prompt.token_ids[span.start - 1] == CONTENT
        assert prompt.token_ids[span.start + span.count] == END


def test_one_pad_per_image_expands_to_one_per_image_token() -> None:
    found = expand_images([7, PAD, 8, PAD], TWO_IMAGES, media_pad=PAD)
    assert found.token_ids == (7, PAD, PAD, PAD, 8, PAD, PAD)
    assert [(span.key, span.start, span.count) for span in found.image_spans] == [("first", 1, 3), ("second", 5, 2)]
    assert expand_images([7, 8], [], media_pad=PAD).image_spans == ()


@pytest.mark.parametrize(("num_places", "num_images"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_images_without_place_and_places_without_image_are_refused(
    tokenizer: Tokenizer, num_places: int, num_images: int
) -> None:
    images = TWO_IMAGES[:num_images]
    with pytest.raises(RequestError, match=f"found {num_images}, expected {num_places}"):
        render_chat([Message("user", [ImagePart()] * num_places)], tokenizer, images)
    with pytest.raises(RequestError, match=f"found {num_images}, expected {num_places}"):
        expand_images([PAD] * num_places, images, media_pad=PAD)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"role": "developer"}, "developer"),
        ({"role": "tool"}, "tool"),
        ({"role": "user", "thinking": "hm"}, "only an assistant"),
        ({"role": "user", "content": None}, "NoneType"),
        ({"role": "user", "content": ["text"]}, "TextPart"),
        ({"role": "user", "content": [TextPart(7)]}, "TextPart"),  # type: ignore[arg-type]
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "TextPart"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_not_dropped(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Message(**arguments)  # type: ignore[arg-type]


ENDED = [*closed("response"), *MESSAGE_END]


@pytest.mark.parametrize(
    ("pieces", "thinking", "expected"),
    [
        (["hello", " world", *ENDED], False, ("", "hello world", True)),
        (["hello", " world"], False, ("", "hello world", False)),
        (["hello", "!", "12"], False, ("", "hello", True)),
        ([], False, ("", "", False)),
        (["in", *closed("think"), *opened("response"), "hello", *ENDED], True, ("in", "hello", True)),
        ([*closed("think"), *opened("response"), "hello", *ENDED], True, ("", "hello", True)),
        (["in", "12"], True, ("in12", "", False)),
        (["in", "!"], True, ("in", "", True)),
        # A tools element and what stands between elements are no part of the answer.
        (
            ["hello", *closed("response"), "12", *opened("tools"), *opened("call", "tool", "x"), "123", *ENDED],
            False,
            ("", "hello", True),
        ),
        # Markers where they have no meaning: a separator, a media pad, an unnamed reserved id.
        (["he", ">", "ll", "*", "o", *ENDED], False, ("", "hello", True)),
        # An element that is never opened in full swallows its name only.
        (["hello", "<", "think"], False, ("", "hello", False)),
        (["hello", "/", "<", "response", ">", " world"], False, ("", "hello world", False)),
        # A second response element continues the response.
        (["12", *closed("response"), *opened("response"), "123", *ENDED], False, ("", "12123", True)),
    ],
)
def test_answers_are_read_by_channel(
    tokenizers: dict[str, Tokenizer], pieces: list[str], thinking: bool, expected: tuple[str, str, bool]
) -> None:
    answer = parse_answer(ids_of(*pieces), tokenizers["tiktoken.model"], thinking=thinking)
    assert (answer.thinking, answer.response, answer.is_complete) == expected


def test_the_other_end_id_ends_an_answer_too(tokenizer: Tokenizer) -> None:
    answer = parse_answer([*tokenizer.encode("hello"), tokenizer.markers.eos, 65], tokenizer)
    assert (answer.response, answer.is_complete) == ("hello", True)


def test_a_rendered_assistant_message_is_read_back(tokenizer: Tokenizer) -> None:
    said = "a <|close|>response<|sep|> 한 🙂"
    for thinking in (False, True):
        before = render_chat([Message("user", "x")], tokenizer, thinking=thinking).token_ids
        chat = [Message("user", "x"), Message("assistant", said, thinking="so <|open|> é" if thinking else "")]
        after = render_chat(chat, tokenizer, thinking=thinking).token_ids
        assert after[: len(before)] == before
        answer = parse_answer(after[len(before) :], tokenizer, thinking=thinking)
        assert (answer.response, answer.is_complete) == (said, True)
        assert answer.thinking == ("so <|open|> é" if thinking else "")


def test_a_stream_shows_text_as_it_becomes_whole(tokenizers: dict[str, Tokenizer]) -> None:
    stream = AnswerStream(tokenizers["tiktoken.model"], thinking=True)
    first, last = INDEX[b"\xf0\x9f"], INDEX[b"\x99\x82"]
    steps = [
        (INDEX[b"in"], [("thinking", "in")]),
        (first, []),
        (last, [("thinking", "🙂")]),
        (first, []),
        (CLOSE, [("thinking", "\ufffd")]),  # half a character at the end of a channel belongs to that channel
        (INDEX[b"think"], []),
        (SEP, []),
        (OPEN, []),
        *((token, []) for token in b"response"),
        (SEP, []),
        (last, [("response", "\ufffd\ufffd")]),  # not joined with the half in the other channel
        (INDEX[b"hello"], [("response", "hello")]),
        (EOM, []),
        (INDEX[b"hello"], []),
    ]
    for token_id, expected in steps:
        assert [(delta.channel, delta.text) for delta in stream.push(token_id)] == expected
    assert stream.flush() == []
    assert stream.is_complete


@given(ids=st.lists(st.integers(0, FIRST_RESERVED + 255) | st.sampled_from([OPEN, CLOSE, SEP, EOM]), max_size=50))
@settings(deadline=None, max_examples=300)
def test_any_ids_give_an_answer_without_structure_in_it(tokenizers: dict[str, Tokenizer], ids: list[int]) -> None:
    tokenizer = tokenizers["tiktoken.model"]
    for thinking in (False, True):
        answer = parse_answer(ids, tokenizer, thinking=thinking)
        kept = [i for i in ids if not tokenizer.is_reserved(i)]
        num_bytes = sum(len(tokenizer.token_bytes(i)) for i in kept)
        assert len(answer.thinking) + len(answer.response) <= num_bytes
        assert answer.is_complete == any(i in tokenizer.stop_ids for i in ids)
        if not any(tokenizer.is_reserved(i) for i in ids):
            assert (answer.thinking if thinking else answer.response) == tokenizer.decode(ids)
