"""The exchangeable equations are those of the reference, and a changed one changes what it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planted import SIZES, TOKENS, write_model

from workbench.align import PublishedWeights, ReferencePrompt, Trace, reference_traces
from workbench.align.equations import Facts, LayerBench
from workbench.align.equations_edge import EDGE_NAMES, EdgeBench
from workbench.align.reference_weights import read_reference_config
from workbench.align.suspects import edge_suspects, layer_suspects

LAYERS = range(SIZES["num_layers"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def weights(root: Path) -> Iterator[PublishedWeights]:
    with PublishedWeights(root) as opened:
        yield opened


@pytest.fixture(scope="module")
def facts(root: Path) -> Facts:
    return Facts(read_reference_config(root)[1])


@pytest.fixture(scope="module")
def trace(root: Path) -> Trace:
    return reference_traces(root, [ReferencePrompt(token_ids=TOKENS)])[0]


def bench_of(layer: int, facts: Facts, weights: PublishedWeights, trace: Trace) -> LayerBench:
    def read_layer(idx: int):  # type: ignore[no-untyped-def]
        return lambda name: weights(f"language_model.model.layers.{idx}.{name}")

    chosen = (trace[f"L{layer}.topk_idx"], trace[f"L{layer}.topk_w"]) if f"L{layer}.topk_idx" in trace else None
    return LayerBench(layer, facts, read_layer(layer), trace, chosen, read_layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_bench_computes_what_the_reference_does(
    layer: int, facts: Facts, weights: PublishedWeights, trace: Trace
) -> None:
    bench = bench_of(layer, facts, weights, trace)
    names = bench.names()
    assert {name for name in names if f"L{layer}.{name}" not in trace} == set()
    for name in names:
        made = bench.compute(name)
        assert made is not None, name
        expected = trace[f"L{layer}.{name}"].double()
        assert made.shape == expected.shape
        assert (made.double() - expected).norm() <= 1e-12 * expected.norm() + 1e-300, name


def test_the_ends_compute_what_the_reference_does(facts: Facts, weights: PublishedWeights, trace: Trace) -> None:
    bench = EdgeBench(facts, lambda name: weights(f"language_model.{name}"), trace, TOKENS)
    for name in EDGE_NAMES:
        made = bench.compute(name)
        assert made is not None
        assert (made - trace[name]).norm() <= 1e-12 * trace[name].norm()


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_each_suspect_changes_what_it_shows_in_and_nothing_else(
    layer: int, facts: Facts, weights: PublishedWeights, trace: Trace
) -> None:
    right = bench_of(layer, facts, weights, trace)
    expected = {name: right.compute(name) for name in right.names()}
    handles: dict[str, int] = {}
    changed = 0
    for suspect in layer_suspects(facts, layer):
        handles[suspect.name] = handles.get(suspect.name, 0) + 1
        assert set(suspect.shows_in) <= set(right.names()), suspect.name
        bench = bench_of(layer, facts, weights, trace)
        suspect.change(bench)
        try:
            wrong = {name: bench.compute(name) for name in suspect.shows_in}
        except (RuntimeError, IndexError):  # not square, or heads that do not fit
            continue
        changed += any(not torch.equal(value, expected[name]) for name, value in wrong.items())  # type: ignore[arg-type]
    assert changed > 60
    assert len(handles) > 50


def test_the_ends_have_suspects_of_their_own(facts: Facts) -> None:
    names = {suspect.name for suspect in edge_suspects(facts)}
    assert {"norm_eps.final_norm", "tied.head", "ids_shifted.embed", "embed_scaled", "residual.mean"} <= names


def test_an_input_that_the_trace_lacks_is_no_error(facts: Facts, weights: PublishedWeights, trace: Trace) -> None:
    poor = {name: value for name, value in trace.items() if name != "L3.mla_q"}
    bench = bench_of(3, facts, weights, poor)
    assert bench.compute("mla_gated") is None
    assert bench.compute("attn_out") is not None
    assert bench.compute("nothing") is None
