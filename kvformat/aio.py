"""The reading and writing API for asyncio: the same calls, awaited.

::

    async with await kvformat.aio.open(url) as artifact:
        restored = await artifact.read(tokens=(0, 4096))
        async with artifact.stream(order="layer-major") as stream:
            async for block in stream:
                ...

Each call runs its synchronous twin on a thread, so behaviour, arguments and errors are the same.
Cancelling a task stops its read at once and waits until nothing of it runs. Threads are taken
from a pool of ``THREADS``; more calls at a time wait for their turn.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from kvformat.artifact import Artifact, open_artifact
from kvformat.cancelling import Cancellation
from kvformat.closing import AsyncClosedOnExit
from kvformat.copying import copy as copy_now
from kvformat.errors import UsageError
from kvformat.streaming import Block
from kvformat.streaming import Stream as SyncStream
from kvformat.verification import verify as verify_now
from kvformat.writer import write as write_now

THREADS: Final = 64

P = ParamSpec("P")
R = TypeVar("R")

_POOL: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="kvformat-aio")


async def _run(function: Callable[[], R], stop: Callable[[], None] | None = None) -> R:
    """Run on a thread; on cancellation call ``stop`` and wait for the end."""
    job = _POOL.submit(contextvars.copy_context().run, function)
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not job.cancel():
            if stop is not None:
                await asyncio.get_running_loop().run_in_executor(None, stop)
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what is raised
        raise


def _awaited(function: Callable[P, R]) -> Callable[P, Awaitable[R]]:
    """A function as a coroutine function of the same arguments."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await _run(functools.partial(function, *args, **kwargs))

    return call


def _read(
    method: Callable[Concatenate[Artifact, P], R],
) -> Callable[Concatenate[AsyncArtifact, P], Awaitable[R]]:
    """A reading method of ``Artifact`` as a coroutine method that can be cancelled."""

    @functools.wraps(method)
    async def call(self: AsyncArtifact, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = kwargs.get("cancellation")
        cancellation = given if given is not None else Cancellation()
        options: dict[str, Any] = {**kwargs, "cancellation": cancellation}
        job = functools.partial(method, self.artifact, *args, **options)
        return await _run(job, cancellation.cancel)

    return call


class AsyncArtifact(AsyncClosedOnExit):
    """``kvformat.Artifact`` for asyncio. What needs no waiting is on ``artifact`` itself."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact

    def __repr__(self) -> str:
        return repr(self.artifact).replace("kvformat.Artifact", "kvformat.aio.AsyncArtifact")

    read = _read(Artifact.read)
    read_into = _read(Artifact.read_into)

    def stream(self, **options: Any) -> AsyncStream:
        """``Artifact.stream`` with the same options; it starts when first awaited."""
        return AsyncStream(functools.partial(self.artifact.stream, **options))

    async def close(self) -> None:
        """Close the file and stop its requests."""
        await _run(self.artifact.close)


class AsyncStream(AsyncClosedOnExit):
    """An asynchronous iterator over ``kvformat.Block``. Close it, or use it as a context."""

    def __init__(self, start: Callable[[], SyncStream]) -> None:
        self._start = start
        self._stream: SyncStream | None = None
        self._closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Block:
        try:
            block = await _run(self._next, self._stop)
        except asyncio.CancelledError:
            await self.close()
            raise
        if block is None:
            raise StopAsyncIteration
        return block

    def _next(self) -> Block | None:
        if self._stream is None:
            if self._closed:
                raise UsageError("usage.argument", "the stream is closed")
            self._stream = self._start()
        return next(self._stream, None)

    def _stop(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    @property
    def stream(self) -> SyncStream | None:
        """The synchronous stream, with its ``report``; None before the first block."""
        return self._stream

    async def close(self) -> None:
        """Stop all of it."""
        await _run(self._stop)


def _opened(function: Callable[P, Artifact]) -> Callable[P, Awaitable[AsyncArtifact]]:
    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> AsyncArtifact:
        return AsyncArtifact(await _run(functools.partial(function, *args, **kwargs)))

    return call


open = _opened(open_artifact)  # noqa: A001 - the name users expect
verify = _awaited(verify_now)
write = _awaited(write_now)
copy = _awaited(copy_now)
