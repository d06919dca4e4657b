"""A server on the loopback that gives the bytes of a case, with one behaviour per URL and a log.

``Server`` listens on a free port. ``serve`` gives a new URL for one call; what is asked of it is in
``Resource.log``. Leaving ``serve`` cuts whatever is still being sent to that URL.
"""

from __future__ import annotations

import contextlib
import http.server
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from kvconform.behaviours import BEHAVIOURS, Asked, Behaviour, Reply

SEND_BUFFER_BYTES: Final = 65_536
"""Small, so that a body which nobody reads is soon noticed."""
SETTLE_S: Final = 0.2
"""How long a reply that is on its way may take to end by itself once the call has ended."""
CLOSE_S: Final = 5.0
RESET: Final = struct.pack("ii", 1, 0)
OBJECT: Final = "input.kvf"


@dataclass(slots=True)
class Request:
    """A line of the log.

    ``ranges`` and ``encodings`` are the fields Range and Accept-Encoding as they came, one item per
    field. ``first`` and ``last`` are the bytes of the object that the reply stands for, ``written``
    counts the bytes of its body that the system took for sending.
    """

    method: str
    ranges: tuple[str, ...]
    encodings: tuple[str, ...]
    status: int = 0
    first: int | None = None
    last: int | None = None
    written: int = 0

    def __str__(self) -> str:
        asked = ", ".join(self.ranges) or "no Range"
        part = "" if self.first is None else f" with bytes {self.first}-{self.last}"
        status = self.status or "no reply"
        return f"{self.method} {asked}: {status}{part}, {self.written:,} bytes of body sent"


class Resource:
    """What one URL gives, and its log. ``ended`` is set when the call is over."""

    def __init__(self, data: bytes, behaviour: Behaviour, url: str, local: Path | None) -> None:
        self.data = data
        self.behaviour = behaviour
        self.url = url
        self.local = local
        self.ended = threading.Event()
        self._log: list[Request] = []
        self._busy: dict[socket.socket, None] = {}
        self._state = threading.Condition()

    @property
    def log(self) -> list[Request]:
        """The requests so far, in order of arrival."""
        with self._state:
            return list(self._log)

    @contextlib.contextmanager
    def request(self, line: Request, connection: socket.socket) -> Iterator[int]:
        """Log a request for as long as it is answered; gives its number."""
        with self._state:
            number = len(self._log)
            self._log.append(line)
            self._busy[connection] = None
        try:
            yield number
        finally:
            with self._state:
                self._busy.pop(connection, None)
                self._state.notify_all()

    def end(self) -> None:
        """Wait a moment for replies on their way, then cut them."""
        self.ended.set()
        with self._state:
            self._state.wait_for(lambda: not self._busy, SETTLE_S)
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._state.wait_for(lambda: not self._busy, CLOSE_S)


class Server:
    """A threaded HTTP/1.1 server on 127.0.0.1."""

    def __init__(self) -> None:
        self._resources: dict[str, Resource] = {}
        self._listener = _Listener(("127.0.0.1", 0), _Handler)
        self._listener.resources = self._resources
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.server_address[1])

    @contextlib.contextmanager
    def serve(self, data: bytes, behaviour: str, local: Path | None = None) -> Iterator[Resource]:
        """A new URL for these bytes; ``local`` is a file that has them too."""
        token = secrets.token_hex(8)
        url = f"http://127.0.0.1:{self.port}/{token}/{OBJECT}"
        resource = Resource(data, BEHAVIOURS[behaviour], url, local)
        self._resources[token] = resource
        try:
            yield resource
        finally:
            resource.end()
            del self._resources[token]

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._listener.shutdown()
        self._thread.join(CLOSE_S)
        self._listener.server_close()
        self._listener.cut()


class _Listener(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    resources: dict[str, Resource]

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none of our errors."""

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = threading.current_thread()
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Close without a shutdown before it, or a reset would never be one."""
        self.close_request(request)

    def cut(self) -> None:
        """End the threads of idle connections."""
        with self._lock:
            left = dict(self._open)
        for connection, thread in left.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(CLOSE_S)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the library
        """Nothing on standard error; the log is in the resource."""

    def _any(self) -> None:
        address = urlsplit(self.path)
        resource = self.server.resources.get(address.path.strip("/").split("/")[0])
        if resource is None:
            self._start(Reply(404))
            return
        line = Request(
            self.command,
            tuple(self.headers.get_all("Range", [])),
            tuple(self.headers.get_all("Accept-Encoding", [])),
        )
        with resource.request(line, self.connection) as number:
            asked = Asked(
                resource.data,
                ", ".join(line.ranges).strip(),
                number,
                int(parse_qs(address.query).get("hop", ["0"])[0]),
                self.command,
                resource.url,
                str(resource.local or ""),
            )
            self._reply(resource, line, resource.behaviour.answer(asked))

    do_GET = do_HEAD = do_OPTIONS = do_POST = do_PUT = do_DELETE = do_PROPFIND = _any  # noqa: N815

    def _reply(self, resource: Resource, line: Request, reply: Reply) -> None:
        line.status = reply.status
        if reply.last >= reply.first:
            line.first, line.last = reply.first, reply.last
        self.close_connection = self.close_connection or reply.ending != "keep"
        try:
            if reply.status:
                self._start(reply)
                if self.command != "HEAD":
                    self._body(resource, line, reply)
        except OSError:  # the reader went away
            self.close_connection = True
            return
        if reply.ending == "silence":
            resource.ended.wait()
        elif reply.ending == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def _start(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        if reply.length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(reply.length))
        if reply.status in (200, 206):
            self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()

    def _body(self, resource: Resource, line: Request, reply: Reply) -> None:
        for index, piece in enumerate(reply.body):
            if index and reply.pause_s:
                resource.ended.wait(reply.pause_s)
            if not piece:
                continue
            if reply.length is None:
                self.connection.sendall(b"%x\r\n" % len(piece))
            self._send(line, piece)
            if reply.length is None:
                self.connection.sendall(b"\r\n")
        if reply.length is None and reply.ending == "keep":
            self.connection.sendall(b"0\r\n\r\n")

    def _send(self, line: Request, piece: bytes) -> None:
        """Send and count what was taken, also of a piece that is never taken whole."""
        view = memoryview(piece)
        while view:
            count = self.connection.send(view)
            line.written += count
            view = view[count:]
