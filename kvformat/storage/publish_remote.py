"""Publication through fsspec: which backend gets which treatment (spec section 11.4).

============================  ==================================================================
S3                            ``publish_s3``: create-only, whole or not at all
memory                        one assignment, create-only within this process
servers that rename           a hidden sibling, checked, then renamed; existence is looked up before
all others                    the backend's own upload, committed on close, with mode ``xb`` where
                              it has that (gcsfs and adlfs create only then)
============================  ==================================================================
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from kvformat.errors import StorageError, UsageError
from kvformat.storage.base import COPY_BYTES, storage_errors
from kvformat.storage.publish_s3 import publish_s3, refuse_existing

RENAMING: Final = frozenset(
    ("arrow_hdfs", "dbfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav", "webhdfs")
)
_CREDENTIALS: Final = frozenset(
    ("CredentialRetrievalError", "NoCredentialsError", "PartialCredentialsError")
)
_memory = threading.Lock()


def refuse_target(url: str) -> None:
    """Raise ``usage.argument`` for URLs under which nothing can be published."""
    if "::" in url:
        raise UsageError(
            "usage.argument",
            "a chained URL can be read but not written",
            where=url,
            next_step="Write to the storage itself, the last URL of the chain, "
            "and read through the chain",
        )
    if url.startswith(("http://", "https://")):
        raise UsageError(
            "usage.argument",
            "nothing is written over HTTP",
            where=url,
            next_step="Write to a file or an object store (s3://bucket/name.kvf), "
            "and serve it from there",
        )
    if url.endswith("/"):
        raise UsageError(
            "usage.argument", "the target names a folder, not an object", where=ascii(url)
        )


def open_target(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """The file system behind ``url``, and the path in it."""
    refuse_target(url)
    try:
        with upload_errors(url):
            fs, remote = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
            return fs, remote
    except StorageError as error:
        if not isinstance(error.__cause__, (ValueError, TypeError, ImportError)):
            raise
        raise UsageError(
            "usage.argument",
            f"the URL cannot be opened here: {error.__cause__}",
            where=url,
            next_step="Check the protocol and its options, or install the package that it needs",
        ) from error


def look(fs: Any, url: str, remote: str) -> None:
    """Refuse a target that exists, before the work is done; ``upload`` has the last word."""
    with upload_errors(url):
        if _is_s3(fs):
            refuse_existing(fs, url, remote)
        elif fs.exists(remote):
            raise FileExistsError(url)


def upload(fs: Any, url: str, remote: str, file: IO[bytes], *, overwrite: bool) -> None:
    """Make all of ``file`` visible as ``remote`` in one step, or not at all."""
    size_bytes = file.seek(0, 2)
    file.seek(0)
    with upload_errors(url):
        if _is_s3(fs):
            publish_s3(fs, url, remote, file, overwrite=overwrite)
            return
        if isinstance(fs, MemoryFileSystem):
            with _memory:
                fs.pipe_file(remote, file.read(), mode="overwrite" if overwrite else "create")
            return
        if RENAMING.intersection(_protocols(fs)):
            _by_rename(fs, url, remote, file, size_bytes, overwrite=overwrite)
        else:
            _on_close(fs, url, remote, file, size_bytes, overwrite=overwrite)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _is_s3(fs: Any) -> bool:
    module = sys.modules.get("s3fs")
    return module is not None and isinstance(fs, module.S3FileSystem)


def _by_rename(
    fs: Any, url: str, remote: str, file: IO[bytes], size_bytes: int, *, overwrite: bool
) -> None:
    parent, slash, _ = remote.rpartition("/")
    temporary = f"{parent}{slash}.{secrets.token_hex(8)}.kvf.tmp"
    try:
        with fs.open(temporary, "wb") as target:
            shutil.copyfileobj(file, target, COPY_BYTES)
        _check_size(fs, url, temporary, size_bytes)
        if not overwrite and fs.exists(remote):
            raise FileExistsError(url)
        _rename(fs, url, temporary, remote)
    finally:
        with contextlib.suppress(Exception):
            if fs.exists(temporary):
                fs.rm_file(temporary)


def _rename(fs: Any, url: str, temporary: str, remote: str) -> None:
    """Some servers do not rename onto a file, and WebHDFS does not even raise then."""
    failure: Exception | None = None
    try:
        fs.mv(temporary, remote)
    except Exception as error:
        failure = error
    if failure is None and not fs.exists(temporary):
        return
    if fs.exists(remote):
        raise StorageError(
            "io.exists",
            "the server does not rename onto a file that exists",
            where=url,
            next_step="Remove that file first, or choose another name",
        ) from failure
    raise failure or OSError("the server did not rename the finished file")


def _on_close(
    fs: Any, url: str, remote: str, file: IO[bytes], size_bytes: int, *, overwrite: bool
) -> None:
    target = _open(fs, url, remote, overwrite=overwrite)
    try:
        shutil.copyfileobj(file, target, COPY_BYTES)
        target.close()
    except BaseException:
        with contextlib.suppress(Exception):
            target.discard()
        with contextlib.suppress(Exception):
            target.closed = True  # or a later close would commit what is there
        raise
    try:
        _check_size(fs, url, remote, size_bytes)
    except StorageError:
        with contextlib.suppress(Exception):
            fs.rm_file(remote)
        raise


def _open(fs: Any, url: str, remote: str, *, overwrite: bool) -> Any:
    for mode in ("wb",) if overwrite else ("xb", "wb"):
        try:
            return fs.open(remote, mode)
        except (NotImplementedError, ValueError) as error:
            refused = error
    raise UsageError(
        "usage.argument",
        "this storage can be read but not written",
        where=url,
        next_step="Write to a file or an object store",
    ) from refused


def _check_size(fs: Any, url: str, path: str, size_bytes: int) -> None:
    fs.invalidate_cache(path)
    found = fs.info(path).get("size")
    if found is not None and found != size_bytes:
        raise StorageError(
            "io.write",
            "the store kept another number of bytes than it was sent",
            where=url,
            expected=size_bytes,
            found=found,
        )


@contextlib.contextmanager
def upload_errors(url: str) -> Iterator[None]:
    """Turn whatever a backend raises into a StorageError of the right code."""
    with storage_errors(url, "io.write", "uploading", Exception):
        try:
            yield
        except FileNotFoundError as error:
            raise StorageError(
                "io.not-found",
                "the bucket or folder of the target does not exist",
                where=url,
                next_step="Check its name, or make it first",
            ) from error
        except Exception as error:
            kind = type(error).__name__
            if isinstance(error, PermissionError) or kind in _CREDENTIALS:
                raise StorageError(
                    "io.denied",
                    f"the storage refuses to be written: {error}",
                    where=url,
                    next_step="Check the credentials and what they may do there",
                ) from error
            if isinstance(error, TimeoutError) or "Timeout" in kind:
                raise StorageError(
                    "io.timeout", f"the storage did not answer: {error or kind}", where=url
                ) from error
            raise
