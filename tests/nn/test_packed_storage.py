"""Stored forms that are only read, each against a loop over single weights in float64; orders taken for one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.base import LoadError
from workbench.nn.quant import AWQ, GPTQ, NVFP4, PackedInt4

ROWS, COLUMNS, GROUP = 24, 80, 16  # five groups to a row, three words of rows, ten of columns
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int64).to(torch.int32)


def floats(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


def nibble(word: int, place: int) -> int:
    return word // 16**place % 16 if word >= 0 else (word + 2**32) // 16**place % 16


def awq_parts() -> dict[str, Tensor]:
    """As the loader hands them over: outputs first, words of eight rows."""
    return {
        "qweight": words(ROWS // 8, COLUMNS, seed=1),
        "qzeros": words(ROWS // 8, COLUMNS // GROUP, seed=2),
        "scales": floats(ROWS, COLUMNS // GROUP, seed=3).half(),
    }


def gptq_parts(group_of_column: list[int]) -> dict[str, Tensor]:
    return {
        "qweight": words(ROWS, COLUMNS // 8, seed=4),
        "qzeros": words(ROWS // 8, COLUMNS // GROUP, seed=5),
        "scales": floats(ROWS, COLUMNS // GROUP, seed=6).half(),
        "g_idx": torch.tensor(group_of_column, dtype=torch.int32),
    }


def test_awq_takes_rows_from_the_nibbles_that_the_format_says() -> None:
    parts, expected = awq_parts(), torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    place_of_row = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
    for row in range(ROWS):
        for column in range(COLUMNS):
            group, place = column // GROUP, place_of_row[row % 8]
            code = nibble(int(parts["qweight"][row // 8, column]), place)
            zero = nibble(int(parts["qzeros"][row // 8, group]), place)
            expected[row, column] = (code - zero) * float(parts["scales"][row, group])
    assert torch.equal(AWQ(GROUP).decode(parts, torch.float64), expected)


def test_l16_one_word_of_awq_holds_these_rows_pinned_bytes() -> None:
    word = torch.tensor([[0x75316420 - 2**32 if 0x75316420 >= 2**31 else 0x75316420]], dtype=torch.int32)
    parts = {"qweight": word, "qzeros": torch.zeros_like(word), "scales": torch.ones(8, 1).half()}
    assert AWQ(1).decode(parts, torch.float32).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("has_order", [False, True])
def test_gptq_takes_zero_points_less_one_and_groups_by_its_column_order(has_order: bool) -> None:
    groups = [column // GROUP for column in range(COLUMNS)]
    if has_order:
        order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(7)).tolist()
        groups = [groups[column] for column in order]
    parts, expected = gptq_parts(groups), torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    for row in range(ROWS):
        for column in range(COLUMNS):
            code = nibble(int(parts["qweight"][row, column // 8]), column % 8)
            zero = nibble(int(parts["qzeros"][row // 8, groups[column]]), row % 8) + 1
            expected[row, column] = (code - zero) * float(parts["scales"][row, groups[column]])
    assert torch.equal(GPTQ(GROUP).decode(parts, torch.float64), expected)


def test_gptq_refuses_groups_that_a_slice_has_no_scales_for() -> None:
    parts = gptq_parts([column % 5 for column in range(COLUMNS)])
    half = {
        "qweight": parts["qweight"][:, :5],
        "qzeros": parts["qzeros"][:, :2],
        "scales": parts["scales"][:, :2],
        "g_idx": parts["g_idx"][:40],
    }
    with pytest.raises(LoadError, match=r"no scales for.*groups 0 to 4.*2 groups.*desc_act"):
        GPTQ(GROUP).decode(half, torch.float32)


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_multiplies_by_both_scales_or_divides_by_the_second(divides: bool) -> None:
    g = torch.Generator().manual_seed(8)
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=g, dtype=torch.uint8)
    scale = (floats(ROWS, COLUMNS // 16, seed=9) * 100).to(torch.float8_e4m3fn)
    factor = torch.tensor(2.0**-9 if not divides else 2.0**9)
    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    for row in range(ROWS):
        for column in range(COLUMNS):
            code = nibble(int(packed[row, column // 2]), column % 2)
            value = -E2M1[code - 8] if code >= 8 else E2M1[code]
            expected[row, column] = value * float(scale[row, column // 16]) / 2**9
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    parts = {names[0]: packed, "weight_scale": scale, names[1]: factor}
    assert torch.equal(NVFP4(divides=divides).decode(parts, torch.float64), expected)


def test_packed_int4_has_groups_of_any_size_and_a_short_last_one() -> None:
    packed = words(ROWS, COLUMNS // 8, seed=10)
    scale = floats(ROWS, 2, seed=11).bfloat16()  # groups of 48: the second has 32 columns
    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    for row in range(ROWS):
        for column in range(COLUMNS):
            code = nibble(int(packed[row, column // 8]), column % 8) - 8
            expected[row, column] = code * float(scale[row, column // 48])
    own = {"weight_packed": packed.view(torch.uint8), "weight_scale": scale}
    assert torch.equal(PackedInt4(48).decode(own, torch.float64), expected)


def test_l16_the_same_words_in_another_order_are_other_weights() -> None:
    """Square, so that no shape tells them apart: 71 % of random nibbles move, and what is left has no sense."""
    size = 40
    parts = {
        "qweight": words(size // 8, size, seed=12),
        "qzeros": torch.full((size // 8, 1), -0x77777778, dtype=torch.int32),  # 8 everywhere
        "scales": torch.ones(size, 1).half(),
    }
    right = AWQ(size).decode(parts, torch.float64)
    as_gptq = GPTQ(size).decode(
        {**parts, "qweight": parts["qweight"].mT, "g_idx": torch.zeros(size, dtype=torch.int32)}, torch.float64
    )
    assert right.shape == as_gptq.shape
    assert (right != as_gptq).double().mean() > 0.7
    assert torch.corrcoef(torch.stack([right.flatten(), as_gptq.flatten()]))[0, 1].abs() < 0.3
