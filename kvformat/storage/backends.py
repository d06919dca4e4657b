"""Any fsspec backend that has no reader of its own here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvformat.errors import StorageError, UsageError
from kvformat.storage.base import short, storage_errors


class FsspecSource:
    """Any other fsspec URL, through ``cat_file`` with every length checked."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        import fsspec

        self._url = url
        try:
            with storage_errors(url, "io.read", "opening the URL", Exception):
                self._fs, self._path = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
        except StorageError as error:
            if not isinstance(error.__cause__, (ValueError, ImportError)):
                raise
            raise UsageError(
                "usage.argument",
                f"the URL cannot be opened here: {error.__cause__}",
                where=url,
                next_step="Check the protocol, or install the package that it needs",
            ) from error

    @property
    def name(self) -> str:
        """The URL."""
        return self._url

    def size(self) -> int | None:
        """Unknown: no request is made for it."""
        return None

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._cat(offset, length)
        if len(data) != length:
            raise short(self._url, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file."""
        data = self._cat(0, length)
        if len(data) > length:
            raise short(self._url, 0, length, len(data))
        return data

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the last byte is the last: one request for two bytes."""
        try:
            data = self._cat(size_bytes - 1, 2)
        except StorageError:
            return True  # servers answer 416 or cut; the last byte itself was read before
        return len(data) <= 1

    def _cat(self, offset: int, length: int) -> bytes:
        with storage_errors(self._url, "io.read", "reading", Exception):
            return bytes(self._fs.cat_file(self._path, start=offset, end=offset + length))

    def close(self) -> None:
        """Nothing is open."""
