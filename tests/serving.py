"""A ``kvformat serve`` in a thread, and raw requests to it; there are no tests here."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvformat.digests import digest
from kvformat.header import Header
from kvformat.server import addresses, listen, serve
from kvformat.shelf import Shelf


@dataclass
class Serving:
    """A running server: what it logged, and what it told the operator."""

    shelf: Shelf
    host: str
    port: int
    log: list[dict[str, Any]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def url(self, path: str) -> str:
        """The URL of a path."""
        return f"http://{self.host}:{self.port}/{path}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection that a test closes."""
        return http.client.HTTPConnection(self.host, self.port, timeout=30)

    def ask(
        self, target: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request, sent as it stands; ``_`` in names is ``-``."""
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if "Host" not in headers:
            lines.append(f"Host: {self.host}:{self.port}")
        request = "\r\n".join([*lines, "Connection: close", "", ""])
        with socket.create_connection((self.host, self.port), timeout=30) as client:
            client.sendall(request.encode("utf-8", "surrogateescape"))
            response = http.client.HTTPResponse(client, method=method)
            response.begin()
            with response:
                found = {name.lower(): value for name, value in response.getheaders()}
                body = response.read()
            client.recv(1)  # the server closes when it has logged
            return response.status, found, body


@contextlib.contextmanager
def serving(directory: Path, *, token: bytes | None = None) -> Iterator[Serving]:
    """Serve ``directory`` on loopback until the block ends."""
    told: list[str] = []
    sockets = listen("127.0.0.1", 0)
    ((host, port),) = addresses(sockets)
    server = Serving(Shelf(directory, told.append), host, port, told=told)
    ready = threading.Event()
    handles: list[Any] = []

    async def main() -> None:
        stop = asyncio.Event()
        handles.extend((asyncio.get_running_loop(), stop))
        ready.set()
        await serve(server.shelf, sockets, stop, token=token, log=server.log.append)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop, stop = handles
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def sparse_artifact(path: Path, size_bytes: int, fill: bytes = b"") -> str:
    """A file with a good header and nothing behind it but ``fill``; returns its entity tag.

    Enough for the server, which leaves the rest to the reader's digests.
    """
    header = Header(size_bytes, 100, 0, digest(fill))
    with path.open("wb") as file:
        file.write(header.to_bytes() + fill)
        file.truncate(size_bytes)
    return f'"{digest(fill).hex()}-{size_bytes}"'
