"""Where training starts: every parameter drawn by name, so that any layout draws the same model.

matrices         normal, standard deviation fan_in^-1/2
those that write to the residual stream    smaller, so that a block's running sum starts near unit size
residual mixes   scores start at zero: every sublayer reads the plain mean of its sources
norms            one
decay of KDA     half-lives spread evenly (in the logarithm) from about a token to some hundred tokens
router bias      zero; the balance rule moves it
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from workbench.nn.model import Model
from workbench.placement import Layout
from workbench.spec import KDASpec, ModelSpec
from workbench.training.sharding import own_ranges, take, whole_shapes

__all__ = ["draw_parameter", "initialise"]

_WRITERS = ("o_proj", "down_proj", "latent_out", "wo", "fc1")  # what they give is added to a stream
SLOWEST, FASTEST = 0.003, 1.0  # log decay per token of the slowest and the fastest channel
EMBED_STD, HEAD_STD, ROUTER_STD = 0.5, 0.5, 0.5  # the last two times fan_in^-1/2
# Places must be told apart from the first step on: at 0.1 a small model took a third longer to use its pictures, and
# at 1 places drown what is in them.
POS_STD = 0.5


@torch.no_grad()
def initialise(model: Model, layout: Layout, rank: int, seed: int) -> None:
    """Fill this rank's part of the model, built for `layout` and materialised."""
    shapes, coords = whole_shapes(model.spec), layout.coords(rank)
    for name, parameter in model.named_parameters():
        whole = draw_parameter(model.spec, name, shapes[name], seed)
        parameter.copy_(take(whole, own_ranges(model.spec, layout, coords, name, shapes[name])))


def draw_parameter(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The whole parameter in float32, a function of its name and the seed alone."""
    # The generator reads 32 bits of its seed only: name and seed are mixed into those.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    module, _, leaf = name.rpartition(".")
    owner = module.rpartition(".")[2]
    if leaf == "bias" or (owner == "proj" and "_res." in name):
        return torch.zeros(shape)
    if leaf == "A_log":
        return torch.empty(shape).uniform_(0.0, 0.7, generator=generator)
    if leaf == "dt_bias":
        return _decay_offsets(spec, name, shape, generator)
    if "norm" in owner:
        return torch.ones(shape)
    values = torch.empty(shape).normal_(generator=generator)
    if name == "embed.weight":
        return values * EMBED_STD
    if name == "vision.pos_embed.weight":
        return values * POS_STD
    if owner.endswith("_conv"):
        return torch.empty(shape).uniform_(-0.5, 0.5, generator=generator)  # 1 / sqrt(taps), as torch draws a conv
    scale = _fan_in(name, shape) ** -0.5
    if name == "head.weight":
        scale *= HEAD_STD
    elif owner == "router":
        scale *= ROUTER_STD
    elif owner in _WRITERS and not name.startswith("projector"):
        scale *= _writer_scale(spec, name)
    return values * scale


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:]) if name == "vision.patch_embed.weight" else shape[-1]


def _writer_scale(spec: ModelSpec, name: str) -> float:
    """Sublayers that add to one running sum: two of each layer of a residual block, or of the whole tower."""
    if name.startswith("vision."):
        assert spec.vision is not None
        return (2 * spec.vision.num_layers) ** -0.5
    num_layers = min(spec.residual.block_size, spec.num_layers) if spec.residual else spec.num_layers
    return (2 * num_layers) ** -0.5


def _decay_offsets(spec: ModelSpec, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """dt_bias such that bound * sigmoid(dt_bias) is the wanted log decay."""
    mixer = spec.layers[int(name.split(".")[1])].mixer
    assert isinstance(mixer, KDASpec)
    spread = torch.empty(shape).uniform_(math.log(SLOWEST), math.log(FASTEST), generator=generator)
    share = spread.exp() / -mixer.decay_bound
    return torch.log(share / (1 - share))
