"""Stage payloads: their size follows from the residual scheme, and they travel forward and their gradients back."""

from __future__ import annotations

from pathlib import Path

import collective_tasks as tasks
import pytest
import torch
from ranks import shared_ranks

from workbench.base import LayoutError
from workbench.parallel import Pipeline, payload_vectors, single_context
from workbench.placement import Layout
from workbench.spec import ModelSpec, read_spec

TINY = Path(__file__).resolve().parents[1] / "golden" / "k3-tiny-a"  # 8 layers in residual blocks of 3


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(TINY)


@pytest.mark.parametrize(
    ("stages", "vectors"), [((4, 4), (0, 3)), ((3, 5), (0, 2)), ((1, 2, 1, 4), (0, 2, 2, 3)), ((7, 1), (0, 4))]
)
def test_c05_payload_grows_with_the_vectors_saved_before_the_boundary(
    spec: ModelSpec, stages: tuple[int, ...], vectors: tuple[int, ...]
) -> None:
    layout = Layout(pp=len(stages), stages=stages)
    assert tuple(payload_vectors(spec, layout, stage) for stage in range(layout.pp)) == vectors


@pytest.mark.ranks
@pytest.mark.parametrize("num_tokens", [5, 0])
def test_payload_and_gradient_travel_between_uneven_stages(spec: ModelSpec, num_tokens: int) -> None:
    layout = Layout(pp=3, stages=(3, 4, 1))
    results = shared_ranks().run(tasks.pass_payload, spec, layout, num_tokens, world_size=3)
    shapes = [None, (2, num_tokens, 144), (4, num_tokens, 144)]
    for stage, result in enumerate(results):
        if stage:
            assert result["got"] == (shapes[stage], [float(stage - 1)] if num_tokens else [])
        if stage < 2:
            assert result["back"] == (shapes[stage + 1], [2.0 ** (1 - stage)] if num_tokens else [])
        assert result["calls"] == (0 if not num_tokens else (2, 4, 2)[stage])


def test_a_payload_of_another_width_or_dtype_is_refused(spec: ModelSpec) -> None:
    ctx = single_context()
    pipeline = Pipeline(spec, ctx, torch.bfloat16)
    assert pipeline.receive(4) is None
    pipeline.vectors_out = 3  # as on the first of two stages
    with pytest.raises(LayoutError, match=r"payload of stage 0 \(found torch.float32"):
        pipeline.send(torch.zeros(3, 4, spec.hidden_size))
    with pytest.raises(LayoutError, match=r"found torch.bfloat16 \(2, 4, 144\), expected torch.bfloat16 \(3, 4, 144\)"):
        pipeline.send(torch.zeros(2, 4, spec.hidden_size, dtype=torch.bfloat16))
