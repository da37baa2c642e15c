"""From a runner and the folder its weights came from to a service that answers."""

from __future__ import annotations

from pathlib import Path

from workbench.serving.inputs import ImageProcessor, read_tokenizer
from workbench.serving.service import MultimodalInferenceService
from workbench.serving.steps import Runner
from workbench.spec import read_spec, require_runnable

__all__ = ["open_service"]


def open_service(
    model: Runner, root: Path | str, *, prefix_pages: int = 0, page_tokens: int = 256
) -> MultimodalInferenceService:
    """A service over `model` with the tokenizer and image settings of checkpoint folder `root`; start it with `with`.

    `prefix_pages` and `page_tokens` are as in `Engine`.
    Raises TokenizerError where the folder's tokenizer is missing or disagrees with its config, ConfigError as
    `read_spec`.
    """
    root = Path(root)
    spec = read_spec(root)
    require_runnable(spec)
    processor = ImageProcessor(spec.image) if spec.image is not None and spec.vision is not None else None
    return MultimodalInferenceService(
        model, read_tokenizer(root, spec), processor, prefix_pages=prefix_pages, page_tokens=page_tokens
    )
