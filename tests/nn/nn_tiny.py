"""A tiny model description with no two widths alike, and a model of it filled with fixed random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.linear import MatrixStore
from workbench.nn.model import Model
from workbench.spec import (
    Activation,
    AttentionResidualSpec,
    DenseFFNSpec,
    KDASpec,
    LayerSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    SpecialTokens,
)

ACTIVATION = Activation(kind="situ", beta=3.0, linear_beta=20.0)
KDA = KDASpec(num_heads=6, head_dim=8, conv_size=4, decay_bound=-5.0, decay_rank=9, norm_eps=1e-5)
MLA = MLASpec(
    num_heads=4,
    q_rank=28,
    kv_rank=22,
    nope_dim=14,
    rope_dim=6,
    v_dim=10,
    has_rotary=False,
    has_output_gate=True,
    latent_norm_eps=1e-6,
)
MOE = MoESpec(
    num_experts=10,
    top_k=3,
    width=64,
    latent_dim=32,
    has_latent_norm=True,
    num_shared=2,
    shared_width=72,
    renormalize=True,
    routed_scale=1.25,
    norm_eps=1e-5,
    activation=ACTIVATION,
)
DENSE = DenseFFNSpec(width=104, activation=ACTIVATION)
LAYERS = ((KDA, DENSE), (KDA, MOE), (MLA, MOE), (KDA, MOE), (MLA, MOE))


def tiny_spec(layers: tuple[tuple[KDASpec | MLASpec, DenseFFNSpec | MoESpec], ...] = LAYERS) -> ModelSpec:
    """Five layers of every kind, saved sums before layers 0, 2 and 4, no vision."""
    return ModelSpec(
        family="kimi_k3",
        architecture="KimiK3ForConditionalGeneration",
        hidden_size=40,
        vocab_size=52,
        layers=tuple(LayerSpec(layer_idx=i, mixer=mixer, ffn=ffn) for i, (mixer, ffn) in enumerate(layers)),
        residual=AttentionResidualSpec(block_size=2, norm_eps=1e-5),
        norm_eps=1e-5,
        max_context=1024,
        dtype="BF16",
        quant=None,
        tokens=SpecialTokens(bos=48, eos=49, pad=51, media=50),
        vision=None,
        projector=None,
        image=None,
    )


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights of a sensible size, the same for the same seed whatever the precision they are kept in."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    stores = {name: store for name, store in module.named_modules() if isinstance(store, MatrixStore)}
    for store in stores.values():
        values = draw(*store.logical_shape) / store.logical_shape[-1] ** 0.5
        for index in [None] if values.ndim == 2 else range(len(values)):
            store.write(values if index is None else values[index], index=index)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            owner, _, own = name.rpartition(".")
            if owner in stores:
                continue
            values = draw(*parameter.shape)
            if own == "bias":
                values = 7 + values / 4
            elif "norm" in owner:
                values = 1 + values / 5
            elif owner.endswith("router"):
                values = values / parameter.shape[-1] ** 0.5
            parameter.copy_(values)


def tiny_model(
    spec: ModelSpec | None = None, precision: str = "fp32", dtype: torch.dtype | None = torch.float64, seed: int = 0
) -> Model:
    """Float64 unless told otherwise, so that tests tell a mistake from rounding."""
    model = Model(spec or tiny_spec(), precision=precision, dtype=dtype)
    fill(model, seed)
    return model.requires_grad_(False)


def tiny_cache(
    model: Model, num_slots: int = 4, max_tokens: int = 80, tp_size: int = 1, kv_dtype: str = "auto"
) -> StateCache:
    return StateCache(
        model.spec,
        model.layer_range,
        num_slots=num_slots,
        max_tokens=max_tokens,
        dtype=model.dtype,
        tp_size=tp_size,
        kv_dtype=kv_dtype,
    )


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 52, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(pieces: list[tuple[int, int, list[int]]]) -> TokenBatch:
    """(slot, start, new tokens) of each sequence; the logits of every new token are wanted."""
    ids = [token for _, _, tokens in pieces for token in tokens]
    return TokenBatch(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        lengths=tuple(len(tokens) for _, _, tokens in pieces),
        starts=tuple(start for _, start, _ in pieces),
        slots=tuple(slot for slot, _, _ in pieces),
        logit_rows=torch.arange(len(ids)),
    )


def assert_near(found: Tensor, expected: Tensor, limit: float = 1e-10, what: str = "") -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    scale = expected.abs().max().clamp(min=1e-30)
    error = ((found - expected).abs().max() / scale).item()
    assert error <= limit, f"{what}: max|d| / max {error:.2e}, limit {limit:.1e}"
