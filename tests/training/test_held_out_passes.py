"""Held-out questions as passes: read again, they give the tokens that were answered, and only those are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.align import Budget, sweep_precisions
from workbench.base import ConfigError
from workbench.exam.held_out import held_out_passes
from workbench.loading import load_sharded_weights
from workbench.serving.inputs import read_tokenizer
from workbench.training.answers import answered_batches
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import fact_exam, picture_exam

TESTS = Path(__file__).resolve().parents[1]
TINY = TESTS.parent / "data" / "k3-tiny"


@torch.inference_mode()
def test_an_answered_pass_gives_the_tokens_of_the_answers_again() -> None:
    loaded = load_sharded_weights(TINY, precision="fp32", device="cpu")
    items = [*picture_exam(1, kinds=("colour", "count")), *fact_exam(read_facts())[:1]]
    tokenizer = read_tokenizer(TINY, loaded.spec)
    # Two batches, the second of one question without a picture.
    batches = answered_batches(loaded.model, loaded.ctx, tokenizer, items, max_new_tokens=5, batch_size=2)
    assert [len(batch.lengths) for batch in batches] == [2, 1]
    assert [batch.image_rows is not None for batch in batches] == [True, False]
    for batch in batches:
        ends = torch.tensor(batch.lengths).cumsum(0) - 1
        rows = batch.logit_rows
        chosen = loaded.model(batch).argmax(-1)
        inside = ~torch.isin(rows, ends)  # after the last row of a sequence stands the answer's last token, not here
        assert len(rows) == 5 * len(batch.lengths)
        assert torch.equal(chosen[inside], batch.token_ids[rows[inside] + 1])
        assert not torch.equal(chosen[inside], batch.token_ids[rows[inside]]), "rows one off do not agree"
    swept = sweep_precisions(loaded.model, batches, Budget(ratio=0.99), formats=("int4",))
    assert swept.positions == 15
    # Only the experts' columns make whole groups of 32; everything else stays plain, and counts.
    held = {x.group: x for x in swept.sensitivities}
    assert set(held) == {"routed experts"}
    saved = held["routed experts"].bytes_saved
    assert saved > 0
    assert [mix.bytes_total for mix in (*swept.uniform, swept.mixes[0], swept.mixes[-1])] == [
        swept.bytes_bf16 - saved,
        swept.bytes_bf16,
        swept.bytes_bf16 - saved,
    ]


def test_a_model_without_pictures_has_no_such_questions() -> None:
    with pytest.raises(ConfigError, match="takes none"):
        held_out_passes(TESTS / "golden" / "families" / "llama", 1)
