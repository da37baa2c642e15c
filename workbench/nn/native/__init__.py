"""Kernels for a few tokens on a processor, built by the system's own compiler where there is one.

    linear(x, held)                             x W^T, or None where torch is to compute it
    experts(x, slots, w1, w2, w3, ...)          each token through the experts it visits, or None
    attend(q, keys, values, ...)                one new token of each sequence, or None

One or sixteen tokens read every weight they touch and do little with it; torch's products are made for many rows, and
some have no fast path at all for 16-bit weights on processors without such units. The kernels take part in inference
alone: where a gradient may be asked for, where operators are being recorded, or on any other device, they answer None.

The first use in a process builds the kernels or finds them in the user's cache folder, and tries them on small
numbers. Without a compiler, or where they are wrong, everything runs as it would without them, and the log says so
once. WORKBENCH_NATIVE=0 switches them off.
"""

from workbench.nn.native.calls import Kernels, kernels
from workbench.nn.native.dispatch import MAX_ROWS, Held, attend, experts, linear, serves

__all__ = ["MAX_ROWS", "Held", "Kernels", "attend", "experts", "kernels", "linear", "serves"]
