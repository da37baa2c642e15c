"""The text model of Kimi K3 in plain torch modules with the published names, as someone else would write it.

Imports torch and safetensors alone and is run where this package cannot be imported. Slow and short: float32, every
token by itself, every expert in turn.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def linear(rows, columns):
    return nn.Linear(columns, rows, bias=False)


class Conv(nn.Module):
    def __init__(self, dim, taps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, taps))

    def forward(self, x):  # (1, T, C)
        taps = self.weight.shape[-1]
        padded = nn.functional.pad(x.transpose(1, 2), (taps - 1, 0))
        out = nn.functional.conv1d(padded, self.weight, groups=self.weight.shape[0]).transpose(1, 2)
        return nn.functional.silu(out), None  # and a cache that nobody asked for


class Delta(nn.Module):
    def __init__(self, text):
        super().__init__()
        linear_attn, dim = text["linear_attn_config"], text["hidden_size"]
        self.heads, self.width, self.bound = (linear_attn[k] for k in ("num_heads", "head_dim", "gate_lower_bound"))
        inner = self.heads * self.width
        for part in "qkv":
            setattr(self, f"{part}_proj", linear(inner, dim))
            setattr(self, f"{part}_conv1d", Conv(inner, linear_attn["short_conv_kernel_size"]))
        self.f_a_proj, self.f_b_proj = linear(self.width, dim), linear(inner, self.width)
        self.b_proj, self.g_proj, self.o_proj = linear(self.heads, dim), linear(inner, dim), linear(dim, inner)
        self.A_log = nn.Parameter(torch.empty(1 << (self.heads - 1).bit_length()))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = Norm(self.width, text["rms_norm_eps"])

    def forward(self, hidden_states):
        x = hidden_states
        q, k, v = (
            getattr(self, f"{part}_conv1d")(getattr(self, f"{part}_proj")(x))[0].view(-1, self.heads, self.width)
            for part in "qkv"
        )
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / self.width**0.5
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        z = self.f_b_proj(self.f_a_proj(x))[0] + self.dt_bias
        z = z.view(-1, self.heads, self.width)
        decay = torch.exp(self.bound * torch.sigmoid(self.A_log[: self.heads].exp()[:, None] * z))
        beta = torch.sigmoid(self.b_proj(x))[0]
        state, outs = x.new_zeros(self.heads, self.width, self.width), []
        for t in range(len(q)):
            state = state * decay[t][:, :, None]
            error = v[t] - (state * k[t][:, :, None]).sum(1)
            state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
            outs.append((state * q[t][:, :, None]).sum(1))
        out = self.o_norm(torch.stack(outs)).flatten(1)[None]
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))


class Latent(nn.Module):
    def __init__(self, text):
        super().__init__()
        dim, self.heads, self.rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
        self.nope, self.rope, self.v = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        self.q_a_proj, self.q_a_layernorm = linear(text["q_lora_rank"], dim), Norm(text["q_lora_rank"], 1e-6)
        self.q_b_proj = linear(self.heads * (self.nope + self.rope), text["q_lora_rank"])
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(self.rank + self.rope, dim), Norm(self.rank, 1e-6)
        self.kv_b_proj = linear(self.heads * (self.nope + self.v), self.rank)
        self.g_proj, self.o_proj = linear(self.heads * self.v, dim), linear(dim, self.heads * self.v)

    def forward(self, hidden_states):
        x = hidden_states[0]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(len(x), self.heads, -1)
        c, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).view(len(x), self.heads, -1)
        k = torch.cat([kv[..., : self.nope], shared[:, None].expand(-1, self.heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / (self.nope + self.rope) ** 0.5
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[..., self.nope :]).flatten(1)
        return (self.o_proj(out * torch.sigmoid(self.g_proj(x)))[None], None)


class FFN(nn.Module):
    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, text, dim, width, names=names):
        super().__init__()
        self.betas, self.order = (text["activation_situ_beta"], text["activation_situ_linear_beta"]), names
        for name, shape in zip(names, ((width, dim), (width, dim), (dim, width)), strict=True):
            setattr(self, name, linear(*shape))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.order)
        a, b = self.betas
        g, u = gate(x), up(x)
        return down(a * torch.tanh(g / a) * torch.sigmoid(g) * b * torch.tanh(u / b))


class Gate(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(text["num_experts"], text["hidden_size"]))
        self.e_score_correction_bias = nn.Parameter(torch.empty(text["num_experts"]))
        self.top_k = text["num_experts_per_token"]

    def forward(self, x):
        scores = torch.sigmoid(x[0] @ self.weight.T)
        ids = (scores + self.e_score_correction_bias).topk(self.top_k).indices.sort(-1).values
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, text):
        super().__init__()
        dim, latent, width = text["hidden_size"], text["routed_expert_hidden_size"], text["moe_intermediate_size"]
        self.gate = Gate(text)
        self.routed_expert_down_proj, self.routed_expert_up_proj = linear(latent, dim), linear(dim, latent)
        self.routed_expert_norm = Norm(latent, text["rms_norm_eps"])
        self.experts = nn.ModuleList(FFN(text, latent, width, ("w1", "w3", "w2")) for _ in range(text["num_experts"]))
        self.shared_experts = FFN(text, dim, width * text["num_shared_experts"])

    def forward(self, x):
        ids, weights = self.gate(x)
        latent = self.routed_expert_down_proj(x)[0]
        rows = [
            sum(w * self.experts[e](latent[t]) for e, w in zip(ids[t].tolist(), weights[t], strict=True))
            for t in range(len(ids))
        ]
        routed = self.routed_expert_up_proj(self.routed_expert_norm(torch.stack(rows)[None]))
        return routed + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, text, i):
        super().__init__()
        dim, eps = text["hidden_size"], text["rms_norm_eps"]
        self.self_attn = (Delta if i + 1 in text["linear_attn_config"]["kda_layers"] else Latent)(text)
        if i < text["first_k_dense_replace"]:
            self.mlp = FFN(text, dim, text["intermediate_size"])
        else:
            self.block_sparse_moe = MoE(text)
        self.input_layernorm, self.post_attention_layernorm = Norm(dim, eps), Norm(dim, eps)
        for name in ("self_attention_res", "mlp_res"):
            setattr(self, f"{name}_norm", Norm(dim, eps))
            setattr(self, f"{name}_proj", linear(1, dim))
        self.starts = i % text["attn_res_block_size"] == 0

    def mix(self, name, sources):
        return mix(getattr(self, f"{name}_norm"), getattr(self, f"{name}_proj"), sources)

    def forward(self, saved, running):
        h = self.mix("self_attention_res", [*saved, running]) if saved else running
        if self.starts:
            saved, running = [*saved, running], 0
        out = self.self_attn(hidden_states=self.input_layernorm(h))
        running = running + (out[0] if isinstance(out, tuple) else out)
        h = self.post_attention_layernorm(self.mix("mlp_res", [*saved, running]))
        return saved, running + (self.mlp(h) if hasattr(self, "mlp") else self.block_sparse_moe(h))


def mix(norm, proj, sources):
    stacked = torch.stack(sources)
    return (torch.softmax(proj(norm(stacked)), 0) * stacked).sum(0)


class Body(nn.Module):
    def __init__(self, text):
        super().__init__()
        dim, eps = text["hidden_size"], text["rms_norm_eps"]
        self.embed_tokens = nn.Embedding(text["vocab_size"], dim)
        self.layers = nn.ModuleList(Layer(text, i) for i in range(text["num_hidden_layers"]))
        self.output_attn_res_norm, self.output_attn_res_proj = Norm(dim, eps), linear(1, dim)
        self.norm = Norm(dim, eps)

    def forward(self, input_ids):
        saved, running = [], self.embed_tokens(input_ids)
        for layer in self.layers:
            saved, running = layer(saved, running)
        return self.norm(mix(self.output_attn_res_norm, self.output_attn_res_proj, [*saved, running]))


class PlainK3(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.model, self.lm_head = Body(text), linear(text["vocab_size"], text["hidden_size"])

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids))


MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def load(folder):
    text = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    stored = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        stored.update(load_file(path))
    prefix, weights = "language_model.", {}
    for name, value in stored.items():
        if name.startswith(prefix) and name.endswith(".weight_packed"):
            codes = torch.stack([value & 15, value >> 4], -1).flatten(1).long()
            scale = torch.exp2(stored[name.replace("packed", "scale")].float() - 127).repeat_interleave(32, 1)
            weights[name[len(prefix) :].replace("_packed", "")] = (
                MAGNITUDES[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * scale[:, : codes.shape[1]]
            )
        elif name.startswith(prefix) and not name.endswith(".weight_scale"):
            weights[name[len(prefix) :]] = value.float()
    model = PlainK3(text)
    model.load_state_dict(weights)
    return model.eval()
