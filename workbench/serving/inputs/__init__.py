"""Text and images into ids and patches, and generated ids back into text."""

from workbench.serving.inputs.images import (
    ImageInput,
    ImageLimits,
    ImagePlan,
    ImageProcessor,
    ImageSource,
    normalise,
    plan_image,
)
from workbench.serving.inputs.messages import (
    Answer,
    AnswerDelta,
    AnswerStream,
    ContentPart,
    ImagePart,
    Message,
    PromptImage,
    PromptTokens,
    TextPart,
    expand_images,
    parse_answer,
    render_chat,
)
from workbench.serving.inputs.tokenizer import Markers, TextStream, Tokenizer, read_tokenizer

__all__ = [
    "Answer",
    "AnswerDelta",
    "AnswerStream",
    "ContentPart",
    "ImageInput",
    "ImageLimits",
    "ImagePart",
    "ImagePlan",
    "ImageProcessor",
    "ImageSource",
    "Markers",
    "Message",
    "PromptImage",
    "PromptTokens",
    "TextPart",
    "TextStream",
    "Tokenizer",
    "expand_images",
    "normalise",
    "parse_answer",
    "plan_image",
    "read_tokenizer",
    "render_chat",
]
