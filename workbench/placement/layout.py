"""How one model copy is spread over ranks: degrees, rank coordinates, pipeline cuts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from workbench.base import LayoutError

__all__ = ["Dispatch", "Layout", "RankCoords"]

Dispatch = Literal["replicated", "all_to_all"]
MAX_RANKS = 1 << 16  # what lists ranks or divisors must end; no deployment comes near


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCoords:
    """Where one rank sits. `ep` counts the expert group, `expert_tp` the slice of an expert's width it holds."""

    rank: int
    pp: int
    dp: int
    tp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of pipeline, data, tensor and expert parallelism. Experts reuse the dp * tp ranks of a stage.

        rank = (pp * dp_size + dp) * tp_size + tp             tp is the fastest axis

    ep = 1:        every tp rank holds a slice of every expert
    1 < ep <= tp:  ep groups of whole experts inside a tp group, each expert sliced over tp / ep ranks
    ep > tp:       whole experts, spread over ep / tp neighbouring dp ranks
    `dispatch` says how tokens reach their experts: "replicated" (every rank sees all tokens of the ep group, computes
    its own experts, results are summed) or "all_to_all" (tokens travel to the experts and back; needs ep >= tp).
    `stages` gives the number of layers of each pipeline stage; None cuts evenly, the remainder going to the first ones.
    Raises LayoutError for degrees that do not fit one another.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    dispatch: Dispatch = "replicated"
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for axis, size in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp), ("ep", self.ep)):
            if size < 1:
                raise LayoutError(f"{axis}={size}: a parallel degree is at least 1")
        if self.world_size > MAX_RANKS:
            raise LayoutError("too many ranks", found=self.world_size, expected=f"at most {MAX_RANKS}")
        if (self.tp * self.dp) % self.ep:
            raise LayoutError(f"ep={self.ep} does not divide tp*dp={self.tp * self.dp}", expected=self._ep_choices())
        if self.tp % self.ep and self.ep % self.tp:
            raise LayoutError(
                f"ep={self.ep} and tp={self.tp}: one must divide the other, or an expert group would cut a tp group",
                expected=self._ep_choices(),
            )
        if self.dispatch not in ("replicated", "all_to_all"):
            raise LayoutError(f"dispatch={self.dispatch!r}", expected="'replicated' or 'all_to_all'")
        if self.dispatch == "all_to_all" and self.ep % self.tp:
            raise LayoutError(
                f"all-to-all dispatch needs whole experts on a rank: ep={self.ep} must be a multiple of tp={self.tp}",
                next_step="Use dispatch='replicated' or a larger ep",
            )
        if self.stages is not None and (len(self.stages) != self.pp or min(self.stages) < 1):
            raise LayoutError(f"stages={self.stages} must name at least one layer for each of pp={self.pp} stages")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's width."""
        return max(1, self.tp // self.ep)

    @property
    def expert_dp(self) -> int:
        """Neighbouring dp ranks that one expert group spans."""
        return max(1, self.ep // self.tp)

    def coords(self, rank: int) -> RankCoords:
        """Coordinates of a global rank. Raises LayoutError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside 0..{self.world_size - 1}")
        tp, rest = rank % self.tp, rank // self.tp
        dp, pp = rest % self.dp, rest // self.dp
        ep = (dp % self.expert_dp) * self.tp + tp if self.ep > self.tp else tp // self.expert_tp
        return RankCoords(rank=rank, pp=pp, dp=dp, tp=tp, ep=ep, expert_tp=tp % self.expert_tp)

    def rank_at(self, *, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Layer range of each stage: disjoint, complete, in order. Raises LayoutError if a stage would be empty."""
        return _stage_layers(self.pp, self.stages, num_layers)

    def __str__(self) -> str:
        """Text that `parse` reads back, except for hand-made stages: "tp2", "dp2xep2:all_to_all"."""
        degrees = [f"{axis}{size}" for axis in ("pp", "dp", "tp", "ep") if (size := getattr(self, axis)) > 1]
        return ("x".join(degrees) or "tp1") + (f":{self.dispatch}" if self.dispatch != "replicated" else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Layout from text such as "tp2", "pp2xtp4", "dp2xep2:all_to_all". Raises LayoutError for anything else."""
        degrees, _, dispatch = text.strip().partition(":")
        sizes: dict[str, int] = {}
        for piece in degrees.split("x"):
            match = re.fullmatch(r"(pp|dp|tp|ep)([0-9]{1,6})", piece)
            if match is None or match[1] in sizes:
                raise LayoutError(
                    f"layout {text!r} is not readable", expected="for example tp2, pp2xtp4, dp2xep2:all_to_all"
                )
            sizes[match[1]] = int(match[2])
        return cls(**sizes, dispatch=dispatch or "replicated")  # type: ignore[arg-type]  # checked on construction

    def _ep_choices(self) -> str:
        sizes = [n for n in range(1, self.tp * self.dp + 1) if not (self.tp * self.dp) % n]
        return f"ep one of {[n for n in sizes if not (self.tp % n and n % self.tp)]}"


@lru_cache(maxsize=4096)  # a search asks again and again
def _stage_layers(pp: int, stages: tuple[int, ...] | None, num_layers: int) -> tuple[range, ...]:
    if stages is not None:
        sizes = list(stages)
        if sum(sizes) != num_layers:
            raise LayoutError(f"stages={stages} hold {sum(sizes)} layers", expected=f"{num_layers}")
    else:
        if pp > num_layers:
            raise LayoutError(f"pp={pp} stages for {num_layers} layers leaves empty stages")
        base, extra = divmod(num_layers, pp)
        sizes = [base + (stage < extra) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
