"""A TCP proxy that makes loopback behave like a network: bandwidth, delay, faults, and a log.

::

    with Proxy(("127.0.0.1", server_port), Link(down_bits_per_s=1e9, delay_s=0.01)) as proxy:
        fetch(f"http://127.0.0.1:{proxy.port}/a.kvf")
        proxy.configure(reset_after_bytes=100_000)
        print(proxy.log())

The proxy is a process of its own, so that it shares no interpreter lock with the code under test.
It reads commands on standard input and ends with it. Only the standard library is used, and the
file runs alone: ``python tests/shaping.py HOST PORT '{"delay_s": 0.02}'`` prints the port.

The model: each direction of the link is one queue that all connections share and that serialises
so many bits per second; behind it every byte travels ``delay_s``. A connection's first byte leaves
one round trip after ``connect``, as with a real handshake. There is no loss and no slow start. The
buffers of the kernel on both sides of the proxy come on top: a server may have written megabytes
that were not delivered, so count with ``log``, not at the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, Final

BUFFER_BYTES: Final = 2**20
SMALL_BYTES: Final = 2**16
"""Below this a chunk is copied, above it gets the buffer."""
CHUNK_S: Final = 0.004
"""A chunk takes the shared link for this long, so that connections take turns."""
CREDIT_S: Final = 0.005
"""Late wake-ups up to this are made good; also what an idle link sends at once."""
NEAR_WINDOW_BYTES: Final = 4 * 2**20
FAR_WINDOW_BYTES: Final = 32 * 2**20
"""What travels on a link with delay whose bandwidth is not limited."""
RESET: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Link:
    """What the proxy does; None means unlimited, or never.

    ``down`` is from the server to the client. ``delay_s`` is one way, in both directions.
    ``jitter_s`` adds up to that much, the order is kept. ``window_bytes`` is what one connection
    may have on its way, which limits it to ``window_bytes`` per round trip. The faults count bytes
    sent down one connection and hit the next ``faulty_connections`` connections, all if that is
    None. A stall ends after ``stall_s`` or when the fault is configured away. While ``refuse`` is
    true nothing listens on the port.
    """

    down_bits_per_s: float | None = None
    up_bits_per_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    window_bytes: int | None = None
    stall_after_bytes: int | None = None
    stall_s: float | None = None
    reset_after_bytes: int | None = None
    faulty_connections: int | None = None
    refuse: bool = False


@dataclass
class Connection:
    """One line of the log: bytes delivered, seconds since the proxy began, how it ended."""

    number: int
    accepted_s: float
    up_bytes: int = 0
    down_bytes: int = 0
    ended_s: float | None = None
    end: str = "open"
    """``open``, ``closed``, ``reset`` by either side, ``cut`` by the proxy, ``no server``."""
    stalled: bool = False


@dataclass(frozen=True)
class Log:
    """All connections so far, and the processor time of the proxy in seconds."""

    connections: tuple[Connection, ...]
    cpu_s: float

    @property
    def down_bytes(self) -> int:
        """Bytes delivered to clients."""
        return sum(item.down_bytes for item in self.connections)

    @property
    def up_bytes(self) -> int:
        """Bytes delivered to the server."""
        return sum(item.up_bytes for item in self.connections)


class Proxy:
    """A running proxy in front of ``target``; a context manager, safe to share between threads."""

    def __init__(self, target: tuple[str, int], link: Link = Link()) -> None:
        self.host = "127.0.0.1"
        self.link = link
        self._target = target
        self._lock = threading.Lock()

    def __enter__(self) -> Proxy:
        host, port = self._target
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, host, str(port), json.dumps(asdict(self.link))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._answer())
        return self

    def __exit__(self, *ended: object) -> None:
        self._process.communicate()

    def url(self, path: str = "") -> str:
        """An HTTP URL through the proxy."""
        return f"http://{self.host}:{self.port}/{path.lstrip('/')}"

    def configure(self, **changes: Any) -> None:
        """Change fields of ``Link``; holds for open connections too when this returns."""
        self.link = replace(self.link, **changes)
        self._ask({"link": asdict(self.link)})

    def cut(self) -> None:
        """Reset every open connection."""
        self._ask("cut")

    def log(self) -> Log:
        """What has happened so far."""
        value = self._ask("log")
        connections = (Connection(**item) for item in value["connections"])
        return Log(tuple(connections), value["cpu_s"])

    def _ask(self, command: object) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the shaping proxy ended early; its message is on standard error")
        return json.loads(line)


class _Queue:
    """The shared serialisation of one direction of the link."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def passage(self, size_bytes: int, bits_per_s: float | None) -> None:
        """Wait until ``size_bytes`` have been put on the wire behind all that came before."""
        if bits_per_s is None:
            return
        begin = max(time.monotonic() - CREDIT_S, self._free_at)
        self._free_at = begin + 8 * size_bytes / bits_per_s
        await asyncio.sleep(self._free_at - time.monotonic())


class _CutError(Exception):
    """The proxy itself ends the connection with a reset."""


class _Direction:
    """One direction of one connection: receive, serialise, delay, deliver."""

    def __init__(self, server: _Server, entry: Connection, name: str, faulty: bool) -> None:
        self._server = server
        self._entry = entry
        self._name = name
        self._faulty = faulty
        self._chunks: deque[tuple[float, memoryview | None]] = deque()
        self._spare: list[bytearray] = []
        self._changed = asyncio.Event()
        self._flying_bytes = 0
        self._due = 0.0

    async def receive(self, source: socket.socket) -> None:
        """Read until the end, never more than the window lets travel."""
        loop = asyncio.get_running_loop()
        ended = False
        while not ended:
            while (room := self._window_bytes() - self._flying_bytes) <= 0:
                await self._change()
            buffer = self._spare.pop() if self._spare else bytearray(BUFFER_BYTES)
            part = memoryview(buffer)[: min(room, self._chunk_bytes())]
            size_bytes = await loop.sock_recv_into(source, part)
            ended = not size_bytes
            part = part[:size_bytes]
            if size_bytes < SMALL_BYTES:
                self._spare.append(buffer)
                part = memoryview(bytes(part))
            self._flying_bytes += size_bytes
            await self._server.queues[self._name].passage(size_bytes, self._bits_per_s())
            link = self._server.link
            delay_s = link.delay_s + self._server.random.uniform(0, link.jitter_s)
            self._due = max(self._due, time.monotonic() + delay_s)
            self._chunks.append((self._due, None if ended else part))
            self._changed.set()

    async def deliver(self, sink: socket.socket) -> None:
        """Write each chunk when it is due; the end becomes a half-closed connection."""
        while True:
            while not self._chunks:
                await self._change()
            due, part = self._chunks.popleft()
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            if part is None:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._write(sink, part)
            if isinstance(part.obj, bytearray):
                self._spare.append(part.obj)
            self._give_back(len(part))

    async def _write(self, sink: socket.socket, part: memoryview) -> None:
        counted = f"{self._name}_bytes"
        while part:
            now = self._until_fault(part)
            await asyncio.get_running_loop().sock_sendall(sink, part[:now])
            setattr(self._entry, counted, getattr(self._entry, counted) + now)
            part = part[now:]
            if self._faulty:
                await self._fault(sink)

    def _until_fault(self, part: memoryview) -> int:
        link = self._server.link
        marks = (link.stall_after_bytes, link.reset_after_bytes) if self._faulty else ()
        ahead = (mark - self._entry.down_bytes for mark in marks if mark is not None)
        return min([len(part), *(item for item in ahead if item > 0)])

    async def _fault(self, sink: socket.socket) -> None:
        link, entry = self._server.link, self._entry
        if not entry.stalled and _reached(entry, link.stall_after_bytes):
            entry.stalled = True
            await self._server.stall_ends(link.stall_s)
        if _reached(entry, link.reset_after_bytes):
            while int.from_bytes(ioctl(sink, TIOCOUTQ, bytes(4)), sys.byteorder):
                await asyncio.sleep(0.001)  # or the reset would overtake what was sent
            raise _CutError

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _give_back(self, size_bytes: int) -> None:
        """The window opens when the acknowledgement has travelled back."""
        link = self._server.link
        if link.window_bytes is not None and link.delay_s:
            asyncio.get_running_loop().call_later(link.delay_s, self._open_window, size_bytes)
        else:
            self._open_window(size_bytes)

    def _open_window(self, size_bytes: int) -> None:
        self._flying_bytes -= size_bytes
        self._changed.set()

    def _bits_per_s(self) -> float | None:
        link = self._server.link
        return link.down_bits_per_s if self._name == "down" else link.up_bits_per_s

    def _window_bytes(self) -> int:
        link, bits_per_s = self._server.link, self._bits_per_s()
        if link.window_bytes is not None:
            return link.window_bytes
        if bits_per_s is None:
            return FAR_WINDOW_BYTES if link.delay_s or link.jitter_s else NEAR_WINDOW_BYTES
        return NEAR_WINDOW_BYTES + int(bits_per_s / 8 * 2 * (link.delay_s + link.jitter_s))

    def _chunk_bytes(self) -> int:
        bits_per_s = self._bits_per_s()
        if bits_per_s is None:
            return BUFFER_BYTES
        return min(max(int(bits_per_s / 8 * CHUNK_S), 1460), BUFFER_BYTES)


def _reached(entry: Connection, mark_bytes: int | None) -> bool:
    return mark_bytes is not None and entry.down_bytes >= mark_bytes


class _Server:
    """The proxy's process."""

    def __init__(self, target: tuple[str, int], link: Link) -> None:
        self.link = link
        self.random = random.Random(1)
        self.queues = {"up": _Queue(), "down": _Queue()}
        self._target = target
        self._entries: list[Connection] = []
        self._faults = 0
        self._reconfigured = asyncio.Event()
        self._begin_s = time.monotonic()
        self._port = 0
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer commands until standard input ends."""
        loop = asyncio.get_running_loop()
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        await self._listen()
        print(self._port, flush=True)
        while line := await commands.readline():
            print(json.dumps(await self._obey(json.loads(line))), flush=True)
        await self._end((*self._tasks, *([self._listener] if self._listener else [])))

    async def _obey(self, command: Any) -> Any:
        if command == "log":
            rows = [asdict(item) for item in self._entries]
            return {"connections": rows, "cpu_s": time.process_time()}
        if command == "cut":
            return await self._end(tuple(self._tasks))
        before, self.link = self.link, Link(**command["link"])
        faults = ("stall_after_bytes", "stall_s", "reset_after_bytes", "faulty_connections")
        if any(getattr(before, name) != getattr(self.link, name) for name in faults):
            self._faults = 0
        self._reconfigured.set()
        self._reconfigured = asyncio.Event()
        return await self._listen()

    async def _end(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Listen, or stop listening, as the link says."""
        if self.link.refuse and self._listener:
            await self._end([self._listener])
            self._listener = None
        elif not self.link.refuse and not self._listener:
            listening = socket.create_server(("127.0.0.1", self._port), backlog=1024)
            listening.setblocking(False)
            self._port = listening.getsockname()[1]
            self._listener = asyncio.create_task(self._accept(listening))
        elif not self._port:  # refusing from the beginning: find a port for later
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self._port = probe.getsockname()[1]

    async def _accept(self, listening: socket.socket) -> None:
        with listening:
            while True:
                client, _ = await asyncio.get_running_loop().sock_accept(listening)
                entry = Connection(len(self._entries), time.monotonic() - self._begin_s)
                self._entries.append(entry)
                task = asyncio.create_task(self._carry(client, entry))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, client: socket.socket, entry: Connection) -> None:
        faulty = self._is_faulty()
        server = socket.socket()
        try:
            await self._connect(client, server, entry, faulty)
            entry.end = "closed"
        except _CutError:
            entry.end = "cut"
        except asyncio.CancelledError:
            entry.end = "cut"
            raise
        except OSError:
            entry.end = "reset" if entry.end == "open" else entry.end
        finally:
            entry.ended_s = time.monotonic() - self._begin_s
            for end in (client, server):
                if entry.end != "closed":
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.close()

    def _is_faulty(self) -> bool:
        link = self.link
        if link.stall_after_bytes is None and link.reset_after_bytes is None:
            return link.faulty_connections is None  # a fault may still be configured
        self._faults += 1
        return link.faulty_connections is None or self._faults <= link.faulty_connections

    async def _connect(
        self, client: socket.socket, server: socket.socket, entry: Connection, faulty: bool
    ) -> None:
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if faulty and self.link.reset_after_bytes == 0:
            raise _CutError
        ready = time.monotonic() + 2 * self.link.delay_s
        try:
            await asyncio.get_running_loop().sock_connect(server, self._target)
        except OSError:
            entry.end = "no server"
            raise
        await asyncio.sleep(max(0.0, ready - time.monotonic()))
        up = _Direction(self, entry, "up", faulty=False)
        down = _Direction(self, entry, "down", faulty=faulty)
        works = (
            up.receive(client),
            up.deliver(server),
            down.receive(server),
            down.deliver(client),
        )
        try:
            async with asyncio.TaskGroup() as group:
                for work in works:
                    group.create_task(work)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def stall_ends(self, stall_s: float | None) -> None:
        """Wait ``stall_s``, at most until the stall is configured away."""
        deadline = None if stall_s is None else time.monotonic() + stall_s
        while self.link.stall_after_bytes is not None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reconfigured.wait(), left)


async def _main(host: str, port: str, link: str) -> None:
    await _Server((host, int(port)), Link(**json.loads(link))).run()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
