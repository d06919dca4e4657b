"""Publication in S3 and stores that speak its protocol (spec section 11.4, PUB-4 to PUB-6).

All requests go through the caller's own ``s3fs`` file system, so its endpoint, credentials,
encryption and retries hold. A small artifact is one PutObject. A larger one is a multipart upload
whose part 1, the one with the header, is sent last; nothing is visible before it is completed.
Both ask for creation only (``If-None-Match: *``) unless the caller overwrites.

What the store cannot tell is asked with HEAD: before, because some stores ignore the condition, and
after, because the size of what the store kept is worth one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from kvformat.errors import StorageError, UsageError

PUT_BYTES: Final = 16 * 2**20
PART_BYTES: Final = 8 * 2**20
PARTS_MAX: Final = 10_000
BUFFER_BYTES: Final = 32 * 2**20
CONFLICT_TRIES: Final = 5
ABORT_TIMEOUT_S: Final = 10.0
TOKEN_NAME: Final = "kvformat-publication"  # noqa: S105 - a name of metadata

_log = logging.getLogger(__name__)


class _ConflictError(OSError):
    """409: another write of this name was under way; the whole upload has to be repeated."""


def publish_s3(fs: Any, url: str, remote: str, file: IO[bytes], *, overwrite: bool) -> None:
    """Make all of ``file`` visible at ``remote``; raises what s3fs raises, and StorageError."""
    bucket, key = _address(fs, url, remote)
    size_bytes = file.seek(0, 2)
    run(fs.loop, _Upload(fs, bucket, key, file, size_bytes, overwrite).publish())
    fs.invalidate_cache(remote)


def refuse_existing(fs: Any, url: str, remote: str) -> None:
    """Raise ``FileExistsError`` if there is such an object, as far as the caller may see it."""
    bucket, key = _address(fs, url, remote)
    run(fs.loop, _Object(fs, bucket, key).refuse_existing())


def _address(fs: Any, url: str, remote: str) -> tuple[str, str]:
    bucket, key, version = fs.split_path(remote)
    if not key or version is not None:
        raise UsageError(
            "usage.argument",
            "this names no object that could be written",
            where=url,
            expected="s3://bucket/key",
        )
    return bucket, key


def run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` in the thread of ``loop``; an interrupt cancels it and waits for its cleanup.

    fsspec's own ``sync`` would raise here and leave the upload running.
    """
    finished = threading.Event()
    tasks: list[asyncio.Task[None]] = []

    def start() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(lambda _: finished.set())

    def cancel() -> None:
        tasks[0].cancel()

    loop.call_soon_threadsafe(start)
    try:
        _wait(finished)
    except BaseException:
        loop.call_soon_threadsafe(cancel)
        _wait(finished)
        raise
    tasks[0].result()


def _wait(finished: threading.Event) -> None:
    while not finished.wait(0.5):
        pass  # an endless wait cannot be interrupted on every system


def part_size(size_bytes: int) -> int:
    """Bytes of every part but the last: whole MiB, and never more parts than S3 takes."""
    least = -(-size_bytes // PARTS_MAX)
    return max(PART_BYTES, -(-least // 2**20) * 2**20)


@dataclass
class _Object:
    """One object, and the requests about it."""

    fs: Any
    bucket: str
    key: str

    async def _call(self, operation: str, **arguments: Any) -> Any:
        return await self.fs._call_s3(operation, Bucket=self.bucket, Key=self.key, **arguments)

    async def _head(self) -> Any:
        """What the store says of the object, None if there is none or we may not look."""
        try:
            return await self._call("head_object")
        except (FileNotFoundError, PermissionError):
            return None  # S3 answers 403 for an absent key to those who may not list the bucket

    async def refuse_existing(self) -> None:
        """Raise ``FileExistsError`` if it is there."""
        if await self._head() is not None:
            raise FileExistsError(self.key)


@dataclass
class _Upload(_Object):
    """One publication of ``file`` as ``key``.

    ``token`` is stored with the object: a request that was repeated because its reply got lost
    meets its own object, and has to be told from one that meets another writer's.
    """

    file: IO[bytes]
    size_bytes: int
    overwrite: bool
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    async def publish(self) -> None:
        """All of it; that there is no such object was looked up before, see ``refuse_existing``."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_ConflictError),
            stop=stop_after_attempt(CONFLICT_TRIES),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )
        etag: Any = await retrying(self._put if self.size_bytes <= PUT_BYTES else self._multipart)
        await self._check(etag)

    def _metadata(self) -> dict[str, str]:
        return {**self.fs.s3_additional_kwargs.get("Metadata", {}), TOKEN_NAME: self.token}

    def _read(self, offset_bytes: int, length_bytes: int) -> bytes:
        self.file.seek(offset_bytes)
        return self.file.read(length_bytes)

    async def _put(self) -> Any:
        body = self._read(0, self.size_bytes)
        return await self._commit("put_object", Body=body, Metadata=self._metadata())

    async def _multipart(self) -> Any:
        creating = asyncio.ensure_future(
            self._call("create_multipart_upload", Metadata=self._metadata())
        )
        try:  # shielded, or an interrupt here would lose the id of an upload that exists
            upload_id = (await asyncio.shield(creating))["UploadId"]
            parts = await self._send_parts(upload_id)
            return await self._commit(
                "complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            await self._abort(creating)
            raise

    async def _send_parts(self, upload_id: str) -> list[dict[str, Any]]:
        """Parts 2 to n, a few at a time, then part 1; what the completion has to list of them."""
        part_bytes = part_size(self.size_bytes)
        count = -(-self.size_bytes // part_bytes)
        sent: dict[int, dict[str, Any]] = {}

        async def send(numbers: Iterator[int]) -> None:
            for number in numbers:
                reply = await self._call(
                    "upload_part",
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=self._read((number - 1) * part_bytes, part_bytes),
                )
                checks = {k: reply[k] for k in ("ETag", *_CHECKSUMS) if k in reply}
                sent[number] = {"PartNumber": number, **checks}

        numbers = iter(range(2, count + 1))
        lanes = max(1, min(self.fs.max_concurrency, BUFFER_BYTES // part_bytes))
        tasks = [asyncio.ensure_future(send(numbers)) for _ in range(lanes)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await send(iter((1,)))
        return [sent[number] for number in sorted(sent)]

    async def _commit(self, operation: str, **arguments: Any) -> Any:
        """The request that makes the object visible; the entity tag that the store gave it."""
        condition = {} if self.overwrite else {"IfNoneMatch": "*"}
        try:
            return (await self._call(operation, **arguments, **condition)).get("ETag")
        except OSError as error:
            status, code = _refusal(error)
            if status == 409:
                reason = f"{code or 'conflict'}: another write of this name was under way"
                raise _ConflictError(reason) from error
            if status == 412 or code == "NoSuchUpload":
                found = await self._head()
                if found is not None and found.get("Metadata", {}).get(TOKEN_NAME) == self.token:
                    return found.get("ETag")
                if status == 412:
                    raise FileExistsError(self.key) from error
            if status != 501 or not condition:
                raise
        _log.warning(
            "The store of s3://%s cannot be asked to create an object only if there is none. "
            "That was looked up before: a writer at the same moment may replace this artifact "
            "or be replaced.",
            self.bucket,
        )
        await self.refuse_existing()
        return (await self._call(operation, **arguments)).get("ETag")

    async def _check(self, etag: Any) -> None:
        """Compare the size, if the object is still the one that was written here."""
        found = await self._head()
        if found is None or found.get("ETag") != etag or found["ContentLength"] == self.size_bytes:
            return
        with contextlib.suppress(OSError):
            await self._call("delete_object")
        raise StorageError(
            "io.write",
            "the store kept another number of bytes than it was sent",
            where=f"s3://{self.bucket}/{self.key}",
            expected=self.size_bytes,
            found=found["ContentLength"],
        )

    async def _abort(self, creating: asyncio.Future[Any]) -> None:
        """Drop the parts, which would be billed; what went wrong before matters more than this."""
        if creating.done() and (creating.cancelled() or creating.exception() is not None):
            return
        upload_id = "(not known)"
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                upload_id = (await creating)["UploadId"]
                await self._call("abort_multipart_upload", UploadId=upload_id)
        except (Exception, asyncio.CancelledError) as error:
            if _refusal(error)[1] != "NoSuchUpload":
                _log.warning(
                    "The multipart upload %s of s3://%s/%s could not be aborted (%s): abort it, "
                    "or let a lifecycle rule of the bucket do so; its parts may be billed.",
                    upload_id,
                    self.bucket,
                    self.key,
                    str(error) or type(error).__name__,
                )


_CHECKSUMS: Final = tuple(
    f"Checksum{name}" for name in ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")
)


def _refusal(error: BaseException) -> tuple[int, str]:
    """Status and S3 code behind what s3fs made of an answer; 0 and nothing for other errors."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, response.get("Error", {}).get("Code", "")
