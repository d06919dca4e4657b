"""Level future: what a later text may write must be unsupported and never invalid."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

from typing import Any

from conformance.generate.compose import STORED, put, tiny
from conformance.generate.suite import Case, Operation, Suite, decode, inspect, verify
from tests.builder import HEADER, fixed_part, resealed, seal_header

WHY = "People must learn that their reader is old, not that their file is damaged."


def add_cases(suite: Suite) -> None:
    """All of this module."""
    data = tiny().build()
    version, feature, extension = "version.unknown", "feature.unknown", "extension.unknown"

    def add(
        slug: str,
        requirements: str,
        file: bytes,
        code: str,
        what: str,
        more: list[Operation] | None = None,
    ) -> None:
        ids = requirements.split()
        calls = [verify(code), inspect(code), decode(STORED, code=code), *(more or [])]
        suite.add(
            Case(
                ids[0][:3].lower(),
                slug,
                "future",
                tuple(ids),
                file,
                calls,
                what,
                WHY,
                "Made from a valid artifact; the header's check is right.",
            )
        )

    for slug, major, minor in (
        ("0-10", 0, 10),
        ("1-0", 1, 0),
        ("1-9", 1, 9),
        ("65535-65535", 65_535, 65_535),
        ("0-8", 0, 8),
        ("9-0", 9, 0),
    ):
        add(
            f"version-{slug}",
            "VRS-1 VRS-2 ORD-1",
            resealed(data, fixed=fixed_part(major=major, minor=minor)),
            version,
            f"Version {major}.{minor}, the rest as in 0.9.",
        )
    fields = HEADER.unpack(data[48:128])
    for size in (136, 256, 4096):
        head = seal_header(fixed_part(minor=10, size=size), fields, b"x" * (size - 128))
        add(
            f"header-of-{size}",
            "HDR-4 VRS-1 ORD-1",
            head + data[128:],
            version,
            f"Version 0.10 with a header of {size} bytes.",
        )
        same = seal_header(fixed_part(size=size), fields, b"x" * (size - 128))
        suite.add(
            Case(
                "hdr",
                f"header-of-{size}-in-0-9",
                "faulty",
                ("HDR-2", "HDR-4", "ORD-1"),
                same + data[128:],
                [verify("header.field"), inspect("header.field")],
                f"Version 0.9 with a header of {size} bytes and a right check.",
                "Version 0.9 has one size of header.",
                "Made from a valid artifact; the header's check is right.",
            )
        )
    head = seal_header(fixed_part(minor=10, size=256), fields, b"x" * 128)
    suite.add(
        Case(
            "hdr",
            "later-header-cut",
            "faulty",
            ("ORD-2", "HDR-4", "ORD-1"),
            head,
            [
                Operation("verify", (), "file.size", cuts=((48, 256),)),
                Operation("verify", (), "header.check", flips=((48, 256, 1),)),
            ],
            "Version 0.10 with a header of 256 bytes, cut to every length and with every byte behind the check changed.",
            "Length and check of the header come before the version.",
            "The header alone.",
        )
    )

    later = fixed_part(minor=10)
    damaged: dict[str, tuple[bytes, str]] = {
        "header-alone": (resealed(data, fixed=later)[:128], "Nothing but the header"),
        "cut": (resealed(data, fixed=later)[:200], "The file is cut"),
        "bytes-behind": (resealed(data, fixed=later) + b"more", "Bytes behind the end"),
        "reserved": (
            resealed(data, fixed=later, reserved=b"\1" * 24),
            "The reserved bytes have a meaning",
        ),
        "sizes": (
            resealed(
                data,
                fixed=later,
                file_bytes=2**64 - 1,
                manifest_bytes=2**64 - 1,
                tables_bytes=2**64 - 1,
            ),
            "All sizes are 2^64 - 1",
        ),
        "manifest-digest": (
            resealed(data, fixed=later, manifest_digest=bytes(32)),
            "Another manifest digest",
        ),
        "no-json": (
            resealed(data[:128] + b"\xff" * (len(data) - 128), fixed=later),
            "The manifest is no JSON",
        ),
    }
    for slug, (file, what) in damaged.items():
        add(
            f"version-0-10-{slug}",
            "VRS-1 ORD-1",
            file,
            version,
            f"Version 0.10. {what}: errors in 0.9, unknown in 0.10.",
        )
    add(
        "version-0-10-every-flip",
        "VRS-1 ORD-1",
        resealed(data, fixed=later),
        version,
        "Version 0.10 with every byte behind the header changed, one after the other.",
        [Operation("verify", (), version, flips=((128, len(data), 0x5A),))],
    )

    def with_members(**members: Any) -> bytes:
        def edit(manifest: dict[str, Any]) -> None:
            for pointer, value in members.items():
                put(manifest, pointer.replace("__", "/"), value)

        return tiny().build(edit_manifest=edit)

    new: dict[str, Any] = {"features": ["transform-other"]}
    for slug, requirements, members, what in (
        ("reserved-name", "FEA-2", {}, "A feature that the registry reserves"),
        ("any-name", "FEA-2", {"features": ["zzz-9"]}, "A feature in no registry"),
        ("two", "FEA-2", {"features": ["external-sets", "transform-other"]}, "Two features"),
        (
            "not-ascending",
            "FEA-2 ORD-1",
            {"features": ["zz", "aa"]},
            "Features that do not ascend, which is a later step",
        ),
        (
            "no-name",
            "FEA-2 ORD-1 ORD-5",
            {"features": ["NO NAME"]},
            "A feature whose name breaks the pattern, which is a later step",
        ),
        (
            "new-codec",
            "FEA-2 FEA-3",
            {"__tracks__0__codecs__0": "av1", "__tracks__0__name": "near-lossless/av1"},
            "A new codec with its feature",
        ),
        (
            "new-dtype",
            "FEA-2 FEA-3",
            {"__groups__0__dtype": "float4"},
            "A new dtype with its feature",
        ),
        (
            "new-extent",
            "FEA-2 FEA-3",
            {"__groups__0__tokens": {"kind": "blocks", "size": 16}},
            "A new kind of group with its feature",
        ),
        (
            "new-member",
            "FEA-2 JSN-11",
            {"transforms": [1, 2]},
            "A new member of the manifest with its feature",
        ),
        ("groups-are-5", "FEA-2 ORD-1", {"groups": 5}, "`groups` is a number"),
        (
            "above-a-limit",
            "FEA-2 ORD-1",
            {"__identity__layers_total": 100_000},
            "A value above a limit of 0.9",
        ),
        ("extensions-are-1", "FEA-2 ORD-1", {"extensions": 1}, "`extensions` is a number"),
        (
            "and-extension",
            "FEA-2 EXT-2 ORD-1",
            {"extensions": {"a": {"must_understand": True, "value": 1}}},
            "An extension that must be understood",
        ),
        (
            "and-version",
            "FEA-2 MAN-2 ORD-1",
            {"version": "0.10"},
            "`version` is another than the header's",
        ),
    ):
        add(
            f"feature-{slug}",
            requirements,
            with_members(**{**new, **members}),
            feature,
            f"{what}; the feature is unknown.",
        )
    must = {"must_understand": True, "value": 1}
    for slug, requirements, members, what in (
        (
            "alone",
            "EXT-2",
            {"extensions": {"com.example.must": must}},
            "An extension that must be understood",
        ),
        (
            "signature",
            "EXT-2",
            {"extensions": {"signature": must}},
            "The reserved extension `signature`, to be understood",
        ),
        (
            "among-others",
            "EXT-2",
            {"extensions": {"a": {"must_understand": False, "value": 1}, "b": must}},
            "One of two extensions must be understood",
        ),
        (
            "without-value",
            "EXT-2 ORD-1 ORD-5",
            {"extensions": {"a": {"must_understand": True}}},
            "It has no value, which is a later step",
        ),
        (
            "with-more",
            "EXT-2 ORD-1",
            {"extensions": {"a": {**must, "zz": 1}}},
            "It has a third member, which is a later step",
        ),
        (
            "groups-are-5",
            "EXT-2 ORD-1",
            {"extensions": {"a": must}, "groups": 5},
            "`groups` is a number",
        ),
        (
            "above-a-limit",
            "EXT-2 ORD-1",
            {"extensions": {"a": must}, "__tokens__count": 2**41},
            "A value above a limit of 0.9",
        ),
    ):
        add(
            f"extension-{slug}",
            requirements,
            with_members(**members),
            extension,
            f"{what}; the extension is unknown.",
        )

    def breaking(builder: Any) -> bytes:
        builder.manifest.update(new)
        return bytes(
            builder.build(edit_tables=lambda t: bytes(len(t)), edit_data=lambda d: bytes(len(d)))
        )

    add(
        "feature-with-other-tables",
        "FEA-2 ORD-1",
        breaking(tiny()),
        feature,
        "Tables and data are zero; the feature is unknown.",
    )
    add(
        "feature-with-other-sizes",
        "FEA-2 ORD-1 HDR-8",
        tiny(features=["transform-other"]).build(edit_header=lambda f: f.update(tables_bytes=64)),
        feature,
        "tables_bytes is not what 0.9 computes; the feature is unknown.",
    )
