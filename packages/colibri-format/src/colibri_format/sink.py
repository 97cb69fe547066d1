"""Where the bytes of one block, tensor or embedded file go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from .checksum import Buffer, view_bytes
from .errors import UsageError
from .layout import PAGE, round_up
from .output import OutputFile

_ZEROS: Final = bytes(2**16)


class Sink:
    """Takes the bytes of one block, tensor or file, in order, in chunks of any size."""

    def __init__(
        self,
        output: OutputFile,
        place: str,
        offset: int,
        extents: Sequence[tuple[int, int]],
        seed: int,
        reach: int,
    ) -> None:
        """`reach`: where the next item may start; zero bytes fill the file up to there."""
        self.output = output
        self._place = place
        self._offset = offset
        self._extents = list(extents)
        self._required = sum(size for _, size in extents)
        self._received = 0
        self._position = 0
        self._number = 0
        self._reach = reach
        self._digest = xxhash.xxh3_64(seed=seed)

    def write(self, data: Buffer) -> None:
        """Appends `data`.

        Raises:
            UsageError: `bad-length` if more comes than the plan has room for.
        """
        view = view_bytes(data)
        self._received += len(view)
        if self._received > self._required:
            raise self._bad_length()
        while len(view):
            start, size = self._extents[self._number]
            end = start + size
            if self._position < start:
                gap = _ZEROS[: start - self._position]
                self._digest.update(gap)
                self.output.write_at(self._offset + self._position, gap)
                self._position = start
            piece = view[: end - self._position]
            self._digest.update(piece)
            self.output.write_at(self._offset + self._position, piece)
            self._position += len(piece)
            view = view[len(piece) :]
            if self._position == end:
                self._number += 1

    def finish(self) -> int:
        """The XXH3-64 of all that came; UsageError `bad-length` if something is missing."""
        if self._received != self._required:
            raise self._bad_length()
        # The file is zero there; writing on without a gap keeps requests large. Where items are
        # far apart only the page is filled, as whole pages go to the disk directly.
        end = self._offset + self._position
        if self._reach - end > len(_ZEROS):
            self._reach = round_up(end, PAGE)
        while self._required and (at := self._offset + self._position) < self._reach:
            self.output.write_at(at, _ZEROS[: self._reach - at])
            self._position += min(len(_ZEROS), self._reach - at)
        return self._digest.intdigest()

    def _bad_length(self) -> UsageError:
        return UsageError(
            "bad-length",
            f"{self.output.path}: {self._place}",
            f"{self._received} bytes came",
            f"the plan has {self._required}",
        )
