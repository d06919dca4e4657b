"""The only module that touches files and networks: exact range reads, atomic publication.

Reading: ``open_source`` gives a ``Source`` whose ``read`` returns exactly the bytes asked for or
raises ``StorageError``; ``read_front`` may return less, at the end of the file only. There is no
HEAD request, no listing and no file-object cache (spec section 11.1).

Writing: ``publish`` makes an artifact visible under its name in one step, or not at all (section
11.4). Locally the bytes go to an unnamed or temporary file in the target's directory, the front
last, then fsync and a create-only link.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, Protocol

from kvformat.errors import KvformatError, StorageError, UsageError

PREFETCH_BYTES: Final = 262_144
COPY_BYTES: Final = 8 * 2**20


class Source(Protocol):
    """A readable artifact."""

    @property
    def name(self) -> str:
        """The URL, for messages."""

    def size(self) -> int | None:
        """Length in bytes where that is known without a request."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file if it is shorter."""

    def ends_at(self, size_bytes: int) -> bool:
        """Whether no byte follows; may cost a request."""

    def close(self) -> None:
        """Give back what is open."""


def local_path(url: str) -> Path | None:
    """The local path behind ``url``, or None if it names another kind of storage."""
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return Path(url[len(scheme) :])
    if "://" in url:
        return None
    if "::" in url:
        import fsspec

        if url.split("::", 1)[0] in fsspec.available_protocols():
            return None
    return Path(url)


@contextlib.contextmanager
def storage_errors(
    name: str, code: str, doing: str, kind: type[Exception] = OSError
) -> Iterator[None]:
    """Turn what a file system, or with ``kind`` a network library, raises into a StorageError."""
    try:
        yield
    except KvformatError:
        raise
    except FileNotFoundError as error:
        raise StorageError(
            "io.not-found", "there is no such file", where=name, next_step="Check the path"
        ) from error
    except FileExistsError as error:
        raise StorageError(
            "io.exists",
            "the target exists already",
            where=name,
            next_step="Choose another name, or allow overwriting",
        ) from error
    except kind as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise StorageError(code, f"{doing} failed: {reason}", where=name) from error


def _short(name: str, offset: int, length: int, found: int) -> StorageError:
    return StorageError(
        "io.short",
        "the storage returned another number of bytes than asked",
        where=f"{name}, byte {offset}",
        expected=length,
        found=found,
        next_step="The file may be truncated or was replaced: fetch it again",
    )


class LocalSource:
    """A local file, read with positioned reads; safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors(str(path), "io.read", "opening the file"):
            self._file = path.open("rb", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def size(self) -> int | None:
        """Length in bytes when the file was opened."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._read(offset, length)
        if len(data) != length:
            raise _short(self.name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file."""
        return self._read(0, length)

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the file has this length."""
        return self._size == size_bytes

    def _read(self, offset: int, length: int) -> bytes:
        with storage_errors(self.name, "io.read", "reading"):
            if hasattr(os, "pread"):
                data = os.pread(self._file.fileno(), length, offset)
                while 0 < len(data) < length:
                    more = os.pread(self._file.fileno(), length - len(data), offset + len(data))
                    if not more:
                        break
                    data += more
                return data
            with self._lock:
                self._file.seek(offset)
                return self._file.read(length) or b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FsspecSource:
    """Any other fsspec URL, through ``cat_file`` with every length checked."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        import fsspec

        self._url = url
        try:
            with storage_errors(url, "io.read", "opening the URL", Exception):
                self._fs, self._path = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
        except StorageError as error:
            if not isinstance(error.__cause__, (ValueError, ImportError)):
                raise
            raise UsageError(
                "usage.argument",
                f"the URL cannot be opened here: {error.__cause__}",
                where=url,
                next_step="Check the protocol, or install the package that it needs",
            ) from error

    @property
    def name(self) -> str:
        """The URL."""
        return self._url

    def size(self) -> int | None:
        """Unknown: no request is made for it."""
        return None

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._cat(offset, length)
        if len(data) != length:
            raise _short(self._url, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or the whole file."""
        data = self._cat(0, length)
        if len(data) > length:
            raise _short(self._url, 0, length, len(data))
        return data

    def ends_at(self, size_bytes: int) -> bool:
        """Whether the last byte is the last: one request for two bytes."""
        try:
            data = self._cat(size_bytes - 1, 2)
        except StorageError:
            return True  # servers answer 416 or cut; the last byte itself was read before
        return len(data) <= 1

    def _cat(self, offset: int, length: int) -> bytes:
        with storage_errors(self._url, "io.read", "reading", Exception):
            return bytes(self._fs.cat_file(self._path, start=offset, end=offset + length))

    def close(self) -> None:
        """Nothing is open."""


class BytesSource:
    """An artifact in memory."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self._data = data
        self._name = name

    @property
    def name(self) -> str:
        """A label."""
        return self._name

    def size(self) -> int | None:
        """Length in bytes."""
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""
        data = self._data[offset : offset + length]
        if len(data) != length:
            raise _short(self._name, offset, length, len(data))
        return data

    def read_front(self, length: int) -> bytes:
        """The first ``length`` bytes, or all."""
        return self._data[:length]

    def ends_at(self, size_bytes: int) -> bool:
        """Whether there are this many bytes."""
        return len(self._data) == size_bytes

    def close(self) -> None:
        """Nothing is open."""


def as_text(url: object) -> str:
    """The path or URL as a string; raises ``usage.argument`` for anything else."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if isinstance(text, str) and text and "\0" not in text:
        with contextlib.suppress(UnicodeEncodeError):
            os.fsencode(text)
            return text
    raise UsageError("usage.argument", "this is not a path or URL", found=ascii(url)[:80])


def open_source(
    url: str | os.PathLike[str] | bytes | bytearray | memoryview,
    storage_options: Mapping[str, Any] | None = None,
) -> Source:
    """The source behind a path, an fsspec URL, or the bytes of an artifact."""
    if isinstance(url, (bytes, bytearray, memoryview)):
        return BytesSource(bytes(url))
    text = as_text(url)
    path = local_path(text)
    return LocalSource(path) if path is not None else FsspecSource(text, storage_options)


def spool(near: Path | None = None) -> IO[bytes]:
    """An unnamed temporary file, in the directory ``near`` if that is given."""
    with storage_errors(str(near or "temporary file"), "io.write", "making a temporary file"):
        return tempfile.TemporaryFile(dir=near)


def spool_directory(url: str | os.PathLike[str]) -> Path | None:
    """Where spools for an artifact at ``url`` belong: beside it if it is local."""
    path = local_path(as_text(url))
    if path is None:
        return None
    if not path.parent.is_dir():
        raise StorageError(
            "io.not-found", "the target's directory does not exist", where=str(path.parent)
        )
    return path.parent


def ensure_absent(url: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse early a local target that exists (PUB-3); ``publish`` checks again, atomically."""
    path = local_path(as_text(url))
    if path is None:
        return
    with storage_errors(str(path), "io.write", "looking at the target"):
        if path.exists() and not path.is_file():
            raise StorageError("io.exists", "the target is not a regular file", where=str(path))
        if not overwrite and path.exists():
            raise FileExistsError(str(path))


def publish(
    url: str | os.PathLike[str],
    write: Callable[[IO[bytes]], None],
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Call ``write`` with a seekable file and make the result visible at ``url`` in one step."""
    text = as_text(url)
    path = local_path(text)
    if path is not None:
        _publish_local(path, write, overwrite=overwrite)
        return
    import fsspec

    with spool() as file:
        write(file)
        file.seek(0)
        with storage_errors(text, "io.write", "uploading", Exception):
            fs, remote = fsspec.core.url_to_fs(text, **dict(storage_options or {}))
            if not overwrite and fs.exists(remote):
                raise FileExistsError(text)
            _upload(file, fs.open(remote, "wb"))


def _upload(file: IO[bytes], target: Any) -> None:
    """Copy all of ``file``; whatever interrupts it, the remote name stays as it was."""
    try:
        shutil.copyfileobj(file, target, COPY_BYTES)
    except BaseException:
        with contextlib.suppress(Exception):
            target.discard()
        target.closed = True  # or closing would commit what is there
        raise
    target.close()


def _publish_local(path: Path, write: Callable[[IO[bytes]], None], *, overwrite: bool) -> None:
    with storage_errors(str(path), "io.write", "writing"):
        path = path.resolve() if overwrite and path.is_symlink() else path
        temporary = path.parent / f".{secrets.token_hex(8)}.kvf.tmp"
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                _link(temporary, path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    """Create-only: hard link where the file system has them, otherwise exclusive creation."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(str(path)) from None
        temporary.replace(path)


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_into(source: IO[bytes], target: IO[bytes]) -> None:
    """Append all of ``source`` to ``target``; inside the kernel where that is possible."""
    source.flush()
    target.flush()
    size_bytes, done, start = source.seek(0, os.SEEK_END), 0, target.tell()
    with contextlib.suppress(OSError, AttributeError):
        while done < size_bytes:
            copied = os.copy_file_range(
                source.fileno(), target.fileno(), size_bytes - done, done, start + done
            )
            if not copied:
                break
            done += copied
    source.seek(done)
    target.seek(start + done)
    shutil.copyfileobj(source, target, COPY_BYTES)
