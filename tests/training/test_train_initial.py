"""Drawn parameters: the same whatever the layout, and of the kind each block wants."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import make_packs, tiny_config

from workbench.parallel import build_stage, single_context
from workbench.placement import Layout
from workbench.serving.inputs import normalise
from workbench.training.initial import FASTEST, SLOWEST, initialise
from workbench.training.sharding import join_parameters, own_ranges, take, whole_shapes
from workbench.training.step import token_batch

CONFIG = tiny_config()
SPEC = CONFIG.spec()


def drawn(layout: Layout, rank: int, seed: int = 7) -> dict[str, torch.Tensor]:
    model = build_stage(SPEC, layout, rank, precision="fp32")
    model.to_empty(device="cpu")
    initialise(model, layout, rank, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("text", ["tp2", "tp4xep2", "dp2xep2", "pp2xtp2", "pp4"])
def test_every_layout_draws_the_same_model(text: str) -> None:
    layout, whole = Layout.parse(text), drawn(Layout(), 0)
    joined = join_parameters(SPEC, layout, [drawn(layout, rank) for rank in range(layout.world_size)])
    assert joined.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(joined[name], value), name


def test_another_seed_draws_other_matrices_and_the_same_norms() -> None:
    a, b = drawn(Layout(), 0), drawn(Layout(), 0, seed=8)
    assert not torch.equal(a["embed.weight"], b["embed.weight"])
    assert torch.equal(a["final_norm.weight"], b["final_norm.weight"])


def test_packed_rows_of_the_vision_tower_are_cut_head_by_head() -> None:
    """wqkv is q, k, v behind one another: a rank's piece takes its heads of each, not one run of rows."""
    layout = Layout(tp=2)
    shape = whole_shapes(SPEC)["vision.blocks.0.wqkv.weight"]
    ranges = own_ranges(SPEC, layout, layout.coords(1), "vision.blocks.0.wqkv.weight", shape)
    assert ranges == (((24, 48), (72, 96), (120, 144)), ((0, 24),))
    whole = torch.arange(shape[0])[:, None].expand(shape)
    assert take(whole, ranges)[:, 0].tolist() == [*range(24, 48), *range(72, 96), *range(120, 144)]


def test_decays_spread_from_a_token_to_hundreds() -> None:
    parameters = drawn(Layout(), 0)
    decay = 5 * torch.sigmoid(parameters["layers.0.mixer.dt_bias"])
    assert decay.min() >= SLOWEST * 0.99
    assert decay.max() <= FASTEST * 1.01
    assert decay.max() / decay.min() > 50


def test_the_first_logits_are_nearly_even_and_finite() -> None:
    ctx = single_context()
    model = build_stage(SPEC, Layout(), 0, precision="fp32")
    model.to_empty(device="cpu")
    initialise(model, Layout(), 0, 7)
    (pack,) = make_packs(1)
    with torch.no_grad():
        logits = model(token_batch(model, ctx, pack))
    assert torch.isfinite(logits).all()
    assert 0.05 < logits.std() < 1.0


def test_pictures_sorted_by_size_keep_their_places_in_the_text() -> None:
    """Each row of the text gets the feature that the picture encoded alone gives it."""
    ctx = single_context()
    model = build_stage(SPEC, Layout(), 0, precision="fp32")
    model.to_empty(device="cpu")
    initialise(model, Layout(), 0, 7)
    pack = make_packs(1, token_budget=1500)[0]
    assert len(set(pack.grids)) > 1
    assert list(pack.grids) != sorted(pack.grids)
    with torch.no_grad():
        batch = token_batch(model, ctx, pack)
        assert batch.image_rows is not None
        assert batch.image_features is not None
        assert SPEC.image is not None
        pixels = torch.from_numpy(normalise(pack.patches, SPEC.image))
        sizes = [rows * columns for _, rows, columns in pack.grids]
        alone = [model.encode_images(x, [g]) for x, g in zip(pixels.split(sizes), pack.grids, strict=True)]
    by_row = torch.zeros(pack.num_tokens, SPEC.hidden_size).index_copy(0, batch.image_rows, batch.image_features)
    torch.testing.assert_close(by_row[torch.from_numpy(pack.image_rows)], torch.cat(alone))
