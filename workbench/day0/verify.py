"""Is it the published model? The ranks against an independent reference, and each request against itself in company."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from workbench.align import Tolerance, check_parity, deployment_forward, require_reference, tolerance_for
from workbench.base import WorkbenchError
from workbench.day0.gates import GateBook
from workbench.day0.prompts import draw_pictures, parity_prompts
from workbench.deployment import Deployment
from workbench.report import Section
from workbench.serving import Engine, GenerationRequest, ImageProcessor, SamplingParams
from workbench.view import difference_by_layer

__all__ = ["measure_parity"]

GENERATED = 8


def measure_parity(
    gates: GateBook,
    sections: list[Section],
    ranks: Deployment,
    root: Path,
    *,
    precision: str,
    say: Callable[[str], None],
) -> None:
    """Compare `ranks` with the reference on random prompts and a picture, tensors first and then greedy tokens.

    In fp32 also: each prompt alone and all of them together must give the same tokens. In bf16 and mxfp4 the limit is
    measured: yardsticks of rounding, tensor by tensor. In an approximate precision (fp8, int8, int4) no such bound
    exists; the gate stays unmeasured and says so.
    """
    tolerance = tolerance_for(precision)
    if tolerance is None:
        gates.unmeasured("parity.serving", f"{precision} approximates the weights: there is no bound to hold it to")
        return
    spec = ranks.spec
    require_reference(spec)
    picture = ImageProcessor(spec.image).process(draw_pictures()[0]) if spec.image and spec.vision else None
    prompts = parity_prompts(spec, picture)
    text_only = [prompt for prompt in prompts if not prompt.images]
    generated = _generate(ranks, [prompt.token_ids for prompt in text_only])
    for prompt, tokens in zip(text_only, generated, strict=True):
        position = prompts.index(prompt)
        prompts[position] = dataclasses.replace(
            prompt, token_ids=(*prompt.token_ids, *tokens), num_generated=len(tokens)
        )
    report = check_parity(deployment_forward(ranks), root, prompts, tolerance=tolerance)
    say(f"parity, {precision}: {report.verdict()}")
    evidence = f"{report.verdict()}. Limit: {tolerance.describe()}"
    if precision != "fp32":
        gates.measured("parity.serving", report.num_wrong, evidence=evidence)
    else:
        gates.measured("parity.fp32", report.num_wrong_tensors, evidence=evidence)
        apart = sum(greedy.num_tokens - greedy.num_equal for greedy in report.greedy)
        total = sum(greedy.num_tokens for greedy in report.greedy)
        gates.measured("parity.fp32_tokens", apart, evidence=f"{total} tokens decoded step by step on the ranks")
        alone = [_generate(ranks, [prompt.token_ids])[0] for prompt in text_only]
        gates.measured(
            "parity.batch",
            sum(a != b for a, b in zip(alone, generated, strict=True)),
            evidence=f"{len(alone)} requests of {[len(p.token_ids) for p in text_only]} tokens, alone and together",
        )
    limit = tolerance.relative if isinstance(tolerance, Tolerance) else None  # else each tensor has its own
    chart = difference_by_layer(report.relative_by_layer(), limit=limit)
    title = f"Parity with the reference, {precision}"
    sections.append(Section(title=title, tables=(report.table(), report.by_layer()), charts=(chart,)))


def _generate(ranks: Deployment, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy tokens of all prompts, served together; end tokens are not obeyed, so that every prompt gives as many."""
    engine = Engine(ranks)
    engine.start()
    try:
        sampling = SamplingParams(max_tokens=GENERATED)
        generations = [engine.submit(GenerationRequest(token_ids=ids, sampling=sampling)) for ids in prompts]
        tokens = [[event.token_id for event in generation] for generation in generations]
    finally:
        engine.stop()
    for number, found in enumerate(tokens):
        if len(found) != GENERATED:
            raise WorkbenchError(f"prompt {number} gave {len(found)} tokens", expected=GENERATED)
    return tokens
