"""Writing an artifact: ``kvformat.write`` (spec section 11.4).

Two passes over the input: statistics and digests per layer, then segments. Each segment is made
alone and appended to the spool of its track, so memory does not grow with the artifact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import IO, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvformat import __version__
from kvformat.cache import Cache, GroupTensors, Restored, check_cache, native
from kvformat.coefficients import make_coefficients
from kvformat.digests import digest
from kvformat.drafting import (
    checked,
    checked_extensions,
    checked_identity,
    make_tokens,
    make_valid_lengths,
    refusal_code,
    whole_number,
)
from kvformat.encoder import Job, encode_all, prepare, video_encoder
from kvformat.errors import InvalidError, UsageError
from kvformat.fields import float64_bits
from kvformat.groups import Group, Segmentation
from kvformat.header import HEADER_BYTES, Header, align
from kvformat.identity import Identity, Lineage
from kvformat.manifest import TRANSFORM_KLT, Extension, Manifest, content_id, parse_manifest
from kvformat.planning import (
    DEFAULT_QUALITY,
    DEFAULT_TRACKS,
    RELATIVE_STEPS,
    TrackPlan,
    parse_tracks,
    plan_segmentation,
    plan_tracks,
)
from kvformat.profile_shelf import load_profile
from kvformat.profiles import Profile
from kvformat.storage import (
    copy_into,
    ensure_absent,
    publish,
    spool,
    spool_directory,
    storage_errors,
)
from kvformat.tables import (
    COORDINATES,
    SEGMENT_DTYPE,
    SET_DTYPE,
    TableSpan,
    parse_segment_table,
    parse_set_table,
    place,
    table_spans,
)
from kvformat.tokens import ContentSpan
from kvformat.tracks import EXACT, Quality, Track

GENERATOR: Final = f"kvformat-python {__version__}"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, repr=False)
class WriteReport:
    """What was written: sizes in bytes, values of the cache, seconds on the clock."""

    manifest: Manifest
    manifest_digest: str
    file_bytes: int
    values: int
    seconds: float

    def __repr__(self) -> str:
        names = ", ".join(track.name for track in self.manifest.tracks)
        return (
            f"<kvformat.WriteReport {names}: {self.file_bytes:,} bytes, "
            f"{self.bits_per_value:.2f} bits per value, {self.seconds:.2f} s>"
        )

    @property
    def bits_per_value(self) -> float:
        """Of the whole file, all tracks together."""
        return 8 * self.file_bytes / max(self.values, 1)


def write(
    url: str | os.PathLike[str],
    cache: Cache | Restored | NDArray[Any] | Mapping[str, NDArray[Any]],
    *,
    identity: Identity,
    token_ids: ArrayLike | None = None,
    salt: bytes = b"",
    tracks: Sequence[str] | str = DEFAULT_TRACKS,
    quality: str = DEFAULT_QUALITY,
    first_position: int = 0,
    content: tuple[ContentSpan, ...] = (),
    lineage: Lineage | None = None,
    valid_lengths: Sequence[int] | None = None,
    segment_tokens: int | None = None,
    order: str = "token-major",
    alignment: int = 1,
    extensions: Mapping[str, Extension] | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    encoder: str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
) -> WriteReport:
    """Write a KV cache to one artifact and publish it in one step.

    ``cache`` is a canonical array ``[2, L, T, H, D]``, a mapping of tensors ``[T, H, D]`` named
    ``layers.{i}.{role}``, a ``Cache``, or what ``Artifact.read`` returned, whose lineage is then
    kept; with plain arrays that came from a lossy track, give ``lineage`` (LIN-1). ``identity``
    says what it is the KV of. ``token_ids`` are those of the sequence from position 0 on,
    ``first_position`` + T in number; an identity of kind ``tokens`` requires them. ``salt`` is
    the tenant's secret. ``tracks`` are names like ``near-lossless/hevc`` or ``exact/zstd``; a
    codec alone means ``quality``. ``progress`` is called with segments done and in all.
    ``encoder="nvenc"`` has an NVIDIA encoder make the ``hevc`` streams, or raises
    ``codec.unavailable``; by default libx265 does. ``profile``, a calibration profile of the
    model or its file, makes lossy tracks smaller; readers need it too (``kvformat calibrate``).

    Raises ``UsageError`` for input that cannot be stored (``input.non-finite`` names the place)
    and ``StorageError``; no file is left behind then.
    """
    started = time.monotonic()
    named = parse_tracks(tracks, quality)
    video = video_encoder(encoder)
    identity = checked_identity(identity)
    first_position = whole_number(first_position, "first_position")
    if not isinstance(salt, bytes):
        raise UsageError("usage.argument", "the salt is not bytes", found=type(salt).__name__)
    ensure_absent(url, overwrite=overwrite, storage_options=storage_options)
    source = as_cache(cache, first_position)
    if lineage is None and isinstance(cache, Restored):
        lineage = cache.lineage
    groups = tuple(item.group for item in source.groups)
    tokens = make_tokens(
        identity,
        source.token_count,
        token_ids=token_ids,
        salt=salt,
        first_position=first_position,
        content=content,
    )
    plans = plan_tracks(named, groups)
    coefficients = None
    if profile is not None:
        coefficients = make_coefficients(
            source,
            tuple(dict.fromkeys(plan.quality for plan in plans if plan.quality != EXACT)),
            profile if isinstance(profile, Profile) else load_profile(profile),
            identity=identity,
            first_position=first_position,
            workers=workers,
        )
    segmentation = plan_segmentation(
        groups,
        source.token_count,
        segment_tokens=segment_tokens,
        order=order,
        alignment=alignment,
        whole=() if coefficients is None else {number for _, number in coefficients.groups},
    )
    draft = Manifest(
        identity=identity,
        tokens=tokens,
        groups=groups,
        segmentation=segmentation,
        qualities=(),
        tracks=(),
        source_digest="",
        content_id="",
        data_bytes=0,
        valid_lengths=make_valid_lengths(source, valid_lengths),
        lineage=lineage or Lineage(),
        extensions=checked_extensions(extensions),
        generator=GENERATOR,
        features=() if coefficients is None else (TRANSFORM_KLT,),
        profile=None if coefficients is None else coefficients.profile.digest,
    )
    with ExitStack() as stack:
        near = spool_directory(url)
        job, source_digest = prepare(
            source,
            segmentation,
            plans,
            first_position=first_position,
            workers=workers,
            video=video,
            coefficients=coefficients,
        )
        draft = replace(
            draft,
            source_digest=source_digest.hex(),
            content_id=content_id(groups, identity, source_digest.hex()),
        )
        _check_draft(draft, job)
        spools = [stack.enter_context(spool(near)) for _ in plans]
        records = _encode(job, spools, workers, progress)
        front = _Front.make(draft, job, records)
        front.check(job)
        publish(
            url,
            lambda file: front.write(file, spools),
            overwrite=overwrite,
            storage_options=storage_options,
        )
    values = sum(prod(group.shape(source.token_count)) for group in groups)
    return WriteReport(
        front.manifest,
        digest(front.manifest.to_bytes()).hex(),
        front.header.file_bytes,
        values,
        time.monotonic() - started,
    )


def as_cache(
    cache: Cache | Restored | NDArray[Any] | Mapping[str, NDArray[Any]], first_position: int = 0
) -> Cache:
    """The input as a ``Cache``."""
    if isinstance(cache, Cache):
        check_cache(cache)
        groups = (
            GroupTensors(
                checked(Group.parse, item.group.to_json, f"/groups/{number}"),
                tuple(native(array) for array in item.layers),
            )
            for number, item in enumerate(cache.groups)
        )
        return Cache(int(cache.token_count), tuple(groups))
    if isinstance(cache, Restored):
        return cache.as_cache(first_position)
    if isinstance(cache, Mapping):
        return Cache.from_tensors(cache, first_position=first_position)
    return Cache.from_kv(cache)


def _check_draft(draft: Manifest, job: Job) -> None:
    """Refuse what would make an invalid manifest before the long work starts."""
    qualities = tuple(_quality(job, name, 0, 0, b"") for name in job.qualities)
    tracks = tuple(_track(job, plan, 0, 0, b"") for plan in job.plans)
    try:
        parse_manifest(replace(draft, qualities=qualities, tracks=tracks).to_bytes())
    except InvalidError as error:
        raise UsageError(
            refusal_code(error),
            f"the cache or its identity cannot be described: {error.message}",
            where=error.where,
            expected=error.expected,
            found=error.found,
        ) from error


def _encode(
    job: Job, spools: list[IO[bytes]], workers: int | None, progress: Progress | None
) -> list[NDArray[Any]]:
    """Encode all cells into the spools; the records of each track, offsets still missing."""
    total = len(job.grid)
    records = [np.zeros(total, SEGMENT_DTYPE) for _ in job.plans]
    alignment = job.segmentation.alignment
    for table in records:
        for name in COORDINATES:
            table[name] = job.grid.fields[name]
    for number, (_, segments) in enumerate(encode_all(job, workers)):
        for file, table, segment in zip(spools, records, segments, strict=True):
            with storage_errors("temporary file", "io.write", "writing"):
                file.write(bytes(align(file.tell(), alignment) - file.tell()))
                file.write(segment.side)
                file.write(segment.payload)
            row = table[number]
            row["stored_bytes"] = segment.stored_bytes
            row["side_bytes"] = len(segment.side)
            row["set_index"] = segment.set_index
            row["layout"] = segment.layout
            row["digest"] = segment.digest
            row["integer_digest"] = segment.integer_digest
            row["integer_sum"] = segment.integer_sum
        if progress is not None:
            progress(number + 1, total)
    return records


def _quality(job: Job, name: str, start: int, stop: int, table: bytes) -> Quality:
    encodings = tuple(job.encoding(name, group) for group in range(len(job.cache.groups)))
    return Quality(
        name=name,
        encodings=encodings,
        sets=len(job.sets[name]),
        set_table_digest=digest(table).hex(),
        data_start=start,
        data_stop=stop,
        relative_step=None if set(encodings) == {EXACT} else float64_bits(RELATIVE_STEPS[name]),
    )


def _track(job: Job, plan: TrackPlan, start: int, stop: int, table: bytes) -> Track:
    return Track(
        name=plan.name,
        quality=plan.quality,
        codecs=job.codecs[plan.name],
        segments=len(job.grid),
        table_digest=digest(table).hex(),
        data_start=start,
        data_stop=stop,
        layouts=job.layouts[plan.name],
        encoder=job.codec(plan.codec).encoder(),
    )


@dataclass(frozen=True, slots=True)
class _Front:
    """Everything in front of the segments, with offsets computed (section 8.4)."""

    header: Header
    manifest: Manifest
    tables: bytes
    sets: bytes
    starts: tuple[int, ...]

    @staticmethod
    def make(draft: Manifest, job: Job, records: list[NDArray[Any]]) -> _Front:
        alignment = draft.segmentation.alignment
        cursor = 0
        tables: list[bytes] = []
        set_bytes = bytearray()
        qualities: list[Quality] = []
        for name in job.qualities:
            start = cursor
            table, cursor = _set_table(draft.segmentation, job, name, cursor, set_bytes)
            tables.append(table)
            qualities.append(_quality(job, name, start, cursor, table))
        tracks: list[Track] = []
        starts: list[int] = []
        for plan, rows in zip(job.plans, records, strict=True):
            start = cursor
            offsets, cursor = place([int(n) for n in rows["stored_bytes"]], start, alignment)
            rows["offset"] = offsets
            starts.append(offsets[0] if offsets else start)
            tables.append(rows.tobytes())
            tracks.append(_track(job, plan, start, cursor, tables[-1]))
        manifest = replace(
            draft, qualities=tuple(qualities), tracks=tuple(tracks), data_bytes=cursor
        )
        raw = manifest.to_bytes()
        joined = b"".join(tables)
        data_start = align(HEADER_BYTES + len(raw) + len(joined), alignment)
        header = Header(data_start + cursor, len(raw), len(joined), digest(raw))
        return _Front(header, manifest, joined, bytes(set_bytes), tuple(starts))

    def check(self, job: Job) -> None:
        """What a reader will check of the tables, before anything is published (LIM-1)."""
        spans = table_spans(self.manifest, 0)
        sets = {
            item.name: parse_set_table(_cut(self.tables, spans[item.name]), self.manifest, item)
            for item in self.manifest.qualities
        }
        for track in self.manifest.tracks:
            parse_segment_table(
                _cut(self.tables, spans[track.name]),
                self.manifest,
                track,
                sets=sets[track.quality],
                grid=job.grid,
            )

    def write(self, file: IO[bytes], spools: list[IO[bytes]]) -> None:
        """Data first, front last: an interrupted file does not start with the magic."""
        front = self.header.to_bytes() + self.manifest.to_bytes() + self.tables
        data_start = align(len(front), self.manifest.segmentation.alignment)
        file.write(bytes(data_start))
        file.write(self.sets)
        for start, source in zip(self.starts, spools, strict=True):
            file.write(bytes(max(0, data_start + start - file.tell())))
            copy_into(source, file)
        file.seek(0)
        file.write(front)


def _cut(tables: bytes, span: TableSpan) -> bytes:
    return tables[span.offset : span.offset + span.size_bytes]


def _set_table(
    segmentation: Segmentation, job: Job, quality: str, cursor: int, data: bytearray
) -> tuple[bytes, int]:
    """The set table of a quality; appends the sets, padded, to ``data``."""
    objects = [item.to_bytes() for item in job.sets[quality]]
    offsets, stop = place([len(item) for item in objects], cursor, segmentation.alignment)
    table = np.zeros(len(objects), SET_DTYPE)
    for (group, first), number in job.set_numbers.items():
        if number < len(objects):
            table[number]["group"] = group
            table[number]["layer_index"] = first
    for number, (item, offset) in enumerate(zip(objects, offsets, strict=True)):
        data.extend(bytes(offset - len(data)))
        data.extend(item)
        row = table[number]
        row["offset"], row["bytes"], row["digest"] = offset, len(item), digest(item)
        row["layer_count"] = job.sets[quality][number].layers
    return table.tobytes(), stop
