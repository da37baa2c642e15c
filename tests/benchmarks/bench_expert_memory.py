"""A model whose experts do not fit: does it answer the same, how often is an expert there, and what does waiting cost?

    python tests/benchmarks/bench_expert_memory.py [--megabytes 1200] [--shares 0.5 0.25 0.125] [--tokens 48]

Writes a model of K3's structure whose experts take `--megabytes` in bf16 (the files hold MXFP4, so every expert that
comes is read and expanded), and answers greedily with a part of the experts held. Every run is a process of its own
whose private memory the system limits (RLIMIT_DATA) to what it has after its imports, the part that is held, and ROOM
for everything else; held in full under the limit of the largest part the model must fail, or the limit proves nothing.
Experts are chosen by the model's own router, or in its place uniformly or by a Zipf law (exponent 1), the same draws in
every run. `time` is the median of the seconds of a decode step, as a multiple of that of the model held in full without
a limit. The last rows are `data/k3-nano` on held-out questions, with the router it was trained with, without a limit.
Leaves with 1 where an answer differs, or the limit does not bite.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from workbench.base import Table
from workbench.checkpoint import Sizes, k3_config, write_checkpoint
from workbench.loading import ExpertMemory
from workbench.nn.expert_pool import ExpertPool, PagedExperts
from workbench.nn.model import Model
from workbench.nn.router import Router
from workbench.serving import Engine, GenerationRequest, LocalRunner, SamplingParams, open_service
from workbench.training.data import picture_exam, scene_image

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "data" / "k3-nano"
WINDOW, ROOM = 64 << 20, 192 << 20  # of the load; everything else that a run may take: two windows, caches, heap
NUM_LAYERS, LATENT, WIDTH = 7, 384, 768  # six of them with experts
EXPERT_BYTES = 3 * LATENT * WIDTH * 2
PROMPT = tuple(range(100, 124))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(**json.loads(args.child))))
        return
    has_failed = False
    rows: list[tuple[object, ...]] = []
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="expert-memory-") as folder:
        root, experts = make_model(Path(folder) / "model", args.megabytes)
        limit = int(max(args.shares) * experts) + ROOM
        refused = run(root=str(root), routing="own", share=None, tokens=args.tokens, limit=limit, experts=experts)
        if "error" not in refused:
            has_failed = True
        print(
            f"held in full under the limit of {limit >> 20} MiB: {refused.get('error', 'it fitted, which it must not')}"
        )
        for routing in ("uniform", "zipf", "own"):
            common = {"root": str(root), "routing": routing, "tokens": args.tokens, "experts": experts}
            whole = run(**common, share=None, limit=None)
            for share in args.shares:
                held = run(**common, share=share, limit=int(share * experts) + ROOM)
                same = held.get("answer") == whole["answer"]
                has_failed |= not same
                records.append({"model": "synthetic", "routing": routing, "share": share, "same": same, **held})
                rows.append(row("synthetic", routing, share, same, held, whole))
    whole = run(root=str(NANO), routing="trained", share=None, tokens=0, limit=None, experts=0)
    for share in args.shares:
        held = run(root=str(NANO), routing="trained", share=share, tokens=0, limit=None, experts=0)
        same = held.get("answer") == whole["answer"]
        has_failed |= not same
        records.append({"model": "k3-nano", "routing": "trained", "share": share, "same": same, **held})
        rows.append(row("k3-nano", "trained", share, same, held, whole))
    columns = (
        "model",
        "routing",
        "experts held",
        "resident",
        "came ahead",
        "waited for",
        "read a step",
        "time",
        "same answer",
    )
    title = f"experts of {experts >> 20} MiB, {args.tokens} tokens, one sequence, cpu"
    print(Table(columns=columns, rows=tuple(rows), title=title).render())
    print(json.dumps({"benchmark": "expert_memory", "device": "cpu", "runs": records}))
    sys.exit(1 if has_failed else 0)


def row(
    model: str, routing: str, share: float, same: bool, held: dict[str, Any], whole: dict[str, Any]
) -> tuple[object, ...]:
    if "error" in held:
        return (model, routing, f"{share:.1%}", held["error"], "", "", "", "", "NO")
    return (
        model,
        routing,
        f"{share:.1%}",
        *(f"{held[key] / held['used']:.1%}" for key in ("resident", "ahead", "waited")),
        f"{held['bytes_read'] / held['steps'] / 2**20:.1f} MiB",
        f"{held['step_s'] / whole['step_s']:.2f}",
        "yes" if same else "NO",
    )


def make_model(root: Path, megabytes: int) -> tuple[Path, int]:
    """The folder, and the bytes that all experts take in bf16."""
    num = max(16, (megabytes << 20) // EXPERT_BYTES // (NUM_LAYERS - 1))
    sizes = Sizes(
        num_layers=NUM_LAYERS,
        full_attn_layers=(4, 7),
        hidden_size=512,
        vocab_size=4096,
        dense_width=1024,
        kda_heads=4,
        kda_head_dim=64,
        mla_heads=4,
        q_rank=192,
        kv_rank=128,
        nope_dim=64,
        rope_dim=32,
        v_dim=64,
        num_experts=num,
        top_k=8,
        expert_width=WIDTH,
        latent_dim=LATENT,
        vision_layers=1,
    )
    write_checkpoint(root, k3_config(sizes=sizes))
    return root, num * (NUM_LAYERS - 1) * EXPERT_BYTES


def run(**options: object) -> dict[str, Any]:
    """`child(**options)` in a process of its own; {"error": ...} where it failed."""
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1][:100] if lines else f"exit {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(root: str, routing: str, share: float | None, tokens: int, limit: int | None, experts: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if limit is not None:
        status = Path("/proc/self/status").read_text()
        taken = int(status.partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (taken + limit, taken + limit))
    if routing == "trained":
        return answer_questions(Path(root), share)
    memory = None if share is None else ExpertMemory(int(share * experts))
    runner = LocalRunner.load(root, precision="bf16", num_slots=1, max_tokens=512, expert_memory=memory)
    model = runner.rank.model
    draw_routes(model, routing)
    engine = Engine(runner)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    generation = engine.submit(GenerationRequest(token_ids=PROMPT, sampling=sampling))
    engine.step_once()  # the prompt, which needs most experts
    pool = pool_of(model)
    before, bytes_before, seconds = pool.use if pool else None, read_of(pool), []
    while True:
        began = time.perf_counter()
        if not engine.step_once():
            break
        seconds.append(time.perf_counter() - began)
    return {
        "answer": [event.token_id for event in generation],
        "step_s": statistics.median(seconds),
        "steps": len(seconds),
        "bytes_read": read_of(pool) - bytes_before,
        **(counts(pool, before) if pool else {}),
    }


def answer_questions(root: Path, share: float | None) -> dict[str, Any]:
    num_experts = 0
    if share is not None:
        probe = LocalRunner.load(root, precision="mxfp4", num_slots=1, expert_memory=ExpertMemory(1 << 40))
        pool = pool_of(probe.rank.model)
        assert pool is not None
        num_experts = pool.num_bytes
    memory = None if share is None else ExpertMemory(int(share * num_experts))
    options = {"precision": "mxfp4", "dtype": torch.float32, "num_slots": 1, "max_tokens": 1024}
    runner = LocalRunner.load(root, **options, expert_memory=memory)
    answers, seconds, steps = [], 0.0, 0
    with open_service(runner, root) as service:
        for item in picture_exam(2, seed=1, kinds=("shape", "count", "word", "position")):
            assert item.scene is not None
            began = time.perf_counter()
            reply = service.infer(item.text, [scene_image(item.scene)], max_tokens=224, temperature=0.0)
            seconds += time.perf_counter() - began
            answers.append(list(reply.token_ids))
            steps += len(reply.token_ids)
    pool = pool_of(runner.rank.model)
    return {
        "answer": answers,
        "step_s": seconds / steps,
        "steps": steps,
        "bytes_read": read_of(pool),
        **(counts(pool, None) if pool else {}),
    }


def draw_routes(model: Model, routing: str) -> None:
    """Put draws in the place of every router's choice; the weights are equal."""
    if routing == "own":
        return
    for name, module in model.named_modules():
        if isinstance(module, Router):
            generator = torch.Generator().manual_seed(int(name.split(".")[1]))
            num = module.spec.num_experts
            order = torch.randperm(num, generator=generator)
            law = torch.ones(num) if routing == "uniform" else 1.0 / torch.arange(1, num + 1)

            def draw(self: Router, x: Tensor, law: Tensor = law, order: Tensor = order, g: Any = generator) -> Any:
                ids = torch.multinomial(law.expand(len(x), -1), self.spec.top_k, generator=g)
                return order[ids], torch.full(ids.shape, 1.0 / self.spec.top_k)

            module.forward = MethodType(draw, module)


def pool_of(model: Model) -> ExpertPool | None:
    return next((module.pool for module in model.modules() if isinstance(module, PagedExperts)), None)


def read_of(pool: ExpertPool | None) -> int:
    return getattr(pool.source, "bytes_read", 0) if pool else 0


def counts(pool: ExpertPool, before: object) -> dict[str, float]:
    use = pool.use if before is None else pool.use - before
    return {
        "used": use.num_used,
        "resident": use.num_resident,
        "ahead": use.num_ahead,
        "waited": use.num_waited,
        "waited_s": round(use.seconds_waited, 3),
    }


if __name__ == "__main__":
    main()
