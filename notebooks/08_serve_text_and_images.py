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
# # 08 · Serve text and images
#
# **Question.** What does a client of this model get: words, pictures, company, and where is it turned away?
#
# **Answer in advance.** Any client of the OpenAI interface asks in text and pictures and reads the answer as it is
# written. Requests that are under way together share the steps of the ranks; a beginning that was read before is not
# read again; and what is too much is refused at once, by name, instead of waiting without end.
#
# Takes about a minute on two cores, no accelerator: everything here ran on CPU. The model is small and was trained
# here, on drawn scenes and on the words of this project, so its answers mean something.

# %%
import json
import urllib.error
import urllib.request
from pathlib import Path

from IPython.display import Pretty, display
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from workbench.base import Table, WorkbenchError, human
from workbench.deployment import Deployment
from workbench.placement import choose_layout
from workbench.profiling import (
    ClosedLoop,
    Kind,
    Lengths,
    Load,
    ServerTarget,
    append_records,
    compare_runs,
    environment_of,
    generate_load,
    plan_load,
)
from workbench.serving import open_service
from workbench.serving.client import RemoteService, chat_content
from workbench.serving.http import HttpServer, ServerSettings
from workbench.spec import read_spec
from workbench.view import LoadProgressView, LoadView, comparison_bars, latency_curves
from workbench.view.notebook import show

# %% tags=["parameters"]
MODEL, SCENES = Path("../data/k3-nano"), Path("../data/scenes")
NUM_RANKS, NUM_SLOTS = 2, 8  # sequences that a step can hold
NUM_REQUESTS, NUM_ASKERS = 8, 4
PROMPT_TOKENS, ANSWER_TOKENS = 24, 16
PAGE_TOKENS = 64  # a beginning of a prompt is kept in pieces of so many tokens
RECORD = Path("../out/notebook-08.jsonl")

# %% [markdown]
# ## 1 Start
#
# Two ranks share the model, an engine drives them, and a server listens in front of it, here in a thread of the kernel.
# `workbench serve data/k3-nano --ranks 2` does the same from a terminal.

# %%
layout = choose_layout(read_spec(MODEL), NUM_RANKS)
with LoadProgressView(num_ranks=NUM_RANKS) as progress:
    ranks = Deployment.start(MODEL, layout, num_slots=NUM_SLOTS, max_tokens=1024, on_progress=progress)
service = open_service(ranks, MODEL, prefix_pages=16, page_tokens=PAGE_TOKENS).start()
server = HttpServer(service, ServerSettings(model="k3-nano", port=0)).start()
client = RemoteService(server.url)

# %%
ready = urllib.request.urlopen(server.url.removesuffix("/v1") + "/ready").status
print(f"layout {layout}: {client.models()} answers, /ready says {ready}")
assert ready == 200

# %% [markdown]
# ## 2 Words, as they are written
#
# The server only carries the answer. So we expect the very text that the service gives without it, and as many tokens.
# What arrives are pieces of text, not tokens: a piece may hold several, which is why the server counts them
# (`usage`), chunk by chunk if asked.

# %%
question = "What is tensor parallelism?"
reply = client.stream(question, max_tokens=48, running_usage=True)
shown, text = display(Pretty(""), display_id=True), ""
for piece in reply:
    text += piece
    shown.update(Pretty(text))
told = reply.answer

# %%
alone = service.infer(question, max_tokens=48)
counts = [chunk.completion_tokens for chunk in reply.chunks]
print(f"{told.usage.completion_tokens} tokens in {sum(bool(chunk.content) for chunk in reply.chunks)} pieces of text")
assert told.text == alone.text
assert told.usage.completion_tokens == alone.usage.completion_tokens == counts[-1]

# %% [markdown]
# ## 3 A picture
#
# A picture is cut into patches; the tower turns them into tokens that stand in the prompt before the words. How many,
# the sizes alone decide: patches of 14 × 14 pixels, merged two by two in each direction.

# %%
path = SCENES / "shape.png"
width, height = Image.open(path).size
image = read_spec(MODEL).image
side = image.patch_size * image.merge_size
expected = -(-width // side) * -(-height // side)
print(f"{width} x {height} pixels: {expected} tokens expected")
Image.open(path)

# %%
reply = client.stream("What shape is the blue one?", [path], max_tokens=192)
shown, text = display(Pretty("(thinks)"), display_id=True), ""
for piece in reply:
    text += piece
    shown.update(Pretty(text))
seen = reply.answer
print(f"{seen.usage.image_tokens} of {seen.usage.prompt_tokens} prompt tokens stand for the picture")
print(f"thought: {seen.thinking}")
assert seen.usage.image_tokens == expected
assert seen.thinking

# %% [markdown]
# This model first writes down what it sees, and then answers. What it thought is apart from what it said
# (`reasoning_content`), and counts as generated.
#
# Does it look, or does it guess from the words? The same words with an empty picture should lead elsewhere, and over
# pictures that it has never seen most answers should be right. All are asked at once and share the steps.

# %%
exam = json.loads((SCENES / "questions.json").read_text(encoding="utf-8"))
blank = Image.new("RGB", (width, height), "white")
asked = [*((each["question"], SCENES / each["picture"]) for each in exam), (exam[0]["question"], blank)]
replies = [client.stream(words, [picture], max_tokens=192) for words, picture in asked]
*texts, without = ["".join(reply) for reply in replies]
marks = [text in each["answers"] for each, text in zip(exam, texts, strict=True)]
rows = tuple((each["question"], each["answers"][0], text, "yes" if mark else "no")
             for each, text, mark in zip(exam, texts, marks, strict=True))  # fmt: skip
Table(columns=("question", "right answer", "answer", "right"), rows=rows)

# %%
print(f"{sum(marks)} of {len(exam)} right; {exam[0]['question']!r} about an empty picture: {without!r}")
assert sum(marks) > len(exam) // 2
assert without != texts[0]

# %% [markdown]
# ## 4 In company
#
# A step decodes every sequence that is under way. Alone, a request of one prompt and N tokens takes N steps: the first
# token comes with the prompt. So all requests one after another should take exactly their tokens in steps, and with
# four at once about a quarter of that. Whether that is four times as fast depends on what a step costs with four rows
# instead of one: on a model as small as this not much, on two cores that ranks and clients share, something.

# %%
kind = Kind(
    prompt=Lengths(least=PROMPT_TOKENS, most=PROMPT_TOKENS), answer=Lengths(least=ANSWER_TOKENS, most=ANSWER_TOKENS)
)
count = service.tokenizer.encode
target = ServerTarget(client, fields={"ignore_eos": True})  # all answers equally long
reports, steps = {}, {}
for askers in (1, NUM_ASKERS):
    load = Load(arrivals=ClosedLoop(concurrency=askers), num_requests=NUM_REQUESTS, kinds=(kind,), num_warm_up=1)
    plan = plan_load(load, count_tokens=lambda text: len(count(text)))
    with LoadView(num_requests=NUM_REQUESTS, title=f"{askers} at once") as view:
        begun = service.stats().num_steps
        reports[askers] = generate_load(target, plan, on_request=view)
    steps[askers] = service.stats().num_steps - begun - ANSWER_TOKENS  # without those of the warm-up

# %%
tokens = NUM_REQUESTS * ANSWER_TOKENS
rows = tuple((askers, tokens, steps[askers], tokens / steps[askers], tokens / report.seconds)
             for askers, report in reports.items())  # fmt: skip
Table(columns=("askers", "tokens", "steps", "tokens a step", "tokens a second"), rows=rows)

# %%
assert all(not timing.error and timing.num_tokens == ANSWER_TOKENS for x in reports.values() for timing in x.timings)
assert steps[1] == tokens
assert tokens // NUM_ASKERS <= steps[NUM_ASKERS] < tokens

# %%
show(latency_curves(reports[NUM_ASKERS].to_json()))

# %% [markdown]
# What the deployment gains, each asker pays a part of: the time between two tokens of one answer is the time of a step
# with all the others in it.

# %%
comparison = compare_runs(reports[1].to_json(), reports[NUM_ASKERS].to_json())
show(comparison_bars(comparison.to_json()))

# %% [markdown]
# ## 5 The same beginning
#
# Chats and documents begin alike: the same instructions, the same pages. We ask two questions about one text. The
# second should read only what comes after the last whole page that both share; a page is 64 tokens here, and a
# recurrent layer can return to no other place than the end of one.

# %%
fact = "A shard is a part of a tensor. A rank is a process that holds shards. "
texts = [fact * 12 + end for end in ("What is a shard?", "And what is a rank?")]
prompts = [service.prepare(text)[0].token_ids for text in texts]
shared = next(n for n, (one, other) in enumerate(zip(*prompts, strict=False)) if one != other)
expected = shared // PAGE_TOKENS * PAGE_TOKENS
cached, asked = [], []
for text in texts:
    before = service.stats().num_cached_tokens
    reply = client.stream(text, max_tokens=8)
    "".join(reply)
    cached.append(service.stats().num_cached_tokens - before)
    asked.append(reply.answer)

# %%
rows = tuple((n, len(prompt), kept, len(prompt) - kept, human(answer.timings.first_token_s, "s"))
             for n, (prompt, kept, answer) in enumerate(zip(prompts, cached, asked, strict=True), start=1))  # fmt: skip
note = f"{shared} tokens are the same, {expected} of them in whole pages"
Table(columns=("question", "prompt tokens", "found", "read", "first token"), rows=rows, note=note)

# %%
assert cached == [0, expected]
assert expected > 0

# %% [markdown]
# ## 6 Where it says no
#
# A server without limits fails its users later and all at once. What does not fit into the model, or cannot be a
# picture, is refused before it costs a step; we expect status 400 and the reason for each.

# %%
refused = {
    "a text longer than the model's room": ("word " * 20_000, []),
    "seventeen pictures": ("Compare them.", [blank] * 17),
    "the first half of a picture": ("What is it?", [path.read_bytes()[: path.stat().st_size // 2]]),
}
rows = []
for what, (text, pictures) in refused.items():
    try:
        client.stream(text, pictures).close()
    except WorkbenchError as error:
        rows.append((what, error.found, error.message[:100]))
Table(columns=("request", "answer", "why"), rows=tuple(rows))

# %%
assert [row[1] for row in rows] == ["status 400"] * len(refused)

# %% [markdown]
# More requests than places are told when to come back. A second server over the same ranks, on which nobody may wait:
# long answers take all its places, the next request should get 429 with `Retry-After`, and once the others are given
# up, it is answered.

# %%
strict = HttpServer(service, ServerSettings(model="k3-nano", port=0, max_waiting=0)).start()
crowd = RemoteService(strict.url)
held = [crowd.stream("Go on.", max_tokens=900, fields={"ignore_eos": True}) for _ in range(NUM_SLOTS)]
body = json.dumps({**chat_content("k3-nano", question), "max_tokens": 48}).encode()
further = urllib.request.Request(f"{strict.url}/chat/completions", body, {"content-type": "application/json"})
try:
    turned_away = urllib.request.urlopen(further).status
except urllib.error.HTTPError as error:
    turned_away = error.code
    print(error.code, f"Retry-After: {error.headers['retry-after']} s", json.load(error)["error"], sep="\n")
for reply in held:
    reply.close()
strict.stop()

# %%
answered = "".join(client.stream(question, max_tokens=48))
stats = service.stats()
print(f"{stats.num_aborted} given up, {stats.num_free_slots} of {NUM_SLOTS} places free; then: {answered!r}")
assert turned_away == 429
assert stats.num_aborted == NUM_SLOTS
assert answered == told.text

# %% [markdown]
# The clients went away and their requests ended with them, in mid-answer: nobody computes for a reader who has left.
#
# ## 7 What the server says of itself
#
# The first server counted too. Its figures (`/metrics`, for Prometheus) should be those of all clients together, and
# the kept beginnings those of section 5.

# %%
text = urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics").read().decode()
samples = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
           if "_bucket" not in sample.name}  # fmt: skip
wanted = ("completion_tokens", "prompt_tokens", "image_tokens", "prefix_cached_tokens", "engine_steps")
Table(columns=("since the start", "count"), rows=tuple((n, int(samples[f"workbench_{n}_total"])) for n in wanted))

# %%
generated = sum(timing.num_tokens for x in reports.values() for timing in (*x.warm_up, *x.timings))
print(f"{generated} tokens of section 4 are among {int(samples['workbench_completion_tokens_total'])}")
assert samples["workbench_completion_tokens_total"] > generated
assert samples["workbench_prefix_cached_tokens_total"] >= expected
assert samples["workbench_running"] == samples["workbench_waiting"] == 0

# %% [markdown]
# ## 8 Keep, and leave nothing
#
# Each load is a line of JSON with hardware, versions and commit. Then the server stops listening, after the requests
# under way, and the ranks end.

# %%
machine = environment_of(target=f"{MODEL.name} over HTTP", deployment=ranks, command=["notebook 08"])
append_records(RECORD, list(reports.values()), machine)
pids, address = ranks.pids, server.url
server.stop()
service.stop()
ranks.close()

# %%
try:
    RemoteService(address)
except WorkbenchError as error:
    print(f"{type(error).__name__}: {error.message}")
left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
print(f"{len(pids)} ranks ended, {len(left)} left")
assert left == []

# %% [markdown]
# **Try.** Set `NUM_ASKERS` to 8: twice the company, half the steps, and each asker waits a little longer for each
# token. Or set `PAGE_TOKENS` to 16: the second question of section 5 reads less, and the ranks keep four times as many
# recurrent states.
#
# ## What we have now
#
# A service that answers in words about words and pictures, whose every figure agrees with what its clients counted, and
# which says no early and by name. What users wait for at a given rate is the matter of `07_latency_profiling`.
# Next: `09_day0_report`, which asks all of this of a deployment and decides.
