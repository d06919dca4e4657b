"""Pictures for ``inspect --html``: integers of a track's first segments as grey images."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.artifact import Artifact
from kvformat.codecs.base import Codec
from kvformat.codecs.registry import CODECS
from kvformat.errors import KvformatError
from kvformat.layout import FILLER, place
from kvformat.sandbox import SandboxedCodec
from kvformat.segments import Segment, SegmentContext, decode_segment
from kvformat.tables import SegmentRecord
from kvformat.tracks import Track

Grey = NDArray[np.uint8]
LARGEST_SIDE: Final = 512
GROUPS: Final = 2
PLANES: Final = "Y", "Cb", "Cr"


@dataclass(frozen=True, slots=True)
class Picture:
    """One grey image ``[height, width]`` of integers and what it shows."""

    caption: str
    grey: Grey

    @property
    def png(self) -> bytes:
        """The image as a PNG file, with its contrast stretched."""
        return png(stretched(self.grey))


@dataclass(frozen=True, slots=True)
class Album:
    """Pictures of one track, or what went wrong."""

    track: str
    pictures: list[Picture]
    problems: list[str]


def albums(artifact: Artifact) -> list[Album]:
    """Of the first video track and of the first other one; strangers' video is decoded apart."""
    tracks = artifact.manifest.tracks
    video = next((item for item in tracks if "hevc" in item.codecs), None)
    other = next((item for item in tracks if "hevc" not in item.codecs), None)
    with closing(SandboxedCodec(CODECS["hevc"])) as sandbox:
        return [_album(artifact, item, sandbox) for item in (video, other) if item is not None]


def _album(artifact: Artifact, track: Track, sandbox: Codec) -> Album:
    pictures: list[Picture] = []
    problems: list[str] = []
    try:
        records = list(_first_records(artifact, track))
    except KvformatError as error:
        return Album(track.name, [], [str(error)])
    for record in records:
        try:
            context = artifact.context(track, record, restoring=False)
            codec = sandbox if context.codec == "hevc" else None
            segment = decode_segment(context, artifact.segment_bytes(record), codec=codec)
            pictures += _pictures(segment)
        except KvformatError as error:
            problems.append(f"segment {record.index}: {error}")
    return Album(track.name, pictures, problems)


def _first_records(artifact: Artifact, track: Track) -> Iterator[SegmentRecord]:
    """The first segment of each of the first groups that have tokens."""
    table = artifact.segment_table(track)
    groups = table.records["group"]
    for group in np.unique(groups)[:GROUPS]:
        yield table[int(np.flatnonzero(groups == group)[0])]


def _pictures(segment: Segment) -> list[Picture]:
    context = segment.context
    if context.layout is not None:
        return _planes(segment)
    q = segment.decoded.integers[0]
    what = "stored order of channels" if segment.decoded.ranked else "channels"
    if q.ndim == 4:  # exact bytes: the last one has sign and exponent
        q, what = q[..., -1], "last byte of each channel"
    rows = q.transpose(2, 1, 0).reshape(-1, len(q))  # [rank, head] as zstd has them
    return [_cropped(f"{_layer(context, 0)}: rows are the {what}, columns tokens", rows)]


def _planes(segment: Segment) -> list[Picture]:
    """The first picture of a video segment, plane by plane."""
    layout, shape = segment.context.layout, segment.context.shape()
    if layout is None:
        return []
    planes = np.full((layout.frames, layout.height, layout.width), FILLER, np.uint8)
    found = []
    for layer in range(shape.layers):
        planes[:] = FILLER
        place(layout, segment.decoded.integers[layer].reshape(shape.tokens, -1), planes)
        what = f"plane {PLANES[layer]} of picture 1 of {layout.frames:,}"
        found.append(_cropped(f"{_layer(segment.context, layer)}: {what}", planes[0]))
    return found


def _layer(context: SegmentContext, index: int) -> str:
    layer = context.group.layers[context.record.cell.layer_index + index]
    return f"{context.group.role} of layer {layer}"


def _cropped(caption: str, grey: NDArray[Any]) -> Picture:
    part: Grey = np.array(grey[:LARGEST_SIDE, :LARGEST_SIDE], order="C")  # planes are used again
    height, width = grey.shape
    size = f"{width:,} x {height:,}"
    if part.shape != grey.shape:
        size += f", the first {part.shape[1]:,} x {part.shape[0]:,}"
    values = f"black {part.min()}, white {part.max()}" if part.size else "empty"
    return Picture(f"{caption}; {size}; {values}", part)


def stretched(grey: Grey) -> Grey:
    """The smallest value black and the largest white."""
    if not grey.size or grey.min() == grey.max():
        return grey
    low, high = int(grey.min()), int(grey.max())
    result: Grey = ((grey.astype(np.uint32) - low) * 255 // (high - low)).astype(np.uint8)
    return result


def png(grey: Grey) -> bytes:
    """An 8-bit grey PNG of ``[height, width]``, neither side 0."""
    height, width = grey.shape
    rows = np.zeros((height, width + 1), np.uint8)  # a filter type of 0 before each row
    rows[:, 1:] = grey
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
