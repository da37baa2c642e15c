"""The coverage gate of an acceptance alone, on the card, in a process that has it: prints the gate as JSON."""

from __future__ import annotations

import json
import sys

from workbench.cluster import default_device
from workbench.day0.gates import GateBook
from workbench.day0.operators import measure_coverage
from workbench.placement import Layout
from workbench.report import Section
from workbench.spec import read_spec


def main(root: str) -> None:
    gates, sections = GateBook(), list[Section]()
    layout = Layout(tp=2, ep=2)
    measure_coverage(
        gates, sections, read_spec(root), layout, precision="mxfp4", device=default_device(), say=lambda line: None
    )
    gate = gates.found("operators.coverage")
    assert gate is not None
    tables = [table.render() for section in sections for table in section.tables]
    print(json.dumps({"gate": gate.to_json(), "tables": tables, "device": default_device()}))


if __name__ == "__main__":
    main(sys.argv[1])
