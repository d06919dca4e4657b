"""Sets, side blocks and integers behind right digests that break a rule of sections 9 and 10."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from kvformat import sums
from tests.builder import Builder, b3, integer_sum
from tests.damage import artifact, bits, outcome, parts, verdict
from tests.reference import parse_set, reference_restore
from tests.requirements import covers

QUALITY = "near-lossless"
TRACK = "near-lossless/stored"
ONE = {"tracks": (TRACK,)}
N, H, D, SCALES = 3, 2, 4, 33  # set 0: three layers of group 0
PLACES = {
    "scale": 16,
    "zero": 16 + 4 * N,
    "bias": 16 + 6 * N,
    "order": 16 + 6 * N + 4 * N * H * D,
    "token_scale": 16 + 6 * N + 5 * N * H * D,
}
NAN, INF, TINY = 0x7FC00000, 0x7F800000, 1


def test_the_set_is_as_expected() -> None:
    data = parts(**ONE).sets[QUALITY][0].data
    assert struct.unpack_from("<HHIIHH", data) == (N, 12, H, D, SCALES, 0)
    assert len(data) == PLACES["token_scale"] + 4 * SCALES


def with_set(data: bytes) -> bytes:
    """An artifact whose first set is ``data``."""
    builder = parts(**ONE)
    builder.sets[QUALITY][0].data = data
    return builder.build()


def patched(place: int, new: bytes) -> bytes:
    """An artifact with other bytes in its first set."""
    data = parts(**ONE).sets[QUALITY][0].data
    return with_set(data[:place] + new + data[place + len(new) :])


def refused(file: bytes, code: str) -> None:
    """Reading and verification both give ``code``."""
    assert outcome(file, TRACK) == code
    assert verdict(file) == code


def accepted(file: bytes) -> None:
    """Verification accepts, and reading gives what the reference gives."""
    assert verdict(file) == "ok"
    expected = {name: array.tobytes() for name, array in reference_restore(file)[TRACK].items()}
    assert outcome(file, TRACK) == expected


# --- quantisation sets -----------------------------------------------------------------------


@covers("SET-1", "SET-2", "SET-3", "SET-7")
@pytest.mark.parametrize(
    ("place", "new", "code"),
    [
        (0, b"\2\0", "set.content"),
        (0, b"\0\0", "set.content"),
        (2, b"\x1c\0", "set.content"),
        (2, b"\x0c\x80", "set.content"),
        (2, b"\x04\0", "set.content"),
        (2, b"\x08\0", "set.content"),
        (2, b"\x0d\0", "set.content"),
        (2, b"\x0e\0", "set.content"),
        (4, b"\1\0\0\0", "set.content"),
        (4, b"\xff\xff\xff\xff", "set.content"),
        (8, b"\3\0\0\0", "set.content"),
        (8, b"\xff\xff\xff\xff", "set.content"),
        (12, b"\x22\0", "set.content"),
        (12, b"\x20\0", "set.content"),
        (12, b"\0\1", "set.content"),
        (12, b"\1\1", "limit.exceeded"),
        (12, b"\xff\xff", "limit.exceeded"),
        (14, b"\1\0", "set.content"),
        (14, b"\0\x80", "set.content"),
    ],
)
def test_head_of_a_set(place: int, new: bytes, code: str) -> None:
    refused(patched(place, new), code)


@covers("SET-3")
@pytest.mark.parametrize("change", [-1, -4, 1, 4])
def test_length_of_a_set(change: int) -> None:
    data = parts(**ONE).sets[QUALITY][0].data
    refused(with_set(data[:change] if change < 0 else data + bytes(change)), "set.content")


OUT_OF_RANGE = [
    bits(0.0), bits(-0.0), bits(-1.0), bits(2.0**-41), bits(2.0**41), bits(1e-38), bits(3e38),
    bits(np.nextafter(np.float32(2**40), np.float32(np.inf))),
    bits(np.nextafter(np.float32(2.0**-40), np.float32(0))), bits(-(2.0**-40)),
    *(struct.pack("<I", code) for code in (NAN, NAN | 1 << 31, INF, INF | 1 << 31, TINY, INF | 1)),
]  # fmt: skip


@covers("SET-4")
@pytest.mark.parametrize("value", OUT_OF_RANGE, ids=bytes.hex)
@pytest.mark.parametrize("field", ["scale", "token_scale"])
def test_scales_out_of_range(field: str, value: bytes) -> None:
    refused(patched(PLACES[field] + 8, value), "set.content")


@covers("SET-4")
@pytest.mark.parametrize("value", [2.0**-40, 2.0**40, 1.0])
@pytest.mark.parametrize("field", ["scale", "token_scale"])
def test_scales_at_the_ends(field: str, value: float) -> None:
    accepted(patched(PLACES[field] + 8, bits(value)))


@covers("SET-5")
@pytest.mark.parametrize(
    "value",
    [
        bits(-0.0), bits(2.0**-65), bits(-(2.0**-65)), bits(2.0**97), bits(-(2.0**97)), bits(1e-45),
        bits(np.nextafter(np.float32(2.0**96), np.float32(np.inf))),
        bits(np.nextafter(np.float32(2.0**-64), np.float32(0))),
        *(struct.pack("<I", code) for code in (NAN, INF, INF | 1 << 31, INF | 1, TINY)),
    ],
    ids=bytes.hex,
)  # fmt: skip
def test_biases_out_of_range(value: bytes) -> None:
    refused(patched(PLACES["bias"] + 20, value), "set.content")


@covers("SET-5", "ARI-2")
@pytest.mark.parametrize("value", [0.0, 2.0**-64, -(2.0**-64), 2.0**96, -(2.0**96)])
def test_biases_at_the_ends(value: float) -> None:
    accepted(patched(PLACES["bias"] + 20, bits(value)))


@covers("SET-6")
@pytest.mark.parametrize(
    "order", [[0, 0, 1, 2], [0, 1, 2, 4], [255, 1, 2, 3], [0, 0, 0, 0], [1, 2, 3, 4]], ids=str
)
def test_orders_that_are_no_permutation(order: list[int]) -> None:
    refused(patched(PLACES["order"] + 8, bytes(order)), "set.content")


@covers("SET-6")
@pytest.mark.parametrize("dims", [256, 257])
@pytest.mark.parametrize("track", [TRACK, "near-lossless/zstd"])
def test_order_is_wider_above_256_dims(dims: int, track: str) -> None:
    from tests.strategies import canonical_kv, write_bytes

    kv = canonical_kv(1, 5, 1, dims)
    builder = Builder(write_bytes(kv, tracks=[track]))
    data = builder.sets[QUALITY][0].data
    size = 1 if dims == 256 else 2
    assert len(data) == 16 + 6 + 4 * dims + size * dims + 4 * SCALES
    order = parse_set(data).order
    assert order is not None
    assert sorted(order.ravel()) == list(range(dims))
    place = 16 + 6 + 4 * dims
    swapped = data[: place + size] + data[place : place + size] + data[place + 2 * size :]
    builder.sets[QUALITY][0].data = swapped
    assert outcome(builder.build(), track) == "set.content"


@covers("SET-1", "SET-3", "ARI-3", "SID-1")
@pytest.mark.parametrize("flags", [0, 1, 2, 3, 4, 7, 8, 12, 15])
@pytest.mark.parametrize("scales", [0, 1, 256])
def test_every_form_of_a_set(flags: int, scales: int) -> None:
    rng = np.random.default_rng(flags)
    builder = parts(**ONE)
    for item in builder.sets[QUALITY]:
        layers, _, heads, dims = struct.unpack_from("<HHII", item.data)
        full, each = layers * heads * dims, layers

        def floats(count: int) -> bytes:
            return rng.uniform(0.1, 2, count).astype("<f4").tobytes()

        order = np.argsort(rng.random((layers, heads, dims)), axis=-1).astype(np.uint8)
        zero = rng.integers(-300, 300, full if flags & 2 else each).astype("<i2")
        item.data = struct.pack("<HHIIHH", layers, flags, heads, dims, scales, 0)
        item.data += floats(full if flags & 1 else each) + zero.tobytes()
        item.data += floats(full) if flags & 4 else b""
        item.data += order.tobytes() if flags & 8 else b""
        item.data += floats(scales)
    for item in builder.segments[TRACK]:
        group = builder.manifest["groups"][item.record["group"]]
        shape = [item.record[f"{key}_count"] for key in ("layer", "token", "head")]
        index = rng.integers(0, max(scales, 1), shape[0] * shape[1]).astype(np.uint8)
        item.side = (index.tobytes() if scales else b"") + bytes(4 * shape[0])
        integers = rng.integers(0, 256, (*shape, group["head_dim"]), np.uint8).tobytes()
        item.payload = integers
        item.record["integer_digest"] = b3(integers)
        item.record["integer_sum"] = integer_sum(integers)
    accepted(builder.build())


# --- side blocks -----------------------------------------------------------------------------


TOKENS = 6
INDEX = N * TOKENS
ROW = H * D * 2


def side() -> tuple[bytes, list[tuple[list[int], bytes]]]:
    """Index and patches of segment 0."""
    data = parts(**ONE).segments[TRACK][0].side
    place, patches = INDEX, []
    for _ in range(N):
        (count,) = struct.unpack_from("<I", data, place)
        ordinals = list(struct.unpack_from(f"<{count}I", data, place + 4))
        place += 4 + 4 * count
        patches.append((ordinals, data[place : place + count * ROW]))
        place += count * ROW
    assert place == len(data)
    return data[:INDEX], patches


def packed(index: bytes, patches: list[tuple[list[int], bytes]], counts: Any = None) -> bytes:
    """A side block."""
    data = index
    for number, (ordinals, rows) in enumerate(patches):
        count = len(ordinals) if counts is None else counts[number]
        data += struct.pack(f"<I{len(ordinals)}I", count, *ordinals) + rows
    return data


def with_side(data: bytes) -> bytes:
    builder = parts(**ONE)
    builder.segments[TRACK][0].side = data
    return builder.build()


def test_the_side_block_is_as_expected() -> None:
    index, patches = side()
    assert [ordinals for ordinals, _ in patches] == [[0, 1, 2, 3]] * N
    assert packed(index, patches) == parts(**ONE).segments[TRACK][0].side
    accepted(with_side(packed(index, patches)))


@covers("SID-1", "ORD-3")
def test_length_of_a_side_block() -> None:
    good = packed(*side())
    for size in (0, 1, INDEX - 1, INDEX, INDEX + 3, INDEX + 4, len(good) - 1):
        refused(with_side(good[:size]), "segment.side")
    refused(with_side(good + b"\0"), "segment.side")
    refused(with_side(good + bytes(4)), "segment.side")


@covers("SID-2")
@pytest.mark.parametrize("value", [SCALES, 255])
def test_token_scale_index_out_of_range(value: int) -> None:
    index, patches = side()
    for place in (4, INDEX - 1):
        bad = index[:place] + bytes([value]) + index[place + 1 :]
        refused(with_side(packed(bad, patches)), "segment.side")


@covers("SID-3")
@pytest.mark.parametrize(
    "ordinals",
    [[1, 0, 2, 3], [0, 0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 6], [0, 1, 2, 2**32 - 1], [3, 2, 1, 0],
     [2**31, 1, 2, 3]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("layer", [0, 2])
def test_ordinals_ascend_inside_the_segment(ordinals: list[int], layer: int) -> None:
    index, patches = side()
    patches[layer] = (ordinals, patches[layer][1])
    refused(with_side(packed(index, patches)), "segment.side")


@covers("SID-1", "SID-3", "ORD-4", "SEC-3")
@pytest.mark.parametrize("count", [0, 3, 5, 7, 2**31, 2**32 - 1])
def test_number_of_patches(count: int) -> None:
    index, patches = side()
    refused(with_side(packed(index, patches, [count, 4, 4])), "segment.side")
    refused(with_side(packed(index, patches, [4, 4, count])), "segment.side")


@covers("SID-4", "VER-1")
def test_token_scale_index_at_a_patch() -> None:
    index, patches = side()
    assert index[0] == 0
    file = with_side(packed(b"\1" + index[1:], patches))
    assert verdict(file) == "segment.side"
    assert outcome(file, TRACK) == outcome(artifact(**ONE), TRACK)


@covers("SID-4", "VER-1", "INT-1")
def test_integers_at_a_patch() -> None:
    builder = parts(**ONE)
    item = builder.segments[TRACK][0]
    assert item.payload[0] == 128
    item.payload = b"\x7f" + item.payload[1:]
    item.record["integer_digest"] = b3(item.payload)
    item.record["integer_sum"] = integer_sum(item.payload)
    file = builder.build()
    assert verdict(file) == "segment.side"
    assert outcome(file, TRACK) == outcome(artifact(**ONE), TRACK)


@covers("SID-5", "VER-6")
@pytest.mark.parametrize("code", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_patches_hold_finite_values(code: int) -> None:
    index, patches = side()
    rows = patches[1][1]
    patches[1] = (patches[1][0], rows[:10] + struct.pack("<H", code) + rows[12:])
    assert verdict(with_side(packed(index, patches))) == "segment.side"


@covers("SID-1", "SID-3", "ARI-5")
def test_other_patches_are_applied() -> None:
    index, patches = side()
    builder = parts(**ONE)
    item = builder.segments[TRACK][0]
    patches[1] = ([], b"")
    patches[2] = (list(range(TOKENS)), bytes(range(TOKENS * ROW)))
    index = index[: 2 * TOKENS] + bytes(TOKENS)
    item.side = packed(index, patches)
    layer = TOKENS * H * D
    item.payload = item.payload[: 2 * layer] + b"\x80" * layer
    item.record["integer_digest"] = b3(item.payload)
    item.record["integer_sum"] = integer_sum(item.payload)
    file = builder.build()
    accepted(file)
    restored = reference_restore(file)[TRACK]["keys"]
    assert restored[2, :TOKENS].tobytes() == patches[2][1]


# --- integers --------------------------------------------------------------------------------


@covers("STO-1")
@pytest.mark.parametrize("change", [-1, 1, 4096])
@pytest.mark.parametrize("track", [TRACK, "exact/stored"])
def test_length_of_stored_payloads(track: str, change: int) -> None:
    builder = parts(tracks=(track,))
    item = builder.segments[track][0]
    item.payload = item.payload[:change] if change < 0 else item.payload + bytes(change)
    file = builder.build()
    assert outcome(file, track) == "segment.payload"
    assert verdict(file) == "segment.payload"


@covers("INT-1", "INT-2", "VER-1")
@pytest.mark.parametrize("track", [TRACK, "near-lossless/zstd", "near-lossless/hevc", "exact/zstd"])
def test_the_integer_digest_is_compared(track: str) -> None:
    builder = parts(tracks=(track,))
    builder.segments[track][4].record["integer_digest"] = b3(b"something else")
    file = builder.build()
    assert outcome(file, track) == "segment.integers"
    assert verdict(file) == "segment.integers"


@covers("INT-3", "INT-4", "VER-1")
@pytest.mark.parametrize("track", [TRACK, "near-lossless/zstd", "near-lossless/hevc", "exact/zstd"])
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_the_integer_sum_is_compared(track: str, bit: int) -> None:
    builder = parts(tracks=(track,))
    builder.segments[track][4].record["integer_sum"] ^= 1 << bit
    assert verdict(builder.build()) == "segment.integers"


@covers("INT-3")
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 140_001])
@pytest.mark.parametrize("value", [None, 0, 255])
def test_the_integer_sum_is_that_of_the_formula(size: int, value: int | None) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    if value is not None:
        data[:] = value
    assert sums.integer_sum(data) == integer_sum(data.tobytes())


@covers("INT-3")
def test_one_wrong_integer_is_always_seen() -> None:
    assert all(int(item) % 2 for item in sums.factors(0, 3 * sums.ROW))
    data = np.zeros(2 * sums.ROW, np.uint8)
    found = set()
    for place in (0, 1, sums.ROW - 1, sums.ROW, 2 * sums.ROW - 1):
        for value in (1, 128, 255):
            data[place] = value
            found.add(sums.integer_sum(data))
            data[place] = 0
    assert len(found) == 15 and 0 not in found


@covers("INT-1", "INT-2")
@pytest.mark.parametrize("track", [TRACK, "exact/stored"])
def test_other_integers_are_noticed(track: str) -> None:
    builder = parts(tracks=(track,))
    item = builder.segments[track][0]
    item.payload = item.payload[:-1] + bytes([item.payload[-1] ^ 1])
    file = builder.build()
    assert outcome(file, track) == "segment.integers"
    assert verdict(file) == "segment.integers"
