"""The ledger: each kind of trouble is planted in it and named by it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from workbench.base import LoadError
from workbench.loading import Ledger, SourceRef
from workbench.loading.ledger import content_sums
from workbench.nn.linear import Linear, StackedLinear
from workbench.nn.quant import SCHEMES


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "proj": Linear(6, 5),
            "experts": StackedLinear(2, 3, 32, scheme=SCHEMES["mxfp4"]),
            "norm": nn.RMSNorm(5),
        }
    )


SOURCE = SourceRef("published.name", "model-00001.safetensors", 4096, 60)


def fill(ledger: Ledger, skip: tuple[str, int | None] | None = None) -> None:
    """Write everything once, with plausible contents, but for one entry."""
    for entry in ledger.entries:
        if (entry.name, entry.slot) != skip:
            ledger.record(entry.name, entry.slot, (0, entry.num_rows), sources=(SOURCE,), transform="copy")
            ledger.observe(entry.name, entry.slot, torch.ones(entry.num_rows, entry.num_columns))


def test_a_complete_ledger_closes_and_tells_norms_sources_and_counts() -> None:
    ledger = Ledger(model(), rank=3)
    assert [entry.label for entry in ledger.entries] == [
        "proj.weight", "norm.weight", "experts.weight_packed[0]", "experts.weight_packed[1]",
        "experts.weight_scale[0]", "experts.weight_scale[1]",
    ]  # fmt: skip
    fill(ledger)
    ledger.close(iter(["published.name"]))
    assert ledger.entry("proj.weight").norm == pytest.approx(30**0.5)
    assert ledger.entry("experts.weight_packed", 1).sources == (SOURCE,)
    summary = ledger.summary()
    assert (summary["entries"], summary["rows"], summary["rows_written"], summary["rank"]) == (6, 23, 23, 3)
    record = json.loads(ledger.to_json())
    assert record["parameters"][0]["sources"][0] == {
        "name": "published.name", "file": "model-00001.safetensors", "offset": 4096, "bytes": 60,
    }  # fmt: skip
    text = ledger.render(limit=2)
    assert "proj.weight" in text
    assert "and 4 more" in text
    assert "model-00001.safetensors   4,096" in text


def test_a_parameter_that_was_never_written_is_missing_by_name_and_rows() -> None:
    ledger = Ledger(model())
    fill(ledger, skip=("experts.weight_scale", 0))
    ledger.record("experts.weight_scale", 0, (0, 1))
    with pytest.raises(LoadError, match=r"missing: experts.weight_scale\[0\] rows 1..3"):
        ledger.close()


def test_rows_written_twice_fail_at_once_with_the_second_source() -> None:
    ledger = Ledger(model())
    ledger.record("proj.weight", None, (0, 4), sources=(SOURCE,))
    ledger.record("proj.weight", None, (4, 5))
    with pytest.raises(LoadError, match=r"written twice: rows 3..4 of proj.weight, now from published.name"):
        ledger.record("proj.weight", None, (3, 4), sources=(SOURCE,))


@pytest.mark.parametrize(
    ("name", "slot", "rows"),
    [
        ("proj.bias", None, (0, 6)),
        ("experts.weight_packed", 2, (0, 3)),
        ("proj.weight", None, (5, 7)),
        ("norm.weight", None, (2, 2)),
    ],
)
def test_a_write_without_a_place_is_left_over(name: str, slot: int | None, rows: tuple[int, int]) -> None:
    with pytest.raises(LoadError, match="left over: rows"):
        Ledger(model()).record(name, slot, rows)


def test_a_planned_tensor_that_filled_nothing_is_left_over() -> None:
    ledger = Ledger(model())
    fill(ledger)
    with pytest.raises(LoadError, match=r"left over: another.name was planned and filled nothing"):
        ledger.close(iter(["published.name", "another.name"]))


def observed(name: str, slot: int | None, values: torch.Tensor, *, check: bool = True) -> Ledger:
    ledger = Ledger(model(), check=check)
    fill(ledger, skip=(name, slot))
    ledger.record(name, slot, (0, ledger.entry(name, slot).num_rows), sources=(SOURCE,))
    ledger.observe(name, slot, values)
    return ledger


@pytest.mark.parametrize(
    ("name", "slot", "values", "message"),
    [
        ("proj.weight", None, torch.zeros(6, 5), r"all zero: proj.weight \(from published.name\)"),
        ("experts.weight_packed", 1, torch.zeros(3, 16), r"all zero: experts.weight_packed\[1\]"),
        ("experts.weight_scale", 0, torch.zeros(3, 1, dtype=torch.uint8), r"all zero: experts.weight_scale\[0\]"),
        ("proj.weight", None, torch.full((6, 5), torch.nan), "not finite: proj.weight"),
        ("norm.weight", None, torch.tensor([1.0, torch.inf, 1, 1, 1]), "not finite: norm.weight"),
    ],
)
def test_contents_that_cannot_be_are_refused_by_name_unless_checks_are_off(
    name: str, slot: int | None, values: torch.Tensor, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        observed(name, slot, values).close()
    observed(name, slot, values, check=False).close()


def test_a_stored_scale_of_zeros_is_refused_even_where_it_was_expanded_away() -> None:
    ledger = Ledger(model())
    fill(ledger)
    ledger.observe_scale("proj.weight", None, torch.zeros(6, 1, dtype=torch.uint8))
    with pytest.raises(LoadError, match=r"all zero: the scale of proj.weight"):
        ledger.close()


def test_zero_vectors_and_zero_rows_are_warnings() -> None:
    ledger = observed("norm.weight", None, torch.zeros(5))
    ledger.close()
    assert ledger.warnings == ["norm.weight is all zero (from published.name)"]
    values = torch.ones(6, 5)
    values[2:4] = 0
    ledger = observed("proj.weight", None, values)
    ledger.close()
    assert ledger.warnings == ["proj.weight has 2 of 6 rows all zero"]


def test_norms_of_pieces_add_up_in_squares_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.loading import ledger as room

    values = torch.randn(6, 5)
    for block in (1, 7, 1 << 18):
        monkeypatch.setattr(room, "BLOCK", block)
        ledger = Ledger(model())
        fill(ledger, skip=("proj.weight", None))
        for first, last in ((0, 2), (2, 6)):
            ledger.record("proj.weight", None, (first, last), sources=(SOURCE,))
            ledger.observe("proj.weight", None, values[first:last])
        ledger.close()
        assert ledger.entry("proj.weight").norm == pytest.approx(values.norm().item())


def test_a_stored_scale_that_is_nan_is_refused_where_the_codes_alone_cannot_show_it() -> None:
    ledger = Ledger(model())
    fill(ledger)
    ledger.observe_scale("proj.weight", None, torch.tensor([[127], [255]], dtype=torch.uint8))
    with pytest.raises(LoadError, match=r"not finite: the scale of proj.weight .*255"):
        ledger.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (37, 129), (3, 5, 2048), (513, 40)], ids=str)
def test_sums_of_content_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3 + 1).to(dtype)
    if len(shape) > 1 and shape[0] > 1:
        values[1] = torch.zeros(shape[1:])
    square, num_zero_rows = content_sums(values).tolist()
    assert square == pytest.approx(values.double().square().sum().item(), rel=3e-6)
    assert num_zero_rows == (len(shape) > 1 and shape[0] > 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_shows_in_the_sum(value: float, dtype: torch.dtype) -> None:
    values = torch.ones(9, 33, dtype=dtype)
    values[3, 32] = value
    assert not content_sums(values)[0].isfinite()


def test_a_row_of_one_tiny_value_is_not_a_row_of_zeros() -> None:
    values = torch.zeros(3, 40, dtype=torch.bfloat16)
    values[1, 39] = 1e-15
    assert content_sums(values)[1] == 2
