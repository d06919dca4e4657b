"""The asyncio API: the same answers as the synchronous one, cancellation that leaves nothing."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat import aio, artifact, copying, verification, writer
from kvformat.storage import BytesSource, Data
from kvformat.storage.base import LazyTransfer, Piece

CACHE = np.random.default_rng(7).standard_normal((2, 6, 900, 2, 16)).astype(np.float16)
IDENTITY = kvformat.Identity(kvformat.Model("acme/small", "1"), 6, cache_dtype="float16")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("aio") / "a.kvf"
    kvformat.write(
        path,
        CACHE,
        identity=IDENTITY,
        token_ids=np.arange(900),
        tracks=["zstd", "exact/stored"],
        segment_tokens=128,
    )
    return path.read_bytes()


@pytest.fixture(autouse=True)
def _no_reading_thread_is_left() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("kvformat")]
    assert [name for name in left if not name.startswith("kvformat-aio")] == []


class StuckSource(BytesSource):
    """Gives the front and some pieces, then waits until it is closed."""

    def __init__(self, data: bytes, good: int) -> None:
        super().__init__(data)
        self.good = good
        self.reached = threading.Event()
        self.released = threading.Event()

    def transfer(self, pieces: Any) -> Any:
        source = self

        class Stuck(LazyTransfer):
            def take(self) -> Data:
                if source.good:
                    source.good -= 1
                    return super().take()
                source.reached.set()
                source.released.wait(30)
                raise kvformat.StorageError("io.read", "closed")

            def close(self) -> None:
                source.released.set()

        return Stuck(self, pieces)


def stuck(data: bytes, good: int) -> tuple[StuckSource, aio.AsyncArtifact]:
    source = StuckSource(data, good)
    opened = artifact.Artifact(source, artifact.read_front(source))
    # What is in the prefix is not fetched; here everything is to be.
    object.__setattr__(opened.front, "prefix", data[: opened.front.data_start])
    return source, aio.AsyncArtifact(opened)


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (aio.open, artifact.open_artifact),
        (aio.verify, verification.verify),
        (aio.write, writer.write),
        (aio.copy, copying.copy),
        (aio.AsyncArtifact.read, artifact.Artifact.read),
        (aio.AsyncArtifact.read_into, artifact.Artifact.read_into),
    ],
)
def test_signatures_are_the_same(twin: Callable[..., Any], original: Callable[..., Any]) -> None:
    assert inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(original)
    assert twin.__doc__ == original.__doc__


def test_answers_are_the_same(data: bytes, tmp_path: Path) -> None:
    async def run() -> None:
        target = tmp_path / "b.kvf"
        report = await aio.write(
            target, CACHE, identity=IDENTITY, token_ids=np.arange(900), tracks=["exact/stored"]
        )
        copied = await aio.copy(target, tmp_path / "c.kvf")
        assert copied.manifest_digest == report.manifest_digest
        assert (await aio.verify(tmp_path / "c.kvf")).tokens == 900
        async with await aio.open(data) as opened:
            restored, buffer = await opened.read(tokens=(100, 700)), np.empty_like(CACHE)
            account = await opened.read_into(buffer, track="exact/stored")
            assert account.validity.complete
            assert (buffer.view("u2") == CACHE.view("u2")).all()
            blocks = []
            async with opened.stream(track="exact/stored", order="layer-major") as stream:
                async for block in stream:
                    index = 0 if block.group.role == "key" else 1
                    tokens = slice(block.token_start, block.token_start + block.array.shape[1])
                    layers = slice(block.layers[0], block.layers[-1] + 1)
                    assert (block.array == CACHE[index, layers, tokens]).all()
                    blocks.append(block)
            assert sum(block.array.size for block in blocks) == CACHE.size
        with kvformat.open(data) as opened_now:
            same = opened_now.read(tokens=(100, 700))
        assert (restored.kv.view("u2") == same.kv.view("u2")).all()

    asyncio.run(run())


def test_errors_are_the_same(data: bytes) -> None:
    async def code(work: Awaitable[Any]) -> str:
        with pytest.raises(kvformat.KvformatError) as caught:
            await work
        return caught.value.code

    async def run() -> None:
        assert await code(aio.open(b"x" * 500)) == "header.magic"
        async with await aio.open(data) as opened:
            assert await code(opened.read(tokens=(5, 4))) == "usage.selection"
            damaged = bytearray(data)
            damaged[-100] ^= 1
            assert await code(aio.verify(bytes(damaged))) == "segment.digest"
            async with opened.stream(layers=[99]) as stream:
                assert await code(stream.__anext__()) == "usage.selection"
        assert await code(opened.read()) == "usage.argument"

    asyncio.run(run())


@pytest.mark.parametrize("good", [0, 3])
def test_cancelling_a_read_ends_it(data: bytes, good: int) -> None:
    async def run() -> None:
        source, opened = stuck(data, good)
        task = asyncio.ensure_future(opened.read(track="exact/stored", workers=1))
        await asyncio.to_thread(source.reached.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.released.is_set()

    asyncio.run(run())


def test_cancelling_a_stream_ends_it(data: bytes) -> None:
    async def run() -> None:
        source, opened = stuck(data, 3)
        stream = opened.stream(track="exact/stored", workers=1)
        for _ in range(3):
            await stream.__anext__()
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.to_thread(source.reached.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.released.is_set()
        unused = opened.stream()
        await unused.close()
        for closed in (stream, unused):
            with pytest.raises(kvformat.UsageError, match="closed"):
                await asyncio.wait_for(closed.__anext__(), 30)

    asyncio.run(run())


def test_a_cancellation_from_another_thread(data: bytes) -> None:
    source, opened = stuck(data, 3)
    cancellation = kvformat.Cancellation()
    helper = threading.Thread(target=lambda: (source.reached.wait(30), cancellation.cancel()))
    helper.start()
    with pytest.raises(kvformat.UsageError, match="closed or cancelled") as caught:
        opened.artifact.read(track="exact/stored", cancellation=cancellation)
    helper.join()
    validity = caught.value.validity
    assert validity is not None
    assert not validity.complete
    with pytest.raises(kvformat.UsageError, match="closed or cancelled"):
        opened.artifact.read(track="exact/stored", cancellation=cancellation)


def test_many_reads_at_a_time(data: bytes) -> None:
    async def run() -> None:
        async with await aio.open(data) as opened:
            parts = [(start, start + 50) for start in range(0, 850, 17)]
            results = await asyncio.gather(
                *(opened.read(tokens=part, track="exact/stored", workers=1) for part in parts)
            )
        for (begin, end), restored in zip(parts, results, strict=True):
            assert (restored.kv == CACHE[:, :, begin:end]).all()

    asyncio.run(run())


def test_pieces_are_those_of_the_source(data: bytes) -> None:
    source = BytesSource(data)
    transfer = source.transfer([Piece(3, 5), Piece(20, 0), Piece(30, 2)])
    assert [bytes(transfer.take()) for _ in range(3)] == [data[3:8], b"", data[30:32]]
