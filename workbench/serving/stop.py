"""Stop strings over a text that arrives in pieces: nothing of a match leaks, nothing else is held back."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base import RequestError

__all__ = ["StopMatcher"]


class StopMatcher:
    """Passes text through until one of `stops` is complete.

    The match that ends first wins; of several that end together, the longest. So the result does not depend on how
    the text was cut. Held back is only the longest tail that could still grow into a stop string.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        try:
            self._stops = tuple(stops)  # once: an iterator gives its strings a single time
        except TypeError:
            self._stops = ("",)
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in self._stops):
            raise RequestError("stop strings must be a list of non-empty strings", found=repr(stops))
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """Text that may be shown now; "" for ever after a match."""
        if self.is_stopped:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.is_stopped, self._held = True, ""
            return text[: min(matches)[1]]
        keep = self._open_tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        return text

    def _open_tail(self, text: str) -> int:
        """Length of the longest tail of `text` that is a proper prefix of a stop string."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
