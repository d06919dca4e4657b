"""Take an artifact apart and put it together again, with any one thing broken and the rest right.

Nothing here uses the package: records, canonical JSON, digests and the header are made by hand.
``Builder(file).build()`` gives the file back, byte for byte. A test changes objects, records or
the manifest before or, through the hooks, in the middle of building, and every digest, size and
offset that follows is computed again from what it then finds:

    objects -> ``places`` -> records -> ``edit_records`` -> tables -> manifest -> ``edit_manifest``
    -> JSON -> ``edit_json`` -> header fields -> ``edit_header`` -> check -> file -> ``edit_file``
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Any

from blake3 import blake3

from tests.reference import SEGMENT_FIELDS, SEGMENT_RECORD, SET_FIELDS, SET_RECORD, cut_up

HEADER = struct.Struct("<QQQ32s24s")
Edit = Callable[[Any], Any]


def integer_sum(data: bytes) -> int:
    """INT-3, with Python's integers."""
    total = 0
    for start in range(0, len(data), 4096):
        part = data[start : start + 4096]
        total += sum(map(mul, part, COLUMNS)) * factor(4096 + start // 4096)
    return total % 2**64


def factor(n: int) -> int:
    """h of INT-3."""
    z = n * 2_654_435_761 % 2**32
    return (z ^ z >> 15) | 1


COLUMNS = tuple(factor(n) for n in range(4096))


def b3(data: bytes) -> bytes:
    """BLAKE3."""
    return blake3(data).digest()


def canonical(value: Any) -> bytes:
    """Section 2.1."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def align(place: int, alignment: int) -> int:
    """The next multiple."""
    return -(-place // alignment) * alignment


def keep(value: Any) -> Any:
    """The edit that changes nothing."""
    return value


@dataclass
class SetObject:
    """A quantisation set and its record."""

    record: dict[str, Any]
    data: bytes


@dataclass
class SegmentObject:
    """A segment and its record."""

    record: dict[str, Any]
    side: bytes
    payload: bytes


def seal_header(
    fixed: bytes, fields: tuple[int, int, int, bytes, bytes], more: bytes = b""
) -> bytes:
    """Header bytes with the right check; ``fixed`` are the first 16 bytes."""
    rest = HEADER.pack(*fields) + more
    return fixed + b3(fixed + rest) + rest


class Builder:
    """One artifact in parts. Copy it with ``copy()`` before you break something."""

    def __init__(self, file: bytes) -> None:
        cut = cut_up(file)
        self.fixed = file[:16]
        self.manifest: dict[str, Any] = cut.manifest
        self.sets = {
            name: [
                SetObject(row, cut.data[row["offset"] : row["offset"] + row["bytes"]])
                for row in rows
            ]
            for name, rows in cut.sets.items()
        }
        self.segments = {
            name: [self._segment(cut.data, row) for row in rows]
            for name, rows in cut.segments.items()
        }

    @staticmethod
    def _segment(data: bytes, row: dict[str, Any]) -> SegmentObject:
        stored = data[row["offset"] : row["offset"] + row["stored_bytes"]]
        return SegmentObject(row, stored[: row["side_bytes"]], stored[row["side_bytes"] :])

    def copy(self) -> Builder:
        """An independent copy."""
        return copy.deepcopy(self)

    def objects(self) -> list[tuple[str, str, list[Any]]]:
        """Parts of the data in order: kind, name, objects."""
        return [
            *(("qualities", q["name"], self.sets[q["name"]]) for q in self.manifest["qualities"]),
            *(("tracks", t["name"], self.segments[t["name"]]) for t in self.manifest["tracks"]),
        ]

    def content_id(self) -> str:
        """CID-2."""
        value = {key: self.manifest[key] for key in ("groups", "identity", "source_digest")}
        return b3(canonical(value)).hex()

    def place(self, gaps: dict[int, int] | None = None, filler: bytes = b"\0") -> bytes:
        """Lay all objects out, fill their records, and return the data section.

        ``gaps`` adds bytes in front of the n-th object; ``filler`` is what padding consists of.
        """
        alignment = self.manifest["segmentation"]["alignment"]
        data = bytearray()
        number = 0
        for kind, name, objects in self.objects():
            part = next(item for item in self.manifest[kind] if item["name"] == name)
            part["data_start"] = len(data)
            for item in objects:
                start = align(len(data), alignment) + (gaps or {}).get(number, 0)
                data += filler * (start - len(data))
                item.record["offset"] = start
                if kind == "qualities":
                    item.record["bytes"] = len(item.data)
                    item.record["digest"] = b3(item.data)
                    data += item.data
                else:
                    stored = item.side + item.payload
                    item.record["stored_bytes"] = len(stored)
                    item.record["side_bytes"] = len(item.side)
                    item.record["digest"] = b3(stored)
                    data += stored
                number += 1
            part["data_stop"] = len(data)
        return bytes(data)

    def tables(self) -> bytes:
        """Pack all records and put the tables' digests and lengths in the manifest."""
        result = b""
        for kind, name, objects in self.objects():
            part = next(item for item in self.manifest[kind] if item["name"] == name)
            is_set = kind == "qualities"
            record, names = (SET_RECORD, SET_FIELDS) if is_set else (SEGMENT_RECORD, SEGMENT_FIELDS)
            table = b"".join(
                record.pack(*(item.record[field] for field in names)) for item in objects
            )
            part["sets" if is_set else "segments"] = len(objects)
            part["set_table_digest" if is_set else "table_digest"] = b3(table).hex()
            result += table
        return result

    def build(
        self,
        *,
        gaps: dict[int, int] | None = None,
        filler: bytes = b"\0",
        edit_records: Callable[[Builder], Any] = keep,
        edit_manifest: Callable[[dict[str, Any]], Any] = keep,
        edit_json: Edit = keep,
        edit_header: Callable[[dict[str, Any]], Any] = keep,
        edit_data: Edit = keep,
        edit_tables: Edit = keep,
        padding: bytes = b"\0",
    ) -> bytes:
        """The file. Edits of records, manifest and header fields happen in place."""
        alignment = self.manifest["segmentation"]["alignment"]
        data = self.place(gaps, filler)
        edit_records(self)
        tables = edit_tables(self.tables())
        self.manifest["data_bytes"] = len(data)
        self.manifest["content_id"] = self.content_id()
        edit_manifest(self.manifest)
        text = edit_json(canonical(self.manifest))
        front = 128 + len(text) + len(tables)
        start = align(front, alignment)
        fields = {
            "fixed": self.fixed,
            "file_bytes": start + len(data),
            "manifest_bytes": len(text),
            "tables_bytes": len(tables),
            "manifest_digest": b3(text),
            "reserved": bytes(24),
        }
        edit_header(fields)
        numbers = [fields[key] for key in ("file_bytes", "manifest_bytes", "tables_bytes")]
        header = seal_header(
            fields["fixed"], (*numbers, fields["manifest_digest"], fields["reserved"])
        )
        return header + text + tables + padding * (start - front) + edit_data(data)


def resealed(file: bytes, **changes: Any) -> bytes:
    """The file with other header fields and a right check; ``fixed`` are the first 16 bytes."""
    names = ("file_bytes", "manifest_bytes", "tables_bytes", "manifest_digest", "reserved")
    fields = dict(zip(names, HEADER.unpack(file[48:128]), strict=True))
    fields.update({key: value for key, value in changes.items() if key != "fixed"})
    fixed = changes.get("fixed", file[:16])
    return seal_header(fixed, tuple(fields[name] for name in names)) + file[128:]


def fixed_part(
    *, magic: bytes = b"\x89KVF\r\n\x1a\n", major: int = 0, minor: int = 9, size: int = 128
) -> bytes:
    """The first 16 bytes of a header."""
    return struct.pack("<8sHHI", magic, major, minor, size)
