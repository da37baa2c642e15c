"""Native kernels between a layer's products: norms, turned heads, routers, sums over experts, several products at once.

Against float64, against the torch path they stand for, alone and in company, and with numbers that are none.
"""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from native_tiny import draw, held
from nn_tiny import assert_near, batch_of, fill, random_ids, tiny_cache
from torch import Tensor

from workbench.nn import Linear, native
from workbench.nn.linear import products
from workbench.nn.model import Model, TiedHead
from workbench.nn.moe import Experts
from workbench.nn.native import dispatch
from workbench.nn.native.calls import KINDS, HeadNorm, Kernels
from workbench.nn.native.trial import (
    TOLERANCE,
    rms_norm_reference,
    route_reference,
    routing,
    turn_reference,
    wide,
)
from workbench.nn.norm import HeadRMSNorm, RMSNorm
from workbench.nn.precision import Precision
from workbench.nn.rotary import rotate
from workbench.nn.router import Router
from workbench.spec import Activation, GQASpec, LayerSpec, ModelSpec, RopeSpec, SpecialTokens
from workbench.spec.dialect import plain_moe

DTYPES = list(KINDS)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = native.kernels()
    if found is None:
        pytest.skip("no native kernels here: no compiler, or switched off")
    return found


def by_torch(run) -> Tensor:
    """What torch's path computes: where gradients are asked for, no kernel takes part."""
    with torch.enable_grad():
        return run().detach()


# norms


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_the_reference_and_do_not_depend_on_their_company(
    kernels: Kernels, dtype: torch.dtype, offset: float
) -> None:
    for columns in (1, 7, 32, 70, 129):
        x, weight = draw(9, 3, columns, dtype=dtype), draw(columns, seed=4, dtype=dtype)
        found = kernels.rms_norm(x, weight, 1e-4, offset)
        assert_near(found.double(), rms_norm_reference(x, weight, 1e-4, offset), TOLERANCE[dtype], what=f"{columns}")
        alone = [kernels.rms_norm(row.contiguous(), weight, 1e-4, offset) for row in x.flatten(0, 1)]
        assert torch.equal(found.flatten(0, 1), torch.stack(alone))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_round_where_torch_does(offset: float) -> None:
    norm, x = RMSNorm(96, 1e-5, torch.bfloat16, offset=offset), draw(300, 96, dtype=torch.bfloat16)
    norm.weight.data = (1 - offset + draw(96, seed=4) / 5).bfloat16()
    expected = by_torch(lambda: norm(x))
    with torch.inference_mode():
        found = norm(x)
    # The scale may differ in its last bit, which one number in many thousands then shows.
    assert (found == expected).double().mean() > 0.999
    assert (found.double() / expected.double() - 1).abs().max() <= 2**-7


def test_a_row_that_is_no_number_spoils_no_other(kernels: Kernels) -> None:
    x, weight = draw(5, 40, dtype=torch.bfloat16), draw(40, seed=4, dtype=torch.bfloat16)
    good = kernels.rms_norm(x, weight, 1e-5, 0.0)
    x[1, 39], x[3, 0] = NAN, INF
    found = kernels.rms_norm(x, weight, 1e-5, 0.0)
    assert torch.equal(found[::2], good[::2])
    assert found[1].isnan().all()
    assert not found[3].isfinite().all()


# heads


@pytest.mark.parametrize(("width", "pairs", "is_interleaved"), [(44, 22, False), (44, 22, True), (38, 9, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normed_then_turned_as_by_the_reference(
    kernels: Kernels, dtype: torch.dtype, width: int, pairs: int, is_interleaved: bool
) -> None:
    both = draw(6, 7, width + 3, dtype=dtype)
    xs = [both[:, :5, 3:], both[:, 5:, :width]]  # 5 and 2 heads, neither of them side by side
    norms: list[HeadNorm | None] = [None, (draw(width, seed=5, dtype=dtype), 1e-3, 0.0)]
    angles = draw(6, pairs, seed=6)
    table = angles.cos(), angles.sin()
    found = kernels.turn_heads(xs, norms, table, is_interleaved=is_interleaved)
    for x, norm, y in zip(xs, norms, found, strict=True):
        normed = x if norm is None else rms_norm_reference(x, *norm)
        assert y.is_contiguous()
        assert_near(y.double(), turn_reference(normed, table, is_interleaved), TOLERANCE[dtype])
    for t in (0, 5):
        own = (table[0][t : t + 1], table[1][t : t + 1])
        alone = kernels.turn_heads([x[t : t + 1] for x in xs], norms, own, is_interleaved=is_interleaved)
        assert all(torch.equal(a[0], y[t]) for a, y in zip(alone, found, strict=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation_is_that_of_torch_to_the_bit(dtype: torch.dtype, is_interleaved: bool) -> None:
    x, angles = draw(4, 3, 50, dtype=dtype), draw(4, 20, seed=6)
    table = angles.cos(), angles.sin()
    wanted = by_torch(lambda: rotate(x.clone().requires_grad_(), table, is_interleaved=is_interleaved))
    assert torch.equal(rotate(x, table, is_interleaved=is_interleaved), wanted)


@pytest.mark.usefixtures("kernels")
def test_what_does_not_fit_is_left_to_torch() -> None:
    x, weight, table = draw(4, 3, 8), draw(8), (draw(4, 4), draw(4, 4))
    for other in (draw(8, dtype=torch.bfloat16), draw(7), draw(16)[::2], draw(8).requires_grad_()):
        assert native.rms_norm(x, other, 1e-5) is None
        assert native.turn_heads((x,), [(other, 1e-5, 0.0)], table, is_interleaved=False) is None
    assert native.rms_norm(x[:0], weight, 1e-5) is None
    assert native.rms_norm(x.double(), weight.double(), 1e-5) is None
    assert native.turn_heads((x, x[:3]), (None, None), table, is_interleaved=False) is None
    assert native.turn_heads((x,), (None,), (table[0].mT, table[1].mT), is_interleaved=False) is None
    assert native.turn_heads((x.mT,), (None,), table, is_interleaved=False) is None
    spec = routing(6, 2)
    assert native.route(draw(3, 8), draw(6, 8), None, None, spec) is not None
    assert native.route(draw(3, 8), draw(6, 8, dtype=torch.bfloat16), None, None, spec) is None
    assert native.route(draw(3, 8), draw(6, 8), None, draw(6).double(), spec) is None
    assert native.route(draw(3, 8), draw(6, 8), None, None, routing(6, 2, scoring="sqrtsoftplus")) is None
    assert native.route(draw(3, 8), draw(1, 8), None, None, spec) is None


# routers


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "softmax_topk"])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routers_equal_the_reference_and_do_not_depend_on_their_company(
    kernels: Kernels, dtype: torch.dtype, has_biases: bool, scoring: str
) -> None:
    for num_experts, top_k, columns, renormalize in ((7, 3, 45, True), (60, 9, 70, False), (130, 130, 33, True)):
        spec = routing(num_experts, top_k, scoring=scoring, renormalize=renormalize)
        x, weight = draw(70, columns, dtype=dtype), draw(num_experts, columns, seed=4, dtype=dtype) / 6
        bias = draw(num_experts, seed=5, dtype=dtype) if has_biases else None
        correction = draw(num_experts, seed=6) if has_biases else None
        ids, weights = kernels.route(x, weight, bias, correction, spec)
        assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
        assert (ids.diff(dim=-1) > 0).all()
        found = torch.zeros(70, num_experts).scatter(1, ids, weights)
        assert_near(found.double(), route_reference(x, weight, bias, correction, spec), 2e-5)
        for first, last in ((0, 1), (69, 70), (30, 37)):
            own_ids, own_weights = kernels.route(x[first:last], weight, bias, correction, spec)
            assert torch.equal(own_ids, ids[first:last])
            assert torch.equal(own_weights, weights[first:last])


def test_of_equal_scores_the_lower_expert_is_chosen_wherever_they_stand(kernels: Kernels) -> None:
    """Also where scores are equal because they reach the end of what float32 tells apart."""
    logits = torch.tensor([[0.0, 30.0, 5.0, 30.0, 40.0, 5.0, 30.0], [1.0] * 7, [-1.0, 2.0, 2.0, 2.0, -1.0, 3.0, 2.0]])
    for spec, wanted in (
        (routing(7, 2), [[1, 3], [0, 1], [1, 5]]),
        (routing(7, 3, scoring="softmax_topk"), [[1, 3, 4], [0, 1, 2], [1, 2, 5]]),
    ):
        ids, _ = kernels.route(logits, torch.eye(7), None, None, spec)
        assert ids.tolist() == wanted


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "softmax_topk"])
def test_rows_without_numbers_still_name_experts_and_spoil_no_other(kernels: Kernels, scoring: str) -> None:
    spec, x, weight = routing(9, 4, scoring=scoring), draw(4, 40), draw(9, 40, seed=4)
    good_ids, good = kernels.route(x, weight, None, None, spec)
    x[1, 7], x[2] = NAN, INF
    ids, weights = kernels.route(x, weight, None, None, spec)
    assert torch.equal(ids[::3], good_ids[::3])
    assert torch.equal(weights[::3], good[::3])
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 9 for row in ids.tolist())
    assert weights[1].isnan().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "top_groups": 2}, {"scoring": "softmax"}], ids=str)
def test_a_router_gives_what_its_torch_path_gives(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    spec = plain_moe(num_experts=12, top_k=3, width=8, hidden_size=70, norm_eps=1e-5, **options)  # type: ignore[arg-type]
    router, x = Router(spec, 70, torch.bfloat16), draw(40, 70, dtype=torch.bfloat16)
    for seed, parameter in enumerate(router.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed, dtype=parameter.dtype) / 4
    asked: list[int] = []
    original = Kernels.route
    monkeypatch.setattr(Kernels, "route", lambda self, *args: asked.append(1) or original(self, *args))
    with torch.enable_grad():
        wanted_ids, wanted = router(x)
    assert not asked
    with torch.inference_mode():
        ids, weights = router(x)
        assert len(asked) == (0 if "num_groups" in options else 1)  # experts in groups are left to torch
        assert torch.equal(ids, wanted_ids)
        assert_near(weights, wanted.detach(), 1e-5)
        router.scores = lambda x: torch.ones(len(x), 12).cumsum(1)  # type: ignore[method-assign]
        assert (router(x)[0] >= 6).all()  # others in place of its own are heard


# sums over experts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("top_k", "is_per_pair"), [(3, False), (3, True), (16, False)])
def test_the_sum_over_experts_adds_visits_in_their_order_to_the_bit(
    kernels: Kernels, dtype: torch.dtype, top_k: int, is_per_pair: bool
) -> None:
    num, width, latent = 5, 20, 530
    slots = torch.randint(-1, 4, (num, top_k), generator=torch.Generator().manual_seed(2))
    slots[2] = -1  # none of its experts is held here
    x = draw(num * (top_k if is_per_pair else 1), latent, dtype=dtype)
    shapes = ((4, width, latent), (4, latent, width), (4, width, latent))
    stacks = [draw(*shape, seed=i) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)]
    w1, w2, w3 = ((w.to(dtype), None) for w in stacks)
    args = (x, slots, (w1, w2, w3), (None, None, None), Activation(kind="silu"))
    each, weights = kernels.experts(*args).float(), torch.rand(num, top_k)
    found = kernels.experts(*args, weights=weights, is_summed=True)
    assert found.dtype is torch.float32
    assert torch.equal(found, reduce(torch.add, (each * weights[..., None]).unbind(1)))
    assert torch.equal(kernels.experts(*args, is_summed=True), reduce(torch.add, each.unbind(1)))
    assert not found[2].any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scales_input", [False, True])
def test_experts_give_what_their_torch_path_gives(monkeypatch: pytest.MonkeyPatch, scales_input: bool) -> None:
    monkeypatch.setattr(dispatch, "LEAST_WEIGHTS", 0)
    spec = plain_moe(num_experts=6, top_k=3, width=20, hidden_size=70, norm_eps=1e-5, scales_input=scales_input)  # type: ignore[arg-type]
    experts = Experts(spec, Precision.parse("fp32"))
    fill(experts)
    x, slots, weights = (
        draw(5, 70),
        torch.tensor([[0, 2, 5], [1, -1, 3], [0, 1, 2], [-1, -1, -1], [3, 4, 5]]),
        draw(5, 3),
    )
    wanted = by_torch(lambda: experts(x, slots, weights))
    with torch.inference_mode():
        assert_near(experts(x, slots, weights), wanted, 1e-5)


# several products


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_products_are_each_that_of_its_matrix_alone(
    kernels: Kernels, dtype: torch.dtype, is_packed: bool
) -> None:
    matrices = [held((rows, 70), dtype, is_packed=is_packed, seed=rows) for rows in (1, 48, 103, 49)]
    for num in (1, 2, 5):
        x = draw(num, 70, dtype=dtype)
        found = kernels.linears(x, matrices)
        for y, matrix in zip(found, matrices, strict=True):
            assert torch.equal(y, kernels.linear(x, matrix))
            assert_near(y.double(), x.double() @ wide(matrix).mT, TOLERANCE[dtype])


def layers(*rows: int, has_bias: bool = False) -> list[Linear]:
    made = [Linear(each, 64, has_bias=has_bias) for each in rows]
    for seed, layer in enumerate(made):
        layer.write(draw(*layer.logical_shape, seed=seed))
        if layer.bias is not None:
            layer.bias.data = draw(layer.bias.shape[0], seed=9)
    return made


@pytest.mark.usefixtures("kernels")
def test_layers_that_nobody_watches_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = Kernels.linears
    monkeypatch.setattr(
        Kernels, "linears", lambda self, x, matrices: calls.append(len(matrices)) or original(self, x, matrices)
    )
    own, x = layers(100, 30, 70, has_bias=True), draw(3, 64)
    wanted = [by_torch(lambda layer=layer: layer(x)) for layer in own]

    def run() -> list[int]:
        calls.clear()
        with torch.inference_mode():
            for y, expected in zip(products(x, own), wanted, strict=True):
                assert_near(y, expected, 1e-5)
        return calls.copy()

    assert run() == [3]
    seen: list[Tensor] = []
    handle = own[0].register_forward_hook(lambda _, args, y: seen.append(y))
    assert run() == [1, 1]  # each by itself, and the smallest is not worth a call
    assert seen
    handle.remove()
    assert run() == [3]
    own[2].forward = lambda x: wanted[2]  # type: ignore[method-assign]
    assert 3 not in run()


@pytest.mark.usefixtures("kernels")
def test_matrices_of_two_kinds_are_two_calls() -> None:
    x = draw(2, 128, dtype=torch.bfloat16)
    dense, packed = (held((64, 128), torch.bfloat16, is_packed=each, seed=1) for each in (False, True))
    assert native.linears(x, [dense, packed]) is None
    assert native.linears(x, [dense, None]) is None
    assert native.linears(x, [packed, packed]) is not None


# whole models


def gqa_spec(*, is_tied: bool) -> ModelSpec:
    rope = RopeSpec(theta=1e4, dim=12)
    mixer = GQASpec(num_heads=6, num_kv_heads=2, head_dim=20, v_dim=20, rope=rope, qk_norm="head", qk_norm_eps=1e-6)
    moe = plain_moe(num_experts=9, top_k=3, width=24, hidden_size=72, norm_eps=1e-6, has_correction_bias=False)
    return ModelSpec(
        family="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        hidden_size=72,
        vocab_size=90,
        layers=tuple(LayerSpec(layer_idx=i, mixer=mixer, ffn=moe) for i in range(2)),
        residual=None,
        norm_eps=1e-6,
        max_context=256,
        dtype="BF16",
        quant=None,
        tokens=SpecialTokens(bos=0, eos=1, pad=2, media=3),
        vision=None,
        projector=None,
        image=None,
        is_tied=is_tied,
    )


@pytest.mark.usefixtures("kernels")
def test_a_model_is_theirs_from_end_to_end_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LEAST_WEIGHTS", 0)
    spec, prompt = gqa_spec(is_tied=True), random_ids(11)

    def run(dtype: torch.dtype) -> list[Tensor]:
        own = Model(spec, precision="fp32", dtype=dtype)
        fill(own)
        own.requires_grad_(False)
        assert isinstance(own.head, TiedHead)
        cache, found = tiny_cache(own), []
        with torch.inference_mode():
            found.append(own(batch_of([(1, 0, prompt), (3, 0, prompt[:4])]), cache=cache))
            found += [own(batch_of([(1, 11 + i, [7 + i]), (3, 4 + i, [i])]), cache=cache) for i in range(3)]
        return found

    asked: list[str] = []
    names = ("linears", "experts", "attend", "rms_norm", "turn_heads", "route")
    for name in names:
        original = getattr(Kernels, name)
        spy = lambda self, *args, name=name, original=original, **options: (  # noqa: E731
            asked.append(name) or original(self, *args, **options)
        )
        monkeypatch.setattr(Kernels, name, spy)
    wanted = run(torch.float64)
    assert not asked
    for found, expected in zip(run(torch.float32), wanted, strict=True):
        assert_near(found.double(), expected, 1e-4)
    assert set(asked) == set(names)


@pytest.mark.usefixtures("kernels")
def test_a_norm_of_heads_that_is_watched_is_called() -> None:
    model = Model(gqa_spec(is_tied=False), precision="fp32")
    fill(model)
    model.requires_grad_(False)
    seen: list[Tensor] = []
    norm = model.layers["1"].mixer.q_norm
    assert isinstance(norm, HeadRMSNorm)
    with torch.inference_mode():
        batch = batch_of([(1, 0, random_ids(6))])
        plain = model(batch)
        norm.register_forward_hook(lambda _, args, y: seen.append(y))
        assert_near(model(batch), plain, 1e-5)
    assert seen
