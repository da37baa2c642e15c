"""Held-out questions as passes through a model: where a change of its weights shows in what it would answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.base import ConfigError
from workbench.nn.batch import TokenBatch
from workbench.nn.model import Model
from workbench.parallel import RankContext
from workbench.serving.inputs import read_tokenizer
from workbench.serving.open import thinks_first
from workbench.spec import read_spec
from workbench.training.answers import answered_batches
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import fact_exam, picture_exam

__all__ = ["held_out_passes"]


def held_out_passes(root: Path | str, per_kind: int) -> Callable[[Model, RankContext], list[TokenBatch]]:
    """`per_kind` questions of each kind about unseen pictures, and as many facts in unseen words as there are pictures'
    questions; each with the greedy answer of the model that is given. Logits are wanted where the answers were taken.

    Raises as `read_tokenizer`, and ConfigError for a model that takes no pictures.
    """
    spec = read_spec(root)
    if spec.vision is None or spec.image is None:
        raise ConfigError("the held-out questions are about pictures, and this model takes none", where=Path(root))
    tokenizer, thinking = read_tokenizer(root, spec), thinks_first(root)
    pictures = picture_exam(per_kind)
    facts = fact_exam(read_facts())
    step = max(1, len(facts) // max(1, len(pictures)))
    items = [*pictures, *facts[::step][: len(pictures)]]

    def passes(model: Model, ctx: RankContext) -> list[TokenBatch]:
        return answered_batches(model, ctx, tokenizer, items, thinking=thinking)

    return passes
