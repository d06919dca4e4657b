"""Sizes of tracks, as ``encode``, ``inspect`` and ``demo`` show them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvformat.manifest import Manifest
from kvformat.tracks import Track


@dataclass(frozen=True, slots=True)
class TrackSize:
    """What a reader of one track needs: its segments, the sets of its quality, both tables."""

    name: str
    codecs: str
    segments: int
    size_bytes: int
    bits_per_value: float
    ratio: float


def count_values(manifest: Manifest) -> int:
    """Values of the cache."""
    return sum(prod(group.shape(manifest.tokens.count)) for group in manifest.groups)


def count_raw_bytes(manifest: Manifest) -> int:
    """Bytes of the cache as the engine held it."""
    return sum(
        prod(group.shape(manifest.tokens.count)) * group.numpy_dtype.itemsize
        for group in manifest.groups
    )


def track_size(manifest: Manifest, track: Track) -> TrackSize:
    """The sizes of one track."""
    quality = manifest.quality(track.quality)
    size_bytes = sum(
        part.data_stop - part.data_start + part.table_bytes for part in (quality, track)
    )
    return TrackSize(
        track.name,
        "+".join(dict.fromkeys(track.codecs)),
        track.segments,
        size_bytes,
        8 * size_bytes / max(1, count_values(manifest)),
        count_raw_bytes(manifest) / max(1, size_bytes),
    )


def track_sizes(manifest: Manifest) -> list[TrackSize]:
    """The sizes of all tracks."""
    return [track_size(manifest, track) for track in manifest.tracks]


COLUMNS = ("track", "codecs", ">segments", ">bytes", ">bits/value", ">ratio")


def track_row(size: TrackSize) -> tuple[str, ...]:
    """One row under ``COLUMNS``."""
    return (
        size.name,
        size.codecs,
        f"{size.segments:,}",
        f"{size.size_bytes:,}",
        f"{size.bits_per_value:.2f}",
        f"1:{size.ratio:.1f}",
    )
