"""O01: vendors register their operators when they like, also after this package was imported, or never."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import pkgutil, sys, torch
TORCHS_OWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "quantized", "mkldnn", "mkl", "higher_order"}
asked = []
plain = type(torch.ops).__getattr__
def look_up(self, name):
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.startswith("workbench") and name not in TORCHS_OWN:
        asked.append(f"{caller}: torch.ops.{name}")
    return plain(self, name)
type(torch.ops).__getattr__ = look_up
%s
import workbench
for module in pkgutil.walk_packages(workbench.__path__, "workbench."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
print("\\n".join(asked))
"""


def modules_asking_for_vendor_operators(planted: str = "") -> list[str]:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL % planted], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_o01_no_module_reads_a_vendors_namespace_when_it_is_imported() -> None:
    assert modules_asking_for_vendor_operators() == []


def test_o01_one_that_does_is_named() -> None:
    planted = 'exec("import torch; torch.ops.npu_fused", {"__name__": "workbench.early"})'
    assert modules_asking_for_vendor_operators(planted) == ["workbench.early: torch.ops.npu_fused"]
