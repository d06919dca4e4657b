"""The 128-byte header (spec section 4.1)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvformat.digests import Buffer, digest
from kvformat.errors import InvalidError, UnsupportedError
from kvformat.limits import LIMITS
from kvformat.manifest import VERSION, VERSION_MAJOR, VERSION_MINOR

MAGIC: Final = b"\x89KVF\r\n\x1a\n"
HEADER_BYTES: Final = 128
LARGEST_HEADER_BYTES: Final = 4096
_FIXED: Final = struct.Struct("<8sHHI32s")
_FIELDS: Final = struct.Struct("<QQQ32s24s")


def align(offset: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``offset``."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Header:
    """Sizes in bytes and the manifest's digest."""

    file_bytes: int
    manifest_bytes: int
    tables_bytes: int
    manifest_digest: bytes

    @property
    def tables_start(self) -> int:
        """Offset of the first table in the file."""
        return HEADER_BYTES + self.manifest_bytes

    @property
    def front_bytes(self) -> int:
        """Length of header, manifest and tables."""
        return self.tables_start + self.tables_bytes

    def to_bytes(self, magic: bytes = MAGIC) -> bytes:
        """The header's 128 bytes."""
        fields = _FIELDS.pack(
            self.file_bytes,
            self.manifest_bytes,
            self.tables_bytes,
            self.manifest_digest,
            bytes(24),
        )
        fixed = _FIXED.pack(magic, VERSION_MAJOR, VERSION_MINOR, HEADER_BYTES, bytes(32))[:16]
        return fixed + digest(fixed + fields) + fields


def parse_header(data: Buffer, magic: bytes = MAGIC) -> Header:
    """The header at the start of ``data``, refused in the order of ORD-1.

    ``data`` holds the first bytes of the file: 4,096, or all if the file is shorter. ``magic`` is
    another one for profiles (section 9.6).
    """
    view = memoryview(data)
    if bytes(view[:8]) != magic:
        raise InvalidError(
            "header.magic",
            "this is not a kvformat file, or it was changed in transfer",
            where="byte 0",
            expected=magic.hex(" "),
            found=bytes(view[:8]).hex(" ") or "an empty file",
        )
    if len(view) < 48:
        raise _truncated(len(view))
    _, major, minor, header_bytes, check = _FIXED.unpack_from(view)
    if not HEADER_BYTES <= header_bytes <= LARGEST_HEADER_BYTES:
        raise InvalidError(
            "header.field",
            "header_bytes is out of range",
            where="byte 12",
            expected=f"{HEADER_BYTES} to {LARGEST_HEADER_BYTES}",
            found=header_bytes,
        )
    if len(view) < header_bytes:
        raise _truncated(len(view))
    if digest(bytes(view[:16]) + bytes(view[48:header_bytes])) != check:
        raise InvalidError(
            "header.check", "the header is damaged", where="byte 16", next_step="Fetch it again"
        )
    if (major, minor) != (VERSION_MAJOR, VERSION_MINOR):
        raise UnsupportedError(
            "version.unknown",
            "this reader does not know the format version",
            where="byte 8",
            expected=VERSION,
            found=f"{major}.{minor}",
            next_step="Use a kvformat release that knows this version",
        )
    return _parse_fields(view, header_bytes)


def _parse_fields(view: memoryview, header_bytes: int) -> Header:
    if header_bytes != HEADER_BYTES:
        raise _field("header_bytes", 12, HEADER_BYTES, header_bytes)
    file_bytes, manifest_bytes, tables_bytes, manifest_digest, reserved = _FIELDS.unpack_from(
        view, 48
    )
    for name, offset, value in (
        ("file_bytes", 48, file_bytes),
        ("manifest_bytes", 56, manifest_bytes),
        ("tables_bytes", 64, tables_bytes),
    ):
        LIMITS.check("integer", value, f"byte {offset}, {name}")
    LIMITS.check("manifest_bytes", manifest_bytes, "byte 56")
    if any(reserved):
        raise _field("reserved", 104, "24 zero bytes", reserved.hex())
    header = Header(file_bytes, manifest_bytes, tables_bytes, manifest_digest)
    if header.front_bytes > file_bytes:
        raise _field("file_bytes", 48, f"at least {header.front_bytes}", file_bytes)
    return header


def _field(name: str, offset: int, expected: object, found: object) -> InvalidError:
    return InvalidError(
        "header.field",
        f"the header field {name} is wrong",
        where=f"byte {offset}",
        expected=expected,
        found=found,
    )


def _truncated(size_bytes: int) -> InvalidError:
    return InvalidError(
        "file.size",
        "the file ends inside its header",
        where=f"byte {size_bytes}",
        expected=f"at least {HEADER_BYTES} bytes",
        found=f"{size_bytes} bytes",
        next_step="The download is truncated: fetch it again",
    )


def check_against_manifest(header: Header, tables_bytes: int, alignment: int, data: int) -> int:
    """HDR-7 and HDR-8; returns the offset of the data section in the file."""
    if header.tables_bytes != tables_bytes:
        raise _field("tables_bytes", 64, tables_bytes, header.tables_bytes)
    data_start = align(header.front_bytes, alignment)
    if header.file_bytes != data_start + data:
        raise _field("file_bytes", 48, data_start + data, header.file_bytes)
    return data_start
