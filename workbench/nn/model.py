"""The whole network, or one pipeline stage of it: embedding, decoder layers, head, and the way images come in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.base import RequestError, UnsupportedModelError
from workbench.nn import native
from workbench.nn.batch import Segments, TokenBatch
from workbench.nn.cache import Cache
from workbench.nn.delta_net import DeltaNet
from workbench.nn.ffn import GatedFFN
from workbench.nn.gqa import GQA
from workbench.nn.kda import KDA
from workbench.nn.linear import Linear, MatrixStore
from workbench.nn.mla import MLA
from workbench.nn.moe import MoE
from workbench.nn.norm import RMSNorm
from workbench.nn.precision import Precision
from workbench.nn.precision_map import PrecisionMap
from workbench.nn.projector import Projector
from workbench.nn.residual import ResidualMix, ResidualStream
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.nn.vision import Grid, VisionTower
from workbench.nn.vision_rows import ImageRows
from workbench.spec import DenseFFNSpec, GatedDeltaSpec, GQASpec, KDASpec, MLASpec, ModelSpec, require_runnable

__all__ = ["DecoderLayer", "Embedding", "Head", "Model", "TiedHead"]


class Embedding(nn.Module):
    """Token embedding, its vocabulary split over tensor-parallel ranks: rank r holds the r-th equal run of rows."""

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        self.tp: TensorParallel = LOCAL

    def forward(self, token_ids: Tensor) -> Tensor:
        """(T,) -> (T, D); a token that another rank holds contributes zeros here."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        num_rows = self.weight.shape[0]
        local = token_ids - self.tp.rank * num_rows
        is_elsewhere = (local < 0) | (local >= num_rows)
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.reduce(rows.masked_fill(is_elsewhere[:, None], 0))


class Head(Linear):
    """Logits of the whole vocabulary from a vocabulary split over tensor-parallel ranks."""

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype):
        super().__init__(vocab_size, dim, dtype=dtype)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.gather(super().forward(self.tp.enter(x)), -1)


class TiedHead(nn.Module):
    """Logits from the embedding's own matrix, which stays a parameter of the embedding and has one name.

    For the stage that has both ends; a last stage without the embedding holds the matrix as an ordinary `Head`.
    """

    def __init__(self, embed: Embedding):
        super().__init__()
        self.tied = (embed,)  # in a tuple, so that the module is not registered twice
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.tp.enter(x), self.tied[0].weight
        y = native.linear(x, (weight, None))
        return self.tp.gather(F.linear(x, weight.to(x.dtype)) if y is None else y, -1)


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward block, each reading its own mix of the residual stream."""

    def __init__(self, spec: ModelSpec, layer_idx: int, precision: Precision):
        super().__init__()
        layer, dim, dtype, residual = spec.layers[layer_idx], spec.hidden_size, precision.dtype, spec.residual
        self.starts_block = residual is not None and layer_idx % residual.block_size == 0
        self.mixer_norm = RMSNorm(dim, spec.norm_eps, dtype, offset=spec.norm_offset)
        self.ffn_norm = RMSNorm(dim, spec.norm_eps, dtype, offset=spec.norm_offset)
        self.mixer_res = ResidualMix(dim, residual.norm_eps, dtype) if residual else None
        self.ffn_res = ResidualMix(dim, residual.norm_eps, dtype) if residual else None
        self.mixer: KDA | MLA | GQA | DeltaNet
        if isinstance(layer.mixer, KDASpec):
            self.mixer = KDA(layer.mixer, dim, layer_idx, precision)
        elif isinstance(layer.mixer, GQASpec):
            self.mixer = GQA(layer.mixer, dim, layer_idx, precision)
        elif isinstance(layer.mixer, GatedDeltaSpec):
            self.mixer = DeltaNet(layer.mixer, dim, layer_idx, precision)
        else:
            assert isinstance(layer.mixer, MLASpec)
            self.mixer = MLA(layer.mixer, dim, layer_idx, precision)
        self.ffn: GatedFFN | MoE
        if isinstance(layer.ffn, DenseFFNSpec):
            self.ffn = GatedFFN(dim, layer.ffn.width, layer.ffn.activation, precision)
        else:
            self.ffn = MoE(layer.ffn, dim, precision)

    def forward(self, stream: ResidualStream, segments: Segments, cache: Cache | None) -> ResidualStream:
        h = stream.mix(self.mixer_res)
        if self.starts_block:  # after the mix: what this layer reads does not yet count as saved
            stream = stream.save()
        stream = stream.add(self.mixer(self.mixer_norm(h), segments, cache))
        h = stream.mix(self.ffn_res)
        return stream.add(self.ffn(self.ffn_norm(h)))


class Model(nn.Module):
    """One pipeline stage; by default the whole model.

    A stage without the embedding reads the payload of the stage before; a stage without the head returns its own.
    Parameters are empty: build under `torch.device("meta")` and fill, or fill where they are. `dtype` is that of
    activations and plain weights; tensors published in float32 (convolutions, decays, router bias) keep it.
    Raises UnsupportedModelError for a model with blocks that are not computed here, and for an image request to a
    stage without the vision tower.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range | None = None,
        has_embed: bool = True,
        has_head: bool = True,
        has_vision: bool = True,
        precision: str = "bf16",
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        require_runnable(spec)
        self.spec = spec
        self.precision = Precision.parse(precision, dtype)
        self.dtype = self.precision.dtype
        self.layer_range = range(spec.num_layers) if layers is None else layers
        dim, residual = spec.hidden_size, spec.residual
        self.embed = Embedding(spec.vocab_size, dim, self.dtype) if has_embed else None
        # Keyed by the layer's number in the whole model, so that names are the same on every stage.
        self.layers = nn.ModuleDict({str(i): DecoderLayer(spec, i, self.precision) for i in self.layer_range})
        self.final_res = ResidualMix(dim, residual.norm_eps, self.dtype) if has_head and residual else None
        self.final_norm = RMSNorm(dim, spec.norm_eps, self.dtype, offset=spec.norm_offset) if has_head else None
        self.head: Head | TiedHead | None = None
        if has_head:
            is_tied_here = spec.is_tied and self.embed is not None
            self.head = TiedHead(self.embed) if is_tied_here else Head(spec.vocab_size, dim, self.dtype)  # type: ignore[arg-type]
        self.vision = VisionTower(spec.vision, self.dtype) if has_vision and spec.vision else None
        self.projector = Projector(spec.projector, self.dtype) if has_vision and spec.projector else None
        if self.precision.map is not None:
            self._hold_by(self.precision.map)

    def _hold_by(self, precision_map: PrecisionMap) -> None:
        for prefix, module in self.named_modules():
            if isinstance(module, MatrixStore) and (scheme := precision_map.scheme_of(f"{prefix}.weight")) is not None:
                module.hold_in(scheme)

    def forward(self, batch: TokenBatch, payload: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Logits (R, V) of the rows `batch.logit_rows` on the last stage; otherwise the payload (1 + saved, T, D).

        With a cache every sequence goes on from `batch.starts` and leaves its state behind. Without one the sequences
        are whole, nothing is written, and the pass is differentiable.
        """
        if cache is not None:
            cache.check(batch)
        elif any(batch.starts):
            raise RequestError(f"sequences that start at {batch.starts} need a cache")
        if batch.image_rows is not None and batch.rope_positions is None and self.spec.has_mrope:
            raise RequestError("a batch with images needs `rope_positions`: this model's positions have three axes")
        segments = Segments(batch)
        stream = self._enter(batch, payload)
        added = self._deepstack(batch)
        for name, layer in self.layers.items():
            stream = layer(stream, segments, cache)
            if int(name) < len(added):
                stream = stream.add(added[int(name)])
        if self.head is None or self.final_norm is None:
            return stream.payload()
        h = stream.rows(batch.logit_rows).mix(self.final_res)
        return self.head(self.final_norm(h))

    def encode_images(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(N, 3, p, p) float in [-1, 1] and one (frames, rows, columns) of patches per image -> (tokens, D).

        With n states of DeepStack (tokens, (1 + n) D): what is embedded, then what joins the first n layers' outputs.
        """
        if self.vision is None or self.projector is None:
            raise UnsupportedModelError("this stage or model has no vision tower")
        return self.projector(self.vision(patches, grids))

    def begin_image(self, patches: Tensor, grid: Grid) -> ImageRows:
        """One image of (N, 3, p, p) to be encoded with pauses; `finish_image` gives what `encode_images` would."""
        if self.vision is None:
            raise UnsupportedModelError("this stage or model has no vision tower")
        return ImageRows(self.vision, patches, grid)

    def finish_image(self, rows: ImageRows) -> Tensor:
        """(tokens, D) of an image all of whose rows are done."""
        assert self.projector is not None
        features: Tensor = self.projector(rows.merged())
        return features

    def _deepstack(self, batch: TokenBatch) -> list[Tensor]:
        """(T, D) to add to the output of each of the first layers, zeros where no image is; empty without images."""
        features, num = batch.image_features, len(self.spec.vision.deepstack) if self.spec.vision else 0
        if not num or features is None or batch.image_rows is None or self.layer_range.start >= num:
            return []
        rows = batch.image_rows
        states = features.to(self.dtype).split(self.spec.hidden_size, -1)[1:]
        return [x.new_zeros(batch.num_tokens, x.shape[-1]).index_copy(0, rows, x) for x in states]

    def _enter(self, batch: TokenBatch, payload: Tensor | None) -> ResidualStream:
        if self.embed is None:
            if payload is None:
                raise RequestError("this stage has no embedding and needs the payload of the stage before")
            return ResidualStream.from_payload(payload)
        x = self.embed(batch.token_ids)
        if batch.zero_rows is not None:
            x = x.index_fill(0, batch.zero_rows, 0)
        if batch.image_rows is not None and batch.image_features is not None:
            own = batch.image_features[:, : self.spec.hidden_size]
            x = x.index_copy(0, batch.image_rows, own.to(x.dtype))
        return ResidualStream((), x)
