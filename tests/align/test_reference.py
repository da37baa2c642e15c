"""The reference's own small parts: bytes pinned by hand, refusals, following another implementation's choices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from align_checkpoints import TEXT_IDS, TINY, VISION, damaged_copy
from PIL import Image
from safetensors.torch import load_file, save_file

from workbench.align import PublishedWeights, ReferencePrompt, reference_patches, reference_traces
from workbench.align.reference_weights import decode_mxfp4_plainly
from workbench.base import CheckpointError, ConfigError, RequestError


def test_mxfp4_bytes_decode_to_the_values_of_the_format() -> None:
    # Two columns per byte, low nibble first: 0x91 is +0.5 then -0.5; 0x7f is -6 then +6; 0x80 is +0 then -0.
    packed = torch.tensor([[0x91, 0x7F, 0x80, 0x2E] + [0x00] * 28], dtype=torch.uint8)
    scale = torch.tensor([[128, 115]], dtype=torch.uint8)  # 2 and 2 ** -12
    values = decode_mxfp4_plainly(packed, scale, torch.float64)
    assert values.shape == (1, 64)
    assert values[0, :8].tolist() == [1.0, -1.0, -12.0, 12.0, 0.0, -0.0, -8.0, 2.0]
    packed[0, 16] = 0x21  # column 32 belongs to the second scale
    assert decode_mxfp4_plainly(packed, scale, torch.float64)[0, 32:34].tolist() == [0.5 * 2.0**-12, 2.0**-12]


def test_one_tensor_of_one_file_stays_open_at_a_time() -> None:
    with PublishedWeights(TINY) as weights:
        first = weights("language_model.model.layers.0.input_layernorm.weight")
        second = weights("language_model.model.norm.weight")
        assert first.dtype == second.dtype == torch.float64
        assert "language_model.model.norm.weight" in weights
        experts = weights("language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight")
        assert experts.shape == (96, 128)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with PublishedWeights(TINY) as weights, pytest.raises(CheckpointError, match=r"no tensor named 'lm\.weight'"):
        weights("lm.weight")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        PublishedWeights(tmp_path)


def test_a_tensor_in_two_files_and_a_torn_file_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' also stands in one\.safetensors"):
        PublishedWeights(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"\x08")
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        PublishedWeights(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config"):
        reference_traces(tmp_path, [ReferencePrompt(token_ids=(1,))])
    with pytest.raises(ConfigError, match="image settings"):
        reference_patches(tmp_path, Image.new("RGB", (3, 3)))


def test_placeholders_must_match_the_pictures() -> None:
    image = reference_patches(TINY, TINY / VISION["images"]["rgb_97x61"]["file"])
    with pytest.raises(RequestError, match="placeholders and picture rows"):
        reference_traces(TINY, [ReferencePrompt(token_ids=(1, 505, 505), images=(image,))])
    with pytest.raises(RequestError, match="placeholders and picture rows"):
        reference_traces(TINY, [ReferencePrompt(token_ids=(1, 505))])
    with pytest.raises(RequestError, match="at least one token"):
        reference_traces(TINY, [ReferencePrompt(token_ids=())])


def test_pad_tokens_beside_a_picture_are_zeroed_and_elsewhere_are_not() -> None:
    image = reference_patches(TINY, TINY / VISION["images"]["rgb_1x1"]["file"])
    beside, alone = reference_traces(
        TINY,
        [ReferencePrompt(token_ids=(7, 511, 505), images=(image,)), ReferencePrompt(token_ids=(7, 511))],
        keep=lambda name: name == "inputs_embeds",
    )
    assert not beside["inputs_embeds"][1].any()
    assert alone["inputs_embeds"][1].any()
    assert torch.equal(beside["inputs_embeds"][0], alone["inputs_embeds"][0])
    assert set(beside) == {"inputs_embeds"}


def test_packed_prompts_do_not_see_each_other() -> None:
    short, long = (ReferencePrompt(token_ids=TEXT_IDS[:n]) for n in (3, 9))
    together = reference_traces(TINY, [long, short])[1]
    alone = reference_traces(TINY, [short])[0]
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_following_a_choice_changes_what_comes_after_and_records_the_regret() -> None:
    prompt = ReferencePrompt(token_ids=TEXT_IDS[:6])
    own = reference_traces(TINY, [prompt])[0]
    choice = {name: value.clone() for name, value in own.items() if name.endswith("topk_idx")}
    same = reference_traces(TINY, [prompt], follow=[choice])[0]
    assert torch.equal(same["logits"], own["logits"])
    assert not same["L2.route_regret"].any()

    rejected = next(e for e in range(8) if e not in choice["L2.topk_idx"][4])
    choice["L2.topk_idx"][4, 0] = rejected
    other = reference_traces(TINY, [prompt], follow=[choice])[0]
    assert torch.equal(other["L2.topk_idx"], own["L2.topk_idx"])  # its own choice is still what it says
    assert (other["L2.route_regret"] > 0).tolist() == [False, False, False, False, True, False]
    assert other["L2.route_regret"][4] >= own["L2.route_margin"][4]
    assert not torch.equal(other["L2.ffn_out"][4], own["L2.ffn_out"][4])
    assert torch.equal(other["L2.ffn_out"][3], own["L2.ffn_out"][3])


@pytest.mark.parametrize("nonsense", [[[8, 1]] * 6, [[-1, 1]] * 6, [[3, 3]] * 6, [[1, 2, 3]] * 6])
def test_a_choice_that_is_none_is_not_followed(nonsense: list[list[int]]) -> None:
    prompt = ReferencePrompt(token_ids=TEXT_IDS[:6])
    own = reference_traces(TINY, [prompt])[0]
    choice = {name: value for name, value in own.items() if name.endswith("topk_idx")}
    choice["L4.topk_idx"] = torch.tensor(nonsense)
    trace = reference_traces(TINY, [prompt], follow=[choice])[0]
    assert torch.equal(trace["logits"], own["logits"])
    assert bool(trace["L4.route_regret"].isinf().all())


def test_experts_stored_plainly_give_the_same_as_packed_ones(tmp_path: Path) -> None:
    """The same weights as a plain tensor: the decoder of packed experts is exact."""
    base = "language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight"
    root = damaged_copy(tmp_path, f"{base}_scale", lambda scale: scale + 1)  # a copy to rewrite; the pair goes below
    file = root / "model-00002-of-000011.safetensors"
    tensors = load_file(file)
    with PublishedWeights(TINY) as weights:
        plain = weights(base)
    del tensors[f"{base}_packed"], tensors[f"{base}_scale"]
    save_file({**tensors, base: plain.float().contiguous()}, file)
    prompt = ReferencePrompt(token_ids=TEXT_IDS[:9])
    expected, found = reference_traces(TINY, [prompt])[0], reference_traces(root, [prompt])[0]
    assert bool((expected["L1.topk_idx"] == 5).any()), "the prompt does not use this expert"
    assert torch.equal(found["logits"], expected["logits"])
