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
    body_error,
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
        """Ask for a range. Time limits of connections are those of the client's own options.

        This goes to the client directly: it repeats requests itself, and s3fs on top of it, and
        the reader once more, would make 125 of one.
        """
        version = {"VersionId": self._version} if self._version else {}
        await self._fs.set_session()
        method = (await self._fs.get_s3(self._bucket)).get_object
        options = self._fs._get_s3_method_kwargs(
            method,
            Bucket=self._bucket,
            Key=self._key,
            Range=f"bytes={asked.first}-{asked.stop - 1}",
            **version,
        )
        try:
            found = await method(**options)
        except Exception as error:
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

    def failure(self, error: Exception, asked: Range) -> Exception:
        """What an exception of botocore or aiohttp means."""
        where = f"{self.name}, byte {asked.first}"
        response = _response_of(error)
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status == 416:
            return StorageError(
                "io.range", "the server says that the object ends before these bytes",
                where=where, found=reason(error),
            )  # fmt: skip
        if isinstance(status, int) and status >= 400:
            return _of_status(status, response, where)
        names = {kind.__name__ for kind in type(error).__mro__}
        if "NoCredentialsError" in names:
            return StorageError(
                "io.denied", "there are no credentials for S3", where=where,
                next_step="Give key and secret as storage options, or anon=True",
            )  # fmt: skip
        if names & {"ConnectTimeoutError", "ReadTimeoutError"}:
            return TransientError(
                StorageError("io.timeout", "the server does not answer", where=where)
            )
        if names & {"IncompleteReadError", "ClientPayloadError"}:
            return TransientError(body_error(where, asked.size_bytes, longer=False))
        found = StorageError("io.read", f"reading failed: {reason(error)}", where=where)
        lost = isinstance(error, TRANSIENT) or names & {"HTTPClientError", "ResponseStreamingError"}
        return TransientError(found) if lost else found


def _of_status(status: int, response: dict[str, Any], where: str) -> Exception:
    """The error of a status; one that the client has met with repeats of its own is final."""
    try:
        check_status(status, where, str(response.get("Error", {}).get("Code", "")))
    except TransientError as found:
        repeats = response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
        return found.final if repeats else found
    except StorageError as found:
        return found
    return StorageError("io.read", "reading failed", where=where, found=f"status {status}")


def _response_of(error: BaseException) -> dict[str, Any]:
    """The parsed reply behind an exception of botocore, empty if there was none."""
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def _is_empty(error: BaseException) -> bool:
    """Whether the store says that an empty object has no first byte."""
    said = _response_of(error).get("Error", {})
    return said.get("Code") == "InvalidRange" and str(said.get("ActualObjectSize")) == "0"


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
