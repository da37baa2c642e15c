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
# # 07 · Latency, and where it comes from
#
# **Question.** How long do users wait at a given rate of requests, and what are the ranks doing meanwhile?
#
# **Answer in advance.** Below its limit a deployment answers in the time of its steps; near the limit requests queue,
# and the first token is what suffers. Inside a step we find operators, collectives, and a gap in which nothing runs.
#
# Takes about two minutes on two cores, no accelerator. The model is tiny and its weights are random, so the figures say
# nothing about a large one; the way to get them is the same.

# %%
from pathlib import Path

from workbench.base import Table, human
from workbench.deployment import Deployment
from workbench.placement import choose_layout
from workbench.profiling import (
    ClosedLoop,
    DeploymentProfiler,
    Kind,
    Lengths,
    Load,
    Poisson,
    ServiceTarget,
    Slo,
    append_records,
    compare_runs,
    environment_of,
    generate_load,
    plan_load,
    write_trace,
)
from workbench.serving import open_service
from workbench.spec import read_spec
from workbench.view import (
    LoadProgressView,
    LoadView,
    category_bars,
    communication_bars,
    comparison_bars,
    expert_lines,
    latency_curves,
)
from workbench.view.notebook import show

# %% tags=["parameters"]
MODEL = Path("../data/k3-tiny")
NUM_RANKS = 2
NUM_REQUESTS = 8
PROMPT_TOKENS, ANSWER_TOKENS = 16, 8
LOAD_SHARE = 0.5  # of the rate that one asker at a time reaches
RECORD, TRACE = Path("../out/notebook-07.jsonl"), Path("../out/notebook-07.json.gz")

# %% [markdown]
# ## 1 Start
#
# Two ranks share the model. The kernel only drives them: it loads no torch.

# %%
layout = choose_layout(read_spec(MODEL), NUM_RANKS)
with LoadProgressView(num_ranks=NUM_RANKS) as progress:
    deployment = Deployment.start(MODEL, layout, precision="bf16", max_tokens=256, on_progress=progress)
service = open_service(deployment, MODEL).start()
target = ServiceTarget(service)

# %% [markdown]
# ## 2 One at a time
#
# With one request under way there is no queue, and an answer takes one step for the prompt and one for each further
# token. So we expect: end to end = first token + (tokens - 1) × time per token.

# %%
kind = Kind(
    prompt=Lengths(least=PROMPT_TOKENS, most=PROMPT_TOKENS), answer=Lengths(least=ANSWER_TOKENS, most=ANSWER_TOKENS)
)
alone = Load(arrivals=ClosedLoop(concurrency=1), num_requests=NUM_REQUESTS, kinds=(kind,), num_warm_up=2)
plan = plan_load(alone, count_tokens=lambda text: len(service.tokenizer.encode(text)))
with LoadView(num_requests=NUM_REQUESTS, title="One at a time") as view:
    quiet = generate_load(target, plan, on_request=view)

# %%
quiet

# %%
show(latency_curves(quiet.to_json()))

# %%
timing = quiet.timings[0]
expected_s = timing.first_token_s + (timing.num_tokens - 1) * (timing.per_token_s or 0.0)
print(f"expected {human(expected_s, 's')}, measured {human(timing.end_to_end_s, 's')}")
assert all(t.error == "" and t.num_tokens <= ANSWER_TOKENS for t in quiet.timings)
assert expected_s <= timing.end_to_end_s * 1.001

# %% [markdown]
# Warm-up stands apart: the first request pays for what is set up once.
#
# ## 3 Requests that do not wait for one another
#
# Users come when they come. We send a Poisson stream at a share of the rate above, and count latency from when a
# request was **due**, so that a request that had to wait for its turn to be sent is not forgotten. At half the rate we
# expect tokens as before, and a first token that is sometimes later, because some requests meet.

# %%
rate = LOAD_SHARE * quiet.answered_per_s
stream = Load(arrivals=Poisson(rate_per_s=rate), num_requests=NUM_REQUESTS, kinds=(kind,), num_warm_up=0, seed=1)
limits = Slo(first_token_s=4 * quiet.summary.first_token_s.p50)
with LoadView(num_requests=NUM_REQUESTS, title=f"{rate:.2g} requests/s") as view:
    busy = generate_load(
        target,
        plan_load(stream, count_tokens=lambda text: len(service.tokenizer.encode(text))),
        slo=limits,
        on_request=view,
    )
busy

# %%
assert view.num_redraws >= 1
assert busy.goodput.num_requests == NUM_REQUESTS

# %% [markdown]
# A share of so few requests is not sure, and the interval beside it says how little: that is the figure to quote.
#
# ## 4 Inside the ranks
#
# The same load once more, with every fourth step recorded. We expect the parts to add up to the step, and on a model as
# small as this most of it to be the overhead of many small operators.

# %%
with DeploymentProfiler(deployment, every=4, max_steps=3) as profiler:
    watched = generate_load(target, plan)
profile = profiler.profile
profile

# %%
ledger = profile.ledgers[0]
show(category_bars(ledger.to_json()))
assert abs(ledger.accounted_s / ledger.seconds - 1) < 0.05

# %% [markdown]
# ## 5 Waiting is not transfer
#
# Two ranks on two busy cores never arrive together. Time in a collective before the last rank has entered is waiting,
# and belongs to that rank; only the rest is the link.

# %%
show(communication_bars(profile.communication.to_json()))

# %% [markdown]
# Now we slow rank 1 on purpose: it sleeps 5 ms before every collective. We expect the waiting of rank 0 to grow by
# about that much for each, and the finding to name rank 1.

# %%
deployment.call("workbench.profiling.rank:delay", {"rank": 1, "seconds": 0.005})
with DeploymentProfiler(deployment, with_work=False, max_steps=1) as profiler:
    answer = target.ask(plan.requests[0].question)
deployment.call("workbench.profiling.rank:delay", {"rank": 1, "seconds": 0.0})
slowed = profiler.profile.communication

# %%
shares = [(name, c.ranks[0].waiting_s / c.ranks[0].count) for name, c in
          (("before", profile.communication), ("slowed", slowed))]  # fmt: skip
rows = tuple((name, human(each, "s")) for name, each in shares)
assert slowed.latest == 1
assert shares[1][1] > 0.0045
Table(columns=("rank 0", "waiting per collective"), rows=rows)

# %% [markdown]
# ## 6 Experts
#
# Random weights route unevenly, and a step that reads few experts is faster than one that reads many. So the number of
# experts that were hit belongs beside every time.

# %%
show(expert_lines(profile.experts.to_json()))

# %% [markdown]
# ## 7 Keep and compare
#
# Every run is a line of JSON with hardware, versions and commit. Comparing the two runs of the same load, without and
# with the profiler, shows what it cost. With so few requests, most differences drown in noise, which is an answer too.

# %%
environment = environment_of(target=MODEL.name, deployment=deployment, command=["notebook 07"])
append_records(RECORD, [quiet, watched, profile], environment)
comparison = compare_runs(quiet.to_json(), watched.to_json())
comparison

# %%
show(comparison_bars(comparison.to_json()))

# %%
file = write_trace(TRACE, profile=profile, timings=watched.timings)
print(f"{file.num_events} events, {file.num_left_out} left out: open it at ui.perfetto.dev")
assert file.num_events > 0

# %% [markdown]
# **Try.** Set `LOAD_SHARE` to 2: requests then come faster than they are answered, the queue grows as long as the run
# lasts, and so does the first token, while the time between tokens stays.

# %%
service.stop()
deployment.close()

# %% [markdown]
# ## What we have now
#
# Latencies counted in tokens, from when requests were due; where a step goes; who waits for whom; all in a record.
# `workbench profile` does the same from the command line, also for servers of others.
