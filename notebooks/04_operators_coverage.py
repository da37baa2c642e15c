# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Operators, and what a device makes of them
#
# **Question.** Does this device run every operator of the model, and right?
#
# **Answer in advance.** The model itself says what it needs: it is run once on tensors without contents, and what it
# calls is the list. Each entry is then tried on the device and compared with float64. Here the device is the host's
# processor, which passes; then we ask a device with three faults, and each is found by name.
#
# Takes under a minute on two cores, no accelerator. On a machine that has one, the same cells ask that.

# %%
import json
import os
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from workbench.base import Table, human
from workbench.checkpoint import K3, k3_config
from workbench.cluster import default_device, host_device
from workbench.day0.gates import GateBook
from workbench.day0.operators import judge_coverage
from workbench.operators import Coverage, Workload, distinct_operators, probe_operators, trace_inventory
from workbench.placement import Layout, choose_layout
from workbench.profiling import append_records, environment_of, read_records
from workbench.report.gates import gates_table
from workbench.spec import count_model, parse_config, read_spec
from workbench.view import bytes_by_role, error_bars, rate_bars
from workbench.view.notebook import show

# %% tags=["parameters"]
MODEL = Path("../data/k3-tiny")
NUM_RANKS, PRECISION = 2, "mxfp4"
PROMPT_TOKENS, NUM_SEQUENCES = 64, 2
PLAN = Path("../out/notebook-03.jsonl")  # where notebook 03 left its plan
CARD = Path("../tests/operators/fake_device.py")  # a device that has the faults it is told to have
RECORD = Path("../out/notebook-04.jsonl")

# %% [markdown]
# ## 1 What the model calls
#
# One rank of two, in the two phases of an answer. Before looking: a token passes through the active parameters once, a
# multiplication and an addition each, and the ranks share them. So we expect 2 × active parameters × tokens / ranks,
# and a little more: router and latent projections are computed by both ranks, and attention looks back.

# %%
spec = read_spec(MODEL)
layout = choose_layout(spec, NUM_RANKS)
passes = (
    Workload(phase="prefill", new_tokens=PROMPT_TOKENS),
    Workload(phase="decode", num_sequences=NUM_SEQUENCES, context=PROMPT_TOKENS),
)
prefill, decode = (trace_inventory(spec, layout, work, precision=PRECISION) for work in passes)
by_hand = {x.workload.phase: 2 * count_model(spec).active_params * x.workload.num_tokens for x in (prefill, decode)}
rows = tuple(
    (
        x.workload.phase,
        x.workload.num_tokens,
        sum(use.count for use in x.operators if not use.is_view),
        human(by_hand[x.workload.phase] / NUM_RANKS, "FLOP"),
        human(x.flops, "FLOP"),
        f"{x.flops * NUM_RANKS / by_hand[x.workload.phase]:.2f}",
        human(x.bytes, "B"),
        human(x.collective_bytes, "B"),
    )
    for x in (prefill, decode)
)
columns = ("phase", "tokens", "calls", "by hand", "traced", "traced / by hand", "bytes moved", "put into collectives")
Table(title=f"One rank of {layout}, {PRECISION}", columns=columns, rows=rows)

# %%
assert all(x.flops * NUM_RANKS >= by_hand[x.workload.phase] for x in (prefill, decode))

# %% [markdown]
# By kind of layer and kind of work, the heaviest calls, and every collective of a decode step:

# %%
decode

# %% [markdown]
# Which of it moves the bytes? Experts are packed to four bits, and the device multiplies in 16: each expert that is
# visited is expanded first, in several small operators. We expect that to weigh more than the products themselves.

# %%
moved = Counter()
for use in decode.operators:
    moved[use.category] += use.num_bytes * use.count
assert moved["dequantise"] > moved["grouped_gemm"]
show(bytes_by_role(moved, what="a decode step"))

# %% [markdown]
# ## 2 What the ranks say to one another
#
# Collectives can be counted by hand to the byte. Each layer ends both of its halves with a sum over the ranks, in 16
# bits, and the embedding with one more; each of the 8 mixtures of experts sums its latents in 32 bits; and at the end
# every rank shows its half of the vocabulary.

# %%
tokens, moe = decode.workload.num_tokens, [layer.ffn for layer in spec.layers if layer.is_moe]
sums = (1 + 2 * spec.num_layers) * tokens * spec.hidden_size * 2
latents = sum(tokens * ffn.latent_dim * 4 for ffn in moe)
logits = tokens * spec.vocab_size // NUM_RANKS * 2
print(f"by hand {sums + latents + logits:,} bytes, traced {decode.collective_bytes:,}")
assert sums + latents + logits == decode.collective_bytes

# %% [markdown]
# ## 3 The published model, under the plan
#
# The same code traces Kimi K3 in the layout that notebook 03 chose: shapes are larger, calls are more. Does it need
# anything that the tiny model does not call? We expect no: it has every part of K3. (By hand again, 2 × active
# parameters × 16 tokens / ranks.)

# %%
k3 = parse_config(k3_config(sizes=K3))
k3_layout = Layout.parse(read_records(PLAN)[-1]["best"]["text"] if PLAN.exists() else "dp2xtp8xep16")
work = Workload(phase="decode", num_sequences=16 // k3_layout.dp, context=8191)
k3_decode = trace_inventory(k3, k3_layout, work, precision=PRECISION)
hand = 2 * count_model(k3).active_params * 16 / k3_layout.world_size
rows = (
    ("calls", f"{sum(use.count for use in k3_decode.operators if not use.is_view):,}"),
    ("by hand", human(hand, "FLOP")),
    ("traced", f"{human(k3_decode.flops, 'FLOP')}, {k3_decode.flops / hand:.2f} times as much"),
    ("weights read", human(k3_decode.weight_bytes, "B")),
    ("bytes moved", f"{human(k3_decode.bytes, 'B')}, {k3_decode.bytes / k3_decode.weight_bytes:.0f} times the weights"),
    ("put into collectives", human(k3_decode.collective_bytes, "B")),
)
Table(title=f"A decode step of Kimi K3, one rank of {k3_layout}", columns=("what", "one rank"), rows=rows)

# %%
tiny_names = {use.name for use in (*prefill.operators, *decode.operators)}
news = [use for use in k3_decode.distinct() if use.name not in tiny_names]
print(f"only in K3: {sorted({use.name for use in news}) or 'nothing'}")
assert all(use.is_view for use in news)  # a view moves nothing and needs no kernel

# %% [markdown]
# ## 4 Each of them, on this device
#
# A child process tries every operator at its own shapes, strides and arguments, with a time limit, so that a driver
# that hangs or crashes costs one answer and not the notebook. We expect all of them to run, with errors within what
# rounding explains: one unit of the last place of a 16-bit float, 64 of float32.

# %%
device = default_device()
coverage = probe_operators((prefill, decode), device)
print(f"{device}: {host_device().name}" if device == "cpu" else device)
coverage

# %%
colours = Counter(result.colour for result in coverage.results)
assert coverage.ok
assert colours == {"green": len(coverage.results)}
show(error_bars(coverage.to_json()))

# %% [markdown]
# ## 5 How fast
#
# The limits of the device are measured as well: large products, and a copy larger than every cache. An operator on a
# few kilobytes would take nanoseconds at those limits and takes microseconds, since starting it costs that much. So we
# expect most shares to be small, and the ratio tells how far this model is from being bound by the device.

# %%
show(rate_bars(coverage.to_json()))

# %%
shares = sorted(result.share for result in coverage.results if result.share is not None)
rows = (
    ("shapes with a known limit", len(shares)),
    ("median share of the limit", f"{statistics.median(shares):.2%}"),
    ("largest share of the limit", f"{shares[-1]:.0%}"),
    ("shapes above their limit", sum(share > 1 for share in shares)),
)
Table(columns=("measured here", "value"), rows=rows, note=f"{coverage.taken_at}, {os.cpu_count()} cores")

# %% [markdown]
# A share above 100 % is no merit and no error of the clock: tried again and again, a small tensor lies in a cache, and
# the limit is that of memory. Weights that a step reads once are never so lucky. Or it is the limit that is too low,
# because it was measured while another process had its share of the machine. The figures are those of this moment;
# another process on the same cores halves them.
#
# ## 6 The gate
#
# An acceptance asks for one number: how many operators, by name, have a gap of any kind. Nothing but 0 passes.

# %%
gate = judge_coverage(GateBook(), coverage)
assert gate.status == "pass"
gates_table([gate])

# %% [markdown]
# ## 7 A device with gaps
#
# A gate that cannot fail proves nothing. The tests of this project hold a device written in Python, with memory and
# kernels of its own, and faults to order. We ask it for five operators of the decode step. It lacks one; one goes to
# the host and back without a word; one is 2 % off, which no crash would ever tell. We expect three gaps by name.

# %%
faults = {"missing": ["aten.topk.default"], "to_host": ["aten.silu.default"], "wrong": ["aten.exp.default"]}
sound = ["aten.mm.default", "aten.sigmoid.default"]
os.environ["FAKE_DEVICE"] = json.dumps({"operators": sound, "to_host": faults["to_host"], "wrong": faults["wrong"]})
named = {*sound, *(name for names in faults.values() for name in names)}
asked = replace(decode, operators=tuple(use for use in decode.operators if use.name in named))
command = (sys.executable, str(CARD))
card = probe_operators(asked, "fakecard", command=command, roofline=False, each_shape=False)
card

# %%
found = {result.use.name: result.status for result in card.results}
assert {name: found[name] for name in sound} == dict.fromkeys(sound, "ran")
assert {found[name] for name in faults["missing"]} == {"missing"}
assert {found[name] for name in faults["to_host"]} == {"fell back"}
assert {found[name] for name in faults["wrong"]} == {"approximate"}
show(error_bars(card.to_json()))

# %%
failed = judge_coverage(GateBook(), card)
assert (failed.status, failed.value) == ("fail", 3)
gates_table([failed])

# %% [markdown]
# The last column of the gaps says what to compute an operator with instead. One thing no probe sees: a kernel that
# computes on the host in memory of its own, behind torch's back. Its rate gives it away, which is why rates stand
# beside the verdict.
#
# ## 8 Keep
#
# The coverage goes into a record. Whoever reads it has the measured seconds of every operator at its shapes; the
# planner takes them (`plan(..., measured=coverage)`) in place of assumed efficiencies.

# %%
append_records(RECORD, [coverage], environment_of(target=MODEL.name, command=["notebook 04"]))
again = Coverage.from_json(read_records(RECORD)[-1])
assert again == coverage
timed = [use for use in decode.operators if again.seconds(use) is not None]
step_s = sum(again.seconds(use).value * use.count for use in timed)
heaviest = max(distinct_operators((decode,)), key=lambda use: use.weight_bytes)
print(f"{heaviest}: {again.seconds(heaviest)}")
print(f"all operators of a decode step one behind another: {human(step_s, 's')} on {again.device}")

# %% [markdown]
# **Try.** Give `FAKE_DEVICE` a `"hanging": ["aten.exp.default"]` instead of the wrong one, and `time_limit_s=5` to the
# probe: the operator fails by name after five seconds, and the others are tried all the same.
#
# ## What we have now
#
# The list of what a model needs, made by the model; a verdict for each entry, with its error and its rate; and the
# proof that a gap is found. `workbench operators DIR` does the same from the command line, `workbench day0` asks the
# gate. Next: `05_shard_and_load`.
