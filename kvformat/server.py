"""A read-only HTTP server for the artifacts below a directory, for moving them between machines.

It answers GET and HEAD for ``NAME.kvf``, for ``/index.json`` and, for people, ``/``.

- Ranges are exact. The rules where RFC 9110 leaves a choice are in ``kvformat.http_rules``.
- The entity tag is the manifest digest and the size: strong, and the same for the same artifact on
  every machine. There is no ``Last-Modified``, and conditions with dates are ignored.
- A name may come to mean another file, so that ``NAME.kvf`` is to be revalidated (``no-cache``).
  ``NAME.kvf?manifest=DIGEST`` is that one artifact or 404, and may be kept for ever
  (``immutable``); the index gives these URLs. Both are ``private``, for a KV cache gives away its
  prompt.
- One request is answered from one open file. If somebody writes into that file meanwhile, the
  connection ends before the last byte.
- There is no TLS.

Needs the package ``aiohttp``, which the extra ``[http]`` brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from aiohttp import web

from kvformat import __version__
from kvformat.digests import digest
from kvformat.errors import KvformatError
from kvformat.http_rules import (
    RangeRefusedError,
    Span,
    failed_condition,
    is_local,
    is_loopback,
    range_applies,
    requested_span,
)
from kvformat.shelf import NotOnShelfError, Shelf, Volume

PIECE_BYTES: Final = 4 * 2**20
PIECE_S: Final = 300.0
"""A client that takes longer than this for a piece is cut off, or it would hold a file for ever."""
TAIL_BYTES: Final = 65_536
"""What is held back until the file is known to be unchanged."""
GRACE_S: Final = 5.0
"""Requests under way have this long to end when the server stops."""
BACKLOG: Final = 1024
TOO_MANY_FILES: Final = (errno.EMFILE, errno.ENFILE)
KEEP_NOTHING: Final = "no-store"
ASK_AGAIN: Final = "private, no-cache"
KEEP_FOR_EVER: Final = "private, max-age=31536000, immutable"
PAGE: Final = (
    '<!doctype html><meta charset="utf-8"><title>kvformat</title>\n'
    "<p>This is <code>kvformat serve</code>. It serves KV caches, read-only.\n"
    '<p><a href="index.json">index.json</a> lists them.\n'
)
Log = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Answer:
    """What a handler says; ``span`` of ``volume`` is the body if there is one."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    volume: Volume | None = None
    span: Span | None = None


def refusal(status: int, text: str, **headers: str) -> Answer:
    """A short answer in plain text that is not to be kept."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named |= {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": KEEP_NOTHING}
    return Answer(status, f"{status}: {text}\n".encode(), named)


class Librarian:
    """Answers requests for what is on a shelf.

    ``token``: what ``Authorization: Bearer`` must say, None for everyone. ``local_only``: refuse
    requests whose ``Host`` is not this machine. ``log`` gets one mapping for each request.
    """

    def __init__(
        self, shelf: Shelf, *, token: bytes | None, local_only: bool, log: Log | None
    ) -> None:
        self._shelf = shelf
        self._token = token
        self._local_only = local_only
        self._log = log
        self._index_lock = asyncio.Lock()
        self._index = b""
        self._index_begun = -1.0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever goes wrong, and log it."""
        begin = time.monotonic()
        sent = _Sent()
        answer = Answer(500)
        try:
            answer = await self._answer(request)
            return await _send(request, answer, sent)
        finally:
            if answer.volume is not None:
                answer.volume.close()
            if self._log is not None:
                self._log(
                    {
                        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                        "client": request.remote,
                        "method": request.method,
                        "path": request.raw_path,
                        "range": request.headers.get("Range"),
                        "status": answer.status,
                        "body_bytes": sent.body_bytes,
                        "complete": sent.complete,
                        "seconds": round(time.monotonic() - begin, 6),
                    }
                )

    async def _answer(self, request: web.BaseRequest) -> Answer:
        try:
            return self._refused(request) or await self._found(request)
        except NotOnShelfError:
            return refusal(404, "there is no such artifact; see /index.json")
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                return refusal(503, "too many requests at once", Retry_After="1")
            return refusal(500, "the file cannot be read")
        except KvformatError:
            return refusal(500, "the file cannot be read")

    def _refused(self, request: web.BaseRequest) -> Answer | None:
        if self._local_only and not is_local(request.headers.get("Host")):
            return refusal(421, "this server answers to localhost only")
        if self._token is not None:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            secret = given.strip().encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(secret, self._token) or scheme.lower() != "bearer":
                return refusal(401, "a bearer token is needed", WWW_Authenticate="Bearer")
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "this server is read-only", Allow="GET, HEAD")
        return None

    async def _found(self, request: web.BaseRequest) -> Answer:
        target = request.rel_url.raw_path
        if target in ("/", ""):
            policy = {"Content-Security-Policy": "default-src 'none'"}
            return _text(request, PAGE.encode(), "text/html; charset=utf-8", policy)
        if target == "/index.json":
            return _text(request, await self._fresh_index(), "application/json", {})
        wanted = parse_qs(request.rel_url.raw_query_string).get("manifest")
        volume = await asyncio.to_thread(self._shelf.open, target)
        if wanted is not None and wanted != [volume.manifest_digest]:
            volume.close()
            raise NotOnShelfError
        return _of_volume(request, volume, KEEP_FOR_EVER if wanted else ASK_AGAIN)

    async def _fresh_index(self) -> bytes:
        """An index that was begun after this request came; requests that wait share it."""
        came = time.monotonic()
        async with self._index_lock:
            if self._index_begun < came:
                self._index_begun = time.monotonic()
                self._index = await asyncio.to_thread(self._shelf.index)
            return self._index


def _text(request: web.BaseRequest, body: bytes, kind: str, headers: dict[str, str]) -> Answer:
    """A small representation with an entity tag, without ranges."""
    etag = f'"{digest(body).hex()}"'
    headers = {"ETag": etag, "Cache-Control": ASK_AGAIN, **headers}
    failed = failed_condition(_all(request, "If-Match"), _all(request, "If-None-Match"), etag)
    if failed:
        return Answer(failed, headers=headers)
    return Answer(200, body, headers | {"Content-Type": kind})


def _of_volume(request: web.BaseRequest, volume: Volume, caching: str) -> Answer:
    """Status, headers and span for an artifact, in the order of RFC 9110, section 13.2.2."""
    etag, size_bytes = volume.etag, volume.size_bytes
    headers = {"ETag": etag, "Cache-Control": caching, "Accept-Ranges": "bytes"}
    failed = failed_condition(_all(request, "If-Match"), _all(request, "If-None-Match"), etag)
    if failed:
        return Answer(failed, headers=headers, volume=volume)
    span = None
    if request.method == "GET" and range_applies(_all(request, "If-Range"), etag):
        try:
            span = requested_span(_all(request, "Range"), size_bytes)
        except RangeRefusedError:
            answer = refusal(416, "no such range", Content_Range=f"bytes */{size_bytes}")
            answer.headers = headers | answer.headers
            answer.volume = volume
            return answer
    headers["Content-Type"] = "application/octet-stream"
    if span is None:
        return Answer(200, headers=headers, volume=volume, span=Span(0, size_bytes))
    last = span.offset_bytes + span.length_bytes - 1
    headers["Content-Range"] = f"bytes {span.offset_bytes}-{last}/{size_bytes}"
    return Answer(206, headers=headers, volume=volume, span=span)


def _all(request: web.BaseRequest, name: str) -> str | None:
    """All lines of a header as one, None if there is none."""
    lines = request.headers.getall(name, [])
    return ", ".join(lines) if lines else None


@dataclass(slots=True)
class _Sent:
    """How far an answer has come."""

    body_bytes: int = 0
    complete: bool = False


async def _send(request: web.BaseRequest, answer: Answer, sent: _Sent) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.headers["Server"] = f"kvformat/{__version__}"
    response.headers["X-Content-Type-Options"] = "nosniff"
    if answer.status != 304:
        length_bytes = answer.span.length_bytes if answer.span else len(answer.body)
        response.content_length = length_bytes
    await response.prepare(request)
    if request.method != "HEAD":
        if answer.volume is not None and answer.span is not None:
            await _send_span(request, response, answer.volume, answer.span, sent)
        elif answer.body:
            await response.write(answer.body)
            sent.body_bytes = len(answer.body)
    await response.write_eof()
    sent.complete = True
    return response


async def _send_span(
    request: web.BaseRequest,
    response: web.StreamResponse,
    volume: Volume,
    span: Span,
    sent: _Sent,
) -> None:
    """Send a part of a file, the bulk without copying it; raises ``ConnectionError`` where the
    client must see an incomplete body."""
    stop = span.offset_bytes + span.length_bytes
    bulk_stop = max(span.offset_bytes, stop - TAIL_BYTES)
    try:
        with open(volume.descriptor, "rb", buffering=0, closefd=False) as file:
            for offset in range(span.offset_bytes, bulk_stop, PIECE_BYTES):
                count = min(PIECE_BYTES, bulk_stop - offset)
                async with asyncio.timeout(PIECE_S):
                    done = await _send_piece(request, file, offset, count)
                sent.body_bytes += done
                if done != count:
                    raise ConnectionAbortedError("the file was cut")
        tail = await asyncio.to_thread(volume.read, bulk_stop, stop - bulk_stop)
        if not volume.unchanged():
            raise ConnectionAbortedError("the file was written to")
        async with asyncio.timeout(PIECE_S):
            await response.write(tail)
            sent.body_bytes += len(tail)
    except (OSError, KvformatError, TimeoutError) as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError from error


async def _send_piece(request: web.BaseRequest, file: Any, offset: int, count: int) -> int:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError
    return await asyncio.get_running_loop().sendfile(transport, file, offset, count)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on all addresses of ``host``, all on one port; 0 chooses one.

    Raises ``OSError``, ``socket.gaierror`` among them.
    """
    kind = socket.SOCK_STREAM
    found = socket.getaddrinfo(host or None, port, type=kind, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            place = (address[0], opened[0].getsockname()[1] if opened else port, *address[2:])
            opened.append(_listen_at(family, place))
    except BaseException:
        for item in opened:
            item.close()
        raise
    return opened


def _listen_at(family: int, place: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(place)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def addresses(sockets: Sequence[socket.socket]) -> list[tuple[str, int]]:
    """Numeric address and port of each socket."""
    return [item.getsockname()[:2] for item in sockets]


def only_loopback(sockets: Sequence[socket.socket]) -> bool:
    """Whether no other machine reaches any of them."""
    return all(is_loopback(address) for address, _ in addresses(sockets))


async def serve(
    shelf: Shelf,
    sockets: Sequence[socket.socket],
    stop: asyncio.Event,
    *,
    token: bytes | None = None,
    log: Log | None = None,
) -> None:
    """Serve until ``stop`` is set, then let requests under way end for ``GRACE_S`` seconds.

    Takes the sockets over and closes the shelf. Cancelling it while they end cuts them off.
    """
    logger = logging.getLogger("kvformat.server")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False  # what aiohttp says of malformed requests is for debugging
    librarian = Librarian(shelf, token=token, local_only=only_loopback(sockets), log=log)
    runner = web.ServerRunner(
        web.Server(librarian, access_log=None, logger=logger), shutdown_timeout=GRACE_S
    )
    await runner.setup()
    try:
        for item in sockets:
            await web.SockSite(runner, item, backlog=BACKLOG).start()
        await stop.wait()
    finally:
        shelf.close()
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
