"""Holds on files: advisory locks that the system gives back when a process ends in any way."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Final

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows refuses to delete what is open
    fcntl = None

BUSY: Final = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
TRIES: Final = 3


class Locked(Enum):
    """What the system said to a request for a lock."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "this file system has no locks"


class FileHold:
    """A shared lock on an open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @staticmethod
    def take(path: Path) -> FileHold | None:
        """Hold what ``path`` leads to; None if there is nothing, or it is being deleted."""
        for _ in range(TRIES):
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except (FileNotFoundError, NotADirectoryError):
                return None
            if _lock(descriptor, shared=True) is not Locked.NO and _leads_to(path, descriptor):
                return FileHold(descriptor)
            os.close(descriptor)
        return None

    def release(self) -> None:
        """Let go; may be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _leads_to(path: Path, descriptor: int) -> bool:
    """The name may have gone, or have been given to another file, before the lock was there."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, *, shared: bool) -> Locked:
    if fcntl is None:
        return Locked.UNKNOWN
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return Locked.NO if error.errno in BUSY else Locked.UNKNOWN
    return Locked.YES


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[Locked]:
    """Whether nobody holds ``path``, and nobody does for as long as the block runs."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        yield Locked.NO
        return
    try:
        state = _lock(descriptor, shared=False)
        yield state if _leads_to(path, descriptor) else Locked.NO
    finally:
        os.close(descriptor)


class ExclusiveLock(contextlib.AbstractContextManager[bool]):
    """Whether this is the only one in the block; a file system without locks lets all in.

    The file is opened at once: raises ``OSError`` where that is not possible.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(path, flags, 0o644)

    def __enter__(self) -> bool:
        return _lock(self._descriptor, shared=False) is not Locked.NO

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
