"""A rank's last words: what it was doing, in a small shared file that outlives it however it dies.

The rank maps the file and overwrites it in place, which costs a few microseconds; the kernel keeps the page when the
process is killed. The handle reads it afterwards.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LastWords", "Slate", "read_slate"]

_HEADER = struct.Struct("<QHH")  # collectives so far, length of each text
_TEXT = 480
_SIZE = _HEADER.size + 2 * _TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    operation: str = ""
    collective: str = ""
    num_collectives: int = 0


class Slate:
    """The writer's side. Without a path it is kept in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.words = LastWords()
        self._map: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)

    def operation(self, text: str) -> None:
        """Note what the rank begins to do."""
        self._write(text, self.words.collective, self.words.num_collectives)

    def collective(self, text: str) -> None:
        """Note the collective that the rank enters."""
        self._write(self.words.operation, text, self.words.num_collectives + 1)

    def _write(self, operation: str, collective: str, num_collectives: int) -> None:
        self.words = LastWords(operation=operation, collective=collective, num_collectives=num_collectives)
        if self._map is None:
            return
        first, second = operation.encode()[:_TEXT], collective.encode()[:_TEXT]
        self._map[_HEADER.size : _HEADER.size + len(first)] = first
        self._map[_HEADER.size + _TEXT : _HEADER.size + _TEXT + len(second)] = second
        _HEADER.pack_into(self._map, 0, num_collectives, len(first), len(second))


def read_slate(path: Path) -> LastWords:
    """What the rank wrote last; empty where it wrote nothing. A word cut by its death stays readable."""
    try:
        data = path.read_bytes()
        num_collectives, first, second = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return LastWords()
    texts = (data[start : start + size] for start, size in ((_HEADER.size, first), (_HEADER.size + _TEXT, second)))
    operation, collective = (text.decode("utf-8", "replace") for text in texts)
    return LastWords(operation=operation, collective=collective, num_collectives=num_collectives)
