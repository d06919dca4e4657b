"""From a path, URL or bytes to the source that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvformat.errors import StorageError, UsageError
from kvformat.storage.backends import BackendSource
from kvformat.storage.base import Source, Transport, as_text, local_path, storage_errors
from kvformat.storage.local import BytesSource, LocalSource


def open_source(
    url: str | os.PathLike[str] | bytes | bytearray | memoryview,
    storage_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
) -> Source:
    """The source behind a path, an fsspec URL, or the bytes of an artifact."""
    if isinstance(url, (bytes, bytearray, memoryview)):
        return BytesSource(bytes(url))
    text = as_text(url)
    path = local_path(text)
    if path is not None:
        return LocalSource(path, transport)
    return _remote(text, storage_options, transport or Transport())


def _remote(url: str, storage_options: Mapping[str, Any] | None, transport: Transport) -> Source:
    fs, path = filesystem(url, storage_options)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & {"http", "https"}:
        from kvformat.storage.http import HttpService
        from kvformat.storage.ranged import RangedSource

        return RangedSource(HttpService(fs, path), transport)
    if "s3" in protocols and hasattr(fs, "_call_s3"):
        from kvformat.storage.ranged import RangedSource
        from kvformat.storage.s3 import S3Service

        return RangedSource(S3Service(fs, path), transport)
    return BackendSource(fs, path, url, transport)


def filesystem(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """The fsspec filesystem of a URL and the path in it; no request is made."""
    import fsspec

    try:
        with storage_errors(url, "io.read", "opening the URL", Exception):
            fs, path = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
    except StorageError as error:
        if not isinstance(error.__cause__, (ValueError, ImportError, TypeError)):
            raise
        raise UsageError(
            "usage.argument",
            f"the URL cannot be opened here: {error.__cause__}",
            where=url,
            next_step="Check the protocol, or install the package that it needs",
        ) from error
    return fs, path
