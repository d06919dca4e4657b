"""Artifacts with transformed groups (spec 9.5): slices, codecs, windows, positions, faults.

They are made by hand in ``conformance.generate.transform_parts``; what they restore to is computed
by the naive arithmetic of ``tests.transformed``.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

import kvformat
import kvformat.aio
from conformance.generate.compose import LAYOUT_KEYS, Video
from conformance.generate.transform_parts import DIMS, HEADS, parts
from kvformat import KvformatError
from kvformat.cli.inspect import show
from kvformat.codecs.base import SegmentShape
from kvformat.codecs.hevc import HevcCodec
from kvformat.fields import Node
from kvformat.profiles import Profile, parse_profile
from kvformat.tracks import parse_layout
from tests.builder import Builder
from tests.reference import reference_restore
from tests.requirements import covers
from tests.strategies import raw
from tests.transformed import profile_digest

STORED, ZSTD, HEVC = (f"near-lossless/{codec}" for codec in ("stored", "zstd", "hevc"))
NO_SCALES = np.zeros(0, np.float32)
VARIANTS: dict[str, dict[str, Any]] = {
    "half": {},
    "one pair of two": {"pairs": 1},
    "interleaved": {"pairing": "interleaved"},
    "not rotated": {"pairs": 0, "pairing": "none"},
    "without token scales": {"scales": NO_SCALES},
    "without patches": {"patches": ()},
    "nothing beside": {"patches": (), "scales": NO_SCALES},
    "window": {"window": True},
    "later": {"first_position": 4_352},
    "later window": {"window": True, "first_position": 300},
    "above 2^24": {"first_position": 2**24 + 256},
    "the last position": {"first_position": 2**40 - 10},
    "layer-major": {"order": "layer-major"},
    "pages": {"alignment": 4096},
    "many segments": {"seg": 3},
}


def video() -> Video:
    """Streams of the encoder at hand."""

    def stream(_: str, q: Any, order: Any, layout: dict[str, Any]) -> bytes:
        shape = SegmentShape(*q.shape, 0, order, parse_layout(Node(layout, "/layout")))
        return HevcCodec().encode(q, shape)

    return Video([copy.deepcopy(LAYOUT_KEYS)], lambda _: 0, stream)


@cache
def made(name: str, tracks: tuple[str, ...] = (STORED, ZSTD, "exact/zstd")) -> tuple[bytes, bytes]:
    """The bytes of an artifact and its profile."""
    options = dict(VARIANTS[name])
    if HEVC in tracks:
        options["video"] = video()
    builder, profile = parts(tracks, **options)
    return builder.build(), profile


def restored(file: bytes, profile: Profile | None, track: str, **selection: Any) -> dict[str, Any]:
    with kvformat.open(file, profiles=() if profile is None else profile) as artifact:
        return dict(artifact.read(track=track, check=True, allow_partial=True, **selection))


def code_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except KvformatError as error:
        return error.code
    return "ok"


def verdict(file: bytes, **options: Any) -> str:
    return code_of(lambda: kvformat.verify(file, in_child=False, **options))


@covers("TRF-6", "TRF-7", "ARI-3", "ARI-4", "ARI-5", "SID-4", "INT-1", "INT-3")
@pytest.mark.parametrize("name", VARIANTS)
def test_restored_bits_are_those_of_the_second_reader(name: str) -> None:
    file, profile = made(name)
    expected = reference_restore(file, profile)
    for track in expected:
        found = restored(file, parse_profile(profile), track)
        assert found.keys() == expected[track].keys()
        for group, array in found.items():
            assert raw(array) == raw(expected[track][group]), (track, group)
    assert raw(expected[STORED]["keys"]) == raw(expected[ZSTD]["keys"])
    assert verdict(file) == "ok"


@covers("PAR-1", "TRF-2", "TRF-7")
@pytest.mark.parametrize("name", ["half", "interleaved", "later window", "above 2^24"])
def test_slices_are_those_of_the_whole(name: str) -> None:
    """A slice of heads needs all heads of the product, one of tokens its own positions."""
    file, packed = made(name)
    profile = parse_profile(packed)
    with kvformat.open(file, profiles=profile) as artifact:
        whole = artifact.read(track=ZSTD, allow_partial=True)
        starts = {group.name: group.held(10)[0] for group in artifact.groups}
        layers_held = {group.name: group.layers for group in artifact.groups}
        for tokens, layers, heads in product(
            [(0, 10), (3, 4), (5, 9), (9, 10)], [(1, 3, 4, 6), (3,), (6,)], [(0, 2), (0, 1), (1, 2)]
        ):
            part = artifact.read(
                track=STORED, tokens=tokens, layers=layers, heads=heads, allow_partial=True
            )
            for group, array in part.items():
                start = starts[group]
                held = slice(max(tokens[0] - start, 0), max(tokens[1] - start, 0))
                mine = [n for n, layer in enumerate(layers_held[group]) if layer in layers]
                expected = whole[group][mine][:, held, slice(*heads)]
                assert array.shape == expected.shape
                assert raw(array) == raw(expected), (group, tokens, layers, heads)


@covers("TRF-7", "REC-6", "INT-1")
def test_all_codecs_restore_the_same_bytes() -> None:
    file, packed = made("half", (HEVC, ZSTD, STORED))
    profile = parse_profile(packed)
    found = [restored(file, profile, track) for track in (HEVC, ZSTD, STORED)]
    for group, array in found[0].items():
        assert raw(array) == raw(found[1][group]) == raw(found[2][group])
    assert verdict(file) == "ok"
    assert verdict(file, profiles=profile) == "ok"


@covers("TRF-7", "PAR-1")
def test_all_ways_to_read_give_the_same() -> None:
    file, packed = made("later")
    profile = parse_profile(packed)
    whole = restored(file, profile, STORED)
    with kvformat.open(file, profiles=profile) as artifact:
        buffers = {name: np.zeros_like(array) for name, array in whole.items()}
        artifact.read_into(buffers, track=ZSTD, order="layer-major")
        for name, array in whole.items():
            assert raw(buffers[name]) == raw(array)
        again = {name: np.zeros_like(array) for name, array in whole.items()}
        for block in artifact.stream(track=ZSTD):
            layers = [artifact.manifest.groups[0].layers, artifact.manifest.groups[1].layers][
                block.group.name == "values"
            ]
            start = layers.index(block.layers[0])
            tokens = slice(block.token_start, block.token_start + block.array.shape[1])
            again[block.group.name][start : start + len(block.layers), tokens] = block.array
        for name, array in whole.items():
            assert raw(again[name]) == raw(array)


@covers("TRF-4")
def test_loading_in_one_call_takes_profiles() -> None:
    file, packed = made("half")
    whole = restored(file, parse_profile(packed), STORED)
    buffers = {name: np.zeros_like(array) for name, array in whole.items()}
    kvformat.load_into(file, buffers, track=STORED, profiles=parse_profile(packed))
    assert {name: raw(array) for name, array in buffers.items()} == {
        name: raw(array) for name, array in whole.items()
    }
    assert code_of(lambda: kvformat.load_into(file, buffers, track=STORED)) == "profile.missing"


@covers("TRF-4", "TRF-7")
def test_asynchronous_reading_takes_profiles() -> None:
    file, packed = made("half")

    async def read(profiles: Any) -> dict[str, Any]:
        async with await kvformat.aio.open(file, profiles=profiles) as artifact:
            return dict(await artifact.read(track=STORED))

    found = asyncio.run(read(parse_profile(packed)))
    for name, array in restored(file, parse_profile(packed), STORED).items():
        assert raw(found[name]) == raw(array)
    assert code_of(lambda: asyncio.run(read(()))) == "profile.missing"


@covers("TRF-4", "PAR-3")
def test_a_missing_profile_is_no_damage() -> None:
    """A read that goes on behind damage, into buffers or as a stream, stops for it all the same."""
    file, profile = made("half")
    with kvformat.open(file) as artifact:
        shape = (4, 10, HEADS, DIMS)
        buffers = {"keys": np.zeros(shape, np.uint16)}
        for act in (
            lambda: artifact.read(track=STORED),
            lambda: artifact.read_into(buffers, roles=["key"], track=STORED, on_error="prefix"),
            lambda: artifact.stream(track=STORED),
        ):
            assert code_of(act) == "profile.missing"
        assert not buffers["keys"].any()
        assert artifact.source.meter.traffic().requests <= 2
        assert code_of(lambda: artifact.read(track="exact/zstd")) == "ok"
    assert profile_digest(profile) != ""


@pytest.mark.parametrize(
    ("quality", "with_profile", "expected"),
    [
        (("near-lossless", "exact"), False, "exact/zstd"),
        (("near-lossless", "exact"), True, "near-lossless/zstd"),
        ("near-lossless", True, "near-lossless/zstd"),
        ("near-lossless", False, "profile.missing"),
        (None, False, "exact/zstd"),
    ],
)
def test_auto_leaves_out_what_needs_a_missing_profile(
    quality: Any, with_profile: bool, expected: str
) -> None:
    file, profile = made("half", (ZSTD, "exact/zstd"))
    auto = kvformat.Auto(quality, link=kvformat.Link(1e3))  # where the fewest bytes win
    with kvformat.open(file, profiles=parse_profile(profile) if with_profile else ()) as artifact:
        if expected == "profile.missing":
            assert code_of(lambda: artifact.read(track=auto, allow_partial=True)) == expected
        else:
            report = artifact.read(track=auto, allow_partial=True).report
            assert report is not None
            assert report.tracks == (expected,)


@covers("LIN-1")
def test_lineage_names_the_profile() -> None:
    file, packed = made("half")
    with kvformat.open(file, profiles=parse_profile(packed)) as artifact:
        lineage = artifact.read(track=ZSTD).lineage
        assert lineage.kind == "lossy"
        assert lineage.profile == profile_digest(packed)
        assert artifact.read(track="exact/zstd").lineage.kind == "exact"


@covers("VER-1", "VER-3")
def test_verification_says_what_a_profile_would_add() -> None:
    file, packed = made("half")
    without = kvformat.verify(file, in_child=False)
    assert any(profile_digest(packed) in item for item in without.not_checked)
    given = kvformat.verify(file, in_child=False, profiles=parse_profile(packed))
    assert given.checked == {**without.checked, "transforms": 6}
    assert not any(item.startswith("profile") for item in given.not_checked)
    assert verdict(file, profiles=[]) == "ok"
    assert verdict(file, profiles=parse_profile(made("interleaved")[1])) == "profile.missing"


# --- faults ----------------------------------------------------------------------------------


def broken(change: Callable[[Builder], Any], **options: Any) -> bytes:
    builder = parts([STORED], **options)[0]
    change(builder)
    return builder.build()


def manifest_of(**changes: Any) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        for key, value in changes.items():
            if value is None:
                builder.manifest.pop(key)
            else:
                builder.manifest[key] = value

    return change


def encodings(*values: str) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        builder.manifest["qualities"][0]["encodings"] = list(values)

    return change


MANIFESTS: dict[str, tuple[str, Callable[[Builder], Any]]] = {
    "no profile": ("manifest.schema", manifest_of(profile=None)),
    "no feature": ("manifest.schema", manifest_of(features=[])),
    "neither": ("manifest.schema", manifest_of(features=[], profile=None)),
    "profile is a digest": ("manifest.schema", manifest_of(profile="1" * 64)),
    "profile with a place": (
        "manifest.schema",
        manifest_of(profile={"digest": "1" * 64, "url": "p.kvp"}),
    ),
    "nothing transformed": ("manifest.semantics", encodings("quantised", "quantised")),
    "unknown encoding": ("manifest.schema", encodings("transformed", "rotated")),
    "feature twice": ("manifest.semantics", manifest_of(features=["transform-klt"] * 2)),
    "another feature": ("feature.unknown", manifest_of(features=["transform-klt", "zz"])),
}


@covers("TRF-1", "FEA-1", "QUA-1", "MAN-3")
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name: str) -> None:
    code, change = MANIFESTS[name]
    file = broken(change)
    assert verdict(file) == code
    assert code_of(lambda: kvformat.open(file)) == code


@covers("TRF-1")
def test_one_transformed_group_is_enough() -> None:
    """The other has a set of the usual kind."""

    def change(builder: Builder) -> None:
        encodings("transformed", "quantised")(builder)

    file = broken(change)
    profile = parse_profile(parts([STORED])[1])
    assert verdict(file) == "ok"
    expected = reference_restore(file, bytes(parts([STORED])[1]))[STORED]
    for name, array in restored(file, profile, STORED).items():
        assert raw(array) == raw(expected[name])
    with kvformat.open(file) as artifact:
        assert code_of(lambda: artifact.read(track=STORED, roles=["value"])) == "ok"


@covers("TRF-2")
def test_segments_hold_all_heads() -> None:
    from conformance.generate import transform_parts as kit

    groups = kit.groups()
    groups[0].cut = (3, 1)
    tokens = {"chain": None, "content": [], "count": 10, "first_position": 0}
    profile = kit.profile_file(kit.transforms())
    builder = kit.compose(groups, 10, [STORED], seg=6, identity=kit.identity(), tokens=tokens)
    assert verdict(kit.attach(builder, profile).build()) == "manifest.semantics"
    assert verdict(kit.attach(builder, profile, [1]).build()) == "manifest.semantics"
    builder.manifest["qualities"][0]["encodings"] = ["quantised", "transformed"]
    assert verdict(builder.build()) == "ok"


def quant_with(**changes: Any) -> bytes:
    from conformance.generate import transform_parts as kit

    groups = kit.groups(patches=())
    for group in groups[:1]:
        quant = group.quants[kit.QUALITY]
        for key, value in changes.items():
            setattr(quant, key, value)
    tokens = {"chain": None, "content": [], "count": 10, "first_position": 0}
    builder = kit.compose(groups, 10, [STORED], seg=6, identity=kit.identity(), tokens=tokens)
    return kit.attach(builder, kit.profile_file(kit.transforms())).build()


FULL = (4, HEADS, DIMS)
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": ("ok", {}),
    "scale per channel": ("set.content", {"scale": np.ones(FULL, np.float32)}),
    "zero per channel": ("set.content", {"zero": np.full(FULL, 128, np.int16)}),
    "bias": ("set.content", {"bias": np.zeros(FULL, np.float32)}),
    "order": ("set.content", {"order": np.tile(np.arange(DIMS, dtype=np.uint8), (4, HEADS, 1))}),
    "zero 127": ("set.content", {"zero": np.int16([128, 128, 128, 127])}),
    "zero 0": ("set.content", {"zero": np.zeros(4, np.int16)}),
    "scale above": ("set.content", {"scale": np.full(4, 2.0**41, np.float32)}),
    "largest scale": ("ok", {"scale": np.full(4, 2.0**40, np.float32)}),
}


@covers("TRF-3", "SET-4")
@pytest.mark.parametrize("name", SETS)
def test_sets(name: str) -> None:
    code, changes = SETS[name]
    file = quant_with(**changes)
    assert verdict(file) == code
    profile = parse_profile(parts([STORED])[1])
    assert code_of(lambda: restored(file, profile, STORED)) == code


@covers("TRF-3", "SID-4", "VER-1")
def test_integers_at_patches_are_128() -> None:
    builder = parts([STORED])[0]
    segment = builder.segments[STORED][0]
    assert segment.payload[: HEADS * DIMS] == b"\x80" * HEADS * DIMS
    changed = b"\x7f" + segment.payload[1:]
    from tests.builder import b3, integer_sum

    segment.payload = changed
    segment.record["integer_digest"] = b3(changed)
    segment.record["integer_sum"] = integer_sum(changed)
    assert verdict(builder.build()) == "segment.side"


@covers("INT-1", "INT-3", "CNV-5")
def test_integers_are_checked_without_a_profile() -> None:
    builder = parts([STORED])[0]
    segment = builder.segments[STORED][0]
    segment.payload = segment.payload[:-1] + bytes([segment.payload[-1] ^ 1])
    assert verdict(builder.build()) == "segment.integers"


# --- what else handles artifacts -------------------------------------------------------------


def test_inspect_names_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    file, packed = made("half")
    with kvformat.open(file) as artifact:
        show(artifact, "a.kvf")
    text = "".join(capsys.readouterr().out.split())
    assert f"profile{profile_digest(packed)}" in text
    assert "allgroupsofnear-lossless" in text
    assert "featurestransform-klt" in text


@pytest.mark.parametrize("codec", ["zstd", "hevc"])
def test_transcoding_needs_no_profile(codec: str, tmp_path: Any) -> None:
    from kvformat.store.convert import transcode

    file, packed = made("half")
    target = tmp_path / "b.kvf"
    with kvformat.open(file) as artifact:
        transcode(artifact, target, codec, track=STORED)
    data = target.read_bytes()
    assert verdict(data) == "ok"
    found = restored(data, parse_profile(packed), f"near-lossless/{codec}")
    for name, array in restored(file, parse_profile(packed), STORED).items():
        assert raw(array) == raw(found[name])


def test_transcoding_another_quality_drops_the_feature(tmp_path: Any) -> None:
    from kvformat.store.convert import transcode

    file, _ = made("half")
    target = tmp_path / "b.kvf"
    with kvformat.open(file) as artifact:
        transcode(artifact, target, "stored", track="exact/zstd")
    with kvformat.open(target) as artifact:
        assert artifact.manifest.features == ()
        assert artifact.manifest.profile is None
    assert verdict(target.read_bytes()) == "ok"


def test_a_copy_is_the_same_bytes(tmp_path: Any) -> None:
    file, _ = made("half")
    (tmp_path / "a.kvf").write_bytes(file)
    kvformat.copy(tmp_path / "a.kvf", tmp_path / "b.kvf")
    assert (tmp_path / "b.kvf").read_bytes() == file
