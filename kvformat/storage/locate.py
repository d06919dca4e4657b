"""From a path, URL or bytes to the source that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvformat.errors import UsageError
from kvformat.storage.backends import BackendSource
from kvformat.storage.base import (
    Source,
    Transport,
    as_text,
    local_path,
    public_name,
    reason,
    shown,
    storage_errors,
)
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
    if getattr(fs, "asynchronous", False):
        raise UsageError(
            "usage.argument",
            "the filesystem has no event loop of its own",
            where=public_name(url),
            next_step="Leave asynchronous=True out of the storage options; see kvformat.aio",
        )
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

    name = public_name(url)
    with storage_errors(name, "io.read", "opening the URL", Exception):
        try:
            fs, path = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
        except (ValueError, ImportError, TypeError) as error:
            raise UsageError(
                "usage.argument",
                f"the URL cannot be opened here: {reason(error)}",
                where=name,
                next_step="Check the protocol, or install the package that it needs",
            ) from shown(error)
    return fs, path
