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
# # 10 · Train on the same shards
#
# **Question.** Can the modules that serve a model also train it, sharded by the same table, and does what comes out
# answer questions about pictures it never saw?
#
# **Answer in advance.** Yes. A minute of training shows the loop; the model that ships in `data/k3-nano` shows what an
# hour of it gives. Everything runs on two cores, no accelerator.

# %%
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from workbench.base import Table
from workbench.deployment import Deployment
from workbench.exam.record import read_exam
from workbench.placement import Layout
from workbench.serving import open_service
from workbench.spec import count_model
from workbench.training.answers import MAX_NEW_TOKENS
from workbench.training.config import read_config
from workbench.training.data import is_right, make_chat, picture_exam, read_facts, scene_image
from workbench.training.launch import train
from workbench.training.metrics import read_metrics
from workbench.view import TrainingHistory, TrainingView, balance_chart, exam_chart, loss_chart
from workbench.view.notebook import show

# %% tags=["parameters"]
RECIPE = Path("../data/train/tiny.toml")
MODEL = Path("../data/k3-nano")
NUM_QUESTIONS = 3

# %% [markdown]
# ## 1 What it learns from
#
# A recipe is a text file with all that decides the result, its seed included. The data are made as they are needed: a
# scene is drawn at random, a question about it is asked, and the answer is known because the scene is. In a part of
# the chats the assistant thinks before it answers: it reads the picture out, sorts what it saw by shape and by colour,
# and looks up in that index what was asked for. Here is one.

# %%
config = read_config(RECIPE)
facts = read_facts()
picture_only = dataclasses.replace(
    config.mixture, picture=1.0, two_pictures=0.0, told=0.0, facts=0.0, mixed=0.0, no_picture=0.0, thinking_share=1.0
)
chat = make_chat(np.random.default_rng(11), facts, picture_only)
for message in chat.messages:
    words = message.content if isinstance(message.content, str) else message.content[-1].text
    print(f"{message.role:>9}: {f'({message.thinking}) ' if message.thinking else ''}{words}")

# %%
scene_image(chat.scenes[0]).resize([3 * side for side in chat.scenes[0].canvas], Image.Resampling.NEAREST)

# %% [markdown]
# ## 2 A minute of training
#
# Two ranks, each with every second pack of tokens (`dp2`); gradients are summed, and both make the same step. Before
# the first one the model knows nothing: any of the tokens is as likely as another, so we expect a loss of about
# ln(vocabulary). The words of answers repeat, so it should fall below half of that within the minute.

# %%
guess = math.log(config.sizes["vocab_size"])
print(f"{count_model(config.spec()).num_params:,} parameters; expected loss at first: {guess:.2f} nat")

# %%
folder = TemporaryDirectory()
out = Path(folder.name) / "unbroken"
with TrainingView(num_steps=config.steps) as view:
    report = train(RECIPE, out, on_record=view)
print(report)

# %%
losses = [record["loss"] for record in read_metrics(out / "metrics.jsonl", "step")]
rows = (("expected", guess), ("first step", losses[0]), ("mean of the last ten", float(np.mean(losses[-10:]))))
Table(columns=("", "loss, nat"), rows=rows)

# %%
assert abs(losses[0] / guess - 1) < 0.3
assert np.mean(losses[-10:]) < guess / 2

# %% [markdown]
# ## 3 Another layout, the same steps
#
# What a rank holds comes from the same placement table as in serving. With `ep2` each holds half of the experts, and
# the gradients of the experts travel the way their tokens did. Sums are taken in another order, so after a dozen steps
# the losses should agree to some five digits, not to the last bit.

# %%
short = RECIPE.read_text().replace("steps = 40", "steps = 12", 1)
runs = {}
for layout in ("dp1", "dp2xep2"):
    recipe = Path(folder.name) / f"{layout}.toml"
    recipe.write_text(short.replace('layout = "dp2"', f'layout = "{layout}"'))
    train(recipe, Path(folder.name) / layout)
    runs[layout] = [r["loss"] for r in read_metrics(Path(folder.name) / layout / "metrics.jsonl", "step")]
rows = tuple((step + 1, *(runs[layout][step] for layout in runs)) for step in (0, 5, 11))
Table(columns=("step", *runs), rows=rows)

# %%
for layout in runs:
    assert np.allclose(runs[layout], runs["dp1"], rtol=1e-3), layout

# %% [markdown]
# ## 4 Killed in the middle
#
# A long run meets a power cut one day. We start the same run again, kill everything after the first state was saved,
# and resume. Packs depend on seed and step alone, and a state holds all the rest, so we expect the very same weights.

# %%
broken = Path(folder.name) / "broken"
command = ["import sys; from workbench.training.launch import train; train(sys.argv[1], sys.argv[2])"]
process = subprocess.Popen([sys.executable, "-c", *command, RECIPE, broken], start_new_session=True)
while not any(broken.glob("states/*/*")) and process.poll() is None:
    time.sleep(0.05)
os.killpg(process.pid, signal.SIGKILL)
process.wait()
print(f"killed after {len(read_metrics(broken / 'metrics.jsonl', 'step'))} of {config.steps} steps were written down")
train(RECIPE, broken, resume=True)

# %%
files = sorted(path.name for path in (out / "model").glob("*.safetensors"))
same = [(name, (out / "model" / name).read_bytes() == (broken / "model" / name).read_bytes()) for name in files]
Table(columns=("file", "byte for byte the same"), rows=tuple(same))

# %%
assert files
assert all(is_same for _, is_same in same)
folder.cleanup()

# %% [markdown]
# ## 5 What an hour gives
#
# `data/k3-nano` came out of the same loop. Its folder holds the recipe and the curve of that run. From `qat_start` on
# the forward pass sees every weight as the published files hold it, experts in MXFP4, so that rounding at the end costs
# nothing. We look at the loss, at the exams on the way, and at how evenly the experts were used.

# %%
history = TrainingHistory(json.loads(line) for line in (MODEL / "curve.jsonl").read_text().splitlines())
show(loss_chart(history))

# %%
GROUPS = {"scenes": ("shape", "colour", "count", "position"), "reading": ("digit", "word"), "domain": ("fact",)}
show(exam_chart(history, GROUPS))

# %%
show(balance_chart(history))

# %% [markdown]
# ## 6 Does it look?
#
# An exam with questions about unseen scenes says how often it is right; the same questions with an empty picture say
# how often it would be right by guessing. This is the record that `workbench exam` left beside the weights.

# %%
exam = read_exam(MODEL)
print(exam)

# %% [markdown]
# Now we ask ourselves, two ranks, questions that the exam did not have.

# %%
items = picture_exam(1, seed=5, kinds=("count", "position", "shape", "colour", "digit")[:NUM_QUESTIONS])
with Deployment.start(MODEL, Layout(tp=2)) as ranks, open_service(ranks, MODEL) as service:
    replies = [service.infer(item.text, scene_image(item.scene), max_tokens=MAX_NEW_TOKENS) for item in items]
rows = tuple(
    (item.text, reply.thinking, reply.text, "yes" if is_right(item, reply.text) else f"no: {item.answer}")
    for item, reply in zip(items, replies, strict=True)
)
Table(columns=("question", "thought", "answer", "right"), rows=rows)

# %%
sides = [scene_image(item.scene) for item in items]
strip = Image.new("RGB", (sum(image.width + 8 for image in sides), max(image.height for image in sides)), "white")
for idx, image in enumerate(sides):
    strip.paste(image, (sum(other.width + 8 for other in sides[:idx]), 0))
strip

# %%
assert all(reply.text for reply in replies)

# %% [markdown]
# **Try.** Set `thinking=False` in the question: without its index of the picture the same model guesses where it should
# search.
#
# ## What we have now
#
# One set of modules and one placement table, forward and backward, and a model from it whose answers can be checked
# against scenes it never saw. `workbench train` runs any recipe, `workbench exam` asks the questions.
