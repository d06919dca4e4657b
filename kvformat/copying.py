"""Copying an artifact between any two places, verified on the way (``kvformat cp``)."""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

from kvformat.artifact import Artifact, open_artifact
from kvformat.digests import digest
from kvformat.errors import InvalidError
from kvformat.expectations import Expectation
from kvformat.sequence import DataSequence
from kvformat.storage import Data, Transport, as_text, ensure_absent, local_path, publish
from kvformat.tables import SegmentRecord, SetRecord

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was copied; every digest of the file was compared, no bitstream decoded."""

    source: str
    target: str
    manifest_digest: str
    file_bytes: int
    objects: int
    requests: int
    retries: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A set or a segment: where it lies in the data section, and its digest."""

    offset: int
    size_bytes: int
    digest: bytes
    code: str
    where: str


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    expect: Expectation | None = None,
    progress: Progress | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
) -> CopyReport:
    """Copy an artifact from any URL to any other, byte for byte.

    Header, manifest, tables, every set and segment and all padding are checked while they pass;
    the target appears in one step, and only if all of it is good. ``target`` may be a
    directory, or end in a slash: the name is then that of the source. ``progress`` is called with
    bytes done and in all. Raises ``InvalidError``, ``StorageError``, ``UsageError``.
    """
    started = time.monotonic()
    goal = target_name(as_text(source), as_text(target))
    ensure_absent(goal, overwrite=overwrite, storage_options=target_options)
    with open_artifact(
        source, expect=expect, storage_options=source_options, transport=transport
    ) as artifact:
        objects = list(stored_objects(artifact))
        publish(
            goal,
            lambda file: _write(artifact, objects, file, progress),
            overwrite=overwrite,
            storage_options=target_options,
        )
        traffic = artifact.source.meter.traffic()
        return CopyReport(
            artifact.name,
            goal,
            artifact.manifest_digest,
            artifact.front.header.file_bytes,
            len(objects),
            traffic.requests,
            traffic.retries,
            time.monotonic() - started,
        )


def target_name(source: str, target: str) -> str:
    """``target``, with the name of the source behind it if it is a directory."""
    path = local_path(target)
    if not (target.endswith("/") or (path is not None and path.is_dir())):
        return target
    name = posixpath.basename(source.partition("?")[0].rstrip("/")) or "cache.kvf"
    return f"{target.rstrip('/')}/{name}"


def stored_objects(artifact: Artifact) -> Iterator[StoredObject]:
    """All sets and segments in the order of the file; tables are fetched and checked."""
    for quality in artifact.manifest.qualities:
        sets = artifact.set_table(quality.name)
        for index in range(len(sets)):
            yield _set(sets[index], f"quality {quality.name}, set {index}")
    for track in artifact.manifest.tracks:
        table = artifact.segment_table(track)
        for index in range(len(table)):
            yield _segment(table[index], f"track {track.name}, segment {index}")


def _set(item: SetRecord, where: str) -> StoredObject:
    return StoredObject(item.offset, item.size_bytes, item.digest, "set.digest", where)


def _segment(item: SegmentRecord, where: str) -> StoredObject:
    return StoredObject(item.offset, item.stored_bytes, item.digest, "segment.digest", where)


def _write(
    artifact: Artifact,
    objects: list[StoredObject],
    file: IO[bytes],
    progress: Progress | None,
) -> None:
    start, total = artifact.front.data_start, artifact.front.header.file_bytes
    file.write(front_bytes(artifact))
    with closing(DataSequence(artifact)) as data:
        for item in objects:
            file.write(bytes(item.offset - data.cursor))
            file.write(_checked(artifact, item, data.take(item.offset, item.size_bytes)))
            if progress is not None:
                progress(start + data.cursor, total)
        artifact.check_end()


def front_bytes(artifact: Artifact) -> bytes:
    """Header, manifest, tables as checked, and the padding behind them."""
    manifest = artifact.manifest
    tables = [artifact.set_table(item.name).records for item in manifest.qualities]
    tables += [artifact.segment_table(item).records for item in manifest.tracks]
    front = artifact.front.prefix[: artifact.front.header.tables_start]
    front += b"".join(table.tobytes() for table in tables)
    return front + bytes(artifact.front.data_start - len(front))


def _checked(artifact: Artifact, item: StoredObject, data: Data) -> Data:
    """The object if it is good; a remote storage is asked once more."""
    if digest(data) == item.digest:
        return data
    if artifact.source.remote:
        artifact.source.meter.retry()
        data = artifact.source.read(artifact.front.data_start + item.offset, item.size_bytes)
    found = digest(data)
    if found != item.digest:
        raise InvalidError(
            item.code,
            "an object is damaged",
            where=item.where,
            expected=item.digest.hex(),
            found=found.hex(),
            next_step="Nothing was written. Fetch the source again, or copy from elsewhere",
        )
    return data
