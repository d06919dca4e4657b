"""S3 and compatible stores through the calls of s3fs, with its credentials and options."""

from __future__ import annotations

import asyncio
from typing import Any

from kvformat.errors import StorageError
from kvformat.storage.base import Transport, reason
from kvformat.storage.http import TRANSIENT
from kvformat.storage.replies import (
    Answer,
    Range,
    TransientError,
    check_reply,
    check_status,
)


class S3Service:
    """An object in a bucket. The request is GetObject with a Range; no HEAD, no listing."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._bucket, self._key, self._version = fs.split_path(path)
        self.loop: asyncio.AbstractEventLoop = fs.loop
        self.name = f"s3://{self._bucket}/{self._key}"

    async def get(self, asked: Range, _transport: Transport) -> S3Reply:
        """Ask for a range. Time limits of connections are those of the client's own options."""
        version = {"VersionId": self._version} if self._version else {}
        found = await self._fs._call_s3(
            "get_object",
            Bucket=self._bucket,
            Key=self._key,
            Range=f"bytes={asked.first}-{asked.stop - 1}",
            **version,
        )
        body = found["Body"]
        try:
            return S3Reply(body, self._check(found, asked))
        except BaseException:
            body.close()
            raise

    def _check(self, found: dict[str, Any], asked: Range) -> Answer:
        where = f"{self.name}, byte {asked.first}"
        # The content encoding of an object in S3 is a remark of its owner: bytes come as stored.
        headers = {
            "content-range": str(found.get("ContentRange") or ""),
            "content-length": str(found["ContentLength"]),
            "etag": str(found.get("ETag") or ""),
        }
        return check_reply(found["ResponseMetadata"]["HTTPStatusCode"], headers, asked, where)

    def failure(self, error: Exception) -> Exception:
        """What an exception of s3fs or botocore means."""
        if isinstance(error, PermissionError):
            return self._status(403, reason(error))
        if isinstance(error, FileNotFoundError):
            return self._status(404, reason(error))
        status = _status_of(error)
        if status == 416:
            return StorageError(
                "io.range", "the server says that the object ends before these bytes",
                where=self.name, found=reason(error),
            )  # fmt: skip
        if status is not None and status >= 400:
            return self._status(status, reason(error))
        found = StorageError("io.read", f"reading failed: {reason(error)}", where=self.name)
        if isinstance(error, TRANSIENT) or type(error).__module__.startswith("botocore"):
            return TransientError(found) if _is_connection(error) else found
        return found

    def _status(self, status: int, said: str) -> Exception:
        try:
            check_status(status, self.name, said)
        except (StorageError, TransientError) as found:
            return found
        return StorageError("io.read", f"reading failed: {said}", where=self.name)


def _status_of(error: BaseException | None) -> int | None:
    """The HTTP status behind an exception of s3fs."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status if isinstance(status, int) else None
        error = error.__cause__
    return None


def _is_connection(error: Exception) -> bool:
    """Whether the connection failed, in the names of botocore or aiohttp."""
    if isinstance(error, TRANSIENT):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"HTTPClientError", "ResponseStreamingError", "IncompleteReadError"})


class S3Reply:
    """A checked reply of aiobotocore."""

    def __init__(self, body: Any, answer: Answer) -> None:
        self._body = body
        self.answer = answer

    async def read(self, most_bytes: int) -> bytes:
        """Some bytes of the body."""
        return bytes(await self._body.read(most_bytes))

    async def close(self, *, whole: bool) -> None:  # noqa: ARG002 - one way to end both
        """End the reply; an unread rest ends the connection."""
        self._body.close()
