"""Questions in words and pictures, answers in text: prompts, engine and decoding put together.

Pictures are decoded and cut in the caller's thread, so that a large one delays its own request only. The engine's
thread sees token ids and patches.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypedDict, Unpack

from workbench.base import RequestError
from workbench.serving.constraint import Grammars
from workbench.serving.engine import Engine
from workbench.serving.fleet import Fleet
from workbench.serving.generation import EngineStats
from workbench.serving.inputs import (
    AnswerStream,
    ContentPart,
    ImageInput,
    ImagePart,
    ImageSource,
    Message,
    PromptTokens,
    TextPart,
    Tokenizer,
    check_chat,
    render_chat,
)
from workbench.serving.pieces import AnswerPieces
from workbench.serving.recent import RecentTimes
from workbench.serving.reply import Answer, Reply
from workbench.serving.requests import Constraint, GenerationRequest, PlacedImage, SamplingParams
from workbench.serving.speculation import Drafter
from workbench.serving.steps import Runner
from workbench.serving.stop import StopMatcher

__all__ = ["AnswerOptions", "ImagesLike", "MultimodalInferenceService", "placed_request"]

ImagesLike = ImageSource | Sequence[ImageSource] | None


class AnswerOptions(TypedDict, total=False):
    """Options of `infer` and `chat`; defaults and meaning as in `stream`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: Sequence[str]
    thinking: bool | None
    json_schema: Mapping[str, Any] | None
    regex: str | None


class Processor(Protocol):
    """Turns a picture into patches; called from several threads at once."""

    def process(self, source: ImageSource) -> ImageInput: ...


class MultimodalInferenceService:
    """A model that answers: give it a runner, or a fleet of them, a tokenizer and, for a model with vision, an image
    processor.

        with MultimodalInferenceService(deployment, tokenizer, ImageProcessor(spec.image)) as service:
            print(service.infer("What is in the picture?", Path("cat.png")).text)

    May be used from many threads; requests share the model's steps. `step_tokens` is the most new tokens per step and
    replica, `max_queue` the most requests that wait; `prefix_pages`, `page_tokens` and `drafter` are as in `Engine`. A
    fleet makes its engines itself: these settings are not for them.
    With `thinking` the model thinks first unless a question says otherwise. Closing the service leaves the runner and
    the drafter open.
    """

    def __init__(
        self,
        model: Runner | Fleet,
        tokenizer: Tokenizer,
        image_processor: Processor | None = None,
        *,
        step_tokens: int = 512,
        max_queue: int = 256,
        prefix_pages: int = 0,
        page_tokens: int = 256,
        thinking: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self.thinking = thinking
        self.model, self.tokenizer, self.image_processor = model, tokenizer, image_processor
        self.grammars = Grammars(tokenizer)
        self.engine = (
            model
            if isinstance(model, Fleet)
            else Engine(
                model,
                step_tokens=step_tokens,
                max_queue=max_queue,
                prefix_pages=prefix_pages,
                page_tokens=page_tokens,
                drafter=drafter,
            )
        )

    def start(self) -> MultimodalInferenceService:
        """Begin to take requests; does nothing where it has begun."""
        self.engine.start()
        return self

    def stop(self) -> None:
        """Stop taking requests; those in flight fail."""
        self.engine.stop()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def recent(self) -> RecentTimes:
        """Times to first tokens and between tokens of the last minutes."""
        return self.engine.recent()

    def __enter__(self) -> MultimodalInferenceService:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def infer(self, text_input: str, image_input: ImagesLike = None, **options: Unpack[AnswerOptions]) -> Answer:
        """The answer to one question about any number of pictures, which stand before the text.

        Raises ImageError for an unusable picture, RequestError for a request beyond the limits, QueueFullError where
        too many wait, and the runner's error where it fails.
        """
        return self.stream(text_input, image_input, **options).result()

    def chat(
        self, messages: Sequence[Message], image_input: ImagesLike = None, **options: Unpack[AnswerOptions]
    ) -> Answer:
        """The next turn of a chat; `image_input` are the pictures of all its ImageParts in order. Raises as `infer`."""
        return self.stream(messages, image_input, **options).result()

    def stream(
        self,
        text_or_messages: str | Sequence[Message],
        image_input: ImagesLike = None,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        thinking: bool | None = None,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
    ) -> Reply:
        """As `infer` or `chat`, but returns at once: iterate the reply for pieces of text, close it to abort.

        `stop` strings end the answer and are not part of it; `seed` None draws one; `thinking` lets the model think
        first, into `Answer.thinking`; None is the service's own. The answer's text is held to `json_schema` or `regex`.
        The rest is as in `SamplingParams`.
        """
        thinking = self.thinking if thinking is None else thinking
        prompt, images = self.prepare(text_or_messages, image_input, thinking=thinking)
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=secrets.randbits(64) if seed is None else seed,
            max_tokens=max_tokens,
            stop_ids=tuple(self.tokenizer.stop_ids),
        )
        constraint: Constraint | None = None
        if json_schema is not None:
            constraint = self.grammars.json_schema(json_schema, thinking=thinking)
        elif regex is not None:
            constraint = self.grammars.regex(regex, thinking=thinking)
        return self.generate(prompt, images, sampling, stop=stop, thinking=thinking, constraint=constraint)

    def prepare(
        self, text_or_messages: str | Sequence[Message], image_input: ImagesLike = None, *, thinking: bool = False
    ) -> tuple[PromptTokens, list[ImageInput]]:
        """A question or a chat as the model reads it, for `generate`: the work in the caller's thread.

        Text that could not fit is refused by its length, before the tokenizer sees it. Raises as `infer`.
        """
        sources = _as_list(image_input)
        if isinstance(text_or_messages, str):
            content: list[ContentPart] = [*(ImagePart() for _ in sources), TextPart(text_or_messages)]
            text_or_messages = [Message("user", content)]
        check_chat(text_or_messages, num_images=len(sources), room=self.model.info.max_tokens)
        images = [self._process(source) for source in sources]
        return render_chat(text_or_messages, self.tokenizer, images, thinking=thinking), images

    def generate(
        self,
        prompt: PromptTokens,
        images: Sequence[ImageInput],
        sampling: SamplingParams,
        *,
        stop: Sequence[str] = (),
        thinking: bool = False,
        constraint: Constraint | None = None,
    ) -> Reply:
        """Continue a prompt of token ids, image by image as its spans say; what the other methods end in.

        Raises RequestError where images and spans do not belong together.
        """
        request = placed_request(prompt, images, sampling, constraint)
        matcher = StopMatcher(stop)  # refuses unusable stop strings before anything is queued
        return Reply(
            self.engine.submit(request),
            AnswerPieces(self.tokenizer, stop=matcher, stream=AnswerStream(self.tokenizer, thinking=thinking)),
            prompt_tokens=len(request.token_ids),
            image_tokens=request.num_image_tokens,
        )

    def _process(self, source: ImageSource) -> ImageInput:
        if self.image_processor is None:
            raise RequestError("pictures need an image processor", next_step="Give the service an ImageProcessor")
        return self.image_processor.process(source)


def placed_request(
    prompt: PromptTokens,
    images: Sequence[ImageInput],
    sampling: SamplingParams,
    constraint: Constraint | None = None,
    *,
    tenant: str = "",
    weight: float = 1.0,
) -> GenerationRequest:
    """The request for a prompt with its images. Raises RequestError where they do not belong together."""
    if [(span.key, span.count) for span in prompt.image_spans] != [(x.key, x.num_tokens) for x in images]:
        raise RequestError("the images are not those that the prompt has room for, in this order")
    placed = tuple(
        PlacedImage(key=image.key, patches=image.patches, grid=image.grid, row=span.start, count=span.count)
        for span, image in zip(prompt.image_spans, images, strict=True)
    )
    return GenerationRequest(
        token_ids=prompt.token_ids,
        images=placed,
        sampling=sampling,
        constraint=constraint,
        tenant=tenant,
        weight=weight,
    )


def _as_list(images: ImagesLike) -> list[ImageSource]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]  # type: ignore[list-item]
