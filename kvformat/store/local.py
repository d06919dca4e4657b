"""A store in a directory. An object is a file; its names are hard links (see ``backend``).

A new object is written and synced under ``.staging``, then linked to its names one by one: every
name leads to a whole artifact from the first moment. A longer extent takes over the names of a
shorter one in the same cell, whose file then goes away by itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from kvformat.errors import StorageError
from kvformat.header import MAGIC
from kvformat.manifest import VERSION_MAJOR, VERSION_MINOR
from kvformat.storage import storage_errors
from kvformat.store.backend import Entry
from kvformat.store.leases import ExclusiveLock, FileHold, Locked, lock_file
from kvformat.store.names import ObjectName, parse_path

T = TypeVar("T")
STAGING: Final = ".staging"
GC_LOCK: Final = ".gc.lock"
_VERSION: Final = struct.Struct("<8sHH")


class LocalBackend:
    """The directory ``root``, made if it is not there."""

    dense = True

    def __init__(self, root: Path, grace_s: float = 3600.0) -> None:
        self.url = str(root)
        self._root = root
        self._staging = root / STAGING
        self._grace_ns = int(grace_s * 1e9)
        with storage_errors(str(root), "io.write", "making the store"):
            self._staging.mkdir(parents=True, exist_ok=True)

    def _path(self, name: ObjectName) -> Path:
        return self._root / name.path

    def present(self, name: ObjectName) -> bool:
        """One ``stat``."""
        return _stat(self._path(name)) is not None

    def locate(self, name: ObjectName) -> str:
        """The path."""
        return str(self._path(name))

    def publish(
        self,
        names: Sequence[ObjectName],
        write: Callable[[str, bool], T],
        *,
        replace: bool = False,
        after: ObjectName | None = None,
    ) -> T:
        """As ``Backend.publish``."""
        final = self._path(names[-1])
        if not replace and _stat(final) is not None:
            raise _exists(final)
        staged = self._staging / f"{secrets.token_hex(8)}.kvf"
        with storage_errors(str(staged), "io.write", "making the store"):
            self._staging.mkdir(parents=True, exist_ok=True)  # an operator may have emptied it
        try:
            result = write(str(staged), False)
            with storage_errors(str(final), "io.write", "publishing"):
                self._take_time(staged, after)
                self._link(staged, [self._path(name) for name in names], replace=replace)
        finally:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
        return result

    def _take_time(self, staged: Path, after: ObjectName | None) -> None:
        """A parent is never less recently used than its child, also if we die before ``mark``."""
        before = _stat(self._path(after)) if after is not None else None
        if before is not None:
            own = staged.stat()
            os.utime(staged, ns=(min(before.st_atime_ns, own.st_atime_ns), own.st_mtime_ns))

    def _link(self, staged: Path, paths: Sequence[Path], *, replace: bool) -> None:
        shorter = _superseded(paths[:-1])
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(staged, path)
            except FileExistsError:
                if replace or path in shorter:
                    self._relink(staged, path)
                elif path == paths[-1]:
                    raise

    def _relink(self, source: Path, path: Path) -> None:
        """Let ``path`` lead to ``source`` in one step."""
        temporary = self._staging / f"{secrets.token_hex(8)}.link"
        os.link(source, temporary)
        try:
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def promote(self, names: Sequence[ObjectName], variant: ObjectName) -> bool:
        """As ``Backend.promote``."""
        source, final = self._path(variant), self._path(names[-1])
        with storage_errors(str(final), "io.write", "replacing"), lock_file(final) as state:
            if state is not Locked.YES:
                return False
            old = final.stat().st_ino
            for path in map(self._path, names):
                found = _stat(path)
                if found is not None and found.st_ino == old:
                    self._relink(source, path)
            source.unlink(missing_ok=True)
        return True

    def mark(self, names: Sequence[ObjectName]) -> None:
        """Set access times, ancestors first."""
        now = time.time_ns()
        for name in names:
            path = self._path(name)
            with contextlib.suppress(OSError):
                found = path.stat()
                if found.st_atime_ns < now:
                    os.utime(path, ns=(now, found.st_mtime_ns))

    def hold(self, names: Sequence[ObjectName]) -> list[FileHold]:
        """Open files with shared locks, one for each file that the names lead to."""
        holds: list[FileHold] = []
        seen: set[int] = set()
        with storage_errors(names[-1].path, "io.read", "holding"):
            for name in reversed(names):
                path = self._path(name)
                found = _stat(path)
                if found is not None and found.st_ino not in seen:
                    seen.add(found.st_ino)
                    hold = FileHold.take(path)
                    holds += [] if hold is None else [hold]
                if not holds:
                    return []
        return holds

    def entries(self) -> Iterator[Entry]:
        """Walk the directory; what disappears meanwhile is left out."""
        for path, found in _walk(self._root):
            relative = path[len(self.url) :].lstrip(os.sep).replace(os.sep, "/")
            if relative.startswith((f"{STAGING}/", GC_LOCK)):
                continue
            key = (found.st_dev, found.st_ino)
            yield Entry(relative, parse_path(relative), found.st_size, found.st_atime_ns, key)

    def remove(self, entries: Sequence[Entry]) -> bool:
        """As ``Backend.remove``; also spares files of a version that is not known here."""
        first = self._root / entries[-1].path
        with storage_errors(str(first), "io.write", "deleting"), lock_file(first) as state:
            found = _stat(first)
            if found is None or (found.st_dev, found.st_ino) != entries[-1].key:
                return False
            just_used = found.st_atime_ns > entries[-1].used_ns
            young = found.st_atime_ns > time.time_ns() - self._grace_ns
            if state is Locked.NO or just_used or (state is Locked.UNKNOWN and young):
                return False
            if _foreign_version(first):
                return False
            for entry in reversed(entries):  # the end first: no hole in front of a name (lookup)
                (self._root / entry.path).unlink(missing_ok=True)
        return True

    def remove_name(self, name: ObjectName) -> bool:
        """As ``Backend.remove_name``."""
        path = self._path(name)
        if _stat(path) is None:
            return True
        with storage_errors(str(path), "io.write", "deleting"), lock_file(path) as state:
            if state is Locked.YES and not _foreign_version(path):
                path.unlink(missing_ok=True)
        return _stat(path) is None

    @contextlib.contextmanager
    def undisturbed(self, name: ObjectName) -> Iterator[None]:
        """Put the access time back; a use in the same moment is lost."""
        path = self._path(name)
        before = _stat(path)
        try:
            yield
        finally:
            if before is not None:
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def sweep(self, older_than_s: float) -> int:
        """Remove staged files that nobody has written to for so long."""
        count, limit = 0, time.time() - older_than_s
        with storage_errors(self.url, "io.write", "tidying"):
            found = list(self._staging.iterdir()) if self._staging.is_dir() else []
        for path in found:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime <= limit:
                    path.unlink()
                    count += 1
        return count

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        """One process of this machine evicts at a time."""
        with storage_errors(self.url, "io.write", "locking"):
            return ExclusiveLock(self._root / GC_LOCK)


def _superseded(paths: Sequence[Path]) -> set[Path]:
    """Those that lead to files all of whose names are among ``paths``."""
    found = {path: stat for path in paths if (stat := _stat(path)) is not None}
    counts = Counter(stat.st_ino for stat in found.values())
    return {path for path, stat in found.items() if counts[stat.st_ino] == stat.st_nlink}


def _stat(path: Path) -> os.stat_result | None:
    with storage_errors(str(path), "io.read", "looking"):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _exists(path: Path) -> StorageError:
    return StorageError("io.exists", "the extent is stored already", where=str(path))


def _foreign_version(path: Path) -> bool:
    """Whether it is an artifact of a version that this release does not know."""
    with path.open("rb") as file:
        head = file.read(_VERSION.size)
    if len(head) < _VERSION.size:
        return False
    magic, major, minor = _VERSION.unpack(head)
    return magic == MAGIC and (major, minor) != (VERSION_MAJOR, VERSION_MINOR)


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    folders = [str(root)]
    while folders:
        try:
            with os.scandir(folders.pop()) as items:
                for item in items:
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.path)
                    elif item.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            yield item.path, item.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
