"""A server that sends exactly the bytes that a test writes, for replies no library would make.

``kvconform.server`` has the misbehaviours with names; this one is for the wire itself.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

RESET: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Asked:
    """A request: its number from 0, its path with query, its first and last byte, its head."""

    number: int
    path: str
    first: int
    last: int
    head: str


@dataclass(frozen=True)
class Wire:
    """What is sent, and then: ``keep`` the connection, ``close``, ``reset`` or ``hold`` it."""

    data: bytes
    ending: str = "keep"


Script = Callable[[Asked], Wire]


@dataclass
class RawServer:
    """A running server; ``asked`` is its log."""

    script: Script
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str = "a.kvf") -> str:
        """A URL."""
        return f"http://127.0.0.1:{self.port}/{path}"


def part(
    data: bytes, asked: Asked, *headers: str, version: str = "HTTP/1.1", length: bool = True
) -> bytes:
    """A good reply with more headers; without ``length`` it ends with the connection."""
    last = min(asked.last, len(data) - 1)
    body = data[asked.first : last + 1]
    lines = [f"{version} 206 Partial Content", *headers]
    if not any(line.lower().startswith("content-range") for line in headers):
        lines.append(f"Content-Range: bytes {asked.first}-{last}/{len(data)}")
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def raw_server(script: Script) -> Iterator[RawServer]:
    """Serve until the block ends; then every connection is cut."""
    server = RawServer(script)
    open_now: set[socket.socket] = set()
    workers: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.port = listening.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                if server.ended.is_set():
                    connection.close()
                    return
                open_now.add(connection)
                worker = threading.Thread(target=_talk, args=(server, connection))
                workers.append(worker)
                worker.start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield server
        finally:
            server.ended.set()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", server.port)).close()
            acceptor.join()
            for connection in open_now:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for worker in workers:
                worker.join()


def _talk(server: RawServer, connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        ending = "keep"
        while ending == "keep":
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                block = connection.recv(1)
                if not block:
                    return
                head += block
            text = head.decode("latin-1")
            match = re.search(r"(?im)^range: bytes=(\d+)-(\d+)\r$", text)
            first, last = (int(match[1]), int(match[2])) if match else (-1, -1)
            asked = Asked(len(server.asked), text.split(" ")[1], first, last, text)
            server.asked.append(asked)
            wire = server.script(asked)
            connection.sendall(wire.data)
            ending = wire.ending
        if ending == "hold":
            connection.recv(1)  # until the other side leaves, or the server is cut
        elif ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
