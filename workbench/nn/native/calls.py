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

import torch
from torch import Tensor

from workbench.nn.native.build import BuildError, load_library
from workbench.spec import Activation

__all__ = ["KINDS", "SWITCH", "Kernels", "kernels"]

LOG = logging.getLogger("workbench.native")
SWITCH = "WORKBENCH_NATIVE"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"situ": 0, "silu": 1, "swiglu_oai": 2}

Held = tuple[Tensor, Tensor | None]  # a dense matrix or stack, or MXFP4 codes and their scales


class Kernels:
    """Calls of one library. Tensors are contiguous, on the host and of kinds that fit: nothing is checked here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        flag = ctypes.c_int
        self._linear = library.workbench_linear
        self._linear.argtypes = [flag, flag, pointer, pointer, pointer, pointer, number, number, number, flag]
        self._experts = library.workbench_experts
        self._experts.argtypes = [flag, flag, pointer, number, number, flag, pointer, pointer, pointer, pointer]
        self._experts.argtypes += [number, number, number, flag, pointer, pointer, flag]
        self._attend = library.workbench_attend
        self._attend.argtypes = [flag, pointer, pointer, pointer, pointer, pointer, number, number, number, number]
        self._attend.argtypes += [number, real, pointer, pointer, flag]

    def linear(self, x: Tensor, held: Held) -> Tensor:
        """(T, in), held (out, in) -> (T, out)."""
        codes, scales = held
        num, columns, rows = x.shape[0], x.shape[1], codes.shape[0]
        y = x.new_empty(num, rows)
        _check(
            self._linear(
                KINDS[x.dtype],
                scales is not None,
                x.data_ptr(),
                codes.data_ptr(),
                None if scales is None else scales.data_ptr(),
                y.data_ptr(),
                num,
                rows,
                columns,
                torch.get_num_threads(),
            )
        )
        return y

    def experts(
        self,
        x: Tensor,
        slots: Tensor,
        matrices: tuple[Held, Held, Held],
        biases: Sequence[Tensor | None],
        activation: Activation,
    ) -> Tensor:
        """(T, L) or (T * K, L), (T, K) int64 or -1, w1 (E, F, L), w2 (E, L, F), w3 -> (T, K, L), zeros at -1."""
        (num, top_k), latent = slots.shape, x.shape[-1]
        num_experts, width = matrices[0][0].shape[:2]
        y = x.new_empty(num, top_k, latent)
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
                y.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return y

    def attend(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, sinks: Tensor | None
    ) -> Tensor:
        """(S, H, W) and of each sequence (L, G, W), (L, G, V) -> (S, H, V). `sinks` (H,) float32.

        All keys have the strides of the first, all values those of the first, and columns are neighbours.
        """
        num, num_heads, width = q.shape
        num_kv_heads, v_width = values[0].shape[1:]
        y = q.new_empty(num, num_heads, v_width)
        strides = (ctypes.c_long * 4)(*keys[0].stride()[:2], *values[0].stride()[:2])
        _check(
            self._attend(
                KINDS[q.dtype],
                q.data_ptr(),
                _pointers(keys),
                _pointers(values),
                (ctypes.c_int64 * num)(*[x.shape[0] for x in keys]),
                strides,
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
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


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
    except (BuildError, AttributeError) as error:
        LOG.warning("no native kernels, torch computes instead: %s", error)
        return None
    return found
