"""The front of an artifact: header, manifest and tables, fetched in one or two requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvformat.digests import digest
from kvformat.errors import InvalidError
from kvformat.extents import plan_extents
from kvformat.header import HEADER_BYTES, Header, check_against_manifest, parse_header
from kvformat.manifest import Manifest, parse_manifest
from kvformat.storage import PREFETCH_BYTES, Fetch, Piece, Source
from kvformat.tables import TableSpan, table_spans


@dataclass(frozen=True, slots=True)
class Front:
    """A checked header and manifest, the bytes fetched so far, and where tables and data lie."""

    header: Header
    manifest: Manifest
    prefix: bytes
    spans: dict[str, TableSpan]
    data_start: int

    @property
    def manifest_digest(self) -> str:
        """The name of this file."""
        return self.header.manifest_digest.hex()


def read_front(source: Source) -> Front:
    """Header and manifest, refused in the order of ORD-1."""
    prefix = source.read_front(PREFETCH_BYTES)
    header = parse_header(prefix)
    _check_size(source, header, prefix)
    if len(prefix) < header.tables_start:
        wanted = min(header.front_bytes, header.tables_start + 16 * PREFETCH_BYTES)
        prefix += bytes(source.read(len(prefix), wanted - len(prefix)))
    raw = prefix[HEADER_BYTES : header.tables_start]
    found = digest(raw)
    if found != header.manifest_digest:
        raise InvalidError(
            "manifest.digest",
            "the manifest is damaged",
            where="byte 128",
            expected=header.manifest_digest.hex(),
            found=found.hex(),
            next_step="Fetch the file again",
        )
    manifest = parse_manifest(raw)
    data_start = check_against_manifest(
        header, manifest.tables_bytes, manifest.segmentation.alignment, manifest.data_bytes
    )
    _check_padding(prefix, header, data_start)
    return Front(header, manifest, prefix, table_spans(manifest, header.tables_start), data_start)


def _check_size(source: Source, header: Header, prefix: bytes) -> None:
    """HDR-10 and REQ-3, as far as the size is known without a request."""
    size = source.size()
    if size is None and len(prefix) < PREFETCH_BYTES:
        size = len(prefix)
    if size is None or size == header.file_bytes:
        return
    if size < header.file_bytes:
        raise InvalidError(
            "file.size",
            "the file is a truncated copy",
            where=f"byte {size}",
            expected=f"{header.file_bytes:,} bytes",
            found=f"{size:,}",
            next_step="Fetch the file again",
        )
    raise InvalidError(
        "file.size",
        "there are bytes behind the end of the artifact",
        where=f"byte {header.file_bytes}",
        expected=header.file_bytes,
        found=size,
    )


def _check_padding(prefix: bytes, header: Header, data_start: int) -> None:
    """HDR-9, for what was fetched; verification checks the rest."""
    padding = prefix[header.front_bytes : data_start]
    if any(padding):
        raise InvalidError(
            "data.padding",
            "the padding behind the tables is not zero",
            where=f"byte {header.front_bytes}",
        )


def read_tables(front: Front, names: Sequence[str], fetch: Fetch) -> list[bytes]:
    """The bytes of tables: what the prefix has comes from there, near rests with one request."""
    have = len(front.prefix)
    spans = [front.spans[name] for name in names]
    rests = {
        name: Piece(max(span.offset, have), span.stop - max(span.offset, have))
        for name, span in zip(names, spans, strict=True)
        if span.size_bytes and span.stop > have
    }
    found: dict[str, bytes] = {}
    waiting = list(rests)
    for extent in plan_extents(list(rests.values())):
        for data in fetch(extent):
            found[waiting.pop(0)] = bytes(data)
    return [
        front.prefix[span.offset : span.stop] + found.get(name, b"")
        for name, span in zip(names, spans, strict=True)
    ]
