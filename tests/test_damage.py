"""Damage anywhere is noticed, named, and never handed out as data."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import fsspec
import pytest

import kvformat
from kvformat import InvalidError, KvformatError
from kvformat.artifact import Artifact
from kvformat.front import read_front
from kvformat.storage import BytesSource
from tests.builder import Builder, fixed_part, resealed
from tests.damage import TRACKS, artifact, flipped, open_code, outcome, parts, verdict
from tests.reference import cut_up
from tests.requirements import covers

FILE = artifact()
CUT = cut_up(FILE)
FRONT = read_front(BytesSource(FILE))
MANIFEST_END = 128 + int.from_bytes(FILE[56:64], "little")
DATA_START = MANIFEST_END + int.from_bytes(FILE[64:72], "little")
GOOD = {track: outcome(FILE, track) for track in TRACKS}
HEADER_CODES = {"header.magic", "header.check", "header.field", "file.size"}


def table_of(place: int) -> tuple[str, str]:
    """Which table a byte of the file belongs to: kind and name."""
    start = MANIFEST_END
    for kind, size in (("qualities", 64), ("tracks", 128)):
        for part in CUT.manifest[kind]:
            start += size * part["sets" if kind == "qualities" else "segments"]
            if place < start:
                return kind, part["name"]
    raise AssertionError(place)


def object_of(place: int) -> tuple[str, str, int]:
    """Which object a byte of the data belongs to: kind, name, number."""
    for name, rows in CUT.sets.items():
        for number, row in enumerate(rows):
            if row["offset"] <= place < row["offset"] + row["bytes"]:
                return "set", name, number
    for name, rows in CUT.segments.items():
        for number, row in enumerate(rows):
            if row["offset"] <= place < row["offset"] + row["stored_bytes"]:
                return "segment", name, number
    raise AssertionError(place)


def readers(kind: str, name: str) -> tuple[list[str], list[str]]:
    """Tracks that need a table or object, and those that do not."""
    quality = name if kind in ("qualities", "set") else None
    needing = [t for t in TRACKS if t == name or t.split("/")[0] == quality]
    return needing, [t for t in TRACKS if t not in needing]


# --- one byte --------------------------------------------------------------------------------


def test_the_artifact_is_small_and_valid() -> None:
    assert len(FILE) < 20_000
    assert verdict(FILE) == "ok"
    assert not [track for track, found in GOOD.items() if isinstance(found, str)]
    assert set(CUT.manifest["tracks"][0]["codecs"]) == {"hevc"}


@covers("HDR-1", "HDR-3", "HDR-11", "CNV-5", "ORD-1")
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flip_in_the_header_is_refused(mask: int) -> None:
    for place in range(128):
        code = open_code(flipped(FILE, place, mask))
        assert code in HEADER_CODES, place
        if place < 8:
            assert code == "header.magic"
        elif not 12 <= place < 16:
            assert code == "header.check", place


@covers("HDR-5", "CNV-5", "ORD-1")
@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_every_flip_in_the_manifest_is_refused(mask: int) -> None:
    for place in range(128, MANIFEST_END):
        assert open_code(flipped(FILE, place, mask)) == "manifest.digest", place


def opened_before(bad: bytes) -> Artifact:
    """The damaged file with the front of the good one, to save the time of opening it."""
    return Artifact(BytesSource(bad), replace(FRONT, prefix=bad))


@covers("TAB-3", "CNV-5", "ORD-3")
def test_every_flip_in_a_table_is_refused() -> None:
    for place in range(MANIFEST_END, DATA_START):
        bad = flipped(FILE, place, 1 << place % 8)
        kind, name = table_of(place)
        needing, others = readers(kind, name)
        with pytest.raises(InvalidError, match=r"^\[table\.digest\]"):
            opened_before(bad).read(track=needing[0])
        if place % 97 == 0:
            assert verdict(bad) == "table.digest"
            for track in needing:
                assert outcome(bad, track) == "table.digest"
            for track in others:
                assert outcome(bad, track) == GOOD[track]


@covers("PAR-2", "ORD-3", "CNV-5")
@pytest.mark.parametrize("quarter", range(4))
def test_every_flip_in_the_data_is_refused(quarter: int) -> None:
    for place in range(quarter, len(FILE) - DATA_START, 4):
        bad = flipped(FILE, DATA_START + place, 1 << place % 8)
        kind, name, number = object_of(place)
        needing, others = readers(kind, name)
        expected = "set.digest" if kind == "set" else "segment.digest"
        row = (CUT.sets if kind == "set" else CUT.segments)[name][number]
        group = CUT.manifest["groups"][row["group"]]
        first = row.get("token_start", 0)
        with pytest.raises(InvalidError, match=rf"^\[{re.escape(expected)}\]"):
            opened_before(bad).read(
                track=needing[0],
                roles=group["role"],
                layers=[group["layers"][row["layer_index"]]],
                tokens=(first, first + 1),
            )
        if place % 211 == quarter:
            assert verdict(bad) == expected
            for track in needing:
                assert outcome(bad, track) == expected
            for track in others:
                assert outcome(bad, track) == GOOD[track]


@covers("PAR-2", "PAR-3")
@pytest.mark.parametrize("track", TRACKS)
def test_damage_to_one_segment_leaves_the_others_readable(track: str) -> None:
    row = CUT.segments[track][0]
    assert row["token_start"] == 0
    assert row["token_count"] == 6
    bad = flipped(FILE, DATA_START + row["offset"] + row["stored_bytes"] - 1)
    with kvformat.open(FILE) as good, kvformat.open(bad) as opened:
        for selection in ({"tokens": (6, 10)}, {"roles": ["value"]}, {"layers": [6]}):
            found = opened.read(track=track, **selection)
            wanted = good.read(track=track, **selection)
            assert {k: v.tobytes() for k, v in found.items()} == {
                k: v.tobytes() for k, v in wanted.items()
            }
        for selection in ({"tokens": (5, 7)}, {"layers": [3], "roles": ["key"]}, {}):
            with pytest.raises(InvalidError) as caught:
                opened.read(track=track, **selection)
            assert caught.value.code == "segment.digest"
            assert "segment 0" in caught.value.where


# --- length ----------------------------------------------------------------------------------


@covers("HDR-10", "ORD-2", "REQ-3")
def test_every_truncation_is_refused() -> None:
    for size in range(len(FILE)):
        expected = "header.magic" if size < 8 else "file.size"
        assert open_code(FILE[:size]) == expected, size


@covers("HDR-10", "ORD-2", "REQ-2")
def test_truncations_are_refused_where_the_size_is_not_known() -> None:
    files = fsspec.filesystem("memory")
    sizes = [0, 1, 7, 8, 47, 48, 127, 128, 500, MANIFEST_END, DATA_START, len(FILE) - 1]
    for size in sizes:
        files.pipe_file("/cut.kvf", FILE[:size])
        with pytest.raises(KvformatError) as caught:
            kvformat.open("memory://cut.kvf")
        assert caught.value.code == ("header.magic" if size < 8 else "file.size"), size
    files.pipe_file("/cut.kvf", FILE)
    with kvformat.open("memory://cut.kvf") as opened:
        assert opened.read(track=TRACKS[0], check=True)["keys"].tobytes() == GOOD[TRACKS[0]]["keys"]


@covers("HDR-10")
@pytest.mark.parametrize("tail", [b"\0", b"\n", bytes(4096), FILE])
def test_bytes_behind_the_end_are_refused(tail: bytes) -> None:
    assert open_code(FILE + tail) == "file.size"
    assert verdict(FILE + tail) == "file.size"


@covers("HDR-1")
def test_a_transfer_in_text_mode_is_noticed() -> None:
    assert open_code(FILE.replace(b"\r\n", b"\n")) == "header.magic"
    assert open_code(FILE.replace(b"\n", b"\r\n")) == "header.magic"
    assert open_code(bytes(byte & 0x7F for byte in FILE)) == "header.magic"


# --- header fields behind a right check ------------------------------------------------------


@covers("HDR-1", "HDR-2", "HDR-4", "HDR-11", "ORD-1", "VRS-1", "VRS-2")
@pytest.mark.parametrize(
    ("fixed", "code"),
    [
        (fixed_part(major=1), "version.unknown"),
        (fixed_part(minor=10), "version.unknown"),
        (fixed_part(minor=8), "version.unknown"),
        (fixed_part(major=65_535, minor=65_535), "version.unknown"),
        (fixed_part(magic=b"\x89KVF\r\n\x1a\r"), "header.magic"),
        (fixed_part(size=127), "header.field"),
        (fixed_part(size=0), "header.field"),
        (fixed_part(size=4097), "header.field"),
        (fixed_part(size=2**32 - 1, major=7), "header.field"),
    ],
)
def test_first_sixteen_bytes(fixed: bytes, code: str) -> None:
    bad = resealed(FILE, fixed=fixed)
    assert open_code(bad) == code
    garbage = resealed(b"\xff" * len(FILE), fixed=fixed, file_bytes=2**60, tables_bytes=2**64 - 1)
    assert open_code(garbage) == code
    with pytest.raises(KvformatError) as caught:
        kvformat.open(bad)
    assert caught.value.verdict == ("unsupported" if code == "version.unknown" else "invalid")


@covers("HDR-4", "VRS-1", "ORD-1")
@pytest.mark.parametrize("size", [136, 4096])
def test_a_longer_header_of_a_later_version_is_unsupported(size: int) -> None:
    from tests.builder import HEADER, seal_header

    fields = HEADER.unpack(FILE[48:128])
    for minor, code in ((10, "version.unknown"), (9, "header.field")):
        head = seal_header(fixed_part(minor=minor, size=size), fields, b"x" * (size - 128))
        assert open_code(head + FILE[128:]) == code
        assert open_code(head[: size - 1]) == "file.size"
        assert open_code(flipped(head + FILE[128:], size - 1)) == "header.check"


SIZE = len(FILE)


@covers("HDR-5", "HDR-6", "HDR-7", "HDR-8", "HDR-10", "HDR-12", "CNV-2", "CNV-3", "ORD-1", "ORD-4")
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"reserved": b"\1" + bytes(23)}, "header.field"),
        ({"reserved": bytes(23) + b"\x80"}, "header.field"),
        ({"file_bytes": SIZE - 1}, "file.size"),
        ({"file_bytes": SIZE + 1}, "file.size"),
        ({"file_bytes": 0}, "header.field"),
        ({"file_bytes": 2**53}, "limit.exceeded"),
        ({"file_bytes": 2**64 - 1}, "limit.exceeded"),
        ({"file_bytes": 2**53 - 1}, "file.size"),
        ({"manifest_bytes": 2**64 - 1}, "limit.exceeded"),
        ({"manifest_bytes": 2**24 + 1, "file_bytes": 2**40}, "limit.exceeded"),
        ({"manifest_bytes": 2**24, "file_bytes": 2**40}, "file.size"),
        ({"tables_bytes": 2**53}, "limit.exceeded"),
        ({"tables_bytes": 2**64 - 128, "manifest_bytes": 128}, "limit.exceeded"),
        ({"tables_bytes": 2**53 - 1}, "header.field"),
        ({"tables_bytes": 0}, "header.field"),
        ({"tables_bytes": DATA_START - MANIFEST_END - 64}, "header.field"),
        ({"tables_bytes": DATA_START - MANIFEST_END + 64}, "header.field"),
        ({"manifest_bytes": 0}, "manifest.digest"),
        ({"manifest_bytes": MANIFEST_END - 127}, "manifest.digest"),
        ({"manifest_digest": bytes(32)}, "manifest.digest"),
    ],
    ids=str,
)  # fmt: skip
def test_header_fields(changes: dict[str, Any], code: str) -> None:
    assert open_code(resealed(FILE, **changes)) == code


# --- the order of refusal --------------------------------------------------------------------


def features(builder: Builder, **more: Any) -> bytes:
    return builder.build(edit_manifest=lambda manifest: manifest.update(more))


@covers("ORD-1", "ORD-5", "FEA-2", "EXT-1", "EXT-2", "EXT-3", "MAN-3", "JSN-10")
@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"features": ["transform-other"]}, "feature.unknown"),
        ({"features": ["transform-other"], "groups": 5}, "feature.unknown"),
        ({"features": ["zz", "aa"], "extensions": 1}, "feature.unknown"),
        ({"features": ["NO NAME"]}, "feature.unknown"),
        ({"features": "transform-other"}, "manifest.schema"),
        ({"features": [1]}, "manifest.schema"),
        ({"features": None, "extensions": {"a": {"must_understand": True}}}, "manifest.schema"),
        ({"extensions": {"a": {"must_understand": True, "value": 1}}}, "extension.unknown"),
        ({"extensions": {"a": {"must_understand": True}}, "groups": 5}, "extension.unknown"),
        ({"extensions": {"a": {"must_understand": 1, "value": 1}}}, "manifest.schema"),
        ({"extensions": {"a": {"must_understand": False}}}, "manifest.schema"),
        ({"extensions": {"a": {"must_understand": False, "value": 1, "x": 1}}}, "manifest.schema"),
        ({"extensions": {"a": 1}}, "manifest.schema"),
        ({"extensions": []}, "manifest.schema"),
        ({"extensions": {"a" * 65: {"must_understand": False, "value": 1}}}, "manifest.json"),
        ({"extensions": {"a" * 64: {"must_understand": False, "value": [None, {"x": "é"}]}}}, "ok"),
        ({"version": "0.10", "groups": 5}, "manifest.schema"),
    ],
    ids=str,
)  # fmt: skip
def test_features_and_extensions_come_before_the_schema(members: dict[str, Any], code: str) -> None:
    file = features(parts(), **members)
    assert open_code(file) == code
    if code == "ok":
        assert outcome(file, TRACKS[1]) == GOOD[TRACKS[1]]
        assert verdict(file) == "ok"


@covers("ORD-1", "ORD-3", "HDR-7", "HDR-8")
def test_the_first_failure_is_the_one_reported() -> None:
    def break_json(text: bytes) -> bytes:
        return text.replace(b'"generator"', b'"generator" ')

    broken = parts()
    broken.manifest["features"] = ["unknown"]
    assert open_code(broken.build(edit_json=break_json)) == "manifest.canonical"
    assert (
        open_code(broken.build(edit_header=lambda f: f.update(tables_bytes=64)))
        == "feature.unknown"
    )
    broken = parts()
    broken.manifest["generator"] = ""
    broken.manifest["tokens"]["first_position"] = 2**40  # a limit, but behind the schema
    assert open_code(broken.build()) in ("manifest.schema", "limit.exceeded")
    broken = parts()
    file = broken.build(edit_header=lambda fields: fields.update(tables_bytes=64, file_bytes=SIZE))
    assert open_code(file[:SIZE]) == "header.field"


@covers("HDR-9", "DAT-5", "VER-1")
def test_builder_and_padding() -> None:
    assert parts().build() == FILE
    padded = parts(alignment=4096)
    assert padded.build() == artifact(alignment=4096)
    assert verdict(padded.build()) == "ok"
    assert open_code(padded.build(padding=b"\1")) == "data.padding"
    assert verdict(padded.build(filler=b"\1")) == "data.padding"
    whole = artifact(alignment=4096)
    cut = cut_up(whole)
    first, last = cut.sets["near-lossless"][0], cut.segments["exact/stored"][-2]
    start = len(whole) - len(cut.data)
    for place in (
        first["offset"] + first["bytes"],
        last["offset"] + last["stored_bytes"],
        4095 - 128,
    ):
        assert verdict(flipped(whole, start + place)) == "data.padding"
