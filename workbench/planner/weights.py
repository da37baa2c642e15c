"""What every rank holds of the weights, to the byte, for any layout and precision, without building it.

The real model is built once on the meta device with one layer of each kind; that says which parameters there are, in
which dtype or quantised scheme they are stored. Their local shapes come from the placement table. So the figures cannot
drift from what the loader allocates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.base import LayoutError
from workbench.placement import Layout, local_shape
from workbench.planner.engines import WORKBENCH, Engine
from workbench.spec import LayerSpec, ModelSpec, published_tensors

if TYPE_CHECKING:
    from workbench.nn.quant import Scheme

__all__ = ["StoredParam", "WeightTable", "read_weight_table"]

EDGES = ("first", "last")  # parameters outside the layers: of the first stage, of the last one


@dataclass(frozen=True, slots=True)
class StoredParam:
    """One parameter of a layer kind or an edge. `shape` is the whole logical one; stacked experts are (E, out, in).

    `num_bytes(shape)` counts the stored form, scales included; `column_unit` columns may not be cut apart.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    is_expert: bool
    column_unit: int
    num_bytes: Callable[[tuple[int, ...]], int]


class WeightTable:
    """Bytes by role of each layer and each edge under a layout. Results are kept: asking twice costs nothing.

    Every rank of a stage holds equally many bytes, since each rule of the placement table cuts into equal pieces.
    """

    def __init__(
        self,
        spec: ModelSpec,
        precision: str,
        layers: dict[LayerSpec, tuple[StoredParam, ...]],
        edges: dict[str, tuple[StoredParam, ...]],
        engine: Engine = WORKBENCH,
    ) -> None:
        self.spec, self.precision, self.engine = spec, precision, engine
        self._kinds = [_kind(layer) for layer in spec.layers]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self._kinds))}
        self._kind_ids = [numbers[kind] for kind in self._kinds]  # hashing a kind takes far longer than a number
        self._params = layers
        self._layers = [layers[kind] for kind in numbers]
        self._edges = edges
        self._known: dict[tuple[object, int, int, int], Counter[str]] = {}
        self._stages: dict[tuple[object, ...], Counter[str]] = {}

    def layers(self, layout: Layout) -> list[int]:
        """Bytes of each layer on one rank. Raises LayoutError where a quantised matrix is cut inside a group."""
        sizes = [self._of(kind, layout).total() for kind in range(len(self._layers))]
        return [sizes[kind] for kind in self._kind_ids]

    def edge(self, which: str, layout: Layout) -> Counter[str]:
        """Bytes by role outside the layers: "first" (embedding, vision, projector) or "last" (head, final norms)."""
        return self._of(which, layout)

    def stage(self, layout: Layout, stage: int) -> Counter[str]:
        """Bytes by role that each rank of a stage holds."""
        layers = layout.stage_layers(self.spec.num_layers)[stage]
        dp = layout.dp if self.engine.slices_experts_over_dp else 0
        key = (layout.tp, layout.ep, dp, layers, stage == 0, stage == layout.pp - 1)
        if key not in self._stages:
            self._stages[key] = self._stage(layout, stage, layers)
        return self._stages[key]

    def _stage(self, layout: Layout, stage: int, layers: range) -> Counter[str]:
        total: Counter[str] = Counter()
        for kind, number in Counter(self._kind_ids[i] for i in layers).items():
            for role, size in self._of(kind, layout).items():
                total[role] += number * size
        if stage == 0:
            total.update(self.edge("first", layout))
        if stage == layout.pp - 1:
            total.update(self.edge("last", layout))
            if self.spec.is_tied and stage > 0:  # a copy of the embedding, as the head
                total["embedding"] += self.edge("first", layout)["embedding"]
        return total

    def total(self) -> int:
        """Bytes of the whole model on one rank."""
        return self.stage(Layout(), 0).total()

    def with_engine(self, engine: Engine) -> WeightTable:
        """The same model as another engine places it."""
        return WeightTable(self.spec, self.precision, self._params, self._edges, engine)

    def _of(self, kind: int | str, layout: Layout) -> Counter[str]:
        """Bytes by role of one layer of a kind, or of an edge."""
        key = (kind, layout.tp, layout.ep, layout.dp if self.engine.slices_experts_over_dp else 0)
        if key not in self._known:
            roles: Counter[str] = Counter()
            for param in self._edges[kind] if isinstance(kind, str) else self._layers[kind]:
                shape = self.engine.local_shape(param, self._local(param, layout), layout)
                if shape[-1] % param.column_unit:
                    raise LayoutError(
                        f"{param.name}: {shape[-1]} columns on one rank are not a multiple of {param.column_unit}, as "
                        f"{self.precision} storage needs"
                    )
                roles[param.role] += param.num_bytes(shape)
            self._known[key] = roles
        return self._known[key]

    def _local(self, param: StoredParam, layout: Layout) -> tuple[int, ...]:
        return local_shape(self.spec, layout, param.name, param.shape, is_expert=param.is_expert)


def read_weight_table(spec: ModelSpec, precision: str, *, engine: Engine = WORKBENCH) -> WeightTable:
    """The table of a model held in `precision`. Needs torch, no device and no weights; a fraction of a second.

    Raises LoadError for an unknown precision.
    """
    import torch

    from workbench.nn.linear import MatrixStore
    from workbench.nn.model import Model

    kinds = list(dict.fromkeys(_kind(layer) for layer in spec.layers))
    sample = replace(spec, layers=tuple(replace(kind, layer_idx=i) for i, kind in enumerate(kinds)))
    roles = {param: t.role for t in published_tensors(sample) for param in (t.param, *t.also_fills)}
    with torch.device("meta"):
        model = Model(sample, precision=precision)
    params: list[StoredParam] = []
    for prefix, module in model.named_modules():
        if isinstance(module, MatrixStore):
            name, scheme = f"{prefix}.weight", module.scheme
            if scheme is None:
                size = _plain(module.weight.dtype.itemsize)
            else:
                size = _coded(scheme)
            unit = scheme.column_unit if scheme is not None else 1
            is_expert = ".experts." in name
            params.append(StoredParam(name, tuple(module.logical_shape), roles[name], is_expert, unit, size))
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "weight" and isinstance(module, MatrixStore):
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            own, is_expert = tuple(parameter.shape), ".experts." in name
            params.append(StoredParam(name, own, roles[name], is_expert, 1, _plain(parameter.dtype.itemsize)))
    layers = {
        kind: tuple(param for param in params if param.name.startswith(f"layers.{i}.")) for i, kind in enumerate(kinds)
    }
    outside = [param for param in params if not param.name.startswith("layers.")]
    is_last = [param.name.startswith(("head.", "final_")) for param in outside]
    edges = {
        "first": tuple(param for param, last in zip(outside, is_last, strict=True) if not last),
        "last": tuple(param for param, last in zip(outside, is_last, strict=True) if last),
    }
    return WeightTable(spec, precision, layers, edges, engine)


def _kind(layer: LayerSpec) -> LayerSpec:
    """What layers of equal parameters have in common."""
    return replace(layer, layer_idx=0)


def _plain(itemsize: int) -> Callable[[tuple[int, ...]], int]:
    return lambda shape: math.prod(shape) * itemsize


def _coded(scheme: Scheme) -> Callable[[tuple[int, ...]], int]:
    return lambda shape: sum(math.prod(part) * dtype.itemsize for part, dtype in scheme.buffers(shape).values())
