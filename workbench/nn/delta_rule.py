"""The gated delta rule of KDA and of delta nets, three ways: one token, token by token, and in chunks.

T tokens, S sequences, H heads, Dk key and Dv value channels. State (Dv, Dk): what to answer (value) to which key.

    S <- S diag(exp g)                   forget, per key channel, or (g of width 1) all of a head alike; g is the log
                                         decay, at most 0
    S <- S + beta (v - S k) k^T          move the answer to k towards v
    o  = S q                             read after the write

Sources: Kimi Linear, arXiv 2510.26692, whose section 3 the chunked form follows; Gated DeltaNet, arXiv 2412.06464.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.nn.batch import Segments

__all__ = [
    "ChunkDecay",
    "HeadDecay",
    "chunked",
    "decayed_products",
    "delta_rule",
    "recurrent",
    "step",
    "unit_lower_inverse",
]

# Rows that share one reference decay: exponents stay within 8 * 5 = 40 for decays down to e^-5 per token, far from the
# 88 at which float32 overflows.
BLOCK = 16
# Chunk sizes. Short chunks need less arithmetic; long ones fewer steps, which counts where few sequences share a step.
SHORT_CHUNK, LONG_CHUNK, MANY_SEQUENCES = 16, 32, 4


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: (..., H, D) each, g (..., H, Dk or 1), beta (..., H), state (..., H, Dv, Dk).

    -> output (..., H, Dv), next state.
    """
    state = state * g.exp()[..., None, :]
    error = v - (state @ k[..., None])[..., 0]
    state = torch.addcmul(state, (beta[..., None] * error)[..., None], k[..., None, :])
    return (state @ q[..., None])[..., 0], state


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence token by token, the reference: (T, H, D) each, beta (T, H), state (H, Dv, Dk)."""
    outputs = []
    for token in zip(q, k, v, g, beta, strict=True):
        output, state = step(*token, state)
        outputs.append(output)
    return torch.stack(outputs), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Packed sequences of any lengths: (T, H, D) each, beta (T, H), state (S, H, Dv, Dk) -> (T, H, Dv), next state.

    Sequences of one token take a step together; longer ones go in chunks.
    """
    if segments.longest <= 1:
        return step(q, k, v, g, beta, state)
    is_short = segments.longest <= SHORT_CHUNK or segments.num_sequences >= MANY_SEQUENCES
    size = SHORT_CHUNK if is_short else LONG_CHUNK
    output, next_state = chunked(q, k, v, g, beta, state, segments, size)
    sequences, rows = segments.singles, segments.single_rows
    if len(rows):
        singles, single_state = step(q[rows], k[rows], v[rows], g[rows], beta[rows], state[sequences])
        output = output.index_copy(0, rows, singles)
        next_state = next_state.index_copy(0, sequences, single_state)
    return output, next_state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, segments: Segments, size: int
) -> tuple[Tensor, Tensor]:
    """The same for sequences of two or more tokens, `size` (16, 32, 64, ...) tokens at a time; others are left at 0.

    Inside a chunk, with G the sum of log decays up to and including a token, and S_0 the state before the chunk, the
    corrections u_t = beta_t (v_t - S k_t) satisfy

        u_t = beta_t (v_t - S_0 (e^G_t k_t)) - beta_t sum_{j<t} (sum_d k_t k_j e^(G_t - G_j)) u_j

    a triangular system, inverted once for all chunks with S_0 left open: u = U - W S_0^T. Only the part with S_0 is
    sequential.
    """
    table = segments.chunks(size)
    num_heads, value_dim = v.shape[1:]
    to_chunks = table.by_head(num_heads)  # zeros fill up a short chunk: under them the state does not change
    q, k, v, g, beta = (
        to_chunks(x.flatten(0, 1)).view(-1, num_heads, size, x.shape[-1]) for x in (q, k, v, g, beta[..., None])
    )  # (N, H, C, D)
    decay = HeadDecay(g) if g.shape[-1] == 1 else ChunkDecay(g)
    keys_from_start, queries_from_start = decay.from_start * k, decay.from_start * q
    both = decay.products(torch.cat([q, k], -2), k)
    inner, system = both[..., :size, :].tril(), beta * both[..., size:, :]
    solved = unit_lower_inverse(system) @ (beta * torch.cat([v, keys_from_start], -1))
    open_u, open_w = solved.split([value_dim, k.shape[-1]], -1)
    reads = torch.cat([open_w, queries_from_start], -2)  # both are applied to the state before the chunk
    writes = decay.to_end * k

    outputs, finished = [], []
    running = state[table.sequences]
    # split, not slices: the backward of a slice fills a whole tensor with zeros around it
    waves = (x.split(table.active) for x in (reads, open_u, inner, writes, decay.whole))
    for num_active, read, u, products, write, forget in zip(table.active, *waves, strict=True):
        running, done = running.split([num_active, len(running) - num_active])
        finished.append(done)
        known, answer = (read @ running.mT).split([size, size], -2)
        u = u - known
        outputs.append(answer + products @ u)
        running = running * forget + u.mT @ write
    finished.append(running)

    output = to_chunks.back(torch.cat(outputs).flatten(0, 2)).view(-1, num_heads, value_dim)
    return output, state.index_copy(0, table.sequences, torch.cat(finished[::-1]))


class ChunkDecay:
    """Decays within chunks, from the log decays g (N, H, C, D) of their tokens.

    e^G alone may underflow and e^-G overflow. So each block of 16 rows measures decay from its own middle: no factor
    exceeds e^(8 * |g|), and what reaches back to an earlier block is below 1.
    """

    def __init__(self, g: Tensor):
        self.num_blocks = g.shape[-2] // BLOCK
        total = g.cumsum(-2)
        blocks = total.unflatten(-2, (self.num_blocks, BLOCK))  # (N, H, B, 16, D)
        self.middle = blocks[..., BLOCK // 2 - 1 : BLOCK // 2, :]
        self.rows = (blocks - self.middle).exp()
        self.columns = self.rows.reciprocal()
        last = total[..., -1:, :]
        self.whole = last.exp()  # (N, H, 1, D) over the whole chunk
        self.from_start = (self.rows * self.middle.exp()).flatten(-3, -2)  # (N, H, C, D) up to and with each token
        self.to_end = (self.columns * (last.unsqueeze(-3) - self.middle).exp()).flatten(-3, -2)  # after each token

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """sum_d left_i right_j e^(G_i - G_j) for j <= i; the rest is not meaningful.

        `left` may hold several tables of C rows one behind another: (N, H, k * C, D), (N, H, C, D) -> (N, H, k * C, C).
        """
        size = right.shape[-2]
        lefts = left.unflatten(-2, (-1, self.num_blocks, BLOCK)) * self.rows.unsqueeze(-4)  # (N, H, k, B, 16, D)
        columns = right.unflatten(-2, (self.num_blocks, BLOCK)) * self.columns
        if self.num_blocks == 1:
            return lefts.flatten(-4, -2) @ columns.flatten(-3, -2).mT
        blocks = []
        for b, (rows, own, middle) in enumerate(
            zip(lefts.unbind(-3), columns.unbind(-3), self.middle.unbind(-3), strict=True)
        ):
            reach = own
            if b:
                earlier = columns[..., :b, :, :] * (middle.unsqueeze(-3) - self.middle[..., :b, :, :]).exp()
                reach = torch.cat([earlier.flatten(-3, -2), own], -2)
            products = rows.flatten(-3, -2) @ reach.mT
            blocks.append(F.pad(products, (0, size - reach.shape[-2])).unflatten(-2, (-1, BLOCK)))
        return torch.stack(blocks, -3).flatten(-4, -2)


class HeadDecay:
    """The same where all channels of a head share one log decay, g (N, H, C, 1): no factor exceeds 1.

    The decay between two rows is the sum of what lies between them, added up by itself: a difference of two long sums
    would lose the digits that tell neighbours apart.
    """

    def __init__(self, g: Tensor):
        size = g.shape[-2]
        between = g.expand(*g.shape[:-1], size).tril(-1).cumsum(-2)  # [i, j]: g_(j+1) + ... + g_i
        self.pairs = between.exp().tril()  # (N, H, C, C)
        self.from_start = g.cumsum(-2).exp()  # (N, H, C, 1)
        self.to_end = self.pairs[..., -1:, :].mT
        self.whole = self.from_start[..., -1:, :]

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """As `ChunkDecay.products`, zero where that is not meaningful."""
        products = (left @ right.mT).unflatten(-2, (-1, right.shape[-2]))
        return (products * self.pairs.unsqueeze(-3)).flatten(-3, -2)


def decayed_products(left: Tensor, right: Tensor, g: Tensor) -> Tensor:
    """The products of `ChunkDecay` for themselves: (..., C, D) each, g the log decays -> (..., C, C)."""
    return ChunkDecay(g).products(left, right)


def unit_lower_inverse(matrix: Tensor) -> Tensor:
    """Inverse of lower triangular matrices (..., n, n) with ones on the diagonal, n a power of two.

    The diagonal and what stands above it is not read. Pairs of blocks are inverted by that of their halves, which is
    forward substitution in another order; powers of the matrix would cancel catastrophically where keys are alike.
    """
    return _UnitLowerInverse.apply(matrix)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        size, half = matrix.shape[-1], 1
        inverse = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix).contiguous()
        while half < size:
            blocks, given = _diagonal_blocks(inverse, 2 * half), _diagonal_blocks(matrix, 2 * half)
            lower = blocks[..., half:, half:] @ given[..., half:, :half] @ blocks[..., :half, :half]
            blocks[..., half:, :half] = -lower  # a view of `inverse`
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """(..., n, n) -> (..., n / size, size, size), a view."""
    blocks = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (..., n / size, size, n / size, size)
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)
