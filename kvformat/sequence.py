"""The data section of an artifact from front to end, for verification and copying."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvformat.artifact import Artifact
from kvformat.errors import InvalidError
from kvformat.storage import Piece, Transfer

READ_AHEAD_BYTES: Final = 4 * 2**20


class DataSequence:
    """The data section from front to end with one request, padding checked."""

    def __init__(self, artifact: Artifact) -> None:
        start, size_bytes = artifact.front.data_start, artifact.manifest.data_bytes
        self._pieces = deque(
            Piece(start + offset, min(READ_AHEAD_BYTES, size_bytes - offset))
            for offset in range(0, size_bytes, READ_AHEAD_BYTES)
        )
        self._artifact = artifact
        self._transfer: Transfer | None = None
        prefix = artifact.front.prefix
        self._buffer = prefix[start:] if start + size_bytes <= len(prefix) else b""
        self._start = 0
        self.cursor = 0

    def take(self, offset: int, size_bytes: int) -> bytes:
        """The object at ``offset``; the bytes between the last one and it must be zero."""
        padding = self._bytes(self.cursor, offset - self.cursor)
        if any(padding):
            raise InvalidError(
                "data.padding",
                "the padding between two objects is not zero",
                where=f"data byte {self.cursor}",
            )
        self.cursor = offset + size_bytes
        return self._bytes(offset, size_bytes)

    def _bytes(self, offset: int, size_bytes: int) -> bytes:
        stop = offset + size_bytes
        if stop > self._start + len(self._buffer):
            if self._transfer is None:
                self._transfer = self._artifact.source.transfer(tuple(self._pieces))
            parts = [self._buffer[offset - self._start :]]
            have = self._start + len(self._buffer)
            while have < stop:
                parts.append(bytes(self._transfer.take()))
                have += self._pieces.popleft().size_bytes
            self._buffer, self._start = b"".join(parts), offset
        return self._buffer[offset - self._start : stop - self._start]

    def close(self) -> None:
        """Stop what is not read."""
        if self._transfer is not None:
            self._transfer.close()
