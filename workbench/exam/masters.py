"""The weights of a training run before they were rounded to the published form."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.base import CheckpointError
from workbench.nn.model import Model
from workbench.parallel import RankContext, allocate, attach, build_stage
from workbench.spec import ModelSpec
from workbench.training.checkpointing import newest_state
from workbench.training.config import read_config
from workbench.training.export import load_whole

__all__ = ["load_masters"]


def load_masters(
    run: Path | str, spec: ModelSpec, ctx: RankContext, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Model, int]:
    """The newest sound state of the run in folder `run`, every weight a bf16 number and none in MXFP4, and its step.

    `dtype`: what the model computes in; float32 holds the same bf16 weights.
    Raises ConfigError where the folder holds no recipe, CheckpointError where it holds no sound state or one of another
    model than `spec`.
    """
    run = Path(run)
    config = read_config(run / "recipe.toml")
    state = newest_state(run / "states", essence=config.essence, layout=None)
    if state is None:
        raise CheckpointError("no saved state to compare with", where=run)
    if config.spec() != spec:
        raise CheckpointError("a run of another model", where=run, found=config.name)
    # What a bf16 model keeps in float32, such as the router's correction, is not rounded here either.
    stored = {name: x.dtype for name, x in build_stage(spec, ctx.layout, ctx.rank).named_parameters()}
    model = build_stage(spec, ctx.layout, ctx.rank, dtype=dtype)
    allocate(model, ctx.device)
    whole = load_whole(spec, state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[name].to(stored[name]))
    attach(model, ctx)
    return model, state.step
