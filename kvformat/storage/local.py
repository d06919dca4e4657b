"""Local files and artifacts in memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvformat.storage.base import short, storage_errors


class LocalSource:
    """A local file, read with positioned reads; safe to share between threads."""

    def __init__(self, path: Path) -> None:
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

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._read(offset, length)
        if len(data) != length:
            raise short(self.name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file."""
        return self._read(0, length)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the file has this length."""
        return self._size == size_bytes

    def _read(self, offset: int, length: int) -> bytes:
        with storage_errors(self.name, "io.read", "reading"):
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

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BytesSource:
    """An artifact in memory."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self._data = data
        self._name = name

    @property
    def name(self) -> str:
        """A label."""
        return self._name

    def size(self) -> int | None:
        """Length in bytes."""
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._data[offset : offset + length]
        if len(data) != length:
            raise short(self._name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or all."""
        return self._data[:length]

    def ends_at(self, size_bytes: int) -> bool:
        """Whether there are this many bytes."""
        return len(self._data) == size_bytes

    def close(self) -> None:
        """Nothing is open."""
