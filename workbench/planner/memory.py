"""Memory of one rank, line by line: what it holds at rest, what loading adds, what serving adds.

Ranks of one pipeline stage hold the same; so a plan has one ledger per stage, and its fullest stage decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from workbench.base import Cell, Quantity, Table, UnsupportedModelError, human
from workbench.placement import Layout, vision_is_sharded
from workbench.planner.weights import WeightTable
from workbench.spec import GatedDeltaSpec, GQASpec, KDASpec, MixerSpec, MLASpec, ModelSpec

if TYPE_CHECKING:
    from workbench.cluster import Hardware, TopologyDevice

__all__ = ["CacheNeed", "MemoryLedger", "MemoryLine", "Reserve", "activation_itemsize", "cache_need", "stage_ledger"]

Phase = Literal["rest", "load", "serving"]  # always there; only while loading; only while serving
WINDOW_BYTES = 64 << 20  # the loader's default
KV_ITEMSIZE = {"fp8": 1, "int8": 1, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """`role` says what, `group` under which heading: weights, cache, working, other."""

    role: str
    group: str
    phase: Phase
    size: Quantity

    def to_json(self) -> dict[str, object]:
        size = self.size
        return {
            "role": self.role,
            "group": self.group,
            "phase": self.phase,
            "bytes": size.value,
            "basis": size.basis,
            "source": size.source,
        }


@dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """One rank of one stage. `capacity` is what its device has; None where nobody knows."""

    layout: Layout
    stage: int
    precision: str
    lines: tuple[MemoryLine, ...] = field(repr=False)
    capacity: Quantity | None = None

    def of(self, group: str | None = None, phase: Phase | None = None) -> int:
        """Bytes of the lines of one heading or phase."""
        chosen = (x for x in self.lines if group in (None, x.group) and phase in (None, x.phase))
        return round(sum(x.size.value for x in chosen))

    @property
    def weights(self) -> int:
        return self.of("weights")

    @property
    def cache(self) -> int:
        return self.of("cache")

    @cached_property
    def load_peak(self) -> int:
        """While weights arrive: what rests, with weights counted whole, and the staging window; caches come later."""
        return self.of("weights") + self.of("other") + self.of(phase="load")

    @cached_property
    def serving_peak(self) -> int:
        return self.of(phase="rest") + self.of(phase="serving")

    @property
    def peak(self) -> int:
        """The larger of the two: loading and serving do not overlap."""
        return max(self.load_peak, self.serving_peak)

    @property
    def free(self) -> int | None:
        """Bytes left at the peak; negative where it does not fit."""
        return None if self.capacity is None else round(self.capacity.value) - self.peak

    @property
    def fits(self) -> bool:
        return self.free is None or self.free >= 0

    def with_working(self, activations: Quantity, vision: Quantity | None = None) -> MemoryLedger:
        """The same ledger with activation peaks known from a trace."""
        lines = [x for x in self.lines if x.role not in ("activations", "vision activations")]
        lines.append(MemoryLine(role="activations", group="working", phase="serving", size=activations))
        if vision is not None:
            # Text and images are computed one after the other, in the same memory.
            more = Quantity(max(0.0, vision.value - activations.value), "B", vision.basis, vision.source)
            lines.append(MemoryLine(role="vision activations", group="working", phase="serving", size=more))
        return replace(self, lines=tuple(lines))

    def table(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (x.group, x.role, human(x.size.value, "B"), x.phase, x.size.basis, x.size.source) for x in self.lines
        ]
        note = f"peak while loading {human(self.load_peak, 'B')}, while serving {human(self.serving_peak, 'B')}"
        if self.capacity is not None and self.free is not None:
            word = "free" if self.free >= 0 else "short"
            note += f"; of {human(self.capacity.value, 'B')}: {human(abs(self.free), 'B')} {word}"
        return Table(
            title=f"Memory of each rank of stage {self.stage}, {self.layout}, {self.precision}",
            columns=("group", "what", "bytes", "when", "basis", "source"),
            rows=tuple(rows),
            note=note,
        )

    def to_json(self) -> dict[str, object]:
        return {
            "layout": str(self.layout),
            "stage": self.stage,
            "precision": self.precision,
            "lines": [line.to_json() for line in self.lines],
            "load_peak": self.load_peak,
            "serving_peak": self.serving_peak,
            "capacity": None if self.capacity is None else self.capacity.value,
            "free": self.free,
        }

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheNeed:
    """What a replica's sequences keep, before any split: `slots` sequences of `max_tokens` cached tokens each.

    `kv_dtype` "auto" keeps rows in the activation dtype; one byte a value brings `kv_scale_bytes` a row. `snapshots`:
    copies of the recurrent state kept per sequence beside the running one, for prefixes that others continue.
    `page_tokens`: latents are allotted in pages of so many tokens (1: no padding; a contiguous slot is one page of
    `max_tokens`). `cache_tokens`: rows of a pool that all sequences share, in place of those; 0: there is none.
    `snapshot_places`: room for copies of the recurrent state, of all sequences together.
    """

    slots: int
    max_tokens: int
    kv_dtype: str = "auto"
    kv_scale_bytes: int = 0
    snapshots: int = 0
    page_tokens: int = 1
    cache_tokens: int = 0
    snapshot_places: int = 0

    @property
    def padded_tokens(self) -> int:
        return -(-self.max_tokens // self.page_tokens) * self.page_tokens

    @property
    def rows(self) -> int:
        """Rows of tokens of a replica."""
        return self.cache_tokens or self.slots * self.padded_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """What a rank needs besides weights, caches and activations.

    `other`: runtime, allocator, kernels. `communicator`: buffers of one process group. `window_bytes`: the loader's
    staging window.
    """

    other: Quantity
    communicator: Quantity
    window_bytes: int = WINDOW_BYTES

    @classmethod
    def for_device(cls, device_type: str, memory: Quantity | None = None, share: Quantity | None = None) -> Reserve:
        """Assumptions for an accelerator, or for a process on a host; `share` of `memory` is held back by its runtime,
        where somebody says how much.

        The share is that of everything beside weights, caches and activations, so communicators are inside it. Nobody
        publishes one; a fixed size is assumed otherwise, since of 16 H200 that hold 135.7 GiB of weights each (see
        `reported.py`) no more than 3 % is left.
        """
        if device_type == "cpu":
            return cls(
                other=Quantity(350e6, "B", "assumed", "interpreter, torch and its operators in one process"),
                communicator=Quantity(4e6, "B", "assumed", "sockets and staging of one gloo group"),
            )
        if memory is not None and share is not None:
            other = Quantity(memory.value * share.value, "B", share.basis, share.source)
            return cls(other=other, communicator=Quantity(0.0, "B", share.basis, "inside the reserved share"))
        return cls(
            other=Quantity(2e9, "B", "assumed", "device context, allocator fragments, kernels and graphs"),
            communicator=Quantity(256e6, "B", "assumed", "channels and staging of one communicator"),
        )

    @classmethod
    def of(cls, device: TopologyDevice) -> Reserve:
        """Of a device of a topology, measured or from the catalogue, with the share that is known of it."""
        return cls.for_device(device.device_type, device.memory_total, device.reserved_share)

    @classmethod
    def for_hardware(cls, hardware: Hardware) -> Reserve:
        """Of a device of the catalogue, with the share that its file says is held back."""
        return cls.for_device(hardware.device_type, hardware.memory, hardware.reserved_share)


def activation_itemsize(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def cache_need(spec: ModelSpec, layout: Layout, layers: range, need: CacheNeed, itemsize: int) -> dict[str, int]:
    """Bytes of one rank by role, as `nn.cache.StateCache` allocates them: latent, state, convolution, snapshots.

    Latents are whole on every rank of a tp group; states, convolution inputs, keys and values are split by heads.
    Raises UnsupportedModelError for a mixer whose cache is not known.
    """
    sizes: Counter[str] = Counter()
    mixers = [layer.mixer for layer in spec.layers[layers.start : layers.stop]]
    of_object = {id(mixer): mixer for mixer in mixers}
    # Layers of one kind share a mixer: two or three of them stand for a hundred, and a search asks thousands of times.
    for key, count in Counter(map(id, mixers)).items():
        for role, size in _cache_of_layer(of_object[key], layout.tp, need, itemsize).items():
            sizes[role] += count * size
    return dict(sizes)


@lru_cache(maxsize=1024)
def _cache_of_layer(mixer: MixerSpec, tp: int, need: CacheNeed, itemsize: int) -> Mapping[str, int]:
    """What `cache_need` counts for one layer."""
    kv = KV_ITEMSIZE.get(need.kv_dtype, itemsize)
    scale = need.kv_scale_bytes if kv == 1 else 0
    rows = need.rows
    if isinstance(mixer, MLASpec):
        sizes = {"latent": rows * (mixer.cache_dim * kv + scale)}
        if mixer.indexer is not None and mixer.indexer.owns_choice:
            sizes["index keys"] = rows * mixer.indexer.head_dim * itemsize
        return sizes
    if isinstance(mixer, GQASpec):
        # Fewer key-value heads than ranks: each rank keeps the one that its query heads share.
        heads = max(1, mixer.num_kv_heads // tp)
        # A layer with a window keeps every token as well.
        return {"keys and values": rows * heads * ((mixer.head_dim + mixer.v_dim) * kv + 2 * scale)}
    if isinstance(mixer, KDASpec):
        channels, values = 3 * mixer.width, mixer.num_heads * mixer.head_dim**2
    elif isinstance(mixer, GatedDeltaSpec):
        channels, values = mixer.conv_width, mixer.value_width * mixer.key_dim
    else:
        raise UnsupportedModelError(f"the cache of {type(mixer).__name__} is not known here")
    state = need.slots * values // tp * 4
    convolution = need.slots * channels // tp * (mixer.conv_size - 1) * itemsize
    sizes = {"state": state, "convolution": convolution}
    if copies := need.snapshots * need.slots + need.snapshot_places:
        sizes["snapshots"] = copies * (state + convolution) // need.slots
    return sizes


def request_floor(spec: ModelSpec, layout: Layout, layers: range, need: CacheNeed, itemsize: int) -> int:
    """Bytes on one rank that the shortest request pins: its state and one page of latents."""
    one = replace(need, slots=1, max_tokens=1, cache_tokens=0, snapshot_places=0)
    return sum(cache_need(spec, layout, layers, one, itemsize).values())


def stage_ledger(
    table: WeightTable,
    layout: Layout,
    stage: int,
    need: CacheNeed,
    reserve: Reserve,
    *,
    capacity: Quantity | None = None,
    activations: Quantity | None = None,
    vision: Quantity | None = None,
    has_vision: bool = True,
    image_tokens: int = 0,
) -> MemoryLedger:
    """Ledger of each rank of one stage. `image_tokens`: feature rows of pictures kept for running requests.

    `has_vision=False`: the tower lives on ranks of its own. Raises LayoutError where the layout does not fit the model.
    """
    spec, itemsize = table.spec, activation_itemsize(table.precision)
    layers = layout.stage_layers(spec.num_layers)[stage]
    lines = []
    for role, size in table.stage(layout, stage).items():
        if has_vision or role not in ("vision", "projector"):
            lines.append(_line(role, "weights", "rest", size, "placement table x storage"))
    for role, size in cache_need(spec, layout, layers, need, itemsize).items():
        source = f"{need.slots} sequences"
        if role == "latent":
            source += f" x {need.padded_tokens:,} tokens" if not need.cache_tokens else f", {need.rows:,} tokens in all"
        lines.append(_line(role, "cache", "rest", size, source))
    if stage == 0 and image_tokens:
        size = image_tokens * spec.hidden_size * itemsize
        lines.append(_line("image features", "cache", "rest", size, f"{image_tokens:,} rows"))
    groups = num_groups(layout)
    if groups:
        lines.append(
            MemoryLine(
                role="collective buffers", group="other", phase="rest", size=reserve.communicator * float(groups)
            )
        )
    lines.append(MemoryLine(role="other", group="other", phase="rest", size=reserve.other))
    lines.append(_line("staging window", "working", "load", reserve.window_bytes, "bound of the loader"))
    ledger = MemoryLedger(layout=layout, stage=stage, precision=table.precision, lines=tuple(lines), capacity=capacity)
    return ledger if activations is None else ledger.with_working(activations, vision if stage == 0 else None)


def num_groups(layout: Layout) -> int:
    """Process groups of more than one rank that a rank takes part in."""
    distinct = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "experts": layout.ep if layout.ep > layout.tp else 1,
        "expert_gather": layout.expert_dp if 1 < layout.expert_dp < layout.dp else 1,
        "expert_replicas": layout.dp // layout.expert_dp if 1 < layout.expert_dp < layout.dp else 1,
    }
    return sum(size > 1 for size in distinct.values())


def vision_placement(spec: ModelSpec, layout: Layout) -> str:
    """ "none", "whole" on one rank, "sharded" by heads, or "shared_out": whole on every rank, images divided."""
    if spec.vision is None:
        return "none"
    if layout.tp == 1:
        return "whole"
    return "sharded" if vision_is_sharded(spec, layout) else "shared_out"


def by_group(ledger: MemoryLedger) -> Mapping[str, int]:
    """Bytes by heading, in the order of the ledger."""
    return {group: ledger.of(group) for group in dict.fromkeys(line.group for line in ledger.lines)}


def _line(role: str, group: str, phase: Phase, size: float, source: str) -> MemoryLine:
    return MemoryLine(role=role, group=group, phase=phase, size=Quantity(size, "B", "exact", source))
