"""Muon for many small matrices: matrices of one shape are stepped together, stacked experts among them.

The update is that of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`: Nesterov momentum, made (nearly)
orthogonal by five Newton-Schulz steps, scaled so that its root mean square is that of an AdamW update. torch's own
takes two-dimensional parameters one by one; hundreds of small experts would spend the time in calls.

Source: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is scalable
for LLM training", arXiv 2502.16982, for the scale.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parallel import Group, share_sizes

__all__ = ["Matrix", "Muon", "orthogonalise"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7
RMS = 0.2  # of an AdamW update


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A hidden matrix (rows, columns) or a stack of them, its gradient, and the ranks that step the very same one."""

    values: Tensor
    grad: Tensor
    replicas: Group


class Muon:
    """Steps `matrices` in place. Replicas share the work: each makes some of the updates, and all get all of them."""

    def __init__(self, matrices: Mapping[str, Matrix], *, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self.matrices, self.momentum, self.weight_decay = dict(matrices), momentum, weight_decay
        self.velocity = {name: torch.zeros_like(matrix.values) for name, matrix in self.matrices.items()}
        self._alike: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
        for name, matrix in self.matrices.items():
            rows, columns = matrix.values.shape[-2:]
            self._alike.setdefault((rows, columns, matrix.replicas.ranks), []).append(name)

    @torch.no_grad()
    def step(self, lr: float, *, still: Container[str] = ()) -> None:
        """One step of all matrices but those in `still`."""
        for (rows, columns, _), alike in self._alike.items():
            names = [name for name in alike if name not in still]
            if not names:
                continue
            scale = lr * RMS * max(rows, columns) ** 0.5
            wanted = []
            for name in names:
                grad, velocity = self.matrices[name].grad, self.velocity[name]
                velocity.lerp_(grad, 1 - self.momentum)
                wanted.append(grad.lerp(velocity, self.momentum).view(-1, rows, columns))
            updates = _share_out(torch.cat(wanted), self.matrices[names[0]].replicas)
            for name, update in zip(names, updates.split([len(x) for x in wanted]), strict=True):
                values = self.matrices[name].values
                values.mul_(1 - lr * self.weight_decay).add_(update.view(values.shape), alpha=-scale)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.velocity)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError unless names and shapes are those of this optimiser."""
        if {n: v.shape for n, v in state.items()} != {n: v.shape for n, v in self.velocity.items()}:
            raise ValueError("the state belongs to other matrices")
        for name, velocity in self.velocity.items():
            velocity.copy_(state[name])


def _share_out(matrices: Tensor, replicas: Group) -> Tensor:
    """`orthogonalise` of matrices that all replicas have, each doing a part; the same result on every one."""
    counts = share_sizes(len(matrices), replicas.size)
    own = orthogonalise(matrices.split(counts)[replicas.rank])
    return replicas.gather_rows(own, counts)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest orthogonal matrix, roughly (singular values near one): (N, rows, columns) -> the same in float32.

    Newton-Schulz iteration of a quintic polynomial. bfloat16 would do, but a processor without units for it multiplies
    matrices twenty times slower in it than in float32.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.float()
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
