"""Run on one host of a shaped pair: wait for the ranks of a layout, decode one sequence, print what a token took.

python shaped_decode.py MODEL LAYOUT ADDRESS PORT KEY_FILE NUM_TOKENS      prints {"tokens": [...], "token_s": seconds}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.serving import SamplingParams

PROMPT = tuple(range(20, 36))


def main(model: str, layout: str, address: str, port: int, key_file: str, num_tokens: int) -> None:
    key = bytes.fromhex(Path(key_file).read_text())
    with Deployment.attach(
        (address, port),
        key,
        model,
        Layout.parse(layout),
        precision="fp32",
        device="cpu",
        num_slots=1,
        max_tokens=len(PROMPT) + num_tokens,
    ) as ranks:
        ranks.generate(PROMPT, SamplingParams(max_tokens=2))  # connections are opened by their first use
        began = time.perf_counter()
        ranks.generate(PROMPT, SamplingParams(max_tokens=1))
        prompt_s = time.perf_counter() - began
        began = time.perf_counter()
        tokens = ranks.generate(PROMPT, SamplingParams(max_tokens=num_tokens))
        token_s = (time.perf_counter() - began - prompt_s) / (num_tokens - 1)
    print(json.dumps({"tokens": tokens, "token_s": token_s}))


if __name__ == "__main__":
    model, layout, address, port, key_file, num_tokens = sys.argv[1:]
    main(model, layout, address, int(port), key_file, int(num_tokens))
