"""What a store needs of the storage under it, and what is guaranteed where.

===================  ====================================  =====================================
                     directory (``local``)                 object store (``objects``)
===================  ====================================  =====================================
publication          create-only link of a synced file     create-only upload (spec 11.4)
grid                 dense: hard links name each block     sparse: only ends of extents
lookup               one ``stat`` a probe                  one GET of one byte a probe
time of last use     access time of the file, which the    an object ``.use`` beside it, written
                     store sets itself (what else reads    at most every ``mark_s``
                     the file may set it too)
hold                 shared ``flock`` on the open file:    this process does not delete it; other
                     no process deletes it; given back     processes leave it for ``grace_s`` after
                     by the system when a holder dies      its last use
deleted while read   not possible; even then the open      the read ends as a miss
                     file stays whole
size                 counted once per file                 counted per object
===================  ====================================  =====================================

On network file systems ``flock`` holds between machines where the server keeps locks (NFS with
its lock service). Where the system refuses locks, a directory is treated like an object store:
nothing is deleted that was used in the last ``grace_s``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvformat.store.names import ObjectName

T = TypeVar("T")


class Hold(Protocol):
    """An object that is kept until ``release``."""

    def release(self) -> None:
        """Let go."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name that a listing found. ``key`` is equal for names of the same stored bytes.

    ``name`` is None for what the store did not make, ``used_ns`` nanoseconds since the epoch.
    """

    path: str
    name: ObjectName | None
    size_bytes: int
    used_ns: int
    key: object


class Backend(Protocol):
    """Raises ``StorageError`` where the storage fails. Safe to share between threads."""

    url: str
    dense: bool

    def present(self, name: ObjectName) -> bool:
        """Whether there is such an object: one question, no listing."""

    def locate(self, name: ObjectName) -> str:
        """The path or URL to open."""

    def publish(
        self,
        names: Sequence[ObjectName],
        write: Callable[[str, bool], T],
        *,
        replace: bool = False,
        after: ObjectName | None = None,
    ) -> T:
        """Make an object visible under ``names``, in ascending order; the last is that of its end.

        ``write`` gets a path or URL and whether to overwrite. ``after`` is the parent, whose time
        of use it takes. Raises ``io.exists`` if the last name exists and ``replace`` is not set.
        """

    def promote(self, names: Sequence[ObjectName], variant: ObjectName) -> bool:
        """Let the variant take the place of what ``names`` lead to, unless that is held."""

    def mark(self, names: Sequence[ObjectName]) -> None:
        """Note a use of all of these, ancestors first, with one time. Failures do not matter."""

    def hold(self, names: Sequence[ObjectName]) -> Sequence[Hold]:
        """Keep all objects that these names of one cell lead to; empty if the last is not there."""

    def entries(self) -> Iterator[Entry]:
        """All that is in the store: for statistics and eviction, never for a lookup."""

    def remove(self, entries: Sequence[Entry]) -> bool:
        """Delete the names of one object, the last first, unless it is held or was just used."""

    def remove_name(self, name: ObjectName) -> bool:
        """Delete one name unless its object is held; whether it is gone now."""

    def undisturbed(self, name: ObjectName) -> contextlib.AbstractContextManager[None]:
        """Reading in the block is no use of the object."""

    def sweep(self, older_than_s: float) -> int:
        """Remove what writers that died left behind; how many."""

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        """Whether this process may evict now."""
