"""Typed errors that say where, what was found, what was expected, and what to do next."""

from __future__ import annotations

__all__ = [
    "ChangeUnderWayError",
    "CheckpointError",
    "ConfigError",
    "DeploymentError",
    "ImageError",
    "LayoutError",
    "LoadError",
    "ModelRestartingError",
    "NoRoomError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "TokenizerError",
    "TraceError",
    "UnsupportedModelError",
    "WorkbenchError",
    "WorkerDiedError",
]


class WorkbenchError(Exception):
    """Base of every error a caller may want to catch; a bug of ours is never one of these.

    `message` says what is wrong. The four keywords are kept as attributes and appended to the text when given, so
    that an error reads the same in a terminal, a notebook and a log.
    """

    def __init__(
        self,
        message: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        next_step: str | None = None,
    ) -> None:
        self.message = message
        self.where = None if where is None else str(where)
        self.found = None if found is None else str(found)
        self.expected = None if expected is None else str(expected)
        self.next_step = next_step
        super().__init__(self._text())

    def _text(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        facts = [f"{name} {value}" for name, value in (("found", self.found), ("expected", self.expected)) if value]
        if facts:
            text += f" ({', '.join(facts)})"
        return f"{text}. {self.next_step}" if self.next_step else text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (worker -> handle), where the default pickling drops keyword-only arguments.
        return (_rebuild, (type(self), self.message, self.where, self.found, self.expected, self.next_step))


def _rebuild(
    kind: type[WorkbenchError], message: str, where: object, found: object, expected: object, next_step: str | None
) -> WorkbenchError:
    return kind(message, where=where, found=found, expected=expected, next_step=next_step)


class ConfigError(WorkbenchError):
    """`config.json` or another description file is unreadable, contradictory or out of range."""


class UnsupportedModelError(ConfigError):
    """The description is readable, but names an architecture or block that this version does not have."""


class CheckpointError(WorkbenchError):
    """A checkpoint folder is incomplete, torn, contradictory or hostile."""


class LayoutError(WorkbenchError):
    """A parallel layout cannot be applied to this model or this number of ranks."""


class LoadError(WorkbenchError):
    """Weights could not be brought onto a rank completely and exactly once."""


class TokenizerError(WorkbenchError):
    """A tokenizer file is missing, unreadable or disagrees with the model."""


class TraceError(WorkbenchError):
    """A trace folder, captured by someone else, is incomplete, contradictory, hostile or of another model."""


class ImageError(WorkbenchError):
    """An image cannot be decoded or breaks a limit."""


class RequestError(WorkbenchError):
    """A request is malformed or breaks a limit; the service stays up."""


class RequestFailedError(WorkbenchError):
    """The model failed on this one request, through no fault of its sender's; others and the service go on."""


class PromptTooLongError(RequestError):
    """The prompt, or the prompt and the answer asked for, have no room in the cache."""


class QueueFullError(RequestError):
    """The service already holds as many requests as it may; try again later."""


class ChangeUnderWayError(RequestError):
    """One change of the number of copies at a time; look again once it has ended."""


class DeploymentError(WorkbenchError):
    """Worker processes could not be started, reached or kept in step."""


class ModelRestartingError(DeploymentError):
    """The ranks are being replaced after one of them failed; try again in a moment."""


class NoRoomError(DeploymentError):
    """Memory for one more copy of the model is not free; nothing was started."""


class WorkerDiedError(DeploymentError):
    """A rank ended before it was asked to: names the rank, its signal or exit code, last operation and last lines."""
