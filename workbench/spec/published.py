"""Sizes of models as their publishers, or a count of their shapes elsewhere, state them; held against our own.

`total` and `active` are billions of parameters of the decoder, without tower and draft layers, active without the input
embedding; KV, index and state are bytes of one sequence at tp=1 with a bf16 cache and FP8 index keys. They were counted
from the shapes of the published configs by somebody else's program, not by this one. `stated` is what the publisher
says; `remark` why a number of ours is another.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PUBLISHED", "PublishedSizes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSizes:
    """None where no count is published: `remark` then says against what ours was held."""

    stated: str
    total: float | None
    active: float | None
    kv: int | None
    state: int = 0
    index: int = 0
    remark: str = ""


def _sizes(
    stated: str,
    total: float | None,
    active: float | None,
    kv: int | None,
    state: int = 0,
    index: int = 0,
    remark: str = "",
) -> PublishedSizes:
    return PublishedSizes(stated=stated, total=total, active=active, kv=kv, state=state, index=index, remark=remark)


_V3 = _sizes("671B / 37B", 671.03, 36.62, 70_272, remark="36.626: rounded here, cut off there")
_NO_COUNT = "no count by shapes is published; held to what the publisher states"

# By the name of the config: organisation and model, as in a hub.
PUBLISHED: dict[str, PublishedSizes] = {
    "moonshotai/Kimi-K3": _sizes(
        "2.8T / 104B",
        2779.93,
        104.19,
        27_648,
        449_372_160,
        remark="published with the tower, 0.45",
    ),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": _sizes("48B / 3B", 49.12, 3.11, 8_064, 43_417_600),
    "moonshotai/Kimi-K2-Instruct": _sizes("1T / 32B", 1026.41, 31.69, 70_272),
    "moonshotai/Kimi-K2.5": _sizes("1T / 32B", 1026.41, 31.69, 70_272),
    "nvidia/Kimi-K2.5-NVFP4": _sizes("1T / 32B", 1026.41, 31.69, 70_272),
    "deepseek-ai/DeepSeek-V3": _V3,
    "deepseek-ai/DeepSeek-R1": _V3,
    "deepseek-ai/DeepSeek-V3.2": _sizes("671B / 37B", 671.88, 37.48, 70_272, index=7_808),
    "deepseek-ai/DeepSeek-V4-Flash": _sizes("284B / 13B", None, None, None, remark=_NO_COUNT),
    "deepseek-ai/DeepSeek-V4-Pro": _sizes("1.6T / 49B", None, None, None, remark=_NO_COUNT),
    "Qwen/Qwen3-235B-A22B": _sizes("235B / 22B", 235.09, 21.57, 192_512),
    "Qwen/Qwen3-30B-A3B": _sizes("30.5B / 3.3B", 30.53, 3.04, 98_304),
    "Qwen/Qwen3-30B-A3B-FP8": _sizes("30.5B / 3.3B", 30.53, 3.04, 98_304),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _sizes("30B / 3B", 30.53, 3.04, 98_304),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": _sizes("235B / 22B", 235.09, 21.57, 192_512),
    "Qwen/Qwen3.5-35B-A3B": _sizes("35B / 3B", 34.66, 2.95, 20_480, 64_389_120),
    "Qwen/Qwen3.5-397B-A17B": _sizes("397B / 17B", 396.35, 16.33, 30_720, 192_061_440),
    "zai-org/GLM-4.5": _sizes("355B / 32B", 352.80, 32.86, 376_832),
    "zai-org/GLM-5.1": _sizes("744B / 40B", 743.91, 40.83, 89_856, index=9_984),
    "zai-org/GLM-5.2": _sizes("743B / 39B", 743.38, 40.30, 89_856, index=2_688),
    "openai/gpt-oss-120b": _sizes("117B / 5.1B", 116.83, 5.13, 73_728),
    "openai/gpt-oss-20b": _sizes("21B / 3.6B", 20.91, 3.61, 49_152),
    "mistralai/Mixtral-8x7B-v0.1": _sizes("46.7B / 12.9B", 46.70, 12.75, 131_072),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": _sizes("400B / 17B", 400.71, 16.15, 196_608),
    "MiniMaxAI/MiniMax-M2.5": _sizes("230B / 10B", 228.69, 10.42, 253_952),
    "MiniMaxAI/MiniMax-M3": _sizes(
        "427B / 26B",
        425.95,
        24.51,
        122_880,
        remark="published without the index projections, 57 layers of 3.9 million, and their keys",
    ),
    "allenai/OLMoE-1B-7B-0125-Instruct": _sizes("6.9B / 1.3B", 6.92, 1.18, 131_072),
    "XiaomiMiMo/MiMo-V2-Flash": _sizes("309B / 15B", None, None, None, remark=_NO_COUNT),
}
