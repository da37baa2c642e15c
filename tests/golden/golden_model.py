"""A model filled from a checkpoint folder on one rank, in the plainest way and without the loading room."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workbench.nn.linear import MatrixStore
from workbench.nn.model import Model
from workbench.nn.quant import SCHEMES
from workbench.spec import TensorSpec, published_tensors, read_spec


def load_golden_model(root: Path, precision: str = "fp32", dtype: torch.dtype | None = None) -> Model:
    """The whole model of a folder; every parameter is written exactly once."""
    spec = read_spec(root)
    model = Model(spec, precision=precision, dtype=dtype)
    published = {tensor.name: tensor for tensor in published_tensors(spec)}
    files = json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(files) == set(published), "index and spec name different tensors"

    written: dict[tuple[str, int | None], int] = {}
    packed: dict[tuple[str, int | None], dict[str, Tensor]] = {}
    for file_name in sorted(set(files.values())):
        with safe_open(root / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is not iterable)
                tensor, target = published[name], (published[name].param, published[name].expert)
                value = file.get_tensor(name)
                if tensor.part == "weight":
                    write(model, tensor, value)
                else:
                    pair = packed.setdefault(target, {})
                    pair[tensor.part] = value
                    if len(pair) < 2:
                        continue
                    write(model, tensor, packed.pop(target))
                written[target] = written.get(target, 0) + 1
    assert not packed, f"half-read pairs: {sorted(packed)[:3]}"
    assert set(written.values()) == {1}
    expected = {(tensor.param, tensor.expert) for tensor in published.values()}
    assert set(written) == expected
    return model.requires_grad_(False).eval()


@torch.no_grad()
def write(model: Model, tensor: TensorSpec, value: Tensor | dict[str, Tensor]) -> None:
    module = model.get_submodule(tensor.param.rpartition(".")[0])
    if isinstance(value, dict):
        assert isinstance(module, MatrixStore)
        if module.scheme is not None and module.scheme.name == "mxfp4":
            module.write_parts(value, index=tensor.expert)
        else:
            module.write(SCHEMES["mxfp4"].decode(value, torch.float32), index=tensor.expert)
        return
    if tensor.used_rows is not None:
        assert not value[tensor.used_rows :].any(), f"{tensor.name}: the tail is not padding"
        value = value[: tensor.used_rows]
    if isinstance(module, MatrixStore):
        module.write(value, index=tensor.expert)
    else:
        parameter = model.get_parameter(tensor.param)
        assert parameter.shape == value.shape, (tensor.name, parameter.shape, value.shape)
        parameter.copy_(value)
