"""A lesson for the vision tower: learn to see from what lies at each place of a picture, not from words about it.

Through the text model a tower learns colours and places within minutes, but outlines and letters only very slowly:
their gradient comes from a few words of each answer, through a model that is itself still learning to speak. (K3's own
tower, too, is trained before it meets the text model.) Here readers on the projector's output name what is at each
place, the letters of a label, the bars of a chart; after the lesson they are thrown away, the tower stays.

What is at a place, and which place it is, is read with the text model's own embeddings of those words. A token that
shows a red star then lies near "red" and "star", and to look for one is to look for the same word again.

Replicas share a lesson: each takes its part of every batch and the gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn.model import Model
from workbench.parallel import Group
from workbench.serving.inputs import ImageProcessor, Tokenizer
from workbench.serving.inputs.images import normalise
from workbench.spec import ModelSpec
from workbench.training.config import OptimiserConfig, TowerConfig
from workbench.training.data.labels import (
    LETTER_CLASSES,
    PICTURE_CLASSES,
    PLACE_CLASSES,
    PLACE_WORDS,
    letter_labels,
    picture_labels,
    place_labels,
    place_tokens,
)
from workbench.training.data.scenes import PLACES, Scene, SceneKind, make_scene, scene_image
from workbench.training.muon import Matrix, Muon
from workbench.training.optimiser import learning_rate_share

__all__ = ["LabelledBatch", "Readers", "TowerLesson", "draw_batch", "word_vectors"]

KIND_SHARES: dict[SceneKind, float] = {"figures": 0.45, "number": 0.2, "word": 0.2, "chart": 0.15}
_NOTHING_WEIGHT = 0.1  # most tokens hold no letter, most places no figure
_STREAM = 1  # sets the lesson's pictures apart from those of the run's packs, which are seeded (seed, step, micro)


@dataclass(frozen=True, slots=True)
class LabelledBatch:
    """N pictures of T tokens in all: what the tower reads, and class numbers of what it should tell."""

    pixels: Tensor  # (patches, 3, p, p)
    grids: tuple[tuple[int, int, int], ...]
    token_counts: Tensor  # (N,)
    place_rows: Tensor  # (N, 9) rows of T
    places: Tensor  # (N, 9, 3)
    letters: Tensor  # (T, 2)
    pictures: Tensor  # (N, P)


def draw_batch(
    spec: ModelSpec, processor: ImageProcessor, seed: int, step: int, pictures: Sequence[int]
) -> LabelledBatch:
    """The numbered pictures of a step's batch, of the training side, those of one size side by side.

    A picture depends on seed, step and its number alone, so replicas that share out a batch see what one rank would.
    """
    assert spec.vision is not None
    assert spec.image is not None
    scenes: list[Scene] = []
    for picture in pictures:
        rng = np.random.default_rng((seed, step, picture, _STREAM))
        kind = rng.choice(len(KIND_SHARES), p=list(KIND_SHARES.values()))
        scenes.append(make_scene(rng, kind=tuple(KIND_SHARES)[kind]))
    scenes.sort(key=lambda scene: scene.canvas)
    images = [processor.process(scene_image(scene)) for scene in scenes]
    merge = spec.vision.merge_size
    token_pixels = spec.vision.patch_size * merge
    token_grids = [(rows // merge, columns // merge) for _, rows, columns in (image.grid for image in images)]
    counts = np.array([rows * columns for rows, columns in token_grids])
    firsts = np.cumsum(counts) - counts
    pairs = list(zip(scenes, token_grids, strict=True))
    place_rows = [place_tokens(s, g, token_pixels) + first for (s, g), first in zip(pairs, firsts, strict=True)]
    return LabelledBatch(
        torch.from_numpy(normalise(np.concatenate([image.patches for image in images]), spec.image)),
        tuple(image.grid for image in images),
        torch.from_numpy(counts),
        torch.from_numpy(np.stack(place_rows)),
        torch.from_numpy(np.stack([place_labels(scene) for scene in scenes])),
        torch.from_numpy(np.concatenate([letter_labels(s, g, token_pixels) for s, g in pairs])),
        torch.from_numpy(np.stack([picture_labels(scene) for scene in scenes])),
    )


def word_vectors(embedding: Tensor, tokenizer: Tokenizer) -> tuple[Tensor, ...]:
    """Unit vectors of the words for what is at a place, one matrix (words, D) per label, and of the nine places' names.

    `embedding` is (vocabulary, D). A name of several tokens is the sum of theirs, as they stand within a sentence.
    """
    names = tuple(name for row in PLACES for name in row)
    sums = [
        torch.stack([embedding[tokenizer.encode(f" {word}")].sum(0) for word in ws]) for ws in (*PLACE_WORDS, names)
    ]
    return tuple(F.normalize(rows.detach().float(), dim=-1) for rows in sums)


class Readers(nn.Module):
    """Readers of what the projector gives: words at the places, and linear ones at every token and of a picture's mean.

    `words` are those of `word_vectors`; only how sharply they are told apart, and when there is nothing, is learnt.
    """

    def __init__(self, dim: int, words: Sequence[Tensor]) -> None:
        super().__init__()
        self.words = tuple(words)
        self.sharpness = nn.Parameter(torch.ones(len(words)))
        self.nothing = nn.Parameter(torch.zeros(len(words)))
        self.letter = nn.Linear(dim, sum(LETTER_CLASSES))
        self.picture = nn.Linear(dim, sum(PICTURE_CLASSES))

    def forward(self, features: Tensor, batch: LabelledBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(T, D) -> summed losses of each label (L,), what to divide them by (L,), and (right, asked) by kind of label.

        Losses are weighted sums, so those of several replicas add up; the loss of all is the sum of their quotients.
        """
        owner = torch.repeat_interleave(torch.arange(len(batch.token_counts)), batch.token_counts)
        sums = features.new_zeros(len(batch.token_counts), features.shape[1]).index_add(0, owner, features)
        means = sums / batch.token_counts[:, None]
        losses, divisors, right = [], [], {}
        at_places = features[batch.place_rows]
        scores = [s * at_places @ w.T for s, w in zip(self.sharpness, self.words, strict=True)]
        empty = [x.expand(*at_places.shape[:2], 1) for x in self.nothing]
        where = torch.arange(at_places.shape[1]).expand(at_places.shape[:2])
        things = torch.cat([part for pair in zip(empty[:-1], scores[:-1], strict=True) for part in pair], -1)
        for name, values, ids, classes, weight in (
            ("shape", things, batch.places, PLACE_CLASSES, 1.0),
            ("place", torch.cat([empty[-1], scores[-1]], -1), where[..., None] + 1, (where.shape[1] + 1,), 1.0),
            ("letter", self.letter(features), batch.letters, LETTER_CLASSES, 2.0),
            ("picture", self.picture(means), batch.pictures, PICTURE_CLASSES, 0.5),
        ):
            for idx, (part, own) in enumerate(zip(values.split(classes, -1), ids.unbind(-1), strict=True)):
                share = part.new_ones(classes[idx])
                share[0] = _NOTHING_WEIGHT
                losses.append(F.cross_entropy(part.flatten(0, -2), own.flatten(), share, reduction="sum"))
                divisors.append(share[own].sum() / weight)
                if idx == 0:
                    is_there = own > 0
                    hits = (part.argmax(-1) == own) & is_there
                    right[name] = torch.stack([hits.sum(), is_there.sum()]).double()
        return torch.stack(losses), torch.stack(divisors), right


class TowerLesson:
    """Trains a copy of tower and projector, started from `weights` (parameter name -> whole tensor), to say `words`."""

    def __init__(
        self,
        spec: ModelSpec,
        config: TowerConfig,
        seed: int,
        weights: Mapping[str, Tensor],
        words: Sequence[Tensor],
        dp: Group,
    ) -> None:
        assert spec.image is not None
        self.spec, self.config, self.seed, self.dp = spec, config, seed, dp
        self.model = Model(spec, layers=range(0), has_embed=False, has_head=False, precision="fp32").to_empty(
            device="cpu"
        )
        self.processor = ImageProcessor(spec.image)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.readers = Readers(spec.hidden_size, words)
        named = dict(self.model.named_parameters())
        rest = [p for name, p in named.items() if not _is_hidden(name, p)]
        self.parameters = [*named.values(), *self.readers.parameters()]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)  # summed in place, read by both optimisers
        matrices = {name: Matrix(p.detach(), _grad(p), dp) for name, p in named.items() if _is_hidden(name, p)}
        self.muon = Muon(matrices, weight_decay=config.weight_decay)
        self.adam = torch.optim.AdamW(
            [*rest, *self.readers.parameters()],
            lr=config.adam_lr,
            betas=(0.9, 0.98),
            weight_decay=config.weight_decay,
        )
        self.schedule = OptimiserConfig(adam_lr=config.adam_lr, warmup_steps=config.warmup_steps)

    def step(self, step: int) -> dict[str, float]:
        """One batch; returns the loss and the shares of right answers over all replicas."""
        pictures = range(self.dp.rank, self.config.batch, self.dp.size)
        batch = draw_batch(self.spec, self.processor, self.seed, step, pictures)
        losses, divisors, right = self.readers(self.model.encode_images(batch.pixels, batch.grids), batch)
        loss = (losses / self.dp.all_reduce(divisors)).sum()
        for parameter in self.parameters:
            _grad(parameter).zero_()
        loss.backward()
        self._sum_gradients()
        share = learning_rate_share(step, self.config.steps, self.schedule)
        self.muon.step(self.config.muon_lr * share)
        for group in self.adam.param_groups:
            group["lr"] = self.config.adam_lr * share
        self.adam.step()
        own_loss = torch.tensor([loss.item(), 1 / self.dp.size], dtype=torch.float64)
        marks = self.dp.all_reduce(torch.stack([own_loss, *right.values()]))
        names = ("loss", *right)
        return {name: value / max(1.0, of) for name, (value, of) in zip(names, marks.tolist(), strict=True)}

    def _sum_gradients(self) -> None:
        grads = [_grad(parameter) for parameter in self.parameters]
        total = self.dp.all_reduce(torch.cat([grad.flatten() for grad in grads]))
        for grad, summed in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "pos_embed" not in name


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "gradients are made once and kept"
    return parameter.grad
