"""Level faulty: records, sets, side blocks and integers behind right digests (sections 8 and 9)."""

# ruff: noqa: E501, PLR0915, PLR0917 - long sentences and tables

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.generate.compose import (
    EXACT,
    HEVC,
    QUALITY,
    STORED,
    ZSTD,
    compose,
    small,
    tiny,
)
from conformance.generate.core import one_group
from conformance.generate.faults import fault
from conformance.generate.suite import Suite, decode, inspect
from tests.builder import Builder, SetObject, b3, integer_sum

RECORD = "table.record"
N, H, D, SCALES, TOKENS = 3, 2, 4, 5, 6  # set 0 and segment 0 of the small artifact
PLACES = {
    "scale": 16,
    "zero": 16 + 4 * N,
    "bias": 16 + 6 * N,
    "order": 16 + 6 * N + 4 * N * H * D,
    "token_scale": 16 + 6 * N + 5 * N * H * D,
}
ROW, INDEX = H * D * 2, N * TOKENS
NAN, INF = 0x7FC00000, 0x7F800000


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _records(suite)
    _sets_of_tables(suite)
    _offsets(suite)
    _tracks(suite)
    _set_contents(suite)
    _sides(suite)
    _integers(suite)


def _records(suite: Suite) -> None:
    why = (
        "Records repeat what follows from the manifest; a difference is an error, not information."
    )

    def record(
        slug: str,
        requirements: str,
        number: int,
        fields: dict[str, Any],
        code: str = RECORD,
        *,
        track: str = STORED,
        why: str = why,
    ) -> None:
        def edit(builder: Builder) -> None:
            row = builder.segments[track][number].record
            row.update(
                {
                    key: row[key] + new[0] if isinstance(new, tuple) else new
                    for key, new in fields.items()
                }
            )

        text = ", ".join(
            f"`{key}` is {'one off' if isinstance(new, tuple) else f'{new:,}' if isinstance(new, int) else 'not zero'}"
            for key, new in fields.items()
        )
        fault(
            suite,
            slug,
            requirements,
            small(suite, [track]).build(edit_records=edit),
            code,
            f"In segment record {number} of `{track}` {text}.",
            why,
            more=[decode(track, code=code)],
        )

    for field in (
        "group",
        "layer_index",
        "layer_count",
        "head_start",
        "head_count",
        "token_start",
        "token_count",
    ):
        name = field.replace("_", "-")
        record(f"{name}-one-more", "REC-1 SEG-1", 0, {field: (1,)})
        record(f"{name}-one-more-last", "REC-1 SEG-1", 5, {field: (1,)}, track=EXACT)
    for slug, field, value, code in (
        ("token-start-2-53", "token_start", 2**53, "limit.exceeded"),
        ("token-start-2-64", "token_start", 2**64 - 1, "limit.exceeded"),
        ("token-start-2-53-less-1", "token_start", 2**53 - 1, RECORD),
        ("token-count-2-32", "token_count", 2**32 - 1, RECORD),
        ("token-count-0", "token_count", 0, RECORD),
        ("group-2-16", "group", 2**16 - 1, RECORD),
        ("layer-count-0", "layer_count", 0, RECORD),
        ("head-start-2-32", "head_start", 2**32 - 1, RECORD),
        ("head-count-0", "head_count", 0, RECORD),
    ):
        record(slug, "CNV-2 CNV-3" if code != RECORD else "REC-1 CNV-3", 0, {field: value}, code)
    for index in (1, 2, 3, 2**32 - 1):
        record(f"set-index-{index}", "REC-2 REC-7", 0, {"set_index": index})
    for index in (0, 2**32 - 2):
        record(f"set-index-{index}-of-exact", "REC-3", 0, {"set_index": index}, track=EXACT)
    record("side-bytes-of-exact", "REC-3", 0, {"side_bytes": 1}, track=EXACT)
    record("layout-0-of-stored", "REC-8", 0, {"layout": 0})
    for place in (0, 3):
        record(
            f"reserved-{place}",
            "TAB-4",
            3,
            {"reserved": bytes(place) + b"\x80" + bytes(3 - place)},
        )
    stored = small(suite, [STORED]).segments[STORED][0]
    size = len(stored.side) + len(stored.payload)
    record("side-bytes-are-all", "REC-4", 0, {"side_bytes": size})
    record("side-bytes-above-stored-bytes", "REC-4", 0, {"side_bytes": size + 1})
    for track, slug in ((STORED, "quantised"), (EXACT, "exact")):
        builder = small(suite, [track])
        builder.segments[track][5].payload = b""
        fault(
            suite,
            f"no-payload-{slug}",
            "REC-4",
            builder.build(),
            RECORD,
            f"The last segment of `{track}` has no payload.",
            why,
        )
    builder = small(suite, [EXACT])
    builder.segments[EXACT][0].side = b"\0"
    fault(
        suite,
        "side-block-of-exact",
        "REC-3",
        builder.build(),
        RECORD,
        "An exact segment has a side block of one byte.",
        why,
    )

    def swap(builder: Builder) -> None:
        rows = builder.segments[STORED]
        rows[0].record, rows[1].record = rows[1].record, rows[0].record

    def twice(builder: Builder) -> None:
        builder.segments[STORED][1].record = dict(builder.segments[STORED][0].record)

    one = lambda: small(suite, [STORED])  # noqa: E731
    fault(
        suite,
        "records-swapped",
        "REC-1 SEG-2 DAT-2",
        one().build(edit_records=swap),
        RECORD,
        "Two records are swapped.",
        why,
    )
    fault(
        suite,
        "record-twice",
        "REC-1 SEG-1",
        one().build(edit_records=twice),
        RECORD,
        "One record stands there twice, another is missing.",
        why,
    )
    builder = one()
    rows = builder.segments[STORED]
    rows[2], rows[3] = rows[3], rows[2]
    fault(
        suite,
        "segments-swapped",
        "SEG-2 REC-1",
        builder.build(),
        RECORD,
        "Two segments are swapped with their records: offsets and digests are right, the order is not.",
        why,
    )
    layered = small(suite, [STORED])
    layered.manifest["segmentation"]["order"] = "layer-major"
    fault(
        suite,
        "order-layer-major-not-kept",
        "SEG-3 REC-1",
        layered.build(),
        RECORD,
        "The manifest says layer-major, the segments ascend token-major.",
        why,
    )
    for slug, edit in (
        ("segment-missing", lambda r: r.pop()),
        ("segment-too-many", lambda r: r.append(r[-1])),
    ):
        builder = one()
        edit(builder.segments[STORED])
        fault(
            suite,
            slug,
            "TAB-1 TAB-2 SEG-1",
            builder.build(),
            "manifest.semantics",
            "The table has one segment less or more than there are cells, and the manifest counts it.",
            why,
        )

    def video(
        slug: str,
        requirements: str,
        edit: Callable[[Builder], Any],
        what: str,
        *,
        records: bool = False,
    ) -> None:
        builder = small(suite, [HEVC])
        if not records:
            edit(builder)
        fault(
            suite,
            slug,
            requirements,
            builder.build(edit_records=edit) if records else builder.build(),
            RECORD,
            what,
            why,
            requires=["hevc"],
        )

    def set_layout(number: int) -> Callable[[Builder], Any]:
        return lambda b: b.segments[HEVC][0].record.update(layout=number)

    def manifest(**changes: Any) -> Callable[[Builder], Any]:
        return lambda b: b.manifest["tracks"][0]["layouts"][0].update(changes)

    for number in (2, 2**16 - 1):
        video(
            f"layout-{number}",
            "REC-8",
            set_layout(number),
            f"An hevc segment names layout {number} of 2.",
            records=True,
        )
    video(
        "hevc-without-layouts",
        "REC-8 TRK-5",
        lambda b: b.manifest["tracks"][0].update(layouts=[]),
        "A track with codec hevc lists no layouts.",
    )
    video(
        "layout-with-too-few-channels",
        "LAY-2",
        set_layout(1),
        "8 channels in a layout with tiles of 3.",
        records=True,
    )
    video("tile-too-small", "LAY-2", manifest(tile=[1, 7]), "Tiles of 7 for 8 channels.")
    video(
        "too-little-room-for-tokens",
        "LAY-2",
        manifest(grid=[1, 5]),
        "Room for 5 tokens, segments of 6.",
    )

    def unused(b: Builder) -> None:
        layouts = b.manifest["tracks"][0]["layouts"]
        layouts.append({**layouts[0], "frames": 2})

    video("layout-unused", "TRK-6", unused, "A layout that no segment uses.")


def _copy(builder: Builder) -> SetObject:
    first = builder.sets[QUALITY][0]
    return SetObject(dict(first.record), first.data)


def _sets_of_tables(suite: Suite) -> None:
    why = "A set belongs to one layer run of one quantised group, and is there to be used."

    def record(
        slug: str, requirements: str, number: int, fields: dict[str, Any], code: str = RECORD
    ) -> None:
        def edit(builder: Builder) -> None:
            builder.sets[QUALITY][number].record.update(fields)

        fault(
            suite,
            slug,
            requirements,
            small(suite, [STORED]).build(edit_records=edit),
            code,
            f"Set record {number} has {fields}.".replace("{", "")
            .replace("}", "")
            .replace("'", "`"),
            why,
        )

    record("set-reserved-first", "TAB-4", 1, {"reserved": b"\1" + bytes(9)})
    record("set-reserved-last", "TAB-4", 1, {"reserved": bytes(9) + b"\1"})
    for slug, number, fields in (
        ("set-of-group-2", 0, {"group": 2}),
        ("set-of-group-2-16", 0, {"group": 2**16 - 1}),
        ("set-of-the-other-group", 2, {"group": 0}),
        ("set-at-layer-1", 0, {"layer_index": 1}),
        ("set-at-layer-4", 1, {"layer_index": 4}),
        ("set-of-2-layers", 0, {"layer_count": 2}),
        ("set-of-no-layers", 0, {"layer_count": 0}),
        ("set-of-3-layers-at-the-end", 1, {"layer_count": 3}),
    ):
        record(slug, "REC-5 REC-2", number, fields)
    builder = small(suite, [STORED], window=True)
    numbers = [item.record["group"] for item in builder.sets[QUALITY]]

    def of_state(b: Builder) -> None:
        b.sets[QUALITY][numbers.index(2)].record["group"] = 3

    fault(
        suite,
        "set-of-an-exact-group",
        "REC-5 QUA-3",
        builder.build(edit_records=of_state),
        RECORD,
        "A set names a state, which is never quantised.",
        why,
    )
    builder = small(suite, [STORED])
    builder.sets[QUALITY].append(_copy(builder))
    fault(
        suite,
        "set-behind-the-last",
        "REC-7",
        builder.build(),
        RECORD,
        "A second set of the first run stands at the end, unused.",
        why,
    )
    builder = small(suite, [STORED])
    builder.sets[QUALITY].insert(0, _copy(builder))
    for item in builder.segments[STORED]:
        item.record["set_index"] += 1
    fault(
        suite,
        "set-unused",
        "REC-7",
        builder.build(),
        RECORD,
        "The first set is named by no segment.",
        why,
    )
    builder = small(suite, [STORED])
    sets = builder.sets[QUALITY]
    sets[0], sets[1] = sets[1], sets[0]
    for item in builder.segments[STORED]:
        item.record["set_index"] = {0: 1, 1: 0, 2: 2}[item.record["set_index"]]
    fault(
        suite,
        "sets-descend",
        "REC-7",
        builder.build(),
        RECORD,
        "Sets of a group descend; each is used.",
        why,
    )
    most = 16 + 12 * N * H * D + 1024
    for size, code in (
        (0, RECORD),
        (15, RECORD),
        (16, "set.content"),
        (most, "set.content"),
        (most + 1, RECORD),
    ):
        builder = small(suite, [STORED])
        item = builder.sets[QUALITY][0]
        item.data = item.data[:size] + bytes(max(0, size - len(item.data)))
        fault(
            suite,
            f"set-of-{size}-bytes",
            "REC-9 REC-4 SET-3" if size > 16 else "REC-4 SET-3",
            builder.build(),
            code,
            f"A set of {size:,} bytes: the record allows 16 to {most:,}.",
            why,
        )


def _offsets(suite: Suite) -> None:
    why = "Without gaps and overlaps no byte is hidden, and a cut file cannot look whole."
    for kind in ("segment", "set"):
        for number in (0, 1):
            for slug, change, code in (
                ("one-more", 1, RECORD),
                ("one-less", -1, RECORD),
                ("2-53", 2**53, "limit.exceeded"),
                ("2-64", 2**64 - 1, "limit.exceeded"),
                ("2-53-less-1", 2**53 - 1, RECORD),
            ):
                if (kind, number, change) == ("set", 0, -1) or (number and change > 1):
                    continue

                def edit(
                    b: Builder, kind: str = kind, number: int = number, change: int = change
                ) -> None:
                    items: list[Any] = b.segments[STORED] if kind == "segment" else b.sets[QUALITY]
                    row = items[number].record
                    row["offset"] = change if change > 1 else row["offset"] + change

                fault(
                    suite,
                    f"{kind}-{number}-offset-{slug}",
                    "DAT-2 DAT-3" if code == RECORD else "CNV-2 DAT-2",
                    small(suite, [STORED]).build(edit_records=edit),
                    code,
                    f"The offset of {kind} {number} is {slug.replace('-', ' ')}.",
                    why,
                    family="dat",
                )
    fault(
        suite,
        "hole-between-segments",
        "DAT-2",
        small(suite, [STORED]).build(gaps={5: 1}),
        RECORD,
        "A zero byte between two segments; all offsets say so.",
        why,
    )
    fault(
        suite,
        "hole-of-a-page",
        "DAT-2 DAT-5",
        tiny(alignment=4096).build(gaps={1: 4096}),
        RECORD,
        "A page of zeros between two objects at multiples of 4,096.",
        why,
    )
    fault(
        suite,
        "padding-of-ones",
        "DAT-5",
        tiny(alignment=4096).build(filler=b"\1"),
        "data.padding",
        "Padding between objects is 1.",
        why,
    )
    for part in ("qualities", "tracks"):
        for change in (1, -1):

            def edit(manifest: dict[str, Any], part: str = part, change: int = change) -> None:
                manifest[part][0]["data_stop"] += change
                following = (
                    manifest["qualities"][1] if part == "qualities" else manifest["tracks"][1]
                )
                following["data_start"] += change
                if part == "qualities":
                    following["data_stop"] += change
                    manifest["tracks"][0]["data_start"] += change

            fault(
                suite,
                f"end-of-{part}-{'later' if change > 0 else 'earlier'}",
                "DAT-3 DAT-1 DAT-2",
                small(suite, [STORED, EXACT]).build(edit_manifest=edit),
                RECORD,
                "The border of two parts of the data is one byte off, in both of them.",
                why,
            )

    def longer(manifest: dict[str, Any]) -> None:
        manifest["data_bytes"] += 1
        manifest["tracks"][-1]["data_stop"] += 1

    fault(
        suite,
        "byte-behind-the-last-object",
        "DAT-3 DAT-4",
        small(suite, [STORED]).build(
            edit_manifest=longer,
            edit_header=lambda f: f.update(file_bytes=f["file_bytes"] + 1),
            edit_data=lambda d: d + b"\0",
        ),
        RECORD,
        "A byte behind the last object, which header and manifest count.",
        why,
    )
    fault(
        suite,
        "byte-behind-the-last-part",
        "DAT-4",
        small(suite, [STORED]).build(
            edit_manifest=lambda m: m.update(data_bytes=m["data_bytes"] + 1),
            edit_header=lambda f: f.update(file_bytes=f["file_bytes"] + 1),
            edit_data=lambda d: d + b"\0",
        ),
        "manifest.semantics",
        "A zero byte behind the last part of the data, which header and manifest count.",
        "Data of no part would be hidden content.",
        more=[inspect("manifest.semantics")],
    )
    fault(
        suite,
        "digest-of-an-empty-table",
        "TAB-3",
        small(suite, [EXACT]).build(
            edit_manifest=lambda m: m["qualities"][0].update(set_table_digest=b3(b"\0").hex())
        ),
        "table.digest",
        "The digest of the empty set table of `exact` is another than that of no bytes.",
        "An empty table has a digest, too.",
    )
    for place, what in (("set_table_digest", "qualities"), ("table_digest", "tracks")):
        fault(
            suite,
            f"{place.replace('_', '-')}-zero",
            "TAB-3 CNV-5",
            small(suite, [STORED]).build(
                edit_manifest=lambda m, p=place, w=what: m[w][0].update({p: "0" * 64})
            ),
            "table.digest",
            f"`{place}` is all zeros.",
            "No value of a digest means unchecked.",
        )
    for what, code in (("sets", "set.digest"), ("segments", "segment.digest")):

        def zero(b: Builder, what: str = what) -> None:
            objects: Any = b.sets[QUALITY] if what == "sets" else b.segments[STORED]
            objects[0].record["digest"] = bytes(32)

        fault(
            suite,
            f"digest-of-{what}-zero",
            "CNV-5 ORD-3",
            small(suite, [STORED]).build(edit_records=zero),
            code,
            f"The digest of the first of the {what} is all zeros.",
            "No value of a digest means unchecked.",
            more=[decode(STORED, code=code)],
        )


def _tracks(suite: Suite) -> None:
    why = "Tracks of one quality are the same integers; a reader may take any of them."

    def other(b: Builder) -> None:
        b.segments[ZSTD][2].record["integer_digest"] = b3(b"other")

    two = [STORED, ZSTD]
    fault(
        suite,
        "integer-digests-differ",
        "REC-6 VER-1",
        small(suite, two).build(edit_records=other),
        RECORD,
        "Two tracks of one quality differ in an integer digest.",
        why,
        requires=["zstd"],
    )
    builder = small(suite, two)
    builder.sets[QUALITY].insert(0, _copy(builder))
    for track in two:
        for item in builder.segments[track]:
            late = item.record["token_start"] > 0
            if item.record["set_index"] or late == (track == STORED):
                item.record["set_index"] += 1
    fault(
        suite,
        "set-indices-differ",
        "REC-6 VER-1",
        builder.build(),
        RECORD,
        "Two tracks of one quality name equal sets under other numbers.",
        why,
        requires=["zstd"],
    )
    builder = small(suite, two)
    item = builder.segments[STORED][0]
    changed = bytearray(item.side)
    changed[5] = (changed[5] + 1) % SCALES
    item.side = bytes(changed)
    fault(
        suite,
        "side-blocks-differ",
        "REC-6 VER-1",
        builder.build(),
        "segment.side",
        "Two tracks of one quality differ in the token scale of one token.",
        why,
        requires=["zstd"],
    )
    builder = small(suite, [STORED, EXACT], window=True)
    item = next(item for item in builder.segments[STORED] if item.record["group"] == 3)
    item.payload = item.payload[:-1] + bytes([item.payload[-1] ^ 1])
    item.record["integer_digest"] = b3(item.payload)
    item.record["integer_sum"] = integer_sum(item.payload)
    fault(
        suite,
        "exact-groups-differ",
        "REC-10 VER-1",
        builder.build(),
        RECORD,
        "A state that two qualities hold exactly differs between them.",
        "Exact is exact in both.",
    )
    for slug, window in (("source-digest", False), ("source-digest-with-window", True)):
        builder = small(suite, [EXACT], window=window)
        builder.manifest["source_digest"] = b3(b"x").hex()
        fault(
            suite,
            slug,
            "CID-1 VER-2",
            builder.build(),
            "data.source",
            "The exact track restores another source than `source_digest` names.",
            "Only verification can tell; the content id follows from the digest and is right.",
        )
    builder = small(suite, [EXACT])
    item = builder.segments[EXACT][0]
    item.payload = bytes([item.payload[0] ^ 1]) + item.payload[1:]
    item.record["integer_digest"] = b3(item.payload)
    item.record["integer_sum"] = integer_sum(item.payload)
    fault(
        suite,
        "another-source",
        "CID-1 VER-2",
        builder.build(),
        "data.source",
        "One bit of the exact track is another, with every digest but the source's right.",
        "The source digest binds the tensors.",
    )


def bits(value: float) -> bytes:
    """A binary32 as it is stored."""
    return np.float32(value).tobytes()


def _set_contents(suite: Suite) -> None:
    good = small(suite, [STORED]).sets[QUALITY][0].data
    assert struct.unpack_from("<HHIIHH", good) == (N, 12, H, D, SCALES, 0)

    def with_set(
        slug: str, requirements: str, data: bytes, code: str, what: str, why: str, limits: Any = ()
    ) -> None:
        builder = small(suite, [STORED])
        builder.sets[QUALITY][0].data = data
        fault(
            suite,
            slug,
            requirements,
            builder.build(),
            code,
            what,
            why,
            family="set",
            more=[decode(STORED, code=code)],
            limits=limits,
        )

    def patched(
        slug: str,
        requirements: str,
        place: int,
        new: bytes,
        what: str,
        why: str,
        code: str = "set.content",
        limits: Any = (),
    ) -> None:
        with_set(
            slug,
            requirements,
            good[:place] + new + good[place + len(new) :],
            code,
            what,
            why,
            limits,
        )

    why = "The head of a set repeats its shape and fixes its length."
    for slug, requirements, place, new, what in (
        ("layer-count-2", "SET-1 SET-3", 0, b"\2\0", "layer_count is 2 of 3"),
        ("layer-count-0", "SET-1", 0, b"\0\0", "layer_count is 0"),
        ("flag-16", "SET-2", 2, b"\x1c\0", "An unknown flag is set"),
        ("flag-32768", "SET-2", 2, b"\x0c\x80", "The highest flag is set"),
        (
            "order-without-flag",
            "SET-3",
            2,
            b"\x04\0",
            "The flag of `order` is missing, its bytes are there",
        ),
        (
            "bias-without-flag",
            "SET-3",
            2,
            b"\x08\0",
            "The flag of `bias` is missing, its bytes are there",
        ),
        ("flag-1-without-bytes", "SET-3", 2, b"\x0d\0", "Flag 1 is set for one scale a layer"),
        ("flag-2-without-bytes", "SET-3", 2, b"\x0e\0", "Flag 2 is set for one zero a layer"),
        ("heads-1", "SET-1", 4, b"\1\0\0\0", "heads is 1 of 2"),
        ("heads-2-32", "SET-1 CNV-3", 4, b"\xff\xff\xff\xff", "heads is 2^32 - 1"),
        ("head-dim-3", "SET-1", 8, b"\3\0\0\0", "head_dim is 3 of 4"),
        ("head-dim-2-32", "SET-1 CNV-3", 8, b"\xff\xff\xff\xff", "head_dim is 2^32 - 1"),
        (
            "one-token-scale-more",
            "SET-3",
            12,
            bytes([SCALES + 1, 0]),
            "token_scale_count is one more",
        ),
        (
            "one-token-scale-less",
            "SET-3",
            12,
            bytes([SCALES - 1, 0]),
            "token_scale_count is one less",
        ),
        ("reserved-1", "SET-2", 14, b"\1\0", "The reserved field is 1"),
        ("reserved-32768", "SET-2", 14, b"\0\x80", "The reserved field is 32,768"),
    ):
        patched(slug, requirements, place, new, f"{what}.", why)
    patched(
        "token-scales-257",
        "SET-7 LIM-2",
        12,
        b"\1\1",
        "token_scale_count is 257.",
        why,
        "limit.exceeded",
        ["token_scales_per_set"],
    )
    patched(
        "token-scales-65535",
        "SET-7 LIM-2",
        12,
        b"\xff\xff",
        "token_scale_count is 65,535.",
        why,
        "limit.exceeded",
        ["token_scales_per_set"],
    )
    for change in (-1, 1, 4):
        with_set(
            f"length-{'minus-' if change < 0 else ''}{abs(change)}",
            "SET-3",
            good[:change] if change < 0 else good + bytes(change),
            "set.content",
            f"The set is {abs(change)} bytes too {'short' if change < 0 else 'long'}.",
            why,
        )
    ranges: dict[str, bytes] = {
        "zero": bits(0.0),
        "minus-zero": bits(-0.0),
        "minus-one": bits(-1.0),
        "too-small": bits(2.0**-41),
        "too-large": bits(2.0**41),
        "just-too-large": bits(np.nextafter(np.float32(2**40), np.float32(np.inf))),
        "just-too-small": bits(np.nextafter(np.float32(2.0**-40), np.float32(0))),
        "subnormal": struct.pack("<I", 1),
        "nan": struct.pack("<I", NAN),
        "infinite": struct.pack("<I", INF),
        "minus-infinite": struct.pack("<I", INF | 1 << 31),
    }
    why = (
        "Inside these ranges no operation can overflow or become subnormal, so all machines agree."
    )
    for field in ("scale", "token_scale"):
        for slug, new in ranges.items():
            if field == "token_scale" and slug in ("minus-one", "just-too-small", "minus-infinite"):
                continue
            patched(
                f"{field.replace('_', '-')}-{slug}",
                "SET-4",
                PLACES[field] + 8,
                new,
                f"A {field} is {slug.replace('-', ' ')}.",
                why,
            )
    for slug, new in {
        "minus-zero": bits(-0.0),
        "too-small": bits(2.0**-65),
        "negative-too-small": bits(-(2.0**-65)),
        "too-large": bits(2.0**97),
        "just-too-large": bits(np.nextafter(np.float32(2.0**96), np.float32(np.inf))),
        "just-too-small": bits(np.nextafter(np.float32(2.0**-64), np.float32(0))),
        "subnormal": struct.pack("<I", 1),
        "nan": struct.pack("<I", NAN),
        "infinite": struct.pack("<I", INF),
    }.items():
        patched(
            f"bias-{slug}",
            "SET-5",
            PLACES["bias"] + 20,
            new,
            f"A bias is {slug.replace('-', ' ')}.",
            why,
        )
    for order in ([0, 0, 1, 2], [0, 1, 2, 4], [255, 1, 2, 3], [1, 2, 3, 4]):
        patched(
            f"order-{'-'.join(map(str, order))}",
            "SET-6",
            PLACES["order"] + 8,
            bytes(order),
            f"`order` of one head is {order}.",
            "It must be a permutation, or values are lost and memory may be left unset.",
        )
    for dims, size in ((256, 1), (257, 2)):
        group = one_group("float16", (1, 3, 1, dims), seed=f"dims-{dims}", patches=(0,))
        builder = compose([group], 3, [ZSTD])
        data, place = builder.sets[QUALITY][0].data, 16 + 6 + 4 * dims
        builder.sets[QUALITY][0].data = (
            data[: place + size] + data[place : place + size] + data[place + 2 * size :]
        )
        fault(
            suite,
            f"order-of-{dims}-dims-repeats",
            "SET-6",
            builder.build(),
            "set.content",
            f"`order` of {dims} dims has an element twice.",
            "Its elements have two bytes above 256 dims.",
            requires=["zstd"],
        )


def _sides(suite: Suite) -> None:
    builder = small(suite, [STORED])
    good = builder.segments[STORED][0].side
    index, place = good[:INDEX], INDEX
    patches: list[tuple[list[int], bytes]] = []
    for _ in range(N):
        assert struct.unpack_from("<5I", good, place) == (4, 0, 1, 2, 3)
        patches.append(([0, 1, 2, 3], good[place + 20 : place + 20 + 4 * ROW]))
        place += 20 + 4 * ROW
    assert place == len(good)

    def packed(index: bytes, patches: list[tuple[list[int], bytes]], counts: Any = None) -> bytes:
        data = index
        for number, (ordinals, rows) in enumerate(patches):
            count = len(ordinals) if counts is None else counts[number]
            data += struct.pack(f"<I{len(ordinals)}I", count, *ordinals) + rows
        return data

    assert packed(index, patches) == good

    def side(
        slug: str, requirements: str, data: bytes, what: str, why: str, *, read: bool = True
    ) -> None:
        builder = small(suite, [STORED])
        builder.segments[STORED][0].side = data
        fault(
            suite,
            slug,
            requirements,
            builder.build(),
            "segment.side",
            what,
            why,
            family="sid",
            more=[decode(STORED, code="segment.side")] if read else (),
        )

    why = (
        "The side block has exactly the length that its counts give; nothing may be read behind it."
    )
    for size in (0, 1, INDEX - 1, INDEX, INDEX + 3, INDEX + 4, len(good) - 1):
        side(
            f"cut-to-{size}",
            "SID-1 ORD-3",
            good[:size],
            f"A side block of {size} of {len(good)} bytes.",
            why,
        )
    side("one-byte-more", "SID-1", good + b"\0", "A byte behind the last patch.", why)
    side("four-bytes-more", "SID-1", good + bytes(4), "A count behind the last layer.", why)
    for value, position in ((SCALES, 4), (255, INDEX - 1)):
        side(
            f"index-{value}",
            "SID-2",
            packed(index[:position] + bytes([value]) + index[position + 1 :], patches),
            f"A token scale index is {value} of {SCALES}.",
            "It would read behind the set.",
        )
    for ordinals in (
        [1, 0, 2, 3],
        [0, 0, 1, 2],
        [0, 1, 2, 2],
        [0, 1, 2, 6],
        [0, 1, 2, 2**32 - 1],
        [2**31, 1, 2, 3],
    ):
        for layer in (0, 2):
            if layer and ordinals != [0, 1, 2, 6]:
                continue
            other = list(patches)
            other[layer] = (ordinals, patches[layer][1])
            side(
                f"ordinals-{'-'.join(map(str, ordinals))}-layer-{layer}",
                "SID-3",
                packed(index, other),
                f"The patches of layer {layer} are at tokens {ordinals} of {TOKENS}.",
                "They ascend and stay inside the segment.",
            )
    for count in (0, 3, 5, 7, 2**31, 2**32 - 1):
        side(
            f"count-{count}",
            "SID-1 SID-3 ORD-4 CNV-3",
            packed(index, patches, [count, 4, 4]),
            f"The first layer says {count:,} patches and has 4.",
            why,
        )
    side(
        "last-count-2-32",
        "SID-1 ORD-4 CNV-3",
        packed(index, patches, [4, 4, 2**32 - 1]),
        "The last layer says 2^32 - 1 patches and has 4.",
        why,
    )
    side(
        "index-at-a-patch",
        "SID-4 VER-1",
        packed(b"\1" + index[1:], patches),
        "The token scale index at a patch is 1, not 0.",
        "One content must have one form; verification checks it, restoring does not need it.",
        read=False,
    )
    for code in (0x7F80, 0xFF80, 0x7FC0, 0x7F81):
        other = list(patches)
        other[1] = (
            patches[1][0],
            patches[1][1][:10] + struct.pack("<H", code) + patches[1][1][12:],
        )
        side(
            f"patch-with-{code:04x}",
            "SID-5 VER-6",
            packed(index, other),
            f"A patch holds the bfloat16 {code:04x}, which is not finite.",
            "A cache with a NaN spoils every later token; a quantised quality never holds one.",
            read=False,
        )


def _integers(suite: Suite) -> None:
    builder = small(suite, [STORED])
    item = builder.segments[STORED][0]
    assert item.payload[0] == 128
    item.payload = b"\x7f" + item.payload[1:]
    item.record["integer_digest"] = b3(item.payload)
    item.record["integer_sum"] = integer_sum(item.payload)
    fault(
        suite,
        "integer-at-a-patch",
        "SID-4 VER-1 INT-1",
        builder.build(),
        "segment.side",
        "An integer at a patched token is 127, the zero is 128.",
        "One content must have one form; hidden integers under patches would be a side channel.",
    )
    for track in (STORED, EXACT):
        name = "quantised" if track == STORED else "exact"
        for change in (-1, 1, 64):
            builder = small(suite, [track])
            item = builder.segments[track][0]
            item.payload = item.payload[:change] if change < 0 else item.payload + bytes(change)
            fault(
                suite,
                f"stored-{name}-{'short' if change < 0 else f'long-{change}'}",
                "STO-1 ORD-3",
                builder.build(),
                "segment.payload",
                f"A stored payload of `{track}` is {abs(change)} bytes too {'short' if change < 0 else 'long'}.",
                "Its length follows from the record.",
                more=[decode(track, code="segment.payload")],
            )
        builder = small(suite, [track])
        item = builder.segments[track][0]
        item.payload = item.payload[:-1] + bytes([item.payload[-1] ^ 1])
        fault(
            suite,
            f"other-integers-{name}",
            "INT-1 INT-2 VER-1",
            builder.build(),
            "segment.integers",
            "One bit of the integers is another; the digest of the stored bytes is right.",
            "The integer digest is what tracks have in common.",
        )
    for track, needs in (
        (STORED, ()),
        (ZSTD, ("zstd",)),
        (HEVC, ("hevc",)),
        ("exact/zstd", ("zstd",)),
    ):
        builder = small(suite, [track])
        builder.segments[track][4].record["integer_digest"] = b3(b"something else")
        fault(
            suite,
            f"integer-digest-{track.replace('/', '-')}",
            "INT-1 INT-2 VER-1",
            builder.build(),
            "segment.integers",
            f"The integer digest of a segment of `{track}` is that of something else.",
            "Verification recomputes it for every segment.",
            requires=needs,
        )
        builder = small(suite, [track])
        builder.segments[track][4].record["integer_sum"] ^= 1 << 63
        fault(
            suite,
            f"integer-sum-{track.replace('/', '-')}",
            "INT-3 INT-4 VER-1",
            builder.build(),
            "segment.integers",
            f"The highest bit of the integer sum of a segment of `{track}` is another.",
            "Verification recomputes the sum too; the digest is right.",
            requires=needs,
        )
