"""From a runner and the folder its weights came from to a service that answers."""

from __future__ import annotations

from pathlib import Path

from workbench.base import ConfigError
from workbench.serving.fleet import Fleet
from workbench.serving.inputs import ImageProcessor, read_tokenizer
from workbench.serving.service import MultimodalInferenceService
from workbench.serving.speculation import Drafter
from workbench.serving.steps import Runner
from workbench.spec import read_json, read_spec, require_runnable

__all__ = ["open_service", "thinks_first"]

GENERATION_CONFIG = "generation_config.json"


def thinks_first(root: Path | str) -> bool:
    """Whether a checkpoint is to think before it answers: `"thinking": true` in its generation config.

    False where the file or the entry is missing. Raises ConfigError for a file that is no JSON object and for any other
    value.
    """
    path = Path(root) / GENERATION_CONFIG
    if not path.is_file():
        return False
    thinking = read_json(path).get("thinking", False)
    if not isinstance(thinking, bool):
        raise ConfigError("thinking is on or off", where=path, found=repr(thinking), expected="true or false")
    return thinking


def open_service(
    model: Runner | Fleet,
    root: Path | str,
    *,
    prefix_pages: int = 0,
    page_tokens: int = 256,
    drafter: Drafter | None = None,
) -> MultimodalInferenceService:
    """A service over `model` with the tokenizer and image settings of checkpoint folder `root`; start it with `with`.

    `prefix_pages`, `page_tokens` and `drafter` are as in `Engine`; whether it thinks first, `thinks_first` reads from
    the folder.
    Raises TokenizerError where the folder's tokenizer is missing or disagrees with its config, ConfigError as
    `read_spec`.
    """
    root = Path(root)
    spec = read_spec(root)
    require_runnable(spec)
    processor = ImageProcessor(spec.image) if spec.image is not None and spec.vision is not None else None
    return MultimodalInferenceService(
        model,
        read_tokenizer(root, spec),
        processor,
        prefix_pages=prefix_pages,
        page_tokens=page_tokens,
        thinking=thinks_first(root),
        drafter=drafter,
    )
