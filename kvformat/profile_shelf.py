"""Where calibration profiles are looked for: only among what the caller gives (spec TRF-4)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvformat.errors import InvalidError, KvformatError, UnsupportedError, UsageError
from kvformat.groups import Group
from kvformat.header import parse_header
from kvformat.manifest import Manifest
from kvformat.profiles import MAGIC, Profile, check_model, parse_profile
from kvformat.storage import as_text, open_source, storage_errors
from kvformat.storage.base import public_name
from kvformat.tables import SegmentRecord
from kvformat.tracks import TRANSFORMED, Track
from kvformat.transforms import LayerTransform

ProfilePlaces = Iterable[str | os.PathLike[str] | Profile] | str | os.PathLike[str] | Profile
SUFFIX: Final = ".kvp"
LARGEST_HEADER: Final = 4096


def load_profile(url: str | os.PathLike[str]) -> Profile:
    """The profile at a path or URL; raises ``InvalidError``, ``StorageError``."""
    source = open_source(url)
    try:
        header = parse_header(source.read_front(LARGEST_HEADER), MAGIC)
        size = source.size()
        if size not in (None, header.file_bytes):  # before that many bytes are asked for (ORD-4)
            raise InvalidError(
                "file.size",
                "the profile is truncated, or has bytes behind its end",
                where=source.name,
                expected=header.file_bytes,
                found=size,
            )
        return parse_profile(source.read(0, header.file_bytes))
    finally:
        source.close()


class ProfileShelf:
    """Profiles by digest, read when they are asked for.

    A directory is searched for files ``*.kvp``, not deeper; of each only the header is read to
    learn its digest.
    """

    def __init__(self, places: ProfilePlaces) -> None:
        if isinstance(places, (str, os.PathLike, Profile)):
            places = (places,)
        if not isinstance(places, Iterable):
            found = type(places).__name__
            raise UsageError("usage.argument", "profiles are no list of places", found=found)
        self._places = tuple(places)
        for place in self._places:
            if not isinstance(place, Profile):
                as_text(place)

    def find(self, digest: str) -> Profile:
        """The profile of that manifest digest; raises ``profile.missing``.

        A place that cannot be read, or a damaged copy, hides none behind it; its error is raised
        where there is no other.
        """
        failed: KvformatError | None = None
        for place in self._places:
            try:
                found, error = _find_in(place, digest)
            except UsageError:
                raise
            except KvformatError as unreadable:
                found, error = None, unreadable
            if found is not None:
                return found
            failed = failed or error
        if failed is not None:
            raise failed
        raise UnsupportedError(
            "profile.missing",
            "the artifact needs a calibration profile that is not among those given",
            where="/profile/digest",
            expected=digest,
            found=", ".join(map(_shown, self._places[:4])) or "nowhere to look",
            next_step=f"Give the file of profile {digest}, or its directory: profiles=..., "
            "or --profile",
        )


class Transforms:
    """The matrices that an artifact's transformed groups need, fetched when first used."""

    def __init__(self, manifest: Manifest, shelf: ProfileShelf) -> None:
        self._manifest = manifest
        self._shelf = shelf
        self._profile: Profile | None = None
        self._found: dict[tuple[str, str, int], LayerTransform] = {}
        self._lock = threading.Lock()

    def needed(self, track: Track, group: int) -> bool:
        """Whether a track transforms the group of that index."""
        return self._manifest.quality(track.quality).encodings[group] == TRANSFORMED

    def at_hand(self, track: Track) -> bool:
        """Whether a track can be restored with the profiles given."""
        if not any(self.needed(track, group) for group in range(len(self._manifest.groups))):
            return True
        try:
            with self._lock:
                self._load()
        except UsageError:
            raise
        except KvformatError:
            return False
        return True

    def of(self, track: Track, record: SegmentRecord) -> tuple[LayerTransform, ...] | None:
        """Those of a segment's layers, None where its group is not transformed."""
        cell = record.cell
        if not self.needed(track, cell.group):
            return None
        group = self._manifest.groups[cell.group]
        layers = group.layers[cell.layer_index : cell.layer_index + cell.layer_count]
        with self._lock:
            return tuple(self._of_layer(track.quality, group, layer) for layer in layers)

    def check(self) -> int:
        """Look at every transform that the artifact needs; how many there are."""
        count = 0
        with self._lock:
            for quality in self._manifest.qualities:
                for group, encoding in zip(self._manifest.groups, quality.encodings, strict=True):
                    for layer in group.layers if encoding == TRANSFORMED else ():
                        self._of_layer(quality.name, group, layer)
                        count += 1
        return count

    def _of_layer(self, quality: str, group: Group, layer: int) -> LayerTransform:
        key = (quality, group.name, layer)
        if key not in self._found:
            identity = self._manifest.identity
            self._found[key] = self._load().transform(quality, group, layer, identity)
        return self._found[key]

    def _load(self) -> Profile:
        if self._profile is None:
            profile = self._shelf.find(self._manifest.profile or "")
            check_model(profile, self._manifest.identity.model)
            self._profile = profile
        return self._profile


def _shown(place: str | os.PathLike[str] | Profile) -> str:
    if isinstance(place, Profile):
        return f"profile {place.digest[:12]}"
    return public_name(as_text(place))


def _find_in(
    place: str | os.PathLike[str] | Profile, digest: str
) -> tuple[Profile | None, KvformatError | None]:
    """The profile, if a place has it whole, or what is wrong with the first that is not."""
    if isinstance(place, Profile):
        return (place if place.digest == digest else None), None
    failed: KvformatError | None = None
    for url in _files(place):
        try:
            profile = load_profile(url) if _digest_of(url) == digest else None
        except UsageError:
            raise
        except KvformatError as error:
            failed = failed or error
            continue
        if profile is not None and profile.digest == digest:  # or it was replaced just now
            return profile, None
    return None, failed


def _files(place: str | os.PathLike[str]) -> Iterator[str]:
    text = as_text(place)
    path = Path(text)
    if "://" in text or not path.is_dir():
        yield text
        return
    with storage_errors(text, "io.read", "listing the directory"):
        names = sorted(path.glob(f"*{SUFFIX}"))
    for name in names:
        if name.is_file():
            yield str(name)


def _digest_of(url: str) -> str | None:
    """The digest that a file's header states, None for what is no profile."""
    source = open_source(url)
    try:
        return parse_header(source.read_front(LARGEST_HEADER), MAGIC).manifest_digest.hex()
    except UsageError:
        raise
    except KvformatError:
        return None
    finally:
        source.close()
