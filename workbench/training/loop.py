"""The training loop of one rank: publish weights, sum gradients, balance experts, step; now and then save and examine.

Metrics are written by rank 0; kinds of records:

    run     at each start: layout, threads, parameters of the whole model
    step    loss and phase, learning rate share, gradient norm, tokens, samples, seconds, load: {layer: max / mean}
    tower   of the vision tower's lesson, every now and then: loss, shares of right shapes, letters, bars
    exam    right answers by kind of question, held out
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.base import WorkbenchError
from workbench.nn.denormal import denormals_as_zero
from workbench.parallel import Group, RankContext, allocate, attach, build_stage
from workbench.serving.inputs import read_tokenizer
from workbench.training.answers import answer_items
from workbench.training.balance import ExpertLoad, LoadMeter
from workbench.training.checkpointing import SavedState, load_rank_state, save_state
from workbench.training.config import TrainConfig
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import ExamItem, fact_exam, picture_exam
from workbench.training.data.questions import KINDS
from workbench.training.data.samples import PackedBatch, SampleStream
from workbench.training.data.score import is_right
from workbench.training.initial import initialise
from workbench.training.masters import Masters
from workbench.training.metrics import MetricsWriter, OnRecord
from workbench.training.optimiser import Optimiser, learning_rate_share
from workbench.training.quantise import AsPublished
from workbench.training.sharding import whole_shapes
from workbench.training.step import StepSums, compute_gradients
from workbench.training.tower import TowerLesson, word_vectors

__all__ = ["EXAM_KINDS", "METRICS", "STATES", "TOKENIZER", "RankTrainer"]

METRICS, STATES, TOKENIZER = "metrics.jsonl", "states", "tokenizer"  # in the run's folder
_TOWER_RECORD_STEPS = 20
EXAM_KINDS = tuple(kind for kind in KINDS if kind != "caption")  # captions are long and have one right wording


class RankTrainer:
    """One rank's model, masters, optimiser and place in the data. `step` is the number of steps done."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        ctx: RankContext,
        *,
        state: SavedState | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        torch.manual_seed(config.seed)  # nothing here draws from it; whatever may one day is part of the state as well
        self.config, self.out, self.ctx, self.on_record = config, out, ctx, on_record
        self.spec = config.spec()
        dtype = getattr(torch, config.dtype)
        precision = "fp32" if dtype == torch.float32 else "bf16"
        self.model = build_stage(self.spec, ctx.layout, ctx.rank, precision=precision, dtype=dtype)
        allocate(self.model, ctx.device)
        initialise(self.model, ctx.layout, ctx.rank, config.seed)
        attach(self.model, ctx)
        self.masters = Masters(self.model, ctx)
        self.masters.take_from_model()
        self.optimiser = Optimiser(self.masters, config.optimiser)
        self.meter = LoadMeter(self.model)
        self.as_published = AsPublished(self.spec)
        self.facts = read_facts()
        self.tokenizer = read_tokenizer(out / TOKENIZER, self.spec)
        self.stream = SampleStream(
            self.tokenizer, self.facts, seed=config.seed, image_spec=self.spec.image, mixture=config.mixture
        )
        self.world = _world_group(ctx)
        self.step = 0
        if state is not None:
            self._restore(load_rank_state(state, ctx.rank))

    def run(self) -> None:
        """Train to the end. Raises WorkbenchError where the loss is no longer a number."""
        with denormals_as_zero():
            self._run()

    def _run(self) -> None:
        metrics = None
        if self.ctx.rank == 0:
            metrics = MetricsWriter(self.out / METRICS, first_step=self.step, on_record=self.on_record)
        if metrics is not None:
            num_params = sum(math.prod(shape) for shape in whole_shapes(self.spec).values())
            layout, threads = str(self.ctx.layout), torch.get_num_threads()
            metrics.write("run", self.step, layout=layout, threads=threads, num_params=num_params)
        while self.step < self.config.steps:
            if self.config.tower.steps and self.step == self.config.tower.at_step:
                self.teach_tower(metrics)
            record = self.train_step()
            if metrics is not None:
                metrics.write("step", self.step - 1, **record)
            is_last = self.step == self.config.steps
            if is_last or self.step % self.config.run.checkpoint_steps == 0:
                self.save()
            if self.config.run.exam_steps and (is_last or self.step % self.config.run.exam_steps == 0):
                scores = self.examine()
                if metrics is not None:
                    metrics.write("exam", self.step - 1, scores=scores)
        if metrics is not None:
            metrics.close()

    def train_step(self) -> dict[str, Any]:
        """One step; returns its record."""
        config, started = self.config, time.perf_counter()
        is_quantised = self.step >= config.qat_first_step
        self.masters.publish(self.as_published if is_quantised else None)
        packs = self.packs(self.step)
        self.meter.reset()
        sums = compute_gradients(self.model, self.masters, self.ctx, packs, tower_learns=self.tower_learns)
        if not math.isfinite(sums.loss):
            raise WorkbenchError(
                f"the loss of step {self.step} is {sums.loss}", next_step="Lower the learning rates or clip_norm"
            )
        loads = self.meter.loads(self.ctx)
        share = learning_rate_share(self.step, config.steps, config.optimiser)
        norm = self.optimiser.step(share, tower_learns=self.tower_learns)
        self.meter.update_biases(loads, config.balance_rate * share)
        self.step += 1
        seconds = time.perf_counter() - started
        return self._record(sums, self._all_loads(loads), share, norm, is_quantised, seconds)

    @property
    def tower_learns(self) -> bool:
        tower = self.config.tower
        return tower.learns_on or not tower.steps or self.step < tower.at_step

    def teach_tower(self, metrics: MetricsWriter | None = None) -> None:
        """The tower's lesson; a run that is resumed at its step, or before it, takes it from the start."""
        if not self.ctx.is_first_stage:
            return
        masters, config = self.masters.views, self.config.tower
        names = [name for name in masters if name.startswith(("vision.", "projector."))]
        weights = {name: masters[name] for name in names}
        words = word_vectors(masters["embed.weight"], self.tokenizer)
        lesson = TowerLesson(self.spec, config, self.config.seed, weights, words, self.ctx.dp)
        started = time.perf_counter()
        for step in range(config.steps):
            record = lesson.step(step)
            if metrics is not None and (step % _TOWER_RECORD_STEPS == 0 or step == config.steps - 1):
                seconds = round(time.perf_counter() - started, 2)
                marks = {name: round(value, 4) for name, value in record.items()}
                metrics.write("tower", self.step, lesson_step=step, seconds=seconds, **marks)
        for name, values in lesson.weights().items():
            masters[name].copy_(values)

    def packs(self, step: int) -> list[PackedBatch]:
        """This replica's packs of a step: of all micro-batches every dp-th, so that any layout sees the same data."""
        mine = range(self.ctx.coords.dp, self.config.micro_batches, self.ctx.layout.dp)
        return [self.stream.pack(step, micro, token_budget=self.config.pack_tokens) for micro in mine]

    def save(self) -> Path:
        """Save masters, router biases, optimiser, random state and step; every rank calls it."""
        biases = {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}
        content = {
            "step": self.step,
            "masters": self.masters.views,
            "biases": biases,
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }
        return save_state(
            self.out / STATES,
            step=self.step,
            rank=self.ctx.rank,
            world=self.world,
            layout=str(self.ctx.layout),
            essence=self.config.essence,
            content=content,
        )

    def examine(self) -> dict[str, tuple[int, int]]:
        """Kind of question -> right answers and questions, held out, of the model as it will be published."""
        self.masters.publish(self.as_published)
        items = exam_items(self.config.run.exam_per_kind, self.facts)
        mine = items[self.ctx.coords.dp :: self.ctx.layout.dp]
        replies = answer_items(
            self.model,
            self.ctx,
            self.tokenizer,
            mine,
            thinking=self.config.thinking,
            max_new_tokens=self.config.run.exam_tokens,
        )
        kinds = sorted({item.kind for item in items})
        marks = torch.zeros(len(kinds), 2, dtype=torch.int64, device=self.ctx.device)
        for item, reply in zip(mine, replies, strict=True):
            marks[kinds.index(item.kind)] += torch.tensor([is_right(item, reply), 1])
        return {k: (m[0], m[1]) for k, m in zip(kinds, self.ctx.dp.all_reduce(marks).tolist(), strict=True)}

    def _record(
        self,
        sums: StepSums,
        loads: Sequence[ExpertLoad],
        share: float,
        norm: float,
        is_quantised: bool,
        seconds: float,
    ) -> dict[str, Any]:
        return {
            "loss": round(sums.mean_loss, 5),
            "phase": "quantised" if is_quantised else "plain",
            "lr_share": round(share, 5),
            "grad_norm": round(norm, 4),
            "tokens": sums.num_tokens,
            "learnt": sums.num_learnt,
            "samples": sums.num_samples,
            "seconds": round(seconds, 4),
            "tokens_per_s": round(sums.num_tokens / seconds, 1),
            "load": {load.layer: round(load.max_over_mean, 3) for load in loads},
            "dead": sum(len(load.dead) for load in loads),
        }

    def _all_loads(self, loads: tuple[ExpertLoad, ...]) -> list[ExpertLoad]:
        """Of all stages; each rank knows those of its own."""
        if self.ctx.pp.size == 1:
            return list(loads)
        stages: list[Any] = [None] * self.ctx.pp.size
        dist.all_gather_object(stages, loads, group=self.ctx.pp.handle)
        return [load for stage in stages for load in stage]

    def _restore(self, content: dict[str, Any]) -> None:
        masters = self.masters.views
        assert content["masters"].keys() == masters.keys(), "the state holds other parameters than this rank"
        for name, values in content["masters"].items():
            masters[name].copy_(values)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, bias in content["biases"].items():
                parameters[name].copy_(bias)
        self.optimiser.load_state_dict(content["optimiser"])
        torch.set_rng_state(content["rng"])
        self.step = content["step"]


def exam_items(num_per_kind: int, facts: Sequence[Any]) -> list[ExamItem]:
    """A small exam of held-out pictures and phrasings; twice as many facts as of a kind of picture question."""
    all_facts = fact_exam(facts)
    spread = max(1, len(all_facts) // (2 * num_per_kind))
    return [*picture_exam(num_per_kind, kinds=EXAM_KINDS), *all_facts[::spread][: 2 * num_per_kind]]


def _world_group(ctx: RankContext) -> Group:
    size = ctx.layout.world_size
    handle = dist.group.WORLD if size > 1 else None
    return Group("world", ranks=tuple(range(size)), rank=ctx.rank, handle=handle, log=ctx.log)
