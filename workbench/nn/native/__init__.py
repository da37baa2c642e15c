"""Kernels for a few tokens on a processor, built by the system's own compiler where there is one.

    linear(x, held), linears(x, [held, ...])    x W^T, or None where torch is to compute it
    experts(x, slots, w1, w2, w3, ...)          each token through the experts it visits, or None
    attend(q, keys, values, ...)                one new token of each sequence, or None
    attend_in_pages(q, keys, values, ...)       the same, reading rows where they lie in a pool
    rms_norm, turn_heads, route                 what stands between those in a layer, or None

One or sixteen tokens read every weight they touch and do little with it; torch's products are made for many rows, and
some have no fast path at all for 16-bit weights on processors without such units. The kernels take part in inference
alone: where a gradient may be asked for, where operators are being recorded, or on any other device, they answer None.

The first use in a process builds the kernels or finds them in the user's cache folder, and tries them on small
numbers. Without a compiler, or where they are wrong, everything runs as it would without them, and the log says so
once. WORKBENCH_NATIVE=0 switches them off.
"""

from workbench.nn.native.calls import Kernels, kernels
from workbench.nn.native.dispatch import (
    MAX_ROWS,
    HeadNorm,
    Held,
    attend,
    attend_in_pages,
    end_team,
    experts,
    linear,
    linears,
    rms_norm,
    route,
    serves,
    turn_heads,
)

__all__ = [
    "MAX_ROWS",
    "HeadNorm",
    "Held",
    "Kernels",
    "attend",
    "attend_in_pages",
    "end_team",
    "experts",
    "kernels",
    "linear",
    "linears",
    "rms_norm",
    "route",
    "serves",
    "turn_heads",
]
