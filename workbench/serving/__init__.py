"""Answers: requests into continuous batches of steps, tokens back into text.

`RankRunner`, `LocalRunner` and the sampler compute and need torch; they are loaded on first use, so that a process that
only schedules, a notebook kernel above all, imports no torch and touches no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from workbench.serving.copies import Copies, CopiesState, CopyEvent
from workbench.serving.engine import Engine
from workbench.serving.fleet import CopyStatus, Fleet
from workbench.serving.generation import EngineStats, Finish, Generation, TokenEvent
from workbench.serving.inputs import (
    ImageInput,
    ImageLimits,
    ImagePart,
    ImageProcessor,
    Message,
    PromptTokens,
    TextPart,
    Tokenizer,
    read_tokenizer,
)
from workbench.serving.open import open_service
from workbench.serving.recent import RecentTimes
from workbench.serving.reply import Answer, Reply, Timings, Usage
from workbench.serving.requests import GenerationRequest, PlacedImage, SamplingParams
from workbench.serving.service import MultimodalInferenceService
from workbench.serving.speculation import Drafter, ModelDrafter, PromptLookup
from workbench.serving.steps import Draft, ImageSpan, Runner, RunnerInfo, SampledToken, SequenceStep, StepInput
from workbench.serving.stop import StopMatcher

if TYPE_CHECKING:
    from workbench.serving.runner import LocalRunner, RankRunner

__all__ = [
    "Answer",
    "Copies",
    "CopiesState",
    "CopyEvent",
    "CopyStatus",
    "Draft",
    "Drafter",
    "Engine",
    "EngineStats",
    "Finish",
    "Fleet",
    "Generation",
    "GenerationRequest",
    "ImageInput",
    "ImageLimits",
    "ImagePart",
    "ImageProcessor",
    "ImageSpan",
    "LocalRunner",
    "Message",
    "ModelDrafter",
    "MultimodalInferenceService",
    "PlacedImage",
    "PromptLookup",
    "PromptTokens",
    "RankRunner",
    "RecentTimes",
    "Reply",
    "Runner",
    "RunnerInfo",
    "SampledToken",
    "SamplingParams",
    "SequenceStep",
    "StepInput",
    "StopMatcher",
    "TextPart",
    "Timings",
    "TokenEvent",
    "Tokenizer",
    "Usage",
    "open_service",
    "read_tokenizer",
]

_NEEDS_TORCH = {"LocalRunner": "workbench.serving.runner", "RankRunner": "workbench.serving.runner"}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'workbench.serving' has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)
