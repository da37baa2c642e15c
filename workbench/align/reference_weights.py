"""Published tensors by name, straight from the safetensors files, decoded to a wide float type.

Part of the second opinion (see `reference.py`): nothing here is shared with the reader, the loader or the quantisation
code of the rest of the package, so that a mistake there cannot repeat itself here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.base import CheckpointError

__all__ = ["PublishedWeights", "decode_mxfp4_plainly", "read_reference_config"]

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_GROUP = 32  # input columns that share one scale
E8M0_BIAS = 127


def read_reference_config(root: Path | str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(outer config, its `text_config`, its `vision_config`) of a checkpoint folder, as plain dictionaries."""
    path = Path(root) / "config.json"
    try:
        config = json.loads(path.read_text())
        return config, config["text_config"], config["vision_config"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"not a readable Kimi K3 config: {error}", where=path) from None


def decode_mxfp4_plainly(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, cols / 2) U8 and (rows, cols / 32) U8 -> (rows, cols).

    A byte holds two codes, the earlier column in the low nibble; a code is a sign bit (8) and an index into the
    magnitudes; a scale byte s stands for 2 ** (s - 127) over 32 columns.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    magnitude = torch.tensor(E2M1_MAGNITUDES, dtype=dtype)[codes & 7]
    sign = torch.where(codes >= 8, -1.0, 1.0).to(dtype)
    power = torch.exp2(scale.to(dtype) - E8M0_BIAS)
    return sign * magnitude * power.repeat_interleave(MXFP4_GROUP, dim=-1)[..., : codes.shape[-1]]


class PublishedWeights:
    """Tensors of a checkpoint folder by published name, one at a time; use as a context manager.

    Only the file read last stays open (memory mapped), so one tensor at a time is what this holds. Raises
    CheckpointError for a name that no file has.
    """

    def __init__(
        self,
        root: Path | str,
        dtype: torch.dtype = torch.float64,
        *,
        change: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """`change(name, values)` replaces what is read: weights held otherwise than they were published."""
        self.root = Path(root)
        self.dtype = dtype
        self._change = change
        self._open = ExitStack()
        self._path: Path | None = None
        self._handle: Any = None
        self._files: dict[str, Path] = {}
        for path in sorted(self.root.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as handle:
                    names = list(handle.keys())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"not readable as safetensors: {error}", where=path) from None
            if twice := sorted(self._files.keys() & names):
                raise CheckpointError(f"{twice[0]!r} also stands in {self._files[twice[0]].name}", where=path)
            self._files.update(dict.fromkeys(names, path))
        if not self._files:
            raise CheckpointError("no safetensors file with tensors in it", where=self.root)

    def __enter__(self) -> PublishedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._path = self._handle = None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def raw(self, name: str) -> Tensor:
        """The tensor as stored, in the dtype of the file."""
        try:
            path = self._files[name]
        except KeyError:
            raise CheckpointError(f"no tensor named {name!r} in any file", where=self.root) from None
        if path != self._path:
            self._open.close()
            self._handle = self._open.enter_context(safe_open(path, "pt"))
            self._path = path
        return self._handle.get_tensor(name)

    def __call__(self, name: str) -> Tensor:
        """The tensor in `dtype`; an MXFP4 pair `<name>_packed`, `<name>_scale` is decoded."""
        if name not in self._files and f"{name}_packed" in self._files:
            values = decode_mxfp4_plainly(self.raw(f"{name}_packed"), self.raw(f"{name}_scale"), self.dtype)
        else:
            values = self.raw(name).to(self.dtype)
        return values if self._change is None else self._change(name, values)
