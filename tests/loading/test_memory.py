"""Host memory of a load, as the kernel counts it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from workbench.checkpoint import Checkpoint, k3_config, write_checkpoint

MIB = 1 << 20
WINDOW = 16 * MIB
SLACK = 4 * MIB  # plan and ledger


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MB: two thirds packed experts, the rest matrices; files of 30 to 70 MB."""
    config = k3_config(
        num_layers=3, full_attn_layers=(2, 3), hidden_size=1024, vocab_size=16384, dense_width=4096, kda_heads=8,
        kda_head_dim=64, mla_heads=8, q_rank=256, kv_rank=128, num_experts=32, expert_width=1024, latent_dim=1024,
        num_shared=1,
    )  # fmt: skip
    return write_checkpoint(tmp_path_factory.mktemp("large") / "k3", config, seed=1)


def probe(
    root: Path,
    warm: Path,
    precision: str,
    tp: int,
    ep: int,
    how: str = "stream",
    *,
    window: int = WINDOW,
    env: Mapping[str, str] | None = None,
) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("memory_probe.py")), str(root), str(warm)]
    done = subprocess.run(
        [*command, precision, str(window), str(tp), str(ep), how],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, float] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("precision", "tp", "ep"),
    [
        ("mxfp4", 2, 2),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("bf16", 2, 2), ("int4", 2, 2), ("fp8", 4, 2))),
        ("fp32", 4, 4),
    ],
)
def test_l21_peak_memory_of_a_rank_is_its_weights_and_the_window(
    large: Path, sound: Path, precision: str, tp: int, ep: int
) -> None:
    """L21: nothing drains the checkpoint into host memory, and temporaries of every transform stay in the window."""
    assert Checkpoint.open(large).total_bytes > 190 * MIB
    found = probe(large, sound / "F0", precision, tp, ep)
    bound = found["resident_bytes"] + WINDOW
    text = f"{precision} tp{tp} ep{ep}: grew {found['growth'] / MIB:.1f} MiB, weights and window {bound / MIB:.1f} MiB"
    print(text)
    assert found["growth"] <= bound + SLACK, text
    assert found["peak_host_bytes"] <= found["growth"] + MIB, "the loader's own figure is no larger than the kernel's"
    assert found["peak_host_bytes"] >= 0.8 * found["resident_bytes"]
    assert found["read_ratio"] <= 1.02


def test_l21_a_loader_that_drains_the_checkpoint_first_breaks_the_bound(large: Path, sound: Path) -> None:
    """L21: the measurement sees what it is meant to see."""
    found = probe(large, sound / "F0", "mxfp4", 2, 2, how="drain")
    assert found["growth"] > found["resident_bytes"] + WINDOW + SLACK


@pytest.mark.parametrize(
    "window",
    [pytest.param(WINDOW, id="one reader", marks=pytest.mark.slow), pytest.param(2 * WINDOW, id="four readers")],
)
def test_l21_a_load_ends_under_a_limit_of_its_weights_and_the_window(large: Path, sound: Path, window: int) -> None:
    """L21: the kernel refuses what goes beyond; a load that drains the files first is refused."""
    found = probe(large, sound / "F0", "mxfp4", 2, 2, how="limit", window=window)
    assert found["bytes_read"] > 80 * MIB
    with pytest.raises(AssertionError, match=r"can't allocate memory|MemoryError|Cannot allocate|std::bad_alloc"):
        probe(large, sound / "F0", "mxfp4", 2, 2, how="limit-drain", window=window)


# A C library that keeps in its heap whatever is freed; how much one keeps by itself is another in every process.
KEEPS_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def test_l21_freed_temporaries_do_not_pile_up_beside_the_window(tmp_path: Path, sound: Path) -> None:
    """L21: of a window of 4 MiB, the temporaries of transforms and checks have a third, also in the worst of heaps."""
    config = k3_config(
        num_layers=6, full_attn_layers=(3, 6), hidden_size=512, vocab_size=4096, num_experts=48, expert_width=256,
        latent_dim=256, dense_width=1024,
    )  # fmt: skip
    root = write_checkpoint(tmp_path / "k3", config, seed=2)
    found = probe(root, sound / "F0", "int4", 2, 2, window=4 * MIB, env=KEEPS_FREED)
    assert found["peak_host_bytes"] <= found["resident_bytes"] + 4 * MIB, found


FILES_DROPPED = """
import mmap, sys
from workbench.loading.host_memory import HostMemory
MIB = 1 << 20
with open(sys.argv[1], "wb") as file:
    file.write(b"x" * (64 * MIB))
with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for at in range(0, len(view), 4096):
    view[at]
memory = HostMemory()
load = b"x" * (96 * MIB)
memory.sample()
del load
view.close()
print(memory.growth / MIB)
"""


def test_pages_of_files_that_the_kernel_drops_during_a_load_are_not_its_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILES_DROPPED, tmp_path / "file"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(96, abs=2)


def test_a_first_load_brings_in_no_library_that_it_does_not_need(sound: Path) -> None:
    """`to_empty` of a meta tensor imports sympy, which every rank would hold and wait for."""
    code = (
        "import sys\n"
        "from workbench.checkpoint import Checkpoint\n"
        "from workbench.loading import load_in_pieces, load_rank, prepare_load\n"
        "from workbench.placement import Layout\n"
        "checkpoint = Checkpoint.open(sys.argv[1])\n"
        "load_rank(checkpoint, Layout(), 0, precision='int8')\n"
        "load_in_pieces(prepare_load(checkpoint, Layout(), 0))\n"
        "assert 'sympy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, sound / "F0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
