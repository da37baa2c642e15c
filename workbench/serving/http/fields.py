"""The fields of requests, as the OpenAI interface names them; unknown ones are let be, wrong ones are refused by name.

Values are strict: a number in quotes is no number. What cannot be done here is refused rather than passed over in
silence, so that nobody believes in a setting that has no effect.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.base import RequestError
from workbench.serving.http.errors import ApiError
from workbench.serving.requests import MAX_LOGPROBS, SamplingParams

__all__ = [
    "ChatFields",
    "ChatMessage",
    "CommonFields",
    "CompletionFields",
    "ImageUrlPart",
    "TextPartFields",
    "draws",
]

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
EFFORTS = ("none", "low", "high", "max")  # those the model was published with

Finite = Annotated[float, Field(allow_inf_nan=False)]
# The first wrong item is enough: a list could hold millions of them.
Many = Field(max_length=4096, fail_fast=True)
Ids = Annotated[list[int], Field(fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # beyond the OpenAI interface, under the name that other servers use


class CommonFields(Fields):
    """What both kinds of request share. None means not given."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None

    # Beyond the OpenAI interface, under the names that other servers use.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    skip_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_no_effect(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, harmless in UNSUPPORTED.items():
                if name in data and data[name] not in harmless:
                    raise ApiError(400, f"{name} is not supported", code="unsupported_parameter", param=name)
        return data

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def running_usage(self) -> bool:
        """Whether every chunk is to say how many tokens its choice has so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def shows_markers(self) -> bool:
        """Whether reserved ids are part of the text, by their names."""
        return self.skip_special_tokens is False

    @property
    def num_choices(self) -> int:
        return self.n or 1


# Field -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "logit_bias": (None, {}),
    "functions": (None, []),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "echo": (None, False),
    "best_of": (None, 1),
}


class ImageUrl(Fields):
    url: str


class TextPartFields(Fields):
    type: Literal["text"]
    text: str


class ImageUrlPart(Fields):
    type: Literal["image_url"]
    image_url: ImageUrl


PartFields = Annotated[TextPartFields | ImageUrlPart, Field(discriminator="type")]


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[PartFields], Many] | None = None
    reasoning_content: str | None = None


class SchemaFields(Fields):
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None


class StructuredOutputs(Fields):
    """Beyond the OpenAI interface, as other servers have it; one of them."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Many] | None = None


class ThinkingSwitch(Fields):
    type: Literal["enabled", "disabled"]


class ChatFields(CommonFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: Literal["none", "low", "high", "max"] | None = None
    thinking: ThinkingSwitch | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0

    def wants_thinking(self, default: bool) -> bool:
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return default if self.thinking is None else self.thinking.type == "enabled"


class CompletionFields(CommonFields):
    prompt: str | Annotated[list[str], Many] | Ids | Annotated[list[Ids], Many]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


def draws(
    fields: CommonFields, *, max_tokens: int, num_logprobs: int, stop_ids: tuple[int, ...]
) -> list[SamplingParams]:
    """How each of the choices is drawn; they differ in their seeds alone, which follow one another."""
    seed = secrets.randbits(63) if fields.seed is None else fields.seed
    common: dict[str, Any] = {
        "temperature": 1.0 if fields.temperature is None else float(fields.temperature),
        "top_p": 1.0 if fields.top_p is None else float(fields.top_p),
        "top_k": max(0, min(fields.top_k or 0, 1 << 31)),  # elsewhere -1 switches it off
        "min_p": float(fields.min_p or 0.0),
        "repetition_penalty": 1.0 if fields.repetition_penalty is None else float(fields.repetition_penalty),
        "presence_penalty": float(fields.presence_penalty or 0.0),
        "frequency_penalty": float(fields.frequency_penalty or 0.0),
        "max_tokens": max_tokens,
        "num_logprobs": num_logprobs,
        "stop_ids": () if fields.ignore_eos else stop_ids,
        "min_tokens": fields.min_tokens or 0,
    }
    try:
        return [SamplingParams(**common, seed=(seed + i) % 2**64) for i in range(fields.num_choices)]
    except RequestError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
