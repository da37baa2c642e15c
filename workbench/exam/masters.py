"""The weights of a training run before they were rounded to the published form."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.base import CheckpointError
from workbench.nn.model import Model
from workbench.parallel import RankContext, attach, build_stage
from workbench.spec import ModelSpec
from workbench.training.checkpointing import newest_state
from workbench.training.config import read_config
from workbench.training.export import load_whole

__all__ = ["load_masters"]


def load_masters(run: Path | str, spec: ModelSpec, ctx: RankContext) -> tuple[Model, int]:
    """The newest sound state of the run in folder `run`, every weight in bf16 and none in MXFP4, and its step.

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
    model = build_stage(spec, ctx.layout, ctx.rank, precision="bf16")
    model.to_empty(device=ctx.device)
    whole = load_whole(spec, state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[name])
    attach(model, ctx)
    return model, state.step
