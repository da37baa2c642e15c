"""Rotary position settings in one vocabulary, and the numbers that follow from them.

Two places scale differently under YaRN and are easy to merge into one: cos and sin are multiplied by
`cos_scale`, the softmax of latent attention by `softmax_scale`. Both are closed forms here, free of any tensor
library, so that a block can be held against them. A record is frozen: frequencies are computed from it on each call
and cannot outlive a change of settings.

Sources: arXiv 2309.00071 (YaRN), the modelling files of DeepSeek-V3 (the two mscales) and of Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LlamaScaling", "RopeSpec", "YarnSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnSpec:
    """YaRN: fast columns keep their frequency, slow ones are divided by `factor`, a ramp lies between.

    `mscale` and `mscale_all_dim` are the DeepSeek form; where both are None the paper's 0.1 ln(factor) + 1 holds for
    cos and sin. `attention_factor` overrides cos and sin outright.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True  # whole-number ends of the ramp

    @property
    def cos_scale(self) -> float:
        """Factor on cos and sin. One where the two mscales are equal: they cancel."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0 if self.mscale is None else self.mscale)

    @property
    def softmax_scale(self) -> float:
        """Factor on the softmax scale of latent attention; grouped-query attention has none."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaScaling:
    """Llama 3.1: wavelengths longer than the old context are divided by `factor`, short ones kept, smooth between."""

    factor: float
    original_context: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotation of the first (`GQASpec`) or of the extra (`MLASpec`) `dim` columns of each head.

    `is_interleaved`: neighbours (0, 1), (2, 3) form pairs; otherwise column i pairs with i + dim / 2.
    `sections`: multimodal rotary (M-RoPE): how many frequencies follow time, height and width;
    `has_interleaved_sections`: the three take turns rather than lie in blocks.
    """

    theta: float
    dim: int
    is_interleaved: bool = False
    yarn: YarnSpec | None = None
    llama: LlamaScaling | None = None
    sections: tuple[int, ...] = ()
    has_interleaved_sections: bool = False

    @property
    def cos_scale(self) -> float:
        return self.yarn.cos_scale if self.yarn is not None else 1.0

    @property
    def softmax_scale(self) -> float:
        return self.yarn.softmax_scale if self.yarn is not None else 1.0

    @property
    def axes(self) -> tuple[int, ...]:
        """Of each pair the axis of positions that it follows: 0 time, 1 height, 2 width; all 0 without sections."""
        if not self.sections:
            return (0,) * (self.dim // 2)
        if not self.has_interleaved_sections:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        # Time, height and width take turns until height or width has its share; time has all the rest.
        return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(self.dim // 2))

    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of each of the dim / 2 pairs, fastest first."""
        plain = [self.theta ** (-2 * i / self.dim) for i in range(self.dim // 2)]
        if self.yarn is not None:
            low, high = self._ramp(self.yarn)
            shares = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
            return tuple(f * (1 - share) + f / self.yarn.factor * share for f, share in zip(plain, shares, strict=True))
        if self.llama is not None:
            return tuple(_llama_frequency(f, self.llama) for f in plain)
        return tuple(plain)

    def _ramp(self, yarn: YarnSpec) -> tuple[float, float]:
        def pair_of(turns: float) -> float:
            """The pair that makes `turns` full turns over the old context."""
            return self.dim * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        return low, high if high != low else high + 0.001  # a ramp of no width would divide by zero


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama_frequency(frequency: float, scaling: LlamaScaling) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)  # over the old context
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - keep) * frequency / scaling.factor + keep * frequency
