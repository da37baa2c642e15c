"""Is it the published model? The ranks against an independent reference, and each request against itself in company."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from workbench.align import Tolerance, check_parity, deployment_forward, require_reference, tolerance_for
from workbench.base import WorkbenchError
from workbench.day0.diagnose import Diagnosis, diagnose
from workbench.day0.gates import GateBook
from workbench.day0.prompts import draw_pictures, parity_prompts
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.report import Section
from workbench.serving import Engine, GenerationRequest, ImageProcessor, SamplingParams
from workbench.spec import read_spec
from workbench.view import difference_by_layer

__all__ = ["measure_parity", "start_in_fp32"]

GENERATED = 8
FP32_TOKENS = 512  # cache length of a sequence


def start_in_fp32(root: Path, layout: Layout, device: str) -> Deployment:
    """Ranks for a comparison without rounding, with a short cache. Raises as `Deployment.start`."""
    max_tokens = min(FP32_TOKENS, read_spec(root).max_context)
    return Deployment.start(root, layout, precision="fp32", device=device, num_slots=4, max_tokens=max_tokens)


def measure_parity(
    gates: GateBook,
    sections: list[Section],
    ranks: Deployment,
    root: Path,
    *,
    precision: str,
    is_served: bool = False,
    published: Path | None = None,
    say: Callable[[str], None],
) -> None:
    """Compare `ranks` with the reference on random prompts and a picture, tensors first and then greedy tokens.

    The reference reads `published`, by default the files `root` that the ranks loaded themselves.

    In fp32 also: each prompt alone and all of them together must give the same tokens. In bf16 and mxfp4 the limit is
    measured: yardsticks of rounding, tensor by tensor. In an approximate precision (fp8, int8, int4) no such bound
    exists; the gate stays unmeasured and says so. `is_served`: these are the ranks that answer, so that in fp32 their
    parity is that of serving as well.
    """
    tolerance = tolerance_for(precision)
    if tolerance is None:
        gates.unmeasured("parity.serving", f"{precision} approximates the weights: there is no bound to hold it to")
        return
    spec, published = ranks.spec, published or root
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
    report = check_parity(deployment_forward(ranks), published, prompts, tolerance=tolerance)
    say(f"parity, {precision}: {report.verdict()}")
    diagnosis = Diagnosis(text="")
    if report.num_wrong_tensors and not _is_told_before(gates):
        say(f"parity, {precision}: looking for the operator and the mistake")
        diagnosis = diagnose(ranks, root, published, prompts, report, precision=precision)
        say(f"parity, {precision}: {diagnosis.text}")
    evidence = ". ".join(filter(None, [diagnosis.text, report.verdict(), f"Limit: {tolerance.describe()}"]))
    if precision != "fp32":
        gates.measured("parity.serving", report.num_wrong, evidence=evidence)
    else:
        gates.measured("parity.fp32", report.num_wrong_tensors, evidence=evidence)
        apart = sum(greedy.num_tokens - greedy.num_equal for greedy in report.greedy)
        total = sum(greedy.num_tokens for greedy in report.greedy)
        first = [
            f"first apart: generated token {greedy.first_wrong} of prompt {prompt.label!r}"
            for prompt, greedy in zip(prompts, report.greedy, strict=True)
            if greedy.first_wrong is not None
        ]
        evidence = f"{total} tokens decoded step by step on the ranks"
        gates.measured("parity.fp32_tokens", apart, evidence="; ".join([evidence, *first[:1]]))
        alone = [_generate(ranks, [prompt.token_ids])[0] for prompt in text_only]
        lengths = [len(prompt.token_ids) for prompt in text_only]
        others = [n for n, a, b in zip(lengths, alone, generated, strict=True) if a != b]
        evidence = f"{len(alone)} requests of {lengths} tokens, alone and together"
        gates.measured(
            "parity.batch",
            len(others),
            evidence="; ".join([evidence, *([f"apart: those of {others}"] if others else [])]),
        )
        if is_served:
            evidence = "served in fp32: the same as parity.fp32"
            gates.measured("parity.serving", report.num_wrong_tensors, evidence=evidence)
    limit = tolerance.relative if isinstance(tolerance, Tolerance) else None  # else each tensor has its own
    chart = difference_by_layer(report.relative_by_layer(), limit=limit)
    title = f"Parity with the reference, {precision}"
    tables = (report.table(), report.by_layer(), *diagnosis.tables)
    sections.append(Section(title=title, text=diagnosis.text, tables=tables, charts=(chart,)))


def _is_told_before(gates: GateBook) -> bool:
    """Whether parity in fp32 has failed: the same mistake is not looked for again among roundings."""
    gate = gates.found("parity.fp32")
    return gate is not None and not gate.passed


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
