"""Storage schemes: which tensors stand for one matrix in the files, and what their bytes mean. Declared, never guessed.

A scheme is named by the config (see `quant_config`) and says which pieces a (rows, columns) matrix is stored in. Two
schemes can have equal shapes and other values (AWQ and GPTQ order of nibbles; NVFP4 and MXFP4 bytes), so nothing here
can be told from shapes, and nothing tries to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from workbench.base import Table

__all__ = ["SCHEMES", "UNREAD_PARTS", "Piece", "Scheme", "SchemeName", "pieces_of", "scheme_table"]

SchemeName = Literal[
    "mxfp4",
    "mxfp4_blocks",
    "mxfp4_bytes",
    "nvfp4",
    "nvfp4_packed",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "fp8_block_bytes",
    "int8_channel",
    "int4_packed",
    "int4_awq",
    "int4_gptq",
]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One stored tensor of a matrix. `suffix` is appended to the module name; `holds_weights` marks the values."""

    suffix: str
    dtype: str
    shape: Shape
    holds_weights: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """`block`: rows and columns that share a scale (0: all of them, None: the config's group size).

    `per_item`: rows and columns of the matrix that one stored number of its codes stands for. `is_transposed`: the
    pieces are stored (columns, rows).
    """

    name: SchemeName
    bits: int
    block: tuple[int | None, int | None]
    meaning: str
    pieces: Callable[[int, int, int], tuple[Piece, ...]]  # rows, columns, group size
    per_item: tuple[int, int] = (1, 1)
    is_transposed: bool = False

    def unit(self, dim: int, group_size: int) -> int:
        """Neighbouring rows (`dim` 0) or columns (1) that share a scale; 1 where a matrix may be cut anywhere."""
        block = self.block[dim]
        return (group_size if block is None else block) or 1


# What static quantisation of activations left behind. Weights alone are quantised here, so nothing reads them.
UNREAD_PARTS = frozenset({"input_scale", "input_global_scale"})


def _piece(suffix: str, dtype: str, *shape: int, values: bool = False) -> Piece:
    return Piece(suffix=suffix, dtype=dtype, shape=shape, holds_weights=values)


def _up(size: int, unit: int) -> int:
    return -(-size // unit)


_LIST = (
    Scheme(
        name="mxfp4",
        per_item=(1, 2),
        bits=4,
        block=(1, 32),
        meaning="E2M1 codes, low nibble first; scale 2**(byte - 127) per 32 columns",
        pieces=lambda r, c, g: (
            _piece(".weight_packed", "U8", r, c // 2, values=True),
            _piece(".weight_scale", "U8", r, _up(c, g)),
        ),
    ),
    Scheme(
        name="mxfp4_blocks",
        per_item=(1, 2),
        bits=4,
        block=(1, 32),
        meaning="as mxfp4, codes as blocks of 16 bytes; suffixes joined to the name without a dot",
        pieces=lambda r, c, g: (
            _piece("_blocks", "U8", r, c // 32, 16, values=True),
            _piece("_scales", "U8", r, c // 32),
        ),
    ),
    Scheme(
        name="mxfp4_bytes",
        per_item=(1, 2),
        bits=4,
        block=(1, 32),
        meaning="as mxfp4, codes typed I8 and scales typed F8_E8M0",
        pieces=lambda r, c, g: (
            _piece(".weight", "I8", r, c // 2, values=True),
            _piece(".scale", "F8_E8M0", r, c // 32),
        ),
    ),
    Scheme(
        name="nvfp4",
        per_item=(1, 2),
        bits=4,
        block=(1, 16),
        meaning="E2M1 codes, low nibble first; E4M3 scale per 16 columns times one fp32 scale (multiply by both)",
        pieces=lambda r, c, g: (
            _piece(".weight", "U8", r, c // 2, values=True),
            _piece(".weight_scale", "F8_E4M3", r, _up(c, g)),
            _piece(".weight_scale_2", "F32"),
            _piece(".input_scale", "F32"),
        ),
    ),
    Scheme(
        name="nvfp4_packed",
        per_item=(1, 2),
        bits=4,
        block=(1, 16),
        meaning="as nvfp4, but the fp32 scale is the inverse one: divide by it",
        pieces=lambda r, c, g: (
            _piece(".weight_packed", "U8", r, c // 2, values=True),
            _piece(".weight_scale", "F8_E4M3", r, _up(c, g)),
            _piece(".weight_global_scale", "F32", 1),
            _piece(".input_global_scale", "F32", 1),
        ),
    ),
    Scheme(
        name="fp8_tensor",
        bits=8,
        block=(0, 0),
        meaning="E4M3 times one scale",
        pieces=lambda r, c, g: (_piece(".weight", "F8_E4M3", r, c, values=True), _piece(".weight_scale", "F32")),
    ),
    Scheme(
        name="fp8_channel",
        bits=8,
        block=(1, 0),
        meaning="E4M3 times one scale per row",
        pieces=lambda r, c, g: (_piece(".weight", "F8_E4M3", r, c, values=True), _piece(".weight_scale", "F32", r, 1)),
    ),
    Scheme(
        name="fp8_block",
        bits=8,
        block=(None, None),
        meaning="E4M3 times a scale per tile; named inverse because it undoes the division, so multiply",
        pieces=lambda r, c, g: (
            _piece(".weight", "F8_E4M3", r, c, values=True),
            _piece(".weight_scale_inv", "F32", _up(r, g), _up(c, g)),
        ),
    ),
    Scheme(
        name="fp8_block_bytes",
        bits=8,
        block=(None, None),
        meaning="as fp8_block, scales typed F8_E8M0: 2**(byte - 127)",
        pieces=lambda r, c, g: (
            _piece(".weight", "F8_E4M3", r, c, values=True),
            _piece(".scale", "F8_E8M0", _up(r, g), _up(c, g)),
        ),
    ),
    Scheme(
        name="int8_channel",
        bits=8,
        block=(1, 0),
        meaning="signed bytes times one scale per row",
        pieces=lambda r, c, g: (_piece(".weight", "I8", r, c, values=True), _piece(".weight_scale", "BF16", r, 1)),
    ),
    Scheme(
        name="int4_packed",
        per_item=(1, 8),
        bits=4,
        block=(1, None),
        meaning="eight codes per I32 along columns, lowest nibble first, stored plus 8",
        pieces=lambda r, c, g: (
            _piece(".weight_packed", "I32", r, _up(c, 8), values=True),
            _piece(".weight_scale", "BF16", r, _up(c, g)),
            _piece(".weight_shape", "I32", 2),
        ),
    ),
    Scheme(
        name="int4_awq",
        per_item=(8, 1),
        is_transposed=True,
        bits=4,
        block=(1, None),
        meaning="(in, out); eight codes per I32 along out in the order 0 2 4 6 1 3 5 7, with zero points",
        pieces=lambda r, c, g: (
            _piece(".qweight", "I32", c, r // 8, values=True),
            _piece(".qzeros", "I32", _up(c, g), r // 8),
            _piece(".scales", "F16", _up(c, g), r),
        ),
    ),
    Scheme(
        name="int4_gptq",
        per_item=(1, 8),
        is_transposed=True,
        bits=4,
        block=(1, None),
        meaning="(in, out); eight codes per I32 along in, in plain order, with zero points less one and a column order",
        pieces=lambda r, c, g: (
            _piece(".qweight", "I32", c // 8, r, values=True),
            _piece(".qzeros", "I32", _up(c, g), r // 8),
            _piece(".scales", "F16", _up(c, g), r),
            _piece(".g_idx", "I32", c),
        ),
    ),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _LIST}
assert tuple(SCHEMES) == get_args(SchemeName)


def pieces_of(scheme: SchemeName, rows: int, columns: int, group_size: int) -> tuple[Piece, ...]:
    """The stored tensors of a (rows, columns) matrix, rows being outputs. Raises KeyError for an unknown scheme."""
    return SCHEMES[scheme].pieces(rows, columns, group_size)


def scheme_table(rows: int = 384, columns: int = 256, group_size: int = 128) -> Table:
    """Every scheme with its pieces, for a matrix of the given size."""
    lines = []
    for scheme in _LIST:
        group = 32 if scheme.block == (1, 32) else 16 if scheme.block == (1, 16) else group_size
        pieces = ", ".join(f"{p.suffix} {p.dtype} {list(p.shape)}" for p in scheme.pieces(rows, columns, group))
        lines.append((scheme.name, scheme.bits, pieces, scheme.meaning))
    columns_of_table = ("scheme", "bits", f"pieces of a ({rows}, {columns}) matrix", "meaning")
    return Table(title="Storage schemes", columns=columns_of_table, rows=tuple(lines))
