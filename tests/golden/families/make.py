"""Makes the tiny checkpoints of this folder and what `transformers` computes from them. Not run by the tests.

    PYTHONPATH=. python tests/golden/families/make.py [NAME ...]      # needs transformers 5.24 beside torch 2.13

Each model gets random weights under the names its family publishes; transformers must load them all by those names.
It runs in float32 with its plain ("eager") attention and experts. A tensor's limit is what rounding may do to it, found
on transformers itself: the output of every module is disturbed as summing its inputs in another order could, by sqrt(n)
half-units of float32 for n terms, relative to the row's root mean square, and rotary angles by half a unit times the
position; the largest change over `DRAWS` such copies, twice (two programs round), is the limit. Experts and greedy
tokens must stay the same under a disturbance 16 times as large, or the seed is no good.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from configs import CONFIGS
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from workbench.spec import draft_tensors, parse_config, published_tensors

HERE = Path(__file__).parent
LENGTHS, NUM_GREEDY, DRAWS, ROBUST = (5, 1, 13, 8), 5, 8, 16
UNIT = 2.0**-24
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def weights_of(config: dict, seed: int) -> dict[str, Tensor]:
    """Published tensors: peaked attention and logits, every vector away from its neutral value."""
    spec = parse_config(config)
    stored: dict[str, Tensor] = {}
    for tensor in (*published_tensors(spec), *draft_tensors(spec)):
        g = torch.Generator().manual_seed(zlib.crc32(f"{seed} {tensor.name}".encode()))
        normal = torch.randn(tensor.shape, generator=g)
        name, leaf = tensor.name, tensor.param.rpartition(".")[2]
        if tensor.part in ("blocks", "weight_scale_inv", "scales"):
            stored[name] = {
                "blocks": lambda g=g, t=tensor: torch.randint(0, 256, t.shape, generator=g, dtype=torch.uint8),
                "scales": lambda g=g, t=tensor: torch.randint(122, 125, t.shape, generator=g, dtype=torch.uint8),
                "weight_scale_inv": lambda g=g, t=tensor: torch.rand(t.shape, generator=g) * 0.004 + 0.001,
            }[tensor.part]()
            continue
        if tensor.dtype == "F8_E4M3":
            stored[name] = (normal * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
            continue
        if leaf == "A_log":
            values = torch.rand(tensor.shape, generator=g) * 2.7
        elif "norm" in name:
            values = 1 + normal / 5
        elif tensor.part == "bias" or leaf in ("bias", "logit_bias", "sinks", "dt_bias"):
            values = normal / 3
        else:
            gain = 3.0 if "lm_head" in name or "gate.weight" in name or "router" in name else 1.4
            values = normal if "embed" in name else normal * gain / tensor.shape[-1] ** 0.5
        stored[name] = values.to(DTYPES[tensor.dtype])
    return stored


def plain(stored: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The same with quantised matrices expanded, weight by weight, for transformers on a CPU."""
    out = dict(stored)
    for name in list(stored):
        if name.endswith(".weight_scale_inv"):
            scale, values = out.pop(name), out.pop(name.removesuffix("_scale_inv")).float()
            size = config["quantization_config"]["weight_block_size"][0]
            for i in range(values.shape[0]):
                for j in range(values.shape[1]):
                    values[i, j] *= scale[i // size, j // size]
            out[name.removesuffix("_scale_inv")] = values
        if name.endswith("_blocks"):
            blocks, scales = out.pop(name).long(), out.pop(name.replace("_blocks", "_scales")).float()
            pairs = torch.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1).flatten(-2)  # (E, rows, blocks, 32)
            matrix = (pairs * torch.exp2(scales - 127)[..., None]).flatten(-2)
            out[name.removesuffix("_blocks")] = matrix.mT.contiguous()  # (experts, inputs, outputs)
    return out


def load(config: dict, stored: dict[str, Tensor]) -> nn.Module:
    theirs = {key: value for key, value in config.items() if key != "quantization_config"}
    if theirs["model_type"] == "kimi_k2":
        theirs["model_type"] = "deepseek_v3"
    if "rotary_dim" in theirs:  # their config class has no such key of its own
        theirs["partial_rotary_factor"] = theirs["rotary_dim"] / theirs["head_dim"]
    drafts = {tensor.name for tensor in draft_tensors(parse_config(config))}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "config.json").write_text(json.dumps(theirs))
        tensors = {name: x for name, x in plain(stored, config).items() if name not in drafts}
        save_file(tensors, root / "model.safetensors", {"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            root,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = [x for x in info.get(kind, ()) if not (config.get("tie_word_embeddings") and "lm_head" in str(x))]
        assert not found, (kind, found)
    return model.eval()


def run(model: nn.Module, ids: list[int], copies: int = 1) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Logits (copies, T, V), output of each layer (copies, T, D), chosen experts (copies, T, K) ascending, or None."""
    layers = list(model.model.layers)
    hidden: list[Tensor] = [torch.empty(0)] * len(layers)
    chosen: list[Tensor | None] = [None] * len(layers)
    handles = []
    for i, layer in enumerate(layers):

        def keep(_module, _args, out, i=i):
            hidden[i] = out[0] if isinstance(out, tuple) else out

        def choose(_module, _args, out, i=i):
            chosen[i] = out[-1].reshape(copies, len(ids), -1).sort(-1).values

        handles.append(layer.register_forward_hook(keep))
        for module in layer.modules():
            if type(module).__name__.lower().endswith("router"):
                handles.append(module.register_forward_hook(choose))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids] * copies), use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits.float(), hidden, chosen


@contextmanager
def disturbed(model: nn.Module, seed: int, size: float = 1.0) -> Iterator[None]:
    g = torch.Generator().manual_seed(seed)

    def noise(x: Tensor) -> Tensor:
        return torch.randint(0, 2, x.shape, generator=g) * 2.0 - 1.0

    def hook(module, _args, out):
        if "Rotary" in type(module).__name__:
            place = torch.arange(1, out[0].shape[-2] + 1)[:, None]
            return tuple(x + noise(x) * size * UNIT * place for x in out)
        weight = getattr(module, "weight", None)
        terms = weight.shape[-1] if weight is not None else model.config.hidden_size
        rms = out.square().mean(-1, keepdim=True).sqrt()
        return out + noise(out) * size * UNIT * terms**0.5 * rms

    names = ("Linear", "RMSNorm", "RMSNormGated", "Experts", "RotaryEmbedding", "Conv1d")
    chosen = [module for module in model.modules() if type(module).__name__.endswith(names)]
    handles = [module.register_forward_hook(hook) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def greedy(model: nn.Module, ids: list[int]) -> list[int]:
    out = list(ids)
    for _ in range(NUM_GREEDY):
        out.append(int(run(model, out)[0][0, -1].argmax()))
    return out[len(ids) :]


def expected_of(model: nn.Module, prompts: list[list[int]]) -> dict[str, Tensor] | None:
    """What is kept of a model, None where its choices are too close to call."""
    longest = max(prompts, key=len)
    runs = [run(model, ids) for ids in prompts]
    tokens = greedy(model, longest)
    limits: dict[str, float] = {}
    for ids, (logits, hidden, chosen) in zip(prompts, runs, strict=True):
        with disturbed(model, 0):
            own, own_hidden, _ = run(model, ids, DRAWS)
        pairs = {"logits": (own, logits)} | {
            f"hidden.{i}": pair for i, pair in enumerate(zip(own_hidden, hidden, strict=True))
        }
        for name, (found, wanted) in pairs.items():
            limits[name] = max(limits.get(name, 0.0), 2 * (found - wanted).abs().max().item())
        with disturbed(model, 1, ROBUST):
            for found, wanted in zip(run(model, ids, DRAWS)[2], chosen, strict=True):
                if wanted is not None and not (found == wanted).all():
                    return None
    with disturbed(model, 2, ROBUST):
        follow = run(model, longest + tokens, DRAWS)[0][:, len(longest) - 1 : -1].argmax(-1)
    if not (follow == torch.tensor(tokens)).all():
        return None
    kept: dict[str, Tensor] = {
        "prompts": torch.tensor([token for ids in prompts for token in ids]),
        "lengths": torch.tensor([len(ids) for ids in prompts]),
        "greedy": torch.tensor(tokens),
        "logits": torch.cat([logits[0] for logits, _, _ in runs]),
    }
    for i in range(len(model.model.layers)):
        kept[f"hidden.{i}"] = runs[prompts.index(longest)][1][i][0]
        if runs[0][2][i] is not None:
            kept[f"choice.{i}"] = torch.cat([chosen[i][0] for _, _, chosen in runs]).to(torch.uint8)
    for name, limit in limits.items():
        kept[f"limit.{name}"] = torch.tensor(limit, dtype=torch.float64)
    return {name: x.contiguous() for name, x in kept.items()}


def make(name: str) -> None:
    config, root = CONFIGS[name], HERE / name
    for seed in range(40):
        stored = weights_of(config, seed)
        g = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(4, config["vocab_size"], (n,), generator=g).tolist() for n in LENGTHS]
        expected = expected_of(load(config, stored), prompts)
        if expected is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear choices")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({key: x.contiguous() for key, x in stored.items()}, root / "model.safetensors", {"format": "pt"})
    (root / "golden").mkdir()
    save_file(expected, root / "golden" / "expected.safetensors")
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    top = expected["logits"].softmax(-1).amax(-1).median().item()
    print(f"{name}: seed {seed}, {size} bytes, limit {expected['limit.logits'].item():.1e}, median top {top:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen_name in sys.argv[1:] or CONFIGS:
        make(chosen_name)
