"""One operator tried on one device: is it there, does it run there, are its numbers right, how long does it take.

Runs inside the probe's child process. Inputs are made from the use's shapes, dtypes and arguments; the operator is
looked up when it is tried, not when this module is imported, so a plug-in may register its own in between.

Whether it runs *there*: the dispatch table tells which operators go to a backend's catch-all fallback. A kernel that
fetches its inputs and computes on the host needs host memory for them, which the profiler sees. What cannot be seen is
a kernel that computes on the host in memory of its own, behind torch's back; its rate gives it away.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.base import error_text

__all__ = ["measure_copy", "try_operator"]

MAX_BYTES = 4 << 30  # of one call's tensors
MAX_REFERENCE_FLOPS = 2e9  # beyond this only some rows of the result are compared
REFERENCE_ROWS = 8
WINDOW_S, NUM_WINDOWS, MAX_TIMING_S = 1e-3, 5, 0.5
COPY_BYTES = 64 << 20
COLD_BYTES = 128 << 20  # beyond the last cache of most devices: what was used so long ago is read from memory again
MAX_TURNS = 1024  # copies of one weight: of the smallest ones the time to fetch them is none of the call's
LARGEST_APPROXIMATION = 0.05  # relative error beyond which numbers are wrong, not approximate
# Positive arguments only, or the reference is NaN.
POSITIVE = {"rsqrt", "sqrt", "log", "reciprocal", "pow", "div"}
# Integer arguments that must lie within a dimension of the first tensor.
INDEXED = {"index", "index_select", "gather", "embedding", "index_put", "index_copy", "index_add", "index_fill"}
INDEXED |= {"scatter", "take"}
# Host memory that a call may take without computing there: tables of sizes, numbers, an index or two.
LEAST_HOST_BYTES, HOST_SHARE = 64, 0.5
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class Trial:
    """`use` as `OperatorUse.to_json` gives it. `weights_between`: bytes of weights that a pass reads between two calls
    with the same ones, so that these are as cold as in a pass when the call is timed; 0 times them as they lie."""

    def __init__(self, use: Mapping[str, Any], device: str, *, is_timed: bool = True, weights_between: int = 0) -> None:
        self.use, self.device, self.is_timed = use, torch.device(device), is_timed
        self.weights_between = weights_between
        self.name: str = use["name"]
        self.base = self.name.split(".")[1].removesuffix("_")
        self.args, self.kwargs = json.loads(use["call"])

    def outcome(self) -> dict[str, object]:
        """Status, detail, error, tolerance and seconds; raises nothing that the device raises."""
        try:
            func = _find(self.name)
        except (AttributeError, RuntimeError) as error:
            return {"status": "missing", "detail": f"no operator {self.name}: {error}"}
        size = self.num_bytes()
        if size > MAX_BYTES:
            return {"status": "not tried", "detail": f"{size:,} bytes of tensors in one call, limit {MAX_BYTES:,}"}
        with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            host = self.inputs()
            try:
                found, how = self.run(func, host)
            except NotImplementedError as error:
                return {"status": "missing", "detail": _first_line(error) or error_text(error)}
            except Exception as error:  # whatever a device raises is its answer
                return {"status": "failed", "detail": _first_line(error_text(error))}
            result = self.compare(func, host, found)
            if result["status"] == "ran" and (how or (how := _warned(caught))):
                result |= {"status": "fell back", "detail": how}
            if self.is_timed and result["status"] not in ("failed", "missing"):
                result["seconds"] = self.time(func, host)
        return result

    def num_bytes(self) -> int:
        """What one call's tensors take; a gather's source counts whole, though little of it is read."""
        pairs = zip(self.use["input_dtypes"], self.use["input_shapes"], strict=True)
        given = sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in pairs)
        return int(max(given + self.use["bytes_written"], self.use["bytes_read"] + self.use["bytes_written"]))

    def inputs(self) -> list[Tensor]:
        """Tensors on the host, with the strides that the call had."""
        generator = torch.Generator().manual_seed(7)
        strides: dict[int, list[int]] = {}
        _walk([self.args, self.kwargs], lambda entry: strides.update({entry["t"]: entry.get("stride")}))
        made: list[Tensor] = []
        for i, (shape, dtype) in enumerate(zip(self.use["input_shapes"], self.use["input_dtypes"], strict=True)):
            first = made[0] if made else None
            stride = strides.get(i)
            extent = math.prod(shape)
            if stride is not None and extent:
                extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            values = self.values(getattr(torch, dtype), extent, first, generator, i)
            made.append(values.view(shape) if stride is None else values.as_strided(shape, stride))
        return made

    def values(
        self, dtype: torch.dtype, count: int, first: Tensor | None, generator: torch.Generator, place: int
    ) -> Tensor:
        if dtype == torch.bool:
            return torch.rand(count, generator=generator) < 0.5
        if dtype.is_complex:
            return torch.randn(count, dtype=dtype, generator=generator)
        if dtype.is_floating_point:
            drawn = torch.randn(count, generator=generator)
            return (drawn.abs() + 0.5 if self.base in POSITIVE else drawn).to(dtype)
        if first is not None and self.base in INDEXED and dtype in (torch.int64, torch.int32):
            # Without doubles where there is room: which of two writes wins is nobody's promise.
            if self.base == "index_put":
                return self.distinct_places(first, count, place).to(dtype)
            limit = self.index_limit(first, place)
            order = torch.randperm(limit, generator=generator)
            return order.repeat(-(-count // max(1, limit)))[:count].to(dtype)
        low, high = (0, 256) if dtype == torch.uint8 else (0, 8)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)

    def distinct_places(self, first: Tensor, count: int, place: int) -> Tensor:
        """(count,) of the index at input `place`; the indices of all dimensions together name no place twice."""
        sizes = [first.shape[dim] for dim, entry in enumerate(self.args[1]) if entry is not None]
        total = max(1, math.prod(sizes))
        step = max(1, round(total * 0.618))
        while math.gcd(step, total) != 1:
            step += 1
        own = min(place - 1, len(sizes) - 1)
        return torch.arange(count) * step % total // math.prod(sizes[own + 1 :]) % max(1, sizes[own])

    def index_limit(self, first: Tensor, place: int) -> int:
        """Size of the dimension that the index at input `place` points into."""
        if self.base in ("index", "index_put"):
            dims = [dim for dim, entry in enumerate(self.args[1]) if entry is not None]
            return first.shape[dims[min(place - 1, len(dims) - 1)]]
        if self.base in ("embedding", "take"):
            return first.shape[0]
        dim = self.args[1] if isinstance(self.args[1], int) else 0
        return first.shape[dim]

    def build(self, tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Any]:
        """Arguments with `tensors` in place; floating dtypes among them replaced by `dtype` where one is given."""

        def make(value: Any) -> Any:
            if isinstance(value, list):
                return [make(item) for item in value]
            if not isinstance(value, dict):
                return value
            if "t" in value:
                return tensors[value["t"]]
            if "dtype" in value:
                asked: torch.dtype = getattr(torch, value["dtype"])
                return dtype if dtype is not None and asked.is_floating_point else asked
            if "device" in value:
                return device
            if "complex" in value:
                return complex(*value["complex"])
            return getattr(torch, value["torch"])

        return [make(value) for value in self.args], {key: make(value) for key, value in self.kwargs.items()}

    def run(self, func: Any, host: list[Tensor]) -> tuple[list[Tensor], str]:
        """Results on the device, and how they came about where that was not on the device."""
        args, kwargs = self.build(self.put(host), self.device, None)
        if self.device.type == "cpu":
            return _tensors(func(*args, **kwargs)), ""
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            results = _tensors(func(*args, **kwargs))
        _finish(self.device, results)
        if _goes_to_fallback(func, torch._C._dispatch_key_for_device(self.device.type)):
            return results, f"no kernel for {self.device.type}: the backend's fallback takes it"
        taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.function_events or ())
        if taken >= max(LEAST_HOST_BYTES, HOST_SHARE * sum(x.nbytes for x in results)):
            return results, f"the call took {taken:,} bytes of host memory: its work went through the host"
        return results, ""

    def put(self, host: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device, with the same strides."""
        placed = []
        for x in host:
            if x.is_contiguous():
                placed.append(x.clone() if self.device.type == "cpu" else x.to(self.device))
                continue
            extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
            whole = x.as_strided((extent,), (1,)).clone()
            placed.append(whole.to(self.device).as_strided(x.shape, x.stride()))
        return placed

    def compare(self, func: Any, host: list[Tensor], found: list[Tensor]) -> dict[str, object]:
        """Distance to the host: in float64 where the operator takes that, else in its own dtypes."""
        if self.base in UNINITIALISED:
            return {"status": "ran", "detail": "allocates only"}
        found = [x.to("cpu") for x in found]
        host, narrow = self.some_rows(host)
        found = [narrow(x) for x in found]
        is_exact = self.use["is_view"] or not any(x.is_floating_point() or x.is_complex() for x in (*host, *found))
        try:
            expected = self.reference(func, host, None if is_exact else torch.float64)
            detail = ""
        except (RuntimeError, NotImplementedError, TypeError) as refusal:
            if is_exact:
                return {"status": "ran", "detail": f"no reference: {_first_line(refusal)}"}
            expected = self.reference(func, host, None)
            detail = "compared with the host in the same dtype, float64 is not taken"
        error, tolerance = 0.0, 0.0
        for place, (got, want) in enumerate(zip(found, expected, strict=True)):
            if got.shape != want.shape:
                return {"status": "failed", "detail": f"result {tuple(got.shape)}, expected {tuple(want.shape)}"}
            if place and self.base in ("topk", "sort"):  # equal values may stand in any order
                continue
            error = max(error, _distance(got, want))
            tolerance = max(tolerance, _tolerance(got.dtype, host))
        status = "ran"
        if not error <= tolerance:
            status = "approximate" if error <= LARGEST_APPROXIMATION else "failed"
            detail = f"numbers off by {error:.1e} of their size, rounding explains {tolerance:.1e}"
        return {"status": status, "detail": detail, "error": error, "tolerance": tolerance}

    def reference(self, func: Any, host: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        tensors = [x.clone() for x in host]
        if dtype is not None:
            tensors = [_widened(x, dtype) for x in tensors]
        args, kwargs = self.build(tensors, torch.device("cpu"), dtype)
        return _tensors(func(*args, **kwargs))

    def some_rows(self, host: list[Tensor]) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
        """Inputs of a product too large for float64 on the host, cut to a few rows, and the same cut of its result."""
        if self.use["flops"] <= MAX_REFERENCE_FLOPS:
            return host, lambda x: x
        rows = slice(0, REFERENCE_ROWS)
        if self.base == "mm":
            return [host[0][rows], *host[1:]], lambda x: x[rows]
        if self.base == "bmm":
            return [host[0][:1, rows], host[1][:1], *host[2:]], lambda x: x[:1, rows]
        if self.base == "scaled_dot_product_attention":
            return [x[:1, :1] if x.ndim == 4 else x for x in host], lambda x: x[:1, :1]
        return host, lambda x: x

    def calls(self, host: list[Tensor]) -> list[tuple[Any, Any]]:
        """Arguments of the calls that are timed one after another: the same activations, weights that take turns.

        A pass reads a weight once and finds it where the bytes read since then have left it; a call that is repeated
        with one weight would find it in a cache.
        """
        tensors, places = self.put(host), self.weight_places(host)
        size = sum(host[i].nbytes for i in places)
        turns = min(MAX_TURNS, -(-min(self.weights_between, COLD_BYTES) // size)) if size else 1
        made = [self.build(tensors, self.device, None)]
        for _ in range(1, turns):
            others = self.put([host[i] for i in places])
            own = list(tensors)
            for i, other in zip(places, others, strict=True):
                own[i] = other
            made.append(self.build(own, self.device, None))
        return made

    def weight_places(self, host: Sequence[Tensor]) -> list[int]:
        """Inputs that are parameters, as far as their sizes tell; none where weights are only read in part."""
        wanted = self.use["weight_bytes"]
        if not wanted:
            return []
        alone = [i for i, x in enumerate(host) if x.nbytes == wanted]
        if alone:
            return alone[-1:]  # a product of two squares has its weight second
        return list(range(len(host))) if sum(x.nbytes for x in host) == wanted else []

    def time(self, func: Any, host: list[Tensor]) -> float | None:
        """Median seconds of one call after warming up; None for a view, which is no work."""
        if self.use["is_view"]:
            return None
        calls = itertools.cycle(self.calls(host))

        def window(repeats: int) -> float:
            start = time.perf_counter()
            for _ in range(repeats):
                args, kwargs = next(calls)
                out = func(*args, **kwargs)
            _finish(self.device, _tensors(out))
            return (time.perf_counter() - start) / repeats

        window(1)
        once = statistics.median([window(1), window(1), window(1)]) if self.weights_between else window(1)
        if once * NUM_WINDOWS > MAX_TIMING_S:
            return statistics.median([once, window(1)])
        repeats = max(1, math.ceil(WINDOW_S / max(once, 1e-9)))
        return statistics.median(window(repeats) for _ in range(NUM_WINDOWS))


def try_operator(
    use: Mapping[str, Any], device: str, *, is_timed: bool = True, weights_between: int = 0
) -> dict[str, object]:
    """Outcome of one operator use (as `OperatorUse.to_json` gives it) on `device`; its rate too where `is_timed`, with
    weights as cold as `weights_between` bytes of others make them."""
    return Trial(use, device, is_timed=is_timed, weights_between=weights_between).outcome()


def measure_copy(device: str) -> dict[str, object]:
    """B/s of a large copy on the device; a copied byte is read and written, so it counts twice."""
    source, target = (torch.ones(COPY_BYTES // 4, dtype=torch.float32).to(device) for _ in range(2))

    def seconds() -> float:
        start = time.perf_counter()
        target.copy_(source)
        _finish(torch.device(device), [target])
        return time.perf_counter() - start

    seconds()
    windows = [seconds() for _ in range(9)]
    best = statistics.quantiles(windows, n=10, method="inclusive")[0]
    return {"bytes_per_s": 2 * COPY_BYTES / best, "size": COPY_BYTES, "threads": torch.get_num_threads()}


def _finish(device: torch.device, results: Sequence[Tensor]) -> None:
    """Wait for the device; one that cannot be waited for is done when a number of the result has come back."""
    if device.type == "cpu":
        return
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError:
        for x in results[:1]:
            x.flatten()[:1].to("cpu")


def _goes_to_fallback(func: Any, key: str) -> bool:
    """Whether the dispatch table sends this operator to the backend's catch-all fallback.

    A structured operator has a default kernel that only calls its `out` form, which is then what decides.
    """
    if "backend fallback" in _table_line(func, key):
        return True
    if "NonFunctional" not in _table_line(func, key):
        return False
    name = func.overloadpacket.__name__.removesuffix("_")
    packet = getattr(torch.ops.aten, name, func.overloadpacket)
    forms = [getattr(packet, overload) for overload in packet.overloads()]
    outs = [form for form in forms if any(argument.is_out for argument in form._schema.arguments)]
    return any("backend fallback" in _table_line(form, key) for form in outs)


def _table_line(func: Any, key: str) -> str:
    table = torch._C._dispatch_dump_table(func.name())
    return next((line for line in table.splitlines() if line.startswith(f"{key}:")), "")


def _find(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _walk(value: Any, visit: Callable[[dict[str, Any]], None]) -> None:
    if isinstance(value, dict):
        if "t" in value:
            visit(value)
        else:
            _walk(list(value.values()), visit)
    elif isinstance(value, list):
        for item in value:
            _walk(item, visit)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype` where it is a float, with its strides (a stride of 0 too)."""
    if not x.is_floating_point():
        return x.to(torch.complex128) if x.is_complex() else x
    return x.to(dtype)


def _distance(got: Tensor, want: Tensor) -> float:
    """Relative, by the Euclidean norm; infinite where one is finite and the other is not."""
    if not (got.is_floating_point() or got.is_complex()):
        return 0.0 if torch.equal(got, want.to(got.dtype)) else math.inf
    wide = torch.complex128 if got.is_complex() else torch.float64
    got, want = got.to(wide), want.to(wide)
    same = (got == want) | (got.isnan() & want.isnan())
    if bool(same.all()):
        return 0.0
    got, want = got[~same], want.masked_fill(want.isinf(), 0.0)
    rest = (want[~same] - got).norm()
    return float(rest / want[want.isfinite()].norm().clamp(min=1e-300)) if bool(rest.isfinite()) else math.inf


def _tolerance(dtype: torch.dtype, host: Sequence[Tensor]) -> float:
    """What rounding explains: the coarsest float among result and inputs, wider for float32, whose sums are long."""
    floats = [x.dtype for x in host if x.is_floating_point()]
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    coarsest = max(torch.finfo(kind).eps for kind in (*floats, dtype))
    return coarsest if coarsest > 1e-5 else 64 * coarsest


def _warned(caught: Sequence[warnings.WarningMessage]) -> str:
    """A warning that speaks of falling back, as some backends give it."""
    texts = [str(item.message) for item in caught]
    found = [text for text in texts if "fall back" in text.lower() or "fallback" in text.lower()]
    return _first_line(found[0]) if found else ""


def _first_line(text: object) -> str:
    return str(text).partition("\n")[0][:200]
