"""Our load beside other loaders, beside reading the same bytes and nothing else, and beside one step after another.

    python -m venv PEERS && PEERS/bin/pip install -c constraints.txt torch transformers accelerate runai-model-streamer
    python tests/benchmarks/bench_load_peers.py --peers PEERS/bin/python --size 4G --repeats 5 [--folder DIR] [--json F]

A Qwen3-MoE checkpoint in bf16 is generated (random values, one layer a file) that every loader can read, and deleted
afterwards. Each run is a process of its own; imports, and an empty model where one is needed, are made before the clock
starts. The ways take turns in every round, which begins with another of them each time, so that a slow minute of the
machine hits all of them; ratios are of medians of one invocation. Cold: the pages of the files are dropped
(posix_fadvise, until none is left) and what share is left is printed; a host may still cache below the guest. Warm: the
files are read once before.

All ways end with every byte in memory of the process's own, held until the clock has stopped; `own` is how much of the
bytes is (growth of RssAnon). safetensors.torch.load_file alone does not, on a CPU: its tensors are a mapping of the
files, which at most fetches them into the page cache. It is therefore followed by a copy of every tensor, as accelerate
is, which hands out the same mappings; the lines "mapped" have the call alone. `raw` reads with as many threads and as
large calls as ours: into memory that is then owned, as all loaders need it; into huge pages of it, whose first touch is
cheap where the host backs them and dear where a guest's host does so only then; past the page cache ("direct"), which
is the cheaper way once files and weights do not fit into memory together; and ("scratch") over and over into the
same 8 MiB of each thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from qwen3_moe_files import qwen3_moe_config, shards, write_qwen3_moe

MIB = 1 << 20
PTR = ctypes.POINTER(ctypes.c_ubyte)
CALL_BYTES = 8 * MIB  # as workbench.loading.schedule.BATCH_BYTES
MOST_DROPS = 8  # attempts to make the page cache forget the files
THREADS = 4  # as workbench.loading.schedule.READERS
HIDDEN, EXPERT_WIDTH, VOCAB = 2048, 768, 32768

WAYS = {
    "ours": "load_rank, contents checked",
    "ours unchecked": "the same with check=False",
    "raw": "pread by 4 threads into owned memory",
    "raw huge": "the same into huge pages",
    "raw direct": "the same past the page cache, whole pages",
    "raw scratch": "pread by 4 threads into the same 8 MiB each: nothing is kept",
    "safetensors": "load_file and a copy of every tensor",
    "safetensors mapped": "load_file alone: mappings",
    "transformers": "AutoModelForCausalLM.from_pretrained in bf16",
    "accelerate": "load_checkpoint_in_model into an empty model, and a copy of every tensor",
    "accelerate mapped": "load_checkpoint_in_model alone: mappings",
    "runai": "run:ai model streamer, owned tensors",
    "staged serial": "one thread: a piece into a 64 MiB buffer, then copied to its tensor, then the next",
}
PEERS = ("safetensors", "transformers", "accelerate", "runai")
kept: list[Any] = []  # what a run has loaded: giving it back is no part of a load
PAIRS = {"ours tp2/ep2": "ours", "raw of two": "raw"}  # two processes at once


# --- one run, in a process of its own -------------------------------------------------------------------------------


def raw_reads(
    root: Path, rank: int, world: int, *, keep: bool, huge: bool = False, direct: bool = False
) -> Callable[[], int]:
    """Each rank reads an equal run of all bytes."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = [(os.open(path, flags), path.stat().st_size) for path in shards(root)]
    calls = [(fd, at, min(CALL_BYTES, size - at)) for fd, size in files for at in range(0, size, CALL_BYTES)]
    calls = calls[len(calls) * rank // world : len(calls) * (rank + 1) // world]
    own = threading.local()

    def load() -> int:
        for _ in calls if keep else ():
            kept.append(mmap.mmap(-1, CALL_BYTES + 2 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            if huge:
                kept[-1].madvise(mmap.MADV_HUGEPAGE)

        def read(index: int) -> int:
            fd, at, length = calls[index]
            if not keep and not hasattr(own, "scratch"):
                own.scratch = bytearray(CALL_BYTES)
            wanted = -(-length // 4096) * 4096 if direct else length  # the kernel stops at the end of the file
            return os.preadv(fd, [memoryview(kept[index] if keep else own.scratch)[:wanted]], at)

        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(read, range(len(calls))))

    return load


def ours(root: Path, rank: int, world: int, *, check: bool) -> Callable[[], int]:
    from workbench.checkpoint import Checkpoint
    from workbench.loading import load_rank
    from workbench.placement import Layout

    def load() -> int:
        layout = Layout(tp=world, ep=world)
        model, _, stats = load_rank(Checkpoint.open(root), layout, rank, check=check)
        kept.append(model)
        notes.update(
            peak_over_resident=stats.peak_host_bytes - stats.resident_bytes,
            window=stats.window_bytes,
            direct=stats.bytes_direct,
            read_through=stats.bytes_read_through,
            calls=stats.num_reads,
        )
        return stats.bytes_read

    return load


def safetensors_files(root: Path, *, copy: bool) -> Callable[[], int]:
    from safetensors.torch import load_file

    def load() -> int:
        for path in shards(root):
            kept.extend(x.clone() if copy else x for x in load_file(path).values())
        return sum(x.nbytes for x in kept)

    return load


def transformers_model(root: Path) -> Callable[[], int]:
    import torch
    from transformers import AutoModelForCausalLM

    def load() -> int:
        model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16)
        kept.append(model)
        return sum(x.nbytes for x in model.parameters())

    return load


def accelerate_model(root: Path, *, copy: bool) -> Callable[[], int]:
    import torch
    from accelerate import init_empty_weights, load_checkpoint_in_model

    # The published names are one tensor an expert, and transformers fuses them: a module of plain tensors takes them.
    names = json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]
    shapes = json.loads((root / "shapes.json").read_text())
    with init_empty_weights():
        model = torch.nn.Module()
        for name in names:
            at = model
            *path, leaf = name.split(".")
            for step in path:
                if not hasattr(at, step):
                    at.add_module(step, torch.nn.Module())
                at = getattr(at, step)
            at.register_parameter(leaf, torch.nn.Parameter(torch.empty(shapes[name], dtype=torch.bfloat16), False))

    def load() -> int:
        load_checkpoint_in_model(model, str(root), device_map={"": "cpu"}, dtype=torch.bfloat16)
        for parameter in model.parameters() if copy else ():
            parameter.data = parameter.data.clone()
        return sum(x.nbytes for x in model.parameters() if x.device.type != "meta")

    return load


def runai_streamer(root: Path) -> Callable[[], int]:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> int:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in shards(root)])
            kept.extend(x for _, x in streamer.get_tensors())
        return sum(x.nbytes for x in kept)

    return load


def staged_serial(root: Path) -> Callable[[], int]:
    import torch

    def load() -> int:
        stage, total = torch.empty(64 * MIB, dtype=torch.uint8), 0
        for path in shards(root):
            with path.open("rb", buffering=0) as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                header.pop("__metadata__", None)
                for entry in sorted(header.values(), key=lambda x: x["data_offsets"]):
                    begin, end = entry["data_offsets"]
                    kept.append(torch.empty(end - begin, dtype=torch.uint8))
                    for at in range(0, end - begin, len(stage)):
                        piece = stage[: min(len(stage), end - begin - at)]
                        total += file.readinto(piece.numpy().data)
                        kept[-1][at : at + len(piece)] = piece
        return total

    return load


notes: dict[str, int] = {}


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def run_way(way: str, root: Path, rank: int, world: int) -> None:
    """Wait for a line on stdin once all is ready; print one line of JSON."""
    import torch

    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Callable[[], int]]] = {
        "ours": lambda: ours(root, rank, world, check=True),
        "ours unchecked": lambda: ours(root, rank, world, check=False),
        "raw": lambda: raw_reads(root, rank, world, keep=True),
        "raw huge": lambda: raw_reads(root, rank, world, keep=True, huge=True),
        "raw direct": lambda: raw_reads(root, rank, world, keep=True, direct=True),
        "raw scratch": lambda: raw_reads(root, rank, world, keep=False),
        "safetensors": lambda: safetensors_files(root, copy=True),
        "safetensors mapped": lambda: safetensors_files(root, copy=False),
        "transformers": lambda: transformers_model(root),
        "accelerate": lambda: accelerate_model(root, copy=True),
        "accelerate mapped": lambda: accelerate_model(root, copy=False),
        "runai": lambda: runai_streamer(root),
        "staged serial": lambda: staged_serial(root),
    }
    load = makers[way]()
    print("ready", flush=True)
    sys.stdin.readline()
    held = anonymous_bytes()
    began, cpu = time.monotonic(), time.process_time()
    num_bytes = load()
    ended, cpu = time.monotonic(), time.process_time() - cpu
    owned = anonymous_bytes() - held
    result = {"began": began, "ended": ended, "cpu_s": cpu, "bytes": num_bytes, "owned": owned, **notes}
    print(json.dumps(result), flush=True)
    os._exit(0)  # giving the memory back is no part of any load


# --- the whole table ------------------------------------------------------------------------------------------------


def make_checkpoint(root: Path, num_bytes: int) -> None:
    """A folder of about so many bytes."""
    expert_bytes, table_bytes = 2 * 3 * EXPERT_WIDTH * HIDDEN, 2 * 2 * VOCAB * HIDDEN
    layers = max(2, round(num_bytes / 640e6))
    experts = max(4, round((num_bytes - table_bytes) / layers / expert_bytes / 2) * 2)
    config = qwen3_moe_config(
        hidden=HIDDEN, layers=layers, experts=experts, expert_width=EXPERT_WIDTH, heads=16, kv_heads=4, vocab=VOCAB
    )
    write_qwen3_moe(root, config)


def set_cache(root: Path, state: str) -> None:
    """Cold: until the pages are gone; the kernel keeps those that are not written yet, or that somebody still holds."""
    for attempt in range(MOST_DROPS):
        for path in shards(root):
            fd = os.open(path, os.O_RDONLY)
            if state == "cold":
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                buffer = bytearray(CALL_BYTES)
                while os.readv(fd, [buffer]):
                    pass
            os.close(fd)
        if state != "cold" or resident_share(root) == 0:
            return
        time.sleep(0.2 * (attempt + 1))


def resident_share(root: Path) -> float:
    """Share of the files' pages that are in the page cache. Asks the kernel for its list (mincore); a read that must
    not wait says it too, but may itself begin to fetch what it did not find."""
    libc = ctypes.CDLL(None, use_errno=True)
    num_pages = num_resident = 0
    for path in shards(root):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
            whole = np.frombuffer(pages, np.uint8)
            found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
            if libc.mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(pages)), found.ctypes.data_as(PTR)):
                raise OSError(ctypes.get_errno(), "mincore")
            del whole
            num_pages, num_resident = num_pages + len(found), num_resident + int((found & 1).sum())
    return num_resident / num_pages


def start(python: str, way: str, root: Path, rank: int, world: int) -> subprocess.Popen[str]:
    command = [python, __file__, "--way", way, "--folder", str(root), "--rank", str(rank), "--world", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def measure(python: str, way: str, root: Path, state: str, world: int = 1) -> dict[str, float]:
    """One run of a way, on several ranks at once where `world` says so. Raises RuntimeError with what it printed."""
    ranks = [start(python, way, root, rank, world) for rank in range(world)]
    try:
        for each in ranks:
            assert each.stdout is not None
            if each.stdout.readline() != "ready\n":
                raise RuntimeError(f"{way}: {each.communicate()[1].strip().splitlines()[-1:]}")
        set_cache(root, state)
        cached = resident_share(root)
        for each in ranks:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        found = []
        for each in ranks:
            text, errors = each.communicate()
            if not text:
                raise RuntimeError(f"{way}: {errors.strip().splitlines()[-1:]}")
            found.append(json.loads(text.splitlines()[-1]))
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    extra = {
        key: max(x[key] for x in found) for key in found[0] if key not in ("began", "ended", "cpu_s", "bytes", "owned")
    }
    return {
        "seconds": max(x["ended"] for x in found) - min(x["began"] for x in found),
        "cpu_s": sum(x["cpu_s"] for x in found),
        "bytes": sum(x["bytes"] for x in found),
        "owned": sum(x["owned"] for x in found),
        "cached": cached,
        **extra,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1G", help="of the checkpoint: 512M, 4G, 12G")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--peers", default="", help="python of an environment with the other loaders")
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint, or where one of this script lies")
    parser.add_argument("--states", default="cold,warm")
    parser.add_argument("--ways", default=",".join([*WAYS, *PAIRS]))
    parser.add_argument("--json", type=Path, help="append the lines of JSON to this file as well")
    for name in ("--way", "--rank", "--world"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_way(options.way, options.folder, int(options.rank), int(options.world))
        return
    num_bytes = int(options.size[:-1]) * {"M": 1 << 20, "G": 1 << 30}[options.size[-1]]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch) / "checkpoint"
        make_checkpoint(root, num_bytes)
        total = sum(path.stat().st_size for path in shards(root))
        print(f"{total / 1e9:.2f} GB in {len(shards(root))} files under {root}")
        wanted = [way for way in [*WAYS, *PAIRS] if way in options.ways.split(",")]
        runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        missing: set[str] = set()
        for round in range(options.repeats):
            first = round * len(wanted) // options.repeats  # whoever comes after a pause finds memory dear on a guest
            for state in options.states.split(","):
                for way in wanted[first:] + wanted[:first]:
                    is_peer = way in PEERS or way.endswith("mapped")
                    if way in missing or (is_peer and not options.peers):
                        continue
                    python, world = (options.peers if is_peer else sys.executable), (2 if way in PAIRS else 1)
                    try:
                        found = measure(python, PAIRS.get(way, way), root, state, world)
                    except RuntimeError as error:
                        missing.add(way)
                        print(f"left out: {error}", file=sys.stderr)
                        continue
                    runs.setdefault((state, way), []).append(found)
    for state in options.states.split(","):
        show(state, {way: own for (at, way), own in runs.items() if at == state}, total, options.json)


def show(state: str, runs: dict[str, list[dict[str, float]]], total: int, record: Path | None) -> None:
    medians = {way: statistics.median(x["seconds"] for x in own) for way, own in runs.items()}
    print(
        f"\n{state} page cache, medians of {min(map(len, runs.values()))}; x ours: how many times as long as ours takes"
    )
    print(
        f"{'way':<20}{'median s':>9}{'least s':>9}{'cpu s':>7}{'GB/s':>7}"
        f"{'read':>7}{'own':>7}{'cached':>8}{'x ours':>8}"
    )
    for way, own in runs.items():
        median = {key: statistics.median(x[key] for x in own) for key in own[0]}
        base = medians.get("ours tp2/ep2" if way in PAIRS else "ours", float("nan"))
        rate = 0.0 if way.endswith("mapped") else median["bytes"] / medians[way] / 1e9
        print(
            f"{way:<20}{medians[way]:>9.3f}{min(x['seconds'] for x in own):>9.3f}{median['cpu_s']:>7.2f}{rate:>7.2f}"
            f"{median['bytes'] / total:>7.3f}{median['owned'] / total:>7.3f}{median['cached']:>8.2f}"
            f"{medians[way] / base:>8.2f}"
        )
    peers = {way: medians[way] for way in PEERS if way in medians}
    ratios = {
        "over the fastest peer": _ratio(min(peers.values(), default=0), medians.get("ours")),
        "over the fastest peer, unchecked as the peers are": _ratio(
            min(peers.values(), default=0), medians.get("ours unchecked")
        ),
        "over the slowest peer": _ratio(max(peers.values(), default=0), medians.get("ours")),
        "of raw reading into owned memory": _ratio(medians.get("raw"), medians.get("ours")),
        "of raw reading into owned memory, unchecked": _ratio(medians.get("raw"), medians.get("ours unchecked")),
        "of raw reading past the page cache": _ratio(medians.get("raw direct"), medians.get("ours")),
        "of raw reading into scratch": _ratio(medians.get("raw scratch"), medians.get("ours")),
        "two ranks, of raw reading by two": _ratio(medians.get("raw of two"), medians.get("ours tp2/ep2")),
        "over staged serial": _ratio(medians.get("staged serial"), medians.get("ours")),
    }
    for text, ratio in ratios.items():
        if ratio:
            print(f"ours is {ratio:.2f} {text}")
    for way in ("ours", "ours tp2/ep2"):
        if way in runs:
            peak = max(x["peak_over_resident"] for x in runs[way])
            print(
                f"{way}: peak host memory {peak / MIB:.1f} MiB above the weights, window {runs[way][0]['window'] / MIB}"
            )
    line = json.dumps({"benchmark": "load_peers", "state": state, "bytes": total, "ratios": ratios, "runs": runs})
    print(line)
    if record is not None:
        with record.open("a") as file:
            file.write(line + "\n")


def _ratio(other: float | None, own: float | None) -> float | None:
    return other / own if other and own else None


if __name__ == "__main__":
    main()
