"""Native kernels: against float64, alone and in company, with numbers that are none, and what happens without them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from native_tiny import draw, held
from nn_tiny import MOE, assert_near, batch_of, random_ids, tiny_cache, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.nn import Linear, native
from workbench.nn.moe import Experts
from workbench.nn.native import build, calls, dispatch
from workbench.nn.native.calls import KINDS, Kernels
from workbench.nn.native.trial import TOLERANCE, attend_reference, experts_reference, faults, seen_rows, wide
from workbench.nn.pages import PageTables
from workbench.nn.precision import Precision
from workbench.spec import Activation

DTYPES = list(KINDS)
SILU = Activation(kind="silu")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = native.kernels()
    if found is None:
        pytest.skip("no native kernels here: no compiler, or switched off")
    return found


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    monkeypatch.setattr(dispatch, "LEAST_WEIGHTS", 0)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_equal_the_reference_at_every_odd_size(kernels: Kernels, dtype: torch.dtype, is_packed: bool) -> None:
    for num, rows, columns in (
        (1, 1, 2),
        (1, 131, 94),
        (2, 47, 32),
        (3, 49, 130),
        (4, 300, 64),
        (5, 7, 98),
        (16, 97, 66),
    ):
        x, w = draw(num, columns, dtype=dtype), held((rows, columns), dtype, is_packed=is_packed)
        found = kernels.linear(x, w)
        assert found.dtype is dtype
        assert_near(found.double(), x.double() @ wide(w).mT, TOLERANCE[dtype], what=f"{num} x {columns} -> {rows}")


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_to_the_bit_whoever_stands_beside_it(
    kernels: Kernels, dtype: torch.dtype, is_packed: bool
) -> None:
    x, w = draw(17, 150, dtype=dtype), held((101, 150), dtype, is_packed=is_packed)
    alone = torch.cat([kernels.linear(row[None], w) for row in x])
    for num in range(2, 18):
        assert torch.equal(kernels.linear(x[:num].contiguous(), w), alone[:num]), num
    slots = torch.randint(0, 5, (17, 2), generator=torch.Generator().manual_seed(1))
    shapes = ((5, 60, 150), (5, 150, 60), (5, 60, 150))
    w1, w2, w3 = (held(shape, dtype, is_packed=is_packed, seed=i) for i, shape in enumerate(shapes))
    none = (None, None, None)
    together = kernels.experts(x, slots, (w1, w2, w3), none, SILU)
    for t in (0, 7, 16):
        own = kernels.experts(x[t : t + 1], slots[t : t + 1], (w1, w2, w3), none, SILU)
        assert torch.equal(together[t], own[0]), t


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "mxfp4"])
def test_what_is_no_number_stays_in_its_own_row_and_column(kernels: Kernels, is_packed: bool) -> None:
    x = draw(6, 70, dtype=torch.bfloat16)
    x[2, 69], x[4, 0] = float("nan"), float("inf")
    codes, scales = held((9, 70), torch.bfloat16, is_packed=is_packed)
    spoilt = 255 if is_packed else float("nan")
    (codes if scales is None else scales)[5] = spoilt  # a whole row, which begins right behind the end of row 4
    found = kernels.linear(x, (codes, scales))
    expected = x.double() @ wide((codes, scales)).mT
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert found[2].isnan().all()
    good = expected.isfinite()
    assert_near(found[good].double(), expected[good], TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "mxfp4"])
@pytest.mark.parametrize(
    "activation",
    [SILU, Activation(kind="situ", beta=3.0, linear_beta=20.0), Activation(kind="swiglu_oai", alpha=1.7, limit=1.0)],
    ids=lambda x: x.kind,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_per_pair", [False, True])
def test_experts_equal_the_reference(
    kernels: Kernels, dtype: torch.dtype, activation: Activation, is_packed: bool, is_per_pair: bool
) -> None:
    num, top_k, width, latent = 7, 3, 52, 100
    slots = torch.randint(-1, 4, (num, top_k), generator=torch.Generator().manual_seed(2))
    x = draw(num * (top_k if is_per_pair else 1), latent, dtype=dtype)
    shapes = ((4, width, latent), (4, latent, width), (4, width, latent))
    matrices = tuple(held(shape, dtype, is_packed=is_packed, seed=i) for i, shape in enumerate(shapes))
    for biases in ([None] * 3, [draw(*shape[:2], seed=9, dtype=dtype) for shape in shapes]):
        found = kernels.experts(x, slots, matrices, biases, activation)  # type: ignore[arg-type]
        expected = experts_reference(x, slots, matrices, biases, activation)  # type: ignore[arg-type]
        assert_near(found.double(), expected, TOLERANCE[dtype])
        assert not found[slots < 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 5), (24, 2), (11, 1)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_equals_the_reference_and_reads_no_further_than_it_may(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, has_sinks: bool
) -> None:
    lengths, width, v_width = (1, 130, 64, 7), 36, 77
    q = draw(len(lengths), heads, width, dtype=dtype)
    tables = draw(4, 140, kv_heads, width, dtype=dtype), draw(4, 140, kv_heads, v_width, seed=5, dtype=dtype)
    for table in tables:
        for own, length in zip(table, lengths, strict=True):
            own[length:] = float("nan")
    keys, values = ([x[:n] for x, n in zip(table, lengths, strict=True)] for table in tables)
    sinks = draw(heads, seed=6) if has_sinks else None
    found = kernels.attend(q, keys, values, 0.2, sinks)
    assert_near(found.double(), attend_reference(q, keys, values, 0.2, sinks), TOLERANCE[dtype])
    for s in range(len(lengths)):
        alone = kernels.attend(q[s : s + 1], keys[s : s + 1], values[s : s + 1], 0.2, sinks)
        assert torch.equal(alone[0], found[s])


@pytest.mark.parametrize("page_tokens", [1, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (11, 1)])
def test_rows_in_pages_give_the_bits_of_rows_side_by_side_and_those_of_others_are_not_read(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, page_tokens: int
) -> None:
    """Pages in any order, some of them neighbours; what no sequence sees is NaN, also in the same page."""
    seen, width, v_width = [(2, 0, 1), (0, 3, 130), (3, 64, 71)], 36, 77
    longest, num_pages = 140, 4 * -(-140 // page_tokens)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(8)).view(4, -1)
    pages[0, :2] = pages[0, :2].sort().values
    tables = PageTables(pages, page_tokens)
    rows = [seen_rows(tables, *each) for each in seen]
    q, sinks = draw(len(seen), heads, width, dtype=dtype), draw(heads, seed=6)
    pools = []
    for seed, columns in ((3, width), (5, v_width)):
        pool = torch.full((num_pages * page_tokens, kv_heads, columns), float("nan"), dtype=dtype)
        for slot, each in enumerate(rows):
            pool[each] = draw(len(each), kv_heads, columns, seed=10 * seed + slot, dtype=dtype)
        pools.append(pool)
    assert longest <= pages.shape[1] * page_tokens
    found = kernels.attend(q, pools[:1], pools[1:], 0.2, sinks, tables, torch.tensor(seen))
    keys, values = ([pool[each] for each in rows] for pool in pools)
    assert torch.equal(found, kernels.attend(q, keys, values, 0.2, sinks))
    assert_near(found.double(), attend_reference(q, keys, values, 0.2, sinks), TOLERANCE[dtype])


def test_scores_far_apart_and_scores_that_are_no_numbers(kernels: Kernels) -> None:
    q, keys, values = torch.ones(3, 2, 8), torch.ones(3, 5, 1, 8), draw(3, 5, 1, 8)
    keys[0, 3] = 500.0  # one token takes all
    keys[1] = -3000.0  # all equally far off
    keys[2, 1, 0, 0] = float("nan")
    found = kernels.attend(q, list(keys), list(values), 1.0, None)
    assert_near(found[0], values[0, 3].expand(2, 8), 1e-6)
    assert_near(found[1], values[1].mean(0).expand(2, 8), 1e-6)
    assert found[2].isnan().all()


# which work they are asked for


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_they_are_asked_in_inference_on_the_host_for_few_rows_and_for_nothing_else(kernels: Kernels) -> None:
    x, w = draw(3, 128), draw(64, 128, seed=4)
    assert_near(native.linear(x, (w, None)), x @ w.mT, 1e-5)
    assert_near(native.linear(x[None], (w, None)), (x @ w.mT)[None], 1e-5)
    assert native.linear(x, None) is None
    assert native.linear(draw(dispatch.MAX_ROWS + 1, 128), (w, None)) is None
    assert native.linear(x[:0], (w, None)) is None
    assert native.linear(x.double(), (w.double(), None)) is None
    assert native.linear(x.bfloat16(), (w, None)) is None
    assert native.linear(x, (draw(128, 64).mT, None)) is None
    assert native.linear(x, (w[:8], None)) is None  # too small to be worth a call
    assert native.linear(x.to("meta"), (w, None)) is None
    assert native.linear(x.clone().requires_grad_(), (w, None)) is None
    assert native.linear(x, (w.clone().requires_grad_(), None)) is None
    with torch.no_grad():
        assert native.linear(x, (w.clone().requires_grad_(), None)) is not None
    with Listening():
        assert native.linear(x, (w, None)) is None


def test_gradients_of_a_layer_are_those_of_torch() -> None:
    layer, x = Linear(64, 128), draw(3, 128).requires_grad_()
    layer.write(draw(64, 128, seed=4))
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    expected = 2 * (x @ layer.weight.mT) @ layer.weight
    assert_near(found, expected.detach(), 1e-5)


@pytest.mark.parametrize("precision", ["fp32", "mxfp4"])
def test_a_model_computes_the_same_with_them(any_size: None, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Against the same model in float64, which they leave alone: prefill, ragged decoding, one token by itself."""
    prompts = (random_ids(9), random_ids(5, seed=1))

    def run(dtype: torch.dtype) -> list[Tensor]:
        model = tiny_model(precision=precision, dtype=dtype)
        cache, found = tiny_cache(model), []
        with torch.inference_mode():
            found.append(model(batch_of([(2, 0, prompts[0]), (0, 0, prompts[1])]), cache=cache))
            for step in range(3):
                found.append(model(batch_of([(2, 9 + step, [step]), (0, 5 + step, [7])]), cache=cache))
            found.append(model(batch_of([(2, 12, [3])]), cache=cache))
        return found

    asked: list[str] = []
    for name in ("linears", "experts", "attend"):
        original = getattr(Kernels, name)
        spy = lambda self, *args, name=name, original=original, **options: (  # noqa: E731
            asked.append(name) or original(self, *args, **options)
        )
        monkeypatch.setattr(Kernels, name, spy)
    expected = run(torch.float64)
    assert not asked
    for found, wanted in zip(run(torch.float32), expected, strict=True):
        assert_near(found.double(), wanted, 1e-4)
    assert set(asked) == {"linears", "experts", "attend"}


def test_experts_from_a_pool_are_those_of_the_stack_to_the_bit(any_size: None) -> None:
    experts = Experts(MOE, Precision.parse("mxfp4"))
    for i, store in enumerate((experts.w1, experts.w2, experts.w3)):
        for e in range(MOE.num_experts):
            store.write(draw(*store.logical_shape[1:], seed=10 * i + e) / 6, index=e)
    x, slots = (
        draw(4, MOE.latent_dim, dtype=torch.bfloat16),
        torch.tensor([[0, 3, 5], [3, -1, 7], [1, 2, 3], [3, 4, 9]]),
    )
    with torch.inference_mode():
        at_once = experts.at_once(x, slots)
        weights_of = experts.weights_of(torch.bfloat16)
        assert at_once is not None
        for t in range(4):
            for k in range(3):
                if slots[t, k] >= 0:
                    own = experts.one(x[t : t + 1], *weights_of(int(slots[t, k])))
                    assert torch.equal(at_once[t, k], own[0])


def test_the_profiler_sees_them_by_the_name_of_the_work(kernels: Kernels) -> None:
    from workbench.profiling.operators import record_step

    layer, x = Linear(64, 128, dtype=torch.bfloat16), draw(3, 128, dtype=torch.bfloat16)
    layer.write(draw(64, 128, seed=4))
    layer.requires_grad_(False)
    ledger = record_step(lambda: layer(x), torch.device("cpu"))[0].read()[0]
    (own,) = [each for each in ledger.operators if each.name == "native::mm"]
    assert (own.category, own.shapes) == ("gemm", ((3, 128), (128, 64)))


# what happens without them


def test_the_trial_finds_nothing_wrong(kernels: Kernels) -> None:
    assert faults(kernels) == []


COLUMNS_LEFT_OUT = {
    ("linear", "experts", "attend in float", "attend in pages"): ("if (columns % BLOCK) {", "if (false) {"),
}
ONE_IN_EACH_OTHER = {
    ("rms_norm",): ("(T::wide(weight[i]) + norm.offset)", "T::wide(weight[i])"),
    ("turn_heads",): ("second = b * c + a * s", "second = b * c - a * s"),
    ("route",): ("weights[k] /= total + 1e-20f", "weights[k] /= 1.0f"),
    ("sum of experts",): ("sums.weights ? sums.weights[p] : 1.0f", "1.0f"),
}


@pytest.mark.parametrize(
    "faults_by_kernel",
    [
        {**COLUMNS_LEFT_OUT, **ONE_IN_EACH_OTHER},  # in one build: a compiler takes most of the time
        pytest.param(COLUMNS_LEFT_OUT, marks=pytest.mark.slow),
        pytest.param(ONE_IN_EACH_OTHER, marks=pytest.mark.slow),
        pytest.param({("attend in pages",): ("own[page] * tokens + t % tokens", "t")}, marks=pytest.mark.slow),
        pytest.param({("attend in pages",): ("own[page + 1] == own[page] + 1", "true")}, marks=pytest.mark.slow),
        pytest.param(
            {("attend in pages",): ("(row - t) * values.token", "(row - t + 1) * values.token")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "one in every kernel",
        "columns behind the last block left out",
        "one in each of the others",
        "no pages",
        "pages side by side",
        "values of other tokens",
    ],
)
def test_a_wrong_kernel_is_found_by_its_trial(
    tmp_path: Path, kernels: Kernels, faults_by_kernel: dict[tuple[str, ...], tuple[str, str]]
) -> None:
    sources = {source.name: source.read_text() for source in build.SOURCES}
    for right, wrong in faults_by_kernel.values():
        assert sum(text.count(right) for text in sources.values()) == 1
        sources = {name: text.replace(right, wrong) for name, text in sources.items()}
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    library = build.load_library(tuple(tmp_path / name for name in sources), tmp_path / "cache")
    found = faults(Kernels(library))
    for name in (name for names in faults_by_kernel for name in names):
        assert any(each.startswith(name) for each in found), f"{name} not in {found}"


@pytest.mark.usefixtures("kernels")
def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("built again"))
    build.load_library()


def _compiler_that(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "compiler"
    path.write_text("\n".join(("#!/bin/sh", 'if [ "$1" = --version ]; then echo 1; exit 0; fi', *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (("echo 'x.cpp:1: error: no such register' >&2", "exit 1"), "no such register"),
        (("kill -9 $$",), "exit status -9"),
        (('for last; do :; done; echo "not a library" > "$last"',), "OSError"),
    ],
    ids=["refuses", "dies", "writes nonsense"],
)
def test_a_compiler_that_fails_means_torch_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lines: tuple[str, ...],
    word: str,
) -> None:
    monkeypatch.setenv("CXX", _compiler_that(tmp_path, *lines))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calls, "_found", [])
    x, layer = draw(3, 128), Linear(64, 128).requires_grad_(False)
    layer.write(draw(64, 128, seed=4))
    with caplog.at_level(logging.WARNING, logger="workbench.native"):
        for _ in range(2):
            assert_near(layer(x), x @ layer.weight.mT, 1e-5)
    (record,) = caplog.records
    assert word in record.getMessage()
    kept = [path.name for path in (tmp_path / "day0-workbench" / "native").iterdir() if path.name != "lock"]
    assert len(kept) == (1 if word == "OSError" else 0), kept


@pytest.mark.parametrize("why", ["no compiler", "no home", "a file in the way", "switched off"])
def test_without_a_way_to_build_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    monkeypatch.setattr(calls, "_found", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    elif why == "no home":
        monkeypatch.setattr(build, "cache_folder", lambda: Path(os.devnull) / "folder")
    elif why == "a file in the way":
        (tmp_path / "day0-workbench").write_text("")
    else:
        monkeypatch.setenv(calls.SWITCH, "0")
    with caplog.at_level(logging.WARNING, logger="workbench.native"):
        assert native.kernels() is None
        assert native.kernels() is None
    assert len(caplog.records) == (0 if why == "switched off" else 1)


def test_shapes_that_do_not_fit_are_left_to_torch_which_says_so(any_size: None) -> None:
    """A kernel reads by the numbers it is given and would run past the end of a matrix, or of a head."""
    for dtype in (torch.float32, torch.bfloat16):
        for is_packed in (False, True):
            assert native.linear(draw(2, 64, dtype=dtype), held((7, 64), dtype, is_packed=is_packed)) is not None
            for columns in (32, 96):
                wrong = held((7, columns), dtype, is_packed=is_packed)
                assert native.linear(draw(2, 64, dtype=dtype), wrong) is None, columns
    with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(7, 32)(draw(2, 64))


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "mxfp4"])
def test_experts_whose_shapes_do_not_fit_are_left_to_torch(any_size: None, is_packed: bool) -> None:
    def run(x: Tensor, slots: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor | None:
        w1, w2, w3 = (held(shape, torch.float32, is_packed=is_packed) for shape in shapes)
        return native.experts(x, slots, (w1, w2, w3), (None, None, None), SILU)

    x, slots = draw(2, 64), torch.tensor([[0, 2], [1, -1]])
    up, down = (3, 32, 64), (3, 64, 32)
    assert run(x, slots, (up, down, up)) is not None
    assert run(draw(4, 64), slots, (up, down, up)) is not None
    assert run(draw(2, 96), slots, (up, down, up)) is None
    assert run(draw(3, 64), slots, (up, down, up)) is None
    assert run(x, slots.int(), (up, down, up)) is None
    for wrong in ((up, down, (2, 32, 64)), (up, down, (3, 30, 64)), (up, (3, 62, 32), up), (up, (3, 64, 64), up)):
        assert run(x, slots, wrong) is None, wrong


def test_heads_whose_shapes_do_not_fit_are_left_to_torch(kernels: Kernels) -> None:
    keys, values = [draw(5, 2, 20)], [draw(5, 2, 12)]
    assert native.attend(draw(1, 6, 20), keys, values, scale=1.0) is not None
    assert native.attend(draw(1, 6, 24), keys, values, scale=1.0) is None
    assert native.attend(draw(1, 5, 20), keys, values, scale=1.0) is None
    assert native.attend(draw(1, 6, 20), keys, [draw(5, 1, 12)], scale=1.0) is None
    assert native.attend(draw(1, 6, 20), keys, values, scale=1.0, sinks=draw(3)) is None
    table = draw(1, 11), draw(1, 11)  # 22 columns of 20
    assert native.turn_heads((draw(1, 6, 20),), (None,), table, is_interleaved=False) is None
