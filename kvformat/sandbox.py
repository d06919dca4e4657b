"""A video decoder in a process of its own, with limits on memory and time (VER-4, section 15).

A crash, a hang or a refusal in the child becomes an error about the segment; the parent goes on.
Parent and child exchange length-prefixed messages over pipes: JSON heads and raw bytes, nothing
that could run code.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from kvformat.codecs.base import Bytes, Codec, Decoded, Payload, SegmentShape
from kvformat.errors import InvalidError, UnsupportedError
from kvformat.layout import Layout

MEMORY_BYTES: Final = 4 * 2**30
SECONDS_PER_SEGMENT: Final = 120.0
_LENGTH: Final = struct.Struct("<Q")
_START: Final = "from kvformat.sandbox import serve; serve()"


class _Gone(Exception):  # noqa: N818 - private signal: the child has ended
    pass


def _send(pipe: IO[bytes], *parts: Payload) -> None:
    for part in parts:
        pipe.write(_LENGTH.pack(len(part)))
        pipe.write(part)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_LENGTH.size)
    if len(head) != _LENGTH.size:
        raise _Gone
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) != length:
        raise _Gone
    return data


def _limit() -> None:
    """Memory of the child; its time is the parent's business."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve() -> None:
    """The child's loop: decode what arrives on standard input until it closes."""
    from kvformat.codecs.registry import CODECS

    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    _limit()
    while True:
        try:
            request = json.loads(_receive(source))
            payload = _receive(source)
        except _Gone:
            return
        layout = request.pop("layout")
        codec = request.pop("codec")
        shape = SegmentShape(**request, layout=Layout(**layout) if layout else None)
        try:
            decoded = CODECS[codec].decode(payload, shape, "segment", strict=True)
        except (InvalidError, UnsupportedError) as error:
            _send(target, json.dumps(error.as_dict()).encode(), b"")
        except MemoryError:
            _send(target, json.dumps({"code": "memory"}).encode(), b"")
        else:
            head = {"clean": decoded.clean, "ranked": decoded.ranked}
            data = np.ascontiguousarray(decoded.integers).reshape(-1).data
            _send(target, json.dumps(head).encode(), data)


class DecoderProcess:
    """One child; used by one thread at a time."""

    def __init__(self) -> None:
        environment = dict(os.environ)
        home = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join([*filter(os.path.isabs, sys.path), home])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START],  # -P: nothing is imported from where one stands
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def decode(self, codec: str, payload: Payload, shape: SegmentShape, where: str) -> Decoded:
        """The integers of one segment; raises ``segment.bitstream`` when the child dies."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the pipes of the decoder are closed")
        head = {
            "layers": shape.layers,
            "tokens": shape.tokens,
            "heads": shape.heads,
            "head_dim": shape.head_dim,
            "item_bytes": shape.item_bytes,
            "layout": asdict(shape.layout) if shape.layout else None,
            "codec": codec,
        }
        timer = threading.Timer(SECONDS_PER_SEGMENT, self._process.kill)
        timer.start()
        try:
            _send(self._process.stdin, json.dumps(head).encode(), payload)
            answer: dict[str, Any] = json.loads(_receive(self._process.stdout))
            data = _receive(self._process.stdout)
        except (_Gone, OSError, ValueError):
            self.close()
            raise InvalidError(
                "segment.bitstream",
                "the decoder process crashed, hung or ran out of memory",
                where=where,
                found=f"exit status {self._process.returncode}",
            ) from None
        finally:
            timer.cancel()
        return _answer(answer, data, shape, where)

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None


def _answer(answer: dict[str, Any], data: bytes, shape: SegmentShape, where: str) -> Decoded:
    code = answer.get("code")
    if code == "codec.unavailable":
        raise UnsupportedError(code, str(answer["message"]), next_step=str(answer["next_step"]))
    if code is not None or len(data) != shape.integers_bytes:
        known = code == "segment.bitstream"
        raise InvalidError(
            "segment.bitstream",
            str(answer["message"]) if known else "the decoder gave no usable answer",
            where=where,
            expected=answer.get("expected"),
            found=answer.get("found"),
        )
    integers: Bytes = np.frombuffer(data, np.uint8).reshape(shape.integers_shape)
    return Decoded(integers, ranked=bool(answer["ranked"]), clean=bool(answer["clean"]))


class SandboxedCodec:
    """A codec whose ``decode`` runs in child processes, one per thread that asks at a time."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name = codec.name
        self._idle: queue.SimpleQueue[DecoderProcess] = queue.SimpleQueue()

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """In this process: the input is the caller's own."""
        return self._codec.encode(integers, shape)

    def decode(
        self, payload: Payload, shape: SegmentShape, where: str, *, strict: bool = False
    ) -> Decoded:
        """In a child process, always strictly."""
        del strict
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = DecoderProcess()
        try:
            return process.decode(self.name, payload, shape, where)
        finally:
            if process.alive:
                self._idle.put(process)
            else:
                process.close()

    def encoder(self) -> str:
        """As the codec says."""
        return self._codec.encoder()

    def working_bytes(self, shape: SegmentShape) -> int:
        """As the codec says."""
        return self._codec.working_bytes(shape)

    def close(self) -> None:
        """End all idle children."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()
