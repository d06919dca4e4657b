"""Any other fsspec backend, through ``cat_file``: every length checked, failures repeated."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tenacity

from kvformat.errors import StorageError, UsageError
from kvformat.storage.base import (
    Data,
    Piece,
    Transfer,
    Transport,
    short,
    storage_errors,
)
from kvformat.storage.meter import Meter

FINAL: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
FIRST_WAIT_S: Final = 0.1
BLOCK_BYTES: Final = 8 * 2**20


class BackendSource:
    """A URL of a backend that tells neither status nor range of its replies.

    A reply of the wrong length is refused, one with the wrong bytes fails its digest. Time limits
    are those of the backend.
    """

    remote = True

    def __init__(self, fs: Any, path: str, url: str, transport: Transport) -> None:
        self.meter = Meter()
        self.transport = transport
        self._fs = fs
        self._path = path
        self._url = url

    @property
    def name(self) -> str:
        """The URL."""
        return self._url

    def size(self) -> int | None:
        """Unknown: no request is made for it."""
        return None

    def read(self, offset: int, length: int) -> Data:
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

    def transfer(self, pieces: Sequence[Piece]) -> Transfer:
        """Fetched ahead by a thread, near pieces together."""
        return ThreadTransfer(self, pieces)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the last byte is the last: one request for two bytes."""
        try:
            data = self._cat(size_bytes - 1, 2)
        except StorageError:
            return True  # such backends fail or cut; the last byte itself was read before
        return len(data) <= 1

    def _cat(self, offset: int, length: int) -> bytes:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(self.transport.retries + 1),
            wait=lambda state: random.uniform(0.5, 1) * FIRST_WAIT_S * 2**state.attempt_number,  # noqa: S311
            before_sleep=lambda _: self.meter.retry(),
            reraise=True,
        )
        with storage_errors(self._url, "io.read", "reading", Exception), self.meter.flow() as flow:
            try:
                data = bytes(retrying(self._once, offset, length))
                flow.received(len(data))
            except PermissionError as error:
                raise StorageError(
                    "io.denied", "the storage refuses access", where=self._url
                ) from error
            except TimeoutError as error:
                raise StorageError(
                    "io.timeout", "the storage does not answer", where=self._url
                ) from error
        return data

    def _once(self, offset: int, length: int) -> bytes:
        self.meter.request()
        found: bytes = self._fs.cat_file(self._path, start=offset, end=offset + length)
        return found

    def close(self) -> None:
        """Nothing is open."""


class ThreadTransfer:
    """Pieces that a thread fetches into a bounded queue, in blocks of up to ``BLOCK_BYTES``."""

    def __init__(self, source: BackendSource, pieces: Sequence[Piece]) -> None:
        self._source = source
        self._blocks = list(blocks(pieces))
        self._limit_bytes = max(1, source.transport.buffer_bytes // source.transport.connections)
        self.outstanding_bytes = sum(piece.size_bytes for piece in pieces)
        self._items: deque[Data | BaseException] = deque()
        self._held_bytes = 0
        self._stop = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvformat-fetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for block in self._blocks:
                start, stop = block[0].offset, block[-1].stop
                view = memoryview(self._source.read(start, stop - start))
                for piece in block:
                    self._put(view[piece.offset - start : piece.stop - start])
                if self._stop:
                    return
        except BaseException as error:  # handed to the thread that takes
            self._put(error)

    def _put(self, item: Data | BaseException) -> None:
        with self._change:
            self._items.append(item)
            if not isinstance(item, BaseException):
                self._held_bytes += len(item)
                self.outstanding_bytes -= len(item)
            self._change.notify_all()
            self._change.wait_for(lambda: self._stop or self._held_bytes < self._limit_bytes)

    def take(self) -> Data:
        """The next piece."""
        with self._change:
            self._change.wait_for(lambda: self._stop or bool(self._items))
            if self._stop:
                raise UsageError("usage.argument", "the read was closed")
            item = self._items.popleft()
            if isinstance(item, BaseException):
                raise item
            self._held_bytes -= len(item)
            self._change.notify_all()
            return item

    def close(self) -> None:
        """Stop behind the request that runs: backends cannot be interrupted."""
        with self._change:
            self._stop = True
            self._change.notify_all()
        self._thread.join()


def blocks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Ascending pieces in groups that one request fetches."""
    group: list[Piece] = []
    for piece in pieces:
        if group and piece.stop - group[0].offset > BLOCK_BYTES:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, FINAL)
