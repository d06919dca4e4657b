"""The only package that touches files and networks: exact range reads, atomic publication."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvformat.storage.backends import FsspecSource
from kvformat.storage.base import (
    COPY_BYTES,
    PREFETCH_BYTES,
    Source,
    as_text,
    local_path,
    storage_errors,
)
from kvformat.storage.local import BytesSource, LocalSource
from kvformat.storage.publish import (
    copy_into,
    ensure_absent,
    publish,
    spool,
    spool_directory,
)

__all__ = [
    "COPY_BYTES",
    "PREFETCH_BYTES",
    "BytesSource",
    "FsspecSource",
    "LocalSource",
    "Source",
    "as_text",
    "copy_into",
    "ensure_absent",
    "local_path",
    "open_source",
    "publish",
    "spool",
    "spool_directory",
    "storage_errors",
]


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
