"""What an acceptance run asks: token sequences for parity, questions in words, and two pictures drawn on the spot."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from workbench.spec import ModelSpec

if TYPE_CHECKING:
    from workbench.align import ParityPrompt
    from workbench.serving import ImageInput

__all__ = ["IMAGE_QUESTIONS", "TEXT_QUESTIONS", "draw_pictures", "parity_prompts", "text_questions"]

TEXT_QUESTIONS = {
    "short": "What is tensor parallelism?",
    "medium": (
        "A mixture-of-experts model is spread over four accelerators. Explain in a few sentences which weights each of "
        "them holds, how a token reaches its experts, and why the router must be computed in full precision."
    ),
}
IMAGE_QUESTIONS = ("What is in the picture?", "Which of the two pictures has a circle?")
LONG_QUESTION_REPEATS = 12
PARITY_LENGTHS = (1, 7, 66)


def text_questions(max_tokens: int) -> dict[str, str]:
    """Questions by length. The long one shrinks where a sequence may hold fewer than a few hundred tokens."""
    repeats = max(1, min(LONG_QUESTION_REPEATS, max_tokens // 192))
    return {
        **TEXT_QUESTIONS,
        "long": "\n\n".join([TEXT_QUESTIONS["medium"]] * repeats) + "\n\n" + TEXT_QUESTIONS["short"],
    }


def draw_pictures() -> tuple[Image.Image, Image.Image]:
    """Two pictures of different size and mode: shapes on white, and a circle on a transparent ground."""
    shapes = Image.new("RGB", (112, 84), "white")
    pen = ImageDraw.Draw(shapes)
    pen.rectangle((10, 12, 44, 46), fill="red")
    pen.polygon([(64, 70), (84, 30), (104, 70)], fill="blue")
    circle = Image.new("RGBA", (70, 98), (0, 0, 0, 0))
    ImageDraw.Draw(circle).ellipse((12, 24, 58, 70), fill=(20, 160, 60, 255))
    return shapes, circle


def parity_prompts(spec: ModelSpec, image: ImageInput | None, *, seed: int = 0) -> list[ParityPrompt]:
    """Random token sequences of three lengths, and one with a picture where the model looks at pictures.

    Ids are drawn below the special tokens, so that no structure marker or placeholder is among them by accident.
    """
    from workbench.align import ParityPrompt
    from workbench.align.reference_vision import ReferenceImage

    draw = random.Random(seed)
    special = (spec.tokens.bos, spec.tokens.eos, spec.tokens.pad, spec.tokens.media)
    limit = min(token for token in special if token is not None) or spec.vocab_size

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(limit) for _ in range(length))

    prompts = [
        ParityPrompt(label=f"{length} token{'s' if length > 1 else ''}", token_ids=ids(length))
        for length in PARITY_LENGTHS
    ]
    if image is not None and spec.tokens.media is not None:
        tokens = (*ids(4), *(spec.tokens.media,) * image.num_tokens, *ids(5))
        picture = ReferenceImage(patches=image.patches, grid=(image.grid[1], image.grid[2]))
        prompts.append(ParityPrompt(label="with a picture", token_ids=tokens, images=(picture,)))
    return prompts
