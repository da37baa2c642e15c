"""Alignment of deployments: added and inherited errors, no alarm for sound ranks, and what a rank does wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from planted import TOKENS, write_model

from workbench.align import (
    ForeignTrace,
    ParityPrompt,
    Served,
    Trace,
    align_model,
    counter_test,
    held_weights,
    model_forward,
    model_replay,
    schemes_of,
    served_by,
)
from workbench.align.merge import redo_split, undo_split
from workbench.align.metrics import logit_agreement, measure, router_agreement
from workbench.align.replay import given_for_rank, replaying
from workbench.base import RequestError
from workbench.deployment import Deployment
from workbench.loading import load_sharded_weights
from workbench.nn.model import Model
from workbench.placement import Layout
from workbench.spec import read_spec
from workbench.view import errors_by_layer

PROMPTS = [ParityPrompt(label="text", token_ids=TOKENS), ParityPrompt(label="short", token_ids=TOKENS[:2])]
FEW_SEEDS, MANY_SEEDS = range(1), range(1, 20)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    return load_sharded_weights(root, precision="bf16", device="cpu").model.requires_grad_(False).eval()


def served_here(model: Model, dtype: torch.dtype = torch.bfloat16) -> Served:
    return Served(forward=model_forward(model), replay=model_replay(model), dtype=dtype, label="in process")


def deployed(root: Path, layout: Layout, precision: str, prompts: Sequence[ParityPrompt]):  # type: ignore[no-untyped-def]
    with Deployment.start(root, layout, precision=precision, device="cpu", num_slots=1, max_tokens=16) as deployment:
        served = served_by(deployment, precision=precision)
        assert served.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
        return align_model(served, root, prompts)


def test_the_error_of_a_step_is_told_from_what_it_inherits(root: Path, model: Model) -> None:
    report = align_model(served_here(model), root, PROMPTS)
    assert report.passed, report.render()
    rows = {row.name: row for row in report.rows if row.prompt == "text"}
    late = rows["L4.attn_in"]
    assert late.added is not None
    assert late.inherited is not None
    assert late.total is not None
    assert late.inherited > 2 * late.added.relative  # a mix adds one rounding to what it got
    assert rows["L0.attn_in"].inherited == 0.0
    assert all(row.severity < 3 for row in report.rows if row.added is not None)
    assert all(row.limit >= 3 * 2**-9 for row in report.rows)
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert record["guilty"] is None
    assert len(record["tensors"]) == len(report.rows)
    chart = errors_by_layer(report)
    assert [series.name for series in chart.series] == ["added here", "inherited", "noise floor"]
    assert "<table" in report._repr_html_()


def test_a_mistake_before_the_step_is_inherited_by_all_that_follow(root: Path, model: Model) -> None:
    def wrong_from_layer_one(
        prompts: Sequence[ParityPrompt], given: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[Trace]:
        weight = model.layers["1"].mixer.o_proj.weight
        kept = weight.clone()
        weight.mul_(1.5)
        try:
            return list(model_replay(model)(prompts, given))
        finally:
            weight.copy_(kept)

    served = Served(
        forward=lambda prompts: wrong_from_layer_one(prompts, []),
        replay=wrong_from_layer_one,
        dtype=torch.bfloat16,
        label="wrong",
    )
    report = align_model(served, root, PROMPTS[:1])
    assert report.blame is not None
    assert report.blame.name == "L1.attn_out"
    wrong = {row.name for row in report.rows if not row.passed}
    assert wrong == {"L1.attn_out"}, "later steps are right on right inputs"
    inherited = {row.name: row.inherited for row in report.rows}
    assert inherited["L3.mla_q"] is not None
    assert inherited["L3.mla_q"] > 0.02
    tests = counter_test(report, root, PROMPTS[:1])
    assert tests is not None


@pytest.mark.ranks
@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_sound_ranks_raise_no_alarm(seed: int, tmp_path: Path) -> None:
    report = deployed(write_model(tmp_path, seed), Layout(tp=2, ep=2), "bf16", PROMPTS)
    assert report.passed, report.render()
    assert not any(side.total.missing for side in report.sides if side.total is not None)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("seed", MANY_SEEDS)
def test_sound_ranks_raise_no_alarm_with_many_seeds(seed: int, tmp_path: Path) -> None:
    report = deployed(write_model(tmp_path, seed), Layout(tp=2, ep=2), "bf16", PROMPTS)
    assert report.passed, report.render()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "precision"), [(Layout(pp=2), "fp32"), (Layout(tp=2), "int8")], ids=["pp2 fp32", "tp2 int8"]
)
def test_other_layouts_and_held_weights_raise_no_alarm(layout: Layout, precision: str, root: Path) -> None:
    report = deployed(root, layout, precision, PROMPTS)
    assert report.passed, report.render()


def test_weights_that_are_approximated_are_judged_by_what_is_held(root: Path) -> None:
    held = load_sharded_weights(root, precision="fp8", device="cpu").model.requires_grad_(False).eval()
    spec = held.spec
    change = held_weights(spec, schemes_of(spec, "fp8"))
    served = served_here(held)
    blind = align_model(served, root, PROMPTS[:1])
    assert not blind.passed, "published weights are others"
    seeing = align_model(Served(**{**vars(served), "held": change}), root, PROMPTS[:1])
    assert seeing.passed, seeing.render()
    assert held_weights(spec, schemes_of(spec, "bf16")) is None


def test_what_cannot_be_aligned_is_refused(root: Path, model: Model) -> None:
    with pytest.raises(RequestError, match="nothing to align on"):
        align_model(served_here(model), root, [])
    with pytest.raises(RequestError, match="no noise floor"):
        align_model(served_here(model, torch.float16), root, PROMPTS[:1])
    reference = ForeignTrace(traces=[{}], dtype=torch.float32, label="one")
    with pytest.raises(RequestError, match="traces for 2 prompts"):
        align_model(served_here(model), root, PROMPTS, reference=reference)


def test_splitting_again_is_the_inverse_of_joining(root: Path) -> None:
    spec, layout = read_spec(root), Layout(tp=2)
    for name, shape in {
        "L0.kda_q": (5, 4, 16),
        "L0.kda_beta_logit": (5, 4),
        "L3.mla_gated": (5, 64),
        "L1.moe_shared_out": (5, 96),
        "L1.mlp_in": (5, 96),
    }.items():
        whole = torch.randn(shape)
        pieces = [redo_split(name, whole, spec, layout, rank) for rank in range(2)]
        assert torch.equal(undo_split(name, pieces, spec, layout), whole), name


def test_a_given_value_of_another_shape_is_refused(model: Model) -> None:
    given = given_for_rank([{"L0.attn_out": torch.zeros(3, 96)}], model.spec, Layout(), 0)
    assert given.keys() == {"layers.0.mixer:out"}
    from workbench.nn.batch import TokenBatch

    with pytest.raises(RequestError, match="does not fit"), replaying(model, given):
        model(TokenBatch.whole([[1, 2]]))
    with pytest.raises(RequestError, match="no module"), replaying(model, {"layers.9.mixer:out": given.popitem()[1]}):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_distances_are_in_places_of_the_working_dtype() -> None:
    expected = torch.tensor([1.0, 2.0, 4.0, -8.0])
    found = expected + torch.tensor([2.0**-7, 0.0, 2.0**-4, 0.0])
    distance = measure(expected, found, torch.bfloat16)
    assert distance.ulp_max == 2.0
    assert distance.max_abs == 2.0**-4
    assert measure(expected, found, torch.float32).ulp_max == 2.0 * 2**16
    assert distance.relative == pytest.approx(math.hypot(2**-7, 2**-4) / math.sqrt(85))
    assert measure(expected, expected, torch.bfloat16).cosine == pytest.approx(1.0)
    broken = measure(expected, torch.full_like(expected, math.nan), torch.bfloat16)
    assert math.isinf(broken.relative)
    assert broken.to_json()["ulp"] == "inf"
    assert measure(torch.zeros(0), torch.zeros(0), torch.float32).relative == 0.0


def test_agreement_of_logits_and_of_experts() -> None:
    expected = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    same = logit_agreement(expected, expected + 5.0)
    assert same.kl_max == pytest.approx(0.0, abs=1e-12)
    assert same.top1 == 1.0
    other = logit_agreement(expected, expected.flip(-1))
    p = torch.softmax(expected.double(), -1)
    kl = (p * (p.log() - p.flip(-1).log())).sum(-1)
    assert other.kl_mean == pytest.approx(kl.mean().item())
    assert other.top1 == 0.5
    assert math.isinf(logit_agreement(expected, torch.full_like(expected, math.inf)).kl_max)
    (router,) = router_agreement({3: torch.tensor([[0, 2], [1, 4]])}, {3: torch.tensor([[2, 0], [1, 5]])})
    assert (router.layer, router.same_sets, router.overlap) == (3, 0.5, 0.75)
