"""What ranks that hold a part of their experts have had to fetch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from workbench.nn.expert_pool import ExpertUse, PagedExperts

if TYPE_CHECKING:
    from workbench.deployment.commands import RankCommands
    from workbench.deployment.handle import Deployment

__all__ = ["expert_use", "read_use"]


def expert_use(deployment: Deployment) -> tuple[ExpertUse, ...]:
    """Of each rank since it was loaded; nothing used where a rank has no experts, or holds all of them."""
    return tuple(cast(list[ExpertUse], deployment.call(f"{__name__}:read_use")))


def read_use(commands: RankCommands) -> ExpertUse:
    """Runs on a rank."""
    model = commands.runner.model
    return next((module.pool.use for module in model.modules() if isinstance(module, PagedExperts)), ExpertUse())
