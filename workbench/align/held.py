"""Weights as ranks hold them: what a storage precision makes of the published values.

A reference that reads these differs from a sound deployment by arithmetic alone, so that a precision which approximates
the weights can be judged by the same noise floor as one that does not. What the approximation itself costs is another
question, answered by comparing with the published weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.nn.linear import MatrixStore
from workbench.nn.model import Model
from workbench.nn.quant import Scheme
from workbench.placement import Layout, rule_for
from workbench.spec import ModelSpec, published_tensors

__all__ = ["WeightChange", "held_weights", "schemes_of"]

# (published name without "_packed", values) -> the values to compute with
WeightChange = Callable[[str, Tensor], Tensor]


def schemes_of(spec: ModelSpec, precision: str) -> dict[str, Scheme]:
    """Scheme by parameter ("layers.3.mixer.q_proj.weight"), for those that `precision` does not hold dense."""
    with torch.device("meta"):
        model = Model(spec, precision=precision)
    return {
        f"{prefix}.weight": module.scheme
        for prefix, module in model.named_modules()
        if isinstance(module, MatrixStore) and module.scheme is not None
    }


def held_weights(
    spec: ModelSpec, schemes: Mapping[str, Scheme], layout: Layout | None = None, dtype: torch.dtype = torch.bfloat16
) -> WeightChange | None:
    """Published values -> those that ranks of `layout` compute with; None where nothing is approximated.

    `dtype` is that of activations, in which a matrix is expanded when it is used. Each rank encodes the columns that it
    holds, so scales of a matrix that is split by columns are those of its pieces.
    """
    if not schemes:
        return None
    layout = layout or Layout()
    stored: dict[str, tuple[Scheme, int]] = {}
    for tensor in published_tensors(spec):
        scheme = schemes.get(tensor.param)
        if (
            scheme is None
            or tensor.part == "weight_scale"
            or (tensor.part == "weight_packed" and scheme.name == "mxfp4")
        ):
            continue  # what is stored in that scheme already is held as it is
        rule = rule_for(spec, layout, tensor.param)
        pieces = 1 if rule.dim != 1 else layout.expert_tp if rule.axis == "expert_tp" else layout.tp
        stored[tensor.name.removesuffix("_packed")] = scheme, pieces

    def change(name: str, values: Tensor) -> Tensor:
        if name not in stored:
            return values
        scheme, pieces = stored[name]
        held = [scheme.decode(scheme.encode(piece), dtype) for piece in values.float().chunk(pieces, -1)]
        return torch.cat(held, -1).to(values.dtype)

    return change
