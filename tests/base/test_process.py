"""A process started by a large one is not large for that."""

from __future__ import annotations

import json
import subprocess
import sys

SMALL = """
import json, resource
from workbench.base import peak_resident_bytes
print(json.dumps([peak_resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""
LARGE = f"""
import subprocess, sys
ballast = b"x" * (400 << 20)
subprocess.run([sys.executable, "-c", {SMALL!r}], check=True)
"""


def test_the_peak_is_that_of_the_process_not_of_the_one_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    own, as_getrusage_says = json.loads(done.stdout)
    assert 5 << 20 < own < 200 << 20
    assert sys.platform != "linux" or as_getrusage_says > 400 << 20, "what is read instead is no better here"
