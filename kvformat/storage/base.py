"""What every kind of storage offers: exact range reads, counted, with errors of one kind.

``Source.read`` returns exactly the bytes asked for or raises ``StorageError``; ``read_front`` may
return less, at the end of the file only. ``Source.transfer`` starts to fetch one run of objects
and hands them over one by one. There is no HEAD request, no listing and no file-object cache
(spec section 11.1).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvformat.errors import KvformatError, StorageError, UsageError
from kvformat.storage.meter import Meter

PREFETCH_BYTES: Final = 262_144
COPY_BYTES: Final = 8 * 2**20
WHOLE: Final = ("connections", "retries", "buffer_bytes")

URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Transport:
    """How to fetch: time limits, repeats, concurrency. The defaults suit S3 and HTTP.

    ``connect_timeout_s`` bounds making a connection, ``stall_timeout_s`` the wait for a reply and
    for each further piece of it. ``retries`` counts failures in a row without progress.
    ``connections`` bounds the requests in flight of one read, ``buffer_bytes`` what they hold
    that is fetched and not yet decoded. ``request_bytes`` cuts longer runs into several requests,
    for stores that limit each connection; None asks for a run at once.
    """

    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    retries: int = 4
    connections: int = 8
    buffer_bytes: int = 32 * 2**20
    request_bytes: int | None = None

    def __post_init__(self) -> None:
        whole = {name: getattr(self, name) for name in WHOLE}
        if self.request_bytes is not None:
            whole["request_bytes"] = self.request_bytes
        for name, value in whole.items():
            if type(value) is not int or value < (0 if name == "retries" else 1):
                raise UsageError("usage.argument", f"{name} is no whole number", found=ascii(value))
        for name in ("connect_timeout_s", "stall_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise UsageError("usage.argument", f"{name} is no time", found=ascii(value))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a file that are wanted as one object."""

    offset: int
    size_bytes: int

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size_bytes


class Transfer(Protocol):
    """Pieces of one run, handed over in order. ``close`` stops it and may be called twice."""

    @property
    def outstanding_bytes(self) -> int:
        """Asked for and not yet received."""

    def take(self) -> Data:
        """The bytes of the next piece; raises ``StorageError``."""

    def close(self) -> None:
        """Stop; nothing of it runs any more when this returns."""


class Source(Protocol):
    """A readable artifact. Safe to share between threads."""

    meter: Meter
    transport: Transport
    remote: bool

    @property
    def name(self) -> str:
        """The URL, for messages, without secrets."""

    def size(self) -> int | None:
        """Length in bytes where that is known without a request."""

    def read(self, offset: int, length: int) -> Data:
        """Exactly ``length`` bytes from ``offset``."""

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file if it is shorter."""

    def transfer(self, pieces: Sequence[Piece]) -> Transfer:
        """Fetch ascending ``pieces`` with one request; gaps between them are dropped."""

    def ends_at(self, size_bytes: int) -> bool:
        """Whether no byte follows; may cost a request."""

    def require_usable(self) -> None:
        """Raise ``usage.argument`` where waiting for it here would never end."""

    def close(self) -> None:
        """Give back what is open."""


def require_other_loop(loop: object, name: str) -> None:
    """Raise where this thread runs the event loop that is to be waited for."""
    import asyncio

    with contextlib.suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            raise UsageError(
                "usage.argument",
                "this would block the event loop of fsspec",
                where=name,
                next_step="Call it from another thread, or use kvformat.aio in a loop of your own",
            )


class LazyTransfer:
    """A transfer that reads each piece when it is taken."""

    def __init__(self, source: Source, pieces: Sequence[Piece]) -> None:
        self._source = source
        self._pieces = iter(pieces)
        self.outstanding_bytes = 0

    def take(self) -> Data:
        """The bytes of the next piece."""
        piece = next(self._pieces)
        return self._source.read(piece.offset, piece.size_bytes)

    def close(self) -> None:
        """Nothing runs."""


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
        raise StorageError(code, f"{doing} failed: {reason(error)}", where=name) from shown(error)


def reason(error: BaseException) -> str:
    """What a library's error says, in one line, without secrets of URLs."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return without_secrets(" ".join(str(text).split()))


def public_name(url: str) -> str:
    """The URL, or chain of URLs, without what may be secret: user, password, query."""
    plain, query, _ = url.partition("?")
    return re.sub(r"(?<=://)[^/]*@", "", plain) + ("?..." if query else "")


def without_secrets(text: str) -> str:
    """``text`` with each URL in it as ``public_name`` has it."""
    return URL.sub(lambda match: public_name(match[0]), text)


def shown(error: BaseException | None) -> BaseException | None:
    """``error``, to be shown as a cause, unless its text or that of its causes has a secret."""
    item = error
    while item is not None:
        if without_secrets(repr(item)) != repr(item) or without_secrets(str(item)) != str(item):
            return None
        item = item.__cause__ or item.__context__
    return error


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
    found = "empty, or with characters that none has" if text is not None else type(url).__name__
    raise UsageError("usage.argument", "this is not a path or URL", found=found)
