"""Codec ``hevc`` of section 10.4 for small pictures, through PyAV where it is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Json = dict[str, Any]
Bytes = NDArray[np.uint8]
FILLER: Final = 128
_X265: Final = (
    "log-level=none:lossless=1:info=0:hash=1:bframes=0:ref=1:keyint=-1:scenecut=0:rc-lookahead=0"
    ":wpp=0:pools=none:frame-threads=1"
)


@functools.cache
def available() -> bool:
    """Whether HEVC streams can be made and decoded here."""
    if importlib.util.find_spec("av") is None:
        return False
    try:
        encode(np.full((1, 3, 144, 144), FILLER, np.uint8))
    except (ImportError, ValueError, OSError):  # a build without libx265
        return False
    return True


def _places(layout: Json, tokens: int, channels: int) -> tuple[Any, Any, Any]:
    """Picture, y and x of every ``[token, channel]``."""
    (fh, fw), (gr, gc), (th, tw) = layout["fold"], layout["grid"], layout["tile"]
    t, k = np.arange(tokens)[:, None], np.arange(channels)[None]
    b, g = t % (fh * fw), t // (fh * fw)
    if layout["order"] == "time":
        f, site = g % layout["frames"], g // layout["frames"]
    else:
        site, f = g % (gr * gc), g // (gr * gc)
    y = ((site // gc) * th + k // tw) * fh + b // fw
    x = ((site % gc) * tw + k % tw) * fw + b % fw
    return f, y, x


def planes_of(columns: Bytes, layout: Json) -> Bytes:
    """Integers ``[layer, token, channel]`` in rank order to pictures ``[frame, 3, y, x]``."""
    shape = (layout["frames"], 3, layout["height"], layout["width"])
    planes = np.full(shape, FILLER, np.uint8)
    f, y, x = _places(layout, *columns.shape[1:])
    for layer, values in enumerate(columns):
        planes[f, layer, y, x] = values
    return planes


def columns_of(planes: Bytes, layout: Json, layers: int, tokens: int, channels: int) -> Bytes:
    """The way back."""
    f, y, x = _places(layout, tokens, channels)
    return np.stack([planes[f, layer, y, x] for layer in range(layers)])


def _rows(picture: Any) -> Iterator[Any]:
    for plane in picture.planes:
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        yield rows[: picture.height, : picture.width]


def encode(planes: Bytes) -> bytes:
    """A lossless stream with a picture hash behind each picture."""
    import av

    frames, _, height, width = planes.shape
    context: Any = av.CodecContext.create("libx265", "w")
    context.width, context.height, context.pix_fmt = width, height, "yuv444p"
    context.time_base, context.thread_count = Fraction(1, 25), 1
    context.options = {"preset": "ultrafast", "x265-params": _X265}
    packets: list[Any] = []
    for index in range(frames):
        picture: Any = av.VideoFrame(width, height, "yuv444p")
        for target, source in zip(_rows(picture), planes[index], strict=True):
            target[...] = source
        picture.pts = index
        packets += context.encode(picture)
    packets += context.encode(None)
    return b"".join(bytes(packet) for packet in packets)


def decode(stream: bytes) -> Bytes:
    """Pictures ``[frame, 3, height, width]`` of a valid stream."""
    import av

    context: Any = av.CodecContext.create("hevc", "r")
    context.thread_type, context.thread_count = "NONE", 1
    pictures = [
        np.stack(list(_rows(picture)))
        for packet in (*context.parse(stream), *context.parse(None), None)
        for picture in context.decode(packet)
    ]
    return np.stack(pictures)
