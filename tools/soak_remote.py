"""Many random reads over HTTP from a server that fails at random: nothing lost, nothing leaked.

::

    python tools/soak_remote.py --reads 10000 --seed 1 --json soak.json

Threads share a few artifacts and call ``read``, ``read_into``, ``stream``, streams that are closed
in the middle, and reads that another thread cancels. Every value that comes back is compared with
the local file. The server, a process of its own, cuts and resets connections, stalls, answers 503,
ends bodies early and flips bits. In the end threads, file descriptors, connections and memory are
counted. Ends with status 1 if a byte was wrong, an error had a code that no fault explains, or
anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import fsspec
import numpy as np
import psutil
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

import kvformat
from kvformat import KvformatError, Transport

LAYERS, TOKENS, HEADS, DIMS, SEGMENT_TOKENS = 6, 4_096, 2, 32, 128
TRACKS: Final = ("near-lossless/zstd", "exact/zstd", "exact/stored")
ORDERS: Final = ("stored", "token-major", "layer-major")
MOST_TOKENS: Final = 600
FAULTS: Final = {
    "cut": 0.03, "reset": 0.03, "unavailable": 0.03, "drop": 0.02, "chunk": 0.02,
    "stall": 0.004, "flip": 0.004,
}  # fmt: skip
"""How likely a reply has each fault. A stall costs ``STALL_S`` of waiting."""
STALL_S: Final = 0.3
EXPLAINED: Final = ("io.timeout", "io.read", "io.short", "segment.digest", "set.digest")
"""What two faults in a row may end in; everything else is a bug."""
PIECE_BYTES: Final = 65_536
MOST_GROWTH_BYTES: Final = 64 * 2**20


# The server


def reply_head(status: str, *headers: str) -> bytes:
    """Status line and header fields."""
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


async def serve(path: Path, seed: int) -> None:
    """Serve one file with faults; print the port, and counts once standard input ends."""
    data = path.read_bytes()
    choice = random.Random(seed)
    counts: Counter[str] = Counter()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await answer(data, choice, counts, reader, writer):
                pass
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(counts), flush=True)


async def answer(
    data: bytes,
    choice: random.Random,
    counts: Counter[str],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> bool:
    """Answer one request; returns whether the connection goes on."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    asked = head.lower().partition("range: bytes=")[2].partition("\r\n")[0]
    first, last = (int(text) for text in asked.split("-"))
    last = min(last, len(data) - 1)
    body = data[first : last + 1]
    counts["requests"] += 1
    names, weights = list(FAULTS), list(FAULTS.values())
    fault = choice.choices(["", *names], [1 - sum(weights), *weights])[0]
    counts[fault or "good"] += 1
    if fault == "drop":
        return False
    if fault == "unavailable":
        writer.write(reply_head("503 Busy", "Retry-After: 0", "Content-Length: 0"))
        await writer.drain()
        return True
    said = f"Content-Range: bytes {first}-{last}/{len(data)}"
    length = "Transfer-Encoding: chunked" if fault == "chunk" else f"Content-Length: {len(body)}"
    writer.write(reply_head("206 Partial Content", said, 'ETag: "soak"', length))
    sent = body if fault in ("", "flip") else body[: choice.randrange(len(body))]
    if fault == "flip":
        place = choice.randrange(len(body))
        sent = body[:place] + bytes([body[place] ^ 1 << choice.randrange(8)]) + body[place + 1 :]
    for start in range(0, len(sent), PIECE_BYTES):
        piece = sent[start : start + PIECE_BYTES]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if fault == "chunk" else piece)
        await writer.drain()
    if fault == "chunk":
        writer.write(b"0\r\n\r\n")  # in good order, only too early
        await writer.drain()
    elif fault == "stall":
        await reader.read(1)
    elif fault == "reset":
        writer.transport.abort()
    return fault in ("", "flip", "chunk")


# The reader


@dataclass
class Tally:
    """What happened; shared between threads under ``lock``."""

    reads: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    values: int = 0
    requests: int = 0
    retries: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Reader:
    """Random reads of shared artifacts, each compared with the truth."""

    def __init__(self, path: Path, url: str, artifacts: int, retries: int) -> None:
        transport = Transport(
            connect_timeout_s=5.0, stall_timeout_s=STALL_S, retries=retries, connections=4
        )
        self.tally = Tally()
        with kvformat.open(path) as twin:
            self.truth = {track: twin.read(track=track).kv for track in TRACKS}
        self.artifacts = [self._opened(url, transport) for _ in range(artifacts)]

    @staticmethod
    def _opened(url: str, transport: Transport) -> kvformat.Artifact:
        """The front has no second try for damage, so a flipped bit there is asked for anew."""
        for _ in range(20):
            with contextlib.suppress(kvformat.InvalidError):
                return kvformat.open(url, transport=transport)
        raise RuntimeError("the front never came whole")

    def once(self, seed: int) -> None:
        """One read; what goes wrong ends up in the tally."""
        choice = random.Random(seed)
        begin = choice.randrange(TOKENS)
        low = choice.randrange(LAYERS)
        options: dict[str, Any] = {
            "tokens": (begin, min(TOKENS, begin + choice.randrange(1, MOST_TOKENS))),
            "layers": (low, choice.randrange(low, LAYERS) + 1),
            "track": choice.choice(TRACKS),
            "workers": choice.choice((1, 2)),
        }
        act = choice.choice((self._read, self._into, self._prefix, self._stream, self._cancel))
        name = act.__name__.strip("_")
        try:
            act(choice.choice(self.artifacts), options, choice)
        except KvformatError as error:
            self._failed(name, error)
        except BaseException as error:
            self._wrong(f"{name} {options}: {error!r}")
        with self.tally.lock:
            self.tally.reads[name] += 1

    def _failed(self, name: str, error: KvformatError) -> None:
        with self.tally.lock:
            self.tally.errors[error.code] += 1
        if error.code not in EXPLAINED:
            self._wrong(f"{name}: {error}")

    def _wrong(self, text: str) -> None:
        with self.tally.lock:
            self.tally.wrong.append(text)

    def _right(self, options: dict[str, Any]) -> np.ndarray[Any, Any]:
        (begin, end), (low, high) = options["tokens"], options["layers"]
        return self.truth[options["track"]][:, low:high, begin:end].view(np.uint16)

    def _compare(self, found: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> None:
        if not np.array_equal(found.view(np.uint16), right):
            raise AssertionError("the bits differ")
        with self.tally.lock:
            self.tally.values += right.size

    def _count(self, report: Any) -> None:
        with self.tally.lock:
            self.tally.requests += report.traffic.requests
            self.tally.retries += report.traffic.retries

    def _read(self, artifact: kvformat.Artifact, options: dict[str, Any], _: Any) -> None:
        restored = artifact.read(**options)
        self._count(restored.report)
        self._compare(restored.kv, self._right(options))

    def _into(self, artifact: kvformat.Artifact, options: dict[str, Any], choice: Any) -> None:
        right = self._right(options)
        buffer = np.full(right.shape, 0xA5A5, np.uint16)
        self._count(artifact.read_into(buffer, **options, order=choice.choice(ORDERS)))
        self._compare(buffer, right)

    def _prefix(self, artifact: kvformat.Artifact, options: dict[str, Any], choice: Any) -> None:
        right = self._right(options)
        buffer = np.full(right.shape, 0xA5A5, np.uint16)
        report = artifact.read_into(
            buffer, **options, order=choice.choice(ORDERS), on_error="prefix"
        )
        self._count(report)
        for failure in report.validity.failures:
            self._failed("prefix", failure.error)
        for place, end in enumerate(report.validity.layers.values()):
            good = end - options["tokens"][0]
            self._compare(buffer[:, place, :good], right[:, place, :good])

    def _stream(self, artifact: kvformat.Artifact, options: dict[str, Any], choice: Any) -> None:
        """To the end, or closed behind some blocks."""
        right, (begin, _), low = self._right(options), options["tokens"], options["layers"][0]
        most = choice.choice((None, None, choice.randrange(6)))
        seen = 0
        with artifact.stream(**options, order=choice.choice(ORDERS)) as stream:
            for number, block in enumerate(stream):
                kind = 0 if block.group.role == "key" else 1
                layers = slice(block.layers[0] - low, block.layers[-1] + 1 - low)
                start = block.token_start - begin
                self._compare(
                    block.array, right[kind, layers, start : start + block.array.shape[1]]
                )
                seen += block.array.size
                if number == most:
                    return
        if seen != right.size:
            raise AssertionError(f"{seen} values of {right.size}")

    def _cancel(self, artifact: kvformat.Artifact, options: dict[str, Any], choice: Any) -> None:
        """Another thread cancels, early, late or never."""
        cancellation = kvformat.Cancellation()
        timer = threading.Timer(choice.random() * 0.02, cancellation.cancel)
        timer.start()
        try:
            self._compare(
                artifact.read(**options, cancellation=cancellation).kv, self._right(options)
            )
        except kvformat.UsageError as error:
            if not cancellation.cancelled or "cancelled" not in error.message:
                raise
        finally:
            timer.cancel()
            timer.join()


def write_sample(path: Path) -> None:
    """An artifact of some megabytes with several tracks."""
    cache = np.random.default_rng(3).standard_normal((2, LAYERS, TOKENS, HEADS, DIMS))
    identity = kvformat.Identity(kvformat.Model("soak"), LAYERS, "float16", "unbound")
    kvformat.write(
        path,
        cache.astype(np.float16),
        identity=identity,
        tracks=list(TRACKS),
        segment_tokens=SEGMENT_TOKENS,
    )


def settled() -> dict[str, int]:
    """Threads of reads, connections in use, and descriptors once idle connections are closed."""
    sessions = [fs._session for fs in HTTPFileSystem._cache.values() if fs._session is not None]
    in_use = sum(len(session.connector._acquired) for session in sessions)
    for session in sessions:
        sync(fsspec.asyn.get_loop(), session.close)
    HTTPFileSystem.clear_instance_cache()
    names = [thread.name for thread in threading.enumerate()]
    return {
        "reading_threads": sum(name.startswith("kvformat") for name in names),
        "connections": in_use,
        "descriptors": psutil.Process().num_fds(),
    }


def soak(reads: int, seed: int, threads: int, retries: int = 8) -> dict[str, Any]:
    """Run it, and return the figures; ``ok`` says whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "soak.kvf"
        write_sample(path)
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(path), "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/soak.kvf"
            figures = _run(path, url, reads=reads, seed=seed, threads=threads, retries=retries)
            said, _ = server.communicate("", timeout=30)
            figures["server"] = json.loads(said)
        finally:
            server.kill()
            server.wait()
    return figures


def _run(
    path: Path, url: str, *, reads: int, seed: int, threads: int, retries: int
) -> dict[str, Any]:
    fsspec.asyn.get_loop()
    before = settled()
    process = psutil.Process()
    reader = Reader(path, url, artifacts=3, retries=retries)
    started = time.monotonic()
    rss_bytes: list[int] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="soak") as pool:
        for start in range(0, reads, 500):
            numbers = range(start, min(start + 500, reads))
            list(pool.map(lambda number: reader.once(seed * 10**9 + number), numbers))
            rss_bytes.append(process.memory_info().rss)
    took_s = time.monotonic() - started
    for artifact in reader.artifacts:
        artifact.close()
    after = settled()
    tally = reader.tally
    warm = rss_bytes[len(rss_bytes) // 4]
    figures: dict[str, Any] = {
        "reads": sum(tally.reads.values()),
        "kinds": dict(tally.reads),
        "values_compared": tally.values,
        "errors": dict(tally.errors),
        "wrong": tally.wrong[:20],
        "repeated_requests": tally.retries,
        "seconds": round(took_s, 1),
        "before": before,
        "after": after,
        "rss_growth_bytes": rss_bytes[-1] - warm,
    }
    whole = figures["reads"] == reads and after == before
    grown = figures["rss_growth_bytes"] > MOST_GROWTH_BYTES
    figures["ok"] = whole and not tally.wrong and not grown
    return figures


def summary(figures: dict[str, Any]) -> str:
    """One line."""
    server, left = figures["server"], figures["after"]["descriptors"]
    faults = server["requests"] - server.get("good", 0)
    return (
        f"{'ok' if figures['ok'] else 'FAILED'}: {figures['reads']:,} reads in "
        f"{figures['seconds']:,} s, {figures['values_compared']:,} values compared, "
        f"{server['requests']:,} requests of which {faults:,} had a fault, "
        f"{len(figures['wrong'])} wrong, {sum(figures['errors'].values())} honest errors "
        f"{figures['errors']}, {left - figures['before']['descriptors']} descriptors left, "
        f"{figures['after']['reading_threads']} threads left, "
        f"memory {figures['rss_growth_bytes'] / 2**20:+.1f} MiB after the first quarter"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.serve, given.seed))
        return 0
    figures = soak(given.reads, given.seed, given.threads)
    for text in figures["wrong"]:
        print(text, file=sys.stderr)
    print(summary(figures))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
