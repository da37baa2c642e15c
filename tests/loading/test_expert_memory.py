"""Models whose experts are not all held: the same answers to the bit, from the same bytes of the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from workbench.base import LoadError, RequestFailedError
from workbench.checkpoint import Checkpoint
from workbench.loading import ExpertMemory, load_rank, load_sharded_weights
from workbench.nn.expert_pool import ExpertPool, PagedExperts
from workbench.nn.model import Model
from workbench.nn.moe import Experts
from workbench.placement import Layout
from workbench.serving import Engine, GenerationRequest, LocalRunner, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TINY, FAMILIES = ROOT / "data" / "k3-tiny", ROOT / "tests" / "golden" / "families"
PROMPTS = ([5, 9, 77, 31, 4, 18], [200, 3, 3, 41])


def greedy(runner: LocalRunner, prompt: list[int], num_tokens: int) -> list[int]:
    engine = Engine(runner)
    generation = engine.submit(
        GenerationRequest(token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0))
    )
    while engine.step_once():
        pass
    return [event.token_id for event in generation]


def pool_of(model: Model) -> ExpertPool:
    return next(module.pool for module in model.modules() if isinstance(module, PagedExperts))


def expert_bytes(root: Path, precision: str) -> int:
    loaded = load_sharded_weights(root, precision=precision, device="cpu", expert_memory=ExpertMemory(1 << 40))
    return pool_of(loaded.model).expert_bytes


@pytest.mark.parametrize(("precision", "num_slots"), [("fp32", 1), ("mxfp4", 7), ("fp8", 1000)])
def test_answers_are_those_of_the_model_held_in_full(precision: str, num_slots: int) -> None:
    options = {"precision": precision, "dtype": torch.float32, "num_slots": 1, "max_tokens": 64}
    whole = LocalRunner.load(TINY, **options)
    memory = ExpertMemory(num_slots * expert_bytes(TINY, precision))
    paged = LocalRunner.load(TINY, **options, expert_memory=memory)
    pool = pool_of(paged.rank.model)
    for prompt in PROMPTS:
        assert greedy(paged, prompt, 12) == greedy(whole, prompt, 12)
    assert pool.use.num_used > pool.use.num_resident
    assert (pool.use.hit_rate > 0.5) == (num_slots == 1000)


def stacks(model: Model) -> dict[int, Experts]:
    return {int(name.split(".")[1]): module for name, module in model.named_modules() if isinstance(module, Experts)}


@pytest.mark.parametrize(
    ("root", "layout", "precision"),
    [
        (TINY, "tp2xep2", "mxfp4"),
        (TINY, "tp2", "bf16"),  # expanded, and each expert cut by columns
        (TINY, "tp1", "int8"),  # expanded and encoded anew
        (FAMILIES / "gpt_oss", "tp1", "bf16"),  # rows of two matrices in turns, and biases
        (FAMILIES / "qwen3_moe", "tp2", "bf16"),
        (FAMILIES / "llama4", "tp2", "bf16"),  # stored (inputs, outputs), gate and up in one
    ],
    ids=lambda x: x.name if isinstance(x, Path) else str(x),
)
def test_every_expert_of_a_rank_comes_as_an_ordinary_load_brings_it(root: Path, layout: str, precision: str) -> None:
    checkpoint, cut = Checkpoint.open(root), Layout.parse(layout)
    rank = cut.world_size - 1
    whole, _, stats = load_rank(checkpoint, cut, rank, precision=precision)
    paged, ledger, rest = load_rank(checkpoint, cut, rank, precision=precision, expert_memory=ExpertMemory(1 << 40))
    pool = pool_of(paged)
    num_experts = 0
    for layer, stack in stacks(whole).items():
        for expert in range(stack.num_local):
            parts = pool.source.request((layer, expert)).result()
            num_experts += 1
            for name in ("w1", "w2", "w3"):
                store = getattr(stack, name)
                own = {**store.parts, **({} if store.bias is None else {"bias": store.bias})}
                for leaf, rows in own.items():
                    assert torch.equal(parts[f"{name}.{leaf}"], rows[expert]), (layer, expert, name, leaf)
    assert num_experts == pool.num_slots, "all of the rank fit"
    assert ledger.summary()["rows"] == ledger.summary()["rows_written"]
    assert rest.read_ratio == 1
    assert rest.bytes_read + pool.source.bytes_read == stats.bytes_read, (
        "experts are read as often as they are asked for"
    )
    assert rest.resident_bytes == stats.resident_bytes


def test_a_file_that_is_cut_after_the_load_is_named_and_read_again_when_it_is_whole(tmp_path: Path) -> None:
    root = tmp_path / "model"
    shutil.copytree(TINY, root)
    one = expert_bytes(root, "mxfp4")
    runner = LocalRunner.load(root, precision="mxfp4", num_slots=1, max_tokens=64, expert_memory=ExpertMemory(3 * one))
    expected = greedy(runner, PROMPTS[0], 3)
    shards = {path: path.read_bytes() for path in root.glob("*.safetensors")}
    for path, data in shards.items():
        with path.open("r+b") as file:
            file.truncate(len(data) // 3)
    with pytest.raises(RequestFailedError, match=r"LoadError: .*safetensors: file ends at byte"):
        greedy(runner, PROMPTS[1], 3)
    for path, data in shards.items():
        with path.open("r+b") as file:
            file.write(data)
    assert greedy(runner, PROMPTS[0], 3) == expected


def test_memory_that_makes_no_sense_is_refused_and_a_model_without_experts_needs_none() -> None:
    with pytest.raises(LoadError, match="memory for experts"):
        ExpertMemory(0)
    with pytest.raises(LoadError, match="holds none"):
        load_sharded_weights(TINY, device="cpu", expert_memory=ExpertMemory(10))
    loaded = load_sharded_weights(FAMILIES / "llama", device="cpu", expert_memory=ExpertMemory(10))
    assert not any(isinstance(module, PagedExperts) for module in loaded.model.modules())
