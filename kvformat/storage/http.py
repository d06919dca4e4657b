"""HTTP and HTTPS through the session of fsspec's own filesystem (spec REQ-5 to REQ-11)."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import aiohttp
import yarl

from kvformat.errors import StorageError, UsageError
from kvformat.storage.base import Transport, public_name, reason
from kvformat.storage.replies import (
    Range,
    Same,
    TransientError,
    body_error,
    check_reply,
    check_status,
    fields,
    retry_after_s,
)

MOST_REDIRECTS: Final = 10
BUFFER_BYTES: Final = 2**19
OURS: Final = ("range", "accept-encoding")
"""Header fields that are not the caller's to set."""
ENCODED: Final = re.compile(r"https?://(?:[\w.~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+", re.ASCII)
"""A URL that can be sent as it is."""

TRANSIENT: Final = (
    aiohttp.ClientPayloadError,
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientOSError,
    ConnectionError,
)
FINAL: Final = (aiohttp.ClientSSLError, aiohttp.ClientConnectorDNSError)


class HttpService:
    """An object behind a URL."""

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self.loop: asyncio.AbstractEventLoop = fs.loop
        self.name = public_name(url)
        try:
            # Quoting anew what is quoted would break signatures and names with special characters.
            self._url = (
                yarl.URL(url, encoded=True) if ENCODED.fullmatch(url) else fs.encode_url(url)
            )
            named = bool(self._url.host) and self._url.port is not None
        except ValueError:
            named = False
        if not named:
            scheme = url.partition("://")[0]
            raise UsageError(
                "usage.argument", "this is no URL of a server", where=f"{scheme}://..."
            )

    async def get(self, asked: Range, transport: Transport, same: Same) -> HttpReply:
        """Ask for a range; redirections are followed, up to 10 (REQ-11)."""
        options = dict(self._fs.kwargs)
        given = dict(options.pop("headers", None) or {})
        headers = {name: value for name, value in given.items() if name.lower() not in OURS}
        headers["Range"] = f"bytes={asked.first}-{asked.stop - 1}"
        headers["Accept-Encoding"] = "identity"
        options.setdefault("read_bufsize", BUFFER_BYTES)
        options.setdefault("max_redirects", MOST_REDIRECTS + 1)  # aiohttp refuses the last of them
        options["timeout"] = aiohttp.ClientTimeout(
            total=None, sock_connect=transport.connect_timeout_s
        )
        session = await self._fs.set_session()
        response = await session.get(self._url, headers=headers, **options)
        try:
            return HttpReply(response, self._check(response, asked, same))
        except BaseException:
            response.close()
            raise

    def _check(self, response: aiohttp.ClientResponse, asked: Range, same: Same) -> int:
        where = f"{self.name}, byte {asked.first}"
        after_s = retry_after_s(response.headers.get("Retry-After"))
        check_status(response.status, where, response.reason or "", after_s)
        return check_reply(response.status, fields(response.headers.items()), asked, where, same)

    def failure(self, error: Exception, asked: Range) -> Exception:
        """What an exception of aiohttp means."""
        where = f"{self.name}, byte {asked.first}"
        if isinstance(error, aiohttp.ClientPayloadError):
            return TransientError(body_error(where, asked.size_bytes, longer=False))
        if isinstance(error, TypeError):
            return UsageError(
                "usage.argument", f"a storage option does not fit: {error}", where=self.name
            )
        found = StorageError("io.read", f"reading failed: {_said(error)}", where=where)
        if isinstance(error, TRANSIENT) and not isinstance(error, FINAL):
            return TransientError(found)
        return found


def _said(error: Exception) -> str:
    """The error in words; those of aiohttp hold URLs, of redirections too."""
    if isinstance(error, aiohttp.TooManyRedirects):
        return f"more than {MOST_REDIRECTS} redirections"
    if isinstance(error, aiohttp.NonHttpUrlRedirectClientError):
        return "a redirection that leaves HTTP"
    if isinstance(error, aiohttp.InvalidURL):
        return "a redirection to what is no URL"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the reply is not HTTP"  # what aiohttp says quotes it, which may be tensors
    return reason(error)


class HttpReply:
    """A checked reply of aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse, size_bytes: int) -> None:
        self._response = response
        self.size_bytes = size_bytes

    async def read(self, most_bytes: int) -> bytes:
        """Some bytes of the body."""
        try:
            return await self._response.content.read(most_bytes)
        except RuntimeError as error:  # the parser of chunks gave up and closed
            raise aiohttp.ClientPayloadError("the body is not HTTP") from error

    async def close(self, *, whole: bool) -> None:
        """Release or end the connection."""
        if whole:
            self._response.release()
        else:
            self._response.close()
