"""The published `openai` client, `aiperf` and `guidellm` against `workbench serve`, their figures beside our own.

    python tests/benchmarks/bench_clients.py --cache DIR [--setup-only]
    python tests/benchmarks/bench_clients.py --cache DIR [--model data/k3-nano] [--kinds text image] [--rounds 3]
                                             [--requests 48] [--concurrency 4]

Each client gets an environment of its own in `--cache` (about 3 GB in all, from the package index that pip is set up
for), made once: the first command does that alone. Nothing else is fetched; where a client wants a tokenizer it gets
that of the model's folder.

`workbench profile URL` and the clients send the very same questions, drawn by `plan_load`, the same number at once, for
answers of the same length (`ignore_eos`; `skip_special_tokens` off, so that every token is text and all of them count
alike). They take turns, and the figures are medians over the rounds of each run's mean: seconds to the first token,
between tokens, and requests a second. Meanwhile the server's own /metrics must grow by the same requests and tokens
for all. Each figure is also taken as a part of what they grew by in the same run (requests: of concurrency over mean
time of a request), since a slow minute of the machine is in both. "agrees" compares the figures themselves with ours,
"beside the server" these parts with ours.

A client whose figures are not within `--within` (5 %) of ours, or that asked something else, ends the run with 1.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base import Table, human
from workbench.profiling import ClosedLoop, Kind, Lengths, Load, plan_load
from workbench.profiling.targets import Question

ROOT = Path(__file__).resolve().parents[2]
# Packages in the order of their installation: torch first and alone, as in the Makefile.
CLIENTS = {
    "openai": (("openai==3.57.0",),),
    "aiperf": (("aiperf==0.13.0",),),
    "guidellm": (("torch==2.13.0",), ("guidellm==0.8.1",)),
}
OURS = "workbench profile"
FIELDS = {"ignore_eos": True, "skip_special_tokens": False, "temperature": 0}
READY_S, RUN_S = 300, 900


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Means of one run: seconds, seconds, requests a second."""

    first_s: float
    gap_s: float
    per_s: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the server's own figures grew by in one run; times are means."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    first_s: float
    gap_s: float
    request_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the clients' environments")
    parser.add_argument("--setup-only", action="store_true")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--kinds", nargs="+", choices=("text", "image"), default=["text", "image"])
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--image-size", default="112x112", metavar="WxH")
    parser.add_argument("--within", type=float, default=0.05)
    args = parser.parse_args()
    for client in args.clients:
        set_up(client, args.cache)
    if args.setup_only:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended, too
    is_good, records = True, []
    with tempfile.TemporaryDirectory() as scratch, served(args.model, Path(scratch) / "server.log") as url:
        for kind in args.kinds:
            bench = Bench(args, kind, url, Path(scratch))
            record = bench.run()
            records.append(record)
            is_good &= record["is_good"]
    print(json.dumps({"benchmark": "clients", "kinds": records}))
    sys.exit(0 if is_good else 1)


def set_up(client: str, cache: Path) -> None:
    """The environment of a client, unless it is there already."""
    folder, wanted = cache / client, json.dumps(CLIENTS[client])
    done = folder / "installed.json"
    if done.is_file() and done.read_text("utf-8") == wanted:
        return
    print(f"making the environment of {client} in {folder}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    for packages in CLIENTS[client]:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
    done.write_text(wanted, "utf-8")


@contextlib.contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """`workbench serve` in a process of its own, at the address it says."""
    command = [sys.executable, "-m", "workbench.cli", "serve", str(model), "--port", "0", "--json"]
    with log.open("wb") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            assert server.stdout is not None
            lines = ""
            while not lines.rstrip().endswith("}"):  # an object over several lines
                line = server.stdout.readline()
                if not line:
                    raise SystemExit(f"the server did not start:\n{log.read_text('utf-8')[-2000:]}")
                lines += line
            yield json.loads(lines)["url"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


class Bench:
    """One kind of question, asked by everybody."""

    def __init__(self, args: argparse.Namespace, kind: str, url: str, scratch: Path) -> None:
        self.args, self.kind, self.url, self.scratch = args, kind, url, scratch / kind
        self.scratch.mkdir()
        self.model = args.model.resolve().name
        width, height = map(int, args.image_size.split("x"))
        lengths = {
            "prompt": Lengths(least=args.prompt_tokens, most=args.prompt_tokens),
            "answer": Lengths(least=args.answer_tokens, most=args.answer_tokens),
        }
        each = Kind(name=kind, num_images=int(kind == "image"), image_size=(width, height), **lengths)
        load = Load(
            arrivals=ClosedLoop(concurrency=args.concurrency), num_requests=args.requests, kinds=(each,), num_warm_up=0
        )
        self.before: dict[str, float] = {}
        self.questions = [planned.question for planned in plan_load(load).requests]
        self.ask = {OURS: self.ours, "openai": self.openai, "aiperf": self.aiperf, "guidellm": self.guidellm}
        self.tokenizer = self.scratch / "tokenizer"
        self.tokenizer.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.model / name, self.tokenizer)

    def run(self) -> dict[str, Any]:
        everyone = [OURS, *self.args.clients]
        self.ours()  # the first requests load code
        runs: dict[str, list[tuple[Figures, Seen]]] = {name: [] for name in everyone}
        for number in range(self.args.rounds):
            for name in everyone:
                self.before = self.metrics()
                figures = self.ask[name]()
                seen = difference(self.before, self.metrics())
                runs[name].append((figures, seen))
                print(f"{self.kind}, round {number + 1}, {name}: {figures} {seen}", file=sys.stderr, flush=True)
        return self.told(runs)

    def told(self, runs: dict[str, list[tuple[Figures, Seen]]]) -> dict[str, Any]:
        median = {
            name: [statistics.median(getattr(f, field) for f, _ in each) for field in Figures.__dataclass_fields__]
            for name, each in runs.items()
        }
        asked = {
            name: {(seen.requests, seen.prompt_tokens, seen.completion_tokens) for _, seen in each}
            for name, each in runs.items()
        }
        parts = {
            name: [statistics.median(part) for part in zip(*self.parts(each), strict=True)]
            for name, each in runs.items()
        }
        wanted = (self.args.requests, self.args.requests * self.args.answer_tokens)
        rows, is_good = [], True
        for name in runs:
            ratios, beside = (
                [theirs / ours for theirs, ours in zip(each[name], each[OURS], strict=True)] for each in (median, parts)
            )
            is_same = asked[name] == asked[OURS] and all((n, c) == wanted for n, _, c in asked[name])
            is_near, is_near_beside = (
                all(abs(ratio - 1) <= self.args.within for ratio in each) for each in (ratios, beside)
            )
            is_good &= is_same and is_near
            first, gap, rate = median[name]
            rows.append(
                (
                    name,
                    human(first, "s"),
                    human(gap, "s"),
                    f"{rate:.3g}/s",
                    " ".join(f"{ratio:.3f}" for ratio in ratios),
                    "yes" if is_near else "NO",
                    " ".join(f"{part:.3f}" for part in parts[name]),
                    "yes" if is_near_beside else "NO",
                    "yes" if is_same else f"NO: {sorted(asked[name])}",
                )
            )
        columns = ("client", "first token", "between", "requests", "of ours", "agrees", "of the server's",
                   "beside the server", "same questions")  # fmt: skip
        title = (
            f"{self.kind}: {self.args.requests} requests, {self.args.concurrency} at once, {self.args.rounds} rounds"
        )
        print(Table(title=title, columns=columns, rows=tuple(rows)).render(), flush=True)
        return {
            "kind": self.kind,
            "medians": median,
            "parts": parts,
            "server": {name: [vars_of(seen) for _, seen in each] for name, each in runs.items()},
            "is_good": is_good,
        }

    def parts(self, runs: list[tuple[Figures, Seen]]) -> list[tuple[float, float, float]]:
        """Of each run, its figures over those of the server meanwhile."""
        return [
            (
                figures.first_s / seen.first_s,
                figures.gap_s / seen.gap_s,
                figures.per_s * seen.request_s / self.args.concurrency,
            )
            for figures, seen in runs
        ]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def ours(self) -> Figures:
        command = [
            sys.executable, "-m", "workbench.cli", "profile", self.url, "--json", "--warm-up", "0",
            "--requests", str(self.args.requests), "--concurrency", str(self.args.concurrency),
            "--prompt-tokens", str(self.args.prompt_tokens), "--answer-tokens", str(self.args.answer_tokens),
            "--image-share", str(int(self.kind == "image")), "--image-size", self.args.image_size,
            "--ignore-eos", "--field", "skip_special_tokens=false", "--record", str(self.scratch / "profile.jsonl"),
        ]  # fmt: skip
        load = json.loads(output_of(command))["load"]
        summary = load["summary"]
        first, gap = summary["first_token_s"]["mean"], summary["per_token_s"]["mean"]
        return Figures(first_s=first, gap_s=gap, per_s=load["answered_per_s"])

    def openai(self) -> Figures:
        questions = [
            {
                "content": [
                    *({"type": "image_url", "image_url": {"url": uri}} for uri in uris_of(question)),
                    {"type": "text", "text": question.text},
                ],
                "max_tokens": question.max_tokens,
            }
            for question in self.questions
        ]
        load: dict[str, Any] = {
            "url": self.url,
            "model": self.model,
            "concurrency": self.args.concurrency,
            "questions": questions,
        }
        load["fields"] = {name: value for name, value in FIELDS.items() if name != "temperature"}
        command = [self.python("openai"), str(Path(__file__).with_name("openai_load.py"))]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_of(command)
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(json.dumps(load) + "\n")
            client.stdin.flush()
            if client.stdout.readline().strip() != "ready":
                raise SystemExit(f"the openai client ended with {client.wait(60)}")
            self.before = self.metrics()  # without what it asked to load its code
            told = json.loads(client.communicate("go\n", timeout=RUN_S)[0])
        first, gap, _ = zip(*told["requests"], strict=True)
        return Figures(first_s=statistics.fmean(first), gap_s=statistics.fmean(gap), per_s=len(first) / told["seconds"])

    def aiperf(self) -> Figures:
        file, out = self.scratch / "aiperf.jsonl", self.scratch / "aiperf"
        entries = []
        for question in self.questions:
            entry: dict[str, Any] = {"text": question.text, "output_length": question.max_tokens}
            if question.images:
                entry["images"] = list(uris_of(question))
            entries.append(entry)
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
        command = [
            str(self.args.cache / "aiperf" / "bin" / "aiperf"), "profile", "--model", self.model,
            "--url", self.url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(self.tokenizer), "--use-server-token-count",
            "--input-file", str(file), "--custom-dataset-type", "single_turn",
            "--dataset-sampling-strategy", "sequential",
            "--request-count", str(self.args.requests), "--concurrency", str(self.args.concurrency),
            "--extra-inputs", json.dumps(FIELDS), "--output-artifact-dir", str(out),
            "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", "--workers-max", "1",
        ]  # fmt: skip
        output_of(command)
        told = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text("utf-8"))
        shutil.rmtree(out)
        return Figures(
            first_s=told["time_to_first_token"]["avg"] / 1e3,
            gap_s=told["inter_token_latency"]["avg"] / 1e3,
            per_s=told["request_throughput"]["avg"],
        )

    def guidellm(self) -> Figures:
        file, out = self.scratch / "guidellm.jsonl", self.scratch / "guidellm.json"
        entries = []
        for question in self.questions:
            entry: dict[str, Any] = {"prompt": question.text, "output_tokens_count": question.max_tokens}
            for uri in uris_of(question):
                entry["image"] = {"type": "image_url", "image": uri}
            entries.append(entry)
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
        backend = {
            "kind": "openai_http", "target": self.url, "model": self.model, "request_format": "/v1/chat/completions",
            "extras": {"body": FIELDS},
        }  # fmt: skip
        command = [
            str(self.args.cache / "guidellm" / "bin" / "guidellm"), "run", "--backend", json.dumps(backend),
            "--profile", json.dumps({"kind": "concurrent", "streams": [self.args.concurrency]}),
            "--constraint", json.dumps({"kind": "max_requests", "count": self.args.requests}),
            "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(self.tokenizer)}),
            "--data", json.dumps({"kind": "json_file", "path": str(file)}),
            "--output", json.dumps({"kind": "json", "path": str(out)}), "--disable-console",
        ]  # fmt: skip
        output_of(command)
        metrics = json.loads(out.read_text("utf-8"))["benchmarks"][0]["metrics"]
        return Figures(
            first_s=metrics["time_to_first_token_ms"]["successful"]["mean"] / 1e3,
            gap_s=metrics["inter_token_latency_ms"]["successful"]["mean"] / 1e3,
            per_s=metrics["requests_per_second"]["successful"]["mean"],
        )

    def python(self, client: str) -> str:
        return str(self.args.cache / client / "bin" / "python")


def difference(before: dict[str, float], after: dict[str, float]) -> Seen:
    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def mean(name: str, labels: str = "") -> float:
        return grown(f"workbench_{name}_sum{labels}") / max(1.0, grown(f"workbench_{name}_count{labels}"))

    return Seen(
        requests=round(grown("workbench_first_token_seconds_count")),
        prompt_tokens=round(grown("workbench_prompt_tokens_total")),
        completion_tokens=round(grown("workbench_completion_tokens_total")),
        first_s=mean("first_token_seconds"),
        gap_s=mean("token_gap_seconds"),
        request_s=mean("http_request_seconds", '{route="/v1/chat/completions"}'),
    )


def uris_of(question: Question) -> list[str]:
    return [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in question.images]


def environment_of(command: list[str]) -> dict[str, str]:
    """Ours without what leads a client into this environment, or keeps it from a tokenizer in a folder."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    own = {"PYTHONPATH": str(ROOT)} if command[0] == sys.executable else {}
    return {**environment, "HF_HUB_DISABLE_TELEMETRY": "1", **own}


def output_of(command: list[str]) -> str:
    """What a command prints. Ends the run with its last lines where it fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S, env=environment_of(command)
    )
    if done.returncode:
        tail = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)[-3000:]
        raise SystemExit(f"{' '.join(command[:4])} … ended with {done.returncode}:\n{tail}")
    return done.stdout


def vars_of(seen: Seen) -> dict[str, float]:
    return {name: getattr(seen, name) for name in seen.__dataclass_fields__}


if __name__ == "__main__":
    main()
