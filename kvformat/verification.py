"""Strict verification of a whole artifact (spec section 11.3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvformat.artifact import Artifact, open_artifact
from kvformat.codecs.base import Codec
from kvformat.codecs.registry import CODECS
from kvformat.digests import digest
from kvformat.errors import InvalidError
from kvformat.expectations import Expectation, require_agreement
from kvformat.profile_shelf import ProfilePlaces
from kvformat.sandbox import SandboxedCodec
from kvformat.segments import check_strictly, decode_segment
from kvformat.sequence import DataSequence
from kvformat.source_digest import SourceDigest
from kvformat.storage import Transport
from kvformat.tables import SegmentRecord
from kvformat.tracks import EXACT, Track
from kvformat.workers import in_order, worker_count

Progress = Callable[[int, int], None]
Job = tuple[SegmentRecord, bytes]
Checked = tuple[bytes, SegmentRecord, Any]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked, and what was not (VER-3)."""

    name: str
    manifest_digest: str
    content_id: str
    tokens: int
    checked: dict[str, int]
    not_checked: tuple[str, ...]
    verified_tokens: int | None = None
    tracks: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For ``verify --json``."""
        return {
            "artifact": {
                "name": self.name,
                "manifest_digest": self.manifest_digest,
                "content_id": self.content_id,
                "tracks": list(self.tracks),
                "verified_tokens": self.verified_tokens,
            },
            "checked": dict(self.checked),
            "not_checked": list(self.not_checked),
        }


def verify(
    url: str | os.PathLike[str] | bytes,
    *,
    expect: Expectation | None = None,
    in_child: bool = True,
    workers: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
    profiles: ProfilePlaces | None = None,
) -> VerifyReport:
    """Check every requirement of the spec on all bytes of an artifact, or raise.

    Expected token ids must agree in every block that they cover. With ``in_child`` video is
    decoded in child processes with limits on memory and time. Integers are checked without a
    calibration profile; given ``profiles``, the one that the artifact names must be among them
    and fit it. Raises the ``KvformatError`` of
    the first failure found.
    """
    with open_artifact(
        url,
        expect=expect,
        storage_options=storage_options,
        transport=transport,
        profiles=() if profiles is None else profiles,
    ) as artifact:
        if expect is not None and expect.token_ids is not None:
            require_agreement(artifact.manifest, expect, artifact.verified_length or 0)
        verifier = _Verifier(artifact, in_child, workers, progress, with_profile=bool(profiles))
        return verifier.run(expect)


class _Verifier:
    def __init__(
        self,
        artifact: Artifact,
        in_child: bool,
        workers: int | None,
        progress: Progress | None,
        *,
        with_profile: bool,
    ) -> None:
        self.artifact = artifact
        self.with_profile = with_profile and artifact.manifest.profile is not None
        self.manifest = artifact.manifest
        self.sandbox = SandboxedCodec(CODECS["hevc"]) if in_child else None
        self.workers = worker_count(workers, 32 * 2**20)
        self.progress = progress
        exact = (track for track in self.manifest.tracks if track.quality == EXACT)
        self.exact = next(exact, None)
        self.source = None if self.exact is None else SourceDigest(artifact)
        self.total = sum(track.segments for track in self.manifest.tracks)
        self.done = 0
        self.checked = {"bytes": 0, "tables": 0, "sets": 0, "segments": 0, "integers": 0}

    def run(self, expect: Expectation | None) -> VerifyReport:
        """All checks, in the order of the file."""
        artifact, manifest = self.artifact, self.manifest
        self._check_front()
        for quality in manifest.qualities:
            artifact.set_table(quality.name)
        for track in manifest.tracks:
            artifact.segment_table(track)
        self.checked["tables"] = len(manifest.qualities) + len(manifest.tracks)
        self._compare_tracks()
        self._compare_exact_groups()
        with ExitStack() as stack:
            reader = stack.enter_context(closing(DataSequence(artifact)))
            if self.sandbox is not None:
                stack.enter_context(closing(self.sandbox))
            self._check_sets(reader)
            self._check_tracks(reader)
        self._check_source()
        if self.with_profile:
            self.checked["transforms"] = artifact.transforms.check()
        self.checked["bytes"] = artifact.front.header.file_bytes
        return VerifyReport(
            artifact.name,
            artifact.manifest_digest,
            manifest.content_id,
            manifest.tokens.count,
            self.checked,
            tuple(self._not_checked(expect)),
            artifact.verified_length,
            artifact.tracks,
        )

    def _check_front(self) -> None:
        """HDR-9 and HDR-10 on bytes that opening may not have fetched."""
        front = self.artifact.front
        padding = self.artifact.file_bytes(
            front.header.front_bytes, front.data_start - front.header.front_bytes
        )
        if any(padding):
            raise InvalidError(
                "data.padding",
                "the padding behind the tables is not zero",
                where=f"byte {front.header.front_bytes}",
            )
        self.artifact.check_end()

    def _compare_exact_groups(self) -> None:
        """REC-10: what two qualities hold exactly is the same."""
        first: dict[int, Track] = {}
        for track in self.manifest.tracks:
            encodings = self.manifest.quality(track.quality).encodings
            mine = self.artifact.segment_table(track).records
            for group, encoding in enumerate(encodings):
                if encoding != EXACT:
                    continue
                other = first.setdefault(group, track)
                theirs = self.artifact.segment_table(other).records
                differs = mine["integer_digest"] != theirs["integer_digest"]
                wrong = np.flatnonzero(differs & (mine["group"] == group))
                if len(wrong):
                    raise InvalidError(
                        "table.record",
                        "two qualities differ in what both hold exactly",
                        where=f"segment table of {track.name}, record {int(wrong[0])}",
                        expected=f"the integer_digest of {other.name}",
                    )

    def _compare_tracks(self) -> None:
        """REC-6, for what the tables say; side blocks follow from the digests below."""
        first: dict[str, Track] = {}
        for track in self.manifest.tracks:
            other = first.setdefault(track.quality, track)
            mine = self.artifact.segment_table(track).records
            theirs = self.artifact.segment_table(other).records
            for name in ("set_index", "integer_digest", "side_bytes"):
                wrong = np.flatnonzero(mine[name] != theirs[name])
                if len(wrong):
                    raise InvalidError(
                        "table.record",
                        f"two tracks of one quality differ in {name}",
                        where=f"segment table of {track.name}, record {int(wrong[0])}",
                        expected=f"as in {other.name}",
                    )

    def _check_sets(self, reader: DataSequence) -> None:
        for quality in self.manifest.qualities:
            table = self.artifact.set_table(quality.name)
            for index in range(len(table)):
                record = table[index]
                data = reader.take(record.offset, record.size_bytes)
                self.artifact.quantisation_set(quality.name, index, data)
                self.checked["sets"] += 1

    def _check_tracks(self, reader: DataSequence) -> None:
        sides: dict[str, list[bytes]] = {}
        for track in self.manifest.tracks:
            found: list[bytes] = []
            jobs = self._stored(track, reader)
            check = self._checker(track)
            for side, record, integers in in_order(check, jobs, self.workers):
                found.append(side)
                if integers is not None and self.source is not None:
                    self.source.add(record, integers)
                self.done += 1
                self.checked["segments"] += 1
                if self.progress is not None:
                    self.progress(self.done, self.total)
            expected = sides.setdefault(track.quality, found)
            for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                if mine != theirs:
                    raise InvalidError(
                        "segment.side",
                        "the side blocks of two tracks of one quality differ",
                        where=f"track {track.name}, segment {index}",
                    )

    def _stored(self, track: Track, reader: DataSequence) -> Iterator[Job]:
        table = self.artifact.segment_table(track)
        for index in range(len(table)):
            record = table[index]
            yield record, reader.take(record.offset, record.stored_bytes)

    def _checker(self, track: Track) -> Callable[[Job], Checked]:
        """Checks one segment and returns the digest of its side block.

        The segment comes with it where the source digest takes it as it comes.
        """
        kept = track is self.exact and self.source is not None and self.source.in_file_order

        def check(job: Job) -> Checked:
            record, data = job
            context = self.artifact.context(track, record, restoring=False)
            codec: Codec | None = self.sandbox if context.codec == "hevc" else None
            segment = decode_segment(context, data, strict=True, codec=codec)
            check_strictly(segment)
            side = digest(memoryview(data)[: record.side_bytes])
            return side, record, segment.decoded.integers if kept else None

        values = sum(
            int(np.prod(group.shape(self.manifest.tokens.count))) for group in self.manifest.groups
        )
        self.checked["integers"] += values
        return check

    def _check_source(self) -> None:
        """VER-2: the source digest, if the exact bytes are here."""
        if self.source is None or self.exact is None:
            return
        track = self.exact
        if not self.source.in_file_order:
            table = self.artifact.segment_table(track)
            self.source.add_all(lambda index: self._exact(track, table[index]))
        found = self.source.hex()
        if found != self.manifest.source_digest:
            raise InvalidError(
                "data.source",
                "the exact track does not hold the source tensors",
                where="/source_digest",
                expected=self.manifest.source_digest,
                found=found,
            )

    def _exact(self, track: Track, record: SegmentRecord) -> tuple[SegmentRecord, Any]:
        """A segment of the exact track that was checked before, once more."""
        context = self.artifact.context(track, record, restoring=False)
        data = self.artifact.segment_bytes(record)
        return record, decode_segment(context, data).decoded.integers

    def _not_checked(self, expect: Expectation | None) -> Iterator[str]:
        """What a person must not read into ``ok``."""
        manifest = self.manifest
        if manifest.tokens.chain is None:
            yield f"tokens: not verified, the identity is of kind {manifest.identity.kind}"
        elif expect is None or expect.token_ids is None:
            yield "tokens: the prefix chain was not recomputed, for no token ids were given"
        if not any(track.quality == EXACT for track in manifest.tracks):
            yield "source_digest: there is no exact track to recompute it from"
        if manifest.profile is not None and not self.with_profile:
            yield f"profile: whether {manifest.profile} is at hand and fits; none was given"
        if any(quality.name != EXACT for quality in manifest.qualities):
            yield "quality: whether the model answers as with the original cache"
        if any("hevc" in track.codecs for track in manifest.tracks):
            yield "hevc: references per picture and the bypass of each coding unit (VER-5)"
        yield "identity: whether its statements are true; nothing is signed"
