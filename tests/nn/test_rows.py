"""Cached rows of one byte a value: the codes, what they cost and lose, and a model that goes on from them."""

from __future__ import annotations

import pytest
import torch
from nn_tiny import batch_of, random_ids, tiny_model, tiny_spec
from torch import Tensor

from workbench.base import ConfigError
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.rows import RowFormat, RowTable, decode_rows_reference, row_format

CODED = ("fp8", "int8")
# Half a step: of 8 per power of two, the scale rounded up included; of 127 to the largest of a row.
RELATIVE_OF_VALUE, SHARE_OF_LARGEST = 2**-4, 0.5 / 127 * (1 + 2**-7)


def form_of(name: str) -> RowFormat:
    form = row_format(name)
    assert form is not None
    return form


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CODED)
def test_decoding_equals_the_float64_reference(name: str) -> None:
    codes, scales = form_of(name).encode(draws(7, 13) * 10 ** draws(7, 1, seed=1))
    decoded = form_of(name).decode(codes, scales, torch.float32)
    assert torch.equal(decoded.double(), decode_rows_reference(codes, scales))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_every_value_is_within_half_a_step(name: str, size: float) -> None:
    rows = draws(50, 33) * size
    found = form_of(name).decode(*form_of(name).encode(rows), torch.float32)
    largest = rows.abs().amax(-1, keepdim=True)
    if name == "int8":
        assert ((found - rows).abs() <= SHARE_OF_LARGEST * largest * (1 + 1e-5)).all()
    else:
        smallest = largest / 448 * 2**-9  # below the normal numbers steps are of one size
        assert ((found - rows).abs() <= torch.maximum(rows.abs() * RELATIVE_OF_VALUE, smallest) * 1.02).all()


@pytest.mark.parametrize("name", CODED)
def test_scales_are_rounded_up_so_that_no_code_passes_its_range(name: str) -> None:
    rows = torch.stack([torch.linspace(0, 1 + i / 997, 5) for i in range(997)])
    codes, scales = form_of(name).encode(rows)
    assert (scales.double() * form_of(name).largest >= rows.abs().amax(-1).double()).all()
    assert codes.float().abs().max() <= form_of(name).largest
    assert codes.float().abs().amax(-1).min() >= form_of(name).largest * 0.93, "most of the range is used"


def test_int8_bytes_are_pinned() -> None:
    codes, scales = form_of("int8").encode(torch.tensor([[127.0, -63.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert scales.tolist() == [1.0, 1.0]  # 1 + 2**-8 lies half way, and bf16 rounds to even
    assert codes.tolist() == [[127, -63, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", CODED)
def test_a_row_without_numbers_stays_one_and_does_not_reach_others(name: str) -> None:
    rows = torch.tensor([[1.0, float("nan"), 2.0], [3.0, -4.0, 5.0]])
    found = form_of(name).decode(*form_of(name).encode(rows), torch.float32)
    assert found[0].isnan().all()
    assert torch.allclose(found[1], rows[1], rtol=0.07)


@pytest.mark.parametrize("name", ["auto", *CODED])
def test_a_table_keeps_rows_at_slot_and_position(name: str) -> None:
    table = RowTable((3, 6, 2, 5), dtype=torch.float32, device="cpu", form=row_format(name))
    rows = draws(4, 2, 5)
    slots, positions = torch.tensor([2, 0, 2, 2]), torch.tensor([0, 3, 1, 2])
    table.write(slots, positions, rows)
    form = row_format(name)
    known = rows if form is None else form.decode(*form.encode(rows), torch.float32)
    assert torch.equal(table.of_slot(2, 3), known[[0, 2, 3]])
    assert torch.equal(table.first(torch.tensor([0, 2]), 4)[0, 3], known[1])
    assert torch.equal(table.dense()[2, :3], known[[0, 2, 3]])
    table.clear(slice(12, 14))  # the first two of slot 2
    assert not table.of_slot(2, 2).any()
    assert torch.equal(table.of_slot(2, 3)[2], known[3])


def test_memory_is_half_of_bf16_and_a_scale() -> None:
    spec = tiny_spec()
    sizes = {}
    for name in ("auto", *CODED):
        cache = StateCache(spec, range(1, 5), num_slots=3, max_tokens=70, dtype=torch.bfloat16, kv_dtype=name)
        sizes[name] = sum(table.nbytes for table in cache.latent.values())
    width = 28
    assert sizes["fp8"] == sizes["int8"] == sizes["auto"] * (width + 2) // (2 * width)


class RoundedCache(StateCache):
    """Rows in the activation dtype, each rounded through the format when it is written."""

    form: RowFormat

    def append_latent(self, layer_idx: int, slots: Tensor, positions: Tensor, latent: Tensor) -> None:
        rounded = self.form.decode(*self.form.encode(latent), latent.dtype)
        super().append_latent(layer_idx, slots, positions, rounded)


@pytest.mark.parametrize("name", CODED)
def test_a_model_goes_on_from_coded_rows_and_pages_of_them(name: str) -> None:
    model, ids = tiny_model(), random_ids(24)
    exact = model(TokenBatch.whole([ids], all_logits=True))
    sizes = {"num_slots": 4, "max_tokens": 80, "dtype": model.dtype}
    coded = StateCache(model.spec, model.layer_range, **sizes, kv_dtype=name)
    rounded = RoundedCache(model.spec, model.layer_range, **sizes)
    rounded.form = form_of(name)
    found = []
    for cache in (coded, rounded):
        cache.use_pages(9)
        cache.extend(1, 0, [5])
        logits = [model(batch_of([(1, 0, ids[:9])]), cache=cache)]
        cache.pages.seal(1, 0, 9)
        snapshot = cache.keep(1)
        cache.reset(1)
        cache.extend(3, 0, [5, 2, 7, 8], num_shared=1)
        cache.restore(3, snapshot)
        logits += [model(batch_of([(3, 9 + i, [token])]), cache=cache) for i, token in enumerate(ids[9:20])]
        found.append(torch.cat([*logits, model(batch_of([(3, 20, ids[20:])]), cache=cache)]))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], exact, rtol=1e-6)


def test_an_unknown_storage_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"fp4.*auto, fp8, int8"):
        row_format("fp4")
