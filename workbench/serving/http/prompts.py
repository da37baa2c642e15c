"""From fields to prompts: messages and pictures as the model reads them, ready to be queued. Runs in threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.serving.constraint import AnswerConstraint, Grammars
from workbench.serving.http.errors import ApiError
from workbench.serving.http.fields import (
    ChatFields,
    ChatMessage,
    CommonFields,
    CompletionFields,
    ImageUrlPart,
    draws,
)
from workbench.serving.http.images import read_image
from workbench.serving.http.settings import ServerSettings
from workbench.serving.inputs import (
    AnswerStream,
    ContentPart,
    ImagePart,
    Message,
    PromptTokens,
    TextPart,
    Tokenizer,
    check_text,
)
from workbench.serving.pieces import AnswerPieces, PlainStream
from workbench.serving.requests import GenerationRequest, check_request
from workbench.serving.service import MultimodalInferenceService, placed_request
from workbench.serving.stop import StopMatcher

__all__ = ["Ask", "has_images", "prepare_chat", "prepare_completion"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One choice to generate: what to queue, and how to read what comes."""

    request: GenerationRequest
    new_pieces: Callable[[], AnswerPieces]


def has_images(fields: ChatFields) -> bool:
    return any(
        isinstance(part, ImageUrlPart)
        for message in fields.messages
        if isinstance(message.content, list)
        for part in message.content
    )


def prepare_chat(
    fields: ChatFields, service: MultimodalInferenceService, settings: ServerSettings, *, tenant: str = ""
) -> list[Ask]:
    """The choices that a chat of `tenant` asks for. Raises ApiError, RequestError and ImageError where it cannot be."""
    check_choices(fields, settings)
    default = service.thinking if settings.thinking is None else settings.thinking
    thinking = fields.wants_thinking(default)
    images: list[bytes] = []
    messages = [_message(message, images, settings) for message in fields.messages]
    if thinking and fields.reasoning_effort is not None:
        messages.insert(0, Message("system", fields.reasoning_effort, kind="thinking-effort"))
    prompt, pictures = service.prepare(messages, images, thinking=thinking)

    def new_pieces() -> AnswerPieces:
        tokenizer = service.tokenizer
        # What comes after the end of the message is not in its form, and neither is text with its markup.
        plain = fields.ignore_eos or fields.shows_markers
        stream = _plain(fields, tokenizer) if plain else AnswerStream(tokenizer, thinking=thinking)
        return AnswerPieces(tokenizer, stop=StopMatcher(fields.stops), stream=stream)

    sampling = draws(
        fields,
        max_tokens=_room(fields.wanted_tokens, prompt, service, settings),
        num_logprobs=fields.num_logprobs,
        stop_ids=service.tokenizer.stop_ids,
    )
    constraint = _constraint(fields, service.grammars, thinking=thinking)
    return [
        _checked(
            Ask(
                request=placed_request(
                    prompt,
                    pictures,
                    each,
                    constraint.anew() if constraint is not None else None,
                    tenant=tenant,
                    weight=settings.quota_of(tenant).weight,
                ),
                new_pieces=new_pieces,
            ),
            service,
        )
        for each in sampling
    ]


def prepare_completion(
    fields: CompletionFields, service: MultimodalInferenceService, settings: ServerSettings, *, tenant: str = ""
) -> list[Ask]:
    """The choices that a completion asks for, prompt by prompt. Raises as `prepare_chat`."""
    tokenizer, room = service.tokenizer, service.model.info.max_tokens

    def new_pieces() -> AnswerPieces:
        return AnswerPieces(tokenizer, stop=StopMatcher(fields.stops), stream=_plain(fields, tokenizer))

    check_choices(fields, settings, num_prompts=len(fields.prompts))
    asks = []
    for text in fields.prompts:
        if isinstance(text, str):
            check_text(len(text), room=room)
        prompt = PromptTokens(tuple(tokenizer.encode(text) if isinstance(text, str) else text))
        sampling = draws(
            fields,
            max_tokens=_room(fields.max_tokens or 16, prompt, service, settings),  # 16 as in the OpenAI interface
            num_logprobs=fields.logprobs or 0,
            stop_ids=tokenizer.stop_ids,
        )
        for each in sampling:
            request = placed_request(prompt, [], each, tenant=tenant, weight=settings.quota_of(tenant).weight)
            asks.append(_checked(Ask(request=request, new_pieces=new_pieces), service))
    return asks


def check_choices(fields: CommonFields, settings: ServerSettings, *, num_prompts: int = 1) -> None:
    if not 1 <= fields.num_choices * num_prompts <= settings.max_choices:
        raise ApiError(
            400,
            f"{fields.num_choices * num_prompts} answers asked for, between 1 and {settings.max_choices} are given",
            code="invalid_value",
            param="n",
        )


def _plain(fields: CommonFields, tokenizer: Tokenizer) -> PlainStream:
    return PlainStream(tokenizer, show_markers=fields.shows_markers)


def _message(message: ChatMessage, images: list[bytes], settings: ServerSettings) -> Message:
    content: str | list[ContentPart]
    if isinstance(message.content, list):
        content = []
        for part in message.content:
            if isinstance(part, ImageUrlPart):
                if len(images) >= settings.max_images:
                    raise ApiError(
                        400, f"more than {settings.max_images} pictures", code="too_many_images", param="messages"
                    )
                images.append(read_image(part.image_url.url, origins=settings.image_origins))
                content.append(ImagePart())
            else:
                content.append(TextPart(part.text))
    else:
        content = message.content or ""
    thinking = message.reasoning_content or ""
    if message.role == "assistant":
        return Message("assistant", content, thinking=thinking)
    if thinking:
        raise ApiError(400, "only an assistant's message has reasoning_content", code="invalid_value", param="messages")
    return Message("user" if message.role == "user" else "system", content)


def _constraint(fields: ChatFields, grammars: Grammars, *, thinking: bool) -> AnswerConstraint | None:
    """What the answer is held to. Raises RequestError for a form that is wrong or cannot be followed here."""
    form, other = fields.response_format, fields.structured_outputs
    if form is not None and form.type == "json_object":
        return grammars.json_schema({"type": "object"}, thinking=thinking)
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError(400, "json_schema is missing", code="invalid_value", param="response_format.json_schema")
        return grammars.json_schema(form.json_schema.schema_, thinking=thinking)
    if other is None:
        return None
    if other.json_ is not None:
        return grammars.json_schema(other.json_, thinking=thinking)
    if other.regex is not None:
        return grammars.regex(other.regex, thinking=thinking)
    return grammars.choice(other.choice, thinking=thinking) if other.choice is not None else None


def _room(
    wanted: int | None, prompt: PromptTokens, service: MultimodalInferenceService, settings: ServerSettings
) -> int:
    """Tokens to generate: as many as wanted, else what fits up to the default."""
    if wanted is not None:
        return min(wanted, 1 << 31)
    return max(1, min(settings.default_max_tokens, service.model.info.max_tokens - len(prompt.token_ids) + 1))


def _checked(ask: Ask, service: MultimodalInferenceService) -> Ask:
    """Refused here rather than when it is queued: nothing of a request with several choices is queued then."""
    check_request(ask.request, service.model.info)
    return ask
