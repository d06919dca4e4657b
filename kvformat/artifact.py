"""Reading an artifact: ``kvformat.open`` and what it returns (spec section 11)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Restored, RestoredGroup, kv_pair
from kvformat.digests import digest
from kvformat.errors import InvalidError, MismatchError, UsageError
from kvformat.expectations import Expectation, check_identity, require_tokens, verified_length
from kvformat.fields import float64_of
from kvformat.front import Front, read_front, read_table
from kvformat.groups import Grid, Group, make_grid
from kvformat.identity import Lineage
from kvformat.manifest import Manifest
from kvformat.segments import SegmentContext, check_integers, decode_segment, restore_into
from kvformat.selection import GroupSelection, Range, as_range, landings, select, touched
from kvformat.sets import QuantisationSet, parse_set
from kvformat.storage import Source, open_source
from kvformat.tables import NO_SET, SegmentRecord, SegmentTable, SetRecord, SetTable
from kvformat.tables import parse_segment_table as parse_segments
from kvformat.tables import parse_set_table as parse_sets
from kvformat.tracks import EXACT, Track
from kvformat.workers import in_order, worker_count

REQUEST_BYTES: Final = 8 * 2**20
GAP_BYTES: Final = 65_536
CODEC_PREFERENCE: Final = ("zstd", "stored", "hevc")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Adjacent segments that are fetched with one request."""

    records: tuple[SegmentRecord, ...]
    offset: int
    size_bytes: int


class Artifact:
    """An open artifact: its manifest is checked, everything else is checked when it is used.

    Safe to share between threads. Use it as a context manager, or call ``close``.
    """

    def __init__(self, source: Source, front: Front, expect: Expectation | None = None) -> None:
        self._source = source
        self._front = front
        self._sets: dict[str, SetTable] = {}
        self._segments: dict[str, SegmentTable] = {}
        self._set_objects: dict[tuple[str, int], QuantisationSet] = {}
        self._grid: Grid | None = None
        self._closed = False
        self._verified_length: int | None = None
        if expect is not None:
            check_identity(front.manifest.identity, expect)
            if expect.token_ids is not None:
                self._verified_length = verified_length(front.manifest, expect)

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(self.tracks)
        return f"<kvformat.Artifact {self.name}: {self.manifest.tokens.count} tokens, {names}>"

    def close(self) -> None:
        """Close the file; reading is an error from then on."""
        self._closed = True
        self._source.close()

    @property
    def name(self) -> str:
        """The path or URL."""
        return self._source.name

    @property
    def front(self) -> Front:
        """Header, manifest and the bytes in front of the data."""
        return self._front

    @property
    def manifest(self) -> Manifest:
        """The checked manifest."""
        return self._front.manifest

    @property
    def manifest_digest(self) -> str:
        """64 hexadecimal digits that name this file."""
        return self._front.manifest_digest

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups."""
        return self.manifest.groups

    @property
    def tracks(self) -> tuple[str, ...]:
        """Names of the tracks."""
        return tuple(track.name for track in self.manifest.tracks)

    @property
    def verified_length(self) -> int | None:
        """Tokens that agree with the expected ids, None if no ids were given to ``open``."""
        return self._verified_length

    @property
    def grid(self) -> Grid:
        """The cells of all tracks in table order."""
        if self._grid is None:
            manifest = self.manifest
            self._grid = make_grid(manifest.groups, manifest.segmentation, manifest.tokens.count)
        return self._grid

    def track(self, name: str | None = None) -> Track:
        """The track of that name or short form, or the default (``choose_track``).

        A quality alone means the codec that is fastest on a CPU, a codec alone the best quality
        that it has quantised, or exact if it has no other.
        """
        if name is None:
            return choose_track(self.manifest)
        tracks = self.manifest.tracks
        for found in (
            [item for item in tracks if item.name == name],
            [item for item in tracks if item.quality == name],
            [item for item in tracks if item.codec == name and item.quality != EXACT],
            [item for item in tracks if item.codec == name],
        ):
            if found:
                return choose_track(self.manifest, found)
        raise UsageError(
            "usage.selection",
            "no such track, quality or codec",
            expected=f"one of {', '.join(self.tracks)}",
            found=ascii(name),
        )

    def lineage(self, track: Track) -> Lineage:
        """The lineage of tensors that are restored from a track (LIN-1)."""
        source = self.manifest.lineage
        if track.quality == EXACT:
            return source
        return Lineage("lossy", source.generations + 1, track.quality, source.profile)

    def set_table(self, quality: str) -> SetTable:
        """The checked set table of a quality."""
        if quality not in self._sets:
            data = read_table(self._source, self._front, quality)
            manifest = self.manifest
            self._sets[quality] = parse_sets(data, manifest, manifest.quality(quality))
        return self._sets[quality]

    def segment_table(self, track: Track) -> SegmentTable:
        """The checked segment table of a track."""
        if track.name not in self._segments:
            data = read_table(self._source, self._front, track.name)
            self._segments[track.name] = parse_segments(
                data, self.manifest, track, sets=self.set_table(track.quality), grid=self.grid
            )
        return self._segments[track.name]

    def read(
        self,
        *,
        tokens: Range | slice | range | None = None,
        layers: Iterable[int] | Range | slice | range | None = None,
        heads: Range | slice | range | None = None,
        roles: Iterable[str] | None = None,
        track: str | None = None,
        check: bool = False,
        allow_partial: bool = False,
        workers: int | None = None,
    ) -> Restored:
        """Restore a part of the cache exactly as the artifact defines it (9.4), or raise.

        ``tokens`` is an interval of token ordinals, ``layers`` and ``heads`` are global numbers
        (an interval, for layers also any iterable that is no pair). A windowed group gives what
        it holds of the interval; such an artifact serves only its ``valid_lengths``, unless
        ``allow_partial``. ``check`` also compares integer digests. ``track`` is a name of
        ``tracks``, a codec or a quality; by default the best quality in the codec that is
        fastest on a CPU.

        Raises ``UsageError`` for a bad selection, ``MismatchError`` for tokens that the
        expectation of ``open`` does not cover, ``InvalidError`` for damage, ``StorageError``.
        """
        chosen = self.track(track)
        count = self.manifest.tokens.count
        wanted = select(self.groups, count, tokens=tokens, layers=layers, heads=heads, roles=roles)
        self._check_serving(tokens, allow_partial=allow_partial)
        records = self._touched(chosen, wanted)  # checks sizes before anything is allocated
        result = _allocate(chosen.name, wanted, self.lineage(chosen))
        values = (record.cell.values(self.groups[record.cell.group]) for record in records)
        workers = worker_count(workers, 4 * max(values, default=1))

        def restore(job: tuple[SegmentRecord, memoryview]) -> None:
            record, data = job
            context = self.context(chosen, record)
            segment = decode_segment(context, data)
            if check:
                check_integers(segment)
            for selection in wanted:
                if selection.index == record.cell.group:
                    target = result.groups[selection.group.name].array
                    for landing in landings(record.cell, selection):
                        out = target[landing.layers, :, landing.heads]
                        restore_into(segment, out, landing.tokens, landing.part)

        for _ in in_order(restore, self._fetched(chosen, records), workers):
            pass
        return result

    def _check_serving(self, tokens: Range | slice | range | None, *, allow_partial: bool) -> None:
        """TOK-11 and LEN-3."""
        count = self.manifest.tokens.count
        begin, end = as_range(tokens, count, "tokens")
        if self._verified_length is not None:
            require_tokens(self._verified_length, end)
        lengths = self.manifest.valid_lengths
        if lengths is not None and not allow_partial and (begin or end not in lengths):
            raise MismatchError(
                "tokens.length",
                "layers with a window or state do not serve this prefix",
                expected=f"tokens from 0 to one of {list(lengths)[:8]}",
                found=f"[{begin}, {end})",
                next_step="Ask for a valid length, or allow a partial read",
            )

    def _touched(self, track: Track, wanted: tuple[GroupSelection, ...]) -> list[SegmentRecord]:
        """The segments to read, in table order."""
        table = self.segment_table(track)
        numbers = np.unique(np.concatenate([touched(self.grid, item) for item in wanted]))
        return [table[int(number)] for number in numbers]

    def context(self, track: Track, record: SegmentRecord) -> SegmentContext:
        """What decoding a segment needs; fetches its quantisation set if that is not yet here."""
        group = self.groups[record.cell.group]
        codec = track.codecs[record.cell.group]
        quantisation = None
        if record.set_index != NO_SET:
            quantisation = self.quantisation_set(track.quality, record.set_index)
        return SegmentContext(
            record,
            group,
            codec,
            track.layouts[record.layout] if codec == "hevc" else None,
            quantisation,
            f"track {track.name}, segment {record.index}",
        )

    def quantisation_set(
        self, quality: str, index: int, data: bytes | None = None
    ) -> QuantisationSet:
        """A checked quantisation set (section 9.2), from ``data`` if its bytes are at hand."""
        key = (quality, index)
        if key not in self._set_objects:
            record = self.set_table(quality)[index]
            where = f"quality {quality}, set {index}"
            data = self.data(record.offset, record.size_bytes) if data is None else data
            found = digest(data)
            if found != record.digest:
                raise InvalidError(
                    "set.digest",
                    "the quantisation set is damaged",
                    where=where,
                    expected=record.digest.hex(),
                    found=found.hex(),
                    next_step="Fetch the file again",
                )
            group = self.groups[record.group]
            self._set_objects[key] = parse_set(
                data, record.layer_count, group.heads, group.head_dim, where
            )
        return self._set_objects[key]

    def data(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the data section."""
        return self.file_bytes(self._front.data_start + offset, size_bytes)

    def file_bytes(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the file, from the prefix if it has them."""
        if self._closed:
            raise UsageError("usage.argument", "the artifact is closed", where=self.name)
        prefix = self._front.prefix
        if offset + size_bytes <= len(prefix):
            return prefix[offset : offset + size_bytes]
        return self._source.read(offset, size_bytes)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the file has this length; asks the storage only if it is not known."""
        size = self._source.size()
        return size == size_bytes if size is not None else self._source.ends_at(size_bytes)

    def segment_bytes(self, record: SegmentRecord) -> bytes:
        """The stored bytes of one segment, not yet checked."""
        return self.data(record.offset, record.stored_bytes)

    def _load_sets(self, track: Track, records: list[SegmentRecord]) -> None:
        """Fetch the sets that these segments need, adjacent ones with one request."""
        needed = {item.set_index for item in records if item.set_index != NO_SET}
        missing = sorted(i for i in needed if (track.quality, i) not in self._set_objects)
        table = self.set_table(track.quality)
        while missing:
            start = table[missing[0]].offset
            batch = [i for i in missing if _end(table[i]) - start <= REQUEST_BYTES]
            batch = batch or missing[:1]
            data = self.data(start, _end(table[batch[-1]]) - start)
            for index in batch:
                item = table[index]
                mine = data[item.offset - start : _end(item) - start]
                self.quantisation_set(track.quality, index, mine)
            missing = missing[len(batch) :]

    def _fetched(
        self, track: Track, records: list[SegmentRecord]
    ) -> Iterator[tuple[SegmentRecord, memoryview]]:
        """The stored bytes of segments, adjacent ones with one request."""
        self._load_sets(track, records)
        for chunk in chunks(records):
            data = memoryview(self.data(chunk.offset, chunk.size_bytes))
            for record in chunk.records:
                start = record.offset - chunk.offset
                yield record, data[start : start + record.stored_bytes]


def chunks(records: list[SegmentRecord]) -> Iterator[Chunk]:
    """Cut segments, in order of offset, into requests of at most ``REQUEST_BYTES`` or one."""
    group: list[SegmentRecord] = []
    for record in records:
        if group:
            end = group[-1].offset + group[-1].stored_bytes
            total = record.offset + record.stored_bytes - group[0].offset
            if record.offset - end > GAP_BYTES or total > REQUEST_BYTES:
                yield Chunk(tuple(group), group[0].offset, end - group[0].offset)
                group = []
        group.append(record)
    if group:
        end = group[-1].offset + group[-1].stored_bytes
        yield Chunk(tuple(group), group[0].offset, end - group[0].offset)


def _end(record: SetRecord) -> int:
    return record.offset + record.size_bytes


def choose_track(manifest: Manifest, among: Sequence[Track] = ()) -> Track:
    """The best quality, then the codec that is fastest on a CPU, of all tracks or some."""

    def rank(track: Track) -> tuple[float, int]:
        quality = manifest.quality(track.quality)
        step = float("inf")
        if quality.name == EXACT:
            step = 0.0
        elif quality.relative_step is not None:
            step = float64_of(quality.relative_step)
        return step, CODEC_PREFERENCE.index(track.codec)

    return min(among or manifest.tracks, key=rank)


def _allocate(track: str, wanted: tuple[GroupSelection, ...], lineage: Lineage) -> Restored:
    """Result arrays, or ``usage.selection`` where memory does not hold them."""
    try:
        return _make_arrays(track, wanted, lineage)
    except (MemoryError, ValueError) as error:
        size_bytes = sum(prod(item.shape) * item.group.numpy_dtype.itemsize for item in wanted)
        raise UsageError(
            "usage.selection",
            "the part asked for does not fit in memory",
            found=f"{size_bytes:,} bytes",
            next_step="Ask for fewer tokens or layers at a time",
        ) from error


def _make_arrays(track: str, wanted: tuple[GroupSelection, ...], lineage: Lineage) -> Restored:
    """Keys and values that match share one canonical array."""
    base: NDArray[Any] | None = None
    if kv_pair([item.group for item in wanted]):
        shape = wanted[0].shape
        base = np.empty((2, *shape), wanted[0].group.numpy_dtype)
    groups: dict[str, RestoredGroup] = {}
    for index, item in enumerate(wanted):
        array = np.empty(item.shape, item.group.numpy_dtype) if base is None else base[index]
        groups[item.group.name] = RestoredGroup(
            item.group,
            array,
            tuple(item.group.layers[layer] for layer in item.layers),
            item.tokens[0],
            item.group.head_start + item.heads[0],
        )
    return Restored(track, groups, base, lineage)


def open_artifact(
    url: str | os.PathLike[str] | bytes,
    *,
    expect: Expectation | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Artifact:
    """Open an artifact: a local path, an fsspec URL, or its bytes.

    Reads and checks the header and the manifest, and with ``expect`` that it is the KV of what
    the caller wants. Raises ``InvalidError``, ``UnsupportedError``, ``MismatchError``,
    ``StorageError``.
    """
    if expect is not None and not isinstance(expect, Expectation):
        raise UsageError(
            "usage.argument",
            "expect is not a kvformat.Expectation",
            found=type(expect).__name__,
            next_step="Write kvformat.Expectation(model=...)",
        )
    source = open_source(url, storage_options)
    try:
        return Artifact(source, read_front(source), expect)
    except BaseException:
        source.close()
        raise
