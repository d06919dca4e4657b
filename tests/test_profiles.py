"""Calibration profiles (spec 9.6): what ``build`` makes, what a reader refuses, where it looks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.generate.transform_parts import transform, transforms
from kvformat import KvformatError, profiles
from kvformat.identity import Model
from kvformat.profiles import parse_profile
from tests.requirements import covers
from tests.transformed import (
    Transform,
    assembled,
    canonical,
    cut_profile,
    profile_digest,
    profile_file,
    profile_with,
    read_transforms,
)

GOOD = profile_file(transforms(), writer=b"for writers")


def code_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except KvformatError as error:
        return error.code
    return "ok"


def parsed(file: bytes) -> str:
    """What parsing answers."""
    return code_of(lambda: parse_profile(file))


def used(file: bytes) -> str:
    """What parsing and then using every transform answers."""

    def act() -> None:
        profile = parse_profile(file)
        for record in profile.records:
            profile.matrices(record, "here")

    return code_of(act)


# --- round trip ------------------------------------------------------------------------------


def as_package(item: Transform) -> profiles.Transform:
    record = profiles.TransformRecord(
        item.quality, item.role, item.layer, item.heads, item.heads, 0, item.head_dim,
        item.pairing, item.turns.shape[1], item.dtype,
    )  # fmt: skip
    return profiles.Transform(
        record, item.mean, item.row_scale, item.matrix, item.turns[0], item.turns[1]
    )


@covers("PRF-1")
def test_build_makes_the_same_bytes_as_by_hand() -> None:
    """In ascending order, whatever the order that it is given them in."""
    made = [as_package(item) for item in transforms()]
    file = profiles.build(Model("a model"), made[::-1], writer=b"for writers", generator="by hand")
    assert file == GOOD
    assert parse_profile(file).writer == b"for writers"
    assert parse_profile(file).digest == profile_digest(file)


@covers("PRF-1", "PRF-3", "CNV-1")
def test_numbers_come_back() -> None:
    profile = parse_profile(GOOD)
    expected = read_transforms(GOOD)
    assert [record.key for record in profile.records] == sorted(expected)
    for record in profile.records:
        found, wanted = profile.matrices(record, "here"), expected[record.key]
        assert found.mean.tobytes() == wanted.mean.tobytes()
        assert found.row_scale.tobytes() == wanted.row_scale.tobytes()
        assert (wanted.matrix == found.slots.T).all()
        assert found.slots.dtype == np.float32
        if found.rotation is None:
            assert not wanted.turns.size
        else:
            assert found.rotation.pairing == wanted.pairing
            assert np.array_equal([found.rotation.cosine, found.rotation.sine], wanted.turns)


def test_a_profile_may_be_empty() -> None:
    profile = parse_profile(profile_file([]))
    assert profile.records == ()
    assert profile.writer == b""


# --- the bytes of a file ---------------------------------------------------------------------


@covers("PRF-1", "PRF-3", "HDR-3", "HDR-5")
def test_no_flipped_byte_passes() -> None:
    """Parsing sees header, manifest and the writer's part; using it sees the transforms."""
    for place in range(len(GOOD)):
        changed = bytearray(GOOD)
        changed[place] ^= 0x41
        code = used(bytes(changed))
        if place < 8:
            assert code == "header.magic"
        elif place < 128:
            assert code.startswith("header."), place
        elif place < len(GOOD) - len(cut_profile(GOOD)[1]):
            assert code == "manifest.digest", place
        else:
            assert code == "profile.content", place


@covers("PRF-1", "HDR-10", "ORD-2")
def test_no_other_length_passes() -> None:
    for size in (0, 7, 8, 47, 48, 127, 128, 200, len(GOOD) - 100, len(GOOD) - 1):
        assert parsed(GOOD[:size]) == ("header.magic" if size < 8 else "file.size"), size
    assert parsed(GOOD + b"\0") == "file.size"


@covers("PRF-1", "HDR-6", "HDR-12", "VRS-1")
def test_header_fields() -> None:
    manifest, data = cut_profile(GOOD)
    magic = GOOD[:8]
    assert assembled(manifest, data) == GOOD
    for code, fields in {
        "header.magic": {"fixed": b"\x89KVF\r\n\x1a\n" + GOOD[8:16]},
        "version.unknown": {"fixed": magic + struct.pack("<HHI", 0, 10, 128)},
        "header.field": {"reserved": b"\1" * 24},
        "profile.content": {"tables_bytes": 8},
        "limit.exceeded": {"manifest_bytes": 2**24 + 1},
        "manifest.digest": {"manifest_digest": bytes(32)},
        "file.size": {"file_bytes": 2**50},
    }.items():
        assert parsed(assembled(manifest, data, **fields)) == code, fields


@covers("PRF-1", "JSN-7", "JSN-3", "JSN-1", "FEA-2", "EXT-2")
def test_json_rules_come_first() -> None:
    manifest, data = cut_profile(GOOD)
    text = canonical(manifest)
    for code, changed in {
        "manifest.canonical": text.replace(b'"format":', b'"format": '),
        "manifest.duplicate-key": text.replace(b'"features"', b'"data_bytes":1,"features"'),
        "manifest.json": text[:-1] + b"\xff}",
        "feature.unknown": text.replace(b'["transform-klt"]', b'["transform-klt","zz"]'),
        "extension.unknown": text.replace(
            b'"extensions":{}', b'"extensions":{"a":{"must_understand":true,"value":1}}'
        ),
    }.items():
        assert changed != text
        assert parsed(assembled(changed, data)) == code


# --- the rules of 9.6, one at a time ---------------------------------------------------------


def with_manifest(**changes: Any) -> bytes:
    manifest = cut_profile(GOOD)[0]
    for pointer, value in changes.items():
        target: Any = manifest
        *steps, last = pointer.split("__")
        for step in steps:
            target = target[int(step) if step.isdigit() else step]
        target[last] = value
    return profile_with(GOOD, manifest)


STRUCTURE: dict[str, tuple[str, bytes]] = {
    "longer": ("PRF-1", assembled(cut_profile(GOOD)[0], cut_profile(GOOD)[1] + b"\0")),
    "shorter": ("PRF-1", assembled(cut_profile(GOOD)[0], cut_profile(GOOD)[1][:-1])),
    "data_bytes": ("PRF-1", with_manifest(data_bytes=len(cut_profile(GOOD)[1]) - 1)),
    "writer too long": ("PRF-1", with_manifest(writer__bytes=12)),
    "writer digest": ("PRF-1", with_manifest(writer__digest="0" * 64)),
    "other format": ("PRF-1", with_manifest(format="kvformat")),
    "other version": ("PRF-1", with_manifest(version="0.8")),
    "no feature": ("PRF-1", with_manifest(features=[])),
    "feature twice": ("PRF-1", with_manifest(features=["transform-klt"] * 2)),
    "unknown dtype": ("PRF-1", with_manifest(transforms__0__dtype="int8")),
    "other dtype": ("PRF-1", with_manifest(transforms__0__dtype="int16")),
    "unknown pairing": ("PRF-1", with_manifest(transforms__0__pairing="pairs")),
    "pairs without pairing": ("PRF-1", with_manifest(transforms__0__pairing="none")),
    "pairing without pairs": ("PRF-1", with_manifest(transforms__0__pairs=0)),
    "more pairs than D / 2": ("PRF-1", with_manifest(transforms__0__pairs=3)),
    "no head": ("PRF-1", with_manifest(transforms__0__heads=0)),
    "no member": ("PRF-1", with_manifest(zz=1)),
    "descending": ("PRF-1", profile_file(transforms()[::-1])),
    "layers descend": ("PRF-1", profile_file([transform("key", 2), transform("key", 1)])),
    "twice": ("PRF-2", profile_file([transform("key", 1)] * 2)),
    "channels": (
        "PRF-6",
        with_manifest(transforms__0__heads=129, transforms__0__head_dim=128),
    ),
    "channels that wrap": (
        "PRF-6",
        with_manifest(transforms__0__heads=2**16, transforms__0__head_dim=2**16),
    ),
}


@covers("PRF-1", "PRF-2", "PRF-6")
@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name: str) -> None:
    assert parsed(STRUCTURE[name][1]) == "profile.content"


@covers("PRF-2")
def test_what_is_no_repetition() -> None:
    """Another quality, role or layer is another transform."""
    made = [
        transform("key", 1, quality="balanced"),
        transform("key", 1),
        transform("key", 2),
        transform("value", 1),
    ]
    assert used(profile_file(made)) == "ok"


@covers("PRF-6")
def test_as_many_channels_as_may_be() -> None:
    """Only the manifest is made: the matrix would have 512 MiB."""
    file = with_manifest(transforms__0__heads=128, transforms__0__head_dim=128)
    with pytest.raises(KvformatError) as caught:
        parse_profile(file)
    assert "another length" in caught.value.message


@covers("PRF-1")
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_head_of_one_dim_has_no_pairs(pairing: str) -> None:
    file = with_manifest(
        transforms__0__head_dim=1, transforms__0__pairing=pairing, transforms__0__pairs=0
    )
    with pytest.raises(KvformatError, match="impossible number of pairs"):
        parse_profile(file)


def edited(**changes: Any) -> bytes:
    """One transform with a number changed: ``name__index``, or ``matrix__row__column``."""
    one = transform("key", 1, pairing="half", pairs=2, dtype="int32")
    for place, value in changes.items():
        name, *index = place.split("__")
        array = getattr(one, name).copy()
        array[tuple(map(int, index))] = value
        setattr(one, name, array)
    return profile_file([one])


def row_of(total: int) -> dict[str, int]:
    """A row whose magnitudes add up to ``total``."""
    first = {"matrix__3__0": -(total // 2), "matrix__3__1": total - total // 2}
    return {**first, **{f"matrix__3__{n}": 0 for n in range(2, 8)}}


NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "row of 131,072": ("ok", row_of(131_072)),
    "row of 131,073": ("profile.content", row_of(131_073)),
    "smallest integer": ("profile.content", {"matrix__7__7": -(2**31)}),
    "largest row_scale": ("ok", {"row_scale__0": 2.0**22}),
    "row_scale above": ("profile.content", {"row_scale__0": np.nextafter(np.float32(2**22), 2e38)}),
    "smallest row_scale": ("ok", {"row_scale__7": 2.0**-40}),
    "row_scale below": ("profile.content", {"row_scale__7": 2.0**-41}),
    "row_scale 0": ("profile.content", {"row_scale__3": 0}),
    "row_scale -1": ("profile.content", {"row_scale__3": -1}),
    "row_scale NaN": ("profile.content", {"row_scale__3": np.nan}),
    "row_scale infinite": ("profile.content", {"row_scale__3": np.inf}),
    "mean 0": ("ok", {"mean__0": 0.0}),
    "mean -0": ("profile.content", {"mean__0": -0.0}),
    "largest mean": ("ok", {"mean__0": -(2.0**96)}),
    "mean above": ("profile.content", {"mean__0": 2.0**97}),
    "smallest mean": ("ok", {"mean__7": 2.0**-64}),
    "mean below": ("profile.content", {"mean__7": -(2.0**-65)}),
    "mean NaN": ("profile.content", {"mean__5": np.nan}),
    "mean infinite": ("profile.content", {"mean__5": -np.inf}),
    "cos 1": ("ok", {"turns__0__1": 1.0, "turns__1__1": 0.0}),
    "sin -1": ("ok", {"turns__0__1": 0.0, "turns__1__1": -1.0}),
    "cos above": ("profile.content", {"turns__0__1": 1 + 2.0**-52, "turns__1__1": 0.0}),
    "sin above": ("profile.content", {"turns__0__0": 0.0, "turns__1__0": -1.5}),
    "cos NaN": ("profile.content", {"turns__0__1": np.nan}),
    "sin infinite": ("profile.content", {"turns__1__1": np.inf}),
    "a turn that grows": ("profile.content", {"turns__0__1": 1.0, "turns__1__1": 1.0}),
    "grows a little": ("profile.content", {"turns__0__1": 1.0, "turns__1__1": 2.0**-19}),
    "grows by less": ("ok", {"turns__0__1": 1.0, "turns__1__1": 2.0**-20}),
    "a turn that shrinks": ("ok", {"turns__0__1": 0.0, "turns__1__1": 0.0}),
}


@covers("PRF-4", "PRF-5")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    """Checked when the object is used; its digest is right."""
    code, changes = NUMBERS[name]
    file = edited(**changes)
    assert parsed(file) == "ok"
    assert used(file) == code


@covers("PRF-3")
def test_an_object_is_checked_when_it_is_used() -> None:
    """Damage in one transform leaves the others."""
    file = bytearray(GOOD)
    start = len(file) - len(cut_profile(GOOD)[1])
    file[start + 5] ^= 1
    profile = parse_profile(bytes(file))
    assert code_of(lambda: profile.matrices(profile.records[0], "")) == "profile.content"
    assert code_of(lambda: profile.matrices(profile.records[1], "")) == "ok"
