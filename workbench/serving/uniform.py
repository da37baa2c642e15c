"""Random numbers of requests: functions of the seed and the place of a token alone, so nothing else can change them."""

from __future__ import annotations

import numpy as np

__all__ = ["ACCEPT", "CHOICE", "DRAFT", "uniform"]

CHOICE, ACCEPT, DRAFT = 0, 1, 2  # streams: the token itself, whether a guess is taken, the guess


def uniform(seed: int, step_idx: int, stream: int = CHOICE) -> float:
    """A number in [0, 1) that depends on its arguments alone. Philox-4x64, Salmon et al. 2011."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stream, step_idx])).random())
