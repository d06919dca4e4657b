"""What every kind of storage offers: exact range reads, and errors of one kind.

``Source.read`` returns exactly the bytes asked for or raises ``StorageError``; ``read_front`` may
return less, at the end of the file only. There is no HEAD request, no listing and no file-object
cache (spec section 11.1).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from kvformat.errors import KvformatError, StorageError, UsageError

PREFETCH_BYTES: Final = 262_144
COPY_BYTES: Final = 8 * 2**20


class Source(Protocol):
    """A readable artifact."""

    @property
    def name(self) -> str:
        """The URL, for messages."""

    def size(self) -> int | None:
        """Length in bytes where that is known without a request."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file if it is shorter."""

    def ends_at(self, size_bytes: int) -> bool:
        """Whether no byte follows; may cost a request."""

    def close(self) -> None:
        """Give back what is open."""


def local_path(url: str) -> Path | None:
    """The local path behind ``url``, or None if it names another kind of storage."""
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return Path(url[len(scheme) :])
    if "://" in url:
        return None
    if "::" in url:
        import fsspec

        if url.split("::", 1)[0] in fsspec.available_protocols():
            return None
    return Path(url)


@contextlib.contextmanager
def storage_errors(
    name: str, code: str, doing: str, kind: type[Exception] = OSError
) -> Iterator[None]:
    """Turn what a file system, or with ``kind`` a network library, raises into a StorageError."""
    try:
        yield
    except KvformatError:
        raise
    except FileNotFoundError as error:
        raise StorageError(
            "io.not-found", "there is no such file", where=name, next_step="Check the path"
        ) from error
    except FileExistsError as error:
        raise StorageError(
            "io.exists",
            "the target exists already",
            where=name,
            next_step="Choose another name, or allow overwriting",
        ) from error
    except kind as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise StorageError(code, f"{doing} failed: {reason}", where=name) from error


def short(name: str, offset: int, length: int, found: int) -> StorageError:
    """The error of a reply of the wrong length (REQ-4)."""
    return StorageError(
        "io.short",
        "the storage returned another number of bytes than asked",
        where=f"{name}, byte {offset}",
        expected=length,
        found=found,
        next_step="The file may be truncated or was replaced: fetch it again",
    )


def as_text(url: object) -> str:
    """The path or URL as a string; raises ``usage.argument`` for anything else."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if isinstance(text, str) and text and "\0" not in text:
        with contextlib.suppress(UnicodeEncodeError):
            os.fsencode(text)
            return text
    raise UsageError("usage.argument", "this is not a path or URL", found=ascii(url)[:80])
