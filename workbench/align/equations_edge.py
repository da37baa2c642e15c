"""The ends of Kimi K3 with every step exchangeable: the embedding, the last mix of sums, its norm and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.align.equations import Facts, Weights, rms_norm
from workbench.align.reference import normalise

__all__ = ["EDGE_NAMES", "EdgeBench"]

EDGE_NAMES = ("inputs_embeds", "final_mix", "final_hidden", "logits")


@dataclass
class EdgeBench:
    """As `LayerBench`, outside the layers. `token_ids` of the sequence; `read` takes names below "language_model."."""

    facts: Facts
    read: Weights
    given: Mapping[str, Tensor]
    token_ids: Sequence[int]

    weight: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)
    norm: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = field(default_factory=dict)
    result: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    sources: Callable[[list[Tensor]], list[Tensor]] = lambda sources: sources
    mixes: Callable[[Tensor], Tensor] = lambda stacked: stacked
    mix_norm: Callable[[Tensor, float], Tensor] = normalise
    residual_scale: float = 1.0

    def w(self, name: str) -> Tensor:
        values = self.read(name)
        change = self.weight.get(name)
        return values if change is None else change(values)

    def names(self) -> tuple[str, ...]:
        return EDGE_NAMES

    def compute(self, name: str) -> Tensor | None:
        """What the model's end makes of given inputs; None where the trace lacks one, or pictures fill rows."""
        try:
            value: Tensor | None = getattr(self, f"_{name}")()
        except KeyError:
            return None
        change = self.result.get(name)
        return value if value is None or change is None else change(value)

    def _inputs_embeds(self) -> Tensor:
        return self.w("model.embed_tokens.weight")[torch.tensor(self.token_ids)]

    def _final_mix(self) -> Tensor:
        size, last = self.facts.text["attn_res_block_size"], self.facts.num_layers - 1
        names = ["inputs_embeds" if layer == 0 else f"L{layer - 1}.sum" for layer in range(0, last + 1, size)]
        stacked = torch.stack(self.sources([self.given[name].double() for name in [*names, f"L{last}.sum"]]))
        eps = self.eps.get("final_res", self.facts.text["rms_norm_eps"])
        direction = self.w("model.output_attn_res_proj.weight")[0]
        scores = self.w("model.output_attn_res_norm.weight") * self.mix_norm(stacked, eps) @ direction
        shares = torch.softmax(self.residual_scale * scores, dim=0)
        return (shares.unsqueeze(-1) * self.mixes(stacked)).sum(0)

    def _final_hidden(self) -> Tensor:
        norm = self.norm.get("final_norm", rms_norm)
        eps = self.eps.get("final_norm", self.facts.text["rms_norm_eps"])
        return norm(self.given["final_mix"].double(), self.w("model.norm.weight"), eps)

    def _logits(self) -> Tensor:
        return self.given["final_hidden"].double() @ self.w("lm_head.weight").T
