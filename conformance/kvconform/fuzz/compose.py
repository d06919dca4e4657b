"""Artifacts made by hand from a plan: records, payloads, digests and the header, byte by byte.

``compose`` gives the parts of a valid artifact, ``Parts.build`` its bytes. Whoever wants a broken
file changes a copy of the parts, or hooks into the building; all that follows is computed again.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import zstandard

from kvconform.fuzz import video
from kvconform.fuzz.pieces import (
    NO_LAYOUT,
    NO_SET,
    Bytes,
    Cell,
    Json,
    Quant,
    b3,
    cells_of,
    exact_rows,
    integer_sum,
    pack,
    rows_of,
)
from kvconform.judge import canonical

EXACT: Final = "exact"
MAGIC: Final = b"\x89KVF\r\n\x1a\n"
SET_RECORD: Final = struct.Struct("<QQ32sHHH10s")
SET_FIELDS: Final = (
    "offset", "bytes", "digest", "group", "layer_index", "layer_count", "reserved",
)  # fmt: skip
SEGMENT_RECORD: Final = struct.Struct("<QQIIQIHHHHII4sQ32s32s")
SEGMENT_FIELDS: Final = (
    "offset", "stored_bytes", "side_bytes", "set_index", "token_start", "token_count", "group",
    "layer_index", "layer_count", "layout", "head_start", "head_count", "reserved", "integer_sum",
    "digest", "integer_digest",
)  # fmt: skip


def align(place: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` from ``place`` on."""
    return -(-place // alignment) * alignment


@dataclass
class Group:
    """A group; ``source`` are its bytes ``[L, T, H, D, item]``, ``quants`` are by quality."""

    name: str
    role: str
    dtype: str
    layers: tuple[int, ...]
    source: Bytes
    tokens: Json
    head_start: int = 0
    heads_total: int = 1
    run_layers: int = 3
    run_heads: int = 1
    quants: dict[str, Quant] = field(default_factory=dict)
    layout: Json | None = None

    def to_json(self) -> Json:
        """The element of ``groups``."""
        return {
            "dtype": self.dtype,
            "head_dim": self.source.shape[3],
            "head_start": self.head_start,
            "heads": self.source.shape[2],
            "heads_total": self.heads_total,
            "layers": list(self.layers),
            "name": self.name,
            "role": self.role,
            "tokens": self.tokens,
        }


@dataclass
class Plan:
    """What an artifact holds and how it is cut; ``tracks`` are (quality, codec of each group)."""

    groups: list[Group]
    count: int
    first_position: int
    identity: Json
    tokens: Json
    qualities: list[str]
    tracks: list[tuple[str, str, list[str]]]
    segment_tokens: int = 256
    order: str = "token-major"
    alignment: int = 1
    frame_rows: int = 1_000
    extensions: Json = field(default_factory=dict)
    token_ids: list[int] | None = None
    salt: bytes = b""

    @property
    def codecs(self) -> set[str]:
        """All codecs that a reader needs."""
        return {codec for _, _, codecs in self.tracks for codec in codecs}


def zstd_payload(rows: Bytes, frame_rows: int) -> bytes:
    """Section 10.3, ``frame_rows`` rows to a frame, packed where few values occur."""
    heads, frames = b"", b""
    cuts = range(0, len(rows), frame_rows)
    for start in cuts:
        part = rows[start : start + frame_rows]
        low, high = int(part.min()), int(part.max())
        low, radix = (low, high - low + 1) if high - low < 16 else (0, 256)
        packed = pack(part, low, radix)
        frame = zstandard.ZstdCompressor(level=1).compress(packed.tobytes())
        heads += struct.pack("<IIBB", len(part), len(frame), low, radix - 1)
        frames += frame
    return struct.pack("<I", len(cuts)) + heads + frames


@dataclass
class SetObject:
    """A quantisation set and its record."""

    record: Json
    data: bytes


@dataclass
class SegmentObject:
    """A segment and its record."""

    record: Json
    side: bytes
    payload: bytes


Hook = Callable[[Any], Any]


def same(value: Any) -> Any:
    """The hook that changes nothing."""
    return value


@dataclass
class Parts:
    """An artifact in parts: the manifest without what follows, sets and segments by name."""

    manifest: Json
    sets: dict[str, list[SetObject]]
    segments: dict[str, list[SegmentObject]]

    def copy(self) -> Parts:
        """An independent copy."""
        return copy.deepcopy(self)

    def objects(self) -> Iterator[tuple[str, Json, list[Any]]]:
        """The parts of the data section in order: kind, element of the manifest, objects."""
        for item in self.manifest["qualities"]:
            yield "sets", item, self.sets[item["name"]]
        for item in self.manifest["tracks"]:
            yield "segments", item, self.segments[item["name"]]

    def _place(self, filler: bytes) -> bytes:
        """Section 8.4."""
        alignment = self.manifest["segmentation"]["alignment"]
        data = bytearray()
        for kind, element, objects in self.objects():
            element["data_start"] = len(data)
            for item in objects:
                data += filler * (align(len(data), alignment) - len(data))
                item.record["offset"] = len(data)
                stored = item.data if kind == "sets" else item.side + item.payload
                item.record["bytes" if kind == "sets" else "stored_bytes"] = len(stored)
                item.record["digest"] = b3(stored)
                if kind == "segments":
                    item.record["side_bytes"] = len(item.side)
                data += stored
            element["data_stop"] = len(data)
        return bytes(data)

    def _tables(self) -> bytes:
        """Section 8.1."""
        result = b""
        for kind, element, objects in self.objects():
            record, names = (
                (SET_RECORD, SET_FIELDS) if kind == "sets" else (SEGMENT_RECORD, SEGMENT_FIELDS)
            )
            table = b"".join(record.pack(*(item.record[n] for n in names)) for item in objects)
            element[kind] = len(objects)
            element["set_table_digest" if kind == "sets" else "table_digest"] = b3(table).hex()
            result += table
        return result

    def build(
        self,
        *,
        filler: bytes = b"\0",
        padding: bytes = b"\0",
        edit_records: Hook = same,
        edit_manifest: Hook = same,
        edit_text: Hook = same,
        edit_header: Hook = same,
        break_check: bool = False,
    ) -> bytes:
        """The bytes. Hooks for records (given these parts), manifest and header work in place."""
        alignment = self.manifest["segmentation"]["alignment"]
        data = self._place(filler)
        edit_records(self)
        tables = self._tables()
        manifest = copy.deepcopy(self.manifest)
        manifest["data_bytes"] = len(data)
        manifest["content_id"] = content_id(manifest)
        edit_manifest(manifest)
        text = edit_text(canonical(manifest))
        front = 128 + len(text) + len(tables)
        start = align(front, alignment)
        header: Json = {
            "version": (0, 9),
            "header_bytes": 128,
            "file_bytes": start + len(data),
            "manifest_bytes": len(text),
            "tables_bytes": len(tables),
            "manifest_digest": b3(text),
            "reserved": bytes(24),
        }
        edit_header(header)
        fixed = MAGIC + struct.pack("<HHI", *header["version"], header["header_bytes"])
        names = ("file_bytes", "manifest_bytes", "tables_bytes", "manifest_digest", "reserved")
        rest = struct.pack("<QQQ32s24s", *(header[name] for name in names))
        check = bytearray(b3(fixed + rest))
        check[5] ^= break_check
        head: bytes = fixed + bytes(check) + rest
        return head + bytes(text) + tables + padding * (start - front) + data


def content_id(manifest: Json) -> str:
    """CID-2."""
    members = ("groups", "identity", "source_digest")
    return b3(canonical({name: manifest[name] for name in members})).hex()


def compose(plan: Plan) -> Parts:
    """The parts of the valid artifact that a plan describes."""
    cells = cells_of(plan.groups, plan.count, plan.segment_tokens, plan.order)
    sets: dict[str, list[SetObject]] = {}
    numbers: dict[tuple[str, int, int], int] = {}
    for quality in plan.qualities:
        objects = sets.setdefault(quality, [])
        for index, group in enumerate(plan.groups):
            runs = {c.layers.start: c.layers for c in cells if c.group == index}
            for first, run in sorted(runs.items()) if quality in group.quants else ():
                numbers[quality, index, first] = len(objects)
                record = {
                    "group": index,
                    "layer_index": first,
                    "layer_count": run.stop - run.start,
                    "reserved": bytes(10),
                }
                objects.append(SetObject(record, group.quants[quality].set_bytes(run)))
    segments = {}
    layouts: dict[str, list[Json]] = {}
    for name, quality, codecs in plan.tracks:
        used = layouts.setdefault(name, [])
        segments[name] = [
            _segment(plan, cell, (quality, codecs[cell.group]), numbers, used) for cell in cells
        ]
    return Parts(_manifest(plan, layouts), sets, segments)


def _segment(
    plan: Plan,
    cell: Cell,
    how: tuple[str, str],
    numbers: dict[tuple[str, int, int], int],
    layouts: list[Json],
) -> SegmentObject:
    quality, codec = how
    group = plan.groups[cell.group]
    part = (cell.layers, cell.tokens, cell.heads)
    record: Json = {
        "set_index": NO_SET,
        "token_start": cell.start,
        "token_count": cell.tokens.stop - cell.tokens.start,
        "group": cell.group,
        "layer_index": cell.layers.start,
        "layer_count": cell.layers.stop - cell.layers.start,
        "layout": NO_LAYOUT,
        "head_start": cell.heads.start,
        "head_count": cell.heads.stop - cell.heads.start,
        "reserved": bytes(4),
    }
    quant = group.quants.get(quality)
    integers = np.ascontiguousarray((group.source if quant is None else quant.q)[part])
    record["integer_digest"] = b3(integers.tobytes())
    record["integer_sum"] = integer_sum(integers.tobytes())
    order = None
    if quant is not None:
        record["set_index"] = numbers[quality, cell.group, cell.layers.start]
        order = None if quant.order is None else quant.order[cell.layers, cell.heads]
    if codec == "stored":
        payload = integers.tobytes()
    elif codec == "zstd":
        rows = exact_rows(integers) if quant is None else rows_of(integers, order)
        payload = zstd_payload(rows, plan.frame_rows)
    else:
        layout = group.layout
        assert layout is not None
        if layout not in layouts:
            layouts.append(layout)
        record["layout"] = layouts.index(layout)
        rows = rows_of(integers, order).reshape(len(integers), *integers.shape[:0:-1])
        columns = rows.transpose(0, 3, 2, 1).reshape(*integers.shape[:2], -1)
        payload = video.encode(video.planes_of(columns, layout))
    return SegmentObject(record, b"" if quant is None else quant.side_bytes(*part), payload)


def _manifest(plan: Plan, layouts: dict[str, list[Json]]) -> Json:
    source = b"".join(b3(layer.tobytes()) for group in plan.groups for layer in group.source)
    plain = all(group.tokens["kind"] == "all" for group in plan.groups)
    lossy = {name: any(name in g.quants for g in plan.groups) for name in plan.qualities}
    return {
        "extensions": plan.extensions,
        "features": [],
        "format": "kvformat",
        "generator": "kvconform fuzz",
        "groups": [group.to_json() for group in plan.groups],
        "identity": plan.identity,
        "lineage": {"kind": "exact"},
        "qualities": [
            {
                "encodings": [
                    "quantised" if name in group.quants else "exact" for group in plan.groups
                ],
                "name": name,
                "relative_step": "3fd1eb851eb851ec" if lossy[name] else None,
            }
            for name in plan.qualities
        ],
        "segmentation": {
            "alignment": plan.alignment,
            "groups": [{"heads": g.run_heads, "layers": g.run_layers} for g in plan.groups],
            "order": plan.order,
            "tokens": plan.segment_tokens,
        },
        "source_digest": b3(source).hex(),
        "tokens": plan.tokens,
        "tracks": [
            {
                "codecs": codecs,
                "encoder": "none",
                "layouts": layouts[name],
                "name": name,
                "quality": quality,
            }
            for name, quality, codecs in plan.tracks
        ],
        "valid_lengths": None if plain else [plan.count],
        "version": "0.9",
    }
