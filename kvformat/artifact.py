"""Reading an artifact: ``kvformat.open`` and what it returns (spec section 11)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from kvformat.cache import Restored
from kvformat.cancelling import Cancellation
from kvformat.choosing import Auto
from kvformat.closing import ClosedOnExit
from kvformat.costs import Decision
from kvformat.destinations import Buffers, adopt, allocate
from kvformat.digests import digest
from kvformat.errors import InvalidError, MismatchError, UsageError
from kvformat.expectations import Expectation, check_identity, require_tokens, verified_length
from kvformat.fields import float64_of
from kvformat.front import Front, read_front, read_tables
from kvformat.groups import Grid, Group, make_grid
from kvformat.identity import Lineage
from kvformat.manifest import Manifest
from kvformat.profile_shelf import ProfilePlaces, ProfileShelf, Transforms
from kvformat.reading import Order, Reading, Request
from kvformat.report import ReadReport
from kvformat.segments import SegmentContext
from kvformat.selection import Range
from kvformat.sets import QuantisationSet, parse_set
from kvformat.storage import Beside, Data, Fetch, Source, Transport, open_source
from kvformat.streaming import Stream, decide_for, restore_all
from kvformat.tables import NO_SET, SegmentRecord, SegmentTable, SetTable
from kvformat.tables import parse_segment_table as parse_segments
from kvformat.tables import parse_set_table as parse_sets
from kvformat.tracks import EXACT, TRANSFORMED, Track

CODEC_PREFERENCE: Final = ("zstd", "stored", "hevc")


class Artifact(ClosedOnExit):
    """An open artifact: its manifest is checked, everything else is checked when it is used.

    Safe to share between threads. Use it as a context manager, or call ``close``.
    """

    def __init__(
        self,
        source: Source,
        front: Front,
        expect: Expectation | None = None,
        profiles: ProfileShelf | None = None,
    ) -> None:
        self._source = source
        self._front = front
        self._sets: dict[str, SetTable] = {}
        self._segments: dict[str, SegmentTable] = {}
        self._set_objects: dict[tuple[str, int], QuantisationSet] = {}
        self._grid: Grid | None = None
        self.transforms = Transforms(front.manifest, profiles or ProfileShelf(()))
        self._closed = False
        self._verified_length: int | None = None
        if expect is not None:
            check_identity(front.manifest.identity, expect)
            if expect.token_ids is not None:
                self._verified_length = verified_length(front.manifest, expect)

    def __repr__(self) -> str:
        names = ", ".join(self.tracks)
        return f"<kvformat.Artifact {self.name}: {self.manifest.tokens.count} tokens, {names}>"

    def close(self) -> None:
        """Close the file; reading is an error from then on."""
        self._closed = True
        self._source.close()

    def require_open(self) -> None:
        """Raise ``usage.argument`` if it is closed, or cannot be read from here."""
        if self._closed:
            raise UsageError("usage.argument", "the artifact is closed", where=self.name)
        self._source.require_usable()

    @property
    def name(self) -> str:
        """The path or URL."""
        return self._source.name

    @property
    def source(self) -> Source:
        """Where the bytes come from, with its meter."""
        return self._source

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
        profile = source.profile
        if TRANSFORMED in self.manifest.quality(track.quality).encodings:
            profile = self.manifest.profile
        return Lineage("lossy", source.generations + 1, track.quality, profile)

    def set_table(self, quality: str) -> SetTable:
        """The checked set table of a quality."""
        if quality not in self._sets:
            self.require_open()
            (data,) = read_tables(self._front, [quality], Beside(self._source).fetch)
            self._keep_sets(quality, data)
        return self._sets[quality]

    def _keep_sets(self, quality: str, data: bytes) -> None:
        manifest = self.manifest
        self._sets[quality] = parse_sets(data, manifest, manifest.quality(quality))

    def segment_table(self, track: Track, fetch: Fetch | None = None) -> SegmentTable:
        """The checked segment table of a track; ``fetch`` gets it if it is not in the prefix."""
        if track.name not in self._segments:
            self.require_open()
            fetch = fetch or Beside(self._source).fetch
            names = [track.name] if track.quality in self._sets else [track.quality, track.name]
            *sets, data = read_tables(self._front, names, fetch)
            if sets:
                self._keep_sets(track.quality, sets[0])
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
        track: str | Auto | None = None,
        check: bool = False,
        allow_partial: bool = False,
        workers: int | None = None,
        cancellation: Cancellation | None = None,
        decoder: str | None = None,
        device: Any = None,
    ) -> Restored:
        """Restore a part of the cache exactly as the artifact defines it (9.4), or raise.

        ``tokens`` is an interval of token ordinals, ``layers`` and ``heads`` are global numbers
        (an interval, for layers also any iterable that is no pair). A windowed group gives what
        it holds of the interval; such an artifact serves only its ``valid_lengths``, unless
        ``allow_partial``. ``check`` also compares integer digests. ``track`` is a name of
        ``tracks``, a codec or a quality, or ``"auto"`` (see ``kvformat.Auto``); by default the
        best quality in the codec that is fastest on a CPU.

        Transfer, decoding and restoring overlap; ``cancellation`` stops all of it from another
        thread. The result's ``report`` says what was fetched and how long each took; an error's
        ``validity`` what was good before it.

        With ``device`` or ``decoder`` (``"nvdec"``) this is ``kvformat.gpu.read``, and so is the
        result: torch tensors on that device.

        Raises ``UsageError`` for a bad selection, ``MismatchError`` for tokens that the
        expectation of ``open`` does not cover, ``InvalidError`` for damage, ``StorageError``,
        ``UnsupportedError`` where no track fits.
        """
        if device is not None or decoder is not None:
            from kvformat.gpu.reading import read_beside

            result: Restored = read_beside(
                self, tokens=tokens, layers=layers, heads=heads, roles=roles, track=track,
                check=check, allow_partial=allow_partial, workers=workers,
                cancellation=cancellation, decoder=decoder, device=device,
            )  # fmt: skip
            return result
        request = Request(
            tokens, layers, heads, roles, track, "stored", check, allow_partial, workers
        )
        reading: Reading[None] = Reading(self, request, cancellation)
        groups, base = allocate(reading.wanted)
        report = restore_all(reading, groups)
        return Restored(reading.track.name, groups, base, self.lineage(reading.track), report)

    def read_into(
        self,
        buffers: Buffers,
        *,
        tokens: Range | slice | range | None = None,
        layers: Iterable[int] | Range | slice | range | None = None,
        heads: Range | slice | range | None = None,
        roles: Iterable[str] | None = None,
        track: str | Auto | None = None,
        order: Order = "stored",
        on_error: Literal["raise", "prefix"] = "raise",
        check: bool = False,
        allow_partial: bool = False,
        workers: int | None = None,
        cancellation: Cancellation | None = None,
    ) -> ReadReport:
        """Restore into the caller's memory, each segment to its place once it is verified.

        ``buffers`` is an array ``[2, L, T, H, D]`` or a mapping of group names to ``[L, T, H, D]``,
        of the groups' dtypes or of unsigned integers of their size; strides are free but for the
        last axis. With ``on_error="prefix"`` damage and failures of the storage do not raise:
        the report's ``validity`` says which tokens and layers are good, the rest of the buffers
        is undefined and must be computed anew. What fails before the first segment is asked for,
        a table for example, raises in either case. Other arguments and errors are those of
        ``read``.
        """
        request = Request(tokens, layers, heads, roles, track, order, check, allow_partial, workers)
        reading: Reading[None] = Reading(self, request, cancellation)
        if on_error not in ("raise", "prefix"):
            found = ascii(on_error)[:60]
            raise UsageError("usage.argument", "on_error is neither raise nor prefix", found=found)
        groups = adopt(reading.wanted, buffers)
        return restore_all(reading, groups, prefix=on_error == "prefix")

    def stream(
        self,
        *,
        tokens: Range | slice | range | None = None,
        layers: Iterable[int] | Range | slice | range | None = None,
        heads: Range | slice | range | None = None,
        roles: Iterable[str] | None = None,
        track: str | Auto | None = None,
        order: Order = "stored",
        check: bool = False,
        allow_partial: bool = False,
        workers: int | None = None,
    ) -> Stream:
        """Restored blocks one by one, while later ones download and decode.

        ``order="layer-major"`` gives all tokens of the lowest layers first, so that an engine can
        start; ``"token-major"`` all layers of the first tokens; ``"stored"`` is that of the file.
        A consumer that is slow holds back the download. Use it as a context manager or call its
        ``close``: that stops everything at once. Arguments and errors are those of ``read``.
        """
        request = Request(tokens, layers, heads, roles, track, order, check, allow_partial, workers)
        return Stream(Reading(self, request))

    def decide(
        self,
        auto: Auto | None = None,
        *,
        tokens: Range | slice | range | None = None,
        layers: Iterable[int] | Range | slice | range | None = None,
        workers: int | None = None,
    ) -> Decision:
        """What ``track="auto"`` would choose for a read, and why; nothing of it is fetched."""
        return decide_for(self, auto or Auto(), Request(tokens, layers, workers=workers))

    def check_serving(self, tokens: Range, *, allow_partial: bool) -> None:
        """TOK-11 and LEN-3: raises ``MismatchError`` for tokens that this cannot serve."""
        begin, end = tokens
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

    def context(
        self, track: Track, record: SegmentRecord, *, restoring: bool = True
    ) -> SegmentContext:
        """What decoding a segment needs; fetches its quantisation set if that is not yet here.

        Integers need no profile: none is looked for without ``restoring``.
        """
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
            self.transforms.of(track, record) if restoring else None,
            self.manifest.tokens.first_position,
        )

    def has_set(self, quality: str, index: int) -> bool:
        """Whether a set is at hand, checked."""
        return (quality, index) in self._set_objects

    def quantisation_set(
        self, quality: str, index: int, data: bytes | None = None
    ) -> QuantisationSet:
        """A checked quantisation set (section 9.2), from ``data`` if its bytes are at hand."""
        key = (quality, index)
        if key not in self._set_objects:
            record = self.set_table(quality)[index]
            where = f"quality {quality}, set {index}"
            data = bytes(self.data(record.offset, record.size_bytes)) if data is None else data
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
            transformed = self.manifest.quality(quality).encodings[record.group] == TRANSFORMED
            shape = (record.layer_count, group.heads, group.head_dim)
            self._set_objects[key] = parse_set(data, *shape, where, transformed=transformed)
        return self._set_objects[key]

    def data(self, offset: int, size_bytes: int) -> Data:
        """Bytes of the data section."""
        return self.file_bytes(self._front.data_start + offset, size_bytes)

    def file_bytes(self, offset: int, size_bytes: int) -> Data:
        """Bytes of the file, from the prefix if it has them."""
        self.require_open()
        prefix = self._front.prefix
        if offset + size_bytes <= len(prefix):
            return prefix[offset : offset + size_bytes]
        return self._source.read(offset, size_bytes)

    def check_end(self) -> None:
        """HDR-10: nothing follows; asks the storage only if its size is not known."""
        wanted, size = self._front.header.file_bytes, self._source.size()
        good = size == wanted if size is not None else self._source.ends_at(wanted)
        if not good:
            raise InvalidError(
                "file.size",
                "there are bytes behind the end of the artifact",
                where=f"byte {wanted}",
                expected=wanted,
                found=size,
            )

    def segment_bytes(self, record: SegmentRecord) -> Data:
        """The stored bytes of one segment, not yet checked."""
        return self.data(record.offset, record.stored_bytes)


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


def open_artifact(
    url: str | os.PathLike[str] | bytes,
    *,
    expect: Expectation | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
    profiles: ProfilePlaces = (),
) -> Artifact:
    """Open an artifact: a local path, an fsspec URL, or its bytes.

    ``storage_options`` go to fsspec, ``transport`` sets time limits and concurrency.
    ``profiles`` are files, directories or ``Profile`` objects among which a calibration profile is
    looked for when a transformed group is read. Reads and checks the header and the manifest, and
    with ``expect`` that it is the KV of what the caller wants. Raises ``InvalidError``,
    ``UnsupportedError``, ``MismatchError``, ``StorageError``.
    """
    if expect is not None and not isinstance(expect, Expectation):
        raise UsageError(
            "usage.argument",
            "expect is not a kvformat.Expectation",
            found=type(expect).__name__,
            next_step="Write kvformat.Expectation(model=...)",
        )
    source = open_source(url, storage_options, transport)
    try:
        return Artifact(source, read_front(source), expect, ProfileShelf(profiles))
    except BaseException:
        source.close()
        raise
