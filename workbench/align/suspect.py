"""A suspect, and the suspects that any norm and any matrix give rise to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.align import mistakes

__all__ = ["Suspect", "matrix_suspects", "next_row", "norm_suspects", "put", "put_all", "set_to"]

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """`name` is a short handle, `text` the mistake in words. `change` makes it on a bench."""

    name: str
    text: str
    shows_in: tuple[str, ...]
    change: Callable[[Any], None]


def set_to(attribute: str, value: object) -> Callable[[Any], None]:
    return lambda bench: setattr(bench, attribute, value)


def put(attribute: str, key: str, value: object) -> Callable[[Any], None]:
    return lambda bench: getattr(bench, attribute).__setitem__(key, value)


def put_all(attribute: str, values: dict[str, Any]) -> Callable[[Any], None]:
    return lambda bench: getattr(bench, attribute).update(values)


def norm_suspects(norm: str, where: str, shows_in: tuple[str, ...], eps: float) -> Iterator[Suspect]:
    for other in EPSILONS:
        if other != eps:
            yield Suspect(
                name=f"norm_eps.{norm}",
                text=f"epsilon {other:g} instead of {eps:g} in {where}",
                shows_in=shows_in,
                change=put("eps", norm, other),
            )
    for name, text, wrong in (
        ("norm_offset", "the weight taken as a distance from one", mistakes.offset_norm),
        ("norm_mean", "the mean subtracted as a LayerNorm does", mistakes.layer_norm),
        ("norm_missing", "left out", mistakes.without_norm),
        ("norm_weight_missing", "without its weight", mistakes.without_weight),
        ("norm_bf16", "squares summed in bf16", mistakes.norm_in_bf16),
    ):
        yield Suspect(
            name=f"{name}.{norm}", text=f"{where}: {text}", shows_in=shows_in, change=put("norm", norm, wrong)
        )


def matrix_suspects(module: str, name: str, shows_in: tuple[str, ...]) -> Iterator[Suspect]:
    """What goes wrong with any matrix on its way from the file to a rank."""
    for mistake, text, change in (
        ("transposed", "read as (in, out)", mistakes.reinterpreted),
        ("rows_swapped", "the rows of two tensor-parallel ranks exchanged", lambda w: w.roll(len(w) // 2, 0)),
        ("columns_swapped", "the columns of two tensor-parallel ranks exchanged", _swap_columns),
        ("columns_missing", "the second rank's part of a sum missing", _first_columns),
        ("pairs_swapped", "neighbouring columns exchanged", mistakes.swap_nibbles),
        ("zero", "never loaded, all zeros", torch.zeros_like),
        ("bf16", "rounded to bf16", mistakes.as_bf16),
        ("fp8_scale_missing", "fp8 codes without the scale of their row", partial(mistakes.without_row_scale, 448.0)),
        ("int8_scale_missing", "int8 codes without the scale of their row", partial(mistakes.without_row_scale, 127.0)),
    ):
        yield Suspect(
            name=f"{mistake}.{module}",
            text=f"{module}: {text}",
            shows_in=shows_in,
            change=put("weight", name, change),
        )


def _swap_columns(w: Tensor) -> Tensor:
    return w.roll(w.shape[-1] // 2, -1)


def _first_columns(w: Tensor) -> Tensor:
    return torch.cat((w[..., : w.shape[-1] // 2], torch.zeros_like(w[..., w.shape[-1] // 2 :])), -1)


def next_row(w: Tensor) -> Tensor:
    return w.roll(-1, 0)
