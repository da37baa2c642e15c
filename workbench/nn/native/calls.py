"""The library as Python calls it, and the trial that it must pass before anything relies on it.

T tokens, K experts per token, L and F the experts' outer and inner width, S sequences, H query and G key-value heads,
W and V widths of keys and values.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from workbench.nn.native.build import BuildError, load_library
from workbench.nn.pages import PageTables
from workbench.spec import Activation, MoESpec

__all__ = ["KINDS", "SCORINGS", "SWITCH", "HeadNorm", "Held", "Kernels", "RotaryTable", "kernels"]

LOG = logging.getLogger("workbench.native")
SWITCH = "WORKBENCH_NATIVE"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"situ": 0, "silu": 1, "swiglu_oai": 2}
SCORINGS = {"sigmoid": 0, "softmax": 1, "softmax_topk": 2}

Held = tuple[Tensor, Tensor | None]  # a dense matrix or stack, or MXFP4 codes and their scales
HeadNorm = tuple[Tensor, float, float]  # the weight that all heads share, eps and what the weight is a difference from
RotaryTable = tuple[Tensor, Tensor]  # cos and sin of each token and pair of columns


class Kernels:
    """Calls of one library. Tensors are contiguous, on the host and of kinds that fit: nothing is checked here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        flag = ctypes.c_int
        self._linear = library.workbench_linear
        self._linear.argtypes = [flag, flag, *[pointer] * 5, number, number, number, flag]
        self._experts = library.workbench_experts
        self._experts.argtypes = [flag, flag, pointer, number, number, flag, pointer, pointer, pointer, pointer]
        self._experts.argtypes += [number, number, number, flag, pointer, flag, pointer, pointer, flag]
        self._attend = library.workbench_attend
        self._attend.argtypes = [flag, pointer, pointer, pointer, pointer, pointer, pointer, number, number]
        self._attend.argtypes += [number, number, number, number, number, real, pointer, pointer, flag]
        self._rms_norm = library.workbench_rms_norm
        self._rms_norm.argtypes = [flag, pointer, pointer, real, real, pointer, number, number, flag]
        self._turn_heads = library.workbench_turn_heads
        self._turn_heads.argtypes = [flag, *[pointer] * 5, number, number, number, pointer, pointer, number, flag, flag]
        self._route = library.workbench_route
        self._route.argtypes = [flag, *[pointer] * 4, flag, flag, real, pointer, pointer, *[number] * 4, flag]
        self._end_team = library.workbench_end_team

    def end_team(self) -> None:
        """Let go the threads that wait for parallel work of the thread that calls this."""
        self._end_team()  # a team that cannot end goes on waiting, which harms nothing

    def linear(self, x: Tensor, held: Held) -> Tensor:
        """(T, in), held (out, in) -> (T, out)."""
        return self.linears(x, (held,))[0]

    def linears(self, x: Tensor, matrices: Sequence[Held]) -> list[Tensor]:
        """(T, in), each (out, in), all dense or all in MXFP4 -> (T, out) each."""
        num, columns = x.shape
        rows = [codes.shape[0] for codes, _ in matrices]
        ys = [x.new_empty(num, each) for each in rows]
        _check(
            self._linear(
                KINDS[x.dtype],
                matrices[0][1] is not None,
                x.data_ptr(),
                _pointers([codes for codes, _ in matrices]),
                _pointers([scales for _, scales in matrices]),
                _pointers(ys),
                _longs(rows),
                len(rows),
                num,
                columns,
                torch.get_num_threads(),
            )
        )
        return ys

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """(..., D), (D,) of the same kind -> (..., D)."""
        y, columns = torch.empty_like(x), x.shape[-1]
        num, threads = x.numel() // columns, torch.get_num_threads()
        _check(
            self._rms_norm(
                KINDS[x.dtype], x.data_ptr(), weight.data_ptr(), eps, offset, y.data_ptr(), num, columns, threads
            )
        )
        return y

    def turn_heads(
        self, xs: Sequence[Tensor], norms: Sequence[HeadNorm | None], table: RotaryTable, *, is_interleaved: bool
    ) -> list[Tensor]:
        """(T, heads, W) each, columns neighbours, and cos and sin (T, P / 2) float32 -> the same, side by side."""
        num, _, width = xs[0].shape
        ys = [x.new_empty(x.shape) for x in xs]
        weights = [None if norm is None else norm[0] for norm in norms]
        settings = [setting for norm in norms for setting in ((1.0, 0.0) if norm is None else norm[1:])]
        cos, sin = table
        _check(
            self._turn_heads(
                KINDS[xs[0].dtype],
                _pointers(xs),
                _pointers(ys),
                _pointers(weights),
                _longs([size for x in xs for size in (x.shape[1], *x.stride()[:2])]),
                (ctypes.c_float * len(settings))(*settings),
                len(xs),
                num,
                width,
                cos.data_ptr(),
                sin.data_ptr(),
                cos.shape[1],
                is_interleaved,
                torch.get_num_threads(),
            )
        )
        return ys

    def route(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, correction: Tensor | None, spec: MoESpec
    ) -> tuple[Tensor, Tensor]:
        """(T, D), (E, D), (E,), (E,) float32 -> expert ids (T, K) int64 ascending, and weights (T, K) float32."""
        (num, columns), num_experts = x.shape, matrix.shape[0]
        ids = x.new_empty((num, spec.top_k), dtype=torch.int64)
        weights = x.new_empty((num, spec.top_k), dtype=torch.float32)
        _check(
            self._route(
                KINDS[x.dtype],
                x.data_ptr(),
                matrix.data_ptr(),
                None if bias is None else bias.data_ptr(),
                None if correction is None else correction.data_ptr(),
                SCORINGS[spec.scoring],
                spec.renormalize,
                spec.routed_scale,
                ids.data_ptr(),
                weights.data_ptr(),
                num,
                num_experts,
                columns,
                spec.top_k,
                torch.get_num_threads(),
            )
        )
        return ids, weights

    def experts(
        self,
        x: Tensor,
        slots: Tensor,
        matrices: tuple[Held, Held, Held],
        biases: Sequence[Tensor | None],
        activation: Activation,
        *,
        weights: Tensor | None = None,
        is_summed: bool = False,
    ) -> Tensor:
        """(T, L) or (T * K, L), (T, K) int64 or -1, w1 (E, F, L), w2 (E, L, F), w3 -> (T, K, L), zeros at -1.

        With `is_summed` -> (T, L) float32, the sum over K of the results, taken by `weights` (T, K) float32 if given.
        """
        (num, top_k), latent = slots.shape, x.shape[-1]
        num_experts, width = matrices[0][0].shape[:2]
        y = x.new_empty((num, latent), dtype=torch.float32) if is_summed else x.new_empty(num, top_k, latent)
        limit = float("inf") if activation.limit is None else activation.limit
        settings = (ctypes.c_float * 4)(activation.beta, activation.linear_beta, activation.alpha, limit)
        _check(
            self._experts(
                KINDS[x.dtype],
                matrices[0][1] is not None,
                x.data_ptr(),
                num,
                top_k,
                x.shape[0] != num,
                slots.data_ptr(),
                _pointers([codes for codes, _ in matrices]),
                _pointers([scales for _, scales in matrices]),
                _pointers(biases),
                num_experts,
                width,
                latent,
                ACTIVATIONS[activation.kind],
                settings,
                is_summed,
                None if weights is None else weights.data_ptr(),
                y.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return y

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        scale: float,
        sinks: Tensor | None,
        tables: PageTables | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """(S, H, W) and of each sequence (L, G, W), (L, G, V) -> (S, H, V). `sinks` (H,) float32.

        With `tables` keys and values are one pool, (rows, G, W) and (rows, G, V), of which sequence s sees the rows of
        tokens [first, stop) of a slot, where `seen` (S, 3) int64 has (slot, first, stop): at least one, all of them in
        the slot's table. All keys have the strides of the first, all values those of the first, and columns are
        neighbours.
        """
        num, num_heads, width = q.shape
        num_kv_heads, v_width = values[0].shape[1:]
        y = q.new_empty(num, num_heads, v_width)
        strides = (ctypes.c_long * 4)(*keys[0].stride()[:2], *values[0].stride()[:2])
        if seen is None:
            seen = torch.tensor([(0, 0, x.shape[0]) for x in keys])
        _check(
            self._attend(
                KINDS[q.dtype],
                q.data_ptr(),
                _pointers(keys),
                _pointers(values),
                strides,
                seen.data_ptr(),
                None if tables is None else tables.pages.data_ptr(),
                0 if tables is None else tables.pages.shape[1],
                0 if tables is None else tables.tokens,
                num,
                num_heads,
                num_kv_heads,
                width,
                v_width,
                scale,
                None if sinks is None else sinks.data_ptr(),
                y.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return y


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return _pointer_array(len(tensors))(*[None if x is None else x.data_ptr() for x in tensors])


@cache
def _pointer_array(length: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * length


def _longs(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(numbers))(*numbers)


def _check(status: int) -> None:
    if status:
        raise ValueError("this library was built without that kind of numbers")


_lock = threading.Lock()
_found: list[Kernels | None] = []  # empty until somebody has looked


def kernels() -> Kernels | None:
    """The kernels of this process, built on first use; None where they are switched off, missing or wrong."""
    if _found:
        return _found[0]
    with _lock:
        if not _found:
            _found.append(_load())
    return _found[0]


def _load() -> Kernels | None:
    if os.environ.get(SWITCH, "1") == "0":
        return None
    from workbench.nn.native.trial import faults

    try:
        found = Kernels(load_library())
        if wrong := faults(found):
            raise BuildError(f"wrong results: {', '.join(wrong)}")
    except (BuildError, AttributeError, ValueError) as error:
        LOG.warning("no native kernels, torch computes instead: %s", error)
        return None
    return found
