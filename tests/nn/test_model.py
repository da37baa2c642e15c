"""The whole network on a tiny description: caches, ragged batches, pipeline stages, images, gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_tiny import assert_near, batch_of, fill, random_ids, tiny_cache, tiny_model, tiny_spec
from torch import Tensor

from workbench.base import RequestError, UnsupportedModelError
from workbench.nn import MatrixStore, Model, SingleRank, TokenBatch
from workbench.nn.model import Embedding
from workbench.nn.residual import ResidualStream
from workbench.spec import published_tensors

RAGGED = (1, 2, 15, 16, 17, 63, 64, 65)


def logits_of(model: Model, ids: list[int]) -> Tensor:
    return model(TokenBatch.whole([ids], all_logits=True))


def test_decoding_token_by_token_equals_one_pass() -> None:
    model, ids = tiny_model(), random_ids(37)
    cache = tiny_cache(model)
    steps = [model(batch_of([(2, i, [token])]), cache=cache) for i, token in enumerate(ids)]
    assert_near(torch.cat(steps), logits_of(model, ids))


@pytest.mark.parametrize("size", range(1, 24))
def test_prefill_in_chunks_of_any_size_equals_one_pass(size: int) -> None:
    model, ids = tiny_model(), random_ids(23)
    cache = tiny_cache(model)
    chunks = [batch_of([(1, start, ids[start : start + size])]) for start in range(0, len(ids), size)]
    assert_near(torch.cat([model(chunk, cache=cache) for chunk in chunks]), logits_of(model, ids))


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_ragged_batch_equals_each_sequence_alone(is_cached: bool) -> None:
    model = tiny_model()
    sequences = [random_ids(length, seed=length) for length in RAGGED]
    cache = tiny_cache(model, num_slots=len(RAGGED)) if is_cached else None
    found = model(TokenBatch.whole(sequences, all_logits=True), cache=cache)
    for ids, own in zip(sequences, found.split(list(RAGGED)), strict=True):
        assert_near(own, logits_of(model, ids), what=f"length {len(ids)}")


def test_a_mixed_batch_of_decode_steps_and_prefill_chunks_equals_each_alone() -> None:
    model = tiny_model()
    sequences = [random_ids(length, seed=length) for length in (9, 30, 5, 21)]
    done = (8, 10, 0, 20)  # sequences 0 and 3 have one token left, 1 is in the middle of its prompt, 2 begins
    cache, slots = tiny_cache(model, num_slots=6), (5, 0, 3, 2)
    for slot, ids, start in zip(slots, sequences, done, strict=True):
        if start:
            model(batch_of([(slot, 0, ids[:start])]), cache=cache)
    pieces = [(slot, start, ids[start:]) for slot, ids, start in zip(slots, sequences, done, strict=True)]
    found = model(batch_of(pieces), cache=cache)
    for ids, start, own in zip(sequences, done, found.split([len(x) for _, _, x in pieces]), strict=True):
        assert_near(own, logits_of(model, ids)[start:], what=f"from {start}")


def test_a_slot_that_held_another_sequence_even_nan_gives_a_fresh_start() -> None:
    model, ids = tiny_model(), random_ids(12)
    cache = tiny_cache(model)
    for values in cache.tensors:
        values.fill_(float("nan"))
    found = [model(batch_of([(0, 0, ids[:5])]), cache=cache)]
    found += [model(batch_of([(0, 5 + i, [token])]), cache=cache) for i, token in enumerate(ids[5:])]
    assert_near(torch.cat(found), logits_of(model, ids))


def test_going_on_with_another_sequences_state_is_seen() -> None:
    """The comparison above can fail: a start other than 0 reads what the slot holds."""
    model, ids = tiny_model(), random_ids(12)
    cache = tiny_cache(model)
    model(batch_of([(0, 0, random_ids(5, seed=9))]), cache=cache)
    found = model(batch_of([(0, 5, ids[5:])]), cache=cache)
    with pytest.raises(AssertionError, match="max"):
        assert_near(found, logits_of(model, ids)[5:], limit=1e-3)


def test_a_batch_without_tokens_passes_through_every_layer() -> None:
    model = tiny_model()
    assert model(TokenBatch.whole([]), cache=tiny_cache(model)).shape == (0, 52)
    assert model(TokenBatch.whole([])).shape == (0, 52)


@pytest.mark.parametrize("cut", range(1, 5))
def test_two_stages_joined_by_the_payload_equal_the_whole_model(cut: int) -> None:
    spec, whole = tiny_spec(), tiny_model()
    first = Model(spec, layers=range(cut), has_head=False, precision="fp32", dtype=torch.float64)
    last = Model(spec, layers=range(cut, 5), has_embed=False, has_vision=False, precision="fp32", dtype=torch.float64)
    weights = whole.state_dict()
    for stage in (first, last):
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()}, strict=True)
    ids = random_ids(19)
    batch = TokenBatch.whole([ids[:11], ids[11:]], all_logits=True)
    payload = first(batch)
    assert payload.shape == (1 + spec.residual.num_saved(cut), 19, 40)
    assert torch.equal(last(batch, payload), whole(batch))


def test_stages_of_one_layer_each_decode_with_their_own_caches() -> None:
    spec, whole = tiny_spec(), tiny_model()
    weights = whole.state_dict()
    stages = []
    for i in range(5):
        stage = Model(
            spec, layers=range(i, i + 1), has_embed=i == 0, has_head=i == 4, precision="fp32", dtype=torch.float64
        )
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()}, strict=True)
        stages.append((stage, tiny_cache(stage)))
    ids, found = random_ids(9), []
    for start, tokens in [(0, ids[:6]), *[(i, [ids[i]]) for i in range(6, 9)]]:
        payload = None
        for stage, cache in stages:
            payload = stage(batch_of([(1, start, tokens)]), payload, cache)
        found.append(payload)
    assert_near(torch.cat(found), logits_of(whole, ids))


def saved_when_saved(model: Model, batch: TokenBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of the saved sums from the moment each first appears, and the saved sums as they are at the end."""
    copies: list[Tensor] = []
    final: list[ResidualStream] = []

    def watch(_: object, __: object, stream: ResidualStream) -> None:
        copies.extend(v.clone() for v in stream.saved[len(copies) :])
        final[:] = [stream]

    handles = [layer.register_forward_hook(watch) for layer in model.layers.values()]
    model(batch)
    for handle in handles:
        handle.remove()
    return copies, list(final[0].saved)


def test_saved_sums_are_never_touched_again() -> None:
    copies, final = saved_when_saved(tiny_model(), TokenBatch.whole([random_ids(7)]))
    assert len(copies) == 3
    assert all(torch.equal(copy, end) for copy, end in zip(copies, final, strict=True))


def test_an_addition_in_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_in_place(self: ResidualStream, y: Tensor) -> ResidualStream:
        running = self.saved[-1] if self.running is None else self.running  # and the sum does not begin anew
        return ResidualStream(self.saved, running.add_(y))

    monkeypatch.setattr(ResidualStream, "add", add_in_place)
    copies, final = saved_when_saved(tiny_model(), TokenBatch.whole([random_ids(7)]))
    assert not all(torch.equal(copy, end) for copy, end in zip(copies, final, strict=True))


def test_images_replace_rows_and_pad_rows_are_zeroed_before_the_first_layer() -> None:
    model, ids = tiny_model(), random_ids(6)
    seen: list[Tensor] = []
    model.layers["0"].register_forward_pre_hook(lambda _, args: seen.append(args[0].running))
    features = torch.full((2, 40), 3.0)
    batch = dataclasses.replace(
        TokenBatch.whole([ids]),
        image_rows=torch.tensor([4, 1]),
        image_features=torch.stack([features[0], 2 * features[1]]),
        zero_rows=torch.tensor([1, 2]),
    )
    model(batch)
    expected = model.embed.weight[torch.tensor(ids)].clone()
    expected[2], expected[4], expected[1] = 0.0, 3.0, 6.0
    assert torch.equal(seen[0], expected)


def test_gradients_reach_every_weight_that_is_used_and_agree_with_finite_differences() -> None:
    model = tiny_model().requires_grad_(True)
    batch = TokenBatch.whole([random_ids(18), random_ids(1)], all_logits=True)
    target = torch.randn(19, 52, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def loss() -> Tensor:
        return (model(batch) * target).mean()

    loss().backward()
    # The first layer sees the plain embedding; the correction bias only chooses.
    unused = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    biases = {f"layers.{i}.ffn.router.bias" for i in range(1, 5)}
    assert unused == {"layers.0.mixer_res.norm.weight", "layers.0.mixer_res.proj.weight"} | biases
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in unused:
                continue
            place = parameter.grad.abs().argmax()
            values, slope = parameter.view(-1), parameter.grad.view(-1)[place]
            step = 1e-6 if parameter.dtype == torch.float64 else 1e-5  # larger ones change the choice of experts
            before = values[place].item()
            values[place] = before + step
            high, loss_high = values[place].item(), loss()
            values[place] = before - step
            low, loss_low = values[place].item(), loss()
            values[place] = before
            assert_near((loss_high - loss_low) / (high - low), slope.double(), limit=1e-5, what=name)


class PretendRank(SingleRank):
    """One rank of several, without the others: sums stay partial."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def test_a_split_vocabulary_adds_up_to_the_whole_embedding() -> None:
    whole = Embedding(52, 7, torch.float32)
    fill(whole)
    ids, total = torch.tensor([0, 51, 12, 13, 25, 26, 13]), torch.zeros(7, 7)
    for rank in range(4):
        part = Embedding(13, 7, torch.float32)
        part.weight.data = whole.weight.data[13 * rank : 13 * (rank + 1)]
        part.tp = PretendRank(rank, 4)
        total += part(ids)
    assert torch.equal(total, whole(ids))


def test_a_plain_residual_stream_is_the_ordinary_sum() -> None:
    spec = dataclasses.replace(tiny_spec(), residual=None)
    model, batch = tiny_model(spec), TokenBatch.whole([random_ids(5)], all_logits=True)
    outputs: list[Tensor] = []
    for layer in model.layers.values():
        for block in (layer.mixer, layer.ffn):
            block.register_forward_hook(lambda _, __, output: outputs.append(output))
    logits = model(batch)
    total = model.embed(batch.token_ids) + torch.stack(outputs).sum(0)
    assert_near(logits, model.head(model.final_norm(total)))


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4", "mxfp4"])
def test_a_quantised_model_computes_what_its_decoded_weights_compute(precision: str) -> None:
    quantised, dense = tiny_model(precision=precision), tiny_model()
    changed = set()
    for name, store in quantised.named_modules():
        if isinstance(store, MatrixStore):
            weight = dense.get_parameter(f"{name}.weight")
            decoded = torch.stack([store.dense(weight.dtype, e) for e in range(10)]) if weight.ndim == 3 else None
            weight.data = store.dense(weight.dtype) if decoded is None else decoded
            if store.scheme is not None:
                assert store.scheme.name == precision
                changed.add(name.split(".", 2)[2])
    batch = TokenBatch.whole([random_ids(33)], all_logits=True)
    assert torch.equal(quantised(batch), dense(batch))
    assert not torch.equal(dense(batch), tiny_model()(batch))
    experts = {f"ffn.experts.{x}" for x in ("w1", "w2", "w3")}
    mixers = {f"mixer.{x}_proj" for x in ("q", "k", "v", "g", "o", "q_a", "q_b", "kv_a")}
    ffns = {f"ffn.{part}{x}_proj" for part in ("", "shared.") for x in ("gate", "up", "down")}
    assert changed == (experts if precision == "mxfp4" else experts | mixers | ffns)


def test_bf16_weights_are_bf16_and_published_float32_tensors_stay_float32() -> None:
    model = Model(tiny_spec())
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    endings = ("_conv.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".router.bias")
    assert kept == {name for name, _ in model.named_parameters() if name.endswith(endings)}
    assert {p.dtype for name, p in model.named_parameters() if name not in kept} == {torch.bfloat16}


def test_a_model_can_be_built_without_memory_and_named_like_the_checkpoint() -> None:
    with torch.device("meta"):
        model = Model(tiny_spec())
    assert all(p.is_meta for p in model.parameters())
    assert {name for name, _ in model.named_parameters()} == {t.param for t in published_tensors(tiny_spec())}


def test_unreasonable_requests_are_refused_by_name() -> None:
    model = tiny_model()
    with pytest.raises(RequestError, match="need a cache"):
        model(batch_of([(0, 3, [1, 2])]))
    with pytest.raises(RequestError, match="grows to 81 tokens"):
        model(batch_of([(0, 79, [1, 2])]), cache=tiny_cache(model))
    with pytest.raises(UnsupportedModelError, match="no vision tower"):
        model.encode_images(torch.zeros(4, 3, 14, 14), [(1, 2, 2)])
    stage = Model(tiny_spec(), layers=range(1, 2), has_embed=False, has_head=False)
    with pytest.raises(RequestError, match="needs the payload"):
        stage(TokenBatch.whole([[1, 2]]))
