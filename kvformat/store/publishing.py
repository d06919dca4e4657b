"""Encoding and publishing, in the encoder process or in a bulk worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvformat.artifact import Artifact, open_artifact
from kvformat.cache import Cache
from kvformat.digests import digest
from kvformat.errors import InvalidError, KvformatError, StorageError, UsageError
from kvformat.profiles import Profile
from kvformat.storage import local_path
from kvformat.store.backend import Backend
from kvformat.store.convert import transcode
from kvformat.store.cutting import cut, source_bytes
from kvformat.store.eviction import Collected, collect
from kvformat.store.faults import refusal_of
from kvformat.store.jobs import Answer, ConvertJob, EncodeJob, Target, Written
from kvformat.store.local import LocalBackend
from kvformat.store.names import Namespace, ObjectName
from kvformat.store.objects import ObjectBackend
from kvformat.store.options import StoreOptions
from kvformat.store.profiles import StoreProfiles
from kvformat.store.results import Refusal
from kvformat.tokens import BLOCK_TOKENS
from kvformat.tracks import EXACT
from kvformat.writer import WriteReport, write

_log = logging.getLogger("kvformat.store")


def open_backend(url: str, options: StoreOptions) -> Backend:
    """The backend of a path or URL."""
    path = local_path(url)
    if path is not None:
        return LocalBackend(Path(path).absolute(), options.grace_s)
    return ObjectBackend(
        url,
        options.storage_options,
        options.transport,
        grace_s=options.grace_s,
        mark_s=options.mark_s,
    )


class Publisher:
    """Writes extents; counts bytes so that it evicts before the limit is passed by much."""

    def __init__(self, backend: Backend, options: StoreOptions) -> None:
        self._backend, self._options = backend, options
        self._since_look: int | None = None
        self._profiles = StoreProfiles(options)
        self._fitting: set[Namespace] = set()

    def encode(self, job: EncodeJob, cache: Cache) -> Answer:
        """All targets of a job, parents first; what is stored then counts as used."""
        written = tuple(self._one(job, cache, target) for target in job.targets)
        self._mark(job, written)
        full = any(item.refusal is Refusal.FULL_DISK for item in written)
        new_bytes = sum(item.file_bytes for item in written)
        collected = self._look(new_bytes, full=full)
        return Answer(written, *_told(collected))

    def _mark(self, job: EncodeJob, written: Sequence[Written]) -> None:
        """All names of the prefix with one time, the first ones first."""
        ends = [
            target.extent.end
            for target, item in zip(job.targets, written, strict=True)
            if item.refusal is None
        ]
        if ends and job.token_ids is not None:
            scope, grid = job.scope, job.scope.grid
            wanted = range(1, ends[-1] + 1) if self._backend.dense else grid.ends(ends[-1])
            self._backend.mark([scope.name(job.hashes, end) for end in wanted])

    def _one(self, job: EncodeJob, cache: Cache, target: Target) -> Written:
        started = time.monotonic()
        extent, keyed = target.extent, job.token_ids is None
        parent = job.scope.name(job.hashes, extent.start) if extent.start else None
        try:
            damaged = target.suspect is not None and self._damaged(target.suspect)
            refusal = self._refusal(extent.name, parent, damaged=damaged)
            if refusal is not None:
                return Written(refusal)
            profile = self._profile(job, cache)
            part: Cache | None = cache
            if not keyed:
                window = job.scope.window_tokens
                part = cut(cache, job.first_position, *extent.tokens, window)
            if part is None:
                return Written(Refusal.WINDOW)
            report = self._backend.publish(
                job.names(target),
                lambda url, overwrite: self._write(
                    job, part, target, url, overwrite=overwrite, profile=profile
                ),
                replace=damaged,
                after=parent,
            )
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is Refusal.INTERNAL:
                _log.exception("an extent cannot be stored")
            return Written(refusal, str(error))
        size = source_bytes(part)
        codec = job.track.rpartition("/")[2]
        seconds = time.monotonic() - started
        first = 0 if damaged else report.file_bytes
        return Written(None, "", report.file_bytes, size, first, seconds, codec)

    def _refusal(
        self, name: ObjectName, parent: ObjectName | None, *, damaged: bool
    ) -> Refusal | None:
        """What is known before any work."""
        if not damaged and self._backend.present(name):
            return Refusal.PRESENT
        if parent is not None and not self._backend.present(parent):
            return Refusal.NO_PARENT
        return None

    def _damaged(self, name: ObjectName) -> bool:
        """Whether the object still is what a reader complained of; not so of other versions."""
        try:
            with open_artifact(
                self._backend.locate(name),
                storage_options=self._options.storage_options or None,
                transport=self._options.transport,
            ) as artifact:
                check_segments(artifact)
        except InvalidError:
            return True
        except StorageError as error:
            return error.code == "io.short"
        except KvformatError:
            return False
        return False

    def _profile(self, job: EncodeJob, cache: Cache) -> Profile | None:
        """The calibration profile to write with; raises ``profile.missing`` or ``.content``."""
        quality, namespace = job.track.partition("/")[0], job.scope.namespace
        if self._options.profile is None or quality == EXACT:
            return None
        if namespace not in self._fitting:
            groups = [item.group for item in cache.groups]
            try:
                self._profiles.require(quality, job.scope.identity, groups)
            except UsageError as error:
                raise InvalidError(
                    "profile.content", error.message, where=error.where,
                    expected=error.expected, found=error.found, next_step=error.next_step,
                ) from error  # fmt: skip
            self._fitting.add(namespace)
        return self._profiles.own()

    def _write(
        self,
        job: EncodeJob,
        part: Cache,
        target: Target,
        url: str,
        *,
        overwrite: bool,
        profile: Profile | None,
    ) -> WriteReport:
        ids, scope = None, job.scope
        start, stop = target.extent.tokens
        if job.token_ids is not None:
            ids = np.frombuffer(job.token_ids, "<u4")[:stop]
        return write(
            url,
            part,
            identity=scope.identity,
            token_ids=ids,
            salt=scope.salt if ids is not None else b"",
            tracks=[job.track],
            first_position=start if ids is not None else 0,
            content=tuple(span for span in job.content if span.start + span.count <= stop),
            lineage=job.lineage,
            overwrite=overwrite,
            workers=self._options.encoder_workers,
            profile=profile,
            storage_options=self._options.storage_options or None,
        )

    def convert(self, job: ConvertJob) -> Answer:
        """Publish the variant, then let it take the place of the object if nobody holds that."""
        started = time.monotonic()
        size = 0
        try:
            size = convert_object(self._backend, self._options, job.name, job.codec)
        except Exception as error:
            return Answer((Written(refusal_of(error), str(error)),))
        seconds = time.monotonic() - started
        return Answer((Written(None, "", size, 0, 0, seconds, job.codec),))

    def look(self) -> Answer:
        """Evict if that is due."""
        return Answer((), *_told(self._look(0, full=False, now=True)))

    def _look(self, new_bytes: int, *, full: bool, now: bool = False) -> Collected | None:
        """Listing costs time, so only after a 64th of the limit was written, or on a full disk."""
        limit = self._options.limit_bytes
        if self._since_look is not None:
            self._since_look += new_bytes
        due = limit is not None and (self._since_look is None or self._since_look >= limit // 64)
        if not (full or due or now):
            return None
        try:
            found = collect(self._backend, limit, self._options.low_water)
            if full and not found.removed and found.ran:
                goal = int(found.size_bytes * self._options.low_water)
                found = collect(self._backend, limit, goal_bytes=goal)
        except (KvformatError, OSError) as error:
            _log.warning("cannot look at the store: %s", error)
            return None
        self._since_look = 0
        return found


def _told(collected: Collected | None) -> tuple[dict[str, float], dict[str, float]]:
    if collected is None or not collected.ran:
        return {}, {}
    gauges = {
        "store_bytes": float(collected.size_bytes),
        "unknown_version_objects": float(collected.unknown),
    }
    counts = {
        "evicted": float(collected.removed),
        "evicted_bytes": float(collected.freed_bytes),
    }
    return gauges, counts


def check_segments(artifact: Artifact) -> None:
    """Every digest of an open artifact; raises ``InvalidError``."""
    for track in artifact.manifest.tracks:
        table = artifact.segment_table(track)
        for index in range(len(artifact.set_table(track.quality))):
            artifact.quantisation_set(track.quality, index)
        for index in range(len(table)):
            record = table[index]
            if digest(artifact.segment_bytes(record)) != record.digest:
                where = f"track {track.name}, segment {index}"
                raise InvalidError("segment.digest", "the segment is damaged", where=where)


def names_of(name: ObjectName, hashes: Sequence[str], start: int) -> tuple[ObjectName, ...]:
    """All names of a dense extent that holds blocks with these hashes from ``start`` on."""
    if name.namespace.grid[0] != "g":
        return (replace(name, variant=""),)
    return tuple(
        ObjectName(name.namespace, item, start + number + 1) for number, item in enumerate(hashes)
    )


def convert_object(backend: Backend, options: StoreOptions, name: ObjectName, codec: str) -> int:
    """Transcode an object and let the result take its place; bytes written, 0 if it is done.

    The integers stay those of the source, so readers see the same bits. If a reader holds the
    source, the variant stays beside it until the next call.
    """
    variant = name.as_variant(codec)
    storage = options.storage_options or None
    size = 0
    with open_artifact(
        backend.locate(name), storage_options=storage, transport=options.transport
    ) as source:
        if all(codec in track.codecs for track in source.manifest.tracks):
            return 0
        tokens = source.manifest.tokens
        if not backend.present(variant):
            report = backend.publish(
                [variant],
                lambda url, overwrite: transcode(
                    source, url, codec, overwrite=overwrite, storage_options=storage
                ),
                after=name,
            )
            size = report.file_bytes
        hashes = tokens.chain.hashes if tokens.chain is not None else ()
        names = names_of(name, hashes, tokens.first_position // BLOCK_TOKENS) or (name,)
    backend.promote(names if names[-1] == name else (name,), variant)
    return size
