"""Precision sweeps: what each group costs, the path of mixes, and the mix that meets a budget."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from planted import write_model

from workbench.align import Budget, Sensitivity, SweepReport, sweep_precisions
from workbench.align.mix import hull_of, mix_path, predicted
from workbench.base import RequestError
from workbench.loading import load_sharded_weights
from workbench.nn.model import Model
from workbench.nn.quant import SCHEMES
from workbench.view import precision_pareto, sensitivity_bars

RNG = random.Random(3)
SEQUENCES = [[RNG.randrange(160) for _ in range(24)], [RNG.randrange(160) for _ in range(9)]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    return load_sharded_weights(root, precision="fp32", device="cpu").model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def swept(model: Model) -> SweepReport:
    return sweep_precisions(model, SEQUENCES, Budget(kl=0.05))


def option(group: str, scheme: str, stored: int, kl: float) -> Sensitivity:
    return Sensitivity(group=group, scheme=scheme, bytes_plain=100, bytes_stored=stored, kl=kl, top1=1.0)


def test_formats_above_the_hull_are_left_out() -> None:
    options = [option("a", "fp8", 50, 0.2), option("a", "int8", 50, 0.1), option("a", "int4", 27, 0.9)]
    assert [x.scheme for x in hull_of(options)] == ["int8", "int4"]
    assert [x.scheme for x in hull_of(options[:2])] == ["int8"], "of one size only the cheaper"
    # A smaller format that costs less makes the larger one pointless; one that saves nothing is none.
    assert [x.scheme for x in hull_of([*options, option("a", "mxfp4", 26, 0.05)])] == ["mxfp4"]
    assert hull_of([option("a", "fp8", 100, 0.0)]) == []
    # On the way to int4 the middle format costs more per byte than going there at once.
    dear = [option("a", "int8", 60, 0.8), option("a", "int4", 20, 0.9)]
    assert [x.scheme for x in hull_of(dear)] == ["int4"]


def test_the_path_takes_the_cheapest_byte_first() -> None:
    options = [
        option("a", "int8", 50, 0.1),
        option("a", "int4", 25, 0.9),
        option("b", "int8", 50, 0.01),
        option("b", "int4", 25, 0.2),
    ]
    path = mix_path(options)
    assert path == [
        {"a": "bf16", "b": "bf16"},
        {"a": "bf16", "b": "int8"},
        {"a": "int8", "b": "int8"},
        {"a": "int8", "b": "int4"},
        {"a": "int4", "b": "int4"},
    ]
    sizes = [predicted(choice, options) for choice in path]
    assert sizes[0] == (200, 0.0)
    assert sizes[-1] == (50, pytest.approx(1.1))
    assert all(a[0] > b[0] and a[1] <= b[1] for a, b in itertools.pairwise(sizes))


def test_each_group_is_measured_alone_and_put_back(model: Model, swept: SweepReport) -> None:
    groups = {x.group for x in swept.sensitivities}
    assert groups == {
        "routed experts", "shared experts", "dense feed-forward", "queries, keys, values", "latent projections",
        "output gate", "mixer output",
    }  # fmt: skip
    by_key = {(x.group, x.scheme): x for x in swept.sensitivities}
    experts = by_key["routed experts", "mxfp4"]
    assert experts.kl == pytest.approx(0.0, abs=1e-9), "they are published in it"
    assert experts.top1 == 1.0
    attention = by_key["queries, keys, values", "int4"], by_key["queries, keys, values", "int8"]
    assert attention[0].kl > attention[1].kl > 0
    weight = model.layers["0"].mixer.q_proj.weight
    assert torch.equal(weight, weight.bfloat16().float()), "the published values are back"
    num = sum(model.layers[str(i)].ffn.experts.w1.num_params for i in range(1, 5))
    assert experts.bytes_plain == 2 * 3 * num
    assert experts.bytes_stored == 3 * num // 2 + 3 * num // 32


def test_a_budget_of_error_is_met_by_the_measured_mix(swept: SweepReport) -> None:
    assert swept.chosen is not None
    assert swept.chosen.kl is not None
    assert swept.chosen.kl <= 0.05
    assert swept.chosen.ratio < 0.8
    smaller = [mix for mix in swept.mixes if mix.bytes_total < swept.chosen.bytes_total]
    assert all(mix.kl is None or mix.kl > 0.05 for mix in smaller)
    assert swept.ok
    assert "KL at most 0.05" in swept.verdict()


def test_a_budget_of_bytes_takes_the_largest_mix_that_fits(model: Model) -> None:
    report = sweep_precisions(model, SEQUENCES[1:], Budget(ratio=0.6), formats=("fp8", "int4"))
    assert report.chosen is not None
    assert report.chosen.ratio <= 0.6
    assert {mix.name for mix in report.uniform} == {"fp8", "int4"}
    impossible = sweep_precisions(model, SEQUENCES[1:], Budget(num_bytes=10), formats=("fp8",))
    assert not impossible.ok
    assert "no mix meets" in impossible.verdict()


def test_the_map_of_the_mix_is_what_a_loader_holds(
    root: Path, model: Model, swept: SweepReport, tmp_path: Path
) -> None:
    assert swept.precision_map is not None
    assert swept.chosen is not None
    swept.precision_map.save(tmp_path / "map.json")
    loaded = load_sharded_weights(root, precision=str(tmp_path / "map.json"), device="cpu").model
    stores = {
        "routed experts": loaded.layers["2"].ffn.experts.w1,
        "mixer output": loaded.layers["1"].mixer.o_proj,
        "latent projections": loaded.layers["3"].mixer.q_a_proj,
    }
    for group, store in stores.items():
        wanted = dict(swept.chosen.schemes)[group]
        assert store.scheme is SCHEMES.get(wanted), group


def test_the_record_is_one_document_and_has_its_pictures(swept: SweepReport) -> None:
    record = json.loads(json.dumps(swept.to_json(), allow_nan=False))
    assert record["precision_map"]["format"] == "workbench-precision-map"
    pareto = precision_pareto(swept)
    assert {"mixes", "chosen", "fp8", "mxfp4"} <= {series.name for series in pareto.series}
    assert sensitivity_bars(swept).values
    assert "(chosen)" in swept.render() or swept.chosen in swept.mixes
    assert "<table" in swept._repr_html_()


def test_groups_by_layer(model: Model) -> None:
    report = sweep_precisions(model, SEQUENCES[1:], Budget(ratio=0.9), formats=("fp8",), granularity="layer")
    assert {x.group for x in report.sensitivities} == {f"layer {i}" for i in range(5)}


def test_what_cannot_be_swept_is_refused(root: Path, model: Model) -> None:
    with pytest.raises(RequestError, match="nothing to measure"):
        sweep_precisions(model, [], Budget(kl=0.1))
    with pytest.raises(RequestError, match="unknown formats"):
        sweep_precisions(model, SEQUENCES, Budget(kl=0.1), formats=("nf4",))
    with pytest.raises(RequestError, match="one limit"):
        Budget(kl=0.1, ratio=0.5)
    with pytest.raises(RequestError, match="one limit"):
        Budget()
    held = load_sharded_weights(root, precision="fp8", device="cpu").model
    with pytest.raises(RequestError, match="held in a scheme already"):
        sweep_precisions(held, SEQUENCES, Budget(kl=0.1))
