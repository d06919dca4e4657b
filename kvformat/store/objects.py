"""A store below a prefix of an object store, through fsspec (see ``backend``)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from kvformat.errors import StorageError
from kvformat.storage import Transport, open_source, storage_errors
from kvformat.storage.locate import filesystem
from kvformat.store.backend import Entry
from kvformat.store.names import SUFFIX, ObjectName, parse_path

T = TypeVar("T")
USE: Final = ".use"
MOST_MARKS: Final = 100_000


class ObjectBackend:
    """Objects below ``url``, for example ``s3://bucket/prefix``."""

    dense = False

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any],
        transport: Transport,
        *,
        grace_s: float,
        mark_s: float,
    ) -> None:
        self.url = url.rstrip("/")
        self._options = dict(storage_options)
        self._transport = transport
        self._grace_ns, self._mark_s = int(grace_s * 1e9), mark_s
        self._fs, self._root = filesystem(self.url, self._options)
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._marked: dict[str, float] = {}

    def locate(self, name: ObjectName) -> str:
        """The URL."""
        return f"{self.url}/{name.path}"

    def present(self, name: ObjectName) -> bool:
        """One GET of one byte."""
        source = open_source(self.locate(name), self._options, self._transport)
        try:
            return bool(source.read_front(1))
        except StorageError as error:
            if error.code == "io.not-found":
                return False
            raise
        finally:
            source.close()

    def publish(
        self,
        names: Sequence[ObjectName],
        write: Callable[[str, bool], T],
        *,
        replace: bool = False,
        after: ObjectName | None = None,  # noqa: ARG002 - times of use are objects of their own
    ) -> T:
        """As ``Backend.publish``; only the end has a name."""
        return write(self.locate(names[-1]), replace)

    def promote(self, names: Sequence[ObjectName], variant: ObjectName) -> bool:
        """Copy the variant over the object inside the store, once it was not used for a while."""
        with self._lock:
            if self._held[names[-1].path]:
                return False
        with self._errors("replacing"):
            self._fs.cp_file(self._full(variant.path), self._full(names[-1].path))
            self._fs.rm_file(self._full(variant.path))
        return True

    def mark(self, names: Sequence[ObjectName]) -> None:
        """Write ``.use`` objects, each at most every ``mark_s``."""
        now = time.monotonic()
        for name in names:
            with self._lock:
                last = self._marked.get(name.path)
                if last is not None and now - last < self._mark_s:
                    continue
                if len(self._marked) >= MOST_MARKS:
                    self._marked.clear()
                self._marked[name.path] = now
            with contextlib.suppress(StorageError), self._errors("marking"):
                self._fs.pipe_file(self._full(name.path.removesuffix(SUFFIX) + USE), b"1")

    def hold(self, names: Sequence[ObjectName]) -> list[_Held]:
        """Only this process knows of it; whether they are there shows when they are read."""
        return [_Held(self, name.path) for name in names]

    def entries(self) -> Iterator[Entry]:
        """One listing of the prefix."""
        with self._errors("listing"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        start = len(self._root.rstrip("/")) + 1
        files = {path[start:]: info for path, info in found.items()}
        for path, info in files.items():
            if path.endswith(USE):
                continue
            used = files.get(path.removesuffix(SUFFIX) + USE, {})
            stamp = max(_stamp_ns(info), _stamp_ns(used))
            yield Entry(path, parse_path(path), int(info.get("size") or 0), stamp, path)

    def remove(self, entries: Sequence[Entry]) -> bool:
        """As ``Backend.remove``: spared while young, or held by this process."""
        for entry in reversed(entries):
            with self._lock:
                held = self._held[entry.path] > 0
            young = entry.used_ns > time.time_ns() - self._grace_ns
            if held or young:
                return False
            with self._errors("deleting"):
                self._fs.rm_file(self._full(entry.path))
            with contextlib.suppress(StorageError), self._errors("deleting"):
                self._fs.rm_file(self._full(entry.path.removesuffix(SUFFIX) + USE))
        return True

    def remove_name(self, name: ObjectName) -> bool:
        """As ``Backend.remove_name``."""
        with self._lock:
            if self._held[name.path]:
                return False
        if self.present(name):
            with self._errors("deleting"):
                self._fs.rm_file(self._full(name.path))
        return True

    def undisturbed(self, name: ObjectName) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Reading leaves no trace there."""
        return contextlib.nullcontext()

    def sweep(self, older_than_s: float) -> int:  # noqa: ARG002 - nothing has a temporary name
        """Unfinished uploads are the matter of a lifecycle rule."""
        return 0

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        """Deleting twice does no harm."""
        return contextlib.nullcontext(enter_result=True)

    def held(self, path: str, change: int) -> None:
        """Count holds of this process."""
        with self._lock:
            self._held[path] += change
            if not self._held[path]:
                del self._held[path]

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _errors(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return storage_errors(self.url, "io.write", doing, Exception)


class _Held:
    def __init__(self, backend: ObjectBackend, path: str) -> None:
        self._backend: ObjectBackend | None = backend
        self._path = path
        backend.held(path, 1)

    def release(self) -> None:
        """Let go; may be called twice."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.held(self._path, -1)


def _stamp_ns(info: Mapping[str, Any]) -> int:
    """The time of the last change that a listing says, in the words of several backends."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    return 0
