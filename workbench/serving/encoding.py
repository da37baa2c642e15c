"""Which images of a replica are encoded, how far, and what of them a step does. Pure bookkeeping, no tensors.

Images are encoded when the first chunk that needs them comes up, and their features are dropped when no admitted prompt
has rows left to fill from them.

While its picture is encoded a prompt reads nothing, so what it may do in a step it does on the picture: as many rows of
it (see `nn.vision_rows`) as cost what its chunk of text would. So no step is longer for a picture than for text,
however large it is, and the text of others comes as soon as without. Where nobody says what pictures cost, each is
encoded whole, at most one in a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workbench.serving.sequence import ImageToEncode, SequenceState
from workbench.spec import EncodingCost

__all__ = ["ReplicaImages"]

LEAST_ROWS = 64  # of a picture in one step, whatever they cost: fewer would come no sooner


class ReplicaImages:
    def __init__(self, replica: int, cost: EncodingCost | None) -> None:
        self.replica, self.cost = replica, cost
        self._users: Counter[str] = Counter()  # admitted prompts that still need a key
        self._encoded: set[str] = set()
        self._begun: dict[str, int] = {}  # rows that are done of those half encoded

    def __len__(self) -> int:
        """Images that the ranks hold something of."""
        return len(self._encoded) + len(self._begun)

    def need(self, keys: Iterable[str]) -> None:
        self._users.update(set(keys))

    def release(self, keys: Iterable[str]) -> None:
        self._users.subtract(set(keys))

    def mark(self, part: ImageToEncode) -> None:
        """The ranks have done this."""
        key = part.image[0]
        if part.is_last:
            self._begun.pop(key, None)
            self._encoded.add(key)
        else:
            self._begun[key] = part.stop

    def forget(self, key: str) -> None:
        """The ranks hold nothing of this image."""
        self._begun.pop(key, None)
        self._encoded.discard(key)

    def unused(self) -> list[str]:
        """Images that nobody needs any more; they count as dropped from now on."""
        keys = sorted(key for key in (*self._encoded, *self._begun) if self._users[key] <= 0)
        for key in keys:
            self.forget(key)
        self._users = +self._users
        return keys

    def forget_all(self) -> list[str]:
        """As `forget`, of all images that the ranks hold something of; who needs one still does."""
        keys = sorted((*self._encoded, *self._begun))
        self._encoded.clear()
        self._begun.clear()
        return keys

    def clear(self) -> None:
        self._users.clear()
        self._encoded.clear()
        self._begun.clear()

    def plan(
        self, sequence: SequenceState, stop: int, step: dict[str, ImageToEncode], *, allowance: float, room: int
    ) -> int:
        """Where a chunk up to `stop` has to end for want of features. What is to be encoded before joins `step`.

        `allowance`: multiply-adds that the sequence may spend, which is what `room` tokens cost here; what its pictures
        take of them its chunk goes without.
        """
        start, left = sequence.num_cached, 1.0
        for image in sequence.waiting_images():
            if image.row >= stop:
                break
            own = step.get(image.key)
            if image.key in self._encoded or (own is not None and own.is_last):
                continue
            here = max(start, image.row)
            own_left = left - (here - start) / room  # the text before it is read in this step, too
            if own is not None or own_left <= 0 or (self.cost is None and step):
                return here
            first, last, num_rows = self._begun.get(image.key, 0), 1, 1
            num_patches = len(image.patches)
            if self.cost is not None:
                num_rows = self.cost.num_rows(num_patches)
                bought = self.cost.rows(own_left * allowance, num_patches)
                if own_left < 1 and bought < min(LEAST_ROWS, num_rows - first):
                    return here  # what little is left of this step
                last = min(num_rows, first + max(LEAST_ROWS, bought))
                left -= self.cost.of(last - first, num_patches) / allowance
            part = ImageToEncode(
                replica=self.replica,
                image=(image.key, image.patches if first == 0 else image.patches[:0], image.grid),
                sequence=sequence,
                first=first,
                stop=last,
                num_rows=num_rows,
            )
            step[image.key] = part
            if not part.is_last:
                return here
            stop = min(stop, start + int(room * max(0.0, left))) if self.cost is not None else stop
        return stop
