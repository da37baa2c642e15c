"""From a model written for one device to one rank's part of it: build on meta, narrow, attach the collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from workbench.base import LayoutError
from workbench.nn.batch import TokenBatch
from workbench.nn.linear import MatrixStore
from workbench.nn.model import Model
from workbench.nn.moe import MoE
from workbench.parallel.experts import AllToAllDispatch, ReplicatedDispatch
from workbench.parallel.mesh import RankContext
from workbench.parallel.tensor_parallel import GroupTensorParallel
from workbench.placement import Layout, check_layout, local_shape, vision_is_sharded
from workbench.spec import MLASpec, ModelSpec, MoESpec

__all__ = ["allocate", "attach", "build_stage", "narrow"]


def build_stage(
    spec: ModelSpec, layout: Layout, rank: int, *, precision: str = "bf16", dtype: torch.dtype | None = None
) -> Model:
    """This rank's part of the model on the meta device: its stage's layers, every parameter in its local shape.

    Raises LayoutError where the layout does not fit the model, LoadError for an unknown precision.
    """
    check_layout(spec, layout)
    _check_indexers(spec, layout)
    pp = layout.coords(rank).pp
    with torch.device("meta"):
        model = Model(
            spec,
            layers=layout.stage_layers(spec.num_layers)[pp],
            has_embed=pp == 0,
            has_head=pp == layout.pp - 1,
            has_vision=pp == 0,
            precision=precision,
            dtype=dtype,
        )
    narrow(model, spec, layout)
    return model


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Memory on `device` for every tensor of a model on meta; what is in it is not defined.

    As `nn.Module.to_empty`, whose `empty_like` of a meta tensor imports sympy: 32 MiB and a second of every rank.
    """
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def _check_indexers(spec: ModelSpec, layout: Layout) -> None:
    """A choice of tokens does not travel between stages."""
    for stage in layout.stage_layers(spec.num_layers)[1:]:
        mixer = spec.layers[stage.start].mixer
        if isinstance(mixer, MLASpec) and mixer.indexer is not None and not mixer.indexer.owns_choice:
            raise LayoutError(
                f"pp={layout.pp}: layer {stage.start} begins a stage and follows the choice of an indexer before it",
                next_step="Cut stages before layers with an indexer of their own",
            )


def narrow(model: nn.Module, spec: ModelSpec, layout: Layout) -> None:
    """Give every parameter its local shape; for use on meta, before anything is written.

    Raises LayoutError for a parameter that the placement table does not know, and where a quantised matrix would be cut
    inside a group of columns.
    """
    for prefix, module in list(model.named_modules()):
        if isinstance(module, MatrixStore):
            name = f"{prefix}.weight"
            shape = _local(spec, layout, name, module.logical_shape)
            unit = module.scheme.column_unit if module.scheme is not None else 1
            if shape[-1] % unit:
                raise LayoutError(
                    f"{name}: {shape[-1]} columns on one rank are not a multiple of {unit}, as "
                    f"{module.scheme.name if module.scheme else 'dense'} storage needs",
                    next_step="Use a smaller tp, a larger ep, or another precision",
                )
            if shape != module.logical_shape:
                module.narrow_(shape)
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if leaf == "weight" and isinstance(module, MatrixStore):
                continue
            shape = _local(spec, layout, f"{prefix}.{leaf}" if prefix else leaf, tuple(parameter.shape))
            if shape != tuple(parameter.shape):
                empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                setattr(module, leaf, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def attach(model: Model, ctx: RankContext) -> None:
    """Connect the hook points of a narrowed model to the groups of `ctx`."""
    tensor_parallel = GroupTensorParallel(ctx.tp)
    is_vision_split = vision_is_sharded(model.spec, ctx.layout)
    dispatch_type = AllToAllDispatch if ctx.layout.dispatch == "all_to_all" else ReplicatedDispatch
    for name, module in model.named_modules():
        is_vision = name.startswith(("vision", "projector"))
        if hasattr(module, "tp") and (is_vision_split or not is_vision):
            module.tp = tensor_parallel
        if isinstance(module, MoE):
            module.dispatch = dispatch_type(ctx, module.experts.num_local)
            module.experts.adds_down_bias = ctx.coords.expert_tp == 0
    if ctx.expert_gather.size > 1 and ctx.layout.dispatch == "replicated":
        _share_token_counts(model, ctx)


def _share_token_counts(model: Model, ctx: RankContext) -> None:
    """Exchange the replicas' token counts once per forward pass."""
    blocks: list[AbstractContextManager[None]] = []

    def before(_model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        batch = args[0] if args else kwargs["batch"]
        assert isinstance(batch, TokenBatch)
        block = ctx.tokens(batch.num_tokens)
        block.__enter__()
        blocks.append(block)

    def after(_model: nn.Module, _args: object, _output: object) -> None:
        blocks.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)


def _local(spec: ModelSpec, layout: Layout, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    is_expert = ".experts." in name
    if is_expert:
        layer = spec.layers[int(name.split(".")[1])]
        assert isinstance(layer.ffn, MoESpec)
        assert shape[0] == layer.ffn.num_experts, (name, shape)
    return local_shape(spec, layout, name, shape, is_expert=is_expert)
