"""The interface of all decoders of pictures, and what they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvformat.codecs.bitstream import parse_nal_units
from kvformat.errors import InvalidError, UnsupportedError

PLANES: Final = 3
_HASH_SEI: Final = 40
_FIRST_SLICE: Final = 0x80


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture: three uint8 tensors ``[height, width]`` of one pitch in device memory.

    Valid until the next picture is asked for; work on it must be queued on the device's default
    stream by then.
    """

    index: int
    planes: tuple[Any, ...]


class Session(Protocol):
    """A decoder for one picture size, used by one thread at a time."""

    def decode(self, payload: bytes, frames: int, where: str) -> Iterator[Picture]:
        """The pictures of a checked payload in order; run it to its end.

        Raises ``InvalidError`` (``segment.bitstream``) for a stream that the decoder refuses or
        that gives another number or size of pictures, ``UnsupportedError`` where the device is
        at fault.
        """

    def close(self) -> None:
        """Give back the engine and its memory."""


class FrameDecoder(Protocol):
    """A way to decode pictures. Safe to share between threads."""

    name: str
    device: Any
    sessions: int
    """How many sessions keep the device busy."""

    def open(self, width: int, height: int) -> Session:
        """A new session; raises ``codec.unavailable`` where the device refuses the size."""


def access_units(payload: bytes, where: str) -> list[bytes]:
    """One Annex B chunk per picture; the parameter sets go with the first."""
    chunks: list[bytes] = []
    begin = 0
    ended = False
    for unit in parse_nal_units(payload, where):
        start = unit.start - 3
        if payload[start - 1 : start] == b"\0":
            start -= 1
        if ended:
            chunks.append(payload[begin:start])
            begin = start
        ended = unit.kind == _HASH_SEI
    return [*chunks, payload[begin:]]


def wrong_count(where: str, expected: int, found: int) -> InvalidError:
    """HEV-8."""
    return InvalidError(
        "segment.bitstream",
        "wrong number of decoded pictures",
        where=where,
        expected=expected,
        found=found,
    )


def refused(message: str, *, found: object, where: str = "", expected: object = None,
            next_step: str = "") -> UnsupportedError:  # fmt: skip
    """What the device cannot do; never answered by decoding on the CPU."""
    step = next_step or "Read another track (zstd), or choose decoder='software'"
    return UnsupportedError(
        "codec.unavailable", message, where=where, expected=expected, found=found, next_step=step
    )
