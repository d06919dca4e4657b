"""The artifacts below a directory, as ``kvformat serve`` offers them: by name, and as an index.

Nothing outside the directory is opened, whatever names and symbolic links say; no name with a
component that starts with a dot; nothing that does not end in ``.kvf``; and no file that is not a
complete artifact. The directory may change at any time, also while it is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from kvformat.digests import digest
from kvformat.errors import InvalidError, KvformatError, StorageError
from kvformat.header import (
    HEADER_BYTES,
    LARGEST_HEADER_BYTES,
    Header,
    check_against_manifest,
    parse_header,
)
from kvformat.manifest import parse_manifest

SUFFIX: Final = ".kvf"
MOST_ARTIFACTS: Final = 10_000
"""In the index; the rest is served, but not listed."""
MOST_ENTRIES: Final = 200_000
"""Names that are looked at for one index."""
READ_ONLY: Final = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
DIRECTORY: Final = getattr(os, "O_DIRECTORY", 0)
STEPWISE: Final = os.open in os.supports_dir_fd
"""Whether a path can be opened component by component; elsewhere a link made in the very moment
between the check and the opening would be followed."""
Stamp = tuple[int, int, int, int]
"""Device, inode, time of the last change in nanoseconds, size in bytes."""
NO_STAMP: Final = (0, 0, 0, 0)
Report = Callable[[str], None]


class NotOnShelfError(Exception):
    """There is nothing to serve under this name. The reason is the operator's business."""


@dataclass(frozen=True, slots=True)
class Volume:
    """An open artifact: all that is sent comes from this one file, whatever its name becomes."""

    descriptor: int
    header: Header
    stamp: Stamp

    @property
    def size_bytes(self) -> int:
        """Length of the file, which is that of its header."""
        return self.header.file_bytes

    @property
    def manifest_digest(self) -> str:
        """64 hexadecimal digits."""
        return self.header.manifest_digest.hex()

    @property
    def etag(self) -> str:
        """A strong entity tag: the same bytes have the same tag on every machine."""
        return f'"{self.manifest_digest}-{self.size_bytes}"'

    def unchanged(self) -> bool:
        """Whether nobody has written into the file since it was opened (PUB-2)."""
        return _stamp(os.fstat(self.descriptor)) == self.stamp

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly that part; raises ``io.short`` if the file was cut."""
        data = _read(self.descriptor, offset_bytes, length_bytes)
        if len(data) != length_bytes:
            raise StorageError("io.short", "the file ends early", where=f"byte {offset_bytes}")
        return data

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class Shelf:
    """The artifacts below ``directory``; safe to share between threads.

    ``report`` is called with one line for the operator when a file is found that is not served,
    once for each state of the file.
    """

    def __init__(self, directory: Path, report: Report) -> None:
        self.root = directory.resolve(strict=True)
        self._report = report
        self._reported: dict[str, Stamp] = {}
        self._rows: dict[str, tuple[Stamp, dict[str, Any] | None]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """End an index that is being made: its first artifacts take a millisecond each."""
        self._closed = True

    @contextlib.contextmanager
    def opened(self, target: str) -> Iterator[Volume]:
        """The artifact behind the path of a URL, percent-encoded, without query."""
        volume = self.open(target)
        try:
            yield volume
        finally:
            volume.close()

    def open(self, target: str) -> Volume:
        """As ``opened``; the caller closes. Raises ``NotOnShelfError`` or ``OSError``."""
        return self._open(self._resolved(_parts(target)))

    def _resolved(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """The same file without symbolic links, as components below the root."""
        try:
            path = self.root.joinpath(*parts).resolve(strict=True)
            inside = path.relative_to(self.root).parts
        except (OSError, ValueError, RuntimeError):
            raise NotOnShelfError from None
        _require_public(inside)
        return inside

    def _open(self, parts: tuple[str, ...]) -> Volume:
        """Open component by component, so that no link made meanwhile is followed."""
        shown = _shown(parts)
        try:
            descriptor = _descend(self.root, parts)
        except PermissionError:
            self._refuse(shown, NO_STAMP, StorageError("io.denied", "no permission to read it"))
            raise NotOnShelfError from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotOnShelfError
            try:
                header = _complete(descriptor, status.st_size)
            except KvformatError as error:
                self._refuse(shown, _stamp(status), error)
                raise NotOnShelfError from None
            return Volume(descriptor, header, _stamp(status))
        except BaseException:
            os.close(descriptor)
            raise

    def _refuse(self, shown: str, stamp: Stamp, error: KvformatError) -> None:
        with self._lock:
            if self._reported.get(shown) == stamp:
                return
            if len(self._reported) >= MOST_ARTIFACTS:
                self._reported.clear()
            self._reported[shown] = stamp
        self._report(f"{shown} is not served: [{error.code}] {error.message}")

    def index(self) -> bytes:
        """``index.json``: what is served, in the order of the names. A file's manifest is read
        once for each state of the file."""
        with self._lock:
            known = self._rows
        rows: dict[str, tuple[Stamp, dict[str, Any] | None]] = {}
        listed: list[dict[str, Any]] = []
        complete = True
        for parts in _walk(self.root):
            if parts is None or len(rows) >= MOST_ARTIFACTS or self._closed:
                complete = False
                break
            key = "/".join(parts)
            state = self._row(parts, known.get(key))
            if state is not None:
                rows[key] = state
                if state[1] is not None:
                    listed.append(state[1])
        with self._lock:
            self._rows = rows
        listed.sort(key=lambda row: str(row["url"]))
        value = {"artifacts": listed, "complete": complete, "index_version": 1}
        return json.dumps(value, indent=1, ensure_ascii=True).encode() + b"\n"

    def _row(
        self, parts: tuple[str, ...], known: tuple[Stamp, dict[str, Any] | None] | None
    ) -> tuple[Stamp, dict[str, Any] | None] | None:
        """The state of one file and its row, which is None if it is no artifact."""
        shown = _shown(parts)
        try:
            stamp = _stamp(self.root.joinpath(*parts).stat())
            if known is not None and known[0] == stamp:
                return known
            volume = self._open(self._resolved(parts))
        except (NotOnShelfError, OSError):
            return None
        try:
            return volume.stamp, _describe(volume, shown)
        except KvformatError as error:
            self._refuse(shown, volume.stamp, error)
            return volume.stamp, None
        except OSError:
            return None
        finally:
            volume.close()


def _parts(target: str) -> tuple[str, ...]:
    """The components of a URL's path, decoded; an encoded slash is no separator."""
    parts = tuple(
        os.fsdecode(unquote_to_bytes(item)) for item in target.removeprefix("/").split("/")
    )
    _require_public(parts)
    return parts


def _shown(parts: tuple[str, ...]) -> str:
    """The name as in a URL: printable, and the same however it was asked for."""
    return quote_from_bytes(os.fsencode("/".join(parts)))


def _require_public(parts: tuple[str, ...]) -> None:
    forbidden = {"/", "\0", os.sep, os.altsep or os.sep}
    for part in parts:
        if not part or part.startswith(".") or any(char in part for char in forbidden):
            raise NotOnShelfError
    if not parts or not parts[-1].endswith(SUFFIX):
        raise NotOnShelfError


def _descend(root: Path, parts: tuple[str, ...]) -> int:
    """A descriptor of the file; raises ``NotOnShelfError`` if it has gone or became a link."""
    try:
        if not STEPWISE:
            return os.open(root.joinpath(*parts), READ_ONLY)
        folder = os.open(root, READ_ONLY | DIRECTORY)
        for index, part in enumerate(parts):
            kind = DIRECTORY if index < len(parts) - 1 else 0
            try:
                below = os.open(part, READ_ONLY | NO_LINK | kind, dir_fd=folder)
            finally:
                os.close(folder)
            folder = below
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise NotOnShelfError from None
        raise
    return folder


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _read(descriptor: int, offset_bytes: int, length_bytes: int) -> bytes:
    data = b""
    while len(data) < length_bytes:
        os.lseek(descriptor, offset_bytes + len(data), os.SEEK_SET)
        part = os.read(descriptor, length_bytes - len(data))
        if not part:
            break
        data += part
    return data


def _complete(descriptor: int, size_bytes: int) -> Header:
    """The header of a file that is as long as it says (HDR-10)."""
    header = parse_header(_read(descriptor, 0, LARGEST_HEADER_BYTES))
    if header.file_bytes != size_bytes:
        raise InvalidError(
            "file.size",
            f"the file has {size_bytes:,} bytes and should have {header.file_bytes:,}",
        )
    return header


def _describe(volume: Volume, shown: str) -> dict[str, Any]:
    """One row of the index, from a manifest that was checked."""
    header = volume.header
    raw = volume.read(HEADER_BYTES, header.manifest_bytes)
    if digest(raw) != header.manifest_digest:
        raise InvalidError("manifest.digest", "the manifest is damaged")
    manifest = parse_manifest(raw)
    alignment = manifest.segmentation.alignment
    check_against_manifest(header, manifest.tables_bytes, alignment, manifest.data_bytes)
    return {
        "content_id": manifest.content_id,
        "file_bytes": header.file_bytes,
        "manifest_digest": volume.manifest_digest,
        "model": manifest.identity.model.id,
        "name": unquote_to_bytes(shown).decode("utf-8", "replace"),
        "tokens": manifest.tokens.count,
        "tracks": [track.name for track in manifest.tracks],
        "url": f"{shown}?manifest={volume.manifest_digest}",
    }


def _walk(root: Path) -> Iterator[tuple[str, ...] | None]:
    """Names that may be artifacts, in order; None if there are too many names to look at.

    Links to directories are not walked, so that a loop ends.
    """
    looked_at = 0
    folders: list[tuple[str, ...]] = [()]
    while folders:
        folder = folders.pop()
        below: list[tuple[str, ...]] = []
        with contextlib.suppress(OSError), os.scandir(root.joinpath(*folder)) as entries:
            for entry in entries:
                looked_at += 1
                if looked_at > MOST_ENTRIES:
                    yield None
                    return
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith("."):
                            below.append((*folder, entry.name))
                    elif entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                        yield (*folder, entry.name)
        folders += sorted(below, reverse=True)
