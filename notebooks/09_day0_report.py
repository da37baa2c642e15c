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
# # 09 · The Day-0 report
#
# **Question.** May this deployment go into service, and what exactly was proven?
#
# **Answer in advance.** One run asks sixteen questions of four layers of the stack, and each is a gate: a threshold
# that was fixed before, a value, and the evidence behind it. A gate that was not measured does not pass. Whether a gate
# can say no is shown by a fault that we plant, and two reports side by side show what got worse.
#
# Takes about a minute on two cores, no accelerator. The weights are random: the run accepts the machinery and no model.

# %%
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from workbench.base import Table
from workbench.cluster import survey_machine
from workbench.day0 import prove_gates, run_day0
from workbench.day0.sabotage import ALONE
from workbench.placement import choose_layout
from workbench.report import compare_reports, read_report
from workbench.spec import read_spec

# %% tags=["parameters"]
MODEL = Path("../data/k3-tiny")
NUM_RANKS = 2
DEVICE = "cpu"
OUT = Path("../out/notebook-09")

# %% [markdown]
# ## 1 One run
#
# The machine is looked at first: each device is asked to do what models need, and its numbers are checked. Rates are
# left out here, they take half a minute. Then the whole acceptance: audit, operators, parity in fp32, loading, parity
# as served, questions in text and pictures. We expect it to pass.

# %%
survey = survey_machine(rates=False)
layout = choose_layout(read_spec(MODEL), NUM_RANKS)
options = {"layout": layout, "device": DEVICE, "survey": survey, "say": None}
run = run_day0(MODEL, out=OUT, **options)
print(run.verdict.sentence())

# %%
assert run.passed
assert run.verdict.num_unmeasured == 0  # what nobody measured would stand in the way

# %% [markdown]
# ## 2 Four layers
#
# A failure should say where to look. So every gate belongs to the layer of the stack that it speaks about, from the
# driver up to the answers.

# %%
record = read_report(OUT)  # from the file, as the next person will
layers = {gate.layer: [g for g in record.gates if g.layer == gate.layer] for gate in record.gates}
rows = tuple((layer, sum(bool(g.passed) for g in gates), len(gates), ", ".join(g.id for g in gates))
             for layer, gates in layers.items())  # fmt: skip
Table(columns=("layer", "passed", "gates", "which"), rows=rows)

# %%
assert list(layers) == ["driver and runtime", "compilation and operators", "framework", "application"]
assert record.to_json() == run.to_json()

# %% [markdown]
# ## 3 What was claimed, and on what evidence
#
# Whether a gate passed is computed from value and threshold whenever the record is read, so a record cannot claim
# otherwise. The evidence says what was looked at: how many tensors, how many requests, which rank was worst.

# %%
record

# %%
exact = [gate.id for gate in record.gates if gate.relation == "=="]
print(f"{len(exact)} gates ask for one exact answer, {len(record.gates) - len(exact)} have a limit")
assert all(gate.evidence for gate in record.gates)

# %% [markdown]
# Most gates ask for an exact answer: no row missing, no token apart. Only bytes read, memory and latencies have limits,
# and those of latencies are the user's to set (`--max-first-token-s`).
#
# ## 4 What was not claimed
#
# These weights are random, and the report says so at the top. Nothing above speaks about what the model knows: the
# answers below went through the whole machine and are noise.

# %%
print(f"{record.weights_kind} weights ({record.weights_note}), {record.hardware}")
rows = tuple((a.question[:48], len(a.pictures), a.num_tokens, a.answer[:32]) for a in record.answers)
Table(columns=("question", "pictures", "tokens", "answer"), rows=rows)

# %%
assert record.weights_kind == "dummy"
assert "not trained" in (OUT / "report.html").read_text(encoding="utf-8")

# %% [markdown]
# ## 5 A sabotaged copy
#
# We copy the folder, cut 1,000 bytes off one shard, and accept the copy. We expect one gate to fail and to name the
# file; everything that needs weights cannot be measured then, for the same reason, and nothing of it passes by silence.

# %%
with TemporaryDirectory() as folder:
    torn = Path(copytree(MODEL, Path(folder) / "torn"))
    victim = torn / "model-00005-of-000012.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1000])
    broken = run_day0(torn, **options)
print(broken.verdict.sentence().partition("; blocking")[0])

# %%
(failed,) = (gate for gate in broken.gates if gate.status == "fail")
print(f"{failed.id}: {failed.value_text()} (good is {failed.threshold_text()})\n{failed.evidence}")
assert failed.id == "checkpoint.audit"
assert victim.name in failed.evidence
assert not broken.passed

# %% [markdown]
# The verdict ends with its cause, and the report with what to do next: a step for each gate that failed, one for each
# reason why others have no value, and the way back. Where all pass, the steps say how to serve, ask and compare.

# %%
print(*(step.replace(str(torn.parent), "…") for step in broken.next_steps), sep="\n")
assert victim.name in broken.verdict.cause
assert broken.next_steps[0].startswith("checkpoint.audit: `workbench audit ")

# %%
silent = [gate for gate in broken.gates if gate.status == "not measured"]
print(f"{len(silent)} gates without a value, {sum(victim.name in gate.evidence for gate in silent)} name the file")
assert all(gate.blocks for gate in silent)

# %% [markdown]
# ## 6 Gates that can say no
#
# `workbench day0 --prove-gates` does this for every gate: a bit of one expert flipped, ranks that leave rows out, a
# device with wrong products, a black picture, a late answer, each run through the code of the ordinary run. A gate is
# proven where it passes without its fault, fails under it, and names it. Here only those that need no ranks, because
# the others take a minute or two. We expect 3 of 16. (`--prove-report` turns the question around: it sabotages copies
# in nine ways, as we did above in one, and asks whether each verdict names what was done.)

# %%
proofs = prove_gates(MODEL, run, layout=layout, device=DEVICE, out=OUT, say=None, alone=ALONE, on_ranks=())
proven = [proof for proof in proofs.proofs if proof.status == "proven"]
rows = tuple((proof.gate_id, proof.fault, proof.value_text, proof.told[:96]) for proof in proven)
Table(columns=("gate", "fault planted", "value under it", "what the report said"), rows=rows)

# %%
assert proofs.num_proven == 3
assert not proofs.passed  # thirteen gates are still to be shown
assert next(gate for gate in read_report(OUT).gates if gate.id == "checkpoint.audit").proof

# %% [markdown]
# ## 7 Two reports side by side
#
# The comparison lists gates whose status, value or proof changed, and what in the environment may explain it. From the
# sound copy to the torn one we expect every gate that lost its value to be worse, and three to have lost their proof.

# %%
comparison = compare_reports(proofs.report, broken)
comparison.table()

# %%
comparison.environment_table()

# %%
assert not comparison.passed
assert len(comparison.regressions) == 1 + len(silent)
assert sum(change.is_proof_lost for change in comparison.gates) == 3
assert compare_reports(run, run).passed

# %% [markdown]
# ## 8 Where it lies
#
# Two files: one for people, one for programs. The page needs nothing but itself: no script, no request, fit to print.

# %%
page = (OUT / "report.html").read_text(encoding="utf-8")
files = tuple((path.as_posix(), path.stat().st_size) for path in sorted(OUT.glob("report.*")))
assert "<script" not in page
assert page.count("Fails under: ") == proofs.num_proven
Table(columns=("file", "bytes"), rows=files)

# %% [markdown]
# **Try.** Overwrite a stretch in the middle of the shard with zeros instead of cutting its end, or delete the
# tokenizer: the first fails the audit, the second leaves exactly the gates about answers without a value.
#
# ## What we have now
#
# A verdict that follows from numbers, with its evidence, its date and its commit; gates that were seen to say no; and a
# comparison that a pipeline can stop on (`workbench compare OLD NEW`). The whole of it on any checkpoint:
# `workbench day0 FOLDER --ranks 2 --prove-gates`.
