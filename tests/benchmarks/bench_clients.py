"""The published `openai` client, `aiperf` and `guidellm` against `workbench serve`, their figures beside our own.

    python tests/benchmarks/bench_clients.py --cache DIR [--setup-only]
    python tests/benchmarks/bench_clients.py --cache DIR [--model data/k3-nano] [--kinds text image] [--rounds 3]
                                             [--requests 48] [--concurrency 4]

Each client gets an environment of its own in `--cache` (about 3 GB in all, from the package index that pip is set up
for), made once: the first command does that alone. Nothing else is fetched; where a client wants a tokenizer it gets
that of the model's folder.

`workbench profile URL` and the clients send the very same questions, drawn by `plan_load`, the same number at once, for
answers of the same length (`ignore_eos`; `skip_special_tokens` off, so that every token is text and all of them count
alike). They take turns, and all of them ask through a proxy (`wire_record.py`) that writes down when each request came
and when each event of its answer passed. So what a client says of its requests is held against what passed of the very
same ones, by the client's own definition, and no two runs are compared:

    told           what the client says: seconds to the first token, between tokens, requests a second; means of a run
    on the wire    the same of the same requests, worked out from the proxy's times by the client's definition
    in the server  the first token by the server's log, from queueing on; its lines are matched with requests by ids

A definition that differs from ours is worked out by ours as well, which shows what the difference in words is worth.
Beside that the server's /metrics must grow by the same requests and tokens for all, and the questions on the wire must
be those that were drawn. A client whose figures are not within `--within` (5 %) of those on the wire, or that asked
something else, ends the run with 1. What a client does by its clock before it sends, or once it has read, is in the
difference.
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
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire_record import Wire, WireRequest

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
FIGURES = {"first_s": "first token", "gap_s": "between tokens", "per_s": "requests"}
COUNTERS = ("first_token_seconds_count", "prompt_tokens_total", "completion_tokens_total")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Means of one run: seconds, seconds, requests a second."""

    first_s: float
    gap_s: float
    per_s: float


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a client means by its figures, in words, and whether its time between tokens is that of all gaps together
    (`is_pooled`) or the mean of what each request has. Read in the clients' sources."""

    first: str
    gap: str
    per_s: str
    is_pooled: bool = False


DEFINITIONS = {
    OURS: Definition(
        first="from before it connects to the first event with text; the event that only has a role does not count",
        gap="last event with text less the first, over the tokens that came after the first event; mean of requests",
        per_s="requests over the time from the first one to the end of the last",
    ),
    "openai": Definition(
        first="from before `create` to the first chunk whose content is not empty",
        gap="last such chunk less the first, over usage.completion_tokens - 1; mean of requests",
        per_s="requests over the time from the first one to the end of the last",
    ),
    "aiperf": Definition(
        first="`time_to_first_token`: from the start of the request to the first response that has content",
        gap="`inter_token_latency`: last response with content less the first, over usage's tokens - 1; requests' mean",
        per_s="`request_throughput`: requests over the time from the first one's start to the last one's end",
    ),
    "guidellm": Definition(
        first="`time_to_first_token_ms`: from the start of the request to the first line that adds to the answer",
        gap="`inter_token_latency_ms`: last such line less the first, over tokens - 1; weighted by gaps, so pooled",
        per_s="requests over the time from the first one's start to the last one's end, by its records; its own "
        "`requests_per_second` is a mean over time of the rate at which requests end, in a window that is longer",
        is_pooled=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One client's questions, once: what it says, what passed, what the server's log says of the same, and what the
    server's counters grew by: (requests, prompt tokens, completion tokens)."""

    told: Figures
    wire: Figures
    by_ours: Figures
    server_first_s: float
    grown: tuple[int, int, int]
    is_asked: bool


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
    for name in (OURS, *args.clients):
        own = DEFINITIONS[name]
        print(f"{name}\n    first token   {own.first}\n    between       {own.gap}\n    requests      {own.per_s}")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        with served(args.model, log) as server, Wire(server) as wire:
            for kind in args.kinds:
                record = Bench(args, kind, server, wire, log).run()
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

    def __init__(self, args: argparse.Namespace, kind: str, server: str, wire: Wire, log: Path) -> None:
        self.args, self.kind, self.server, self.wire, self.log = args, kind, server, wire, log
        self.url, self.scratch = wire.url, log.parent / kind
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
        runs: dict[str, list[Run]] = {name: [] for name in everyone}
        for number in range(self.args.rounds):
            for name in everyone:
                self.begin()
                told = self.ask[name]()
                run = self.ended(name, told)
                runs[name].append(run)
                print(f"{self.kind}, round {number + 1}, {name}: {run}", file=sys.stderr, flush=True)
        return self.told(runs)

    def begin(self) -> None:
        self.before = self.metrics()
        self.wire.take()

    def ended(self, name: str, told: Figures) -> Run:
        time.sleep(0.5)  # a client may be done at the last event, before the stream has ended
        records = self.wire.take()
        after = self.metrics()
        grown = tuple(
            round(after.get(f"workbench_{each}", 0.0) - self.before.get(f"workbench_{each}", 0.0)) for each in COUNTERS
        )
        wanted = Counter(question.text for question in self.questions)
        asked = Counter(text for each in records for text in wanted if json.dumps(text)[1:-1] in each.content)
        first_s = first_tokens_of(self.log)
        return Run(
            told=told,
            wire=figures_of(records, DEFINITIONS[name]),
            by_ours=figures_of(records, DEFINITIONS[OURS]),
            server_first_s=statistics.fmean(first_s[each.request_id] for each in records),
            grown=grown,  # type: ignore[arg-type]
            is_asked=asked == wanted and len(records) == len(self.questions),
        )

    def told(self, runs: dict[str, list[Run]]) -> dict[str, Any]:
        rows, is_good, record = [], True, {}
        wanted = (self.args.requests, runs[OURS][0].grown[1], self.args.requests * self.args.answer_tokens)
        for name, own in runs.items():
            is_same = all(run.is_asked and run.grown == wanted for run in own)
            is_good &= is_same
            for field, words in FIGURES.items():
                told, wire, by_ours = (
                    [getattr(figures, field) for figures in each]
                    for each in ([x.told for x in own], [x.wire for x in own], [x.by_ours for x in own])
                )
                ratio = statistics.median(a / b for a, b in zip(told, wire, strict=True))
                worth = statistics.median(a / b for a, b in zip(wire, by_ours, strict=True))
                is_near = abs(ratio - 1) <= self.args.within
                is_good &= is_near
                record.setdefault(name, {})[field] = {"told": told, "wire": wire, "ratio": ratio, "by_ours": worth}
                rows.append(
                    (
                        name if field == "first_s" else "",
                        words,
                        _cell(field, statistics.median(told)),
                        _cell(field, statistics.median(wire)),
                        f"{ratio:.3f}",
                        "yes" if is_near else "NO",
                        f"{worth:.3f}",
                        human(statistics.median(x.server_first_s for x in own), "s") if field == "first_s" else None,
                        ("yes" if is_same else f"NO: {[x.grown for x in own]}") if field == "first_s" else None,
                    )
                )
        columns = ("client", "figure", "told", "on the wire", "told / wire", "agrees", "of our definition",
                   "in the server", "same questions")  # fmt: skip
        title = (
            f"{self.kind}: {self.args.requests} requests, {self.args.concurrency} at once, medians of "
            f"{self.args.rounds} rounds"
        )
        print(Table(title=title, columns=columns, rows=tuple(rows)).render(), flush=True)
        return {"kind": self.kind, "clients": record, "is_good": is_good}

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.server.removesuffix('/v1')}/metrics", timeout=60) as response:
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
            self.begin()  # without what it asked to load its code
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
        told = json.loads(out.read_text("utf-8"))["benchmarks"][0]
        metrics, requests = told["metrics"], told["requests"]["successful"]
        seconds = max(each["request_end_time"] for each in requests) - min(
            each["request_start_time"] for each in requests
        )
        return Figures(
            first_s=metrics["time_to_first_token_ms"]["successful"]["mean"] / 1e3,
            gap_s=metrics["inter_token_latency_ms"]["successful"]["mean"] / 1e3,
            per_s=len(requests) / seconds,
        )

    def python(self, client: str) -> str:
        return str(self.args.cache / client / "bin" / "python")


def figures_of(records: Sequence[WireRequest], definition: Definition) -> Figures:
    """Of what passed."""
    answered = [each for each in records if each.text_times and each.tokens > 1]
    spans = [(each.text_times[-1] - each.text_times[0], each.tokens - 1) for each in answered]
    if definition.is_pooled:
        gap_s = sum(span for span, _ in spans) / sum(gaps for _, gaps in spans)
    else:
        gap_s = statistics.fmean(span / gaps for span, gaps in spans)
    return Figures(
        first_s=statistics.fmean(each.text_times[0] - each.began_s for each in answered),
        gap_s=gap_s,
        per_s=len(answered) / (max(each.ended_s for each in records) - min(each.began_s for each in records)),
    )


def first_tokens_of(log: Path) -> dict[str, float]:
    """Seconds from queueing to the first token by request id, of the server's log."""
    found: dict[str, float] = {}
    for line in log.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            entry = json.loads(line)
            if isinstance(entry.get("first_token_s"), float):
                found[str(entry["request_id"])] = entry["first_token_s"]
    return found


def _cell(field: str, value: float) -> str:
    return f"{value:.3g}/s" if field == "per_s" else human(value, "s")


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


if __name__ == "__main__":
    main()
