"""Level faulty: header, length, order of refusal, and every byte of a small artifact flipped."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from conformance.generate.answers import ask
from conformance.generate.compose import EXACT_ZSTD, STORED, tiny
from conformance.generate.faults import fault
from conformance.generate.suite import Case, Operation, Shared, Suite, decode, groups_of, inspect
from tests.builder import fixed_part, resealed

LAST = "Exactly one byte of the file changes in each run."


def flipped(data: bytes, place: int, mask: int) -> bytes:
    """One byte changed."""
    return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


def flips(
    call: str, data: bytes, start: int, stop: int, mask: int, allowed: set[str], *arguments: str
) -> list[Operation]:
    """Operations over an interval, one for each run of places with one code."""
    found = []
    for place in range(start, stop):
        code = ask(call, arguments, flipped(data, place, mask), {}).code
        if code not in allowed:
            raise ValueError(f"a flip at {place} gives {code}")
        found.append((place, code))
    merged: dict[str, list[tuple[int, ...]]] = {}
    for code, first, last in groups_of(found):
        merged.setdefault(code, []).append((first, last, mask))
    return [Operation(call, arguments, code, flips=tuple(items)) for code, items in merged.items()]


def cuts(call: str, data: bytes, *arguments: str) -> list[Operation]:
    """Operations over all lengths."""
    return [
        Operation(call, arguments, "header.magic", cuts=((0, 8),)),
        Operation(call, arguments, "file.size", cuts=((8, len(data)),)),
    ]


def add_cases(suite: Suite) -> None:
    """All of this module."""
    data = tiny().build()
    shared = Shared("tiny.kvf", data)
    front = 128 + int.from_bytes(data[56:64], "little")
    tables = front + int.from_bytes(data[64:72], "little")

    def whole(
        family: str,
        slug: str,
        requirements: str,
        operations: list[Operation],
        what: str,
        why: str,
        source: Shared = shared,
        requires: tuple[str, ...] = (),
    ) -> None:
        suite.add(
            Case(
                family,
                slug,
                "faulty",
                tuple(requirements.split()),
                source,
                operations,
                what,
                why,
                f"The input is the valid file `{source.name}`. {LAST}",
                requires,
            )
        )

    header = {"header.magic", "header.check", "header.field", "file.size"}
    for mask in (0x01, 0x80, 0xFF):
        whole(
            "hdr",
            f"every-flip-of-the-header-{mask:02x}",
            "HDR-1 HDR-3 HDR-11 ORD-1 CNV-5 ORD-2",
            flips("verify", data, 0, 128, mask, header),
            f"Each byte of the header, one after the other, xor {mask:#04x}.",
            "The check covers every byte but its own 32, and those it is compared with.",
        )
    whole(
        "hdr",
        "every-flip-of-the-manifest",
        "HDR-5 CNV-5 ORD-1",
        flips("verify", data, 128, front, 0x01, {"manifest.digest"}),
        "Each byte of the manifest, one after the other, xor 0x01.",
        "The digest is compared before a parser sees the text.",
    )
    whole(
        "tab",
        "every-flip-of-the-tables",
        "TAB-3 CNV-5 ORD-3",
        flips("verify", data, front, tables, 0x80, {"table.digest"}),
        "Each byte of the set table and the segment table, one after the other, xor 0x80.",
        "The digest is compared before a record is used.",
    )
    both = {"set.digest", "segment.digest"}
    whole(
        "ord",
        "every-flip-of-the-data",
        "ORD-3 CNV-5 PAR-2",
        flips("verify", data, tables, len(data), 0x01, both)
        + flips("decode", data, tables, len(data), 0x10, both, "--track", STORED),
        "Each byte of the set and the segment, one after the other, for verify and for decode.",
        "No value of a damaged object may be returned, and no file may be left behind.",
    )
    whole(
        "ord",
        "every-cut",
        "ORD-2 HDR-10 ORD-1",
        cuts("verify", data) + cuts("decode", data, "--track", STORED),
        "The file cut to every shorter length.",
        "A truncated copy is the most frequent damage of all.",
    )
    whole(
        "ord",
        "every-cut-inspect",
        "ORD-2 HDR-10",
        cuts("inspect", data),
        "The file cut to every shorter length, for inspect.",
        "Also a reader that needs the front only knows the size of a local file.",
    )
    zipped = tiny([EXACT_ZSTD]).build()
    end = 128 + sum(struct.unpack("<QQ", zipped[56:72]))
    whole(
        "ord",
        "every-flip-of-zstd-data",
        "ORD-3 CNV-5 PAR-2 ZST-3",
        flips("verify", zipped, end, len(zipped), 0x20, {"segment.digest"}),
        "Each byte of a zstd payload, one after the other.",
        "The digest comes before the decoder.",
        Shared("tiny-zstd.kvf", zipped),
        ("zstd",),
    )
    page = tiny(alignment=4096).build()
    places = [tables_of(page), 4095, 4096 + 500, 8191]
    suite.add(
        Case(
            "dat",
            "padding-flipped",
            "faulty",
            ("DAT-5", "HDR-9", "VER-1"),
            page,
            [Operation("verify", (), "data.padding", flips=tuple((p, 1) for p in places))],
            "Single bytes of the padding are not zero: behind the tables, and between objects.",
            "Bytes that no record names could hide other content.",
            "An artifact of alignment 4,096; each run changes one byte of padding.",
        )
    )
    _headers(suite)
    _order(suite)


def tables_of(data: bytes) -> int:
    """Where the tables end."""
    return 128 + sum(struct.unpack("<QQ", data[56:72]))


def _headers(suite: Suite) -> None:
    data = tiny().build()
    size, manifest = len(data), int.from_bytes(data[56:64], "little")
    tables = int.from_bytes(data[64:72], "little")
    how = "Made from a valid artifact; the header's check is right again."

    def head(
        slug: str, requirements: str, code: str, what: str, *, tail: bytes = b"", **changes: Any
    ) -> None:
        fault(
            suite,
            slug,
            requirements,
            resealed(data, **changes) + tail,
            code,
            what,
            "A right check proves nothing about the fields: they are compared with each other and the file.",
            how=how,
            family="hdr",
            more=[inspect(code), decode(STORED, code=code)],
        )

    head(
        "reserved-first",
        "HDR-6",
        "header.field",
        "The first reserved byte of the header is 1.",
        reserved=b"\1" + bytes(23),
    )
    head(
        "reserved-last",
        "HDR-6",
        "header.field",
        "The last reserved byte of the header is 0x80.",
        reserved=bytes(23) + b"\x80",
    )
    head(
        "file-bytes-one-less",
        "HDR-10 HDR-7",
        "file.size",
        "file_bytes is one less than the file has.",
        file_bytes=size - 1,
    )
    head(
        "file-bytes-one-more",
        "HDR-10 HDR-7",
        "file.size",
        "file_bytes is one more than the file has.",
        file_bytes=size + 1,
    )
    head(
        "file-bytes-and-file-one-more",
        "HDR-7",
        "header.field",
        "file_bytes and the file are one byte longer than the manifest says.",
        file_bytes=size + 1,
        tail=b"\0",
    )
    head("file-bytes-0", "HDR-12", "header.field", "file_bytes is 0.", file_bytes=0)
    head(
        "file-bytes-below-the-front",
        "HDR-12",
        "header.field",
        "file_bytes ends inside the tables.",
        file_bytes=128 + manifest + 1,
    )
    head(
        "file-bytes-2-53", "CNV-2 CNV-3", "limit.exceeded", "file_bytes is 2^53.", file_bytes=2**53
    )
    head(
        "file-bytes-2-64",
        "CNV-2 CNV-3",
        "limit.exceeded",
        "file_bytes is 2^64 - 1.",
        file_bytes=2**64 - 1,
    )
    head(
        "file-bytes-2-53-less-1",
        "HDR-10",
        "file.size",
        "file_bytes is 2^53 - 1.",
        file_bytes=2**53 - 1,
    )
    head("manifest-bytes-0", "HDR-5", "manifest.digest", "manifest_bytes is 0.", manifest_bytes=0)
    head(
        "manifest-bytes-one-more",
        "HDR-5 ORD-1",
        "manifest.digest",
        "manifest_bytes reaches into the tables.",
        manifest_bytes=manifest + 1,
    )
    head(
        "manifest-bytes-2-64",
        "CNV-2 CNV-3",
        "limit.exceeded",
        "manifest_bytes is 2^64 - 1.",
        manifest_bytes=2**64 - 1,
    )
    head(
        "sizes-that-wrap",
        "CNV-3 CNV-2",
        "limit.exceeded",
        "manifest_bytes and tables_bytes add up to 128 modulo 2^64.",
        tables_bytes=2**64 - 128,
        manifest_bytes=128,
    )
    head("tables-bytes-0", "HDR-8", "header.field", "tables_bytes is 0.", tables_bytes=0)
    head(
        "tables-bytes-one-record-less",
        "HDR-8",
        "header.field",
        "tables_bytes is 64 too small.",
        tables_bytes=tables - 64,
    )
    head(
        "tables-bytes-one-record-more",
        "HDR-8",
        "header.field",
        "tables_bytes is 64 too large.",
        tables_bytes=tables + 64,
    )
    head(
        "tables-bytes-2-53-less-1",
        "HDR-12 CNV-3",
        "header.field",
        "tables_bytes is 2^53 - 1: above file_bytes.",
        tables_bytes=2**53 - 1,
    )
    head(
        "manifest-digest-zero",
        "HDR-5 CNV-5",
        "manifest.digest",
        "manifest_digest is all zeros.",
        manifest_digest=bytes(32),
    )
    for slug, fixed, what in (
        ("size-127", fixed_part(size=127), "header_bytes is 127"),
        ("size-0", fixed_part(size=0), "header_bytes is 0"),
        ("size-4097", fixed_part(size=4097), "header_bytes is 4,097"),
        (
            "size-2-32",
            fixed_part(size=2**32 - 1, major=7),
            "header_bytes is 2^32 - 1, the version 7.9",
        ),
    ):
        head(f"header-{slug}", "HDR-11 ORD-1 HDR-4", "header.field", f"{what}.", fixed=fixed)
    changes: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
        "text-mode-lf": (
            lambda d: d.replace(b"\r\n", b"\n"),
            "header.magic",
            "Carriage returns were removed on the way",
        ),
        "text-mode-crlf": (
            lambda d: d.replace(b"\n", b"\r\n"),
            "header.magic",
            "Line feeds became two characters on the way",
        ),
        "seven-bits": (
            lambda d: bytes(b & 0x7F for b in d),
            "header.magic",
            "The eighth bit was lost on the way",
        ),
        "other-magic": (lambda d: b"\x89PNG" + d[4:], "header.magic", "The file starts like a PNG"),
        "gzip": (lambda d: b"\x1f\x8b\x08\0" + d, "header.magic", "A gzip header stands in front"),
        "byte-in-front": (lambda d: b"\0" + d, "header.magic", "A byte stands in front"),
        "zeros": (
            lambda d: bytes(len(d)),
            "header.magic",
            "All bytes are zero, as after a failed write",
        ),
        "byte-behind": (lambda d: d + b"\0", "file.size", "A zero byte stands behind the end"),
        "line-feed-behind": (lambda d: d + b"\n", "file.size", "A line feed stands behind the end"),
        "page-behind": (
            lambda d: d + bytes(4096),
            "file.size",
            "A page of zeros stands behind the end",
        ),
        "twice": (lambda d: d + d, "file.size", "The file stands there twice"),
    }
    for slug, (edit, code, what) in changes.items():
        fault(
            suite,
            slug,
            "HDR-1 ORD-1" if code == "header.magic" else "HDR-10 ORD-1",
            edit(data),
            code,
            f"{what}.",
            "Transfers and tools do this to files.",
            how="Made from a valid artifact.",
            family="hdr",
            more=[decode(STORED, code=code)],
        )
    fault(
        suite,
        "empty",
        "ORD-2",
        b"",
        "header.magic",
        "An empty file.",
        "Fewer than 8 bytes are `header.magic`.",
        how="It has no bytes.",
    )
    fault(
        suite,
        "magic-alone",
        "ORD-2",
        data[:8],
        "file.size",
        "The magic and nothing else.",
        "It ends inside the header.",
        how="The first 8 bytes of an artifact.",
    )
    long = resealed(data, fixed=fixed_part(size=136))
    fault(
        suite,
        "header-136-wrong-check",
        "HDR-3 HDR-4 ORD-1",
        long,
        "header.check",
        "header_bytes is 136; the check covers 128 bytes only.",
        "The check reaches to header_bytes.",
        how=how,
    )
    file = tiny(alignment=4096).build(padding=b"\1")
    fault(
        suite,
        "padding-behind-the-tables",
        "HDR-9 DAT-5",
        file,
        "data.padding",
        "The bytes between tables and data are 1.",
        "They must be zero. They lie in the first 262,144 bytes, so a reader checks them when it opens the file.",
        family="hdr",
        more=[inspect("data.padding"), decode(STORED, code="data.padding")],
    )


def _order(suite: Suite) -> None:
    """Two failures at once: the first step of ORD-1 names the code."""
    why = "A file of a later version must be unsupported, never damaged: the order of checks is part of the format."

    def add(slug: str, code: str, data: bytes, what: str) -> None:
        fault(
            suite,
            slug,
            "ORD-1 ORD-5" if "ORD" in what else "ORD-1",
            data,
            code,
            what,
            why,
            family="ord",
            how="Made from a valid artifact with two things broken and every digest in front of them right.",
        )

    def spaced(text: bytes) -> bytes:
        return text.replace(b'"generator"', b'"generator" ')

    data = tiny().build()
    add(
        "magic-before-check",
        "header.magic",
        b"\x88" + flipped(data, 60, 1)[1:],
        "Magic and check are wrong.",
    )
    add(
        "check-before-fields",
        "header.check",
        flipped(resealed(data, reserved=b"\1" * 24), 20, 1),
        "Check and reserved bytes are wrong.",
    )
    add(
        "fields-before-size",
        "header.field",
        resealed(data, reserved=b"\1" * 24)[:-1],
        "The reserved bytes are wrong, and the file is cut.",
    )
    add(
        "size-before-digest",
        "file.size",
        flipped(data, 200, 1)[:-1],
        "The manifest is damaged, and the file is cut.",
    )
    add(
        "digest-before-json",
        "manifest.digest",
        tiny().build(
            edit_json=lambda t: t[:-1], edit_header=lambda f: f.update(manifest_digest=bytes(32))
        ),
        "The digest is wrong, and the text is no JSON.",
    )
    add(
        "json-before-canonical",
        "manifest.json",
        tiny().build(edit_json=lambda t: spaced(t).replace(b'"count":3', b'"count":3.0')),
        "A fraction behind white space.",
    )
    add(
        "duplicate-before-canonical",
        "manifest.duplicate-key",
        tiny().build(edit_json=lambda t: spaced(t).replace(b'"count":3', b'"count":3,"count":3')),
        "A key twice behind white space.",
    )

    def manifest(**members: Any) -> Callable[[dict[str, Any]], None]:
        return lambda m: m.update(members)

    unknown = {"features": ["transform-other"]}
    add(
        "canonical-before-features",
        "manifest.canonical",
        tiny().build(edit_manifest=manifest(**unknown), edit_json=spaced),
        "An unknown feature, and white space.",
    )
    add(
        "features-that-are-no-list",
        "manifest.schema",
        tiny().build(edit_manifest=manifest(features="transform-other")),
        "`features` is a string (ORD-5).",
    )
    add(
        "features-of-numbers",
        "manifest.schema",
        tiny().build(edit_manifest=manifest(features=[1])),
        "`features` is a list of numbers (ORD-5).",
    )
    add(
        "features-missing",
        "manifest.schema",
        tiny().build(edit_manifest=lambda m: m.pop("features")),
        "`features` is missing (ORD-5).",
    )
    must = {"a": {"must_understand": True, "value": 1}}
    add(
        "features-before-extensions",
        "manifest.schema",
        tiny().build(edit_manifest=manifest(features=None, extensions=must)),
        "`features` is null, and an extension must be understood (ORD-5).",
    )
    add(
        "extensions-that-are-a-list",
        "manifest.schema",
        tiny().build(edit_manifest=manifest(extensions=[])),
        "`extensions` is a list (ORD-5).",
    )
    add(
        "extension-that-is-a-number",
        "manifest.schema",
        tiny().build(edit_manifest=manifest(extensions={"a": 1})),
        "An extension is a number (ORD-5).",
    )
    add(
        "must-understand-1",
        "manifest.schema",
        tiny().build(edit_manifest=manifest(extensions={"a": {"must_understand": 1, "value": 1}})),
        "`must_understand` is 1, not true (ORD-5).",
    )
    add(
        "schema-before-semantics",
        "manifest.schema",
        tiny().build(edit_manifest=lambda m: m.update(format="kvformat2", valid_lengths=[1])),
        "Another format name, and valid lengths without a window.",
    )
    add(
        "schema-before-tables",
        "manifest.schema",
        tiny().build(
            edit_manifest=lambda m: m.update(generator=""), edit_tables=lambda t: flipped(t, 0, 1)
        ),
        "An empty generator, and a damaged table.",
    )
    broken = tiny()

    def digest_and_record(builder: Any) -> None:
        builder.segments[STORED][0].record["group"] = 1

    add(
        "table-digest-before-record",
        "table.digest",
        broken.build(
            edit_records=digest_and_record,
            edit_tables=lambda t: t,
            edit_manifest=lambda m: m["tracks"][0].update(table_digest="0" * 64),
        ),
        "The table's digest is wrong, and a record too.",
    )
    side = tiny()
    side.segments[STORED][0].side = b"\xff"
    add(
        "segment-digest-before-side",
        "segment.digest",
        side.build(edit_records=lambda b: b.segments[STORED][0].record.update(digest=bytes(32))),
        "The segment's digest is zero, and its side block is one byte long.",
    )
