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
# # 03 · Count, fit, plan
#
# **Question.** What must be true of N accelerators to serve this model?
#
# **Answer in advance.** Each must hold its part of the weights, all that does not divide, its caches, and the working
# space of one step. That alone refuses most layouts; of the rest, links and bandwidth choose. For Kimi K3, eight H200
# are too few and sixteen are enough, until somebody asks for a million tokens of context.
#
# Takes under a minute on a laptop. No accelerator, and **nothing here is measured**: bytes are counted from the model's
# dimensions, times are predicted from published hardware figures at assumed efficiencies. Every table names its basis.

# %%
from pathlib import Path

from workbench.base import Table, human
from workbench.checkpoint import K3, k3_config
from workbench.cluster import Topology, read_hardware
from workbench.placement import Layout
from workbench.planner import (
    CacheNeed,
    Objective,
    Reserve,
    compare_reported,
    launch_all,
    plan,
    read_weight_table,
    stage_ledger,
)
from workbench.profiling import append_records, environment_of, read_records
from workbench.spec import count_model, kv_bytes, parse_config
from workbench.view import ChoicePanel, cache_lines, memory_bars, step_bars
from workbench.view.notebook import show

# %% tags=["parameters"]
HARDWARE, NUM_DEVICES = "h200", 16  # a name in data/hardware
OTHERS = {"b200": 16, "h100": 32}
CONTEXT, CONCURRENCY = 8192, 16
LONG_CONTEXT = 1 << 20
RECORD = Path("../out/notebook-03.jsonl")

# %% [markdown]
# ## 1 What has to be somewhere
#
# The published dimensions are enough (notebook 01 spells them out). By hand: 92 layers × 896 experts × 3 matrices of
# 3,072 × 3,584, at 4 bits a weight and a byte of scale for 32 of them. Each of the 24 layers with full attention keeps
# 512 + 64 numbers of two bytes for every token. Each of the other 69 keeps 96 matrices of 128 × 128 numbers of four
# bytes for a sequence, however long it is.

# %%
spec = parse_config(k3_config(sizes=K3))
counts = count_model(spec)
pairs = {
    "weights of routed experts": (92 * 896 * 3 * 3072 * 3584, counts.params_by_role["routed_expert"]),
    "bytes of routed experts": (92 * 896 * 3 * 3072 * 3584 * 4.25 / 8, counts.bytes_by_role["routed_expert"]),
    "cache bytes per token": (24 * (512 + 64) * 2, counts.kv_bytes_per_token),
    "state bytes per sequence": (69 * 96 * 128 * 128 * 4, counts.state_bytes_per_sequence),
}
rows = tuple((what, round(hand), counted, f"{counted / hand:.3f}") for what, (hand, counted) in pairs.items())
Table(columns=("what", "by hand", "counted", "counted / by hand"), rows=rows)

# %%
assert pairs["weights of routed experts"][0] == pairs["weights of routed experts"][1]
assert pairs["cache bytes per token"][0] == pairs["cache bytes per token"][1]
print(f"{human(counts.num_params, 'parameters')} in {human(counts.weight_bytes, 'B')}")

# %% [markdown]
# The state is a little more than by hand: the last three inputs of the short convolutions belong to it.
#
# ## 2 What does not divide
#
# Sixteen ranks in one tensor-parallel group, each with a sixteenth of the experts: we expect a sixteenth of the bytes
# on each, and more wherever something cannot be cut. Experts and attention heads divide. A router must see all of its
# matrix, and the two projections around the experts are needed whole on whichever rank an expert is.

# %%
layout = Layout(tp=NUM_DEVICES, ep=NUM_DEVICES)
weights = read_weight_table(spec, "mxfp4")
whole, held = weights.stage(Layout(), 0), weights.stage(layout, 0)
rows = [(role, size, size / NUM_DEVICES, held[role]) for role, size in whole.most_common()]
rows.append(("together", sum(whole.values()), sum(whole.values()) / NUM_DEVICES, sum(held.values())))
Table(
    title=f"Bytes of weights, layout {layout}",
    columns=("role", "whole model", f"1/{NUM_DEVICES} of it", "on each rank", "rank / expected"),
    rows=tuple((role, human(a, "B"), human(b, "B"), human(c, "B"), f"{c / b:.2f}") for role, a, b, c in rows),
    note="basis: exact, from the placement table and the storage of each matrix",
)

# %%
assert held["routed_expert"] * NUM_DEVICES == whole["routed_expert"]
assert held["router"] == whole["router"]
assert 1.05 < sum(held.values()) * NUM_DEVICES / sum(whole.values()) < 1.10

# %% [markdown]
# What is held sixteen times costs more than one would think: every rank has some 7 % more than its share.
#
# ## 3 The ledger of a rank
#
# Beside the weights a rank needs room for the caches of its sequences, for what the runtime keeps, and for one step's
# activations. Those are taken from a trace of the real model, which comes with the plan below. Here is the rest.

# %%
hardware = read_hardware(HARDWARE)
reserve = Reserve.for_hardware(hardware)
need = CacheNeed(slots=CONCURRENCY, max_tokens=CONTEXT)
ledger = stage_ledger(weights, layout, 0, need, reserve, capacity=hardware.memory)
ledger

# %%
assert ledger.weights == sum(held.values())
show(memory_bars(ledger.to_json()))

# %% [markdown]
# ## 4 Too few
#
# The weights alone fill more than ten of these devices. So we expect every layout of half as many to be refused, and
# the planner to say for the nearest by how much it fails. A plan that does not exist is an answer, not an error.

# %%
goal = Objective(context=CONTEXT, concurrency=CONCURRENCY)
print(f"the weights alone fill {counts.weight_bytes / hardware.memory.value:.1f} of {hardware.name}")
too_few = plan(spec, Topology.of_hardware(hardware, NUM_DEVICES // 2), goal, reserve=reserve)
too_few

# %%
assert not too_few.ok
assert {refusal.kind for refusal in too_few.refused} == {"memory"}

# %% [markdown]
# ## 5 The search
#
# Now for machines that may be enough. Every layout is looked at: what does not divide or does not fit is refused by
# arithmetic, the others are costed in the order of a lower bound, from operators traced under that very layout.

# %%
machines, reports = {}, {}
for name, number in {HARDWARE: NUM_DEVICES, **OTHERS}.items():
    device = read_hardware(name)
    machines[name] = Topology.of_hardware(device, number)
    reports[name] = plan(spec, machines[name], goal, reserve=Reserve.for_hardware(device))
rows = tuple(
    (
        machines[name].name,
        report.num_layouts,
        len(report.refused),
        str(report.best.layout),
        f"{human(report.best.fullest.free, 'B')} of {human(report.best.fullest.capacity.value, 'B')}",
        human(report.best.per_token.value, "s"),
        f"{report.best.tokens_per_s_per_device:.2f}",
    )
    for name, report in reports.items()
)
columns = ("machines", "layouts", "refused", "chosen", "free", "per token", "tokens/s per device")
Table(columns=columns, rows=rows, note=f"predicted; {reports[HARDWARE].efficiency.source}")

# %%
report = reports[HARDWARE]
best = report.best
assert all(x.ok and x.best.fullest.fits for x in reports.values())
print(report.explain())

# %% [markdown]
# Why others are out, of each kind of reason those that use most devices:

# %%
refused = [(name, refusal) for name, found in reports.items() for refusal in found.refused]
refused.sort(key=lambda pair: (pair[1].kind, -pair[1].layout.world_size, -pair[1].layout.tp))
reasons = {(name, x.reason): (name, x) for name, x in reversed(refused)}  # the first of those with equal reasons
rows = []
for kind in dict.fromkeys(refusal.kind for _, refusal in refused):
    rows += [(name, str(x.layout), kind, x.reason) for name, x in reversed(reasons.values()) if x.kind == kind][:6]
Table(columns=("machines", "layout", "kind", "reason"), rows=tuple(rows), note=f"{len(refused)} altogether")

# %% [markdown]
# ## 6 What a step is made of
#
# By hand: with 16 sequences a step visits a quarter of the experts, 1 - (1 - 16/896)¹⁶, and everything else once. Those
# bytes over the bandwidth of all devices together are the least that a step can take.

# %%
visited = 1 - (1 - 16 / 896) ** CONCURRENCY
expert_bytes = counts.bytes_by_role["routed_expert"]
touched = visited * expert_bytes + counts.active_weight_bytes - expert_bytes * 16 / 896
hand_s = touched / (NUM_DEVICES * hardware.memory_bandwidth.value)
lower_s, predicted_s = best.decode.lower.value, best.per_token.value
rows = (
    ("by hand: bytes over bandwidth", human(hand_s, "s"), "1"),
    ("planner: at least", human(lower_s, "s"), f"{lower_s / hand_s:.1f}"),
    ("planner: predicted", human(predicted_s, "s"), f"{predicted_s / hand_s:.1f}"),
)
Table(columns=("a decode step", "time", "over by hand"), rows=rows)

# %%
assert hand_s < lower_s < predicted_s
show(step_bars(best.decode.to_json()))

# %% [markdown]
# The bound is above ours by what ranks hold twice and by the start of every collective. The prediction is far above
# both, and the chart says why: this project's operators are many and small, each expert is expanded to 16 bits by
# itself before it is used, and starting an operator is assumed to cost 4 µs. What a fused kernel could win stands in
# the bars.

# %%
best.decode.table()

# %% [markdown]
# ## 7 A million tokens
#
# A token adds 27,648 bytes, a state stays at 0.45 GB. So both are equal at 16,000 tokens, and at a million we expect
# 29 GB of cache, 65 times the state. Had all 93 layers full attention, it were 112 GB.

# %%
lengths = [LONG_CONTEXT >> shift for shift in range(10, -1, -1)]
caches = {tokens: kv_bytes(spec, tokens) for tokens in lengths}
state = counts.state_bytes_per_sequence
show(cache_lines(caches, state))

# %%
rows = tuple((n, human(caches[n], "B"), human(state, "B"), f"{caches[n] / state:.2f}") for n in lengths)
assert caches[LONG_CONTEXT] == 27_648 * LONG_CONTEXT
Table(columns=("context", "cache", "state", "cache / state"), rows=rows, note="one sequence, before any split; exact")

# %% [markdown]
# States split by heads, latents do not: every rank of a tensor-parallel group keeps all of them. So wider groups help
# the one and not the other, and for long contexts we expect other layouts to win: more replicas or more stages.

# %%
long_goal = Objective(context=LONG_CONTEXT, concurrency=1)
one = plan(spec, machines[HARDWARE], long_goal, reserve=reserve)
print(one.explain())

# %%
few = [Layout.parse(text) for text in ("tp16xep16", "dp2xtp8xep16", "dp4xtp4xep16", "pp2xtp8xep8")]
four = plan(spec, machines[HARDWARE], Objective(context=LONG_CONTEXT, concurrency=4), layouts=few, reserve=reserve)
Table(
    title=f"Four sequences of {LONG_CONTEXT:,} tokens on {machines[HARDWARE].name}",
    columns=("layout", "reason"),
    rows=tuple((str(refusal.layout), refusal.reason) for refusal in four.refused),
)

# %%
twice = Topology.of_hardware(hardware, 2 * NUM_DEVICES)
eight = plan(spec, twice, Objective(context=LONG_CONTEXT, concurrency=8), reserve=reserve)
assert [x.ok for x in (one, four, eight)] == [True, False, True]
print(eight.explain().partition("\n")[0])
show(memory_bars(eight.best.fullest.to_json()))

# %% [markdown]
# Sixteen devices hold one such sequence and, in none of these layouts, four; thirty-two hold eight: the weights are
# paid once, and what is left over is for caches.
#
# ## 8 How long may they be?
#
# The layout chosen for 8,192 tokens, with longer sequences. Move the slider: only the cache of full attention grows.
# (The activations are those of a prompt of 8,192 tokens; a longer one takes more.)

# %%
activations = next(line.size for line in best.fullest.lines if line.role == "activations")
ledgers = {}
for tokens in (CONTEXT << shift for shift in range(8)):
    need = CacheNeed(slots=best.need.slots, max_tokens=tokens)
    ledgers[tokens] = stage_ledger(
        weights, best.layout, 0, need, reserve, capacity=hardware.memory, activations=activations
    )
panel = ChoicePanel(lambda n: memory_bars(ledgers[n].to_json()), ledgers, label="context", text="{:,} tokens".format)
panel

# %%
panel.slider.value = 16 * CONTEXT
assert panel.result.title in panel.drawing.value  # moved from here as by hand
show(panel.result)

# %%
rows = tuple((n, human(x.cache, "B"), human(x.free, "B"), "fits" if x.fits else "short") for n, x in ledgers.items())
assert [ledgers[CONTEXT].fits, ledgers[CONTEXT << 7].fits] == [True, False]
title = f"{best.layout}, {best.need.slots} sequences on each replica"
Table(title=title, columns=("context", "caches of a rank", "free", ""), rows=rows)

# %% [markdown]
# ## 9 Start it
#
# A plan is of use when it can be typed. The same layout, as three engines are told; each says so where it cannot.

# %%
launches = launch_all(best, machines[HARDWARE], "/models/Kimi-K3")
print("\n\n".join(launch.render() for launch in launches))

# %%
assert launches[0].ok  # this project runs what it plans; the others are asked for what they can express
assert all(f"--nnodes={len(launches[0].commands)}" in str(command) for command in launches[0].commands)

# %% [markdown]
# ## 10 Is any of it true?
#
# None of these machines is here. But people who have them reported what fits, how much memory the weights took, and how
# many tokens the rest held. We predict each report by the rules of the engine that it comes from.

# %%
table, comparisons = compare_reported(spec)
table

# %%
assert all(comparison.agrees for comparison in comparisons)

# %% [markdown]
# Sizes agree with what others saw. Times are another matter: they rest on assumed efficiencies until operators were
# tried on the device itself, which is the next notebook's.
#
# ## 11 Keep
#
# The plan goes into a record. Notebook 04 reads the layout from it and asks what the device makes of its operators.

# %%
append_records(RECORD, [report], environment_of(target="Kimi K3, from its dimensions", command=["notebook 03"]))
again = read_records(RECORD)[-1]
assert again["best"]["text"] == str(best.layout)
print(f"{again['kind']}: {again['best']['text']} on {again['topology']}")

# %% [markdown]
# **Try.** Set `CONCURRENCY = 256`. A step then visits nearly all experts and takes longer, but by far less than sixteen
# times, so that every device answers more tokens a second.
#
# ## What we have now
#
# A model counted to the byte, every layout of three machines either refused with its reason or costed, and the commands
# that start the best one. `workbench plan DIR --hardware h200 --devices 16 --launch` does the same in a terminal.
# Next: `04_operators_coverage`.
