"""A runner whose model is a few obvious lines, and which checks every promise the engine makes to runners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from workbench.base import WorkbenchError
from workbench.serving.inputs.tokenizer import Tokenizer
from workbench.serving.inputs.tokenizer_files import Vocabulary
from workbench.serving.requests import PlacedImage
from workbench.serving.steps import EncodeImage, RunnerInfo, SampledToken, StepInput


class EchoRunner:
    """Answers with its own prompt, over and over, from what the slot holds; so a leak between slots shows in the text.

    `gate` is called before each step. `bad_images` are keys whose encoding raises, and `bad_token` raises in whatever
    step it is part of; the runner then says whether it `is_intact`, by default not. Image rows are remembered as
    -(1000 * image number) - feature row.
    """

    failure: WorkbenchError | None = None

    def __init__(
        self,
        *,
        dp: int = 1,
        num_slots: int = 3,
        max_tokens: int = 5000,
        has_vision: bool = True,
        gate: Callable[[], None] | None = None,
        is_intact: bool = False,
        bad_images: Collection[str] = (),
        bad_token: int | None = None,
        cache_tokens: int = 0,
    ) -> None:
        self.info = RunnerInfo(
            dp=dp,
            num_slots=num_slots,
            max_tokens=max_tokens,
            cache_tokens=cache_tokens,
            vocab_size=10_000,
            has_vision=has_vision,
            stop_ids=(9999,),
        )
        self.gate = gate
        self.is_intact, self.bad_images, self.bad_token = is_intact, bad_images, bad_token
        self.slots: dict[tuple[int, int], list[int]] = {}
        self.prompt_sizes: dict[tuple[int, int], int] = {}
        self.features: list[dict[str, int]] = [{} for _ in range(dp)]
        self.numbers: dict[str, int] = {}
        self.pages: list[dict[str, list[int]]] = [{} for _ in range(dp)]
        self.calls: list[tuple[str, object]] = []
        self.steps: list[Sequence[StepInput]] = []
        self.threads: set[int] = set()

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        self.threads.add(threading.get_ident())
        for key, patches, grid in images:
            assert key not in self.features[replica], f"{key} encoded twice"
            assert patches.shape[0] == grid[0] * grid[1] * grid[2]
            if key in self.bad_images:
                raise ZeroDivisionError(f"rank 1 cannot encode {key}")
            self.features[replica][key] = patches.shape[0]
            self.numbers.setdefault(key, len(self.numbers) + 1)
            self.calls.append(("encode", (replica, key)))

    def drop_images(self, replica: int, keys: Collection[str]) -> None:
        for key in keys:
            if key.startswith("page-"):
                del self.pages[replica][key]
                continue
            if key in self.bad_images:
                continue
            del self.features[replica][key]
            self.calls.append(("drop", (replica, key)))

    def reset_slot(self, replica: int, slot: int) -> None:
        self.slots[replica, slot] = []
        self.prompt_sizes.pop((replica, slot), None)

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken]]:
        if self.gate is not None:
            self.gate()
        self.threads.add(threading.get_ident())
        assert len(inputs) == self.info.dp
        self.steps.append(inputs)
        out: list[list[SampledToken]] = []
        for replica, sequences in enumerate(inputs):
            assert len({sequence.slot for sequence in sequences}) == len(sequences), "a slot twice in one step"
            tokens = []
            for sequence in sequences:
                held = self.slots[replica, sequence.slot]
                for key in sequence.restore:
                    held.extend(self.pages[replica][key])
                assert sequence.start == len(held), (
                    f"slot {sequence.slot} holds {len(held)}, step says {sequence.start}"
                )
                new = list(sequence.token_ids)
                if self.bad_token in new:
                    held.append(-1)  # half done: whoever goes on from here without a reset is noticed
                    raise ValueError(f"token {self.bad_token} breaks the step")
                for span in sequence.images:
                    assert span.key in self.features[replica], f"{span.key} not encoded"
                    for i in range(span.count):
                        new[span.row + i] = -1000 * self.numbers[span.key] - (span.first + i)
                held.extend(new)
                if sequence.save:
                    assert len(held) % sequence.page_tokens == 0, "a page that ends inside"
                    self.pages[replica][sequence.save] = held[-sequence.page_tokens :]
                if sequence.sample is not None:
                    # A sequence that goes on after a pause comes with what it had generated in a fresh slot.
                    size = self.prompt_sizes.setdefault((replica, sequence.slot), len(held) - sequence.step_idx)
                    assert len(held) == size + sequence.step_idx
                    tokens.append(SampledToken(token_id=abs(held[sequence.step_idx % size]), logprob=-0.5))
            out.append(tokens)
        return out

    def close(self) -> None:
        self.calls.append(("close", None))


class PoolRunner(EchoRunner):
    """Remembers tokens in the rows of a pool, where the steps' tables say, and in a state of fixed size beside them.

    What it answers is read back from these rows. `state` is the sum of all tokens so far, which cannot be cut back.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.rows = [[-1] * self.info.num_rows for _ in range(self.info.dp)]
        self.tables: dict[tuple[int, int], list[int]] = {}
        self.states: dict[tuple[int, int], int] = {}
        self.most_pages = 0  # that the slots of one step had, each page counted once

    def reset_slot(self, replica: int, slot: int) -> None:
        self.tables[replica, slot], self.states[replica, slot] = [], 0
        self.prompt_sizes.pop((replica, slot), None)

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken]]:
        if self.gate is not None:
            self.gate()
        self.steps.append(inputs)
        return [self._step(replica, steps) for replica, steps in enumerate(inputs)]

    def _step(self, replica: int, steps: StepInput) -> list[SampledToken]:
        rows, tokens = self.rows[replica], []
        for step in steps:
            table = self.tables[replica, step.slot]
            assert len(table) == step.first_page, f"slot {step.slot} has {len(table)} pages, not {step.first_page}"
            table += step.pages
        for step in steps:
            place, size = (replica, step.slot), step.pool_page_tokens
            table = self.tables[place]
            at = [page * size + i for page in table for i in range(size)]
            for key in step.restore:
                self.states[place] = self.pages[replica][key][0]
            assert sum(rows[row] for row in at[: step.start]) == self.states[place], "rows and state disagree"
            if self.bad_token in step.token_ids:
                raise ValueError(f"token {self.bad_token} breaks the step")
            others = {page for each in steps if each is not step for page in self.tables[replica, each.slot]}
            for i, token in enumerate(step.token_ids):
                position = step.start + i
                assert table[position // size] not in others, "a page that others read is written"
                rows[at[position]] = token
                self.states[place] += token if i < len(step.token_ids) - len(step.drafts) else 0
            if step.save:
                assert (step.start + len(step.token_ids)) % step.page_tokens == 0, "a page that ends inside"
                self.pages[replica][step.save] = [self.states[place]]
            if step.sample is not None:
                length = step.start + len(step.token_ids) - len(step.drafts)
                size = self.prompt_sizes.setdefault(place, length - step.step_idx)
                tokens.append(SampledToken(token_id=rows[at[step.step_idx % size]], logprob=-0.5))
        held = {page for step in steps for page in self.tables[replica, step.slot]}
        self.most_pages = max(self.most_pages, len(held))
        return tokens


def echo_of(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(num_tokens)]


def placed_image(key: str, row: int, count: int) -> PlacedImage:
    return PlacedImage(
        key=key, patches=np.zeros((count * 4, 3, 2, 2), np.uint8), grid=(1, 2, count * 2), row=row, count=count
    )


class ScriptRunner(EchoRunner):
    """Answers every request with the same ids, one after another; beyond the script with its last id."""

    def __init__(self, script: Sequence[int], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.script = list(script)

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken]]:
        super().step(inputs)
        return [
            [
                SampledToken(token_id=self.script[min(s.step_idx, len(self.script) - 1)], logprob=-0.25)
                for s in steps
                if s.sample is not None
            ]
            for steps in inputs
        ]


MARKER_OFFSETS = {
    "[PAD]": -1, "[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|media_pad|>": 5,
    "<|sep|>": 6, "<|media_begin|>": 7, "<|media_content|>": 8, "<|media_end|>": 9,
}  # fmt: skip


def byte_tokenizer(vocab_size: int = 512, first_marker: int = 500) -> Tokenizer:
    """Ids 0 to 255 are bytes, the next ones words like "w300 ", and eleven around `first_marker` are structure.

    `first_marker` is the id of [BOS]; the ids of end and image tokens then fit the tiny K3 checkpoints.
    """
    pieces = {i: bytes([i]) if i < 256 else f"w{i} ".encode() for i in range(vocab_size)}
    reserved = {first_marker + offset: name for name, offset in MARKER_OFFSETS.items()}
    for i in reserved:
        del pieces[i]
    return Tokenizer(
        Vocabulary(
            encode=lambda text: list(text.encode()),
            pieces=pieces,
            reserved=reserved,
            size=vocab_size,
            source=Path("byte tokenizer"),
        )
    )
