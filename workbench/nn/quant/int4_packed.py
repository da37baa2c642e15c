"""INT4 codes packed eight to a 32-bit word, in the three orders that are published. Read only.

    compressed-tensors   (out, in / 8)    columns in plain order, code - 8 is the value
    AWQ                  (in, out / 8)    rows 0 2 4 6 1 3 5 7 of eight from the lowest nibble up, code - zero point
    GPTQ                 (in / 8, out)    columns in plain order, code - (zero point + 1)

Each order read as another gives weights of the right size and no sense, so the config names it and nothing is told from
shapes. Words arrive here with outputs first, as everything does in this package. Sources: compressed-tensors
"pack-quantized"; AutoAWQ "gemm"; AutoGPTQ checkpoint format "gptq".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.base import LoadError
from workbench.nn.quant.scheme import scale_groups

__all__ = ["AWQ", "AWQ_ORDER", "GPTQ", "PackedInt4"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # row of eight that the nibble at this place, from the lowest up, belongs to
_AWQ_PLACES = tuple(AWQ_ORDER.index(row) for row in range(8))


def unpack_words(words: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(..., n) int32 -> (..., 8 n) uint8 codes; `places`: nibbles of a word, lowest is 0, in the order wanted."""
    nibbles = [(words >> 4 * place & 15).to(torch.uint8) for place in places]
    return torch.stack(nibbles, -1).flatten(-2)


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """compressed-tensors: w[o, i] = (code[o, i] - 8) * scale[o, i // group_size]; the last group may be short."""

    group_size: int
    name: str = "int4_packed"

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        # The words come as bytes, which hold two codes each, the lower one first.
        packed = parts["weight_packed"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.float32) - 8
        return scale_groups(codes, parts["weight_scale"].float(), self.group_size).to(dtype)


@dataclass(frozen=True, slots=True)
class AWQ:
    """w[o, i] = (code[o, i] - zero[o, i // group_size]) * scale[o, i // group_size].

    Parts: qweight (out / 8, in), qzeros (out / 8, groups) int32 words of eight rows, scales (out, groups) float16.
    """

    group_size: int
    name: str = "int4_awq"

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, zeros = (unpack_words(parts[part].mT, _AWQ_PLACES).mT for part in ("qweight", "qzeros"))
        scale = parts["scales"].float()
        shifted = codes.float() - zeros.repeat_interleave(self.group_size, -1)[:, : codes.shape[-1]]
        return scale_groups(shifted, scale, self.group_size).to(dtype)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """w[o, i] = (code[o, i] - zero[o, g] - 1) * scale[o, g] where g is the group of column i as `g_idx` gives it.

    Parts: qweight (out, in / 8) int32 words of eight columns, qzeros (out / 8, groups) words of eight rows, scales
    (out, groups) float16, g_idx (in,) int32. Groups need not lie side by side.
    """

    group_size: int
    name: str = "int4_gptq"

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = unpack_words(parts["qweight"])
        zeros = unpack_words(parts["qzeros"].mT).mT
        group, num_groups = parts["g_idx"].long(), parts["scales"].shape[1]
        group = group - group.min()  # a slice of columns comes with its own groups alone
        if int(group.max()) >= num_groups:
            raise LoadError(
                "g_idx names groups that these columns have no scales for",
                found=f"groups {int(parts['g_idx'].min())} to {int(parts['g_idx'].max())}",
                expected=f"{num_groups} groups of {self.group_size} columns",
                next_step="Does quantization_config say desc_act as the files were made?",
            )
        # A zero point is stored less one, and 15 + 1 is meant as 16: the addition comes after the nibble is taken out.
        shifted = codes.float() - (zeros.float() + 1)[:, group]
        return (shifted * parts["scales"].float()[:, group]).to(dtype)
