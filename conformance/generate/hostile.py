"""Level hostile: small files that ask for much, and the two sides of each limit that is cheap to show."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from conformance.generate.compose import (
    EXACT,
    EXACT_ZSTD,
    HEVC,
    LAYOUT_KEYS,
    QUALITY,
    STORED,
    ZSTD,
    RawGroup,
    compose,
    raw_frame,
    small,
    tiny,
    with_members,
    zstd_payload,
)
from conformance.generate.faults import fault
from conformance.generate.payload_faults import (
    ROWS,
    changed,
    exp_golomb,
    group_base,
    segment,
    units,
    with_stream,
)
from conformance.generate.suite import HOSTILE, Case, Operation, Suite, decode, inspect, verify
from conformance.generate.texts import bare
from tests.builder import resealed

LIMIT = "limit.exceeded"
WHY = "Sizes are checked before anything of that size is allocated, requested or counted up to."


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _manifest_limits(suite)
    _headers(suite)
    _texts(suite)
    _records(suite)
    _payloads(suite)


def refuse(
    suite: Suite,
    slug: str,
    requirements: str,
    data: bytes,
    code: str | tuple[str, ...],
    what: str,
    *,
    why: str = WHY,
    requires: tuple[str, ...] = (),
    limits: tuple[str, ...] = (),
    family: str = "lim",
    more: list[Operation] | None = None,
) -> None:
    """A hostile file that is refused."""
    fault(
        suite,
        slug,
        requirements,
        data,
        code,
        what,
        why,
        family=family,
        level="hostile",
        requires=requires,
        limits=limits,
        ceiling=HOSTILE,
        more=more or (),
    )


def _manifest_limits(suite: Suite) -> None:
    one = {
        "dtype": "float16",
        "head_dim": 1,
        "head_start": 0,
        "heads": 1,
        "heads_total": 1,
        "role": "key",
        "tokens": {"kind": "all"},
    }

    def groups(count: int) -> dict[str, Any]:
        made = [{**one, "layers": [index], "name": f"g-{index}"} for index in range(count)]
        return {"/groups": made, "/identity/layers_total": 100}

    video = small(suite, [HEVC])
    video.build()
    plain = small(suite)
    plain.build()
    quality, track = plain.manifest["qualities"][0], plain.manifest["tracks"][0]
    sizes = [{**LAYOUT_KEYS, "width": 144 + 16 * (n // 2), "frames": n + 1} for n in range(9)]
    semantics = "manifest.semantics"
    sizes_too = (semantics, "header.field")  # one step of ORD-1, so either (ORD-6)
    table: list[tuple[str, str, dict[str, Any], str | tuple[str, ...], dict[str, Any]]] = [
        # limit, base, members at the limit, the code that they give, members above it
        ("integer", "plain", {"/data_bytes": 2**53 - 1}, sizes_too, {"/data_bytes": 2**53}),
        ("groups", "plain", groups(64), semantics, groups(65)),
        (
            "layers_per_group",
            "plain",
            {"/groups/0/layers": list(range(4096)), "/identity/layers_total": 4096},
            semantics,
            {"/groups/0/layers": list(range(4097)), "/identity/layers_total": 4097},
        ),
        (
            "heads",
            "plain",
            {"/groups/0/heads_total": 65_536},
            "ok",
            {"/groups/0/heads_total": 65_537},
        ),
        ("head_dim", "plain", {"/groups/1/head_dim": 65_536}, "", {"/groups/1/head_dim": 65_537}),
        (
            "channels",
            "plain",
            {
                "/groups/0/heads": 16,
                "/groups/0/heads_total": 16,
                "/groups/0/head_dim": 65_536,
                "/segmentation/groups/0/heads": 16,
            },
            "",
            {"/groups/0/heads": 17, "/groups/0/heads_total": 17, "/groups/0/head_dim": 65_536},
        ),
        (
            "qualities",
            "plain",
            {"/qualities": [quality] * 16},
            sizes_too,
            {"/qualities": [quality] * 17},
        ),
        ("tracks", "plain", {"/tracks": [track] * 32}, sizes_too, {"/tracks": [track] * 33}),
        (
            "layouts_per_track",
            "video",
            {"/tracks/0/layouts": [{**LAYOUT_KEYS, "frames": n + 1} for n in range(64)]},
            "",
            {"/tracks/0/layouts": [{**LAYOUT_KEYS, "frames": n + 1} for n in range(65)]},
        ),
        (
            "picture_sizes_per_track",
            "video",
            {"/tracks/0/layouts": sizes[:8]},
            "",
            {"/tracks/0/layouts": sizes},
        ),
        (
            "picture_side",
            "video",
            {"/tracks/0/layouts/1/width": 8192, "/tracks/0/layouts/1/height": 8192},
            "",
            {"/tracks/0/layouts/1/width": 8208},
        ),
        (
            "frames_per_segment",
            "video",
            {},
            "",  # at the limit even the smallest pictures are too many bytes
            {"/tracks/0/layouts/1/frames": 65_537},
        ),
        (
            "sets_per_quality",
            "plain",
            {"/qualities/0/sets": 65_536},
            "header.field",
            {"/qualities/0/sets": 65_537},
        ),
        (
            "segments_per_track",
            "plain",
            {"/tracks/0/segments": 2**20},
            sizes_too,
            {"/tracks/0/segments": 2**20 + 1},
        ),
        (
            "tokens",
            "plain",
            {"/tokens/first_position": 2**40 - 10},
            "ok",
            {"/tokens/first_position": 2**40 - 9},
        ),
        (
            "tokens_per_segment",
            "plain",
            {"/segmentation/tokens": 65_536},
            semantics,
            {"/segmentation/tokens": 65_537},
        ),
        (
            "layers_per_segment",
            "plain",
            {"/segmentation/groups/0/layers": 3},
            "ok",
            {"/segmentation/groups/0/layers": 4},
        ),
        (
            "layers_total",
            "plain",
            {"/identity/layers_total": 65_536},
            "ok",
            {"/identity/layers_total": 65_537},
        ),
        (
            "string_bytes",
            "plain",
            {"/generator": "x" * 4096},
            "manifest.schema",
            {"/generator": "x" * 4097},
        ),
        (
            "json_depth",
            "plain",
            {"/generator": json.loads("[" * 15 + "]" * 15)},
            "manifest.schema",
            {"/generator": json.loads("[" * 16 + "]" * 16)},
        ),
        ("picture_side_minimum", "video", {"/tracks/0/layouts/0/height": 144}, "", {}),
    ]
    bases = {"plain": plain, "video": video}
    for limit, base, at, code, above in table:
        name = limit.replace("_", "-")
        if above:
            refuse(
                suite,
                f"above-{name}",
                "LIM-2 ERR-5",
                with_members(bases[base].copy(), above),
                LIMIT,
                f"One above the limit `{limit}`.",
                limits=(limit,),
                more=[inspect(LIMIT)],
            )
        if not at:
            continue
        data = with_members(bases[base].copy(), at)
        text = f"Exactly at the limit `{limit}`."
        why = "Limits are inclusive; what else is wrong with the file is another matter."
        if code in ("ok", ""):
            # an empty code: the manifest is right, what lies behind it no longer fits
            suite.add(
                Case(
                    "lim",
                    f"at-{name}",
                    "hostile",
                    ("LIM-2",),
                    data,
                    [verify() if code else inspect()],
                    text,
                    why,
                    "Made from a valid artifact; only the front is right."
                    if not code
                    else "A valid artifact.",
                    limits=(limit,),
                    ceiling=HOSTILE,
                )
            )
        else:
            refuse(
                suite,
                f"at-{name}",
                "LIM-2 ERR-5",
                data,
                code,
                text,
                why=why,
                limits=(limit,),
                more=[inspect(code)],
            )
    for slug, limit, changes in (
        ("tokens-alone", "tokens", {"/tokens/count": 2**40 + 1}),
        ("tokens-and-position", "tokens", {"/tokens/count": 2**40, "/tokens/first_position": 1}),
        ("heads-above-all-rules", "heads", {"/groups/0/heads": 65_537}),
        ("layers-total-2-52", "layers_total", {"/identity/layers_total": 2**52}),
        ("tokens-per-segment-2-52", "tokens_per_segment", {"/segmentation/tokens": 2**52}),
        ("heads-of-a-segment", "heads", {"/segmentation/groups/0/heads": 65_537}),
        ("valid-length-2-40", "tokens", {"/valid_lengths": [10, 2**40 + 1]}),
        ("layer-2-53", "integer", {"/groups/0/layers/3": 2**53}),
    ):
        refuse(
            suite,
            slug,
            "LIM-2 ERR-5",
            with_members(plain.copy(), changes),
            LIMIT,
            f"{', '.join(f'`{p}` is {v}' for p, v in changes.items())}.",
            limits=(limit,),
        )
    refuse(
        suite,
        "picture-side-above-and-odd",
        "LIM-2 LAY-4",
        with_members(video.copy(), {"/tracks/0/layouts/0/height": 8209}),
        LIMIT,
        "A height of 8,209: above the limit and no multiple of 16.",
        limits=("picture_side",),
    )
    refuse(
        suite,
        "picture-side-below",
        "LIM-2 LAY-4",
        with_members(video.copy(), {"/tracks/0/layouts/0/height": 128}),
        "manifest.schema",
        "A height of 128, below the minimum.",
        limits=("picture_side_minimum",),
    )
    product = {"/tracks/0/layouts/0/fold": [2**32, 1], "/tracks/0/layouts/0/tile": [2**32, 8]}
    refuse(
        suite,
        "layout-that-wraps",
        "CNV-3 LAY-3",
        with_members(video.copy(), product),
        "manifest.semantics",
        "A layout whose height is 2^64, 0 in 64 bits.",
        family="cnv",
    )

    # cells
    refuse(
        suite,
        "cells-2-40",
        "CNV-3 LIM-2 TAB-2",
        with_members(plain.copy(), {"/tokens/count": 2**40, "/segmentation/tokens": 1}),
        LIMIT,
        "2^40 tokens in segments of one token: a manifest of two kilobytes describes 2^42 cells.",
        limits=("segments_per_track",),
        family="cnv",
    )
    wide = {
        **one,
        "heads": 65_536,
        "heads_total": 65_536,
        "layers": list(range(256)),
        "name": "key",
    }
    builder = tiny()
    builder.build()
    refuse(
        suite,
        "cells-that-wrap",
        "CNV-3 LIM-2 TAB-2",
        with_members(
            builder,
            {
                "/groups": [wide],
                "/identity/layers_total": 256,
                "/tokens/count": 2**40,
                "/segmentation/tokens": 1,
                "/segmentation/groups": [{"heads": 1, "layers": 1}],
                "/tracks/0/segments": 0,
            },
        ),
        LIMIT,
        "256 layers x 65,536 heads x 2^40 tokens, a cell each: 2^64 cells, 0 in 64 bits, and `segments` is 0.",
        limits=("segments_per_track",),
        family="cnv",
    )


def _headers(suite: Suite) -> None:
    data = tiny().build()
    for slug, changes, code, limit in (
        (
            "manifest-of-16-mib-and-a-byte",
            {"manifest_bytes": 2**24 + 1, "file_bytes": 2**40},
            LIMIT,
            "manifest_bytes",
        ),
        (
            "manifest-of-16-mib",
            {"manifest_bytes": 2**24, "file_bytes": 2**40},
            "file.size",
            "manifest_bytes",
        ),
        (
            "manifest-of-2-53",
            {"manifest_bytes": 2**53 - 1, "file_bytes": 2**53 - 1},
            LIMIT,
            "manifest_bytes",
        ),
        (
            "tables-of-2-52",
            {"tables_bytes": 2**52, "file_bytes": 2**53 - 1},
            "file.size",
            "integer",
        ),
        ("tables-of-2-53", {"tables_bytes": 2**53, "file_bytes": 2**53 - 1}, LIMIT, "integer"),
        ("file-of-2-53", {"file_bytes": 2**53 - 1}, "file.size", "integer"),
    ):
        refuse(
            suite,
            slug,
            "ORD-4 LIM-2 SEC-3",
            resealed(data, **changes),
            code,
            f"A header that claims {', '.join(f'{k} = {v:,}' for k, v in changes.items())}.",
            limits=(limit,),
            family="ord",
            more=[inspect(code)],
        )


def _texts(suite: Suite) -> None:
    why = "Parsers that recurse end with a signal; those that copy take quadratic time."
    for slug, text, code, requirement in (
        ("arrays-30000-deep", b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}", LIMIT, "JSN-8"),
        ("arrays-20000-deep-open", b'{"a":' + b"[" * 20_000, (LIMIT, "manifest.json"), "JSN-8"),
        ("objects-4000-deep-open", b'{"a":' * 4_000, (LIMIT, "manifest.json"), "JSN-8"),
        ("number-of-20000-digits", b'{"a":' + b"9" * 20_000 + b"}", LIMIT, "CNV-2"),
        ("string-of-20000-bytes", b'{"a":"' + b"x" * 20_000 + b'"}', LIMIT, "JSN-9"),
        ("string-of-5000-escapes", b'{"a":"' + b"\\u0000" * 5_000 + b'"}', LIMIT, "JSN-9"),
        (
            "key-3000-times",
            b'{"a":[' + b",".join([b'{"b":0}'] * 3000) + b',{"b":0,"b":0}]}',
            "manifest.duplicate-key",
            "JSN-3",
        ),
    ):
        refuse(
            suite,
            slug,
            f"{requirement} SEC-3",
            bare(text),
            code,
            f"A manifest with {slug.replace('-', ' ')}.",
            why=why,
            family="sec",
        )
    many = {f"k{n:05}": n for n in range(1500)}
    for slug, value, what in (
        ("many-keys", many, "1,500 keys in one object"),
        ("many-values", [0] * 9_000, "9,000 numbers in one list"),
        ("many-lists", [[]] * 6_000, "6,000 empty lists"),
    ):
        data = tiny(extensions={"a": {"must_understand": False, "value": value}}).build()
        suite.add(
            Case(
                "sec",
                slug,
                "hostile",
                ("SEC-3", "EXT-3"),
                data,
                [verify(), decode(STORED)],
                f"{what} in an extension.",
                "A valid file; work must grow with its size only.",
                "Composed by hand.",
                ceiling=HOSTILE,
            )
        )


def _records(suite: Suite) -> None:
    for slug, field, value, code, limit in (
        ("stored-bytes-512-mib", "stored_bytes", 2**29, "table.record", "stored_bytes_per_segment"),
        (
            "stored-bytes-512-mib-and-a-byte",
            "stored_bytes",
            2**29 + 1,
            LIMIT,
            "stored_bytes_per_segment",
        ),
        ("stored-bytes-2-63", "stored_bytes", 2**63, LIMIT, "stored_bytes_per_segment"),
        ("stored-bytes-2-64", "stored_bytes", 2**64 - 1, LIMIT, "stored_bytes_per_segment"),
        ("side-bytes-256-mib", "side_bytes", 2**28, "table.record", "side_bytes"),
        ("side-bytes-256-mib-and-a-byte", "side_bytes", 2**28 + 1, LIMIT, "side_bytes"),
        ("side-bytes-2-32", "side_bytes", 2**32 - 1, LIMIT, "side_bytes"),
    ):

        def edit(b: Any, field: str = field, value: int = value) -> None:
            b.segments[STORED][0].record[field] = value

        refuse(
            suite,
            slug,
            "LIM-2 ORD-4 SEC-3 CNV-3",
            small(suite, [STORED]).build(edit_records=edit),
            code,
            f"A record with {field} {value:,}.",
            limits=(limit,),
            more=[decode(STORED, code=code)],
        )
    for slug, value in (
        ("set-of-2-40-bytes", 2**40),
        ("set-of-2-53-bytes", 2**53),
        ("set-of-2-64-bytes", 2**64 - 1),
    ):

        def edit_set(b: Any, value: int = value) -> None:
            b.sets[QUALITY][0].record["bytes"] = value

        refuse(
            suite,
            slug,
            "REC-9 CNV-2 SEC-3",
            small(suite, [STORED]).build(edit_records=edit_set),
            "table.record" if value == 2**40 else LIMIT,
            f"A set record of {value:,} bytes.",
            family="rec",
        )
    for tokens, dims, dtype, code in (
        (65_536, 4096, "uint8", "segment.payload"),
        (65_536, 4097, "uint8", LIMIT),
        (65_536, 2049, "float16", LIMIT),
        (65_535, 65_536, "float32", LIMIT),
    ):
        for track in (EXACT, EXACT_ZSTD):
            codec = track.split("/")[1]
            refuse(
                suite,
                f"segment-of-{tokens}-by-{dims}-{dtype}-{codec}",
                "LIM-2 SEC-3 ZST-7",
                wide(tokens, dims, dtype, track),
                code,
                f"A payload of three bytes for {tokens:,} x {dims:,} values of `{dtype}`.",
                limits=("decoded_bytes_per_segment",),
                requires=("zstd",) if codec == "zstd" else (),
            )
    for frames, side, code in (
        (1, 8192, "segment.bitstream"),
        (2, 8192, LIMIT),
        (65_536, 144, LIMIT),
    ):
        builder = small(suite, [HEVC])
        builder.manifest["tracks"][0]["layouts"][0].update(frames=frames, width=side, height=side)
        refuse(
            suite,
            f"pictures-{frames}-of-{side}",
            "LIM-2 LIM-3 SEC-3 HEV-6",
            builder.build(),
            code,
            f"A layout of {frames:,} pictures of {side:,} x {side:,}; the stream has one small one.",
            limits=("decoded_bytes_per_segment", "picture_side"),
            requires=("hevc",),
        )


def wide(tokens: int, dims: int, dtype: str, track: str) -> bytes:
    """One segment of ``tokens`` x ``dims`` whose payload is three bytes."""
    source = np.zeros((1, 1, 1, 1, {"uint8": 1, "float16": 2, "float32": 4}[dtype]), np.uint8)
    builder = compose([RawGroup("key", "key", dtype, (0,), source)], 1, [track], seg=65_536)
    item = builder.segments[track][0]
    item.record["token_count"] = tokens
    item.payload = b"few"
    builder.manifest["groups"][0]["head_dim"] = dims
    builder.manifest["tokens"]["count"] = tokens
    return builder.build()


def _payloads(suite: Suite) -> None:
    base = group_base()

    def add(slug: str, requirements: str, body: bytes, what: str) -> None:
        builder = base.copy()
        builder.segments[ZSTD][0].payload = zstd_payload([(ROWS, body, 0, 256)])
        refuse(
            suite,
            slug,
            requirements,
            builder.build(),
            "segment.payload",
            what,
            family="zst",
            requires=("zstd",),
            why="The output has the size that the record gives; what a frame says or does beyond it is an error.",
            more=[decode(ZSTD, code="segment.payload")],
        )

    size, eight = b"\x90", struct.pack("<Q", 144)
    rle = (2**17 << 3 | 2).to_bytes(3, "little") + b"\0"
    last = (2**17 << 3 | 3).to_bytes(3, "little") + b"\0"
    add(
        "content-size-1-gib",
        "ZST-4 ZST-7 SEC-3",
        raw_frame(bytes(144), 0xA0, struct.pack("<I", 2**30)),
        "A frame that claims 1 GiB.",
    )
    add(
        "content-size-2-63",
        "ZST-4 ZST-7 CNV-3",
        raw_frame(bytes(144), 0xE0, struct.pack("<Q", 2**63)),
        "A frame that claims 2^63 bytes.",
    )
    add(
        "content-size-2-64",
        "ZST-4 ZST-7 CNV-3",
        raw_frame(bytes(144), 0xE0, b"\xff" * 8),
        "A frame that claims 2^64 - 1 bytes, the mark of an unknown size.",
    )
    add(
        "window-of-128-mib",
        "ZST-3 SEC-3",
        raw_frame(bytes(144), 0xC0, b"\x88" + eight),
        "A frame with a window of 128 MiB.",
    )
    add(
        "window-of-3-tib",
        "ZST-3 SEC-3",
        raw_frame(bytes(144), 0xC0, b"\xff" + eight),
        "A frame with the largest window, 3.75 TiB.",
    )
    add(
        "one-rle-block-of-128-kib",
        "ZST-7 LIM-3",
        raw_frame(b"", 0x20, size, last),
        "A frame that says 144 bytes and makes 128 KiB.",
    )
    add(
        "rle-blocks-of-1-gib",
        "ZST-7 LIM-3 SEC-3",
        raw_frame(b"", 0xC0, b"\x68" + eight, rle * 8191 + last),
        "A frame of 32 KiB that says 144 bytes and makes 1 GiB.",
    )
    add(
        "empty-blocks",
        "ZST-3 SEC-3",
        raw_frame(b"", 0x20, size, b"\0\0\0" * 5_000 + b"\1\0\0"),
        "5,000 empty blocks and no content.",
    )
    entries = [(1, b"", 0, 256)] * 2000
    builder = base.copy()
    builder.segments[ZSTD][0].payload = zstd_payload(entries)
    refuse(
        suite,
        "two-thousand-frames",
        "ZST-1 SEC-3",
        builder.build(),
        "segment.payload",
        "2,000 empty frames for 24 rows.",
        family="zst",
        requires=("zstd",),
    )

    # a valid file that grows 2,000 times
    tokens, dims = 65_536, 256
    source = np.full((1, tokens, 1, dims, 1), 7, np.uint8)

    def blocks(rows: Any) -> bytes:
        body = raw_frame(
            b"",
            0xC0,
            b"\x68" + struct.pack("<Q", rows.size),
            ((2**17 << 3 | 2).to_bytes(3, "little") + b"\7") * (rows.size // 2**17 - 1)
            + (2**17 << 3 | 3).to_bytes(3, "little")
            + b"\7",
        )
        return zstd_payload([(len(rows), body, 0, 256)])

    data = compose(
        [RawGroup("key", "key", "uint8", (0,), source)],
        tokens,
        [EXACT_ZSTD],
        seg=65_536,
        frames=blocks,
    ).build()
    suite.add(
        Case(
            "zst",
            "sixteen-mib-in-two-kilobytes",
            "hostile",
            ("ZST-7", "SEC-3", "LIM-3"),
            data,
            [
                verify(),
                decode(EXACT_ZSTD, "--tokens", "0:1"),
                decode(EXACT_ZSTD, "--tokens", "65535:65536"),
            ],
            "A valid segment of 16 MiB from a payload of half a kilobyte.",
            "The size is within the limits, so it must be restored, within memory that grows with the segment.",
            "Composed by hand with RLE blocks.",
            ("zstd",),
            limits=("tokens_per_segment",),
            ceiling=HOSTILE,
        )
    )

    # hevc
    stream, _ = segment(suite)
    bomb = changed(changed(stream, 1, "width", exp_golomb(8192)), 1, "height", exp_golomb(8192))
    for slug, bad, what in (
        ("sps-of-8192-by-8192", bomb, "An SPS of 8,192 x 8,192 for a layout of 144 x 144"),
        (
            "sps-of-65536-by-144",
            changed(stream, 1, "width", exp_golomb(2**16)),
            "An SPS 65,536 samples wide",
        ),
        (
            "sps-of-2-31-by-144",
            changed(stream, 1, "width", exp_golomb(2**31)),
            "An SPS 2^31 samples wide",
        ),
        (
            "exp-golomb-of-40-zeros",
            changed(stream, 1, "width", "0" * 40 + "1"),
            "An Exp-Golomb number of 40 zeros",
        ),
        (
            "exp-golomb-without-end",
            b"\0\0\0\1" + units(stream)[0] + b"\0\0\0\1" + units(stream)[1][:15] + b"\1" * 3,
            "An SPS that ends early",
        ),
        ("many-units", b"\0\0\1\x50\x01" * 4_000, "4,000 empty SEI units"),
        ("many-start-codes", b"\0\0\1" * 6_000, "6,000 start codes"),
    ):
        refuse(
            suite,
            slug,
            "HEV-6 SEC-3 HEV-4" if "sps" in slug else "HEV-15 HEV-6 SEC-3",
            with_stream(suite, bad),
            "segment.bitstream",
            f"{what}.",
            family="hev",
            requires=("hevc",),
            why="The parameter sets are compared with the layout before a decoder allocates pictures.",
            more=[decode(HEVC, code="segment.bitstream")],
        )
    long = small(suite, [STORED])
    item = long.segments[STORED][0]
    item.side = item.side[:18] + struct.pack("<I", 2**32 - 1) + item.side[22:]
    refuse(
        suite,
        "patches-2-32",
        "SID-1 ORD-4 CNV-3 SEC-3",
        long.build(),
        "segment.side",
        "A count of 2^32 - 1 patches: 64 GiB of rows.",
        family="sid",
        more=[decode(STORED, code="segment.side")],
    )
    secret = tiny(
        extensions={
            "a": {
                "must_understand": False,
                "value": {"path": "/etc/passwd", "url": "http://127.0.0.1:9/x"},
            }
        },
        generator="$(touch /tmp/kvformat-pwned) `id` ../../etc/passwd",
    ).build()
    suite.add(
        Case(
            "sec",
            "paths-and-commands",
            "hostile",
            ("SEC-1", "SEC-2"),
            secret,
            [inspect(), verify(), decode(STORED)],
            "Paths, URLs and commands in texts of the manifest.",
            "They are text. A reader that follows one of them would show it by an error, a delay or a file.",
            "Composed by hand.",
            ceiling=HOSTILE,
        )
    )
