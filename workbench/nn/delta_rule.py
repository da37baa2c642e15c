"""The gated delta rule of KDA, three ways: one token, token by token, and in chunks.

T tokens, S sequences, H heads, Dk key and Dv value channels. State (Dv, Dk): what to answer (value) to which key.

    S <- S diag(exp g)                   forget, per key channel; g is the log decay, at most 0
    S <- S + beta (v - S k) k^T          move the answer to k towards v
    o  = S q                             read after the write

Source: Kimi Linear, arXiv 2510.26692; the chunked form follows its section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.nn.batch import Segments

__all__ = ["chunked", "delta_rule", "recurrent", "step"]

MAX_CHUNK = 32
# Rows that share one reference decay: exponents stay within 8 * 5 = 40 for decays down to e^-5 per token, far from the
# 88 at which float32 overflows.
BLOCK = 16


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: (..., H, D) each, beta (..., H), state (..., H, Dv, Dk) -> output (..., H, Dv), next state."""
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
    size = min(MAX_CHUNK, -(-segments.longest // BLOCK) * BLOCK)
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
    """The same for sequences of two or more tokens, `size` (a multiple of 16) tokens at a time; others are left at 0.

    Inside a chunk, with G the sum of log decays up to and including a token, and S_0 the state before the chunk, the
    corrections u_t = beta_t (v_t - S k_t) satisfy

        u_t = beta_t (v_t - S_0 (e^G_t k_t)) - beta_t sum_{j<t} (sum_d k_t k_j e^(G_t - G_j)) u_j

    a triangular system, solved once for all chunks with S_0 left open: u = U - W S_0^T. Only the part with S_0 is
    sequential. Forward substitution, not powers of the matrix: with keys alike those cancel catastrophically.
    """
    table = segments.chunks(size)
    q, k, v, g = (_to_chunks(x, table.rows).transpose(1, 2) for x in (q, k, v, g))  # (N, H, C, D)
    beta = _to_chunks(beta, table.rows).transpose(1, 2)[..., None]  # (N, H, C, 1)
    total = g.cumsum(-2)
    from_start, to_end = total.exp(), (total[..., -1:, :] - total).exp()

    # unitriangular: the diagonal counts as 1, and what stands there or above is not read
    system = beta * decayed_products(k, k, total)
    right = beta * torch.cat([v, from_start * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    open_u, open_w = solved.split([v.shape[-1], k.shape[-1]], -1)
    inner = decayed_products(q, k, total).tril()
    q, k, decay = from_start * q, to_end * k, from_start[..., -1:, :]

    outputs, finished, first = [], [], 0
    running = state[table.sequences]
    for num_active in table.active:
        finished.append(running[num_active:])
        running = running[:num_active]
        wave = slice(first, first + num_active)
        u = open_u[wave] - open_w[wave] @ running.mT
        outputs.append(q[wave] @ running.mT + inner[wave] @ u)
        running = running * decay[wave] + u.mT @ k[wave]
        first += num_active
    finished.append(running)

    rows = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[table.places]
    output = rows.new_zeros((segments.num_tokens, *rows.shape[1:])).index_copy(0, table.packed_rows, rows)
    return output, state.index_copy(0, table.sequences, torch.cat(finished[::-1]))


def decayed_products(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """sum_d left_i right_j e^(G_i - G_j) for j <= i: (..., C, D) each -> (..., C, C); the rest is not meaningful.

    e^G_i alone may underflow and e^-G_j overflow. So each block of rows measures decay from its own middle: the two
    factors are then at most e^(BLOCK / 2 * |g|) for later columns of the block, and below 1 for all earlier ones.
    """
    size = total.shape[-2]
    blocks = []
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        middle = total[..., (start + stop) // 2, :].unsqueeze(-2)
        rows = left[..., start:stop, :] * (total[..., start:stop, :] - middle).exp()
        columns = right[..., :stop, :] * (middle - total[..., :stop, :]).exp()
        blocks.append(F.pad(rows @ columns.mT, (0, size - stop)))
    return torch.cat(blocks, -2)


def _to_chunks(x: Tensor, rows: Tensor) -> Tensor:
    """(T, ...) -> (N, C, ...); row T of the table is zeros, under which the state neither decays nor changes."""
    return torch.cat([x, x.new_zeros((1, *x.shape[1:]))])[rows]
