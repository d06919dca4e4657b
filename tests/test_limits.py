"""Limits of section 12: at the limit is fine, one above is refused before anything is allocated."""

from __future__ import annotations

import copy
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat import Extension, InvalidError, KvformatError
from kvformat.artifact import Artifact
from kvformat.front import read_front
from kvformat.groups import count_cells, make_grid
from kvformat.limits import LIMIT_NAMES, LIMITS
from kvformat.manifest import parse_manifest
from kvformat.storage import BytesSource
from tests.builder import Builder, canonical, resealed
from tests.damage import (
    TRACKS,
    artifact,
    bound_artifact,
    open_code,
    outcome,
    parts,
    put,
    verdict,
    with_members,
)
from tests.requirements import covers

MIB = 2**20
PLAIN = Builder(artifact()).manifest
LAYOUT = PLAIN["tracks"][0]["layouts"][0]


def code_of(file: bytes) -> str:
    """The code of opening."""
    return open_code(file)


def plain(changes: dict[str, Any]) -> str:
    return code_of(with_members(parts(), changes))


@contextmanager
def little_memory(most: int = 24 * MIB) -> Iterator[None]:
    """Fails when Python and numpy together allocate more than ``most`` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak / MIB:.0f} MiB"


class Watched(BytesSource):
    """A source that records what is asked of it and claims another size."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        super().__init__(data)
        self.claimed = size
        self.asked: list[tuple[int, int]] = []

    def size(self) -> int | None:
        return self.claimed

    def read(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return super().read(offset, length)

    def read_front(self, length: int) -> bytes:
        self.asked.append((0, length))
        return super().read_front(length)


# --- manifest --------------------------------------------------------------------------------


def groups(count: int) -> dict[str, Any]:
    """Members for ``count`` groups of one layer each."""
    one = {
        "dtype": "float16", "head_dim": 1, "head_start": 0, "heads": 1, "heads_total": 1,
        "role": "key", "tokens": {"kind": "all"},
    }  # fmt: skip
    made = [{**one, "layers": [index], "name": f"g-{index}"} for index in range(count)]
    return {"/groups": made, "/identity/layers_total": 100}


# name: members at the limit and the code that they give, members above it
LAYOUTS = [{**LAYOUT, "width": 144 + 16 * (n // 2), "frames": n + 1} for n in range(9)]
ABOVE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "integer": (
        {"/data_bytes": 2**53 - 1}, "manifest.semantics", {"/data_bytes": 2**53},
    ),
    "groups": (groups(64), "manifest.semantics", groups(65)),
    "layers_per_group": (
        {"/groups/0/layers": list(range(4096)), "/identity/layers_total": 4096},
        "manifest.semantics",
        {"/groups/0/layers": list(range(4097)), "/identity/layers_total": 4097},
    ),
    "heads": ({"/groups/0/heads_total": 65_536}, "ok", {"/groups/0/heads_total": 65_537}),
    "head_dim": (
        {"/groups/1/head_dim": 65_536}, "ok", {"/groups/1/head_dim": 65_537},
    ),
    "channels": (
        {"/groups/0/head_dim": 2**19}, "limit.exceeded",  # head_dim, too
        {"/groups/0/heads": 17, "/groups/0/heads_total": 17, "/groups/0/head_dim": 65_536},
    ),
    "qualities": (
        {"/qualities": [PLAIN["qualities"][0]] * 16}, "manifest.semantics",
        {"/qualities": [PLAIN["qualities"][0]] * 17},
    ),
    "tracks": (
        {"/tracks": [PLAIN["tracks"][0]] * 32}, "manifest.semantics",
        {"/tracks": [PLAIN["tracks"][0]] * 33},
    ),
    "layouts_per_track": (
        {"/tracks/0/layouts": [{**LAYOUT, "frames": n + 1} for n in range(64)]}, "ok",
        {"/tracks/0/layouts": [{**LAYOUT, "frames": n + 1} for n in range(65)]},
    ),
    "picture_sizes_per_track": (
        {"/tracks/0/layouts": LAYOUTS[:8]}, "ok",
        {"/tracks/0/layouts": LAYOUTS},
    ),
    "picture_side": (
        {"/tracks/0/layouts/1/width": 8192, "/tracks/0/layouts/1/height": 8192}, "ok",
        {"/tracks/0/layouts/1/width": 8208},
    ),
    "frames_per_segment": (
        {"/tracks/0/layouts/1/frames": 65_536}, "ok", {"/tracks/0/layouts/1/frames": 65_537},
    ),
    "sets_per_quality": (
        {"/qualities/0/sets": 65_536}, "header.field", {"/qualities/0/sets": 65_537},
    ),
    "segments_per_track": (
        {"/tracks/0/segments": 2**20}, "manifest.semantics", {"/tracks/0/segments": 2**20 + 1},
    ),
    "tokens": ({"/tokens/first_position": 2**40 - 10}, "ok", {"/tokens/first_position": 2**40 - 9}),
    "tokens_per_segment": (
        {"/segmentation/tokens": 65_536}, "manifest.semantics", {"/segmentation/tokens": 65_537},
    ),
    "layers_per_segment": (
        {"/segmentation/groups/0/layers": 3}, "ok", {"/segmentation/groups/0/layers": 4},
    ),
    "layers_total": ({"/identity/layers_total": 65_536}, "ok", {"/identity/layers_total": 65_537}),
    "string_bytes": (
        {"/generator": "x" * 4096}, "manifest.schema", {"/generator": "x" * 4097},
    ),
    "json_depth": (
        {"/generator": json.loads("[" * 15 + "]" * 15)}, "manifest.schema",
        {"/generator": json.loads("[" * 16 + "]" * 16)},
    ),
}  # fmt: skip

ELSEWHERE = {
    "manifest_bytes", "picture_side_minimum", "json_values", "token_scales_per_set", "side_bytes",
    "stored_bytes_per_segment", "decoded_bytes_per_segment",
}  # fmt: skip


def test_every_limit_has_a_test() -> None:
    assert set(ABOVE) | ELSEWHERE == set(LIMIT_NAMES)


@covers("LIM-2", "CNV-2", "JSN-8", "JSN-9", "ERR-5", "LAY-1", "SEG-4")
@pytest.mark.parametrize("name", ABOVE)
def test_limits_of_the_manifest(name: str) -> None:
    at, code, above = ABOVE[name]
    assert plain(at) == code
    assert plain(above) == "limit.exceeded"


@covers("LIM-2", "CNV-2", "ERR-5")
@pytest.mark.parametrize(
    "changes",
    [
        {"/tokens/count": 2**40 + 1},
        {"/tokens/count": 2**40, "/tokens/first_position": 1},
        {"/tokens/first_position": 2**40 + 1},
        {"/groups/0/heads": 65_537, "/groups/0/heads_total": 65_537, "/groups/0/head_dim": 1},
        {"/tracks/0/layouts/0/height": 8208},
        {"/tracks/0/layouts/0/tile/0": 2**53},
        {"/groups/0/layers/3": 2**53},
        {"/segmentation/groups/0/heads": 65_537},
    ],
    ids=str,
)
def test_more_limits_of_the_manifest(changes: dict[str, Any]) -> None:
    assert plain(changes) == "limit.exceeded"


@covers("LIM-2", "ERR-5")
@pytest.mark.parametrize(
    "name", ["heads", "frames_per_segment", "tokens_per_segment", "layers_total"]
)
def test_a_limit_comes_before_the_rule_of_the_same_value(name: str) -> None:
    changes = {
        "heads": {"/groups/0/heads": 65_537},  # also more than heads_total
        "frames_per_segment": {"/tracks/0/layouts/0/frames": 2**52},
        "tokens_per_segment": {"/segmentation/tokens": 2**52},
        "layers_total": {"/identity/layers_total": 2**52},
    }[name]
    assert plain(changes) == "limit.exceeded"


@covers("LIM-2", "LAY-4")
def test_the_smallest_picture() -> None:
    assert LIMITS.picture_side_minimum == 144
    assert plain({"/tracks/0/layouts/0/height": 144}) == "ok"
    assert plain({"/tracks/0/layouts/0/height": 128}) == "manifest.schema"


@covers("LIM-2", "ORD-4", "CNV-3", "SEC-3")
def test_the_number_of_cells_is_bounded_before_they_are_made() -> None:
    """2^40 tokens in segments of one token: 2^40 cells and a table of 2^47 bytes."""
    with little_memory(8 * MIB):
        changes = {"/tokens/count": 2**40, "/segmentation/tokens": 1}
        assert plain(changes) == "limit.exceeded"
    for blocks, code in ((2**20 // 3, "manifest.semantics"), (2**20 // 3 + 1, "limit.exceeded")):
        assert plain({"/tokens/count": blocks, "/segmentation/tokens": 1}) == code  # 3 layer runs


@covers("SEG-1", "CNV-3")
def test_counting_cells_equals_making_them() -> None:
    for options in ({}, {"window": True}):
        manifest = kvformat.open(artifact(**options)).manifest
        for tokens in (1, 2, 3, 5, 10, 11):
            cut = replace(manifest.segmentation, tokens=tokens)
            for count in (10, 11, 23):
                grid = make_grid(manifest.groups, cut, count)
                assert count_cells(manifest.groups, cut, count) == len(grid)
                held = sum(cell.layer_count * cell.token_count * cell.head_count for cell in grid)
                shapes = [group.shape(count) for group in manifest.groups]
                assert held == sum(s[0] * s[1] * s[2] for s in shapes)


@covers("LIM-2", "ORD-4")
def test_manifest_bytes() -> None:
    """A manifest of exactly 16 MiB is read, one of a byte more is refused unread."""

    def sized(total: int) -> bytes:
        def edit(manifest: dict[str, Any]) -> None:
            texts = ["", ""]
            manifest["extensions"] = {"a": {"must_understand": False, "value": texts}}
            missing = total - len(canonical(manifest))
            texts.extend(["x" * 4000] * (missing // 4003))
            missing = total - len(canonical(manifest))
            texts[0] = "x" * missing

        return parts(tracks=("exact/stored",)).build(edit_manifest=edit)

    for total, code in ((2**24, "ok"), (2**24 + 1, "limit.exceeded")):
        file = sized(total)
        assert struct.unpack_from("<Q", file, 56) == (total,)
        assert code_of(file) == code


# --- header bombs ----------------------------------------------------------------------------


@covers("ORD-4", "SEC-3", "REQ-1", "LIM-2")
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"manifest_bytes": 2**24 + 1, "file_bytes": 2**53 - 1}, "limit.exceeded"),
        ({"manifest_bytes": 2**53 - 1, "file_bytes": 2**53 - 1}, "limit.exceeded"),
        ({"tables_bytes": 2**53, "file_bytes": 2**53 - 1}, "limit.exceeded"),
        ({"tables_bytes": 2**52, "file_bytes": 2**53 - 1}, "header.field"),
        ({"file_bytes": 2**53 - 1}, "header.field"),
        ({"file_bytes": 2**64 - 1}, "limit.exceeded"),
    ],
    ids=str,
)
def test_a_header_cannot_make_a_reader_ask_for_much(changes: dict[str, int], code: str) -> None:
    file = resealed(artifact(), **changes) + bytes(2 * MIB)
    source = Watched(file, changes["file_bytes"])
    with little_memory(8 * MIB), pytest.raises(KvformatError) as caught:
        read_front(source)
    assert caught.value.code == code
    assert source.asked[0] == (0, 262_144)
    assert sum(length for _, length in source.asked) < 8 * MIB


@covers("ORD-4", "SEC-3")
def test_a_claimed_manifest_of_16_mib_costs_no_more_than_it() -> None:
    file = resealed(artifact(), manifest_bytes=2**24, tables_bytes=2**50, file_bytes=2**51)
    source = Watched(file, 2**51)
    with little_memory(), pytest.raises(KvformatError):
        read_front(source)
    assert sum(length for _, length in source.asked) <= 2**24 + 16 * 262_144 + 262_144


# --- records ---------------------------------------------------------------------------------


def read_of(file: bytes, track: str) -> str:
    """The code of reading a track with little memory, and nothing large asked for."""
    source = Watched(file, len(file))
    with little_memory(8 * MIB), pytest.raises(KvformatError) as caught:
        Artifact(source, read_front(source)).read(track=track, workers=1)
    assert all(length <= 2 * MIB for _, length in source.asked)
    return caught.value.code


@covers("LIM-2", "ORD-4", "SEC-3", "CNV-3")
@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("stored_bytes", 2**29, "table.record"),
        ("stored_bytes", 2**29 + 1, "limit.exceeded"),
        ("stored_bytes", 2**63, "limit.exceeded"),
        ("stored_bytes", 2**64 - 1, "limit.exceeded"),
        ("side_bytes", 2**28, "table.record"),
        ("side_bytes", 2**28 + 1, "limit.exceeded"),
        ("side_bytes", 2**32 - 1, "limit.exceeded"),
        ("offset", 2**53, "limit.exceeded"),
        ("offset", 2**64 - 1, "limit.exceeded"),
    ],
)
@pytest.mark.parametrize("number", [0, 5])
def test_a_record_cannot_make_a_reader_allocate(
    field: str, value: int, code: str, number: int
) -> None:
    def edit(builder: Builder) -> None:
        builder.segments[TRACKS[2]][number].record[field] = value

    assert read_of(parts().build(edit_records=edit), TRACKS[2]) == code


@covers("LIM-2", "CNV-3")
@pytest.mark.parametrize("value", [2**53, 2**63, 2**64 - 1, 2**40])
def test_a_set_record_cannot_make_a_reader_allocate(value: int) -> None:
    def edit(builder: Builder) -> None:
        builder.sets["near-lossless"][0].record["bytes"] = value

    assert read_of(parts().build(edit_records=edit), TRACKS[2]) in (
        "table.record",
        "limit.exceeded",
    )


def wide(tokens: int, dims: int, dtype: str, track: str) -> bytes:
    """One segment of ``tokens`` x ``dims`` whose payload is a few bytes."""
    builder = parts(tracks=(track,))
    manifest = builder.manifest
    builder.segments[track] = builder.segments[track][:1]
    builder.sets = {name: [] for name in builder.sets}
    row = builder.segments[track][0].record
    row.update(
        layer_count=1, token_count=tokens, head_count=1, group=0, set_index=2**32 - 1, layout=65_535
    )
    builder.segments[track][0].payload = b"few"
    builder.segments[track][0].side = b""
    group = manifest["groups"][0]
    group.update(dtype=dtype, head_dim=dims, heads=1, heads_total=1, layers=[0])
    manifest["groups"] = [group]
    manifest["segmentation"].update(groups=[{"heads": 1, "layers": 1}], tokens=65_536)
    manifest["tokens"]["count"] = tokens
    manifest["qualities"][0]["encodings"] = ["exact"]
    manifest["tracks"][0]["codecs"] = [track.split("/")[1]]
    return builder.build()


@covers("LIM-2", "SEC-3", "ZST-7")
@pytest.mark.parametrize("track", ["exact/zstd", "exact/stored"])
@pytest.mark.parametrize(
    ("tokens", "dims", "dtype", "code"),
    [
        (65_536, 4096, "uint8", "segment.payload"),
        (65_536, 4097, "uint8", "limit.exceeded"),
        (65_536, 2049, "float16", "limit.exceeded"),
        (65_536, 1025, "float32", "limit.exceeded"),
        (65_535, 65_536, "float32", "limit.exceeded"),
    ],
)
def test_decoded_bytes_of_a_segment(
    track: str, tokens: int, dims: int, dtype: str, code: str
) -> None:
    file = wide(tokens, dims, dtype, track)
    if code == "limit.exceeded":
        assert read_of(file, track) == code
    assert verdict(file) == code


@covers("LIM-2", "LIM-3", "SEC-3")
@pytest.mark.parametrize(
    ("frames", "side", "code"),
    [(1, 8192, "segment.bitstream"), (2, 8192, "limit.exceeded"), (65_536, 144, "limit.exceeded")],
)
def test_decoded_bytes_of_pictures(frames: int, side: int, code: str) -> None:
    builder = parts(tracks=(TRACKS[0],))
    builder.manifest["tracks"][0]["layouts"][0].update(frames=frames, width=side, height=side)
    file = builder.build()
    assert read_of(file, TRACKS[0]) == code
    assert verdict(file) == code


@covers("LIM-2", "SET-7")
def test_token_scales_of_a_set() -> None:
    for count, code in ((256, "ok"), (257, "limit.exceeded")):
        builder = parts(tracks=("near-lossless/stored",))
        for item in builder.sets["near-lossless"]:
            item.data = item.data[:12] + struct.pack("<H", count) + item.data[14:-132]
            item.data += np.ones(min(count, 256), "<f4").tobytes()
        assert verdict(builder.build()) == code


# --- the writer ------------------------------------------------------------------------------


def views(shape: tuple[int, ...]) -> Any:
    """An array of any shape that takes no memory."""
    return np.broadcast_to(np.float16(1), shape)


def tiny() -> Any:
    return {"layers.0.key": views((1, 1, 1))}


def nested(depth: int) -> Any:
    """Lists in lists."""
    return [nested(depth - 1)] if depth else 0


WRITES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "head_dim": (lambda: {"layers.0.key": views((1, 1, 65_537))}, {}, "input.range"),
    "heads": (lambda: {"layers.0.key": views((1, 65_537, 1))}, {}, "input.range"),
    "channels": (lambda: {"layers.0.key": views((1, 17, 65_536))}, {}, "input.range"),
    "layers_total": (lambda: {"layers.65536.key": views((1, 1, 1))}, {}, "input.identity"),
    "segment tokens": (tiny, {"segment_tokens": 65_537}, "usage.argument"),
    "first position": (tiny, {"first_position": 2**40}, "input.range"),
    "alignment": (tiny, {"alignment": 8192}, "usage.argument"),
    "text": (
        tiny,
        {"identity": kvformat.Identity(kvformat.Model("x" * 1025), 64, "float16", kind="unbound")},
        "input.identity",
    ),
    "layers_total of the identity": (
        tiny,
        {"identity": kvformat.Identity(kvformat.Model("m"), 65_537, "float16", kind="unbound")},
        "input.range",
    ),
    "depth": (tiny, {"extensions": {"a": Extension(nested(20))}}, "input.range"),
    "string": (tiny, {"extensions": {"a": Extension("x" * 4097)}}, "input.range"),
    "integer": (tiny, {"extensions": {"a": Extension(2**53)}}, "input.range"),
}  # fmt: skip


@covers("LIM-1", "ERR-4")
@pytest.mark.parametrize("name", WRITES)
def test_a_writer_refuses_what_exceeds_a_limit(name: str, tmp_path: Any) -> None:
    make, options, code = WRITES[name]
    identity = kvformat.Identity(kvformat.Model("m"), 65_536, "float16", kind="unbound")
    target = tmp_path / "a.kvf"
    with pytest.raises(KvformatError) as caught:
        kvformat.write(
            target, make(), **{"identity": identity, "tracks": ["exact/zstd"], **options}
        )
    assert caught.value.code == code
    assert caught.value.verdict == "usage"
    assert list(tmp_path.iterdir()) == []


@covers("LIM-2", "CNV-2")
def test_limits_are_inclusive() -> None:
    for name in set(LIMIT_NAMES) - {"picture_side_minimum"}:
        bound = getattr(LIMITS, name)
        assert LIMITS.check(name, bound, "here") == bound
        with pytest.raises(InvalidError) as caught:
            LIMITS.check(name, bound + 1, "here")
        assert caught.value.code == "limit.exceeded"


@covers("LIM-2", "IDN-6")
def test_long_lists_of_the_identity() -> None:
    base = Builder(bound_artifact())
    for count, code in ((512, "ok"), (513, "limit.exceeded")):
        changes = {"/identity/rope/0/inv_freq": "3f800000" * count}
        assert code_of(with_members(base.copy(), changes)) == code
    assert outcome(bound_artifact(), "near-lossless/zstd") != "ok"
    changed = copy.deepcopy(base.manifest)
    put(changed, "/identity/rope/0/inv_freq", "")
    with pytest.raises(InvalidError):
        parse_manifest(canonical(changed))
