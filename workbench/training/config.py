"""The recipe of a training run: a TOML file, read strictly into frozen records.

A recipe says everything that decides the result. What decides only speed (the layout, threads) and what is only
observed (evaluation, checkpoints) stands in `[run]`; the rest is `essence`, which a resumed run must share.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from workbench.base import ConfigError, LayoutError
from workbench.checkpoint import Sizes, k3_config, preprocessor_config
from workbench.placement import Layout, check_layout
from workbench.serving.inputs.tokenizer_files import K3_RESERVED_OFFSETS, RESERVED_BLOCK
from workbench.spec import ModelSpec, SpecialTokens, parse_config
from workbench.training.data.chats import Mixture

MAX_NEW_TOKENS = 224  # the longest trained reply, the index of a full picture and what is found in it, has fewer

__all__ = ["OptimiserConfig", "RunConfig", "TowerConfig", "TrainConfig", "read_config"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimiserConfig:
    """Learning rates and their schedule: linear warm-up, then a cosine from 1 down to `final_share`.

    `muon_lr` is that of hidden matrices, which are stepped by Muon; at 0 AdamW steps them as it does all the rest,
    with `adam_lr`. Weight decay is decoupled and applies to matrices only.
    """

    adam_lr: float
    muon_lr: float = 0.0
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.97
    eps: float = 1e-8
    momentum: float = 0.95
    clip_norm: float = 1.0
    warmup_steps: int = 100
    final_share: float = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig:
    """A lesson for the vision tower alone before training step `at_step`: `steps` batches of `batch` labelled pictures.

    At `steps` 0 there is none. Learning rates warm up and then fall along a cosine, as those of the run. With
    `learns_on` the tower goes on learning with the rest; early on, gradients through a text model that cannot speak yet
    undo the lesson (shapes read right at places: 100 % after it, 20 % after 800 steps).
    """

    at_step: int = 0
    steps: int = 0
    batch: int = 96
    adam_lr: float = 2e-3
    muon_lr: float = 5e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    learns_on: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How the run is carried out; none of it changes what is computed beyond the rounding of sums."""

    layout: Layout = field(default_factory=Layout)
    threads: int = 1  # of each rank
    checkpoint_steps: int = 250
    exam_steps: int = 500  # a small held-out exam this often; 0 for never
    exam_per_kind: int = 20
    exam_tokens: int = MAX_NEW_TOKENS  # that a reply in it may have, thoughts included


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A step computes `micro_batches` packs of up to `pack_tokens` tokens each, shared out over the replicas.

    From `qat_start` (a share of `steps`) on, the forward pass sees every weight as the published files will hold it.
    Raises ConfigError for values that make no sense together.
    """

    name: str
    seed: int
    steps: int
    pack_tokens: int
    micro_batches: int
    sizes: Sizes
    optimiser: OptimiserConfig
    mixture: Mixture = field(default_factory=Mixture)
    tower: TowerConfig = field(default_factory=TowerConfig)
    dtype: str = "float32"
    qat_start: float = 0.8
    balance_rate: float = 0.01
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for what, is_good in (
            ("steps, pack_tokens and micro_batches are at least 1", min(self.steps, self.pack_tokens) > 0),
            ("micro_batches is at least 1", self.micro_batches > 0),
            ("dtype is float32 or bfloat16", self.dtype in ("float32", "bfloat16")),
            ("qat_start lies in [0, 1]", 0 <= self.qat_start <= 1),
            ("balance_rate is not negative", self.balance_rate >= 0),
            ("threads is at least 1", self.run.threads > 0),
            (
                "checkpoint_steps and exam_tokens are at least 1, exam_steps at least 0",
                min(self.run.checkpoint_steps, self.run.exam_tokens) > 0 <= self.run.exam_steps,
            ),
            ("adam_lr is positive, muon_lr not negative", self.optimiser.adam_lr > 0 <= self.optimiser.muon_lr),
            ("warmup_steps lies in [0, steps)", 0 <= self.optimiser.warmup_steps < self.steps),
            ("tower: at_step lies in [0, steps)", 0 <= self.tower.at_step < self.steps),
            ("tower: steps is not negative, batch positive", self.tower.steps >= 0 < self.tower.batch),
            ("tower: learning rates are positive", min(self.tower.adam_lr, self.tower.muon_lr) > 0),
            ("clip_norm is positive", self.optimiser.clip_norm > 0),
        ):
            if not is_good:
                raise ConfigError(what, where=self.name, found=self)
        if self.tower.steps and (self.tower.batch % self.run.layout.dp or self.run.layout.tp > 1):
            raise ConfigError(
                "the tower's lesson needs a whole tower on each replica and an equal share of pictures",
                where=self.name,
                found=f"batch {self.tower.batch} on {self.run.layout}",
                next_step="Use tp1 and a batch that is a multiple of dp",
            )
        if self.micro_batches % self.run.layout.dp:
            raise ConfigError(
                "every replica takes the same number of micro-batches",
                where=self.name,
                found=f"micro_batches = {self.micro_batches} on dp{self.run.layout.dp}",
                next_step="Make micro_batches a multiple of dp",
            )

    @property
    def tokens_per_step(self) -> int:
        """Upper bound; packs hold whole samples and are a little shorter."""
        return self.pack_tokens * self.micro_batches

    @property
    def thinking(self) -> bool:
        """Whether the trained model thinks before it answers, unless it is asked not to."""
        return self.mixture.thinking_share > 0

    @property
    def qat_first_step(self) -> int:
        """First step (from 0) that sees quantised weights; `steps` for never."""
        return round(self.qat_start * self.steps)

    @property
    def essence(self) -> str:
        """What decides the result, as text: equal for two recipes that must train the same weights."""
        values = dataclasses.asdict(dataclasses.replace(self, run=RunConfig()))
        del values["run"]
        return json.dumps(values, sort_keys=True)

    def model_config(self) -> dict[str, object]:
        """The `config.json` that the trained model is published with; special ids in K3's places of the vocabulary."""
        first = self.sizes["vocab_size"] - RESERVED_BLOCK
        tokens = SpecialTokens(
            bos=first + K3_RESERVED_OFFSETS["[BOS]"],
            eos=first + K3_RESERVED_OFFSETS["<|end_of_msg|>"],  # K3 calls the end of a message its end of sequence
            pad=first + K3_RESERVED_OFFSETS["[PAD]"],
            media=first + K3_RESERVED_OFFSETS["<|media_pad|>"],
        )
        return k3_config(sizes=self.sizes, tokens=tokens)

    def spec(self) -> ModelSpec:
        """Raises ConfigError or LayoutError where the sizes make no model, or none that fits the layout."""
        spec = parse_config(self.model_config(), preprocessor_config())
        check_layout(spec, self.run.layout)
        if self.optimiser.muon_lr and (self.run.layout.tp > 1):
            raise LayoutError(
                "Muon works on whole matrices, and tensor parallelism cuts them",
                where=self.name,
                found=str(self.run.layout),
                next_step="Use dp, ep or pp, or set muon_lr = 0",
            )
        return spec


def read_config(path: Path | str) -> TrainConfig:
    """Recipe from a TOML file. Raises ConfigError for an unreadable file, an unknown, missing or mistyped key."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe cannot be read: {error}", where=path) from None
    return parse_recipe(content, where=str(path))


def parse_recipe(content: Mapping[str, Any], *, where: str) -> TrainConfig:
    """Recipe from the tables of its file: the plain keys, then [model], [optimiser], [mixture], [tower] and [run]."""
    values = dict(content)
    sizes = _table(values, "model", where)
    full = sizes.get("full_attn_layers")
    if isinstance(full, list):
        sizes["full_attn_layers"] = tuple(full)
    run = _table(values, "run", where)
    if missing := sorted(get_type_hints(Sizes).keys() - sizes.keys()):
        raise ConfigError("sizes are missing", where=f"{where}, [model]", found="no " + ", ".join(missing))
    try:
        if "layout" in run:
            run["layout"] = Layout.parse(str(run["layout"]))
        values["sizes"] = cast(Sizes, _typed(Sizes, sizes, f"{where}, [model]"))
        values["optimiser"] = _record(OptimiserConfig, _table(values, "optimiser", where), f"{where}, [optimiser]")
        values["mixture"] = _record(Mixture, _table(values, "mixture", where), f"{where}, [mixture]")
        values["tower"] = _record(TowerConfig, _table(values, "tower", where), f"{where}, [tower]")
        values["run"] = _record(RunConfig, run, f"{where}, [run]")
        return _record(TrainConfig, values, where)
    except (ValueError, LayoutError) as error:
        raise ConfigError(str(error), where=where) from None


def _table(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    table = values.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is not a table", where=where, found=table)
    return dict(table)


def _record(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    checked = _typed(kind, values, where)
    required = {
        f.name
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - checked.keys()):
        raise ConfigError("keys are missing", where=where, found="no " + ", ".join(missing))
    return kind(**checked)


def _typed(kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`values`, each of the type that `kind` declares; whole numbers may stand where a float is wanted."""
    hints = get_type_hints(kind)
    if unknown := sorted(values.keys() - hints.keys()):
        raise ConfigError("unknown keys", where=where, found=", ".join(unknown), expected=f"among {sorted(hints)}")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        wanted = hints[name]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if wanted in (bool, int, float, str) and type(value) is not wanted:
            raise ConfigError(f"{name} has the wrong type", where=where, found=repr(value), expected=wanted.__name__)
        checked[name] = value
    return checked
