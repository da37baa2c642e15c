"""One accelerator, bare torch: golden parity, load, decode and prefill against what the device was just measured to do.

Every speed is a ratio to a rate measured in the same run: bytes touched per decoded token over copy bandwidth, prefill
arithmetic over the matmul rate, load over the raw read of the same files. The script exits with 1 if a check fails;
speeds are figures, not checks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from workbench.base import Table, human
from workbench.checkpoint import Checkpoint, k3_config, write_checkpoint
from workbench.loading import LoadedModel, load_sharded_weights
from workbench.nn import StateCache, TokenBatch
from workbench.spec import ModelCounts, count_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "k3-tiny-a"
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32, "U8": torch.uint8}

# Sizes of the model that speeds are measured on: K3's shapes cut down, with matrices that still keep a device busy.
LARGE = {
    "num_layers": 8, "hidden_size": 3072, "vocab_size": 32768, "dense_width": 8192, "kda_heads": 24,
    "kda_head_dim": 128,
    "mla_heads": 24, "q_rank": 768, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "num_experts": 64,
    "top_k": 8, "expert_width": 1536, "latent_dim": 1536, "num_shared": 2,
}  # fmt: skip
SMALL = {
    "num_layers": 8, "hidden_size": 640, "vocab_size": 4096, "dense_width": 1536, "kda_heads": 8, "kda_head_dim": 64,
    "mla_heads": 8, "q_rank": 192, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "v_dim": 64, "num_experts": 16,
    "top_k": 4, "expert_width": 384, "latent_dim": 320, "num_shared": 2,
}  # fmt: skip


class Report:
    """Rows of (check, value, threshold, verdict) and figures; a figure has no verdict."""

    def __init__(self) -> None:
        self.checks: list[dict[str, object]] = []
        self.figures: list[dict[str, object]] = []

    def check(self, name: str, passed: bool, value: str, threshold: str) -> None:
        self.checks.append({"check": name, "value": value, "threshold": threshold, "passed": passed})
        print(f"{'pass' if passed else 'FAIL'}  {name}: {value} ({threshold})", flush=True)

    def figure(self, name: str, value: str, against: str, ratio: float | None = None) -> None:
        self.figures.append({"figure": name, "value": value, "against": against, "ratio": ratio})
        print(f"      {name}: {value}; {against}" + (f"; ratio {ratio:.3f}" if ratio is not None else ""), flush=True)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(row["passed"] for row in self.checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/device"))
    parser.add_argument("--size", choices=("auto", "small", "large"), default="auto")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.set_float32_matmul_precision("highest")  # parity in fp32 means fp32
    began, report = time.perf_counter(), Report()
    environment = describe(device)
    print(json.dumps(environment), flush=True)

    golden_text(report, device)
    golden_vision(report, device)
    rates = {"copy": copy_rate(device), "matmul": matmul_rate(device)}
    report.figure("copy bandwidth", human(rates["copy"], "B/s"), "read and write of 256 MiB, p10 of windows")
    report.figure("matmul rate, bf16", human(rates["matmul"], "FLOP/s"), "square product, p10 of windows")
    is_large = args.size == "large" or (args.size == "auto" and device.type != "cpu")
    folder = Path(tempfile.mkdtemp(prefix="workbench-device-"))
    try:
        start = time.perf_counter()
        write_checkpoint(folder / "model", k3_config(**(LARGE if is_large else SMALL)))
        print(f"      checkpoint written in {time.perf_counter() - start:.0f} s", flush=True)
        for precision in ("mxfp4", "bf16"):
            speeds(report, folder / "model", precision, device, rates)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    print()
    print(Table(columns=("check", "value", "threshold", "passed"), rows=rows(report.checks)).render())
    print()
    print(Table(columns=("figure", "value", "against", "ratio"), rows=rows(report.figures)).render())
    record = {
        **environment,
        "passed": report.passed,
        "checks": report.checks,
        "figures": report.figures,
        "seconds": round(time.perf_counter() - began, 1),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "device.json").write_text(json.dumps(record, indent=1) + "\n")
    print()
    print(json.dumps(record))
    return 0 if report.passed else 1


def rows(records: list[dict[str, object]]) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(record.values()) for record in records)


def describe(device: torch.device) -> dict[str, object]:
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        name = str(getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "name": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A small safetensors file in memory; the library of that name may be absent on a bare machine."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        raw = torch.frombuffer(bytearray(blob[begin:end]), dtype=TORCH_DTYPES[entry["dtype"]])
        tensors[name] = raw.view(entry["shape"])
    return tensors


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()


@torch.inference_mode()
def golden_text(report: Report, device: torch.device) -> None:
    expected = read_tensors(GOLDEN / "golden" / "text_fp32.safetensors")
    facts = json.loads((GOLDEN / "golden" / "text.json").read_text())["prompts"]
    prompts = [facts[name]["token_ids"] for name in facts]
    # An accelerator adds up in another order and has other exp and tanh: ten times the CPU's limit.
    limit = 2e-5 if device.type == "cpu" else 2e-4
    loaded = load_sharded_weights(GOLDEN, precision="fp32", device=device)
    batch = TokenBatch.whole(prompts, all_logits=True, device=device)
    logits = loaded.model(batch, cache=cache_for(loaded, len(prompts), 256)).split(batch.lengths)
    worst = max(
        relative(x[-len(expected[f"{p}.logits"]) :], expected[f"{p}.logits"])
        for p, x in zip(facts, logits, strict=True)
    )
    report.check("golden logits, fp32", worst <= limit, f"relative {worst:.1e}", f"at most {limit:.0e}")
    for precision, key in (("fp32", "greedy_fp32"), ("mxfp4", "greedy_bf16")):
        if precision != "fp32":
            loaded = load_sharded_weights(GOLDEN, precision=precision, device=device)
        tokens = greedy(loaded, prompts, 16)
        wanted = [facts[name][key] for name in facts]
        equal = sum(
            a == b for found, want in zip(tokens, wanted, strict=True) for a, b in zip(found, want, strict=True)
        )
        total = sum(map(len, wanted))
        # In bf16 another device may part where two logits are closer than its rounding; after that all tokens differ.
        needed = total if precision == "fp32" else total * 3 // 4
        report.check(f"golden greedy tokens, {precision}", equal >= needed, f"{equal} of {total}", f"at least {needed}")


@torch.inference_mode()
def golden_vision(report: Report, device: torch.device) -> None:
    expected = read_tensors(GOLDEN / "golden" / "vision_fp32.safetensors")
    images = json.loads((GOLDEN / "golden" / "vision.json").read_text())["images"]
    loaded = load_sharded_weights(GOLDEN, precision="fp32", device=device)
    limit, worst, count = (2e-5 if device.type == "cpu" else 2e-4), 0.0, 0
    for name, facts in images.items():
        if f"{name}.patches_u8" not in expected:
            continue
        patches = (expected[f"{name}.patches_u8"].float() / 255 - 0.5) / 0.5
        features = loaded.model.encode_images(patches.to(device), [tuple(facts["grid_thw"])])
        worst, count = max(worst, relative(features, expected[f"{name}.projector"])), count + 1
    report.check(
        f"golden picture features of {count} pictures", worst <= limit, f"relative {worst:.1e}", f"≤ {limit:.0e}"
    )


def cache_for(loaded: LoadedModel, num_slots: int, max_tokens: int) -> StateCache:
    model = loaded.model
    return StateCache(
        loaded.spec,
        model.layer_range,
        num_slots=num_slots,
        max_tokens=max_tokens,
        dtype=model.dtype,
        device=loaded.ctx.device,
    )


def greedy(loaded: LoadedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    device = loaded.ctx.device
    cache = cache_for(loaded, len(prompts), max(map(len, prompts)) + count)
    logits = loaded.model(TokenBatch.whole(prompts, device=device), cache=cache)
    chosen: list[list[int]] = [[] for _ in prompts]
    for step in range(count):
        tokens = logits.argmax(-1)
        for row, token in zip(chosen, tokens.tolist(), strict=True):
            row.append(token)
        logits = loaded.model(decode_batch(tokens, [len(p) + step for p in prompts]), cache=cache)
    return chosen


def decode_batch(tokens: Tensor, starts: list[int]) -> TokenBatch:
    count = len(starts)
    return TokenBatch(
        token_ids=tokens,
        lengths=(1,) * count,
        starts=tuple(starts),
        slots=tuple(range(count)),
        logit_rows=torch.arange(count, device=tokens.device),
    )


def seconds_of(
    run: Callable[[], object], device: torch.device, *, budget_s: float = 3.0, at_most: int = 30
) -> list[float]:
    """Times of single runs, synchronised, after one for warm-up; ends at `at_most` runs or after `budget_s`."""

    def once() -> float:
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        return time.perf_counter() - start

    once()
    times: list[float] = []
    while not times or (sum(times) < budget_s and len(times) < at_most):
        times.append(once())
    return times


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def fast(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def copy_rate(device: torch.device) -> float:
    """B/s, a copied byte counted as one read and one write."""
    source = torch.ones(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fast(seconds_of(lambda: target.copy_(source), device))


def matmul_rate(device: torch.device) -> float:
    size = 2048 if device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / fast(seconds_of(lambda: a @ a, device))


def allocated(device: torch.device) -> int | None:
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device)


@torch.inference_mode()
def speeds(report: Report, root: Path, precision: str, device: torch.device, rates: dict[str, float]) -> None:
    counts = count_model(Checkpoint.open(root).spec)
    raw_s, num_bytes = raw_read(root)
    before = allocated(device)
    loaded = load_sharded_weights(root, precision=precision, device=device)
    stats = loaded.stats
    report.figure(
        f"load, {precision}", human(stats.bytes_read / stats.seconds, "B/s"),
        f"raw read of the same {human(num_bytes, 'B')} in one thread, warm: {human(num_bytes / raw_s, 'B/s')}",
        (num_bytes / stats.seconds) / (num_bytes / raw_s),
    )  # fmt: skip
    report.check(
        f"bytes read, {precision}", stats.read_ratio <= 1.02, f"{stats.read_ratio:.4f}", "at most 1.02 of assigned"
    )
    host_limit = stats.window_bytes + (stats.resident_bytes if device.type == "cpu" else 64 << 20)
    report.check(
        f"host memory while loading, {precision}", stats.peak_host_bytes <= host_limit,
        human(stats.peak_host_bytes, "B"), f"at most {human(host_limit, 'B')}",
    )  # fmt: skip

    length, max_tokens = (2048, 4096) if device.type != "cpu" else (256, 1024)
    cache = cache_for(loaded, 16, max_tokens)
    if before is not None:
        held = (allocated(device) or 0) - before
        ledger = stats.resident_bytes + cache.num_bytes
        off = abs(held - ledger) / ledger
        report.check(
            f"memory ledger, {precision}", off <= 0.02,
            f"{human(held, 'B')} for {human(stats.resident_bytes, 'B')} weights, {human(cache.num_bytes, 'B')} cache",
            "within 2 %",
        )  # fmt: skip
    prefill(report, loaded, cache, counts, precision, rates["matmul"], length)
    for num in (1, 16):
        decode(report, loaded, cache, counts, precision, rates["copy"], num, length)
    del loaded, cache
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def raw_read(root: Path) -> tuple[float, int]:
    """Seconds of the fastest of two passes over the shards with one thread into one buffer, and their bytes."""
    buffer, passes, total = bytearray(16 << 20), [], 0
    for _ in range(2):
        start, total = time.perf_counter(), 0
        for path in sorted(root.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
        passes.append(time.perf_counter() - start)
    return min(passes), total


def prefill(
    report: Report,
    loaded: LoadedModel,
    cache: StateCache,
    counts: ModelCounts,
    precision: str,
    rate: float,
    length: int,
) -> None:
    device = loaded.ctx.device
    ids = torch.arange(length, device=device) % loaded.spec.vocab_size
    batch = TokenBatch.whole([ids.tolist()], device=device)
    times = seconds_of(lambda: loaded.model(batch, cache=cache), device, budget_s=6, at_most=8)
    median = statistics.median(times)
    head = loaded.spec.vocab_size * loaded.spec.hidden_size  # only the last row goes through the head
    flops = 2 * (counts.active_params - head) * length + 2 * head
    report.figure(
        f"prefill of {length} tokens, {precision}", f"{length / median:,.0f} tokens/s",
        f"weight products alone are {human(flops, 'FLOP')}; measured matmul rate {human(rate, 'FLOP/s')}",
        flops / median / rate,
    )  # fmt: skip


def decode(
    report: Report, loaded: LoadedModel, cache: StateCache, counts: ModelCounts, precision: str, rate: float,
    num: int, length: int,
) -> None:  # fmt: skip
    device, spec = loaded.ctx.device, loaded.spec
    batch = decode_batch(torch.arange(num, device=device) + 3, [length] * num)
    chosen: list[Tensor] = []
    routers = [m for name, m in loaded.model.named_modules() if name.endswith("ffn.router")]
    hooks = [m.register_forward_hook(lambda _m, _i, out: chosen.append(out[0].unique())) for m in routers]
    loaded.model(batch, cache=cache)
    for hook in hooks:
        hook.remove()
    median = statistics.median(seconds_of(lambda: loaded.model(batch, cache=cache), device, budget_s=6))
    moe = next(layer.ffn for layer in spec.layers if layer.is_moe)
    experts = sum(
        p.nbytes for name, p in [*loaded.model.named_parameters(), *loaded.model.named_buffers()] if ".experts." in name
    )
    vision = sum(
        p.nbytes for name, p in loaded.model.named_parameters() if name.startswith(("vision.", "projector.", "embed."))
    )
    hit = sum(len(x) for x in chosen)
    per_expert = experts / (moe.num_experts * len(routers))
    states = cache.num_bytes / cache.num_slots * num  # latents count whole: an upper bound of what is read
    touched = loaded.stats.resident_bytes - vision - experts + hit * per_expert + states
    report.figure(
        f"decode, batch {num}, {precision}", f"{num / median:,.1f} tokens/s, {median * 1e3:.2f} ms a step",
        f"{hit} experts hit, {human(touched, 'B')} touched; measured copy bandwidth {human(rate, 'B/s')}",
        touched / median / rate,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
