"""HTTP and HTTPS through the session of fsspec's own filesystem (spec REQ-5 to REQ-11)."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from kvformat.errors import StorageError, UsageError
from kvformat.storage.base import Transport, reason
from kvformat.storage.replies import (
    Answer,
    Range,
    TransientError,
    check_reply,
    check_status,
    retry_after_s,
)

MOST_REDIRECTS: Final = 10
BUFFER_BYTES: Final = 2**19

TRANSIENT: Final = (
    aiohttp.ClientPayloadError,
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientOSError,
    ConnectionError,
)
FINAL: Final = (aiohttp.ClientSSLError, aiohttp.ClientConnectorDNSError)


def public_name(url: str) -> str:
    """The URL without what may be secret: user, password, query, fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "..." if parts.query else ""
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


class HttpService:
    """An object behind a URL."""

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self.loop: asyncio.AbstractEventLoop = fs.loop
        try:
            self._url = fs.encode_url(url)
            self.name = public_name(url)
        except ValueError as error:
            raise UsageError(
                "usage.argument", f"this is no URL: {error}", where=url.partition("?")[0]
            ) from error

    async def get(self, asked: Range, transport: Transport) -> HttpReply:
        """Ask for a range; redirections are followed, up to 10 (REQ-11)."""
        options = dict(self._fs.kwargs)
        headers = {
            **dict(options.pop("headers", None) or {}),
            "Range": f"bytes={asked.first}-{asked.stop - 1}",
            "Accept-Encoding": "identity",
        }
        options.setdefault("read_bufsize", BUFFER_BYTES)
        options["timeout"] = aiohttp.ClientTimeout(
            total=None, sock_connect=transport.connect_timeout_s
        )
        session = await self._fs.set_session()
        response = await session.get(
            self._url,
            headers=headers,
            allow_redirects=True,
            max_redirects=MOST_REDIRECTS,
            **options,
        )
        try:
            return HttpReply(response, self._check(response, asked))
        except BaseException:
            response.close()
            raise

    def _check(self, response: aiohttp.ClientResponse, asked: Range) -> Answer:
        where = f"{self.name}, byte {asked.first}"
        after_s = retry_after_s(response.headers.get("Retry-After"))
        check_status(response.status, where, response.reason or "", after_s)
        headers = {name.lower(): value for name, value in response.headers.items()}
        return check_reply(response.status, headers, asked, where)

    def failure(self, error: Exception) -> Exception:
        """What an exception of aiohttp means."""
        if isinstance(error, aiohttp.ClientResponseError) and error.status >= 400:
            try:
                check_status(error.status, self.name, error.message)
            except (StorageError, TransientError) as stated:
                return stated
        found = StorageError("io.read", f"reading failed: {reason(error)}", where=self.name)
        if isinstance(error, TRANSIENT) and not isinstance(error, FINAL):
            return TransientError(found)
        return found


class HttpReply:
    """A checked reply of aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        self._response = response
        self.answer = answer

    async def read(self, most_bytes: int) -> bytes:
        """Some bytes of the body."""
        return await self._response.content.read(most_bytes)

    async def close(self, *, whole: bool) -> None:
        """Release or end the connection."""
        if whole:
            self._response.release()
        else:
            self._response.close()
