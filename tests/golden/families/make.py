"""Makes the tiny checkpoints of this folder and what `transformers` computes from them. Not run by the tests.

    PYTHONPATH=. python tests/golden/families/make.py [NAME ...]

Needs transformers 5.24 and compressed-tensors 0.20 beside torch 2.13.

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
from stored import expand_pieces, module_sizes, random_piece
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from workbench.spec import TensorSpec, draft_tensors, parse_config, published_tensors

HERE = Path(__file__).parent
# Rows and columns of patches of the two images, and the prompt that they stand in: 2 tokens, image, 1, image, 2.
GRIDS, AROUND = ((4, 6), (2, 4)), (2, 1, 2)
CLEAR_GAP = 1e-3  # between scores of a sparse indexer; a rectifier makes equal ones, which any program may order
LENGTHS, NUM_GREEDY, DRAWS, ROBUST = (5, 1, 13, 8), 5, 8, 16
UNIT = 2.0**-24
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def tensors_of(config: dict) -> list[TensorSpec]:
    spec = parse_config(config)
    return [*published_tensors(spec), *draft_tensors(spec)]


def weights_of(config: dict, seed: int) -> dict[str, Tensor]:
    """Published tensors: peaked attention and logits, every vector away from its neutral value."""
    spec, tensors = parse_config(config), tensors_of(config)
    sizes = module_sizes(tensors)
    stored: dict[str, Tensor] = {}
    for tensor in tensors:
        g = torch.Generator().manual_seed(zlib.crc32(f"{seed} {tensor.name}".encode()))
        normal = torch.randn(tensor.shape, generator=g)
        name, leaf = tensor.name, tensor.param.rpartition(".")[2]
        if tensor.scheme is not None and any(tensor.name.startswith(f"{module}.") for module in sizes):
            stored[name] = random_piece(tensor, g, sizes)
            continue
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
        elif tensor.role in ("vision", "projector"):
            values = _of_tower(tensor.param, normal)
        elif "norm" in name:
            values = 1 + normal / 5
            if leaf == "weight" and not tensor.param.endswith("o_norm.weight"):  # that of a delta net is whole
                values = values - spec.norm_offset
        elif tensor.part == "bias" or leaf in ("bias", "logit_bias", "sinks", "dt_bias"):
            values = normal / 3
        else:
            gain = 3.0 if "lm_head" in name or "gate.weight" in name or "router" in name else 1.4
            inputs = tensor.shape[-2 if tensor.is_transposed else -1]
            values = normal if "embed" in name else normal * gain / inputs**0.5
        stored[name] = values.to(DTYPES[tensor.dtype])
    return stored


def _of_tower(param: str, normal: Tensor) -> Tensor:
    module, _, leaf = param.rpartition(".")
    if leaf == "bias":
        return normal / 3
    if "norm" in module:
        return 1 + normal / 5
    return normal if "pos_embed" in param else normal * 1.4 / normal[0].numel() ** 0.5


def plain(stored: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The same with quantised matrices expanded, weight by weight, for transformers on a CPU."""
    out = expand_pieces(stored, tensors_of(config))
    for name in list(out):
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
    if "text_config" in theirs:
        text = theirs["text_config"]
        theirs["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    if theirs["model_type"] == "kimi_k2":
        theirs["model_type"] = "deepseek_v3"
    if theirs["model_type"] == "kimi_k25":
        theirs = _kimi_k25(theirs)
    if "rotary_dim" in theirs:  # their config class has no such key of its own
        theirs["partial_rotary_factor"] = theirs["rotary_dim"] / theirs["head_dim"]
    drafts = {tensor.name for tensor in draft_tensors(parse_config(config))}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "config.json").write_text(json.dumps(theirs))
        tensors = {name: x for name, x in plain(stored, config).items() if name not in drafts}
        save_file(tensors, root / "model.safetensors", {"format": "pt"})
        auto = AutoModelForImageTextToText if "vision_config" in theirs else AutoModelForCausalLM
        model, info = auto.from_pretrained(
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


def _kimi_k25(config: dict) -> dict:
    """The published keys in their config class's words."""
    vision, text = config["vision_config"], {**config["text_config"], "model_type": "deepseek_v3"}
    names = {"hidden_size": "vt_hidden_size", "intermediate_size": "vt_intermediate_size"}
    names |= {"num_attention_heads": "vt_num_attention_heads", "num_hidden_layers": "vt_num_hidden_layers"}
    names |= {f"pos_emb_{axis}": f"init_pos_emb_{axis}" for axis in ("height", "width", "time")}
    names |= {key: key for key in ("patch_size", "merge_kernel_size")}
    return config | {
        "text_config": text,
        "vision_config": {ours: vision[theirs] for ours, theirs in names.items()},
        "image_token_id": config["media_placeholder_token_id"],
        "projection_hidden_size": vision["mm_hidden_size"],
        "projection_layer_norm_eps": vision["projector_ln_eps"],
    }


def images_of(model: nn.Module, seed: int) -> Tensor | None:
    """Patches of both images, row by row over each grid, (N, 3, p, p); None for a model without a tower."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return None
    count = sum(rows * columns for rows, columns in GRIDS)
    g = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, vision.patch_size, vision.patch_size, generator=g) * 2 - 1


def image_inputs(model: nn.Module, ids: list[int], copies: int) -> dict[str, Tensor]:
    """What their forward pass needs beside the tokens of a prompt with both images."""
    media = model.config.image_token_id
    if media not in ids:
        return {}
    patches, grid = model.test_patches, torch.tensor([(1, *grid) for grid in GRIDS] * copies)
    inputs = {"image_grid_thw": grid}
    if hasattr(model.config.vision_config, "temporal_patch_size"):  # patches of a token are neighbours, and two frames
        merge, turned = model.config.vision_config.spatial_merge_size, []
        for part, (rows, columns) in zip(patches.split([r * c for r, c in GRIDS]), GRIDS, strict=True):
            squares = part.unflatten(0, (rows // merge, merge, columns // merge, merge))
            turned.append(squares.transpose(1, 2).flatten(0, 3))
        patches = torch.stack([torch.cat(turned)] * 2, 2).flatten(1)
        inputs["mm_token_type_ids"] = torch.tensor([[int(token == media) for token in ids]] * copies)
    return inputs | {"pixel_values": torch.cat([patches] * copies)}


def run(model: nn.Module, ids: list[int], copies: int = 1) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Logits (copies, T, V), output of each layer (copies, T, D), chosen experts (copies, T, K) ascending, or None."""
    layers = list(layers_of(model))
    hidden: list[Tensor] = [torch.empty(0)] * len(layers)
    chosen: list[Tensor | None] = [None] * len(layers)
    handles = []
    for i, layer in enumerate(layers):

        def keep(_module, _args, out, i=i):
            hidden[i] = out[0] if isinstance(out, tuple) else out

        def choose(_module, _args, out, i=i):
            picked = out[-1]
            if picked.is_floating_point():  # Llama-4: scores of all experts, zero for those that were not chosen
                picked = out[0].topk(_module.top_k).indices
            chosen[i] = picked.reshape(copies, len(ids), -1).sort(-1).values

        handles.append(layer.register_forward_hook(keep))
        for module in layer.modules():
            if type(module).__name__.lower().endswith("router"):
                handles.append(module.register_forward_hook(choose))
    with torch.no_grad():
        extra = image_inputs(model, ids, copies) if hasattr(model, "test_patches") else {}
        logits = model(input_ids=torch.tensor([ids] * copies), use_cache=False, **extra).logits
    for handle in handles:
        handle.remove()
    return logits.float(), hidden, chosen


def layers_of(model: nn.Module) -> nn.ModuleList:
    return getattr(model.model, "language_model", model.model).layers


@contextmanager
def disturbed(model: nn.Module, seed: int, size: float = 1.0) -> Iterator[None]:
    g = torch.Generator().manual_seed(seed)

    def noise(x: Tensor) -> Tensor:
        return torch.randint(0, 2, x.shape, generator=g) * 2.0 - 1.0

    def hook(module, _args, out):
        if "Rotary" in type(module).__name__:
            last = out if isinstance(out, Tensor) else out[0]
            place = torch.arange(1, last.shape[-2] + 1)[:, None]
            if "Vision" in type(module).__name__:
                place = torch.tensor(max(max(grid) for grid in GRIDS))
            if isinstance(out, Tensor):  # Llama-4: turns as complex numbers
                parts = torch.view_as_real(out)
                return torch.view_as_complex(parts + noise(parts) * size * UNIT * place[..., None])
            return tuple(x + noise(x) * size * UNIT * place for x in out)
        weight = getattr(module, "weight", None)
        text, is_conv = getattr(model.config, "text_config", model.config), "Conv" in type(module).__name__
        terms = text.hidden_size if weight is None else weight[0].numel() if is_conv else weight.shape[-1]
        rms = out.square().mean(-1, keepdim=True).sqrt()
        return out + noise(out) * size * UNIT * terms**0.5 * rms

    names = (
        "Linear",
        "RMSNorm",
        "RMSNormGated",
        "Experts",
        "RotaryEmbedding",
        "Conv1d",
        "LayerNorm",
        "Conv2d",
        "Conv3d",
    )
    chosen = [module for module in model.modules() if type(module).__name__.endswith(names)]
    handles = [module.register_forward_hook(hook) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_images(ids: list[int], media: int) -> list[int]:
    first, between, last = AROUND
    one, two = (rows * columns // 4 for rows, columns in GRIDS)
    return [*ids[:first], *[media] * one, *ids[first : first + between], *[media] * two, *ids[-last:]]


@contextmanager
def index_gaps(model: nn.Module, found: list[float]) -> Iterator[None]:
    """Adds, for each choice of a sparse indexer, how far the last chosen score lies above the first that is not."""
    inside, plain_topk = [False], Tensor.topk

    def topk(scores: Tensor, k: int, *args, **kwargs):
        if inside[0] and k < scores.shape[-1]:
            best = plain_topk(scores, k + 1, -1).values
            found.extend((best[..., -2] - best[..., -1])[best[..., -2] > -1e30].flatten().tolist())
        return plain_topk(scores, k, *args, **kwargs)

    def enter(_module, _args):
        inside[0] = True

    def leave(_module, _args, _out):
        inside[0] = False

    chosen = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    handles = [
        x for module in chosen for x in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    ]
    Tensor.topk = topk
    try:
        yield
    finally:
        Tensor.topk = plain_topk
        for handle in handles:
            handle.remove()


def greedy(model: nn.Module, ids: list[int]) -> list[int]:
    """The next tokens; none where one of them is the place of an image, which they would then ask for."""
    out = list(ids)
    for _ in range(NUM_GREEDY):
        out.append(int(run(model, out)[0][0, -1].argmax()))
        if hasattr(model, "test_patches") and out[-1] == model.config.image_token_id:
            return []
    return out[len(ids) :]


def expected_of(model: nn.Module, prompts: list[list[int]]) -> dict[str, Tensor] | None:
    """What is kept of a model, None where its choices are too close to call."""
    longest = max(prompts, key=len)
    gaps: list[float] = []
    with index_gaps(model, gaps):
        runs = [run(model, ids) for ids in prompts]
        tokens = greedy(model, longest)
    if min(gaps, default=1.0) < CLEAR_GAP or not tokens:
        return None
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
    for i in range(len(layers_of(model))):
        kept[f"hidden.{i}"] = runs[prompts.index(longest)][1][i][0]
        if runs[0][2][i] is not None:
            kept[f"choice.{i}"] = torch.cat([chosen[i][0] for _, _, chosen in runs]).to(torch.uint8)
    if hasattr(model, "test_patches"):
        kept |= {"patches": model.test_patches, "grids": torch.tensor(GRIDS)}
    for name, limit in limits.items():
        kept[f"limit.{name}"] = torch.tensor(limit, dtype=torch.float64)
    return {name: x.contiguous() for name, x in kept.items()}


def make(name: str) -> None:
    config, root = CONFIGS[name], HERE / name
    for seed in range(100):
        stored = weights_of(config, seed)
        g = torch.Generator().manual_seed(seed)
        vocab_size = (config.get("text_config") or config)["vocab_size"]
        prompts = [torch.randint(4, vocab_size, (n,), generator=g).tolist() for n in LENGTHS]
        model = load(config, stored)
        if (patches := images_of(model, seed)) is not None:
            model.test_patches = patches
            prompts[2] = with_images(prompts[2], model.config.image_token_id)
        expected = expected_of(model, prompts)
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
