"""Tables and data sections whose digests are right and whose content breaks a rule of section 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.builder import Builder, SetObject, b3, integer_sum
from tests.damage import TRACKS, artifact, outcome, parts, verdict
from tests.requirements import covers

QUALITY = "near-lossless"
HEVC, ZSTD, STORED, EXACT = TRACKS[:4]
GOOD = {name: outcome(artifact(), name) for name in TRACKS}
Edit = Callable[[Builder], Any]


def refused(edit: Edit, *, track: str = STORED, code: str = "table.record", **options: Any) -> None:
    """Reading the track and verification both give ``code``."""
    builder = parts(**options)
    file = builder.build(edit_records=edit)
    assert outcome(file, track) == code
    assert verdict(file) == code


def record_of(builder: Builder, track: str, number: int) -> dict[str, Any]:
    return builder.segments[track][number].record


def set_field(track: str, number: int, **fields: Any) -> Edit:
    """An edit of a segment record."""
    return lambda builder: record_of(builder, track, number).update(fields)


# --- segment records -------------------------------------------------------------------------


@covers("REC-1", "SEG-1")
@pytest.mark.parametrize(
    "field",
    [
        "group",
        "layer_index",
        "layer_count",
        "head_start",
        "head_count",
        "token_start",
        "token_count",
    ],
)
@pytest.mark.parametrize("track", [HEVC, STORED, EXACT])
def test_coordinates_are_those_of_the_grid(field: str, track: str) -> None:
    for number in (0, 5):
        for change in (1, -1, 7):
            old = record_of(parts(), track, number)[field]
            if old + change >= 0:
                refused(set_field(track, number, **{field: old + change}), track=track)


@covers("REC-1", "CNV-2", "CNV-3")
@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("token_start", 2**53 - 1, "table.record"),
        ("token_start", 2**53, "limit.exceeded"),
        ("token_start", 2**64 - 1, "limit.exceeded"),
        ("token_count", 2**32 - 1, "table.record"),
        ("token_count", 0, "table.record"),
        ("group", 2, "table.record"),
        ("group", 2**16 - 1, "table.record"),
        ("layer_index", 2**16 - 1, "table.record"),
        ("layer_count", 0, "table.record"),
        ("head_start", 2**32 - 1, "table.record"),
        ("head_count", 2**32 - 1, "table.record"),
    ],
)
def test_extreme_coordinates(field: str, value: int, code: str) -> None:
    refused(set_field(STORED, 0, **{field: value}), code=code)


@covers("REC-1", "SEG-1", "SEG-2")
def test_segments_in_another_order_or_twice() -> None:
    def swap(builder: Builder) -> None:
        rows = builder.segments[STORED]
        rows[0].record, rows[1].record = rows[1].record, rows[0].record

    def twice(builder: Builder) -> None:
        builder.segments[STORED][1].record = dict(builder.segments[STORED][0].record)

    refused(swap)
    refused(twice)
    builder = parts()
    rows = builder.segments[STORED]
    rows[2], rows[3] = rows[3], rows[2]  # the objects too: digests and offsets are right
    assert verdict(builder.build()) == "table.record"


@covers("TAB-1", "TAB-2", "SEG-1", "HDR-8")
@pytest.mark.parametrize("change", ["one less", "one more"])
def test_number_of_segments(change: str) -> None:
    builder = parts()
    rows = builder.segments[STORED]
    if change == "one less":
        rows.pop()
    else:
        rows.append(Builder.copy(builder).segments[STORED][-1])
    assert outcome(builder.build(), STORED) == "manifest.semantics"


@covers("REC-2", "REC-7")
@pytest.mark.parametrize("index", [1, 2, 3, 2**16, 2**32 - 1])
def test_sets_of_quantised_segments(index: int) -> None:
    refused(set_field(STORED, 0, set_index=index))


@covers("REC-3")
@pytest.mark.parametrize("index", [0, 1, 2**32 - 2])
def test_exact_segments_name_no_set(index: int) -> None:
    refused(set_field(EXACT, 0, set_index=index), track=EXACT)


@covers("REC-3")
def test_exact_segments_have_no_side_block() -> None:
    refused(set_field(EXACT, 0, side_bytes=1), track=EXACT)
    builder = parts()
    builder.segments[EXACT][0].side = b"\0"
    assert outcome(builder.build(), EXACT) == "table.record"


@covers("REC-4")
def test_segments_have_a_payload() -> None:
    old = record_of(parts(), STORED, 0)
    for size in (old["stored_bytes"], old["stored_bytes"] + 1, 2**28):
        refused(set_field(STORED, 0, side_bytes=size))
    builder = parts()
    builder.segments[STORED][5].payload = b""
    assert outcome(builder.build(), STORED) == "table.record"
    builder = parts()
    builder.segments[EXACT][5].payload = b""
    assert outcome(builder.build(), EXACT) == "table.record"


@covers("REC-8")
@pytest.mark.parametrize(
    ("track", "layout"),
    [
        (HEVC, 2),
        (HEVC, 2**16 - 1),
        (HEVC, 2**16 - 2),
        (ZSTD, 0),
        (STORED, 0),
        (STORED, 1),
        (EXACT, 0),
    ],
)
def test_layout_index(track: str, layout: int) -> None:
    refused(set_field(track, 0, layout=layout), track=track)


@covers("LAY-2")
def test_layouts_hold_their_segments() -> None:
    layouts = parts().manifest["tracks"][0]["layouts"]
    assert [item["tile"] for item in layouts] == [[1, 8], [1, 3]]
    refused(set_field(HEVC, 0, layout=1), track=HEVC)  # 8 channels in tiles of 3
    for change in ({"tile": [1, 7]}, {"grid": [1, 5]}):
        builder = parts()
        builder.manifest["tracks"][0]["layouts"][0].update(change)
        file = builder.build()
        assert outcome(file, HEVC) == "table.record"
        assert verdict(file) == "table.record"
        assert outcome(file, ZSTD) == GOOD[ZSTD]


@covers("TRK-6")
def test_every_layout_is_used() -> None:
    builder = parts()
    layouts = builder.manifest["tracks"][0]["layouts"]
    layouts.append({**layouts[0], "frames": 2})
    file = builder.build()
    assert outcome(file, HEVC) == "table.record"
    assert verdict(file) == "table.record"
    assert outcome(file, ZSTD) == GOOD[ZSTD]
    last = Builder.copy(builder)
    last.manifest["tracks"][0]["layouts"].insert(0, last.manifest["tracks"][0]["layouts"].pop())
    for item in last.segments[HEVC]:
        item.record["layout"] += 1
    assert outcome(last.build(), HEVC) == "table.record"


@covers("TAB-4")
@pytest.mark.parametrize("place", [0, 1, 3])
def test_reserved_bytes_of_segments(place: int) -> None:
    reserved = bytes(place) + b"\x80" + bytes(3 - place)
    refused(set_field(ZSTD, 3, reserved=reserved), track=ZSTD)


# --- set records -----------------------------------------------------------------------------


def set_record(number: int, **fields: Any) -> Edit:
    """An edit of a set record."""
    return lambda builder: builder.sets[QUALITY][number].record.update(fields)


@covers("TAB-4")
@pytest.mark.parametrize("place", [0, 9])
def test_reserved_bytes_of_sets(place: int) -> None:
    refused(set_record(1, reserved=bytes(place) + b"\1" + bytes(9 - place)))


@covers("REC-5", "REC-2")
@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"group": 2}), (0, {"group": 2**16 - 1}), (0, {"group": 1}), (2, {"group": 0}),
        (0, {"layer_index": 1}), (1, {"layer_index": 4}), (1, {"layer_index": 2**16 - 1}),
        (0, {"layer_count": 2}), (0, {"layer_count": 4}), (0, {"layer_count": 0}),
        (1, {"layer_count": 3}), (1, {"layer_index": 0, "layer_count": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_sets_belong_to_layer_runs(number: int, fields: dict[str, int]) -> None:
    refused(set_record(number, **fields))


@covers("REC-5", "QUA-3")
def test_sets_belong_to_quantised_groups() -> None:
    options = {"window": True, "tracks": TRACKS[2:]}
    builder = parts(**options)
    groups = [item.record["group"] for item in builder.sets[QUALITY]]
    assert groups == [0, 0, 1, 2]
    refused(set_record(3, group=3), **options)


def unused_set(builder: Builder) -> SetObject:
    """A copy of the first set."""
    first = builder.sets[QUALITY][0]
    return SetObject(dict(first.record), first.data)


@covers("REC-7")
def test_every_set_is_used_and_they_ascend() -> None:
    builder = parts()
    builder.sets[QUALITY].append(unused_set(builder))
    assert verdict(builder.build()) == "table.record"  # neither ascending nor used
    builder = parts()
    builder.sets[QUALITY].insert(0, unused_set(builder))
    for track in TRACKS[:3]:
        for item in builder.segments[track]:
            item.record["set_index"] += 1
    assert outcome(builder.build(), STORED) == "table.record"  # set 0 is not used
    builder = parts()
    sets = builder.sets[QUALITY]
    sets[0], sets[1] = sets[1], sets[0]
    for track in TRACKS[:3]:
        for item in builder.segments[track]:
            item.record["set_index"] = {0: 1, 1: 0, 2: 2}[item.record["set_index"]]
    assert verdict(builder.build()) == "table.record"  # used, but not ascending


@covers("REC-7", "REC-2")
def test_several_sets_of_one_layer_run() -> None:
    builder = parts()
    builder.sets[QUALITY].insert(0, unused_set(builder))
    for track in TRACKS[:3]:
        for item in builder.segments[track]:
            if item.record["set_index"] or item.record["token_start"]:
                item.record["set_index"] += 1
    file = builder.build()
    assert verdict(file) == "ok"
    assert outcome(file, STORED) == GOOD[STORED]


@covers("REC-4", "REC-9")
@pytest.mark.parametrize(
    ("size", "code"),
    [
        (0, "table.record"), (15, "table.record"), (16, "set.content"), (17, "set.content"),
        (16 + 12 * 3 * 2 * 4 + 1024, "set.content"), (16 + 12 * 3 * 2 * 4 + 1025, "table.record"),
        (2**20, "table.record"),
    ],
)  # fmt: skip
def test_size_of_sets(size: int, code: str) -> None:
    builder = parts()
    item = builder.sets[QUALITY][0]
    item.data = item.data[:size] + bytes(max(0, size - len(item.data)))
    file = builder.build()
    assert outcome(file, STORED) == code
    assert verdict(file) == code


# --- offsets ---------------------------------------------------------------------------------


@covers("DAT-2", "DAT-3", "CNV-2")
@pytest.mark.parametrize("kind", ["segment", "set"])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_offsets_leave_no_gap_and_no_overlap(kind: str, number: int) -> None:
    changes: list[tuple[Any, str]] = [(1, "table.record"), (-1, "table.record")]
    changes += [
        (2**53, "limit.exceeded"),
        (2**64 - 1, "limit.exceeded"),
        (2**53 - 1, "table.record"),
    ]
    for change, code in changes:

        def edit(builder: Builder, change: int = change) -> None:
            items: list[Any] = (
                builder.segments[STORED] if kind == "segment" else builder.sets[QUALITY]
            )
            record = items[number].record
            record["offset"] = change if change > 1 else record["offset"] + change

        old = parts()
        old.place()
        first: Any = (old.segments[STORED] if kind == "segment" else old.sets[QUALITY])[number]
        if first.record["offset"] + change >= 0:
            refused(edit, code=code)


@covers("DAT-2")
@pytest.mark.parametrize("number", [0, 1, 3, 10, 21])
def test_holes_between_objects(number: int) -> None:
    file = parts().build(gaps={number: 1})
    assert verdict(file) in ("table.record", "manifest.semantics")


@covers("DAT-2", "DAT-5")
@pytest.mark.parametrize("number", [1, 5, 20])
def test_holes_of_a_whole_page(number: int) -> None:
    builder = parts(alignment=4096)
    assert verdict(builder.build(gaps={number: 4096})) == "table.record"


@covers("DAT-3", "DAT-1", "DAT-4")
@pytest.mark.parametrize("part", ["qualities", "tracks"])
@pytest.mark.parametrize("change", [1, -1])
def test_the_end_of_a_part(part: str, change: int) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        item = manifest[part][0]
        item["data_stop"] += change
        following = manifest["qualities"][1] if part == "qualities" else manifest["tracks"][1]
        following["data_start"] += change
        if part == "qualities":
            following["data_stop"] += change
            manifest["tracks"][0]["data_start"] += change

    file = parts().build(edit_manifest=edit)
    assert verdict(file) == "table.record"


@covers("DAT-3", "DAT-4")
def test_bytes_behind_the_last_object() -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["data_bytes"] += 1
        manifest["tracks"][-1]["data_stop"] += 1

    builder = parts()
    file = builder.build(
        edit_manifest=edit,
        edit_header=lambda fields: fields.update(file_bytes=fields["file_bytes"] + 1),
        edit_data=lambda data: data + b"\0",
    )
    assert verdict(file) == "table.record"
    assert outcome(file, TRACKS[-1]) == "table.record"
    assert outcome(file, STORED) == GOOD[STORED]


@covers("TAB-3")
def test_the_digest_of_an_empty_table() -> None:
    builder = parts(tracks=("exact/zstd",))
    builder.build()
    assert builder.manifest["qualities"][0]["set_table_digest"] == b3(b"").hex()

    def edit(manifest: dict[str, Any]) -> None:
        manifest["qualities"][0]["set_table_digest"] = b3(b"\0").hex()

    assert verdict(builder.build(edit_manifest=edit)) == "table.digest"


# --- tracks of one quality -------------------------------------------------------------------


@covers("REC-6", "VER-1")
def test_tracks_of_one_quality_agree() -> None:
    other = b3(b"other")
    builder = parts()
    file = builder.build(edit_records=set_field(ZSTD, 2, integer_digest=other))
    assert verdict(file) == "table.record"
    assert outcome(file, HEVC) == GOOD[HEVC]
    assert outcome(file, ZSTD) == "segment.integers"
    builder = parts()
    builder.sets[QUALITY].insert(0, unused_set(builder))
    for track in TRACKS[:3]:
        for item in builder.segments[track]:
            late = item.record["token_start"] > 0
            if item.record["set_index"] or late == (track == STORED):
                item.record["set_index"] += 1
    assert verdict(builder.build()) == "table.record"  # equal sets under other numbers


@covers("REC-6", "VER-1")
def test_side_blocks_of_one_quality_are_equal() -> None:
    builder = parts()
    item = builder.segments[STORED][0]
    assert item.record["layer_count"] * item.record["token_count"] == 18
    changed = bytearray(item.side)
    changed[5] ^= 1  # another token scale for one token that is no patch
    item.side = bytes(changed)
    file = builder.build()
    assert verdict(file) == "segment.side"
    assert outcome(file, STORED) != GOOD[STORED]
    assert outcome(file, HEVC) == GOOD[HEVC]


@covers("REC-10", "VER-1")
def test_what_two_qualities_hold_exactly_is_the_same() -> None:
    tracks = ("near-lossless/stored", "exact/stored")
    builder = parts(tracks=tracks, window=True)
    assert verdict(builder.build()) == "ok"
    item = next(item for item in builder.segments[tracks[0]] if item.record["group"] == 3)
    item.payload = item.payload[:-1] + bytes([item.payload[-1] ^ 1])
    item.record["integer_digest"] = b3(item.payload)
    item.record["integer_sum"] = integer_sum(item.payload)
    file = builder.build()
    assert verdict(file) == "table.record"
    assert isinstance(outcome(file, tracks[0]), dict)


@covers("CID-1", "VER-2")
@pytest.mark.parametrize("tracks", [("exact/zstd",), ("near-lossless/zstd", "exact/stored")])
@pytest.mark.parametrize("window", [False, True])
def test_the_source_digest_is_recomputed(tracks: tuple[str, ...], window: bool) -> None:
    builder = parts(tracks=tracks, window=window)
    assert verdict(builder.build()) == "ok"
    digests = []
    from tests.damage import small_cache

    for group in small_cache(window=window).groups:
        digests += [b3(layer.tobytes()) for layer in group.layers]
    assert builder.manifest["source_digest"] == b3(b"".join(digests)).hex()
    builder.manifest["source_digest"] = b3(b"x").hex()
    file = builder.build()
    assert outcome(file, tracks[-1]) == outcome(artifact(tracks=tracks, window=window), tracks[-1])
    assert verdict(file) == "data.source"
    without = parts(tracks=("near-lossless/zstd",))
    without.manifest["source_digest"] = b3(b"x").hex()
    assert verdict(without.build()) == "ok"
