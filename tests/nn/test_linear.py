"""Matrices, dense or quantised: filling by rows, narrowing, refusing what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from workbench.base import LoadError
from workbench.nn import SCHEMES, Linear, MatrixStore, Precision, StackedLinear

SCHEME_NAMES = [None, *SCHEMES]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def same_bytes(a: MatrixStore, b: MatrixStore) -> bool:
    return all(torch.equal(a.parts[k].view(torch.uint8), b.parts[k].view(torch.uint8)) for k in a.parts)


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_a_linear_layer_multiplies_by_what_it_decodes(name: str | None) -> None:
    layer, x = Linear(6, 64, scheme=SCHEMES.get(name or "")), values(5, 64).bfloat16()
    layer.write(values(6, 64))
    weight = layer.dense(torch.bfloat16)
    assert torch.equal(layer(x), F.linear(x, weight))
    assert (weight - values(6, 64)).abs().max() < 0.7


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_filling_a_few_rows_at_a_time_equals_filling_at_once(name: str | None) -> None:
    scheme, weight = SCHEMES.get(name or ""), values(7, 64)
    whole, piecewise = Linear(7, 64, scheme=scheme), Linear(7, 64, scheme=scheme)
    whole.write(weight)
    for start in range(0, 7, 3):
        piecewise.write(weight[start : start + 3], rows=slice(start, start + 3))
    assert same_bytes(whole, piecewise)


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_a_stack_keeps_its_matrices_apart(name: str | None) -> None:
    stack, weights = StackedLinear(3, 4, 64, scheme=SCHEMES.get(name or "")), values(3, 4, 64)
    for index in (2, 0, 1):
        stack.write(weights[index, :2], index=index, rows=slice(0, 2))
        stack.write(weights[index, 2:], index=index, rows=slice(2, 4))
    for index in range(3):
        single = Linear(4, 64, scheme=stack.scheme)
        single.write(weights[index])
        assert torch.equal(stack.dense(torch.float32, index), single.dense(torch.float32))


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_encoded_parts_pass_through_byte_for_byte(name: str | None) -> None:
    source, target = (Linear(4, 96, scheme=SCHEMES.get(name or "")) for _ in range(2))
    source.write(values(4, 96))
    parts = {key: part.detach() for key, part in source.parts.items()}
    target.write_parts({key: part[1:3] for key, part in parts.items()}, rows=slice(1, 3))
    target.write_parts({key: part[[0]] for key, part in parts.items()}, rows=slice(0, 1))
    target.write_parts({key: part[3:] for key, part in parts.items()}, rows=slice(3, 4))
    assert same_bytes(source, target)


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_narrowing_on_meta_gives_the_stored_shapes_of_the_smaller_matrix(name: str | None) -> None:
    with torch.device("meta"):
        stack = StackedLinear(6, 8, 128, scheme=SCHEMES.get(name or ""), dtype=torch.bfloat16)
    stack.narrow_((2, 8, 64))
    fresh = StackedLinear(2, 8, 64, scheme=stack.scheme, dtype=torch.bfloat16)
    assert stack.logical_shape == (2, 8, 64)
    assert all(part.is_meta for part in stack.parts.values())
    assert {k: (v.shape, v.dtype) for k, v in stack.parts.items()} == {
        k: (v.shape, v.dtype) for k, v in fresh.parts.items()
    }
    assert set(stack.state_dict()) == set(fresh.state_dict())


def test_a_dense_weight_of_the_wanted_dtype_is_not_copied() -> None:
    layer = Linear(3, 5)
    assert layer.dense(torch.float32).data_ptr() == layer.weight.data_ptr()


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    layer, stack = Linear(6, 64), StackedLinear(2, 6, 64, scheme=SCHEMES["mxfp4"])
    with pytest.raises(LoadError, match=r"found \(3, 64\), expected \(2, 64\)"):
        layer.write(values(3, 64), rows=slice(4, 6))
    with pytest.raises(LoadError, match="weight_packed"):
        layer.write_parts(SCHEMES["mxfp4"].encode(values(6, 64)))
    with pytest.raises(LoadError, match="weight_scale"):
        stack.write_parts({"weight_packed": torch.zeros(6, 32, dtype=torch.uint8)}, index=0)
    with pytest.raises(LoadError, match="index=None"):
        stack.write(values(6, 64))
    with pytest.raises(LoadError, match="index=1"):
        layer.write(values(6, 64), index=1)
    with pytest.raises(LoadError, match="number of dimensions"):
        stack.narrow_((6, 64))


def test_a_precision_says_which_weights_are_quantised() -> None:
    schemes = {
        name: (Precision.parse(name).expert_scheme, Precision.parse(name).projection_scheme)
        for name in ("fp32", "bf16", "fp8", "int8", "int4", "mxfp4")
    }
    names = {name: tuple(scheme and scheme.name for scheme in pair) for name, pair in schemes.items()}
    assert names == {
        "fp32": (None, None),
        "bf16": (None, None),
        "fp8": ("fp8", "fp8"),
        "int8": ("int8", "int8"),
        "int4": ("int4", "int4"),
        "mxfp4": ("mxfp4", None),
    }
    assert (Precision.parse("fp32").dtype, Precision.parse("int8").dtype) == (torch.float32, torch.bfloat16)
    assert Precision.parse("int8", torch.float32).dtype == torch.float32
    with pytest.raises(LoadError, match="fp7"):
        Precision.parse("fp7")
