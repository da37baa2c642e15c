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
# # 01 · Read a checkpoint
#
# **Question.** What is in these files, and is it what the model needs?
#
# **Answer in advance.** The headers of the files, a few kilobytes each, tell how many parameters there are, where the
# bytes go and which file is broken, long before anyone loads a terabyte. At the end we count the published Kimi K3,
# all 2.8 trillion parameters of it, from its dimensions alone.
#
# Takes ten seconds on any laptop. No accelerator, no torch.

# %%
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from workbench.base import Table
from workbench.checkpoint import Checkpoint, Sizes, audit, inspect_checkpoint, k3_config
from workbench.spec import SpecialTokens, count_model, parse_config
from workbench.view import bytes_by_role
from workbench.view.notebook import show

# %% tags=["parameters"]
MODEL = Path("../data/k3-tiny")

# %% [markdown]
# ## 1 The folder
#
# K3 keeps each decoder layer in a file of its own, then one file for head and embedding, one for the projector, one for
# the vision tower. This model has 9 layers, so we expect 9 + 3 = 12 files. (Its weights are random: it has every part
# of K3 and fits into 3 MB.)

# %%
checkpoint = Checkpoint.open(MODEL)
rows = tuple((file, len(header.entries), header.file_bytes) for file, header in checkpoint.headers.items())
Table(columns=("file", "tensors", "bytes"), rows=rows)

# %%
assert len(checkpoint.headers) == checkpoint.spec.num_layers + 3

# %% [markdown]
# ## 2 One header
#
# A safetensors file is eight bytes with a length, that many bytes of JSON, and then the tensors one behind another. The
# JSON says where each lies. We expect no hole and no overlap: every tensor begins where the one before it ends, and the
# last one ends with the file.

# %%
header = checkpoint.headers["model-00002-of-000012.safetensors"]
entries = sorted(header.entries.values(), key=lambda entry: entry.begin)
rows = tuple((entry.name, entry.dtype, str(entry.shape), entry.begin, entry.end) for entry in entries[:8])
Table(columns=("tensor", "dtype", "shape", "first byte", "end"), rows=rows)

# %%
assert all(entry.end == after.begin for entry, after in pairwise(entries))
assert entries[-1].end == header.file_bytes

# %% [markdown]
# ## 3 The model
#
# `config.json` says what the tensors must be. Before looking, an estimate of the largest part, the routed experts: 8
# layers with 16 experts each, an expert has three matrices of 128 × 32, and MXFP4 takes 4 bits a weight plus one byte
# for every 32 weights.

# %%
expected_params = 8 * 16 * 3 * 128 * 32
expected_bytes = expected_params // 2 + expected_params // 32
print(f"expected {expected_params:,} weights in {expected_bytes:,} bytes")

# %%
report = inspect_checkpoint(MODEL)
report

# %%
counts = report.counts
assert counts.params_by_role["routed_expert"] == expected_params
assert counts.bytes_by_role["routed_expert"] == expected_bytes
assert report.names is not None
assert report.names.is_bijection  # every name fills one tensor of the model, every tensor has its name

# %% [markdown]
# ## 4 Where the bytes go
#
# Experts are 63 % of the weights, but they are packed to 4.25 bits while everything else takes 16 or 32. So we expect
# their share of the bytes to be about half of that.

# %%
show(bytes_by_role(counts.bytes_by_role, what="k3-tiny"))

# %% [markdown]
# In the published model the same picture is far more lopsided: there the experts are 98 % of the weights and 93 % of
# the bytes. Section 7 counts them.

# %% [markdown]
# ## 5 Is it sound?
#
# The audit holds index, headers, file sizes and model against each other, in both directions, and looks at the data for
# stretches of zeros.

# %%
sound = audit(MODEL)
print(sound.summary())
sound.checks_table()

# %%
assert sound.ok

# %% [markdown]
# ## 6 A fault, planted
#
# A check that cannot fail proves nothing. We copy the folder and cut 1,000 bytes off one file, as a broken download
# would. We expect the audit to name that file, say how much is missing, and list the tensors that are lost.

# %%
with TemporaryDirectory() as folder:
    torn = Path(copytree(MODEL, Path(folder) / "torn"))
    victim = torn / "model-00003-of-000012.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1000])
    broken = audit(torn)
Table(
    columns=("file", "kind", "tensors", "what"),
    rows=tuple((f.file, f.kind, len(f.tensors), f.message) for f in broken.errors),
)

# %%
assert [(finding.file, finding.kind) for finding in broken.errors] == [(victim.name, "torn")]

# %% [markdown]
# **Try.** Swap the contents of two files instead, or overwrite a stretch in the middle of one with zeros. The audit
# finds both, the first without reading any weights.

# %% [markdown]
# ## 7 The published model, counted
#
# The same code counts the real one; only the dimensions differ. By hand: 92 layers × 896 experts × 3 × 3,072 × 3,584
# weights is 2.72 trillion for the routed experts. The rest should bring the sum to the published 2.8 trillion.

# %%
K3 = Sizes(
    num_layers=93,
    full_attn_layers=(*range(4, 93, 4), 93),
    num_dense_layers=1,
    residual_block=12,
    hidden_size=7168,
    vocab_size=163840,
    max_context=1048576,
    dense_width=33792,
    kda_heads=96,
    kda_head_dim=128,
    mla_heads=96,
    q_rank=1536,
    kv_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    num_experts=896,
    top_k=16,
    expert_width=3072,
    latent_dim=3584,
    num_shared=2,
    vision_layers=27,
    vision_heads=12,
    vision_width=1024,
    vision_qkv_width=1536,
    vision_ffn_width=4096,
    grid_height=64,
    grid_width=64,
)
tokens = SpecialTokens(bos=163584, eos=163586, pad=163839, media=163605)
published = count_model(parse_config(k3_config(sizes=K3, tokens=tokens)))

# %%
experts = 92 * 896 * 3 * 3072 * 3584
Table(
    columns=("what", "value"),
    rows=(
        ("tensors", published.num_tensors),
        ("parameters", published.num_params),
        ("of them in routed experts", published.params_by_role["routed_expert"]),
        ("the same by hand", experts),
        ("active per token", published.active_params),
        ("bytes of weights", published.weight_bytes),
        ("bytes that one token touches", published.active_weight_bytes),
        ("cache bytes per token of context (bf16)", published.kv_bytes_per_token),
        ("state bytes per sequence, at any length", published.state_bytes_per_sequence),
    ),
)

# %%
assert published.num_params == 2_779_931_837_184
assert published.params_by_role["routed_expert"] == experts
assert published.weight_bytes == 1_560_860_324_864

# %%
show(bytes_by_role(published.bytes_by_role, what="Kimi K3"))

# %% [markdown]
# ## What we have now
#
# A checkpoint is known by its headers: its parts are counted, its files are accounted for, and a broken one is named.
# One token touches 137 GB of 1.56 TB, which is why the rest of this walk is about who holds what.
# Next: `02_shard_load_and_answer`.
