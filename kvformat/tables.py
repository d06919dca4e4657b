"""Set tables and segment tables: fixed-size records as numpy structured arrays (spec 8.1, 8.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvformat.digests import Buffer, digest
from kvformat.errors import InvalidError
from kvformat.groups import Cell, Grid
from kvformat.header import align
from kvformat.layout import fault
from kvformat.limits import LIMITS
from kvformat.manifest import Manifest
from kvformat.tracks import EXACT, SEGMENT_RECORD_BYTES, SET_RECORD_BYTES, Quality, Track

NO_SET: Final = 2**32 - 1
NO_LAYOUT: Final = 2**16 - 1

SET_DTYPE: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("bytes", "<u8"),
        ("digest", "V32"),
        ("group", "<u2"),
        ("layer_index", "<u2"),
        ("layer_count", "<u2"),
        ("reserved", "V10"),
    ]
)
SEGMENT_DTYPE: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("side_bytes", "<u4"),
        ("set_index", "<u4"),
        ("token_start", "<u8"),
        ("token_count", "<u4"),
        ("group", "<u2"),
        ("layer_index", "<u2"),
        ("layer_count", "<u2"),
        ("layout", "<u2"),
        ("head_start", "<u4"),
        ("head_count", "<u4"),
        ("reserved", "V4"),
        ("integer_sum", "<u8"),
        ("digest", "V32"),
        ("integer_digest", "V32"),
    ]
)
COORDINATES: Final = (
    "group",
    "layer_index",
    "layer_count",
    "head_start",
    "head_count",
    "token_start",
    "token_count",
)


@dataclass(frozen=True, slots=True)
class SetRecord:
    """Where a quantisation set lies; ``offset`` counts from the start of the data section."""

    offset: int
    size_bytes: int
    digest: bytes
    group: int
    layer_index: int
    layer_count: int


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Where a segment lies and how it is checked."""

    index: int
    cell: Cell
    offset: int
    stored_bytes: int
    side_bytes: int
    set_index: int
    layout: int
    digest: bytes
    integer_digest: bytes
    integer_sum: int


def check_table(name: str, data: Buffer, expected: str) -> None:
    """TAB-3."""
    found = digest(data).hex()
    if found != expected:
        raise InvalidError(
            "table.digest",
            "the table is damaged",
            where=name,
            expected=expected,
            found=found,
            next_step="Fetch the file again",
        )


def _record_error(table: str, index: int, field: str, expected: object, found: object) -> Any:
    return InvalidError(
        "table.record",
        f"the field {field} is wrong",
        where=f"{table}, record {index}",
        expected=expected,
        found=found,
    )


def _require(table: str, field: str, found: Any, expected: Any) -> None:
    """All of ``found`` equal ``expected`` (broadcast), or the first record that differs."""
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        index = int(wrong[0])
        wanted = np.broadcast_to(expected, np.shape(found))[index]
        raise _record_error(table, index, field, wanted, np.asarray(found)[index])


def _require_at_most(table: str, field: str, found: Any, limit: str) -> None:
    wrong = np.flatnonzero(found > np.uint64(getattr(LIMITS, limit)))
    if len(wrong):
        LIMITS.check(limit, int(found[wrong[0]]), f"{table}, record {int(wrong[0])}, {field}")


def _require_zero(table: str, records: Any) -> None:
    size_bytes = records.dtype["reserved"].itemsize
    raw = np.frombuffer(records["reserved"].tobytes(), np.uint8).reshape(len(records), size_bytes)
    _require(table, "reserved", raw.any(axis=1), False)


def _check_offsets(
    table: str, offset: Any, size_bytes: Any, *, start: int, stop: int, alignment: int
) -> None:
    """DAT-2 and DAT-3 inside one part of the data."""
    _require_at_most(table, "offset", offset, "integer")
    begin = offset.astype(np.int64)
    end = begin + size_bytes.astype(np.int64)
    cursor = np.concatenate([np.array([start], np.int64), end[:-1]])
    _require(table, "offset", begin, -(-cursor // alignment) * alignment)
    last = int(end[-1]) if len(end) else start
    if last != stop:
        raise _record_error(table, max(len(end) - 1, 0), "end of the part", stop, last)


class SetTable:
    """The checked set table of one quality."""

    def __init__(self, records: np.ndarray[Any, Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> SetRecord:
        item = self.records[index]
        return SetRecord(
            int(item["offset"]),
            int(item["bytes"]),
            item["digest"].tobytes(),
            int(item["group"]),
            int(item["layer_index"]),
            int(item["layer_count"]),
        )


class SegmentTable:
    """The checked segment table of one track."""

    def __init__(self, records: np.ndarray[Any, Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> SegmentRecord:
        item = self.records[index]
        return SegmentRecord(
            index,
            Cell(*(int(item[name]) for name in COORDINATES)),
            int(item["offset"]),
            int(item["stored_bytes"]),
            int(item["side_bytes"]),
            int(item["set_index"]),
            int(item["layout"]),
            item["digest"].tobytes(),
            item["integer_digest"].tobytes(),
            int(item["integer_sum"]),
        )


def parse_set_table(data: Buffer, manifest: Manifest, quality: Quality) -> SetTable:
    """The set table of ``quality``: digest, then records (TAB-3, TAB-4, REC-5, DAT-2)."""
    table = f"set table of {quality.name}"
    check_table(table, data, quality.set_table_digest)
    records = np.frombuffer(data, SET_DTYPE)
    _require_zero(table, records)
    groups = records["group"].astype(np.int64)
    quantised = np.array([item != EXACT for item in quality.encodings], bool)
    _require(table, "group", groups < len(manifest.groups), True)
    _require(table, "group", quantised[groups], True)
    layers = np.array([len(item.layers) for item in manifest.groups], np.int64)
    step = np.array([item.layers for item in manifest.segmentation.groups], np.int64)
    start = records["layer_index"].astype(np.int64)
    _require(table, "layer_index", (start < layers[groups]) & (start % step[groups] == 0), True)
    _require(
        table,
        "layer_count",
        records["layer_count"].astype(np.int64),
        np.minimum(step[groups], layers[groups] - start),
    )
    order = groups * 65_536 + start
    _require(table, "order of sets", np.diff(order) >= 0, True)
    _require(table, "bytes", records["bytes"] >= 16, True)
    _require_at_most(table, "bytes", records["bytes"], "integer")
    channels = np.array([item.channels for item in manifest.groups], np.uint64)[groups]
    largest = 16 + 1024 + 12 * channels * records["layer_count"]
    _require(table, "bytes", records["bytes"] <= largest, True)
    _check_offsets(
        table,
        records["offset"],
        records["bytes"],
        start=quality.data_start,
        stop=quality.data_stop,
        alignment=manifest.segmentation.alignment,
    )
    return SetTable(records)


def parse_segment_table(
    data: Buffer, manifest: Manifest, track: Track, *, sets: SetTable, grid: Grid
) -> SegmentTable:
    """The segment table of ``track``: digest, coordinates, sets, layouts, sizes, offsets."""
    table = f"segment table of {track.name}"
    quality = manifest.quality(track.quality)
    check_table(table, data, track.table_digest)
    records = np.frombuffer(data, SEGMENT_DTYPE)
    _require_zero(table, records)
    _require_at_most(table, "token_start", records["token_start"], "integer")
    for name in COORDINATES:
        _require(table, name, records[name].astype(np.int64), grid.fields[name])
    _check_sets(table, records, quality, sets)
    _check_sizes(table, records)
    hevc = np.array([item == "hevc" for item in track.codecs], bool)[records["group"]]
    _require(table, "layout", (records["layout"] < len(track.layouts)) | ~hevc, True)
    _require(table, "layout", (records["layout"] == NO_LAYOUT) | hevc, True)
    used = np.unique(records["layout"][hevc]) if len(records) else np.zeros(0, np.uint16)
    if len(used) != len(track.layouts):
        raise _record_error(table, 0, "layout", f"a use of all {len(track.layouts)}", len(used))
    _check_offsets(
        table,
        records["offset"],
        records["stored_bytes"],
        start=track.data_start,
        stop=track.data_stop,
        alignment=manifest.segmentation.alignment,
    )
    _check_decoded_sizes(table, records, manifest, track)
    return SegmentTable(records)


def _check_sets(table: str, records: Any, quality: Quality, sets: SetTable) -> None:
    """REC-2, REC-3 and the second half of REC-7."""
    exact = np.array([item == EXACT for item in quality.encodings], bool)[records["group"]]
    index = records["set_index"]
    _require(table, "set_index", (index == NO_SET) | ~exact, True)
    _require(table, "side_bytes", (records["side_bytes"] == 0) | ~exact, True)
    _require(table, "set_index", (index < len(sets)) | exact, True)
    named = np.flatnonzero(~exact)
    for field in ("group", "layer_index", "layer_count"):
        differs = sets.records[field][index[named]] != records[field][named]
        where = np.flatnonzero(differs)
        if len(where):
            wanted = f"a set of the same {field}"
            raise _record_error(table, int(named[where[0]]), "set_index", wanted, "another")
    used = np.unique(index[named])
    if len(used) != len(sets):
        missing = int(np.setdiff1d(np.arange(len(sets)), used)[0])
        raise _record_error(table, 0, "set_index", f"a use of set {missing}", "none")


def _check_sizes(table: str, records: Any) -> None:
    _require_at_most(table, "side_bytes", records["side_bytes"], "side_bytes")
    _require_at_most(table, "stored_bytes", records["stored_bytes"], "stored_bytes_per_segment")
    _require(table, "stored_bytes", records["stored_bytes"] > records["side_bytes"], True)


def _check_decoded_sizes(table: str, records: Any, manifest: Manifest, track: Track) -> None:
    """The limit ``decoded_bytes_per_segment`` for integers and pictures; LAY-2 and LAY-3."""
    quality = manifest.quality(track.quality)
    for index, group in enumerate(manifest.groups):
        mine = np.flatnonzero(records["group"] == index)
        if not len(mine):
            continue
        item = group.numpy_dtype.itemsize if quality.encodings[index] == EXACT else 1
        rows = records[mine]
        values = (
            rows["layer_count"].astype(np.int64)
            * rows["token_count"].astype(np.int64)
            * rows["head_count"].astype(np.int64)
            * (group.head_dim * item)
        )
        worst = int(np.argmax(values))
        LIMITS.check(
            "decoded_bytes_per_segment", int(values[worst]), f"{table}, record {int(mine[worst])}"
        )
        if track.codecs[index] == "hevc":
            _check_layouts(table, mine, rows, group.head_dim, track)


def _check_layouts(table: str, mine: Any, rows: Any, head_dim: int, track: Track) -> None:
    for number in np.unique(rows["layout"]):
        layout = track.layouts[int(number)]
        users = np.flatnonzero(rows["layout"] == number)
        tokens = int(rows["token_count"][users].max())
        channels = int(rows["head_count"][users].max()) * head_dim
        reason = fault(layout, tokens, channels)
        place = int(mine[users[0]])
        if reason:
            raise _record_error(table, place, "layout", "a layout that fits", reason)
        LIMITS.check(
            "decoded_bytes_per_segment",
            layout.frames * layout.width * layout.height * 3,
            f"{table}, record {place}",
        )


@dataclass(frozen=True, slots=True)
class TableSpan:
    """Where one table lies in the file."""

    offset: int
    size_bytes: int

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size_bytes


def table_spans(manifest: Manifest, tables_start: int) -> dict[str, TableSpan]:
    """The place of each table, keyed by quality name and by track name (which has a slash)."""
    spans: dict[str, TableSpan] = {}
    cursor = tables_start
    for name, size_bytes in [(item.name, item.table_bytes) for item in manifest.qualities] + [
        (item.name, item.table_bytes) for item in manifest.tracks
    ]:
        spans[name] = TableSpan(cursor, size_bytes)
        cursor += size_bytes
    return spans


def place(sizes_bytes: list[int], start: int, alignment: int) -> tuple[list[int], int]:
    """Offsets of objects of these sizes from ``start`` on, and the end of the last (DAT-2)."""
    offsets: list[int] = []
    cursor = start
    for size in sizes_bytes:
        offsets.append(align(cursor, alignment))
        cursor = offsets[-1] + size
    return offsets, cursor


assert SET_DTYPE.itemsize == SET_RECORD_BYTES  # noqa: S101 - the record layouts of the spec
assert SEGMENT_DTYPE.itemsize == SEGMENT_RECORD_BYTES  # noqa: S101
