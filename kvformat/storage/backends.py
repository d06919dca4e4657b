"""Any other fsspec backend, through ``cat_file``: every length checked, failures repeated."""

from __future__ import annotations

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
    public_name,
    require_other_loop,
    short,
    shown,
    storage_errors,
)
from kvformat.storage.meter import Meter
from kvformat.storage.ranged import PATIENCE_S, back_off_s

FINAL: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
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
        self._name = public_name(url)

    @property
    def name(self) -> str:
        """The URL."""
        return self._name

    def size(self) -> int | None:
        """Unknown: no request is made for it."""
        return None

    def read(self, offset: int, length: int) -> Data:
        """Exactly ``length`` bytes from ``offset``."""
        return self.read_until(threading.Event(), offset, length)

    def read_until(self, stop: threading.Event, offset: int, length: int) -> Data:
        """``read`` that gives up between two tries once ``stop`` is set."""
        data = self._cat(offset, length, stop)
        if len(data) != length:
            raise short(self._name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file."""
        data = self._cat(0, length, threading.Event())
        if len(data) > length:
            raise short(self._name, 0, length, len(data))
        return data

    def transfer(self, pieces: Sequence[Piece]) -> Transfer:
        """Fetched ahead by a thread, near pieces together."""
        return ThreadTransfer(self, pieces)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the last byte is the last: one request for two bytes."""
        return len(self._cat(size_bytes - 1, 2, threading.Event())) <= 1

    def _cat(self, offset: int, length: int, stop: threading.Event) -> bytes:
        tries = tenacity.stop_after_attempt(self.transport.retries + 1)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_any(tries, tenacity.stop_when_event_set(stop)),
            wait=lambda state: back_off_s(state.attempt_number),
            sleep=tenacity.sleep_using_event(stop),
            before_sleep=lambda _: self.meter.retry(),
            reraise=True,
        )
        with storage_errors(self._name, "io.read", "reading", Exception), self.meter.flow() as flow:
            try:
                data = retrying(self._once, offset, length)
            except PermissionError as error:
                raise StorageError(
                    "io.denied", "the storage refuses access", where=self._name
                ) from shown(error)
            except TimeoutError as error:
                raise StorageError(
                    "io.timeout", "the storage does not answer", where=self._name
                ) from shown(error)
            flow.received(len(data))
        return data

    def _once(self, offset: int, length: int) -> bytes:
        self.meter.request()
        found = self._fs.cat_file(self._path, start=offset, end=offset + length)
        return found if isinstance(found, bytes) else memoryview(found).tobytes()

    def require_usable(self) -> None:
        """The backend may run in fsspec's event loop."""
        from fsspec.asyn import loop

        require_other_loop(loop[0], self._name)

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
        self._stop = threading.Event()
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvformat-fetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for block in self._blocks:
                start, stop = block[0].offset, block[-1].stop
                view = memoryview(self._source.read_until(self._stop, start, stop - start))
                for piece in block:
                    self._put(view[piece.offset - start : piece.stop - start])
                if self._stop.is_set():
                    return
        except BaseException as error:  # handed to the thread that takes
            self._put(error)

    def _put(self, item: Data | BaseException) -> None:
        with self._change:
            self._items.append(item)
            self._change.notify_all()
            if isinstance(item, BaseException):
                return
            self._held_bytes += len(item)
            self.outstanding_bytes -= len(item)
            self._change.wait_for(
                lambda: self._stop.is_set() or self._held_bytes < self._limit_bytes
            )

    def take(self) -> Data:
        """The next piece."""
        with self._change:
            self._change.wait_for(lambda: self._stop.is_set() or bool(self._items))
            if self._stop.is_set():
                raise UsageError("usage.argument", "the read was closed or cancelled")
            item = self._items[0]
            if isinstance(item, BaseException):
                raise item
            self._items.popleft()
            self._held_bytes -= len(item)
            self._change.notify_all()
            return item

    def close(self) -> None:
        """Stop behind the request that runs, which is waited for a while: backends cannot be
        interrupted.
        """
        self._stop.set()
        with self._change:
            self._change.notify_all()
        self._thread.join(PATIENCE_S)


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
