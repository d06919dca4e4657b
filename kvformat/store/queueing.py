"""The parent's side of the encoder: a bounded queue, a thread that feeds it, restarts."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvformat.store.encoder import PROGRAM
from kvformat.store.handover import SharedMemory, receive, send
from kvformat.store.jobs import Answer, ConvertJob, EncodeJob, EvictJob, Hello, Written
from kvformat.store.metrics import Metrics
from kvformat.store.options import StoreOptions
from kvformat.store.results import Refusal

JOB_TIMEOUT_S: Final = 900.0
RESTART_S: Final = (0.0, 1.0, 5.0, 30.0)
"""How long to wait before the encoder is started for the n-th time in a row without success."""
_log = logging.getLogger("kvformat.store")


@dataclass(slots=True)
class Waiting:
    """A job in the queue, with the memory of its tensors."""

    job: EncodeJob
    memory: SharedMemory


class EncoderQueue:
    """Jobs for one encoder process, which is started when the first one comes.

    Everything that a job's outcome says goes to ``metrics``. ``idle`` is asked for a conversion
    when nothing has waited for ``idle_s``. Safe to share between threads.
    """

    def __init__(
        self,
        url: str,
        options: StoreOptions,
        metrics: Metrics,
        idle: Callable[[], ConvertJob | None] = lambda: None,
    ) -> None:
        self._hello = Hello(url, options)
        self._options, self._metrics, self._idle = options, metrics, idle
        self._change = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._running: Waiting | None = None
        self._held_bytes = 0
        self._paths: Counter[str] = Counter()
        self._closing = self._stopping = False
        self._evict = False
        self._process = _Process(self._hello)
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()

    def pending(self, path: str) -> bool:
        """Whether an object of that path is on its way."""
        with self._change:
            return self._paths[path] > 0

    def reserve(self, size_bytes: int) -> Refusal | None:
        """Take room for tensors of that size, dropping older jobs if that is the policy."""
        with self._change:
            if self._closing:
                return Refusal.CLOSED
            drop = self._options.when_full == "drop-oldest"
            limit = self._options.queue_bytes
            while self._held_bytes + size_bytes > limit and drop and self._waiting:
                self._drop(self._waiting.popleft(), Refusal.DROPPED)
            if self._held_bytes + size_bytes > limit:
                return Refusal.QUEUE_FULL
            self._held_bytes += size_bytes
            self._gauges()
        return None

    def cancel(self, size_bytes: int) -> None:
        """Give room back that was not used."""
        with self._change:
            self._held_bytes -= size_bytes
            self._gauges()

    def submit(self, job: EncodeJob, memory: SharedMemory) -> bool:
        """Queue a job for which room was reserved; False if the queue was closed meanwhile."""
        with self._change:
            if self._closing:
                self._held_bytes -= memory.size_bytes
                memory.close()
                return False
            self._waiting.append(Waiting(job, memory))
            self._paths.update(_paths(job))
            self._metrics.count("puts", by=len(job.targets))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._feed, name="kvformat-store-queue", daemon=True
                )
                self._thread.start()
            self._gauges()
            self._change.notify_all()
        return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or runs."""
        with self._change:
            return self._change.wait_for(
                lambda: not self._waiting and self._running is None, timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Take nothing new, give what waits that long, drop the rest, end the process."""
        with self._change:
            self._closing = True
        self.drain(timeout_s)
        with self._change:
            self._stopping = True
            while self._waiting:
                self._drop(self._waiting.popleft(), Refusal.CLOSED)
            self._change.notify_all()
        self._process.end()
        if self._thread is not None:
            self._thread.join(timeout_s + 5.0)

    def _drop(self, item: Waiting, refusal: Refusal) -> None:
        self._finish(item)
        self._metrics.count("refusals", refusal.value, by=len(item.job.targets))

    def _finish(self, item: Waiting) -> None:
        self._held_bytes -= item.memory.size_bytes
        item.memory.close()
        self._paths.subtract(_paths(item.job))
        self._paths = +self._paths

    def _gauges(self) -> None:
        self._metrics.set("queue_bytes", self._held_bytes)
        running = [self._running] if self._running is not None else []
        extents = sum(len(item.job.targets) for item in [*self._waiting, *running])
        self._metrics.set("queue_extents", extents)

    def _feed(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: bool(self._waiting) or self._stopping, self._options.idle_s or None
                )
                if self._stopping:
                    return
                item = self._running = self._waiting.popleft() if self._waiting else None
            if item is None:
                self._work_idle()
                continue
            answer = self._ask(item.job, item.memory)
            with self._change:
                self._account(item, answer)
                self._running = None
                self._finish(item)
                self._gauges()
                self._last = time.monotonic()
                self._change.notify_all()

    def _work_idle(self) -> None:
        job = self._idle()
        if job is None:
            return
        answer = self._ask(job, None)
        if answer is not None:
            self._enter(answer.written)

    def _ask(
        self, job: EncodeJob | ConvertJob | EvictJob, memory: SharedMemory | None
    ) -> Answer | None:
        """The answer, None if the encoder died over the job or was too slow."""
        if not self._wait_before_start():
            return None
        try:
            return self._process.ask(job, memory)
        except (OSError, EOFError, subprocess.SubprocessError) as error:
            self._process.kill()
            if not self._stopping:
                self._metrics.count("encoder_restarts")
                _log.warning("the encoder process ended over a job: %s", error or "closed")
            return None

    def _wait_before_start(self) -> bool:
        """After crashes in a row, wait longer and longer; False if the queue is closed."""
        crashes = min(self._process.crashes, len(RESTART_S) - 1)
        with self._change:
            self._change.wait_for(lambda: self._stopping, RESTART_S[crashes])
            return not self._stopping

    def _account(self, item: Waiting, answer: Answer | None) -> None:
        if answer is None:
            refusal = Refusal.CLOSED if self._stopping else Refusal.ENCODER
            self._metrics.count("refusals", refusal.value, by=len(item.job.targets))
            return
        self._enter(answer.written)
        for name, value in answer.gauges.items():
            self._metrics.set(name, value)
        for name, value in answer.counts.items():
            self._metrics.count(name, by=value)

    def _enter(self, written: tuple[Written, ...]) -> None:
        for one in written:
            if one.refusal is not None:
                self._metrics.count("refusals", one.refusal.value)
                if one.refusal not in (Refusal.PRESENT, Refusal.WINDOW):
                    _log.warning("an extent is not stored (%s): %s", one.refusal.value, one.detail)
                continue
            self._metrics.count("published", one.codec)
            self._metrics.count("source_bytes", by=one.source_bytes)
            self._metrics.count("first_bytes", by=one.first_bytes)
            self._metrics.count("written_bytes", by=one.file_bytes)
            self._metrics.observe("encode_seconds", one.seconds, one.codec)


def _paths(job: EncodeJob) -> list[str]:
    """All names that a job is going to make."""
    return [name.path for target in job.targets for name in job.names(target)]


class _Process:
    """The child and the socket to it. Used by one thread, but ``end`` and ``kill`` by any."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ended = False
        self.crashes = 0

    @property
    def pid(self) -> int | None:
        """The child's id while it runs."""
        with self._lock:
            return None if self._child is None else self._child.pid

    def ask(self, job: object, memory: SharedMemory | None) -> Answer:
        """Send a job and wait for its answer."""
        connection = self._connection()
        send(connection, job, () if memory is None else (memory.descriptor,))
        answer, _ = receive(connection)
        self.crashes = 0
        found: Answer = answer
        return found

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._ended:
                raise EOFError("closed")
            if self._socket is not None:
                return self._socket
            mine, theirs = socket.socketpair()
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            mine.settimeout(JOB_TIMEOUT_S)
            self._socket = mine
            weakref.finalize(self, _end_child, self._child, mine)
        send(mine, self._hello)
        return mine

    def kill(self) -> None:
        """After a failure: the next ``ask`` starts another."""
        with self._lock:
            child, connection = self._child, self._socket
            self._child = self._socket = None
            self.crashes += 1
        if child is not None and connection is not None:
            _end_child(child, connection, at_once=True)

    def end(self) -> None:
        """For good; a job that runs gets a moment and is then stopped."""
        with self._lock:
            self._ended = True
            child, connection = self._child, self._socket
        if child is not None and connection is not None:
            _end_child(child, connection)


def _end_child(
    child: subprocess.Popen[bytes], connection: socket.socket, *, at_once: bool = False
) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    try:
        child.wait(0.0 if at_once else 2.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
