"""The encoder process: reads jobs from a socket, encodes, publishes, answers.

It is started as a fresh interpreter, not forked and not through ``multiprocessing``: serving
engines run in daemonic processes, which may have no ``multiprocessing`` children, and their main
module must not be imported a second time. It ends when the socket does, so it never outlives its
parent by more than the job at hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import Final

from kvformat.store.handover import SharedMemory, receive, send
from kvformat.store.jobs import Answer, ConvertJob, EncodeJob, EvictJob, Hello
from kvformat.store.publishing import Publisher, open_backend

PROGRAM: Final = "import sys; from kvformat.store.encoder import main; main(int(sys.argv[1]))"


def main(descriptor: int) -> None:
    """Serve jobs on an inherited socket until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then closes us
    with (
        socket.socket(fileno=descriptor) as connection,
        contextlib.suppress(EOFError, ConnectionError),
    ):
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    hello, _ = receive(connection)
    if not isinstance(hello, Hello):
        sys.exit(f"not a greeting: {type(hello).__name__}")
    with contextlib.suppress(OSError):
        os.nice(hello.options.encoder_nice)
    publisher = Publisher(open_backend(hello.url, hello.options), hello.options)
    while True:
        job, descriptors = receive(connection)
        send(connection, _work(publisher, job, descriptors))


def _work(publisher: Publisher, job: object, descriptors: list[int]) -> Answer:
    if isinstance(job, EncodeJob):
        memory = SharedMemory(descriptors[0], job.spec.size_bytes)
        try:
            return publisher.encode(job, memory.cache(job.spec))
        finally:
            memory.close()
    if isinstance(job, ConvertJob):
        return publisher.convert(job)
    if isinstance(job, EvictJob):
        return publisher.look()
    raise TypeError(type(job).__name__)
