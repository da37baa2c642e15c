"""Trace folders: captured without this package, compared end to end, and refused where they make no sense."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted import TOKENS, write_model
from safetensors.torch import load_file, save_file

from workbench.align import (
    AlignReport,
    ParityPrompt,
    Served,
    align_model,
    counter_test,
    model_forward,
    model_replay,
    read_trace_folder,
    write_trace_folder,
)
from workbench.align.trace_names import foreign_names
from workbench.base import TraceError
from workbench.loading import load_sharded_weights
from workbench.nn.model import Model
from workbench.spec import read_spec

HERE = Path(__file__).resolve().parent
PROMPTS = [list(TOKENS[:9]), [5]]
SCRIPT = """
import sys
sys.modules["workbench"] = None  # importing it raises
sys.path.insert(0, {here!r})
{snippet}
import plain_k3, torch
model = plain_k3.load({root!r})
{change}
capture(model, {prompts!r}, {folder!r})
"""


def captured(root: Path, folder: Path, change: str = "") -> Path:
    """A trace of the plain model, by the documented snippet, in a process that cannot import this package."""
    text = (HERE.parents[1] / "docs" / "capture.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "workbench" not in snippet.replace('"workbench-trace"', "")
    assert sum(bool(line.strip()) for line in snippet.splitlines()) <= 36
    script = SCRIPT.format(
        here=str(HERE), snippet=snippet, root=str(root), prompts=PROMPTS, folder=str(folder), change=change
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trace(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(root, tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    return load_sharded_weights(root, precision="fp32", device="cpu").model.requires_grad_(False).eval()


def aligned(model: Model, root: Path, folder: Path) -> AlignReport:
    read = read_trace_folder(folder, model.spec)
    served = Served(forward=model_forward(model), replay=model_replay(model), dtype=torch.float32, label="fast model")
    report = align_model(served, root, read.prompts, reference=read.as_reference())
    return report.with_counter_tests(counter_test(report, root, read.prompts))


def test_a_trace_from_plain_torch_agrees_end_to_end(trace: Path, root: Path, model: Model) -> None:
    read = read_trace_folder(trace, model.spec)
    assert read.dtype is torch.float32
    assert {"L0.kda_q", "L1.topk_idx", "L1.moe_combined", "L3.mla_gated", "L4.ffn_out", "final_mix", "logits"} <= set(
        read.traces[0]
    )
    assert any("experts.0" in name for name in read.unknown)
    report = aligned(model, root, trace)
    assert report.passed, report.render()
    assert report.logits is not None
    assert report.logits.top1 == 1.0
    assert report.logits.kl_max < 1e-8
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert record["passed"] is True
    assert "PlainK3" in record["reference"]


TRANSFORMERS = """
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class K3Config(PretrainedConfig):
    model_type = "plain_k3"

class TransformersK3(PreTrainedModel):
    config_class = K3Config
    def __init__(self, config):
        super().__init__(config)
        inner = plain_k3.PlainK3(config.text)
        self.model, self.lm_head = inner.model, inner.lm_head
        self.post_init()
    def _init_weights(self, module):
        pass
    def forward(self, input_ids, **options):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))

import json, tempfile
text = json.load(open({root!r} + "/config.json"))["text_config"]
written = TransformersK3(K3Config(text=text))
written.load_state_dict(model.state_dict())
with tempfile.TemporaryDirectory() as folder:
    written.save_pretrained(folder)
    model = TransformersK3.from_pretrained(folder).eval()
"""


def test_a_trace_from_a_transformers_model_agrees_end_to_end(root: Path, model: Model, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    report = aligned(model, root, captured(root, tmp_path / "trace", TRANSFORMERS.format(root=str(root))))
    assert report.passed, report.render()
    assert "TransformersK3" in report.reference


def test_a_mistake_of_the_other_side_is_laid_at_its_door(root: Path, model: Model, tmp_path: Path) -> None:
    change = "model.model.layers[3].self_attn.q_a_layernorm.eps = 1e-5"
    report = aligned(model, root, captured(root, tmp_path / "trace", change))
    assert report.blame is not None
    assert report.blame.name == "L3.mla_q"
    assert report.blame.side == "reference"
    assert report.counter_tests is not None
    assert report.counter_tests.explanation is not None
    assert report.counter_tests.explanation.name == "norm_eps.q_a_norm"
    assert "PlainK3" in report.verdict()


def test_a_written_trace_is_read_back(root: Path, model: Model, tmp_path: Path) -> None:
    prompts = [ParityPrompt(label="a", token_ids=TOKENS[:5])]
    traces = model_forward(model)(prompts)
    write_trace_folder(tmp_path / "out", prompts, traces, dtype=torch.float32)
    read = read_trace_folder(tmp_path / "out", model.spec)
    assert read.prompts == tuple(prompts)
    assert read.traces[0].keys() >= {"L0.kda_state", "L3.latent", "L2.sum", "logits"}
    assert all(torch.equal(value, traces[0][name]) for name, value in read.traces[0].items())
    with pytest.raises(TraceError, match="already holds a trace"):
        write_trace_folder(tmp_path / "out", prompts, traces, dtype=torch.float32)


def test_pieces_of_tp_ranks_are_put_together(root: Path, tmp_path: Path) -> None:
    spec = read_spec(root)
    whole = {"L0.kda_q": torch.randn(4, 4, 16), "L3.mla_gated": torch.randn(4, 64), "L1.attn_out": torch.randn(4, 96)}
    halves = [
        {
            "0/L0.kda_q": whole["L0.kda_q"][:, 2 * r : 2 * r + 2].contiguous(),
            "0/L3.mla_gated": whole["L3.mla_gated"][:, 32 * r : 32 * r + 32].contiguous(),
            "0/L1.attn_out": whole["L1.attn_out"],
        }
        for r in range(2)
    ]
    for r, tensors in enumerate(halves):
        save_file(tensors, tmp_path / f"rank{r}.safetensors")
    describe(tmp_path, layout="tp2", ranks=["rank0.safetensors", "rank1.safetensors"], prompts=[[1, 2, 3, 4]])
    (found,) = read_trace_folder(tmp_path, spec).traces
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    halves[1]["0/L1.attn_out"] = whole["L1.attn_out"] + 1
    save_file(halves[1], tmp_path / "rank1.safetensors")
    with pytest.raises(TraceError, match="ranks do not fit together"):
        read_trace_folder(tmp_path, spec)


def test_names_with_and_without_wrappers_mean_the_same(root: Path) -> None:
    spec = read_spec(root)
    names = ["language_model.model.layers.3.self_attn:out.0", "model.layers.2.self_attn:out", "layers.1.mixer:out"]
    assert foreign_names(names, spec) == dict(zip(names, ["L3.attn_out", "L2.attn_out", "L1.attn_out"], strict=True))
    assert foreign_names(["model.layers.3.self_attn.rotary:out", "L9.attn_out"], spec) == {}


def describe(folder: Path, **fields: object) -> None:
    prompts = fields.pop("prompts", [[1, 2, 3, 4]])
    record = {
        "format": "workbench-trace",
        "version": 1,
        "dtype": "float32",
        "ranks": ["rank0.safetensors"],
        "prompts": [{"token_ids": ids} for ids in prompts],  # type: ignore[union-attr]
        **fields,
    }
    (folder / "trace.json").write_text(json.dumps(record))


def rewrite(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / "trace.json").read_text())
        (folder / "trace.json").write_text(json.dumps({**record, **fields}))

    return change


def retensor(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        save_file(change(load_file(folder / "rank0.safetensors")), folder / "rank0.safetensors")

    return apply


def cut_file(folder: Path) -> None:
    path = folder / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(folder: Path) -> None:
    (folder / "rank0.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no description": (lambda f: (f / "trace.json").unlink(), "cannot be opened"),
    "not json": (lambda f: (f / "trace.json").write_text("{"), "not readable"),
    "nan": (lambda f: (f / "trace.json").write_text('{"format": NaN}'), "not readable"),
    "not a trace": (lambda f: (f / "trace.json").write_text("[1]"), "not a trace"),
    "another version": (rewrite(version=2), "another version"),
    "path outside": (rewrite(ranks=["../rank0.safetensors"]), "not a plain file name"),
    "absolute path": (rewrite(ranks=["/etc/passwd"]), "not a plain file name"),
    "missing file": (rewrite(ranks=["other.safetensors"]), "cannot be opened"),
    "too many ranks": (rewrite(ranks=["a", "b"]), "one file for each rank"),
    "unhashable rank": (rewrite(ranks=[{}]), "not a plain file name"),
    "layout": (rewrite(layout="tp3"), "layout"),
    "layout is a number": (rewrite(layout=7), "layout is no text"),
    "replicas": (rewrite(layout="dp2", ranks=["a", "b"]), "one replica"),
    "dtype": (rewrite(dtype="int8"), "unknown dtype"),
    "dtype is a list": (rewrite(dtype=[]), "unknown dtype"),
    "no prompts": (rewrite(prompts=[]), "no list of prompts"),
    "prompt without tokens": (rewrite(prompts=[{"label": "x"}, {"token_ids": [5]}]), "no token_ids"),
    "foreign token": (rewrite(prompts=[{"token_ids": [1 << 40]}, {"token_ids": [5]}]), "does not have"),
    "token is true": (rewrite(prompts=[{"token_ids": [True]}, {"token_ids": [5]}]), "does not have"),
    "label is a list": (rewrite(prompts=[{"label": [], "token_ids": [1]}, {"token_ids": [5]}]), "no text"),
    "other length": (rewrite(prompts=[{"token_ids": [1, 2]}, {"token_ids": [5]}]), "rows are not the prompt's tokens"),
    "producer": (rewrite(producer={"model": 3}), "table of texts"),
    "torn file": (cut_file, "are missing"),
    "huge header": (huge_header, "over the limit"),
    "no tensor of ours": (retensor(lambda t: {"0/x:out": torch.ones(2), "1/x:out": torch.ones(2)}), "is one of this"),
    "no such prompt": (retensor(lambda t: {**t, "7/L0.attn_in": torch.ones(9, 96)}), "belongs to no prompt"),
    "no number": (retensor(lambda t: {**t, "L0.attn_in": torch.ones(9, 96)}), "belongs to no prompt"),
    "width": (retensor(lambda t: {"0/L0.attn_in": torch.ones(9, 95), "1/L0.attn_in": torch.ones(1, 95)}), "width"),
    "float choices": (
        retensor(lambda t: {"0/L1.topk_idx": torch.ones(9, 3), "1/L1.topk_idx": torch.ones(1, 3)}),
        "not whole",
    ),
    "bytes": (retensor(lambda t: {"0/L0.attn_in": torch.ones(9, 96, dtype=torch.uint8)}), "dtype"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_with_its_reason(name: str, trace: Path, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(trace, folder)
    change, reason = HOSTILE[name]
    change(folder)
    with pytest.raises(TraceError, match=reason):
        read_trace_folder(folder, read_spec(root))


def test_t09_a_probe_that_kept_a_buffer_and_not_its_values_is_refused(root: Path, tmp_path: Path) -> None:
    """Hooks that keep what a module returned, where each layer writes into the same memory."""
    spec, buffer, kept = read_spec(root), torch.empty(4, 96), {}
    for layer in range(3):
        buffer.copy_(torch.randn(4, 96))
        kept[f"0/L{layer}.attn_out"] = buffer
    tensors = {name: value.clone() for name, value in kept.items()}
    describe(tmp_path)
    save_file(tensors, tmp_path / "rank0.safetensors")
    with pytest.raises(TraceError, match=r"L0\.attn_out and L1\.attn_out are the same to the last bit"):
        read_trace_folder(tmp_path, spec)
    sound = {name: torch.randn(4, 96) for name in kept} | {"0/L3.attn_out": torch.zeros(4, 96)}
    sound |= {"0/L4.attn_out": torch.zeros(4, 96)}  # zeros say nothing
    save_file(sound, tmp_path / "rank0.safetensors")
    assert sound.keys() == {f"0/{name}" for name in read_trace_folder(tmp_path, spec).traces[0]}
