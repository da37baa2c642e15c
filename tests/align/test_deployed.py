"""Parity of a deployment: what its ranks captured, cut by sequence, merged, and compared."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from align_checkpoints import TINY, load_fp32, picture_prompt, text_prompt

from workbench.align import ParityPrompt, check_parity, deployment_forward
from workbench.align.sources import trace_sources
from workbench.base import DeploymentError, RequestError
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.spec import read_spec

SPEC = read_spec(TINY)


def test_every_source_of_a_trace_names_a_module_or_a_cache_table() -> None:
    modules = dict(load_fp32().named_modules())
    for name, source in trace_sources(SPEC).items():
        path, _, side = source.partition(":")
        if source.startswith("cache."):
            assert source.split(".")[1] in ("conv", "state", "latent"), name
        else:
            assert path in modules, name
            assert side.split(".")[0] in ("in", "out"), name


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, ep=2, dispatch="all_to_all"), Layout(pp=2, stages=(5, 3))], ids=lambda layout: str(layout)
)
def test_real_ranks_agree_with_the_reference(layout: Layout) -> None:
    prompts = [text_prompt(), picture_prompt(), text_prompt("short", 3)]
    with Deployment.start(TINY, layout, precision="fp32", device="cpu") as deployment:
        report = check_parity(deployment_forward(deployment), TINY, prompts)
        alone = check_parity(deployment_forward(deployment), TINY, prompts[:1])
    assert report.passed, report.render()
    assert {"L0.kda_state", "L3.latent", "blocks", "logits"} <= {diff.name for diff in report.comparisons[1].diffs}
    assert alone.passed, alone.render()


def test_captured_rows_that_do_not_add_up_are_refused() -> None:
    captured = {"layers.0.mixer:out": np.zeros((4, SPEC.hidden_size), np.float32)}
    result = SimpleNamespace(captured=[captured])
    fake = SimpleNamespace(spec=SPEC, layout=Layout(), forward=lambda *args, **kwargs: result)
    with pytest.raises(DeploymentError, match=r"layers\.0\.mixer:out has 4 rows"):
        deployment_forward(fake)([text_prompt("short", 3)])


def test_placeholders_must_be_one_run_per_picture() -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the prompt was sent")

    forward = deployment_forward(SimpleNamespace(spec=SPEC, layout=Layout(), forward=refuse))
    prompt = picture_prompt()
    torn = list(prompt.token_ids)
    torn[torn.index(505) + 1] = 9
    with pytest.raises(RequestError, match="placeholders and picture rows"):
        forward([ParityPrompt(label="torn", token_ids=tuple(torn), images=prompt.images)])
    floats = tuple(dataclasses.replace(image, patches=image.patches.astype(np.float32)) for image in prompt.images)
    with pytest.raises(RequestError, match="takes patches as bytes"):
        forward([ParityPrompt(label="floats", token_ids=prompt.token_ids, images=floats)])
