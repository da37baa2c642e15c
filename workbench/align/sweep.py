"""Which modules bear which precision: each group in each format alone, then the mix that meets a budget.

The model is held once, dense, in float32; a group's weights are replaced by what a format makes of them and put back.
Logits on the given sequences are compared with those of the unchanged weights, so that what is measured is the cost of
holding weights in a format and nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from workbench.align.metrics import LogitAgreement, logit_agreement
from workbench.align.mix import Choice, mix_path, predicted
from workbench.align.sweep_report import Mix, Sensitivity, SweepReport
from workbench.base import RequestError, human
from workbench.loading import load_sharded_weights
from workbench.nn.batch import TokenBatch
from workbench.nn.denormal import denormals_as_zero
from workbench.nn.linear import MatrixStore
from workbench.nn.model import Model
from workbench.nn.precision_map import PLAIN, PrecisionMap, is_quantisable
from workbench.nn.quant import SCHEMES, Scheme
from workbench.parallel import RankContext

__all__ = ["Budget", "Granularity", "sweep_checkpoint", "sweep_precisions"]

FORMATS = ("fp8", "int8", "int4", "mxfp4")
Granularity = Literal["kind", "layer", "kind and layer"]
MEASURED_ON_THE_WAY = 8  # mixes of the path, for the picture
_KIND = (
    (re.compile(r"ffn\.experts\."), "routed experts"),
    (re.compile(r"ffn\.shared\."), "shared experts"),
    (re.compile(r"ffn\."), "dense feed-forward"),
    (re.compile(r"mixer\.[qkv]_proj"), "queries, keys, values"),
    (re.compile(r"mixer\.(?:q_a|q_b|kv_a)_proj"), "latent projections"),
    (re.compile(r"mixer\.g_proj"), "output gate"),
    (re.compile(r"mixer\.o_proj"), "mixer output"),
)
Progress = Callable[[int, int, str], None]  # runs done, of all, what was measured
# What is read: token ids, each sequence from its first token on, every position compared; or passes made with the
# loaded model (of prompts with pictures, say), compared in the rows whose logits they want.
Probe = Sequence[Sequence[int]] | Callable[[Model, RankContext], Sequence[TokenBatch]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What the mix has to meet; one of the four. `ratio`: weights over those in bf16; `kl` in nats, mean."""

    num_bytes: int | None = None
    ratio: float | None = None
    kl: float | None = None
    top1: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.num_bytes, self.ratio, self.kl, self.top1) if x is not None]
        if len(given) != 1 or given[0] < 0:
            raise RequestError("a budget is one limit", expected="num_bytes, ratio, kl or top1")

    def describe(self) -> str:
        if self.num_bytes is not None:
            return f"at most {human(self.num_bytes, 'B')}"
        if self.ratio is not None:
            return f"at most {self.ratio:g} of bf16"
        return (
            f"KL at most {self.kl:g} nats" if self.kl is not None else f"same first choice in at least {self.top1:.2%}"
        )

    def is_met(self, mix: Mix) -> bool:
        if self.num_bytes is not None:
            return mix.bytes_total <= self.num_bytes
        if self.ratio is not None:
            return mix.ratio <= self.ratio
        if self.kl is not None:
            return mix.kl is not None and mix.kl <= self.kl
        return mix.top1 is not None and self.top1 is not None and mix.top1 >= self.top1

    @property
    def is_of_size(self) -> bool:
        return self.num_bytes is not None or self.ratio is not None


def sweep_checkpoint(
    root: Path | str,
    probe: Probe,
    budget: Budget,
    *,
    formats: Sequence[str] = FORMATS,
    granularity: Granularity = "kind",
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> SweepReport:
    """Load `root` dense in float32 into this process and sweep it. Raises as `load_sharded_weights` and below."""
    loaded = load_sharded_weights(root, precision="fp32", device=device)
    model = loaded.model.eval().requires_grad_(False)
    with denormals_as_zero():
        passes = probe(model, loaded.ctx) if callable(probe) else probe
        report = sweep_precisions(model, passes, budget, formats=formats, granularity=granularity, progress=progress)
    return replace(report, root=str(root))


@torch.no_grad()
def sweep_precisions(
    model: Model,
    passes: Sequence[Sequence[int]] | Sequence[TokenBatch],
    budget: Budget,
    *,
    formats: Sequence[str] = FORMATS,
    granularity: Granularity = "kind",
    progress: Progress | None = None,
) -> SweepReport:
    """Sweep a dense float32 `model` on sequences of token ids, or on passes in the rows whose logits they want.

    Raises RequestError for none of them, an unknown format, or a model whose matrices are not dense.
    """
    began = time.perf_counter()
    bench = _Bench(model, passes, formats, granularity)
    jobs = [(group, scheme) for group in bench.groups for scheme in bench.schemes if bench.fits(group, scheme)]
    names = ("fp8", "int8", "int4", "mxfp4")
    uniform_names = [name for name in names if name in formats]
    num_runs = len(jobs) + len(uniform_names) + MEASURED_ON_THE_WAY
    sensitivities = []
    for n, (group, scheme) in enumerate(jobs):
        found = bench.measure({group: scheme.name})
        sensitivities.append(
            Sensitivity(
                group=group,
                scheme=scheme.name,
                bytes_plain=bench.plain_bytes(group),
                bytes_stored=bench.stored_bytes(group, scheme),
                kl=found.kl_mean,
                top1=found.top1,
            )
        )
        if progress is not None:
            progress(n + 1, num_runs, f"{group} in {scheme.name}")
    path = [bench.mix("mix", choice, sensitivities) for choice in mix_path(sensitivities)]
    uniform = []
    for name in uniform_names:
        choice = {group: name if bench.is_held(group, name) else PLAIN for group in bench.groups}
        uniform.append(bench.measured(bench.mix(name, choice, sensitivities)))
        if progress is not None:
            progress(len(jobs) + len(uniform), num_runs, f"all that can be in {name}")
    spread = _spread(len(path), MEASURED_ON_THE_WAY)
    measured = {}
    for n in spread:
        measured[n] = bench.measured(path[n])
        if progress is not None:
            progress(num_runs - len(spread) + len(measured), num_runs, "a mix on the way")
    chosen = _choose(path, measured, bench, budget)
    return SweepReport(
        root="",
        budget=budget.describe(),
        positions=bench.num_positions,
        bytes_bf16=bench.bytes_bf16,
        sensitivities=tuple(sensitivities),
        mixes=tuple(measured[n] for n in sorted(measured)),
        uniform=tuple(uniform),
        chosen=chosen,
        precision_map=None if chosen is None else bench.map_of(dict(chosen.schemes)),
        seconds=time.perf_counter() - began,
    )


def _choose(path: Sequence[Mix], measured: dict[int, Mix], bench: _Bench, budget: Budget) -> Mix | None:
    """The mix that meets the budget best: of a size, the largest that fits; of an error, the smallest that does.

    Measured errors rise along the path but not at every step, so that halving finds where they cross the budget and the
    steps around it are looked at one by one.
    """

    def at(n: int) -> Mix:
        if n not in measured:
            measured[n] = bench.measured(path[n])
        return measured[n]

    if budget.is_of_size:
        first = next((n for n, mix in enumerate(path) if budget.is_met(mix)), None)
        return None if first is None else at(first)
    low, high = 0, len(path) - 1  # low meets it (nothing is changed there), unless the budget is below zero
    if not budget.is_met(at(0)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if budget.is_met(at(middle)) else (low, middle - 1)
    return at(max(n for n, mix in measured.items() if budget.is_met(mix)))


def _spread(count: int, wanted: int) -> list[int]:
    return sorted({round(n * (count - 1) / max(1, wanted - 1)) for n in range(wanted)})


class _Bench:
    """A model, its groups of matrices, and the logits that its unchanged weights give."""

    def __init__(
        self,
        model: Model,
        passes: Sequence[Sequence[int]] | Sequence[TokenBatch],
        formats: Sequence[str],
        granularity: Granularity,
    ) -> None:
        device = next(model.parameters()).device
        self.batches = [x for x in passes if isinstance(x, TokenBatch)]
        if sequences := [x for x in passes if not isinstance(x, TokenBatch)]:
            self.batches.append(TokenBatch.whole(sequences, all_logits=True, device=device))
        if not self.batches or not all(sequences):
            raise RequestError("nothing to measure on", expected="at least one sequence of tokens")
        if unknown := [name for name in formats if name not in SCHEMES]:
            raise RequestError(f"unknown formats {unknown}", expected=", ".join(SCHEMES))
        self.model, self.schemes = model, [SCHEMES[name] for name in formats]
        self.stores: dict[str, MatrixStore] = {
            f"{prefix}.weight": module
            for prefix, module in model.named_modules()
            if isinstance(module, MatrixStore) and is_quantisable(f"{prefix}.weight")
        }
        if any(store.scheme is not None for store in self.stores.values()):
            raise RequestError("matrices are held in a scheme already", expected="a dense model, precision fp32")
        self.groups: dict[str, list[str]] = {}
        for param in self.stores:
            self.groups.setdefault(_group_of(param, granularity), []).append(param)
        self.num_positions = sum(len(batch.logit_rows) for batch in self.batches)
        self.bytes_matrices = sum(map(self.plain_bytes, self.groups))
        self.bytes_bf16 = 2 * sum(parameter.numel() for parameter in model.parameters())
        self.logits = self._run()

    def _run(self) -> Tensor:
        return torch.cat([self.model(batch).cpu() for batch in self.batches])

    def fits(self, group: str, scheme: Scheme) -> bool:
        """Whether the columns of all matrices make whole groups."""
        unit = max(scheme.column_unit, 32 if scheme.name in ("int4", "mxfp4") else 1)
        return all(self.stores[param].logical_shape[-1] % unit == 0 for param in self.groups[group])

    def is_held(self, group: str, precision: str) -> bool:
        """Whether a precision of that name holds this group in its scheme."""
        params = self.groups[group]
        uniform = PrecisionMap.uniform(precision)
        return all(uniform.name_of(param) == precision for param in params) and self.fits(group, SCHEMES[precision])

    def plain_bytes(self, group: str) -> int:
        return 2 * sum(self.stores[param].num_params for param in self.groups[group])

    def stored_bytes(self, group: str, scheme: Scheme) -> int:
        buffers = [scheme.buffers(self.stores[param].logical_shape) for param in self.groups[group]]
        return sum(dtype.itemsize * torch.Size(shape).numel() for each in buffers for shape, dtype in each.values())

    def measure(self, choice: Mapping[str, str]) -> LogitAgreement:
        with self._held(choice):
            return logit_agreement(self.logits, self._run())

    def mix(self, name: str, choice: Choice, sensitivities: Sequence[Sensitivity]) -> Mix:
        # A group whose columns make no whole groups of any format was not tried and stays plain.
        tried = {x.group for x in sensitivities}
        size, kl = predicted({group: name for group, name in choice.items() if group in tried}, sensitivities)
        size += sum(self.plain_bytes(group) for group in self.groups if group not in tried)
        total = self.bytes_bf16 - self.bytes_matrices + size
        return Mix(
            name=name,
            schemes=tuple(sorted(choice.items())),
            bytes_total=total,
            ratio=total / self.bytes_bf16,
            kl_predicted=kl,
            matrices_ratio=size / self.bytes_matrices,
        )

    def measured(self, mix: Mix) -> Mix:
        found = self.measure(dict(mix.schemes))
        return replace(mix, kl=found.kl_mean, top1=found.top1)

    def map_of(self, choice: Mapping[str, str]) -> PrecisionMap:
        rules = tuple(
            (param, scheme) for group, scheme in choice.items() if scheme != PLAIN for param in self.groups[group]
        )
        return PrecisionMap(rules=rules)

    @contextmanager
    def _held(self, choice: Mapping[str, str]) -> Iterator[None]:
        kept: dict[str, Tensor] = {}
        try:
            for group, name in choice.items():
                if name == PLAIN:
                    continue
                for param in self.groups[group]:
                    weight = self.stores[param].weight
                    kept[param] = weight.detach().clone()
                    weight.copy_(SCHEMES[name].decode(SCHEMES[name].encode(weight), weight.dtype))
            yield
        finally:
            for param, values in kept.items():
                self.stores[param].weight.copy_(values)


def _group_of(param: str, granularity: Granularity) -> str:
    _, layer, rest = param.split(".", 2)
    kind = next(name for pattern, name in _KIND if pattern.match(rest))
    if granularity == "kind":
        return kind
    return f"layer {layer}" if granularity == "layer" else f"layer {layer}: {kind}"
