"""Copies of a model for one `serve`: ranks of their own, a draft model beside each, and room looked for before."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from workbench.base import DeploymentError, NoRoomError, error_text
from workbench.cli.arguments import chosen_layout, deployment_options
from workbench.spec import read_spec

if TYPE_CHECKING:
    from workbench.deployment import Deployment, LoadProgress, RestartEvent, RestartingDeployment
    from workbench.serving import CopyEvent, Drafter, Engine, Runner, RunnerInfo
    from workbench.serving.copies import Tell

__all__ = ["CopyMaker", "log_copies"]


class CopyMaker:
    """Runners for the copies of one command, and their engines. Whatever still runs is ended with the block."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._layout = args, chosen_layout(args)
        self._drafters: dict[int, tuple[Drafter | None, Deployment | None]] = {}  # by id of the copy's runner
        self._running: list[RestartingDeployment] = []

    def __enter__(self) -> CopyMaker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for deployment in list(self._running):
            self.close(deployment)

    def first(self) -> RestartingDeployment:
        """The one that is waited for, with its progress in the terminal."""
        from workbench.view import terminal_progress

        with terminal_progress(self._layout.world_size) as bar:
            return self._start(lambda progress: None if self._args.json else bar(progress))

    def another(self, tell: Tell) -> Runner:
        return self._start(lambda progress: tell(progress.rank, progress.fraction))

    def engine(self, runner: Runner) -> Engine:
        from workbench.serving import Engine

        args, (drafter, _) = self._args, self._drafters.get(id(runner), (None, None))
        return Engine(runner, prefix_pages=max(0, args.prefix_pages), page_tokens=args.page_tokens, drafter=drafter)

    def close(self, runner: Runner) -> None:
        _, draft = self._drafters.pop(id(runner), (None, None))
        self._running = [each for each in self._running if each is not runner]
        runner.close()
        if draft is not None:
            draft.close()

    def check_room(self, num_more: int) -> None:
        """By the figures of a copy that works now; where none does, nobody can say. Raises NoRoomError."""
        from workbench.deployment import check_room

        for deployment in list(self._running):
            try:
                return check_room(deployment.current, num_more)
            except NoRoomError:
                raise
            except DeploymentError:
                continue  # its ranks have just failed: another one may tell
        return None

    def _start(self, on_progress: Callable[[LoadProgress], None]) -> RestartingDeployment:
        from workbench.deployment import RestartingDeployment, RestartPolicy, Timeouts

        args, listening = self._args, [on_progress]

        def show(progress: LoadProgress) -> None:
            for each in listening:
                each(progress)

        deployment = RestartingDeployment.start(
            args.path,
            self._layout,
            policy=RestartPolicy(max_restarts=args.max_restarts),
            has_spare=args.spare,
            on_event=_log_restart,
            on_progress=show,
            timeouts=Timeouts(step_s=args.step_timeout),
            **deployment_options(args, num_slots=args.slots),
        )
        listening.clear()  # a restart is told in the log
        try:
            self._drafters[id(deployment)] = _drafter(args, deployment.info)
        except BaseException:
            deployment.close()
            raise
        self._running.append(deployment)
        return deployment


def _log_restart(event: RestartEvent) -> None:
    from workbench.serving.http.watch import LOG

    # The error names the rank, its process and its last command; it holds nothing of any request.
    fields = {"attempt": event.attempt, "seconds": round(event.seconds, 3)}
    told = {**fields, **({"error": str(event.error)} if event.error is not None else {})}
    (LOG.info if event.kind == "restarted" else LOG.error)(f"ranks {event.kind}", extra={"fields": told})


def log_copies(event: CopyEvent) -> None:
    from workbench.serving.http.watch import LOG

    fields = {"copies": event.num_copies, "seconds": round(event.seconds, 3)}
    told = {**fields, **({"error": error_text(event.error)} if event.error is not None else {})}
    (LOG.error if event.kind == "failed" else LOG.info)(f"copy {event.kind}", extra={"fields": told})


def _drafter(args: argparse.Namespace, target: RunnerInfo) -> tuple[Drafter | None, Deployment | None]:
    """What guesses for one copy, and the ranks that it runs on, which are the caller's."""
    from workbench.deployment import Deployment, Timeouts
    from workbench.serving import ModelDrafter, PromptLookup

    if args.speculate is None:
        return None, None
    if args.speculate == "lookup":
        return PromptLookup(args.speculate_tokens), None
    options = deployment_options(args, num_slots=args.slots * target.dp)
    # It has a slot for each of the target's, and no prefixes.
    options |= {"cache_tokens": None, "num_snapshots": 0}
    options["max_tokens"] = min(target.max_tokens, read_spec(args.speculate).max_context)
    draft = Deployment.start(args.speculate, timeouts=Timeouts(step_s=args.step_timeout), **options)
    return ModelDrafter(draft, target, args.speculate_tokens), draft
