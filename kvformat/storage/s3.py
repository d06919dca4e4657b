"""S3 and compatible stores through the calls of s3fs, with its credentials and options."""

from __future__ import annotations

import asyncio
from typing import Any

from kvformat.errors import StorageError
from kvformat.storage.base import Transport, reason
from kvformat.storage.http import TRANSIENT
from kvformat.storage.replies import (
    Range,
    Same,
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

    async def get(self, asked: Range, _transport: Transport, same: Same) -> S3Reply:
        """Ask for a range. Time limits of connections are those of the client's own options."""
        version = {"VersionId": self._version} if self._version else {}
        try:
            found = await self._fs._call_s3(
                "get_object",
                Bucket=self._bucket,
                Key=self._key,
                Range=f"bytes={asked.first}-{asked.stop - 1}",
                **version,
            )
        except OSError as error:
            if asked.front and _is_empty(error):
                return S3Reply(None, 0)
            raise
        body = found["Body"]
        try:
            return S3Reply(body, self._check(found, asked, same))
        except BaseException:
            body.close()
            raise

    def _check(self, found: dict[str, Any], asked: Range, same: Same) -> int:
        where = f"{self.name}, byte {asked.first}"
        # The content encoding of an object in S3 is a remark of its owner: bytes come as stored.
        headers = {
            "content-range": str(found.get("ContentRange") or ""),
            "content-length": str(found["ContentLength"]),
            "etag": str(found.get("ETag") or ""),
        }
        status = found["ResponseMetadata"]["HTTPStatusCode"]
        return check_reply(status, headers, asked, where, same)

    def failure(self, error: Exception, _asked: Range) -> Exception:
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


def _response_of(error: BaseException | None) -> dict[str, Any]:
    """The parsed reply behind an exception of s3fs, empty if there was none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        error = error.__cause__
    return {}


def _status_of(error: BaseException) -> int | None:
    status = _response_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _is_empty(error: BaseException) -> bool:
    """Whether the store says that an empty object has no first byte."""
    said = _response_of(error).get("Error", {})
    return said.get("Code") == "InvalidRange" and str(said.get("ActualObjectSize")) == "0"


def _is_connection(error: Exception) -> bool:
    """Whether the connection failed, in the names of botocore or aiohttp."""
    if isinstance(error, TRANSIENT):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"HTTPClientError", "ResponseStreamingError", "IncompleteReadError"})


class S3Reply:
    """A checked reply of aiobotocore."""

    def __init__(self, body: Any, size_bytes: int) -> None:
        self._body = body
        self.size_bytes = size_bytes

    async def read(self, most_bytes: int) -> bytes:
        """Some bytes of the body."""
        return bytes(await self._body.read(most_bytes))

    async def close(self, *, whole: bool) -> None:  # noqa: ARG002 - one way to end both
        """End the reply; an unread rest ends the connection."""
        if self._body is not None:
            self._body.close()
