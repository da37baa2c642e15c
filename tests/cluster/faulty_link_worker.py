"""A rank of a link measurement with a planted fault: `python faulty_link_worker.py FAULT [ALGORITHM]`.

The fault strikes rank 1 alone, in the named algorithm; "slow" strikes every rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time

FAULT, ALGORITHM = sys.argv[1], (sys.argv[2:] or [""])[0]
IS_STRUCK = os.environ["RANK"] == "1"

if FAULT == "silent at init" and IS_STRUCK:
    time.sleep(600)

from workbench.cluster import link_worker  # noqa: E402 (the fault above comes first)

if FAULT == "exit at init" and IS_STRUCK:
    sys.exit("driver says: no such device")


def struck(own, place, size, group, seed):
    if FAULT == "hang before":
        time.sleep(600)
    transfer, expected = SOUND(own, place, size, group, seed)

    def faulty(idx):
        if FAULT == "skip":
            return own
        if FAULT == "hang inside":
            time.sleep(600)
        if FAULT == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if FAULT == "slow":
            time.sleep(0.02)
        out = transfer(idx)
        return out + 1 if FAULT == "wrong" else out

    return faulty, expected


if ALGORITHM and (IS_STRUCK or FAULT == "slow"):
    from workbench.cluster import link_operations

    SOUND = link_operations.ALGORITHMS[ALGORITHM]
    link_operations.ALGORITHMS[ALGORITHM] = struck
sys.exit(link_worker.main())
