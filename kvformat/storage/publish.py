"""Writing: ``publish`` makes an artifact visible under its name in one step, or not at all (11.4).

Locally the bytes go to a temporary file in the target's directory, the front last, then fsync and
a create-only link. Other storage is the matter of ``publish_remote``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from kvformat.errors import StorageError
from kvformat.storage.base import COPY_BYTES, as_text, local_path, storage_errors


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


def ensure_absent(
    url: str | os.PathLike[str],
    *,
    overwrite: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Refuse early a target that exists (PUB-3), and URLs that cannot be written.

    ``publish`` checks again, atomically.
    """
    text = as_text(url)
    path = local_path(text)
    if path is None:
        from kvformat.storage.publish_remote import look, open_target, refuse_target

        refuse_target(text)
        if not overwrite:
            fs, remote = open_target(text, storage_options)
            look(fs, text, remote)
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
    """Call ``write`` with a seekable file and make the result visible at ``url`` in one step.

    Elsewhere than in local files the artifact is spooled to a local temporary file first.
    Existing targets are refused (``io.exists``) unless ``overwrite`` is set. Local files, S3, GCS
    and Azure refuse them even against a writer at the same moment; servers that are reached by
    renaming (SFTP, SMB, FTP, HDFS), and S3 stores that know no ``If-None-Match``, are asked
    before, so that of two writers at the same moment the later one may win.

    Raises ``StorageError`` (``io.exists``, ``io.not-found``, ``io.denied``, ``io.timeout``,
    ``io.write``) and ``UsageError`` for URLs that cannot be written: http(s), chains.
    """
    text = as_text(url)
    path = local_path(text)
    if path is not None:
        _publish_local(path, write, overwrite=overwrite)
        return
    from kvformat.storage.publish_remote import look, open_target, upload

    fs, remote = open_target(text, storage_options)
    if not overwrite:
        look(fs, text, remote)
    with spool() as file:
        with storage_errors("temporary file", "io.write", "writing"):
            write(file)
            file.flush()
        upload(fs, text, remote, file, overwrite=overwrite)


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
    """Create-only with a hard link; where the file system has none, after a look (PUB-5)."""
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
