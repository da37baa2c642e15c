"""From a runner and the folder its weights came from to a service that answers."""

from __future__ import annotations

from pathlib import Path

from workbench.serving.inputs import ImageProcessor, read_tokenizer
from workbench.serving.service import MultimodalInferenceService
from workbench.serving.steps import Runner
from workbench.spec import read_spec, require_runnable

__all__ = ["open_service"]


def open_service(model: Runner, root: Path | str) -> MultimodalInferenceService:
    """A service over `model` with the tokenizer and image settings of checkpoint folder `root`; start it with `with`.

    Raises TokenizerError where the folder's tokenizer is missing or disagrees with its config, ConfigError as
    `read_spec`.
    """
    root = Path(root)
    spec = read_spec(root)
    require_runnable(spec)
    processor = ImageProcessor(spec.image) if spec.image is not None and spec.vision is not None else None
    return MultimodalInferenceService(model, read_tokenizer(root, spec), processor)
