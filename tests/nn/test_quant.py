"""Storage schemes: pinned bytes, agreement with the slow float64 references, error bounds, edge values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench.nn.quant import FP8, INT4, INT8, MXFP4, SCHEMES
from workbench.nn.quant.fp8 import decode_fp8_reference
from workbench.nn.quant.int4 import decode_int4_reference
from workbench.nn.quant.int8 import decode_int8_reference
from workbench.nn.quant.mxfp4 import CODE_VALUES, decode_mxfp4_reference

REFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mxfp4": decode_mxfp4_reference,
    "fp8": decode_fp8_reference,
    "int8": decode_int8_reference,
    "int4": decode_int4_reference,
}
# Largest error of one weight over the largest magnitude that shares its scale. mxfp4: half the step from 4 to 6, and 8
# saturates at 6; fp8: half of 2^-3 at the top; int8, int4: half a step, and bf16 rounding of the scale for int4.
BOUNDS = {"mxfp4": 2 / 8, "fp8": 2**-4, "int8": 0.5 / 127, "int4": 0.5 / 7 + 2**-8}
GROUPS = {"mxfp4": 32, "int4": 32}


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 4, rows)[:, None]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (5, 7 * 32)])
def test_decoding_equals_the_float64_reference(name: str, shape: tuple[int, int]) -> None:
    parts = SCHEMES[name].encode(random_weight(*shape))
    reference = REFERENCES[name](parts["weight_packed"], parts["weight_scale"])
    exact = SCHEMES[name].decode(parts, torch.float32).double()
    # A code times a scale is exact in float64; one rounding to float32, and none at all for mxfp4.
    torch.testing.assert_close(exact, reference, rtol=0 if name == "mxfp4" else 2**-24, atol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_weight_is_within_the_bound_of_its_scheme(name: str) -> None:
    weight = random_weight(9, 96, seed=1).double()
    decoded = SCHEMES[name].decode(SCHEMES[name].encode(weight), torch.float64)
    groups = (
        weight.unflatten(-1, (-1, GROUPS.get(name, 96)))
        .abs()
        .amax(-1, keepdim=True)
        .expand(-1, -1, GROUPS.get(name, 96))
    )
    worst = ((decoded - weight).abs() / groups.flatten(1)).max().item()
    assert BOUNDS[name] / 4 < worst <= BOUNDS[name] * (1 + 1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_stored_parts_have_the_announced_shapes_and_a_stack_encodes_like_its_members(name: str) -> None:
    stack = torch.stack([random_weight(3, 64, seed=s) for s in range(4)])
    parts = SCHEMES[name].encode(stack)
    announced = SCHEMES[name].buffers(tuple(stack.shape))
    assert {k: (tuple(v.shape), v.dtype) for k, v in parts.items()} == announced
    for member, matrix in enumerate(stack):
        for key, value in SCHEMES[name].encode(matrix).items():
            assert torch.equal(parts[key][member].view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_zeros_and_the_smallest_floats_stay_finite(name: str) -> None:
    weight = torch.zeros(3, 32)
    weight[1, 5], weight[2, 0] = 1e-45, -3e38
    decoded = SCHEMES[name].decode(SCHEMES[name].encode(weight), torch.float32)
    assert torch.isfinite(decoded).all()
    assert not decoded[0].any()
    assert decoded[2, 0] < -2e38


def test_mxfp4_bytes_are_pinned() -> None:
    """Low nibble first; scale byte 127 + exponent; sign is the top bit of the nibble."""
    weight = torch.zeros(1, 64)
    weight[0, :8] = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0])
    weight[0, 32:35] = torch.tensor([-(2.0**-12) * 6, 2.0**-12 * 0.5, 2.0**-12])
    parts = MXFP4().encode(weight)
    assert parts["weight_packed"][0, :4].tolist() == [0x10, 0x3A, 0xD4, 0x76]
    assert parts["weight_packed"][0, 16:18].tolist() == [0x1F, 0x02]
    assert parts["weight_scale"].tolist() == [[127, 115]]
    assert torch.equal(MXFP4().decode(parts, torch.bfloat16), weight.bfloat16())


def test_every_mxfp4_byte_and_scale_decodes_by_the_format() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scale = torch.full((1, 16), 127, dtype=torch.uint8)
    decoded = MXFP4().decode({"weight_packed": packed, "weight_scale": scale}, torch.float32)[0]
    assert decoded.tolist() == [CODE_VALUES[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert torch.signbit(decoded[2 * 8]).item()  # code 8 is minus zero

    ones = torch.full((255, 16), 0x22, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    found = MXFP4().decode({"weight_packed": ones, "weight_scale": scales}, torch.float32)
    assert found[:, 0].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    nan = MXFP4().decode({"weight_packed": ones[:1], "weight_scale": scales[:1] + 255}, torch.float32)
    assert nan.isnan().all()


def test_mxfp4_ties_go_to_the_even_code_and_large_values_saturate() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :10] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -5.001])
    decoded = MXFP4().decode(MXFP4().encode(weight), torch.float32)[0, :10]
    assert decoded.tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -6.0]


def test_mxfp4_rounds_every_value_to_a_nearest_code() -> None:
    weight = random_weight(20, 32, seed=2).double()
    decoded = MXFP4().decode(MXFP4().encode(weight), torch.float64)
    scale = 2.0 ** (torch.floor(torch.log2(weight.abs().amax(-1, keepdim=True))) - 2)
    codes = torch.tensor(CODE_VALUES, dtype=torch.float64)
    best = (weight[..., None] / scale[..., None] - codes).abs().amin(-1)
    torch.testing.assert_close((decoded - weight).abs() / scale, best, rtol=0, atol=1e-6)


def test_swapped_nibbles_would_be_noticed() -> None:
    parts = MXFP4().encode(random_weight(3, 64))
    swapped = {**parts, "weight_packed": parts["weight_packed"] >> 4 | parts["weight_packed"] << 4}
    assert not torch.equal(MXFP4().decode(swapped, torch.float32), MXFP4().decode(parts, torch.float32))


def test_fp8_bytes_are_pinned() -> None:
    parts = FP8().encode(torch.tensor([[448.0, -1.0, 0.0, 2.0**-9, 1.125], [0.5, 0.25, -0.5, 0.0, 0.125]]))
    assert parts["weight_packed"].view(torch.uint8).tolist() == [
        [0x7E, 0xB8, 0x00, 0x01, 0x39],
        [0x7E, 0x76, 0xFE, 0x00, 0x6E],
    ]
    assert parts["weight_scale"].tolist() == [1.0, pytest.approx(0.5 / 448, rel=1e-7)]


def test_int8_bytes_are_pinned() -> None:
    parts = INT8().encode(torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.4], [0.0, -2.54, 0.02, 1.0, 0.0]]))
    assert parts["weight_packed"].tolist() == [[127, -127, 0, 2, -2], [0, -127, 1, 50, 0]]
    assert parts["weight_scale"].tolist() == [1.0, pytest.approx(0.02, rel=1e-6)]


def test_int4_bytes_are_pinned() -> None:
    """A nibble holds q + 8, the even column in the low one."""
    weight = torch.zeros(1, 34)
    weight[0, :5] = torch.tensor([7.0, -7.0, 0.4, 3.5, -1.0])
    weight[0, 32:] = torch.tensor([-14.0, 2.0])
    parts = INT4().encode(weight)
    assert parts["weight_packed"][0, :3].tolist() == [0x1F, 0xC8, 0x87]
    assert parts["weight_packed"][0, 16:].tolist() == [0x91]
    assert parts["weight_scale"].tolist() == [[1.0, 2.0]]
    assert parts["weight_scale"].dtype == torch.bfloat16


@pytest.mark.parametrize("columns", [2, 30, 34, 98])
def test_int4_takes_a_last_group_that_is_short(columns: int) -> None:
    weight = random_weight(3, columns)
    parts = INT4().encode(weight)
    assert parts["weight_scale"].shape == (3, -(-columns // 32))
    reference = decode_int4_reference(parts["weight_packed"], parts["weight_scale"])
    torch.testing.assert_close(INT4().decode(parts, torch.float64), reference, rtol=2**-24, atol=0)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_one_row_scale_does_not_reach_another_row(name: str) -> None:
    weight = random_weight(4, 32)
    louder = weight.clone()
    louder[2] *= 1000
    quiet, loud = (SCHEMES[name].decode(SCHEMES[name].encode(w), torch.float32) for w in (weight, louder))
    others = [0, 1, 3]
    assert torch.equal(quiet[others], loud[others])
