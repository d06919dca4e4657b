"""Local files and artifacts in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvformat.errors import StorageError, UsageError
from kvformat.storage.base import (
    Data,
    LazyTransfer,
    Piece,
    Transfer,
    Transport,
    short,
    storage_errors,
)
from kvformat.storage.meter import Meter


class LocalSource:
    """A local file, read with positioned reads."""

    remote = False

    def __init__(self, path: Path, transport: Transport | None = None) -> None:
        self.meter = Meter()
        self.transport = transport or Transport()
        self._path = path
        with storage_errors(str(path), "io.read", "opening the file"):
            self._file = path.open("rb", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def size(self) -> int | None:
        """Length in bytes when the file was opened."""
        return self._size

    def read(self, offset: int, length: int) -> Data:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._read(offset, length)
        if len(data) != length:
            raise short(self.name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file."""
        return self._read(0, length)

    def transfer(self, pieces: Sequence[Piece]) -> Transfer:
        """Each piece is read when it is taken."""
        return LazyTransfer(self, pieces)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the file has this length."""
        return self._size == size_bytes

    def _read(self, offset: int, length: int) -> bytes:
        self.meter.request()
        try:
            with storage_errors(self.name, "io.read", "reading"), self.meter.flow() as flow:
                data = self._positioned(offset, length)
                flow.received(len(data))
        except (ValueError, StorageError) as error:
            if not self._file.closed:
                raise
            raise UsageError("usage.argument", "the artifact is closed", where=self.name) from error
        return data

    def _positioned(self, offset: int, length: int) -> bytes:
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), length, offset)
            while 0 < len(data) < length:
                more = os.pread(self._file.fileno(), length - len(data), offset + len(data))
                if not more:
                    break
                data += more
            return data
        with self._lock:
            self._file.seek(offset)
            return self._file.read(length) or b""

    def require_usable(self) -> None:
        """It always is."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BytesSource:
    """An artifact in memory."""

    remote = False

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.meter = Meter()
        self.transport = Transport()
        self._data = data
        self._name = name

    @property
    def name(self) -> str:
        """A label."""
        return self._name

    def size(self) -> int | None:
        """Length in bytes."""
        return len(self._data)

    def read(self, offset: int, length: int) -> Data:
        """Exactly ``length`` bytes from ``offset``: a view."""
        data = memoryview(self._data)[offset : offset + length]
        if len(data) != length:
            raise short(self._name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or all."""
        return self._data[:length]

    def transfer(self, pieces: Sequence[Piece]) -> Transfer:
        """Views."""
        return LazyTransfer(self, pieces)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether there are this many bytes."""
        return len(self._data) == size_bytes

    def require_usable(self) -> None:
        """It always is."""

    def close(self) -> None:
        """Nothing is open."""
