"""One image on its way through the vision tower, so many rows at a time, with pauses in between.

A large image takes as long as the text of many steps. Attention reads the keys and values of all patches, which are
made when a layer begins; the rest of a layer is work on one patch after another, and may be cut anywhere.

    rows of N patches      layer 0: 0 ... N - 1 | layer 1: N ... 2 N - 1 | ...
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.nn.vision import Grid, VisionBlock, VisionTower, check_grids, rotary_angles

__all__ = ["ImageRows"]


class ImageRows:
    """Patches (N, 3, p, p) of one image; `num_done` of `num_rows` rows of all layers are computed.

    Raises ImageError as the tower does.
    """

    def __init__(self, tower: VisionTower, patches: Tensor, grid: Grid) -> None:
        check_grids(tower.spec, [grid], num_patches=patches.shape[0])
        self.tower, self.grid = tower, grid
        self.num_done, self.num_rows = 0, len(tower.blocks) * math.prod(grid)
        self._x = tower.patch_embed(patches) + tower.pos_embed(grid)
        dtype = torch.promote_types(self._x.dtype, torch.float32)
        self._angles = rotary_angles(tower.spec, grid, device=self._x.device, dtype=dtype)
        self._packed: tuple[Tensor, Tensor] | None = None
        self._out: list[Tensor] = []
        self._states: list[Tensor] = []

    def advance(self, stop: int) -> None:
        """Up to row `stop`, or to the end."""
        num_patches = len(self._x)
        while self.num_done < min(stop, self.num_rows):
            layer_idx, first = divmod(self.num_done, num_patches)
            block = self.tower.blocks[layer_idx]
            assert isinstance(block, VisionBlock)
            if self._packed is None:
                self._packed = block.packed(self._x, self._angles)
            last = min(num_patches, first + stop - self.num_done)
            self._out.append(block.of_rows(self._x, *self._packed, slice(first, last)))
            self.num_done += last - first
            if last == num_patches:
                self._x, self._packed, self._out = torch.cat(self._out), None, []
                if layer_idx in self.tower.spec.deepstack:
                    self._states.append(self.tower.merged(self._x, [self.grid], [num_patches]))

    def merged(self) -> Tensor:
        """What the tower gives of the image: (tokens, groups * m * m, C). Only when all rows are done."""
        assert self.num_done == self.num_rows, f"{self.num_done} of {self.num_rows} rows"
        whole = self.tower.merged(self.tower.final_norm(self._x), [self.grid], [len(self._x)])
        return torch.cat([whole, *self._states], 1)
