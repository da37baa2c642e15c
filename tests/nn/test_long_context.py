"""Far along in a sequence: places up to 2^20 - 1 are read as plain attention says, and nothing grows but the cache.

What is small runs always; reading up to 128k tokens of a real model takes minutes (slow).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from nn_tiny import MLA as SPEC
from torch import Tensor

from workbench.base import forget_peak, peak_resident_bytes
from workbench.nn import Segments, TokenBatch, workspace
from workbench.nn.cache import StateCache
from workbench.nn.mla import absorbed_attention, naive_attention
from workbench.nn.model import Model
from workbench.nn.rotary import rotary_table
from workbench.serving import LocalRunner
from workbench.spec import MLASpec, RopeSpec

NANO = Path(__file__).resolve().parents[2] / "data" / "k3-nano"
PLACES = (0, 4096, 32_768, (1 << 20) - 1)
NUM_SEEN = 64  # tokens that are read as one chunk and one by one
CHUNK = 2048  # tokens; what a chunk does anew for its whole context is then a tenth of what it attends to
ALLOCATOR_BYTES = 48 << 20  # what an allocator keeps of other sizes, and tensors of a chunk that do not grow
TOLERANCE = 1e-5  # of the largest logit, fp32; a token at a wrong place moves them by some 1e-4, one row of so many


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("place", [*PLACES[:-1], pytest.param(PLACES[-1], marks=pytest.mark.slow)])
def test_a_token_reads_all_before_its_place_and_itself(place: int) -> None:
    """Both forms against one explicit softmax; a token fewer is seen, where there is one."""
    weight = draw(SPEC.num_heads * (SPEC.nope_dim + SPEC.v_dim), SPEC.kv_rank, seed=4) / SPEC.kv_rank**0.5
    q, latent = draw(1, SPEC.num_heads, SPEC.qk_dim, seed=3), draw(place + 1, SPEC.cache_dim, seed=5)
    q[:, :, -1], latent[-1, -1] = 8.0, 8.0  # the last token matters, however many there are
    own = weight.view(SPEC.num_heads, SPEC.nope_dim + SPEC.v_dim, SPEC.kv_rank)

    def explicit(rows: Tensor) -> Tensor:
        c, shared = rows.split([SPEC.kv_rank, SPEC.rope_dim], -1)
        scores = torch.einsum("hn,hnr,lr->hl", q[0, :, : SPEC.nope_dim], own[:, : SPEC.nope_dim], c)
        scores = (scores + q[0, :, SPEC.nope_dim :] @ shared.T) * SPEC.softmax_scale
        mixed = torch.softmax(scores, -1) @ c
        return torch.einsum("hr,hvr->hv", mixed, own[:, SPEC.nope_dim :])[None]

    expected = explicit(latent)
    naive = naive_attention(q, latent, weight, SPEC)
    absorbed = absorbed_attention(q, latent[None], torch.tensor([place + 1]), weight, SPEC)
    torch.testing.assert_close(naive, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(absorbed, expected, rtol=1e-9, atol=1e-9)
    if place:
        assert not torch.allclose(explicit(latent[:-1]), expected, rtol=1e-3), "the fault of a place would be seen"


@pytest.mark.parametrize("place", PLACES)
def test_rotary_angles_at_a_place_are_those_of_double_precision(place: int) -> None:
    """To within half a unit in the last place of the angle in float32, as the published models compute it."""
    rope = RopeSpec(theta=50_000.0, dim=12)
    batch = TokenBatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        lengths=(2,),
        starts=(place,),
        slots=(0,),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )
    cos, sin = rotary_table(rope, Segments(batch))
    places = torch.arange(place, place + 2, dtype=torch.float64)[:, None]
    angles = places * torch.tensor([50_000.0 ** (-2 * i / 12) for i in range(6)], dtype=torch.float64)
    bound = (place + 2) * 2.0**-23 + 1e-6  # rounded frequency and rounded product
    assert (cos.double() - angles.cos()).abs().max() <= bound
    assert (sin.double() - angles.sin()).abs().max() <= bound
    wrong = (angles + 1.0).cos()  # a place too far for the fastest pair
    assert (cos.double() - wrong).abs().max() > bound


class LongSequence:
    """One sequence in one slot, read in chunks; `seen` tokens lie in the cache."""

    def __init__(self, num_tokens: int) -> None:
        self.model: Model = LocalRunner.load(NANO, precision="fp32", num_slots=1, max_tokens=8).rank.model
        self.cache = self.new_cache(num_tokens + 1)
        self.ids = torch.randint(0, 2000, (num_tokens,), generator=torch.Generator().manual_seed(1))
        self.seen = 0

    def new_cache(self, max_tokens: int) -> StateCache:
        layers = self.model.layer_range
        return StateCache(self.model.spec, layers, num_slots=1, max_tokens=max_tokens, dtype=torch.float32)

    @torch.inference_mode()
    def read(self, count: int, *, shift: int = 0) -> Tensor:
        """(count, V) logits of the next tokens; with `shift` they are put at a wrong place."""
        batch = TokenBatch(
            token_ids=self.ids[self.seen : self.seen + count],
            lengths=(count,),
            starts=(self.seen + shift,),
            slots=(0,),
            logit_rows=torch.arange(count)[-NUM_SEEN:],
        )
        logits = self.model(batch, cache=self.cache)
        self.seen += count
        return logits

    def state(self) -> tuple[dict[int, Tensor], ...]:
        return tuple({k: v.clone() for k, v in part.items()} for part in (self.cache.conv, self.cache.state))

    def return_to(self, seen: int, state: tuple[dict[int, Tensor], ...]) -> None:
        self.seen = seen
        for part, kept in zip((self.cache.conv, self.cache.state), state, strict=True):
            for layer, tensor in kept.items():
                part[layer].copy_(tensor)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_tokens", "limit"), [(32_768, 32 << 20), (131_072, workspace.WORKSPACE_BYTES)])
def test_chunks_and_single_tokens_agree_far_along_and_memory_grows_by_the_cache(
    num_tokens: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a chunk (expanded keys, chunked recurrence) and token by token (absorbed keys) are two computations.

    Memory: what is resident at most from one mark to the next, beside what was at the first.
    """
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", limit)
    sequence = LongSequence(num_tokens)
    row_bytes = (sequence.new_cache(2000).num_bytes - sequence.new_cache(1000).num_bytes) // 1000
    marks = [mark for mark in (4096, 32_768, 65_536, 131_072) if mark <= num_tokens]
    peaks = {}
    for mark in marks:
        forget_peak()
        began = time.perf_counter()
        while sequence.seen < mark - NUM_SEEN:
            sequence.read(min(CHUNK, mark - NUM_SEEN - sequence.seen))
        read_s = time.perf_counter() - began
        begin, state = sequence.seen, sequence.state()
        together = sequence.read(NUM_SEEN)
        peaks[mark] = peak_resident_bytes()
        sequence.return_to(begin, state)
        one_by_one = torch.cat([sequence.read(1) for _ in range(NUM_SEEN)])
        furthest = float((together - one_by_one).abs().max() / together.abs().max())
        print(
            f"{mark} tokens: logits apart by {furthest:.1e} of the largest, peak {peaks[mark] / 1e6:.0f} MB, "
            f"{read_s:.0f} s since the mark before"
        )
        assert furthest < TOLERANCE
        assert (together.argmax(-1) == one_by_one.argmax(-1)).float().mean() > 0.95
        after = sequence.state()
        sequence.return_to(begin, state)
        misplaced = sequence.read(NUM_SEEN, shift=1)
        assert float((misplaced - together).abs().max() / together.abs().max()) > TOLERANCE, "a wrong place is seen"
        sequence.return_to(begin, state)
        sequence.read(NUM_SEEN)  # the rows that the misplaced tokens overwrote
        sequence.return_to(mark, after)
    grown, more = peaks[marks[-1]] - peaks[marks[0]], marks[-1] - marks[0]
    print(f"grown by {grown / 1e6:.0f} MB from {marks[0]} to {marks[-1]} tokens; the cache has {row_bytes} B a token")
    allowed = more * row_bytes + limit + ALLOCATOR_BYTES
    assert grown < allowed
    mixers = [x.mixer for x in sequence.model.spec.layers if isinstance(x.mixer, MLASpec)]
    at_once = min(4 * x.num_heads * (3 * x.qk_dim + x.nope_dim) + CHUNK * (1 + 4) for x in mixers)
    assert more * (row_bytes + at_once) > allowed, "without groups and blocks it would not pass"
