"""From a plan to the commands that start it: this project's own ranks, vLLM, SGLang.

Option names were checked against the engines' argument parsers: vLLM `vllm/engine/arg_utils.py` (0.28 and the main
branch of its time), SGLang `python/sglang/srt/server_args.py` (0.5). A layout that an engine's options cannot say is
refused with the reason: a command that starts something else would be worse than none.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.base import LayoutError, Table
from workbench.planner.candidates import Candidate
from workbench.planner.engines import SGLANG, VLLM, WORKBENCH, Engine

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology

__all__ = ["LaunchCommand", "LaunchPlan", "launch_all", "launch_sglang", "launch_vllm", "launch_workbench"]

HEAD = "HEAD_ADDRESS"  # of the first host; the reader fills it in
PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """What to type on one host (or once, where `host` is "")."""

    argv: tuple[str, ...]
    host: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(self.argv)])

    def to_json(self) -> dict[str, object]:
        return {"host": self.host, "env": dict(self.env), "argv": list(self.argv)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Commands of one engine, one per host; or the reason why it cannot be told to do this."""

    engine: str
    version: str
    commands: tuple[LaunchCommand, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.refused

    def render(self) -> str:
        title = f"{self.engine} {self.version}".strip()
        if self.refused:
            return f"{title}: not possible: {self.refused}"
        lines = [f"{title}:"]
        for command in self.commands:
            lines.append(f"  # {command.host}" if command.host else "  # once")
            lines.append(f"  {command}")
        return "\n".join([*lines, *(f"  # {note}" for note in self.notes)])

    def table(self) -> Table:
        rows = tuple((command.host or "once", str(command)) for command in self.commands)
        return Table(title=f"{self.engine} {self.version}".strip(), columns=("host", "command"), rows=rows)

    def _repr_html_(self) -> str:
        return self.table().to_html() if self.ok else Table(columns=(self.engine,), rows=((self.refused,),)).to_html()

    def to_json(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "version": self.version,
            "refused": self.refused,
            "commands": [command.to_json() for command in self.commands],
            "notes": list(self.notes),
        }


def launch_all(plan: Candidate, topology: Topology, path: str, *, published: str = "mxfp4") -> tuple[LaunchPlan, ...]:
    """The plan as each engine would be told. `path`: the checkpoint, `published`: the precision of its files."""
    return (
        launch_workbench(plan, topology, path),
        launch_vllm(plan, topology, path, published=published),
        launch_sglang(plan, topology, path, published=published),
    )


def launch_workbench(plan: Candidate, topology: Topology, path: str) -> LaunchPlan:
    """Ranks by torchrun on every host, and the handle that drives them in one Python process on the first."""
    try:
        hosts = _hosts(plan.layout.world_size, topology)
    except LayoutError as error:
        return _refused(WORKBENCH.name, "", error.message)
    commands = [
        LaunchCommand(
            host=host,
            argv=(
                *("torchrun", f"--nnodes={len(hosts)}", f"--node-rank={i}", f"--nproc-per-node={len(ranks)}"),
                *(f"--master-addr={HEAD}", f"--master-port={PORT}", "-m", "workbench.deployment.worker"),
                *("--controller", f"{HEAD}:{PORT + 1}", "--authkey-file", "authkey.hex"),
            ),
        )
        for i, (host, ranks) in enumerate(hosts)
    ]
    layout = plan.layout
    degrees = [f"{axis}={size}" for axis in ("pp", "dp", "tp", "ep") if (size := getattr(layout, axis)) > 1]
    if layout.dispatch != "replicated":
        degrees.append(f"dispatch={layout.dispatch!r}")
    if layout.stages is not None:
        degrees.append(f"stages={layout.stages}")
    kv = f", kv_dtype={plan.kv_dtype!r}" if plan.kv_dtype != "auto" else ""
    handle = (
        "from pathlib import Path; from workbench import deployment, placement; "
        f"deployment.Deployment.attach(({HEAD!r}, {PORT + 1}), bytes.fromhex(Path('authkey.hex').read_text()), "
        f"{path!r}, "
        f"placement.Layout({', '.join(degrees)}), precision={plan.precision!r}, num_slots={plan.need.slots}, "
        f"max_tokens={plan.need.max_tokens}{kv})"
    )
    notes = (
        "authkey.hex: python -c 'import secrets; print(secrets.token_hex(32))' > authkey.hex; chmod 600; on every host",
        f"the handle, in Python on the first host: {handle}",
    )
    return LaunchPlan(engine=WORKBENCH.name, version="", commands=tuple(commands), notes=notes)


def _check_cache(plan: Candidate, engine: Engine) -> None:
    if plan.kv_dtype not in engine.kv_dtypes:
        raise LayoutError(f"its cache is kept as {', '.join(engine.kv_dtypes)}, not in {plan.kv_dtype}")


def launch_vllm(plan: Candidate, topology: Topology, path: str, *, published: str = "mxfp4") -> LaunchPlan:
    """`vllm serve`. Its replicas are outermost (each holds all stages), ours are inside a stage: same memory per rank,
    other neighbours."""
    layout = plan.layout
    try:
        _check_cache(plan, VLLM)
        options = _precision(plan, published, VLLM.name, {"fp8": ["--quantization", "fp8"]})
        if layout.ep not in (1, layout.tp * layout.dp):
            raise LayoutError(f"expert parallelism spans all {layout.tp * layout.dp} ranks of a stage or none")
        if layout.dp > 1 and layout.ep == 1 and plan.visited:
            raise LayoutError("without expert parallelism it slices experts over replicas too; use ep = tp * dp")
        hosts = _hosts(layout.world_size, topology)
        engine_size = layout.tp * layout.pp
        per_host = len(hosts[0][1])
        if layout.dp > 1 and (engine_size > per_host or per_host % engine_size):
            raise LayoutError(f"{layout.dp} replicas of {engine_size} ranks do not fit whole into hosts of {per_host}")
    except LayoutError as error:
        return _refused(VLLM.name, VLLM.version, error.message)
    argv = ["vllm", "serve", path, "--trust-remote-code", f"--tensor-parallel-size={layout.tp}"]
    argv += [f"--pipeline-parallel-size={layout.pp}"] if layout.pp > 1 else []
    argv += ["--enable-expert-parallel"] if layout.ep > 1 else []
    argv += ["--all2all-backend=deepep_low_latency"] if layout.dispatch == "all_to_all" else []
    argv += ["--mm-encoder-tp-mode=data"] if plan.vision == "shared_out" else []
    argv += ["--kv-cache-dtype=fp8"] if plan.kv_dtype == "fp8" else []
    argv += [f"--max-model-len={plan.need.max_tokens}", f"--max-num-seqs={plan.need.slots}"]
    argv += [f"--max-num-batched-tokens={max(plan.objective.chunk_tokens, plan.need.slots)}"]
    argv += [f"--gpu-memory-utilization={_memory_share(plan)}", *options]
    env = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layout.stages))} if layout.stages else {}

    def of_host(i: int) -> list[str]:
        if len(hosts) == 1:
            return [f"--data-parallel-size={layout.dp}"] if layout.dp > 1 else []
        if layout.dp == 1:
            more = [f"--nnodes={len(hosts)}", f"--node-rank={i}", f"--master-addr={HEAD}"]
        else:
            local = per_host // engine_size
            more = [f"--data-parallel-size={layout.dp}", f"--data-parallel-size-local={local}"]
            more += [f"--data-parallel-address={HEAD}", f"--data-parallel-rpc-port={PORT}"]
            more += [f"--data-parallel-start-rank={i * local}"] if i else []
        return [*more, *(["--headless"] if i else [])]

    return LaunchPlan(engine=VLLM.name, version=VLLM.version, commands=_per_host(hosts, argv, env, of_host))


def launch_sglang(plan: Candidate, topology: Topology, path: str, *, published: str = "mxfp4") -> LaunchPlan:
    """`python -m sglang.launch_server`. With attention replicas its tp counts all ranks of a stage."""
    layout = plan.layout
    try:
        _check_cache(plan, SGLANG)
        options = _precision(plan, published, SGLANG.name, {"fp8": ["--quantization", "fp8"]})
        hosts = _hosts(layout.world_size, topology)
        spans = layout.ep > layout.tp
        if spans and layout.ep != layout.tp * layout.dp:
            raise LayoutError("expert groups over some of the replicas: its experts span all replicas or one")
        if layout.dp > 1 and not spans and len(hosts) > 1:
            raise LayoutError("replicas that share nothing run as separate servers behind its router, one per host")
    except LayoutError as error:
        return _refused(SGLANG.name, SGLANG.version, error.message)
    size = layout.tp * layout.dp if spans else layout.tp
    argv = ["python", "-m", "sglang.launch_server", "--model-path", path, "--trust-remote-code", f"--tp-size={size}"]
    argv += [f"--pp-size={layout.pp}"] if layout.pp > 1 else []
    argv += [f"--dp-size={layout.dp}"] if layout.dp > 1 else []
    argv += ["--enable-dp-attention"] if spans else []
    argv += [f"--ep-size={layout.ep}"] if layout.ep > 1 else []
    argv += ["--moe-a2a-backend=deepep"] if layout.dispatch == "all_to_all" else []
    argv += ["--mm-enable-dp-encoder"] if plan.vision == "shared_out" else []
    argv += ["--kv-cache-dtype=fp8_e4m3"] if plan.kv_dtype == "fp8" else []
    argv += [f"--context-length={plan.need.max_tokens}", f"--max-running-requests={plan.objective.concurrency}"]
    argv += [f"--chunked-prefill-size={plan.objective.chunk_tokens}", f"--mem-fraction-static={_memory_share(plan)}"]
    argv += options
    env = {"SGLANG_PP_LAYER_PARTITION": ",".join(map(str, layout.stages))} if layout.stages else {}

    def of_host(i: int) -> list[str]:
        if len(hosts) == 1:
            return []
        return [f"--nnodes={len(hosts)}", f"--node-rank={i}", f"--dist-init-addr={HEAD}:{PORT}"]

    return LaunchPlan(engine=SGLANG.name, version=SGLANG.version, commands=_per_host(hosts, argv, env, of_host))


def _per_host(
    hosts: Sequence[tuple[str, range]],
    argv: Sequence[str],
    env: Mapping[str, str],
    of_host: Callable[[int], list[str]],
) -> tuple[LaunchCommand, ...]:
    return tuple(
        LaunchCommand(host=host if len(hosts) > 1 else "", argv=(*argv, *of_host(i)), env=env)
        for i, (host, _) in enumerate(hosts)
    )


def _hosts(world_size: int, topology: Topology) -> list[tuple[str, range]]:
    """Hosts in rank order with their ranks. Raises LayoutError unless the ranks of each follow one another, equally
    many on each: engines number ranks host by host."""
    names = [topology.host_of(rank) for rank in range(world_size)]
    hosts = [(name, range(names.index(name), names.index(name) + names.count(name))) for name in dict.fromkeys(names)]
    if any(names[rank] != name for name, ranks in hosts for rank in ranks):
        raise LayoutError("ranks of a host must follow one another", found=names)
    if len({len(ranks) for _, ranks in hosts}) > 1:
        raise LayoutError(f"hosts hold unequal numbers of ranks: {[len(ranks) for _, ranks in hosts]}")
    return hosts


def _precision(plan: Candidate, published: str, engine: str, known: Mapping[str, list[str]]) -> list[str]:
    """Options for the precision. Raises LayoutError for one that the engine cannot make from the published files."""
    if plan.precision == published:
        return []
    if published == "bf16" and plan.precision in known:
        return known[plan.precision]
    raise LayoutError(f"{engine} loads these files as {published}; {plan.precision} needs another checkpoint")


def _memory_share(plan: Candidate) -> float:
    """Share of the device that the engine may take: the plan's own peak, rounded up, with a little room."""
    ledger = plan.fullest
    if ledger.capacity is None:
        return 0.9
    return min(0.97, max(0.5, math.ceil(100 * ledger.peak / ledger.capacity.value + 2) / 100))


def _refused(engine: str, version: str, reason: str) -> LaunchPlan:
    return LaunchPlan(engine=engine, version=version, refused=reason)
