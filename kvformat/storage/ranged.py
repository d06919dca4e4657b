"""Exact ranges from a server: one request per run, resumed at the object, checked throughout.

Everything here runs on fsspec's event loop; the rest of the package stays synchronous. What is
special to HTTP or S3 is behind ``Service``; checks, repeats, time limits and counting are shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

import tenacity

from kvformat.errors import KvformatError, StorageError, UsageError
from kvformat.storage.base import Data, Piece, Transfer, Transport, require_other_loop, shown
from kvformat.storage.meter import Flow, Meter
from kvformat.storage.replies import Range, Same, TransientError, body_error

BLOCK_BYTES: Final = 2**20
FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 20.0
MOST_TIMEOUTS: Final = 1
PATIENCE_S: Final = 5.0

R = TypeVar("R")


class Reply(Protocol):
    """A reply whose status and headers are checked."""

    size_bytes: int
    """Of the body; 0 says that the object is empty, whatever the body is."""

    async def read(self, most_bytes: int) -> bytes:
        """Some bytes of the body, none at its end."""

    async def close(self, *, whole: bool) -> None:
        """Give the connection back if the body was read whole, otherwise end it."""


class Service(Protocol):
    """A kind of server. ``get`` raises ``TransientError`` or ``StorageError``."""

    loop: asyncio.AbstractEventLoop
    name: str

    async def get(self, asked: Range, transport: Transport, same: Same) -> Reply:
        """Ask for a range; ``same`` is told what the reply says of the object."""

    def failure(self, error: Exception, asked: Range) -> Exception:
        """The ``TransientError`` or ``StorageError`` behind a library's exception."""


class RangedSource:
    """A remote object behind a ``Service``."""

    remote = True

    def __init__(self, service: Service, transport: Transport) -> None:
        self.meter = Meter()
        self.transport = transport
        self._service = service
        self._lock = threading.Lock()
        self._open: set[LoopTransfer] = set()
        self._closed = False
        self._same = Same()
        self._process = os.getpid()

    @property
    def name(self) -> str:
        """The URL."""
        return self._service.name

    def size(self) -> int | None:
        """The size that the replies so far stated."""
        return self._same.total_bytes

    def read(self, offset: int, length: int) -> Data:
        """Exactly ``length`` bytes from ``offset``."""
        transfer = self.transfer([Piece(offset, length)])
        try:
            return transfer.take()
        finally:
            transfer.close()

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole object."""
        return bytes(self._call(self._front(Range(0, length, front=True))))

    def transfer(self, pieces: Sequence[Piece]) -> Transfer:
        """One request for all pieces."""
        self.require_usable()
        wanted_bytes = sum(piece.size_bytes for piece in pieces)
        transfer = LoopTransfer(self._service.loop, self._share, wanted_bytes, self._forget)
        with self._lock:
            if self._closed:
                raise UsageError("usage.argument", "the artifact is closed", where=self.name)
            self._open.add(transfer)
        transfer.start(self._run(tuple(pieces), transfer.deliver))
        return transfer

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the last byte is the last: asks for it and one more if no reply told."""
        total = self._same.total_bytes
        if total is None:
            asked = Range(size_bytes - 1, size_bytes + 1, front=True)
            found = len(self._call(self._front(asked)))
            total = self._same.total_bytes
            return found <= 1 if total is None else total == size_bytes
        return total == size_bytes

    def close(self) -> None:
        """Stop what still runs. The connection pool belongs to the fsspec filesystem."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            running = list(self._open)
        for transfer in running:
            transfer.close()

    def _share(self) -> int:
        """What each open transfer may hold back."""
        return self.transport.buffer_bytes // max(1, len(self._open))

    def _forget(self, transfer: LoopTransfer) -> None:
        with self._lock:
            self._open.discard(transfer)

    def require_usable(self) -> None:
        """The loop must run, and in another thread, or this would wait for ever."""
        if os.getpid() != self._process:
            raise UsageError(
                "usage.argument", "the artifact was opened before this process was forked",
                where=self.name, next_step="Open it again in this process",
            )  # fmt: skip
        require_other_loop(self._service.loop, self.name)

    def _call(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            self.require_usable()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._service.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _front(self, asked: Range) -> bytearray:
        data = bytearray()

        async def once() -> None:
            nonlocal data
            async with self._reply(asked) as reply:
                data = bytearray(reply.size_bytes)
                if data:
                    await _fill(reply, memoryview(data), self._stalled, self._where(asked.first))
                    await self._end(reply, asked)

        with self.meter.flow() as flow:
            await self._repeat(once, lambda: 0)
            flow.received(len(data))
        return data

    async def _run(
        self, pieces: tuple[Piece, ...], deliver: Callable[[Data, Flow], Awaitable[None]]
    ) -> None:
        """Deliver the pieces one by one; a fault in the middle goes on behind the last."""
        done = 0

        async def once() -> None:
            nonlocal done
            while done < len(pieces) and not pieces[done].size_bytes:
                await deliver(b"", flow)
                done += 1
            if done == len(pieces):
                return
            asked = Range(pieces[done].offset, pieces[-1].stop)
            async with self._reply(asked) as reply:
                place = asked.first
                for piece in pieces[done:]:
                    await self._skip(reply, piece.offset - place)
                    flow.received(piece.offset - place)
                    data = bytearray(piece.size_bytes)
                    where = self._where(piece.offset)
                    await _fill(reply, memoryview(data), self._stalled, where)
                    flow.received(len(data))
                    place = piece.stop
                    if done + 1 < len(pieces):
                        await deliver(data, flow)
                        done += 1
                await self._end(reply, asked)
            await deliver(data, flow)  # only now: a reply that goes on is refused
            done += 1

        with self.meter.flow() as flow:
            await self._repeat(once, lambda: done)

    async def _repeat(
        self, once: Callable[[], Awaitable[None]], progress: Callable[[], int]
    ) -> None:
        """Repeat ``once`` while failures are transient, with back-off and jitter (tenacity)."""
        failures = _Failures(self.transport.retries, progress)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=failures.stop,
            wait=failures.wait,
            before_sleep=lambda _: self.meter.retry(),
            reraise=True,
        )
        try:
            await retrying(once)
        except TransientError as error:
            raise error.final from shown(error.__cause__)

    @asynccontextmanager
    async def _reply(self, asked: Range) -> AsyncIterator[Reply]:
        """A checked reply, closed in the end; library exceptions become ours."""
        reply: Reply | None = None
        whole = False
        self.meter.request()
        started = time.perf_counter()
        try:
            limit_s = self.transport.connect_timeout_s + self.transport.stall_timeout_s
            async with asyncio.timeout(limit_s):
                reply = await self._service.get(asked, self.transport, self._same)
            self.meter.answered(time.perf_counter() - started)
            yield reply
            whole = True
        except TimeoutError as error:
            raise TransientError(self._timeout(asked.first)) from error
        except (KvformatError, TransientError):
            raise
        except Exception as error:
            raise self._service.failure(error, asked) from shown(error)
        finally:
            if reply is not None:
                await reply.close(whole=whole)

    async def _stalled(self, work: Awaitable[bytes]) -> bytes:
        async with asyncio.timeout(self.transport.stall_timeout_s):
            return await work

    async def _skip(self, reply: Reply, size_bytes: int) -> None:
        left = size_bytes
        while left:
            block = await self._stalled(reply.read(min(left, BLOCK_BYTES)))
            if not block:
                raise TransientError(body_error(self.name, size_bytes, longer=False))
            left -= len(block)

    async def _end(self, reply: Reply, asked: Range) -> None:
        """Nothing follows: at most one byte more is read (REQ-7)."""
        if await self._stalled(reply.read(1)):
            raise body_error(self._where(asked.first), reply.size_bytes, longer=True)

    def _timeout(self, offset: int) -> StorageError:
        return StorageError(
            "io.timeout",
            "the server does not answer, or stopped sending",
            where=self._where(offset),
            expected=f"progress within {self.transport.stall_timeout_s:g} s",
            next_step="Try again, or allow more time",
        )

    def _where(self, offset: int) -> str:
        return f"{self.name}, byte {offset}"


async def _fill(
    reply: Reply,
    view: memoryview,
    bounded: Callable[[Awaitable[bytes]], Awaitable[bytes]],
    where: str,
) -> None:
    """Fill ``view`` from the body."""
    filled = 0
    while filled < len(view):
        block = await bounded(reply.read(min(len(view) - filled, BLOCK_BYTES)))
        if not block:
            raise TransientError(body_error(where, len(view), longer=False))
        view[filled : filled + len(block)] = block
        filled += len(block)


class _Failures:
    """How often and how long to wait: failures in a row count, progress forgives them."""

    def __init__(self, retries: int, progress: Callable[[], int]) -> None:
        self._retries = retries
        self._progress = progress
        self._reached = 0
        self._row = 0
        self._timeouts = 0

    def stop(self, state: tenacity.RetryCallState) -> bool:
        """Whether the failure is final."""
        if self._progress() > self._reached:
            self._reached = self._progress()
            self._row = self._timeouts = 0
        self._row += 1
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, TransientError) and error.final.code == "io.timeout":
            self._timeouts += 1
        return self._row > self._retries or self._timeouts > MOST_TIMEOUTS

    def wait(self, state: tenacity.RetryCallState) -> float:
        """As long as the server asks for, or ``back_off_s``."""
        error = state.outcome.exception() if state.outcome is not None else None
        after_s = error.after_s if isinstance(error, TransientError) else None
        if after_s is not None:
            return min(after_s, LONGEST_WAIT_S)
        return back_off_s(self._row)


def back_off_s(failures: int) -> float:
    """How long to wait behind so many failures in a row: jitter under an exponential bound."""
    bound_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(failures, 20))
    return random.uniform(bound_s / 4, bound_s)  # noqa: S311 - jitter, no secret


class LoopTransfer:
    """Pieces that a coroutine fetches into a bounded queue, taken by another thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_bytes: Callable[[], int],
        wanted_bytes: int,
        forget: Callable[[LoopTransfer], None],
    ) -> None:
        self._loop = loop
        self._limit_bytes = limit_bytes
        self.outstanding_bytes = wanted_bytes
        self._forget = forget
        self._items: queue.SimpleQueue[Data | BaseException] = queue.SimpleQueue()
        self._held_bytes = 0
        self._room = asyncio.Event()
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin."""

        def begin() -> None:
            self._task = self._loop.create_task(work)
            self._task.add_done_callback(self._done)

        self._loop.call_soon_threadsafe(begin)

    def _done(self, task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._items.put(error)
        self._ended.set()

    async def deliver(self, data: Data, flow: Flow) -> None:
        """Hand a piece over; waits while the queue is full and more is to come."""
        self._held_bytes += len(data)
        self.outstanding_bytes -= len(data)
        self._items.put(data)
        if self._held_bytes < self._limit_bytes() or self.outstanding_bytes <= 0:
            return
        with flow.held():
            while self._held_bytes >= self._limit_bytes():
                self._room.clear()
                await self._room.wait()

    def _release(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes
        self._room.set()

    def take(self) -> Data:
        """The next piece; raises ``StorageError``."""
        item = self._failed if self._failed is not None else self._items.get()
        if isinstance(item, BaseException):
            self._failed = item
            if isinstance(item, asyncio.CancelledError):
                raise UsageError("usage.argument", "the read was closed or cancelled") from item
            raise item
        self._loop.call_soon_threadsafe(self._release, len(item))
        return item

    def close(self) -> None:
        """Cancel, and wait until the connection is given back."""
        if not self._ended.is_set():
            with contextlib.suppress(RuntimeError):  # the loop ended with the process
                self._loop.call_soon_threadsafe(self._cancel)
                self._ended.wait(PATIENCE_S)
        self._forget(self)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
