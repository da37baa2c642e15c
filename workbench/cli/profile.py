"""profile, profile-compare: a load sent to N ranks or to a server, and measured; two runs beside each other."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base import RequestError
from workbench.cli.arguments import Commands, UsageError, command, count, deploy, deployment_arguments, number, seconds
from workbench.cli.show import say, show

if TYPE_CHECKING:
    from workbench.deployment import Deployment
    from workbench.profiling import DeploymentProfile, Lengths, Load, LoadReport, Slo, Target

__all__ = ["add"]

DEFAULT_RECORD = Path("out/profile.jsonl")


def add(commands: Commands) -> None:
    profile = command(
        commands,
        "profile",
        _profile,
        "send a load to N ranks or to any OpenAI-compatible server and measure it token by token; "
        "exit code 1 where requests fail or the share of good ones is below --goodput",
    )
    deployment_arguments(profile, path_type=str, path_help="checkpoint folder, or address such as http://HOST:8000/v1")
    load = profile.add_argument_group("load")
    load.add_argument("--requests", type=count, default=32, help="measured requests (default 32)")
    load.add_argument("--warm-up", type=int, default=2, help="requests before them, in no figure (default 2)")
    load.add_argument("--concurrency", type=count, help="closed loop: so many under way at once (default 1)")
    load.add_argument("--rate", type=_rate, help="open loop: requests a second on average, as a Poisson process")
    load.add_argument("--burst", type=count, help="with --rate: they come so many at once")
    load.add_argument("--prompt-tokens", type=_lengths, default="64", metavar="N|A..B|A..B~", help="~: mostly short")
    load.add_argument("--answer-tokens", type=_lengths, default="32", metavar="N|A..B|A..B~", help="at most")
    load.add_argument("--image-share", type=_share, default=0.0, help="share of requests with a picture (default 0)")
    load.add_argument("--image-size", type=_size, default="224x224", metavar="WxH", help="in pixels (default 224x224)")
    load.add_argument("--seed", type=int, default=0, help="of lengths, words, pictures and arrivals (default 0)")
    load.add_argument("--ignore-eos", action="store_true", help="with an address: ask for answers of full length")
    load.add_argument(
        "--field",
        type=_field,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="with an address: a further field of every request, such as top_k=40; may be repeated",
    )
    goal = profile.add_argument_group("what is good")
    goal.add_argument("--slo-first-token", type=seconds, metavar="S")
    goal.add_argument("--slo-per-token", type=seconds, metavar="S")
    goal.add_argument("--slo-end-to-end", type=seconds, metavar="S")
    goal.add_argument("--goodput", type=_share, metavar="SHARE", help="least share of good requests")
    inside = profile.add_argument_group("inside the ranks (with a checkpoint folder)")
    inside.add_argument("--operators", action="store_true", help="time operators, collectives and experts as well")
    inside.add_argument("--every", type=count, default=10, help="record one step of so many (default 10)")
    inside.add_argument(
        "--budget", type=_share, metavar="SHARE", help="of step time that recording may take, such as 0.03 (no limit)"
    )
    inside.add_argument("--barriers", action="store_true", help="time waiting by barriers, for devices that queue work")
    inside.add_argument("--roofline", action="store_true", help="measure the device's limits first, for comparison")
    profile.add_argument("--record", type=Path, default=DEFAULT_RECORD, help=f"append to (default {DEFAULT_RECORD})")
    profile.add_argument("--trace", type=Path, help="also write a trace for ui.perfetto.dev (.json or .json.gz)")
    profile.add_argument("--model-name", help="with an address: model to ask for (default: the first it offers)")
    profile.add_argument("--api-key-file", type=Path, help="with an address: file whose first line is the key")
    profile.add_argument(
        "--timeout", type=seconds, default=600.0, help="with an address: longest silence (default 600)"
    )

    compare = command(
        commands,
        "profile-compare",
        _compare,
        "the last load of two records: what changed beyond noise; exit code 1 where a figure got worse",
    )
    compare.add_argument("before", type=Path, help="file of records that `profile` wrote")
    compare.add_argument("after", type=Path, help="the later one; the same file compares its last two loads")


@dataclass(frozen=True)
class ProfileRun:
    """What one `profile` prints."""

    report: LoadReport
    profile: DeploymentProfile | None
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        profile = None if self.profile is None else self.profile.to_json()
        return {"environment": self.environment, "load": self.report.to_json(), "profile": profile}

    def render(self) -> str:
        parts = [self.report.render(), *([self.profile.render()] if self.profile is not None else []), *self.notes]
        return "\n\n".join(parts)


def _profile(args: argparse.Namespace) -> int:
    from workbench.profiling import append_records, environment_of, generate_load, plan_load
    from workbench.profiling.trace import write_trace

    plan_of, slo = _load(args), _slo(args)
    if args.goodput is not None and not slo.limits:
        raise UsageError("--goodput needs a limit such as --slo-first-token to be good by")
    with _target(args) as (target, deployment, count_tokens):
        plan = plan_load(plan_of, count_tokens=count_tokens)
        environment = environment_of(target=args.path, deployment=deployment)
        told = None if args.json else _Told(plan_of.num_requests + plan_of.num_warm_up)
        inside = _inside(args, deployment)
        with inside as profiler:
            report: LoadReport = generate_load(target, plan, slo=slo, on_request=told, conditions=args.path)
        profile: DeploymentProfile | None = None if profiler is None else profiler.profile
        if profile is not None and args.roofline and deployment is not None:
            profile = profile.with_roofline(_limits(deployment))
    append_records(args.record, [report, *([profile] if profile is not None else [])], environment)
    notes = [f"recorded in {args.record}"]
    if args.trace is not None:
        file = write_trace(args.trace, profile=profile, timings=(*report.warm_up, *report.timings))
        left = f", the {file.num_left_out} shortest events left out" if file.num_left_out else ""
        notes.append(f"trace of {file.num_events} events in {file.path}{left}: open it at ui.perfetto.dev")
    show(args, ProfileRun(report, profile, environment, tuple(notes)))
    share = None if report.goodput is None else report.goodput.share
    is_good = args.goodput is None or (share is not None and share >= args.goodput)
    return 0 if is_good and not report.errors else 1


def _compare(args: argparse.Namespace) -> int:
    from workbench.profiling import compare_runs, read_records
    from workbench.profiling.compare import load_run

    before, after = read_records(args.before), read_records(args.after)
    if args.before.resolve() == args.after.resolve():
        loads = [record for record in before if record.get("kind") == "LoadReport"]
        before, after = loads[:-1], loads[-1:]
    comparison = compare_runs(load_run(before, where=args.before), load_run(after, where=args.after))
    show(args, comparison)
    return 1 if comparison.is_worse else 0


class _Told:
    """How far the load is, on standard error."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, _: object) -> None:
        self.done += 1
        if self.done == self.total or self.done % max(1, self.total // 10) == 0:
            say(f"answered {self.done} of {self.total} requests", sys.stderr)


@contextlib.contextmanager
def _target(args: argparse.Namespace) -> Iterator[tuple[Target, Deployment | None, Any]]:
    """What to ask, the ranks behind it where they are ours, and how it counts tokens."""
    from workbench.profiling import ServerTarget, ServiceTarget

    if args.path.startswith(("http://", "https://")):
        from workbench.serving.client import RemoteService, read_api_key

        if args.layout is not None or args.ranks is not None or args.operators:
            raise UsageError("--layout, --ranks and --operators are for a checkpoint folder, not for an address")
        key = read_api_key(args.api_key_file) if args.api_key_file is not None else None
        service = RemoteService(args.path, api_key=key, model=args.model_name, timeout_s=args.timeout)
        fields = {**({"ignore_eos": True} if args.ignore_eos else {}), **dict(args.field)}
        yield ServerTarget(service, fields=fields), None, None
        return
    if args.field:
        raise UsageError("--field is for an address, not for a checkpoint folder")
    from workbench.serving import open_service, read_tokenizer
    from workbench.spec import read_spec

    path = Path(args.path)
    args = argparse.Namespace(**{**vars(args), "path": path})
    spec = read_spec(path)
    tokenizer = read_tokenizer(path, spec)
    if args.image_share and (spec.vision is None or spec.image is None):
        raise RequestError("this model takes no pictures", where=path)
    slots = args.concurrency or 8
    with deploy(args, num_slots=min(slots, 64)) as deployment, open_service(deployment, path) as served:
        yield ServiceTarget(served), deployment, lambda text: len(tokenizer.encode(text))


def _inside(args: argparse.Namespace, deployment: Deployment | None) -> contextlib.AbstractContextManager[Any]:
    from workbench.profiling import DeploymentProfiler

    if deployment is None or not args.operators:
        return contextlib.nullcontext()
    return DeploymentProfiler(
        deployment, every=args.every, barriers=args.barriers, budget=args.budget or None, conditions=str(args.path)
    )


def _limits(deployment: Deployment) -> Any:
    from workbench.operators import measure_roofline

    device = deployment.stats()[0].device
    return measure_roofline(device, ("float32", "bfloat16"))


def _load(args: argparse.Namespace) -> Load:
    from workbench.profiling import Bursts, ClosedLoop, Kind, Load, Poisson

    if args.rate is not None and args.concurrency is not None:
        raise UsageError("--rate is an open loop and --concurrency a closed one: give one of them")
    if args.burst is not None and args.rate is None:
        raise UsageError("--burst needs --rate")
    arrivals: Poisson | Bursts | ClosedLoop = ClosedLoop(concurrency=args.concurrency or 1)
    if args.rate is not None:
        arrivals = Bursts(rate_per_s=args.rate, size=args.burst) if args.burst else Poisson(rate_per_s=args.rate)
    lengths = {"prompt": args.prompt_tokens, "answer": args.answer_tokens}
    kinds = []
    if args.image_share < 1:
        kinds.append(Kind(name="text", weight=1 - args.image_share, **lengths))
    if args.image_share > 0:
        kinds.append(Kind(name="image", weight=args.image_share, num_images=1, image_size=args.image_size, **lengths))
    return Load(
        arrivals=arrivals,
        num_requests=args.requests,
        kinds=tuple(kinds),
        num_warm_up=max(0, args.warm_up),
        seed=args.seed,
    )


def _slo(args: argparse.Namespace) -> Slo:
    from workbench.profiling import Slo

    return Slo(first_token_s=args.slo_first_token, per_token_s=args.slo_per_token, end_to_end_s=args.slo_end_to_end)


def _lengths(text: str) -> Lengths:
    from workbench.base import ConfigError
    from workbench.profiling import Lengths

    match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?(~?)", text)
    try:
        if match is None:
            raise ConfigError("not a range")
        return Lengths(least=int(match[1]), most=int(match[2] or match[1]), is_logarithmic=bool(match[3]))
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length such as 64, 16..512 or 16..512~") from None


def _field(text: str) -> tuple[str, Any]:
    name, is_pair, value = text.partition("=")
    try:
        if name.isidentifier() and is_pair:
            return name, json.loads(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f'{text!r} is not a field such as top_k=40 or stop="END"')


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})", text)
    if match is None or not min(int(match[1]), int(match[2])):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 640x480")
    return int(match[1]), int(match[2])


def _rate(text: str) -> float:
    return float(number(text, float, "a rate above 0", lambda value: 0 < value < float("inf")))


def _share(text: str) -> float:
    return float(number(text, float, "a share from 0 to 1", lambda value: 0 <= value <= 1))
