"""A soak from its first quiet question to the verdicts.

alone      every question once, nobody else there: the right answers
warm-up    all users, each question once: whatever is made on first use is there, and the pools are counted
measured   all users for the time asked; in it, perhaps, a rank is killed
after      pools counted again, some questions asked alone again
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.base import ConfigError, WorkbenchError, human
from workbench.deployment import Deployment, RestartEvent, RestartingDeployment
from workbench.profiling.soak.memory import MemoryMeter, MemoryTrend, memory_trend
from workbench.profiling.soak.pools import count_pools, pool_faults
from workbench.profiling.soak.questions import PICTURES, SoakQuestion, SoakSettings, ask_quietly, draw_questions
from workbench.profiling.soak.record import Outage, SoakCheck, SoakRecord, Verdict
from workbench.profiling.soak.users import Ledger, User
from workbench.serving.client import RemoteService
from workbench.serving.service import MultimodalInferenceService

if TYPE_CHECKING:
    from workbench.serving.http import HttpServer

__all__ = ["Subject", "soak"]

LOOK_S = 0.1
SAMPLE_S = 0.05  # between two looks at memory, at least
MAX_SAMPLES = 240  # of memory, per process
QUIET_AGAIN = 8
SHOWN = 3  # faults spelled out in a verdict
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """What is soaked, and where to look. `processes` has name -> pid of every process that belongs to it, this one
    among them; `rank_counts` what ranks hold, by place; `events` what became of the ranks, with the time of each on
    `clock`. Without `kill` no rank can be killed."""

    service: MultimodalInferenceService
    url: str
    place: str
    num_inside: Callable[[], int]
    max_pages: int = 0
    processes: Callable[[], Mapping[str, int]] = lambda: {"server": os.getpid()}
    rank_counts: Callable[[], Mapping[str, Mapping[str, int]]] = dict
    kill: Callable[[], None] | None = None
    events: Sequence[tuple[float, RestartEvent]] = ()
    clock: Callable[[], float] = field(default=time.monotonic)

    @classmethod
    def of(
        cls,
        deployment: Deployment | RestartingDeployment,
        service: MultimodalInferenceService,
        server: HttpServer,
        *,
        place: str,
        prefix_pages: int = 0,
        events: Sequence[tuple[float, RestartEvent]] = (),
    ) -> Subject:
        """Ranks on this machine behind a server in this process; the last rank is the one to be killed."""

        def current() -> Deployment:
            return deployment.current if isinstance(deployment, RestartingDeployment) else deployment

        def rank_counts() -> dict[str, dict[str, int]]:
            counts: dict[str, dict[str, int]] = {}
            for stats in current().stats():
                at = deployment.layout.coords(stats.rank)
                held = counts.setdefault(f"on pp{at.pp} tp{at.tp}", {})
                numbers = {"pages kept": stats.num_pages, "pictures held": stats.num_images}
                for name, number in {**numbers, "cache bytes": stats.cache_bytes}.items():
                    held[name] = held.get(name, 0) + number
            return counts

        return cls(
            service=service,
            url=server.url,
            place=place,
            num_inside=lambda: server.api.gate.num_inside,
            max_pages=prefix_pages * deployment.layout.dp,
            processes=lambda: {"server": os.getpid(), **{f"rank {n}": pid for n, pid in enumerate(deployment.pids)}},
            rank_counts=rank_counts,
            kill=lambda: os.kill(deployment.pids[-1], signal.SIGKILL),
            events=events,
        )


def soak(subject: Subject, settings: SoakSettings, *, tell: Tell = lambda _: None) -> SoakRecord:
    """Run all of it; `tell` hears in a line what is being done. The server must have nothing else to do.

    Raises ConfigError where a rank is to be killed and cannot be, or where no question has a right answer;
    DeploymentError where the server does not even answer alone.
    """
    if settings.kill_after_s is not None and subject.kill is None:
        raise ConfigError("nobody to kill", found="a runner without ranks", next_step="Leave out kill_after_s")
    remote = RemoteService(subject.url, timeout_s=settings.timeout_s)
    drawn = draw_questions(subject.service, settings)
    tell(f"{len(drawn)} questions, each alone")
    asked = [ask_quietly(each, subject.url, remote.model, timeout_s=settings.timeout_s) for each in drawn]
    users = _users(asked, remote, settings)
    if not users:
        raise ConfigError("no question has a right answer", expected=f"two tokens {settings.tolerance:g} nats apart")
    tell(f"{len(users)} users together, each question once")
    warm = Ledger(clock=subject.clock)
    _together(users, warm, lambda user: user.once())
    usable = [question for user in users for question in user.questions]
    _quiet_again(usable, subject, remote.model, settings, warm)
    before = _settled(subject, settings, _Resting())
    tell(f"measured part, {settings.seconds:g} s")
    ledger = Ledger(clock=subject.clock)
    every_s = max(settings.seconds / MAX_SAMPLES, SAMPLE_S)
    with MemoryMeter(subject.processes, every_s=every_s, clock=subject.clock) as meter:
        start_s = subject.clock()
        killer = _killer(subject, settings, ledger)
        _together(users, ledger, lambda user: user.run(start_s + settings.seconds))
        if killer is not None:
            killer.join()
    tell("counting what was given back")
    _quiet_again(usable, subject, remote.model, settings, ledger)
    after = _settled(subject, settings, lambda counts: not pool_faults(before, counts, max_pages=subject.max_pages))
    series = tuple(meter.series())
    trends = tuple(map(memory_trend, series))
    outage = _outage(subject, ledger, start_s)
    checks = [
        *_answer_checks(warm, ledger, usable),
        _pool_check(before, after, subject.max_pages),
        _memory_check(trends, settings),
        _company_check(ledger, users, settings, has_pictures=any(each.images for each in usable)),
        *([] if outage is None else [_outage_check(outage, settings)]),
    ]
    return SoakRecord(
        place=subject.place,
        settings=settings,
        num_streams=len(users),
        num_set_aside=len(drawn) - len(usable),
        counts=dict(ledger.counts),
        kinds=dict(ledger.kinds),
        checks=tuple(checks),
        before=before,
        after=after,
        memory=series,
        trends=trends,
        outage=outage,
    )


def _users(asked: Sequence[SoakQuestion], remote: RemoteService, settings: SoakSettings) -> list[User]:
    """Users with the questions that have one right answer; who has none left stays away."""
    users = []
    for number in range(settings.num_streams):
        own = asked[number * settings.questions_per_stream :][: settings.questions_per_stream]
        if usable := [question for question in own if question.margin >= settings.tolerance]:
            users.append(User(number, usable, remote, settings))
    return users


def _together(users: Sequence[User], ledger: Ledger, act: Callable[[User], None]) -> None:
    for user in users:
        user.ledger = ledger
    with ThreadPoolExecutor(len(users), thread_name_prefix="soak") as pool:
        for future in [pool.submit(act, user) for user in users]:
            future.result()


def _killer(subject: Subject, settings: SoakSettings, ledger: Ledger) -> threading.Thread | None:
    if settings.kill_after_s is None or subject.kill is None:
        return None
    kill, after_s = subject.kill, settings.kill_after_s

    def run() -> None:
        time.sleep(after_s)
        ledger.killed_s = subject.clock()
        kill()

    thread = threading.Thread(target=run, name="soak-kill", daemon=True)
    thread.start()
    return thread


def _quiet_again(
    questions: Sequence[SoakQuestion], subject: Subject, model: str, settings: SoakSettings, ledger: Ledger
) -> None:
    """Some questions alone once more. Texts come last: the step after a picture's last drops what is held of it."""
    chosen = sorted(questions[:: max(1, len(questions) // QUIET_AGAIN)], key=lambda each: each.kind not in PICTURES)
    for question in chosen:
        asked_s = subject.clock()
        try:
            again = ask_quietly(question, subject.url, model, timeout_s=settings.timeout_s)
        except WorkbenchError as error:
            ledger.failed(error, asked_s)
        else:
            ledger.judge(question, again.expected, again.logprobs, is_whole=True, tolerance=settings.tolerance)


def _settled(
    subject: Subject, settings: SoakSettings, is_settled: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """Pools as soon as they are as they should be, or as they are when the time for that is over."""
    until = time.monotonic() + settings.settle_s
    while True:
        try:
            counts = count_pools(subject)
        except WorkbenchError:  # ranks that are gone hold nothing; the failure itself is in the ledger
            counts = {}
        if (counts and is_settled(counts)) or time.monotonic() > until:
            return counts
        time.sleep(LOOK_S)


class _Resting:
    """Nobody inside, and nothing has moved since the look before: connections take a moment to be gone."""

    def __init__(self) -> None:
        self._last: Mapping[str, int] = {}

    def __call__(self, counts: Mapping[str, int]) -> bool:
        last, self._last = self._last, counts
        return counts == last and counts["requests inside the server"] == counts["requests the engine knows"] == 0


def _answer_checks(warm: Ledger, ledger: Ledger, usable: Sequence[SoakQuestion]) -> list[SoakCheck]:
    compared = ledger.counts["answers compared"]
    # Rounded to more than rounding does: two of them in one class cannot be told apart for certain.
    distinct = len({(each.expected, *(round(value, 2) for value in each.logprobs)) for each in usable})

    def check(name: str, faults: list[str], good: str) -> SoakCheck:
        return _check(name, faults, good, is_shown=compared > 0)

    return [
        check("no secret in another's answer", warm.leaks + ledger.leaks, f"{compared:,} answers"),
        check(
            "answers as alone",
            warm.wrong + ledger.wrong,
            f"{compared:,} answers, log probabilities within {ledger.max_gap:.1e} nats",
        ),
        check("no request fails", warm.failures + ledger.failures, ""),
        # Answers that are all alike would be right in any mixture.
        _check("answers can be told apart", [], f"{distinct} of {len(usable)}", is_shown=2 * distinct > len(usable)),
    ]


def _pool_check(before: Mapping[str, int], after: Mapping[str, int], max_pages: int) -> SoakCheck:
    faults = pool_faults(before, after, max_pages=max_pages)
    return _check("pools as before", faults, f"{len(after)} counts", is_shown=bool(before and after))


def _memory_check(trends: Sequence[MemoryTrend], settings: SoakSettings) -> SoakCheck:
    # A rank that was killed early, or started late, has too short a life to say anything about it: what it takes on
    # first use is no growth.
    most = max((trend.num_samples for trend in trends), default=0)
    shown = [trend for trend in trends if trend.is_flat is not None and 2 * trend.num_samples >= most]
    faults = [
        f"{trend.name} grew by {human(trend.growth_bytes, 'B')}, allowed {human(trend.allowed_bytes, 'B')}"
        for trend in shown
        if not trend.is_flat
    ]
    is_shown = bool(shown) and (settings.kill_after_s is not None or len(shown) == len(trends))
    slopes = ", ".join(f"{trend.name} {human(trend.bytes_per_s * 60, 'B')}" for trend in shown)
    good = f"a minute: {slopes}" if shown else f"none of {len(trends)} processes long enough"
    return _check("memory flat", faults, good, is_shown=is_shown)


def _company_check(ledger: Ledger, users: Sequence[User], settings: SoakSettings, *, has_pictures: bool) -> SoakCheck:
    """Whether that happened which could have gone wrong."""
    missing = [
        name
        for name, share in (("cancelled", settings.cancel_share), ("disconnected", settings.disconnect_share))
        if share and not ledger.counts[name]
    ]
    missing += ["pictures"] if has_pictures and not sum(ledger.kinds[kind] for kind in PICTURES) else []
    missing += [f"{settings.num_streams - len(users)} users"] if 10 * len(users) < 9 * settings.num_streams else []
    found = f"missing: {', '.join(missing)}" if missing else "whole, cancelled, disconnected"
    return _check("company was there", [], found, is_shown=not missing)


def _outage(subject: Subject, ledger: Ledger, start_s: float) -> Outage | None:
    if ledger.killed_s is None:
        return None
    killed = ledger.killed_s
    events = [(at, event) for at, event in subject.events if at >= killed]
    noticed = next((at - killed for at, event in events if event.kind == "broken"), None)
    restarted = next(((at - killed, event) for at, event in events if event.kind == "restarted"), None)
    return Outage(
        killed_after_s=killed - start_s,
        noticed_s=noticed,
        restarted_s=restarted[0] if restarted is not None else None,
        answered_s=ledger.back_s - killed if ledger.back_s is not None else None,
        phases={} if restarted is None else {name: phase.to_json() for name, phase in restarted[1].phases.items()},
    )


def _outage_check(outage: Outage, settings: SoakSettings) -> SoakCheck:
    answered, limit = outage.answered_s, settings.restart_within_s
    found = "no answer any more" if answered is None else f"after {answered:.1f} s, at most {limit:g} s"
    faults = [found] if answered is None or answered > limit else []
    return _check("service back after a kill", faults, found, is_shown=True)


def _check(name: str, faults: Sequence[str], good: str, *, is_shown: bool) -> SoakCheck:
    verdict: Verdict = "BAD" if faults else "good" if is_shown else "not shown"
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return SoakCheck(name=name, verdict=verdict, found="; ".join(faults[:SHOWN]) + more if faults else good)
