"""Chats as ids: the tokenizer's layout, what is learnt, where images go, and packs that depend on the step alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workbench.base import ConfigError, TokenizerError
from workbench.serving.inputs import ImageProcessor, Message, parse_answer, read_tokenizer, render_chat
from workbench.serving.inputs.tokenizer import Tokenizer
from workbench.serving.inputs.tokenizer_files import K3_RESERVED_OFFSETS, RESERVED_BLOCK
from workbench.spec import ImageSpec, ModelSpec
from workbench.training.data.chats import CHAT_KINDS, NO_PICTURE_ANSWER, Chat, Mixture, make_chat, picture_message
from workbench.training.data.domain import Fact
from workbench.training.data.questions import caption
from workbench.training.data.samples import PackedBatch, SampleStream, pack_samples, tokenise_chat
from workbench.training.data.scenes import make_scene, scene_image, split_of
from workbench.training.data.tokenizer import VOCAB_SIZE, train_tokenizer

BUDGET = 1500


@pytest.fixture(scope="module")
def stream(tokenizer: Tokenizer, facts: tuple[Fact, ...]) -> SampleStream:
    return SampleStream(tokenizer, facts, seed=3)


def only(kind: str, **changes: float) -> Mixture:
    return Mixture(**{**dict.fromkeys(CHAT_KINDS, 0.0), kind: 1.0, **changes})


def assert_same(a: PackedBatch, b: PackedBatch) -> None:
    for name in ("token_ids", "logit_rows", "targets", "image_rows", "patches"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert (a.lengths, a.grids, a.kinds) == (b.lengths, b.grids, b.kinds)


def test_reserved_ids_stand_in_the_published_places_at_the_end(tokenizer: Tokenizer) -> None:
    first = VOCAB_SIZE - RESERVED_BLOCK
    assert tokenizer.vocab_size == VOCAB_SIZE
    for name, offset in K3_RESERVED_OFFSETS.items():
        assert tokenizer.name(first + offset) == name
    assert not tokenizer.is_reserved(first - 1)
    assert all(tokenizer.is_reserved(i) for i in range(first, VOCAB_SIZE))


def test_the_layout_equals_that_of_the_embedded_checkpoint(tokenizer_root: Path) -> None:
    other = Path(__file__).parents[2] / "data" / "k3-tiny" / "tokenizer_config.json"
    ours, theirs = (json.loads(path.read_text()) for path in (tokenizer_root / "tokenizer_config.json", other))

    def offsets(config: dict[str, dict[str, dict[str, str]]]) -> dict[str, int]:
        ids = {entry["content"]: int(token_id) for token_id, entry in config["added_tokens_decoder"].items()}
        return {name: token_id - ids["[BOS]"] for name, token_id in ids.items()}

    assert offsets(ours) == offsets(theirs)
    assert {k: v for k, v in ours.items() if k != "added_tokens_decoder"} == {
        k: v for k, v in theirs.items() if k != "added_tokens_decoder"
    }


def test_serving_reads_the_written_tokenizer_for_a_model_of_its_size(tokenizer_root: Path) -> None:
    config = json.loads((Path(__file__).parents[1] / "golden" / "k3-tiny-a" / "config.json").read_text())
    first = VOCAB_SIZE - RESERVED_BLOCK
    ids = {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": VOCAB_SIZE - 1}
    config.update(ids, media_placeholder_token_id=first + 21)
    config["text_config"].update(ids, vocab_size=VOCAB_SIZE)
    from workbench.spec.families.kimi_k3 import parse

    spec: ModelSpec = parse(config)
    assert read_tokenizer(tokenizer_root, spec).markers.open == first + 3


def test_any_text_survives_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    for text in ("A circle.", "näive 漢字 🙂\n\ttab", "27,648 bytes", "<|open|>message", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.name(i) for i in tokenizer.encode("4096")] == ["4", "0", "9", "6"]


def test_the_words_of_pictures_are_single_tokens(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        scene = make_scene(rng, kind="figures")
        words = caption(scene).replace(":", " :").replace(".", " .").split()
        assert len(tokenizer.encode(caption(scene))) == len(words)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused() -> None:
    with pytest.raises(TokenizerError, match="too few different pairs"):
        train_tokenizer(["one two three"], 2048)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_learnt_ids_are_exactly_what_an_assistant_generates(
    kind: str, thinking: bool, tokenizer: Tokenizer, facts: tuple[Fact, ...]
) -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        chat = make_chat(rng, facts, only(kind, thinking_share=float(thinking)))
        assert chat.thinking == thinking
        processor = ImageProcessor(ImageSpec())
        sample = tokenise_chat(chat, tokenizer, processor)
        ids = sample.token_ids.tolist()
        learnt = np.flatnonzero(sample.learnt)
        runs = np.split(learnt, np.flatnonzero(np.diff(learnt) > 1) + 1)
        answers = [parse_answer(sample.token_ids[run].tolist(), tokenizer, thinking=thinking) for run in runs]
        said = [message for message in chat.messages if message.role == "assistant"]
        assert [answer.response for answer in answers] == [message.content for message in said]
        assert [answer.thinking for answer in answers] == [message.thinking if thinking else "" for message in said]
        assert all(answer.is_complete for answer in answers)
        # Every answer is learnt behind the very prompt that serving would build for it.
        images = [processor.process(scene_image(scene)) for scene in chat.scenes]
        for number, run in enumerate(runs):
            before = chat.messages[: 2 * number + 1]
            places = sum(len(m.parts) > 1 for m in before)
            prompt = render_chat(before, tokenizer, images[:places], thinking=thinking)
            assert tuple(ids[: run[0]]) == prompt.token_ids


def test_image_rows_are_the_media_pads_in_order(stream: SampleStream, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        sample = stream.sample(rng)
        pads = np.flatnonzero(sample.token_ids == tokenizer.markers.media_pad)
        np.testing.assert_array_equal(sample.image_rows, pads)
        assert len(pads) == sum(image.num_tokens for image in sample.images)
        assert not sample.learnt[pads].any()


def test_an_unusual_canvas_is_padded_to_whole_tokens(tokenizer: Tokenizer) -> None:
    scene = replace(make_scene(np.random.default_rng(0), kind="figures"), canvas=(140, 98))
    chat = Chat(
        kind="picture",
        messages=(picture_message("Describe the picture."), Message("assistant", caption(scene))),
        scenes=(scene,),
    )
    sample = tokenise_chat(chat, tokenizer, ImageProcessor(ImageSpec()))
    assert sample.images[0].grid == (1, 8, 10)
    assert len(sample.image_rows) == 4 * 5
    assert "image 140x98" in tokenizer.decode(sample.token_ids.tolist())


def test_a_pack_depends_on_seed_step_and_micro_step_alone(
    stream: SampleStream, tokenizer: Tokenizer, facts: tuple[Fact, ...]
) -> None:
    wanted = stream.pack(7, 1, token_budget=BUDGET)
    fresh = SampleStream(tokenizer, facts, seed=3)
    fresh.pack(2, token_budget=BUDGET)  # what was drawn before must not matter
    assert_same(wanted, fresh.pack(7, 1, token_budget=BUDGET))
    others = [stream.pack(7, 0, token_budget=BUDGET), stream.pack(8, 1, token_budget=BUDGET)]
    others.append(SampleStream(tokenizer, facts, seed=4).pack(7, 1, token_budget=BUDGET))
    for other in others:
        assert other.token_ids.tolist() != wanted.token_ids.tolist()


def test_a_pack_holds_whole_samples_within_the_budget(stream: SampleStream, tokenizer: Tokenizer) -> None:
    markers = tokenizer.markers
    for step in range(12):
        pack = stream.pack(step, token_budget=BUDGET)
        assert BUDGET - 300 < pack.num_tokens == sum(pack.lengths) <= BUDGET
        assert len(pack.kinds) == len(pack.lengths)
        offsets = np.cumsum((0, *pack.lengths))
        assert (pack.token_ids[offsets[:-1]] == markers.open).all()
        assert (pack.token_ids[offsets[1:] - 1] == markers.end_of_msg).all()
        assert not set(pack.logit_rows) & set(offsets[1:] - 1), "an id of one sample is predicted from another"
        np.testing.assert_array_equal(pack.token_ids[pack.logit_rows + 1], pack.targets)
        assert not (pack.targets == markers.media_pad).any()
        assert (pack.token_ids[pack.image_rows] == markers.media_pad).all()
        assert len(pack.patches) == sum(rows * columns for _, rows, columns in pack.grids)
        assert len(pack.image_rows) == sum(rows * columns // 4 for _, rows, columns in pack.grids)


def test_packing_keeps_each_sample_as_it_was(stream: SampleStream) -> None:
    rng = np.random.default_rng(5)
    samples = [stream.sample(rng) for _ in range(9)]
    pack = pack_samples(samples)
    offset = num_patches = num_targets = 0
    for sample in samples:
        stop = offset + len(sample.token_ids)
        np.testing.assert_array_equal(pack.token_ids[offset:stop], sample.token_ids)
        rows = pack.logit_rows[(pack.logit_rows >= offset) & (pack.logit_rows < stop)]
        np.testing.assert_array_equal(rows - offset + 1, np.flatnonzero(sample.learnt))
        for image in sample.images:
            np.testing.assert_array_equal(pack.patches[num_patches : num_patches + len(image.patches)], image.patches)
            num_patches += len(image.patches)
        offset, num_targets = stop, num_targets + int(sample.learnt.sum())
    assert (num_targets, num_patches) == (len(pack.targets), len(pack.patches))


def test_a_pack_without_pictures_has_no_patches(tokenizer: Tokenizer, facts: tuple[Fact, ...]) -> None:
    pack = SampleStream(tokenizer, facts, seed=0, mixture=only("facts")).pack(0, token_budget=BUDGET)
    assert (len(pack.patches), len(pack.grids), len(pack.image_rows)) == (0, 0, 0)
    assert set(pack.kinds) == {"facts"}


def test_a_budget_below_one_sample_is_refused(stream: SampleStream) -> None:
    with pytest.raises(ConfigError, match="longer than the token budget"):
        stream.pack(0, token_budget=20)


def test_shares_of_the_mixture_are_met_and_half_of_the_pictures_are_described(facts: tuple[Fact, ...]) -> None:
    rng = np.random.default_rng(6)
    mixture = Mixture()
    chats = [make_chat(rng, facts, mixture) for _ in range(3000)]
    kinds = Counter(chat.kind for chat in chats)
    for kind in CHAT_KINDS:
        assert abs(kinds[kind] / len(chats) - getattr(mixture, kind)) < 0.03
    pictures = [chat for chat in chats if chat.kind == "picture"]
    described = [chat for chat in pictures if any(m.content == caption(chat.scenes[0]) for m in chat.messages)]
    assert 0.45 < len(described) / len(pictures) < 0.56
    assert all(split_of(scene) == "train" for chat in chats for scene in chat.scenes)


def test_that_share_of_the_chats_thinks_and_only_the_others_ask_for_lists(facts: tuple[Fact, ...]) -> None:
    rng, mixture = np.random.default_rng(6), only("picture", thinking_share=0.3, list_share=1.0, description_share=0.0)
    chats = [make_chat(rng, facts, mixture) for _ in range(800)]
    assert 0.25 < sum(chat.thinking for chat in chats) / len(chats) < 0.35
    texts = [(chat.thinking, {m.content for m in chat.messages if isinstance(m.content, str)}) for chat in chats]
    assert not any("How many are there of each?" in text for thinking, text in texts if thinking)
    assert any("How many are there of each?" in text for thinking, text in texts if not thinking)


def test_questions_without_their_picture_get_the_same_polite_answer(facts: tuple[Fact, ...]) -> None:
    chat = make_chat(np.random.default_rng(7), facts, only("no_picture"))
    assert (chat.scenes, chat.messages[1].content) == ((), NO_PICTURE_ANSWER)


def test_a_picture_never_comes_after_its_question(facts: tuple[Fact, ...]) -> None:
    rng = np.random.default_rng(8)
    answers = {fact.answer for fact in facts}
    for _ in range(200):
        chat = make_chat(rng, facts, only("mixed"))
        users, replies = chat.messages[::2], chat.messages[1::2]
        asked_at = next(i for i, reply in enumerate(replies) if reply.content not in answers)
        shown_at = next(i for i, user in enumerate(users) if not isinstance(user.content, str))
        assert shown_at <= asked_at


@pytest.mark.parametrize(
    "changes", [{"picture": 0.5}, {"facts": -0.2, "picture": 1.1}, {"description_share": 1.5}, {"thinking_share": -0.1}]
)
def test_a_mixture_that_is_none_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        Mixture(**changes)
