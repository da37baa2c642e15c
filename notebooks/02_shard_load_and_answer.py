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
# # 02 · Shard, load and answer
#
# **Question.** Do several processes, each holding a part of the model, answer as one process would?
#
# **Answer in advance.** Yes, to the token. Along the way we see what each rank holds, that it reads those bytes and no
# others, that every parameter is written exactly once, and how long a token takes.
#
# Takes about a minute on two cores, no accelerator. The ranks are processes of their own: this kernel never loads torch
# and stays free, and if it restarts or dies, the ranks end by themselves.

# %%
import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from workbench.base import Table, WorkerDiedError, human
from workbench.checkpoint import k3_config, write_checkpoint
from workbench.cluster import measure_memory_copy
from workbench.deployment import Deployment
from workbench.placement import Layout, choose_layout, owned_shards
from workbench.serving import ImageProcessor, MultimodalInferenceService, read_tokenizer
from workbench.spec import count_model, read_spec
from workbench.view import LineChart, LoadProgressView, Series
from workbench.view.notebook import show

# %% tags=["parameters"]
MODEL = Path("../data/k3-tiny")
PICTURE = Path("../data/images/red_circle.png")
NUM_RANKS = 2
MAX_TOKENS = 24

# %% [markdown]
# ## 1 Who holds what
#
# A layout says how many ranks share each kind of work. With two ranks, `tp2` splits attention heads and matrix widths,
# and `ep2` gives each rank half of the experts whole. Norms, the router and the latent projections are on both. So we
# expect each rank to hold half of the model, plus half of what both hold.

# %%
spec = read_spec(MODEL)
layout = choose_layout(spec, NUM_RANKS)
shards = {rank: list(owned_shards(spec, layout, rank)) for rank in range(NUM_RANKS)}
held = {rank: sum(shard.num_bytes for shard in shards[rank]) for rank in shards}
whole = count_model(spec).weight_bytes
twice = sum(s.num_bytes for s in shards[0] if s.tensor.expert is None and s.num_bytes == s.tensor.num_bytes)

# %%
rows = [(f"rank {rank}", size, f"{size / whole:.1%}") for rank, size in held.items()]
rows += [("whole model", whole, "100.0%"), ("on every rank", twice, f"{twice / whole:.1%}")]
Table(title=f"layout {layout}", columns=("", "bytes", "of the model"), rows=tuple(rows))

# %%
assert sum(held.values()) == whole + (NUM_RANKS - 1) * twice

# %% [markdown]
# ## 2 Start the ranks and load
#
# Each rank plans its reads from the headers, then reads its own byte ranges through a bounded window. We ask for fp32,
# so that in section 5 rounding cannot excuse a difference. We expect the bytes read to be the bytes assigned, and not
# one more.

# %%
with LoadProgressView(num_ranks=NUM_RANKS) as progress:
    deployment = Deployment.start(MODEL, layout, precision="fp32", on_progress=progress)
deployment

# %%
stats = deployment.load_stats
keys = ("bytes_assigned", "bytes_read", "num_reads", "resident_bytes", "seconds")
rows = tuple((f"rank {rank}", *(row[key] for key in keys)) for rank, row in enumerate(stats))
Table(columns=("", *keys), rows=rows)

# %%
assert all(row["bytes_read"] == row["bytes_assigned"] == held[rank] for rank, row in enumerate(stats))

# %% [markdown]
# ## 3 The ledger
#
# While loading, every rank keeps a book: for each parameter the rows that were written, from which file and offset,
# with which conversion, and the norm of what came out. A row that is missing or written twice fails the load by name.

# %%
ledgers = deployment.ledgers
keys = ("rank", "entries", "rows", "rows_written", "bytes", "files")
Table(columns=keys, rows=tuple(tuple(book[key] for key in keys) for book in ledgers))

# %%
books = [{(line["name"], line["slot"]): line for line in book["parameters"]} for book in ledgers]
names = ["embed.weight", "layers.0.mixer.q_proj.weight", "layers.3.mixer.kv_b_proj.weight", "head.weight"]
rows = []
for name in names:
    for rank, line in enumerate(book[name, None] for book in books):
        first = line["sources"][0]
        rows.append((name, rank, line["rows"], first["file"], first["offset"], line["transform"], line["norm"]))
Table(columns=("parameter", "rank", "rows", "file", "offset", "conversion", "norm"), rows=tuple(rows))

# %% [markdown]
# Squares of norms add up over the pieces of a matrix. So both ranks together must have the norm of the whole matrix,
# which we ask of one rank that loads everything.

# %%
alone = Deployment.start(MODEL, Layout(), precision="fp32")
(book,) = alone.ledgers
whole_norms = {line["name"]: line["norm"] for line in book["parameters"] if line["slot"] is None}
for name in names:
    pieces = sum(book[name, None]["norm"] ** 2 for book in books) ** 0.5
    print(f"{name:<34} pieces {pieces:.6f}   whole {whole_norms[name]:.6f}")
    assert abs(pieces / whole_norms[name] - 1) < 1e-5

# %% [markdown]
# ## 4 Ask
#
# The weights are random, so the answers are noise. What matters is that they come through the whole machine: text into
# ids, picture into patches, both through two ranks, tokens back into text.

# %%
tokenizer, processor = read_tokenizer(MODEL, spec), ImageProcessor(spec.image)
service = MultimodalInferenceService(deployment, tokenizer, processor).start()
text_answer = service.infer("What is a shard?", max_tokens=MAX_TOKENS)
print(text_answer)

# %% [markdown]
# Now with a picture of 160 × 120 pixels. A token covers 28 × 28 pixels and the edge is padded, so we expect 6 × 5 = 30
# tokens for it.

# %%
Image.open(PICTURE)

# %%
picture_answer = service.infer("What does the picture show?", PICTURE, max_tokens=MAX_TOKENS)
print(picture_answer)
print(picture_answer.usage)

# %%
assert picture_answer.usage.image_tokens == 30

# %% [markdown]
# The same question again, piece by piece as the text comes. Leaving the block early would stop the request and free its
# place.

# %%
began_s = time.perf_counter()
with service.stream("What does the picture show?", PICTURE, max_tokens=MAX_TOKENS) as reply:
    arrived = [(repr(piece), f"{time.perf_counter() - began_s:.3f}") for piece in reply]
Table(columns=("piece", "seconds after asking"), rows=(*arrived[:4], ("…", "…"), arrived[-1]))

# %%
assert reply.answer.token_ids == picture_answer.token_ids  # temperature 0: the same tokens every time

# %% [markdown]
# ## 5 Two ranks answer as one
#
# The single rank from section 3 gets the same questions. Sums are taken in another order there, so log probabilities
# may differ in the last digits of fp32, around 1e-5. The tokens must not differ at all.

# %%
with MultimodalInferenceService(alone, tokenizer, processor) as single:
    same_text = single.infer("What is a shard?", max_tokens=MAX_TOKENS)
    same_picture = single.infer("What does the picture show?", PICTURE, max_tokens=MAX_TOKENS)
alone.close()

# %%
rows = tuple(
    (
        what,
        len(many.token_ids),
        many.token_ids == one.token_ids,
        max(abs(a - b) for a, b in zip(many.logprobs, one.logprobs, strict=True)),
    )
    for what, many, one in (("text", text_answer, same_text), ("picture", picture_answer, same_picture))
)
Table(columns=("question", "tokens", "all equal", "largest difference of a log probability"), rows=rows)

# %%
assert text_answer.token_ids == same_text.token_ids
assert picture_answer.token_ids == same_picture.token_ids

# %% [markdown]
# ## 6 How fast
#
# A token must read the weights it touches at least once. That gives a floor: bytes touched, divided over the ranks,
# over the rate of this memory, which we measure first.

# %%
memory = measure_memory_copy()
touched = count_model(spec).active_weight_bytes * 2 / NUM_RANKS  # 16 bits on disk, 32 bits in memory here
floor_s = touched / memory.value
print(f"memory: {memory}\nfloor: {human(floor_s, 's')} a token")

# %%
timings = picture_answer.timings
series = tuple(
    Series(name=name, x=tuple(range(1, len(answer.timings.token_s) + 1)), y=answer.timings.token_s)
    for name, answer in (("text question", text_answer), ("picture question", picture_answer))
)
first, following = human(timings.first_token_s, "s"), human(timings.per_token_s, "s")
show(
    LineChart(
        title=f"With a picture the first token comes after {first}, then one every {following}",
        series=series,
        x_label="token",
        x_unit="",
        y_label="time since the question",
        y_unit="s",
    )
)
print(f"measured over floor: {timings.per_token_s / floor_s:,.0f} times")

# %% [markdown]
# The ratio is enormous because the model is tiny: the time goes into starting some thousand small operations and into
# the rounds between the ranks, not into reading weights. On the published model one token touches 137 GB, and there the
# floor is what counts.

# %% [markdown]
# ## 7 A load worth watching
#
# Three megabytes are read before a picture of it can be drawn. So we make a larger random checkpoint, 164 MB, and watch
# both ranks read it. We expect two lines that rise together, each to half of the bytes and a little more, and that no
# rank takes more memory than its weights and the window it reads through, 64 MiB.

# %%
folder = TemporaryDirectory()
SIZES = {"num_layers": 16, "full_attn_layers": (4, 8, 12, 16), "hidden_size": 512, "vocab_size": 8192}
EXPERTS = {"num_experts": 64, "expert_width": 256, "latent_dim": 256, "dense_width": 2048}
larger = write_checkpoint(folder.name, k3_config(**SIZES, **EXPERTS))

# %%
with (
    LoadProgressView(num_ranks=NUM_RANKS) as progress,
    Deployment.start(larger, layout, on_progress=progress) as larger_deployment,
):
    larger_stats = larger_deployment.load_stats
folder.cleanup()

# %%
keys = ("bytes_assigned", "bytes_read", "seconds", "bytes_per_s", "peak_host_bytes", "resident_bytes", "window_bytes")
rows = tuple((f"rank {rank}", *(row[key] for key in keys)) for rank, row in enumerate(larger_stats))
Table(columns=("", *keys), rows=rows)

# %%
assert progress.watch.snapshot().is_done
assert progress.num_redraws >= 2  # it moved while the cell was waiting
assert all(row["bytes_read"] <= 1.02 * row["bytes_assigned"] for row in larger_stats)
assert all(row["peak_host_bytes"] <= row["resident_bytes"] + row["window_bytes"] for row in larger_stats)

# %% [markdown]
# ## 8 A rank dies
#
# On a large machine some rank will fail one day, and then the others wait for it. We kill one and ask a question. We
# expect no waiting, but an error that names the rank, how it ended and what it was doing.

# %%
os.kill(deployment.pids[1], signal.SIGKILL)
try:
    service.infer("Are you still there?", max_tokens=MAX_TOKENS)
except WorkerDiedError as error:
    died = str(error)
print("\n".join(died.splitlines()[:5]))

# %%
assert died.startswith("rank 1 (process")
assert "SIGKILL" in died

# %%
service.stop()
deployment.close()
assert "torch" not in sys.modules  # everything was computed by the ranks, nothing in this kernel
deployment

# %% [markdown]
# **Try.** Set `NUM_RANKS = 4` above and run again: each rank holds about a third, and section 5 still finds the same
# tokens.
#
# ## What we have now
#
# A model spread over processes, each with exactly its part, and answers that do not depend on how it was spread.
# Whatever was said here about tokens and norms, `workbench day0` checks on any checkpoint and writes into a report.
