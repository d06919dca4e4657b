"""The only package that touches files and networks: exact range reads, atomic publication."""

from __future__ import annotations

from kvformat.storage.base import (
    COPY_BYTES,
    PREFETCH_BYTES,
    Data,
    Piece,
    Source,
    Transfer,
    Transport,
    as_text,
    local_path,
    storage_errors,
)
from kvformat.storage.beside import Beside, Fetch
from kvformat.storage.local import BytesSource, LocalSource
from kvformat.storage.locate import open_source
from kvformat.storage.meter import Meter, Traffic
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
    "Beside",
    "BytesSource",
    "Data",
    "Fetch",
    "LocalSource",
    "Meter",
    "Piece",
    "Source",
    "Traffic",
    "Transfer",
    "Transport",
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
