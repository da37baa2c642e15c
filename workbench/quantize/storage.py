"""The pieces that stand for one matrix in the files, made from its values. Rows are independent of one another.

    scheme   stored as      pieces (compressed-tensors' names and types)
    mxfp4    mxfp4          weight_packed U8 (r, c/2), weight_scale U8 (r, c/32)
    fp8      fp8_channel    weight F8_E4M3 (r, c), weight_scale F32 (r, 1)
    int8     int8_channel   weight I8 (r, c), weight_scale BF16 (r, 1)
    int4     int4_packed    weight_packed I32 (r, c/8), weight_scale BF16 (r, c/32), weight_shape I32 (2,)

`stored_reference` says in float64 and one weight at a time what the bytes mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.nn.quant import SCHEMES
from workbench.spec.storage import SchemeName, pieces_of

__all__ = ["GROUP_SIZES", "STORED_AS", "column_unit", "decode_stored", "encode_stored", "stored_reference"]

STORED_AS: dict[str, SchemeName] = {
    "mxfp4": "mxfp4",
    "fp8": "fp8_channel",
    "int8": "int8_channel",
    "int4": "int4_packed",
}
GROUP_SIZES: dict[str, int] = {"mxfp4": 32, "fp8": 1, "int8": 1, "int4": 32}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def column_unit(scheme: str) -> int:
    """Columns of a matrix must be a multiple of this to be stored in `scheme`."""
    return {"mxfp4": 32, "int4": 32}.get(scheme, 1)


def encode_stored(scheme: str, values: Tensor) -> dict[str, Tensor]:
    """Rows of a matrix (n, in), any float dtype -> its pieces by part name, without `weight_shape`."""
    if scheme in ("fp8", "int8"):
        wide, largest = values.to(torch.float32), 127.0 if scheme == "int8" else 448.0
        # Rounded to bf16 before it divides: that is how int8 scales are stored, and readers that hold everything in
        # bf16 round the float32 scales of fp8 on the way in.
        scale = (wide.abs().amax(-1, keepdim=True) / largest).to(torch.bfloat16)
        scale = torch.where(scale > 0, scale, 1.0)
        scaled = (wide / scale.float()).clamp(-largest, largest)
        if scheme == "int8":
            return {"weight": scaled.round().to(torch.int8), "weight_scale": scale}
        return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale": scale.float()}
    parts = SCHEMES[scheme].encode(values)
    if scheme == "int4":
        return {**parts, "weight_packed": parts["weight_packed"].view(torch.int32)}  # lowest nibble first in both
    return parts


def decode_stored(scheme: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Pieces -> (n, in) float32."""
    if scheme in ("fp8", "int8"):
        return parts["weight"].to(torch.float32) * parts["weight_scale"].to(torch.float32)
    own = dict(parts)
    if scheme == "int4":
        own["weight_packed"] = own["weight_packed"].view(torch.uint8)
    return SCHEMES[scheme].decode(own, torch.float32)


def shape_piece(rows: int, columns: int) -> Tensor:
    return torch.tensor([rows, columns], dtype=torch.int32)


def piece_shapes(scheme: str, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Part name -> shape and dtype (safetensors name) of a whole matrix, in the order in which they are written."""
    pieces = pieces_of(STORED_AS[scheme], rows, columns, GROUP_SIZES[scheme])
    return {piece.suffix.lstrip("."): (piece.shape, piece.dtype) for piece in pieces}


def stored_reference(scheme: str, pieces: Mapping[str, Tensor]) -> Tensor:
    """(rows, in) float64 from the bytes of the pieces, one weight at a time."""

    def bytes_of(name: str, row: int) -> bytes:
        return bytes(pieces[name][row].contiguous().view(torch.uint8).flatten().tolist())

    def bf16(raw: bytes) -> float:
        (value,) = struct.unpack("<f", b"\0\0" + raw)
        return float(value)

    rows = []
    for row in range(len(pieces["weight_scale"])):
        scales, line = bytes_of("weight_scale", row), []
        if scheme == "fp8":
            (scale,) = struct.unpack("<f", scales)
            for byte in bytes_of("weight", row):
                exponent, mantissa = byte >> 3 & 15, byte & 7
                size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
                line.append((-size if byte >> 7 else size) * scale)
        elif scheme == "int8":
            line = [(byte - 256 if byte > 127 else byte) * bf16(scales) for byte in bytes_of("weight", row)]
        else:
            nibbles = [nibble for byte in bytes_of("weight_packed", row) for nibble in (byte & 15, byte >> 4)]
            for column, nibble in enumerate(nibbles):
                group = column // 32
                if scheme == "int4":
                    line.append((nibble - 8) * bf16(scales[2 * group : 2 * group + 2]))
                else:
                    line.append((-1.0 if nibble & 8 else 1.0) * E2M1[nibble & 7] * 2.0 ** (scales[group] - 127))
        rows.append(line)
    return torch.tensor(rows, dtype=torch.float64)
