"""Under layouts of several ranks: what is traced without other processes is what real ranks run and send."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trace_tasks
from uses import collectives_of, differences, operators_of

from workbench.operators import Inventory, Workload, trace_inventory
from workbench.placement import Layout
from workbench.spec import read_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))
from ranks import shared_ranks

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"
PREFILL = Workload(phase="prefill", num_sequences=2, new_tokens=11)
DECODE = Workload(phase="decode", num_sequences=5, context=6)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("workload", [PREFILL, DECODE], ids=lambda w: w.phase)
@pytest.mark.parametrize(
    "text",
    [
        "tp2",
        "tp2xep2",
        "pp2",
        "dp2xep2",
        "tp2xep2:all_to_all",
        "dp2xep2:all_to_all",
        "pp2xtp2",
        "dp2xtp2xep4:all_to_all",
    ],
)
def test_operators_and_collectives_are_those_of_real_ranks(text: str, workload: Workload) -> None:
    layout = Layout.parse(text)
    answers = shared_ranks().run(trace_tasks.run_rank, TINY, layout, workload, "mxfp4", world_size=layout.world_size)
    visits = {(a["coords"].dp, layer): ids for a in answers for layer, ids in a["visits"].items()}
    spec = read_spec(TINY)
    for answer in answers:
        at, real = answer["coords"], Inventory.from_json(answer["inventory"])
        traced = trace_inventory(
            spec,
            layout,
            workload,
            stage=at.pp,
            rank=at.rank,
            precision="mxfp4",
            routing=lambda layer, dp, tokens: visits[dp, layer],
        )
        assert collectives_of(real), "a layout of several ranks talks"
        assert differences(collectives_of(traced), collectives_of(real)) == ""
        assert traced.collective_bytes == real.collective_bytes
        assert differences(operators_of(traced), operators_of(real)) == ""
        assert traced.activation_peak_bytes == real.activation_peak_bytes
