"""Trace folders: what an implementation computed on a few prompts, in files that any framework can write.

    trace.json              {"format": "workbench-trace", "version": 1, "dtype": "bfloat16", "layout": "tp2",
                             "producer": {"framework": "...", "model": "...", ...},
                             "prompts": [{"label": "p0", "token_ids": [1, 2, 3]}, ...],
                             "ranks": ["rank0.safetensors", "rank1.safetensors"]}
    rank0.safetensors       "0/model.layers.3.self_attn:out"      prompt number / module and side, or
                            "0/L3.attn_out"                       prompt number / trace name

Rows are the tokens of the prompt, (T, ...) or (1, T, ...). `layout` is left out, or "tp1", for one rank; with several
each file holds what its rank held, and pieces are put together as the placement table says. A folder comes from
someone else: nothing in it is believed before it is checked, and every complaint is a TraceError. `docs/capture.md` has
the thirty lines that write one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workbench.align.alignment import ForeignTrace
from workbench.align.merge import merge_ranks
from workbench.align.parity import ParityPrompt
from workbench.align.reference import Trace
from workbench.align.sources import in_trace_form
from workbench.align.trace import layer_of, short_name
from workbench.align.trace_names import foreign_names
from workbench.base import CheckpointError, LayoutError, TraceError, WorkbenchError, printable, short_repr
from workbench.checkpoint.header import open_regular, read_header
from workbench.checkpoint.strict_json import parse_json
from workbench.placement import Layout, check_layout
from workbench.spec import ModelSpec

__all__ = ["FORMAT", "TraceFolder", "read_trace_folder", "write_trace_folder"]

FORMAT, VERSION = "workbench-trace", 1
MAX_DESCRIPTION_BYTES, MAX_PROMPTS, MAX_TOKENS, MAX_RANKS = 64 << 20, 1024, 1 << 20, 1024
MAX_TENSOR_BYTES = 64 << 30  # of one rank; a trace of a large model is a few layers of it
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_STORED = ("BF16", "F16", "F32", "F64", "I64", "I32")
_NOT_BY_TOKEN = ("kda_state", "kda_conv")


@dataclass(frozen=True, kw_only=True)
class TraceFolder:
    """A trace that was read: its prompts, and for each the tensors that are ours to compare, in trace names."""

    root: Path
    prompts: tuple[ParityPrompt, ...]
    traces: tuple[Trace, ...]
    dtype: torch.dtype
    layout: Layout
    producer: Mapping[str, str]
    unknown: tuple[str, ...] = field(default=())  # captured names that stand for nothing we compare

    @property
    def label(self) -> str:
        made_by = " ".join(printable(self.producer[key]) for key in ("framework", "model") if key in self.producer)
        return f"trace {self.root.name}" + (f" ({made_by})" if made_by else "")

    def as_reference(self) -> ForeignTrace:
        return ForeignTrace(traces=self.traces, dtype=self.dtype, label=self.label)


def read_trace_folder(root: Path | str, spec: ModelSpec) -> TraceFolder:
    """The trace in folder `root`, of a model that is `spec`. Raises TraceError, naming the file and the tensor."""
    root = Path(root)
    record = _description(root)
    layout = _layout(record, root, spec)
    prompts = _prompts(record, root, spec)
    files = _files(record, root, layout)
    dtype = record.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise TraceError("unknown dtype", where=root, found=short_repr(dtype), expected=", ".join(_DTYPES))
    by_rank: list[list[Trace]] = []
    unknown: set[str] = set()
    for path in files:
        traces, others = _read_rank(path, prompts, spec)
        by_rank.append(traces)
        unknown |= others
    merged = []
    for n in range(len(prompts)):
        pieces = {rank: traces[n] for rank, traces in enumerate(by_rank)}
        try:
            merged.append(merge_ranks(_without_repeats(pieces), spec, layout))
        except (WorkbenchError, RuntimeError) as error:  # pieces that cannot be joined
            raise TraceError(f"prompt {n}: ranks do not fit together: {error}", where=root) from None
    for n, trace in enumerate(merged):
        if not trace:
            raise TraceError(
                f"prompt {n}: no captured tensor is one of this model",
                where=root,
                found=short_repr(sorted(unknown)[:3]),
                expected="names such as 0/model.layers.0.self_attn:out or 0/L0.attn_out",
            )
        _check(trace, len(prompts[n].token_ids), n, root, spec)
        _check_probe(trace, n, root)
    producer = record.get("producer", {})
    if not isinstance(producer, dict) or not all(isinstance(x, str) for pair in producer.items() for x in pair):
        raise TraceError("producer is not a table of texts", where=root, found=short_repr(producer))
    return TraceFolder(
        root=root,
        prompts=tuple(prompts),
        traces=tuple(merged),
        dtype=_DTYPES[dtype],
        layout=layout,
        producer=producer,
        unknown=tuple(sorted(unknown)),
    )


def write_trace_folder(
    root: Path | str,
    prompts: Sequence[ParityPrompt],
    traces: Sequence[Mapping[str, Tensor]],
    *,
    dtype: torch.dtype,
    producer: Mapping[str, str] | None = None,
) -> Path:
    """Write whole (merged) traces, in trace names. Raises TraceError where the folder already holds a trace."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    if (root / "trace.json").exists():
        raise TraceError("folder already holds a trace", where=root, next_step="Choose an empty folder")
    tensors = {
        f"{n}/{name}": value.detach().cpu().contiguous()
        for n, trace in enumerate(traces)
        for name, value in trace.items()
    }
    save_file(tensors, root / "rank0.safetensors")
    record = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "layout": "tp1",
        "producer": dict(producer or {"framework": f"torch {torch.__version__}"}),
        "prompts": [{"label": prompt.label, "token_ids": list(prompt.token_ids)} for prompt in prompts],
        "ranks": ["rank0.safetensors"],
    }
    partial = root / "trace.json.partial"
    partial.write_text(json.dumps(record) + "\n")
    os.replace(partial, root / "trace.json")  # last: a folder with a description is whole
    return root


def _description(root: Path) -> dict[str, Any]:
    path = root / "trace.json"
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            if size > MAX_DESCRIPTION_BYTES:
                raise TraceError(
                    "description is too long",
                    where=path,
                    found=f"{size} bytes",
                    expected=f"up to {MAX_DESCRIPTION_BYTES}",
                )
            raw = os.pread(fd, size, 0)
        finally:
            os.close(fd)
        record = parse_json(raw)
    except CheckpointError as error:
        raise TraceError(error.message, where=path, next_step="docs/capture.md tells how to write a trace") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"not readable: {short_repr(str(error))}", where=path) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise TraceError("not a trace", where=path, expected=f'a JSON object with "format": "{FORMAT}"')
    if record.get("version") != VERSION:
        raise TraceError("another version", where=path, found=short_repr(record.get("version")), expected=VERSION)
    return record


def _layout(record: Mapping[str, Any], root: Path, spec: ModelSpec) -> Layout:
    text = record.get("layout", "tp1")
    if not isinstance(text, str) or len(text) > 64:
        raise TraceError("layout is no text", where=root, found=short_repr(text), expected='such as "tp2"')
    try:
        layout = Layout.parse(text)
        check_layout(spec, layout)
    except LayoutError as error:
        raise TraceError(f"layout: {error}", where=root) from None
    if layout.dp > 1 or layout.world_size > MAX_RANKS:
        raise TraceError(
            "a trace is of one replica", where=root, found=str(layout), expected=f"dp=1 and up to {MAX_RANKS} ranks"
        )
    return layout


def _prompts(record: Mapping[str, Any], root: Path, spec: ModelSpec) -> list[ParityPrompt]:
    listed = record.get("prompts")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_PROMPTS:
        raise TraceError("prompts is no list of prompts", where=root, expected=f"1 to {MAX_PROMPTS} of them")
    prompts = []
    for n, item in enumerate(listed):
        ids = item.get("token_ids") if isinstance(item, dict) else None
        if not isinstance(ids, list) or not 0 < len(ids) <= MAX_TOKENS:
            raise TraceError(f"prompt {n} has no token_ids", where=root, expected=f"1 to {MAX_TOKENS} numbers")
        if not all(type(x) is int and 0 <= x < spec.vocab_size for x in ids):
            bad = next(x for x in ids if type(x) is not int or not 0 <= x < spec.vocab_size)
            raise TraceError(
                f"prompt {n} holds a token that the model does not have",
                where=root,
                found=short_repr(bad),
                expected=f"0 to {spec.vocab_size - 1}",
            )
        label = item.get("label", f"p{n}")
        if not isinstance(label, str):
            raise TraceError(f"the label of prompt {n} is no text", where=root, found=short_repr(label))
        prompts.append(ParityPrompt(label=printable(label)[:80], token_ids=tuple(ids)))
    return prompts


def _files(record: Mapping[str, Any], root: Path, layout: Layout) -> list[Path]:
    names = record.get("ranks")
    if not isinstance(names, list) or len(names) != layout.world_size or len(set(map(repr, names))) != len(names):
        raise TraceError(
            "ranks does not list one file for each rank",
            where=root,
            found=short_repr(names),
            expected=f"{layout.world_size} different names for layout {layout}",
        )
    for name in names:
        # A name, not a path: nothing outside the folder is opened.
        if (
            not isinstance(name, str)
            or not name
            or name != os.path.basename(name)
            or name in (".", "..")
            or "\0" in name
        ):
            raise TraceError("not a plain file name", where=root, found=short_repr(name))
    return [root / name for name in names]


def _read_rank(path: Path, prompts: Sequence[ParityPrompt], spec: ModelSpec) -> tuple[list[Trace], set[str]]:
    """One rank's tensors by prompt, in trace names, and the names that stand for none."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        raise TraceError(error.message, where=path) from None
    for problem in header.problems:
        raise TraceError(problem.message, where=path)
    if header.tensor_bytes > MAX_TENSOR_BYTES:
        raise TraceError("too large", where=path, found=f"{header.tensor_bytes} bytes", expected=f"{MAX_TENSOR_BYTES}")
    by_prompt: list[dict[str, str]] = [{} for _ in prompts]
    for key, entry in header.entries.items():
        number, slash, name = key.partition("/")
        if not slash or not number.isdecimal() or len(number) > 6 or int(number) >= len(prompts):
            raise TraceError(
                "a tensor belongs to no prompt",
                where=path,
                found=short_repr(key),
                expected=f"0/ to {len(prompts) - 1}/",
            )
        if name in by_prompt[int(number)]:
            raise TraceError("a tensor stands twice", where=path, found=short_repr(key))
        by_prompt[int(number)][name] = key
        if entry.dtype not in _STORED and name in foreign_names([name], spec):
            raise TraceError(f"{key}: dtype", where=path, found=entry.dtype, expected=", ".join(_STORED))
    traces: list[Trace] = []
    unknown: set[str] = set()
    try:
        with safe_open(path, "pt") as handle:
            for keys in by_prompt:
                ours = foreign_names(keys, spec)
                unknown |= keys.keys() - ours.keys()
                trace: Trace = {}
                for name, ours_name in ours.items():
                    value = handle.get_tensor(keys[name])
                    length = len(prompts[len(traces)].token_ids)
                    is_batch_of_one = value.ndim > 2 and value.shape[0] == 1 and value.shape[1] == length
                    if is_batch_of_one and (length > 1 or name != ours_name) and ours_name not in _NOT_BY_TOKEN:
                        value = value.squeeze(0)
                    trace[ours_name] = in_trace_form(ours_name, value, spec) if name != ours_name else value
                traces.append(trace)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"not readable: {short_repr(str(error))}", where=path) from None
    return traces, unknown


def _without_repeats(pieces: Mapping[int, Trace]) -> dict[int, Trace]:
    """A module that reduces its own output hands the whole sum to every rank: one of them counts."""
    if len(pieces) == 1:
        return dict(pieces)
    result = {rank: dict(trace) for rank, trace in pieces.items()}
    for name in result[0]:
        if short_name(name) in ("moe_routed_out", "moe_shared_out"):
            values = [trace[name] for trace in result.values() if name in trace]
            if all(x.shape == values[0].shape and torch.allclose(x.double(), values[0].double()) for x in values[1:]):
                for rank in list(result)[1:]:
                    if name in result[rank]:
                        result[rank][name] = torch.zeros_like(values[0])
    return result


def _check(trace: Trace, num_tokens: int, prompt: int, root: Path, spec: ModelSpec) -> None:
    """Shapes that can be known: rows are tokens, choices are expert numbers."""
    for name, value in trace.items():
        last = short_name(name)
        if last in _NOT_BY_TOKEN:
            continue
        if value.ndim < 2 or value.shape[0] != num_tokens:
            raise TraceError(
                f"prompt {prompt}, {name}: rows are not the prompt's tokens",
                where=root,
                found=tuple(value.shape),
                expected=f"({num_tokens}, ...)",
            )
        if last == "topk_idx" and value.is_floating_point():
            raise TraceError(f"prompt {prompt}, {name}: expert numbers are not whole", where=root, found=value.dtype)
        if last != "topk_idx" and not value.is_floating_point():
            raise TraceError(f"prompt {prompt}, {name}: values are no floats", where=root, found=value.dtype)
        width = {"attn_in": spec.hidden_size, "mlp_in": spec.hidden_size, "logits": spec.vocab_size}.get(last)
        if width is not None and value.shape[-1] != width:
            raise TraceError(f"prompt {prompt}, {name}: width", where=root, found=value.shape[-1], expected=width)


def _check_probe(trace: Trace, prompt: int, root: Path) -> None:
    """Two layers never make the same values to the last bit: a probe that kept a buffer, and not what was in it, shows
    what the last layer left there for all of them, as does one that ran while a graph was recorded."""
    seen: dict[tuple[str, int], str] = {}
    for name, value in trace.items():
        is_told_apart = value.is_floating_point() and value.numel() > 1 and bool(value.any())
        if layer_of(name) is None or short_name(name) == "topk_w" or not is_told_apart:  # weights of one expert are 1
            continue
        key = short_name(name), hash(value.contiguous().view(torch.uint8).numpy().tobytes())
        if (other := seen.setdefault(key, name)) != name:
            raise TraceError(
                f"prompt {prompt}: {other} and {name} are the same to the last bit",
                where=root,
                expected="values of its own for each layer",
                next_step="Copy what a module made before the next one runs, outside of any recorded graph",
            )
