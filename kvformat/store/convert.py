"""Transcoding: the integers of a track in another codec, as a new artifact.

Sets and side blocks are copied byte for byte and integers are compared after encoding, so the new
track restores the same bits and keeps content id, lineage and tokens of the source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from kvformat.artifact import Artifact
from kvformat.codecs.base import SegmentShape
from kvformat.codecs.registry import CODECS
from kvformat.digests import digest, digest_all
from kvformat.errors import InvalidError, UsageError
from kvformat.header import HEADER_BYTES, Header, align
from kvformat.layout import Layout, candidate_layouts, fault, tail_layout
from kvformat.limits import LIMITS
from kvformat.manifest import TRANSFORM_KLT, Manifest, parse_manifest
from kvformat.segments import Segment, canonical_integers, check_integers, decode_segment
from kvformat.storage import copy_into, publish, spool, spool_directory, storage_errors
from kvformat.tables import (
    NO_LAYOUT,
    SEGMENT_DTYPE,
    parse_segment_table,
    parse_set_table,
    place,
)
from kvformat.tracks import EXACT, TRANSFORMED, Track
from kvformat.workers import in_order, worker_count
from kvformat.writer import GENERATOR


@dataclass(frozen=True, slots=True)
class Transcoded:
    """What was written."""

    track: str
    file_bytes: int
    manifest_digest: str


def transcode(
    source: Artifact,
    url: str | os.PathLike[str],
    codec: str,
    *,
    track: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Transcoded:
    """Write a new artifact that holds one track of ``source`` in ``codec``.

    Groups that are held exactly are copied as they are if ``codec`` cannot hold them. Raises
    ``usage.argument`` where nothing would change, ``InvalidError`` for damage of the source.
    """
    chosen = source.track(track)
    manifest = source.manifest
    encodings = manifest.quality(chosen.quality).encodings
    codecs = tuple(
        codec if codec != "hevc" or encoding != EXACT else old
        for old, encoding in zip(chosen.codecs, encodings, strict=True)
    )
    if codec not in CODECS or codecs == chosen.codecs:
        raise UsageError(
            "usage.argument", "there is nothing to transcode", expected="another codec",
            found=f"{chosen.name} to {ascii(codec)[:40]}",
        )  # fmt: skip
    layouts, numbers = _layouts(source, codecs)
    with ExitStack() as stack:
        file = stack.enter_context(spool(spool_directory(url)))
        records = _encode(source, chosen, codecs, (layouts, numbers), file=file, workers=workers)
        front = _make(source, chosen, codecs, layouts, records)
        publish(
            url,
            lambda target: front.write(target, file),
            overwrite=overwrite,
            storage_options=storage_options,
        )
    name = front.manifest.tracks[0].name
    return Transcoded(name, front.header.file_bytes, front.header.manifest_digest.hex())


def _layouts(
    source: Artifact, codecs: tuple[str, ...]
) -> tuple[tuple[Layout, ...], dict[tuple[int, int], int]]:
    """Layouts of the groups in ``hevc``, and their numbers by (group, token count)."""
    chosen: list[Layout] = []
    numbers: dict[tuple[int, int], int] = {}
    fields = source.grid.fields
    for number, group in enumerate(source.groups):
        mine = fields[fields["group"] == number]
        if codecs[number] != "hevc" or not len(mine):
            continue
        channels = int(mine["head_count"].max()) * group.head_dim
        counts = sorted({int(count) for count in mine["token_count"]}, reverse=True)
        sizes = {(item.width, item.height) for item in chosen}
        fitting = [
            item
            for item in candidate_layouts(counts[0], channels)
            if not fault(item, counts[0], channels)
            and ((item.width, item.height) in sizes or len(sizes) < LIMITS.picture_sizes_per_track)
        ]
        if not fitting:
            raise UsageError("usage.argument", "no picture holds a segment", where=group.name)
        # Folded rows are what the writer's own choice nearly always is, and the fastest to encode.
        best = next((item for item in fitting if item.fold > 1), fitting[0])
        for count in counts:
            layout = best if count == counts[0] else tail_layout(best, count)
            if layout not in chosen:
                chosen.append(layout)
            numbers[number, count] = chosen.index(layout)
    return tuple(chosen), numbers


def _encode(
    source: Artifact,
    track: Track,
    codecs: tuple[str, ...],
    pictures: tuple[tuple[Layout, ...], dict[tuple[int, int], int]],
    *,
    file: IO[bytes],
    workers: int | None,
) -> np.ndarray[Any, Any]:
    """All segments into the spool; their records, offsets still missing."""
    layouts, numbers = pictures
    table = source.segment_table(track)
    records = np.array(table.records, SEGMENT_DTYPE)
    alignment = source.manifest.segmentation.alignment

    def work(index: int) -> tuple[bytes, bytes, int]:
        record = table[index]
        group = record.cell.group
        data = bytes(source.segment_bytes(record))
        segment = decode_segment(source.context(track, record, restoring=False), data)
        check_integers(segment)
        side = data[: record.side_bytes]
        if codecs[group] == track.codecs[group]:
            return side, data[record.side_bytes :], record.layout
        number = numbers[group, record.cell.token_count] if codecs[group] == "hevc" else NO_LAYOUT
        layout = layouts[number] if number != NO_LAYOUT else None
        return side, _payload(segment, codecs[group], layout), number

    need = max((16 * 3 * item.width * item.height for item in layouts), default=64 * 2**20)
    for index, (side, payload, layout) in enumerate(
        in_order(work, range(len(table)), worker_count(workers, need))
    ):
        with storage_errors("temporary file", "io.write", "writing"):
            file.write(bytes(align(file.tell(), alignment) - file.tell()))
            file.write(side)
            file.write(payload)
        row = records[index]
        row["stored_bytes"] = len(side) + len(payload)
        row["layout"] = layout
        row["digest"] = digest_all((side, payload))
    return records


def _payload(segment: Segment, codec: str, layout: Layout | None) -> bytes:
    """The integers in the new codec, decoded again and compared (HEV-7)."""
    shape: SegmentShape = replace(segment.context.shape(), layout=layout)
    integers = canonical_integers(segment)
    payload = CODECS[codec].encode(integers, shape)
    context = replace(segment.context, codec=codec, layout=layout)
    again = Segment(context, CODECS[codec].decode(payload, shape, context.where), segment.side)
    if not np.array_equal(canonical_integers(again), integers):
        raise InvalidError(
            "segment.integers",
            "the encoder is not lossless here",
            where=context.where,
            next_step="Keep the source, and report the versions that kvformat doctor prints",
        )
    return payload


@dataclass(frozen=True, slots=True)
class _Front:
    header: Header
    manifest: Manifest
    tables: bytes
    sets: bytes
    start: int

    def write(self, target: IO[bytes], segments: IO[bytes]) -> None:
        """Data first, front last, as the writer does."""
        front = self.header.to_bytes() + self.manifest.to_bytes() + self.tables
        data_start = align(len(front), self.manifest.segmentation.alignment)
        target.write(bytes(data_start))
        target.write(self.sets)
        target.write(bytes(max(0, data_start + self.start - target.tell())))
        copy_into(segments, target)
        target.seek(0)
        target.write(front)


def _make(
    source: Artifact,
    track: Track,
    codecs: tuple[str, ...],
    layouts: tuple[Layout, ...],
    records: np.ndarray[Any, Any],
) -> _Front:
    """Tables and manifest with new offsets, checked as a reader will check them."""
    manifest = source.manifest
    alignment = manifest.segmentation.alignment
    quality = manifest.quality(track.quality)
    table = source.set_table(quality.name)
    objects = [bytes(source.data(table[i].offset, table[i].size_bytes)) for i in range(len(table))]
    offsets, cursor = place([len(item) for item in objects], 0, alignment)
    set_rows = np.array(table.records)
    set_rows["offset"] = offsets
    sets = bytearray()
    for item, offset in zip(objects, offsets, strict=True):
        sets += bytes(offset - len(sets)) + item
    starts, stop = place([int(n) for n in records["stored_bytes"]], cursor, alignment)
    records["offset"] = starts
    new_quality = replace(
        quality, data_start=0, data_stop=cursor, set_table_digest=digest(set_rows.tobytes()).hex()
    )
    codec = next(new for new, old in zip(codecs, track.codecs, strict=True) if new != old)
    new_track = Track(
        name=f"{track.quality}/{codec}",
        quality=track.quality,
        codecs=codecs,
        segments=len(records),
        table_digest=digest(records.tobytes()).hex(),
        data_start=cursor,
        data_stop=stop,
        layouts=layouts,
        encoder=CODECS[codec].encoder(),
    )
    kept = TRANSFORMED in quality.encodings
    new = replace(
        manifest, qualities=(new_quality,), tracks=(new_track,), data_bytes=stop,
        generator=GENERATOR, profile=manifest.profile if kept else None,
        features=tuple(item for item in manifest.features if kept or item != TRANSFORM_KLT),
    )  # fmt: skip
    parse_manifest(new.to_bytes())
    found = parse_set_table(set_rows.tobytes(), new, new_quality)
    parse_segment_table(records.tobytes(), new, new_track, sets=found, grid=source.grid)
    tables = set_rows.tobytes() + records.tobytes()
    raw = new.to_bytes()
    data_start = align(HEADER_BYTES + len(raw) + len(tables), alignment)
    header = Header(data_start + stop, len(raw), len(tables), digest(raw))
    return _Front(header, new, tables, bytes(sets), starts[0] if starts else cursor)
