"""Rows that tokens leave behind, in slots or pages (`pages.py`): as they are, or coded in one byte per value.

    auto   values in the activation dtype
    fp8    float8 e4m3 values, one scale per row, so that the largest of a row becomes 448
    int8   integers from -127 to 127, one scale per row

A row is the last dimension: the latent and shared key of a token, or one head's key. A scale is bf16 and rounded up,
so that no code passes its range: a row of W values takes W + 2 bytes where bf16 takes 2 W. Codes are decoded where rows
are read; products run in the activation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.nn.pages import SlotPages
from workbench.spec import check_kv_dtype

__all__ = ["RowFormat", "RowTable", "decode_rows_reference", "row_format"]

_ROUNDING = 1 + 2**-8  # of a bf16 number, twice over: the nearest of the product is not below the exact scale


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One-byte codes of `dtype`, the largest being `largest`."""

    name: str
    dtype: torch.dtype
    largest: float

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(..., W) -> codes (..., W) and scales (...) bf16. A row with NaN decodes to NaN throughout."""
        values = rows.to(torch.float32)
        scales = (values.abs().amax(-1) / self.largest * _ROUNDING).to(torch.bfloat16)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # a row of zeros
        codes = (values / scales[..., None].to(torch.float32)).clamp(-self.largest, self.largest)
        return (codes if self.dtype.is_floating_point else codes.round()).to(self.dtype), scales

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes.to(torch.float32) * scales[..., None].to(torch.float32)).to(dtype)


_FORMATS = {
    "fp8": RowFormat("fp8", torch.float8_e4m3fn, 448.0),
    "int8": RowFormat("int8", torch.int8, 127.0),
}


def row_format(kv_dtype: str) -> RowFormat | None:
    """None for "auto". Raises ConfigError for a name that is none of `spec.KV_DTYPES`."""
    check_kv_dtype(kv_dtype)
    return _FORMATS.get(kv_dtype)


class RowTable:
    """(slots, max_tokens, ..., W) rows of `dtype`, held in `form`. No gradients pass through.

    `pages` say where the rows of a slot are; without, each slot has its own side by side. A pool that slots share is
    (1, rows, ..., W). `parts` are what memory is taken for: the rows, or codes and scales, each of that shape.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        form: RowFormat | None = None,
        pages: SlotPages | None = None,
    ) -> None:
        self.dtype, self.form = dtype, form
        self.parts: tuple[Tensor, ...] = (torch.zeros(*shape, dtype=form.dtype if form else dtype, device=device),)
        if form is not None:
            self.parts += (torch.ones(shape[:-1], dtype=torch.bfloat16, device=device),)
        self.pages = pages or SlotPages(
            num_slots=shape[0], max_tokens=shape[1], num_rows=shape[0] * shape[1], device=device
        )
        self._flat = tuple(part.flatten(0, 1) for part in self.parts)  # (rows, ..., W), the same memory
        self._is_by_slot = tuple(shape[:2]) == (self.pages.num_slots, self.pages.max_tokens)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @torch.no_grad()
    def write(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Rows (T, ..., W) to (slot, position), both (T,)."""
        coded = (rows,) if self.form is None else self.form.encode(rows)
        places = self.pages.rows(slots, positions)
        for flat, values in zip(self._flat, coded, strict=True):
            flat[places] = values

    def first(self, slots: Tensor, num_tokens: int) -> Tensor:
        """The first rows of each slot, (S, num_tokens, ..., W)."""
        if self._has_slots:
            return self._decoded([part[slots, :num_tokens] for part in self.parts])
        if len(slots) == 1 and slots.device.type == "cpu":  # reading a number from a device would wait for it
            return self.of_slot(int(slots), num_tokens)[None]
        places = self.pages.first(slots, num_tokens)
        return self._decoded([flat[places] for flat in self._flat])

    def of_slot(self, slot: int, num_tokens: int) -> Tensor:
        """The first rows of one slot, (num_tokens, ..., W): no copy where they lie side by side as they are."""
        places = self.pages.span(slot, num_tokens)
        return self._decoded([flat[places] for flat in self._flat])

    @property
    def in_place(self) -> Tensor | None:
        """All rows of the pool as they lie, (rows, ..., W), the same memory; None where they are codes."""
        return self._flat[0] if self.form is None else None

    def dense(self) -> Tensor:
        """All rows as they lie, (slots, max_tokens, ..., W)."""
        return self._decoded(self.parts)

    def clear(self, rows: slice) -> None:
        """Zeros, and scales of 0, from one row of the pool to another."""
        for flat in self._flat:
            flat[rows].zero_()

    @property
    def _has_slots(self) -> bool:
        return self._is_by_slot and self.pages.is_plain

    def _decoded(self, parts: Sequence[Tensor]) -> Tensor:
        if self.form is None:
            return parts[0]
        codes, scales = parts
        return self.form.decode(codes, scales, self.dtype)


def decode_rows_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """(T, W) codes and (T,) scales -> (T, W) float64, from the bits of each code."""
    result = torch.empty(codes.shape, dtype=torch.float64)
    for row, line in enumerate(codes.view(torch.uint8).tolist()):
        for column, byte in enumerate(line):
            if codes.dtype == torch.int8:
                value = float(byte - 256 if byte > 127 else byte)
            else:
                exponent, mantissa = byte >> 3 & 15, byte & 7
                value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
                value = -value if byte >> 7 else value
            result[row, column] = value * float(scales[row])
    return result
