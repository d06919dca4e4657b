"""A second reader, written from the text of the spec: slow, whole files only, no checks.

It shares no code with the package but the HEVC decoder. ``reference_restore`` gives the values of
every track; ``restore_values`` is the arithmetic of section 9.4 one operation at a time, each done
in binary64 and rounded to binary32 (innocuous for one multiplication or addition), and
``round_to`` is rounding by search in the list of all values that a dtype has.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import zstandard
from numpy.typing import NDArray

from kvformat.codecs import bitstream
from tests.transformed import read_transforms, restore_layer

Array = NDArray[Any]
SET_RECORD = struct.Struct("<QQ32sHHH10s")
SEGMENT_RECORD = struct.Struct("<QQIIQIHHHHII4sQ32s32s")
SEGMENT_FIELDS = (
    "offset", "stored_bytes", "side_bytes", "set_index", "token_start", "token_count", "group",
    "layer_index", "layer_count", "layout", "head_start", "head_count", "reserved", "integer_sum",
    "digest", "integer_digest",
)  # fmt: skip
SET_FIELDS = ("offset", "bytes", "digest", "group", "layer_index", "layer_count", "reserved")
DTYPES = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint8": np.dtype("u1"),
}
LARGEST = {
    "float32": np.uint32(0x7F7FFFFF).view(np.float32).astype(np.float64),
    "float16": 65504.0,
    "bfloat16": np.uint32(0x7F7F0000).view(np.float32).astype(np.float64),
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


@cache
def finite_values(name: str) -> Array:
    """All finite values from +0 up as binary64; the index is the bit pattern."""
    kind = DTYPES[name]
    codes = np.arange(2 ** (8 * kind.itemsize - 1), dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = codes.view(kind).astype(np.float64)
    return values[: np.flatnonzero(values == LARGEST[name])[0] + 1]


def round_to(x: Array, name: str) -> Array:
    """ARI-4: clamp, round to nearest, ties to even, sign kept; gives bit patterns of the dtype."""
    wide = np.clip(x.astype(np.float64), -LARGEST[name], LARGEST[name])
    if name == "float32":
        return wide.astype(np.float32).view(np.uint32)
    values = finite_values(name)
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(wide)
    code = np.searchsorted(middles, size, side="left")
    tie = middles[np.minimum(code, len(middles) - 1)] == size
    code = np.where(tie, code + code % 2, code)
    kind = DTYPES[name]
    sign = np.signbit(x).astype(np.uint64) << (8 * kind.itemsize - 1)
    return (code.astype(np.uint64) | sign).astype(f"u{kind.itemsize}")


def restore_values(
    q: Array,
    *,
    scale: Array,
    zero: Array,
    bias: Array | None,
    token_scale: Array | None,
    name: str,
) -> Array:
    """ARI-1 to ARI-4 for q ``[L, T, H, D]``; parameters broadcast to ``[L, 1, H, D]``."""
    x = (q.astype(np.int64) - zero.astype(np.int64)).astype(np.float32)
    x = (x.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
    if token_scale is not None:
        wide = token_scale.astype(np.float64)[:, :, None, None]
        x = (x.astype(np.float64) * wide).astype(np.float32)
    if bias is not None:
        x = (x.astype(np.float64) + bias.astype(np.float64)).astype(np.float32)
    return round_to(x, name)


@dataclass
class ParsedSet:
    """The fields of section 9.2; per-layer parameters have shape ``[n, 1, 1]``."""

    scale: Array
    zero: Array
    bias: Array | None
    order: Array | None
    token_scale: Array


def parse_set(raw: bytes) -> ParsedSet:
    """Section 9.2."""
    n, flags, heads, dims, scales, _ = struct.unpack_from("<HHIIHH", raw)
    place = 16

    def take(kind: str, *shape: int) -> Array:
        nonlocal place
        values = np.frombuffer(raw, kind, int(np.prod(shape)), place).reshape(shape)
        place += values.nbytes
        return values

    full = (n, heads, dims)
    scale = take("<f4", *(full if flags & 1 else (n, 1, 1)))
    zero = take("<i2", *(full if flags & 2 else (n, 1, 1)))
    bias = take("<f4", *full) if flags & 4 else None
    order = take("u1" if dims <= 256 else "<u2", *full) if flags & 8 else None
    return ParsedSet(scale, zero, bias, order, take("<f4", scales))


def zstd_rows(payload: bytes, rows: int, tokens: int) -> Array:
    """Section 10.3: payload to uint8 ``[rows, tokens]``."""
    (count,) = struct.unpack_from("<I", payload)
    place = 4 + 10 * count
    out: list[Array] = []
    for index in range(count):
        held, size, low, radix = struct.unpack_from("<IIBB", payload, 4 + 10 * index)
        radix += 1
        per_byte = {1: 8, 2: 8, 3: 5, 4: 4, 5: 3, 6: 3, 256: 1}.get(radix, 2)
        width = -(-tokens // per_byte)
        content = zstandard.ZstdDecompressor().decompress(payload[place : place + size])
        packed = np.frombuffer(content, np.uint8).reshape(held, width).astype(np.int64)
        digits = np.stack([packed // radix**i % radix for i in range(per_byte)], axis=-1)
        values = digits.reshape(held, width * per_byte)[:, :tokens] + low
        out.append(values.astype(np.uint8))
        place += size
    assert place == len(payload)
    return np.concatenate(out).reshape(rows, tokens)


def hevc_integers(payload: bytes, layout: dict[str, Any], shape: tuple[int, ...]) -> Array:
    """Section 10.4: payload to uint8 ``[layer, token, channel]`` by the formula."""
    layers, tokens, channels = shape
    planes = bitstream.decode_pictures(
        payload, layout["frames"], layout["width"], layout["height"], "reference"
    )
    (fh, fw), (gr, gc), (th, tw) = layout["fold"], layout["grid"], layout["tile"]
    t, k = np.arange(tokens)[:, None], np.arange(channels)[None]
    b, g = t % (fh * fw), t // (fh * fw)
    if layout["order"] == "time":
        f, cell = g % layout["frames"], g // layout["frames"]
    else:
        cell, f = g % (gr * gc), g // (gr * gc)
    y = ((cell // gc) * th + k // tw) * fh + b // fw
    x = ((cell % gc) * tw + k % tw) * fw + b % fw
    return np.stack([planes[f, layer, y, x] for layer in range(layers)])


def integers_of(
    codec: str, payload: bytes, shape: tuple[int, ...], order: Array | None, layout: Any
) -> Array:
    """Integers in original dim order ``[layer, token, head, dim]`` (section 10.1)."""
    layers, tokens, heads, dims = shape
    if codec == "stored":
        return np.frombuffer(payload, np.uint8).reshape(shape)
    if codec == "zstd":
        rows = zstd_rows(payload, layers * dims * heads, tokens)
        ranked = rows.reshape(layers, dims, heads, tokens).transpose(0, 3, 2, 1)
    else:
        ranked = hevc_integers(payload, layout, (layers, tokens, heads * dims)).reshape(shape)
    if order is None:
        return ranked
    out = np.empty(shape, np.uint8)
    for layer in range(layers):
        for head in range(heads):
            out[layer][:, head, order[layer, head]] = ranked[layer][:, head]
    return out


def exact_bytes(codec: str, payload: bytes, shape: tuple[int, ...], size: int) -> Array:
    """Bytes of an exact segment ``[layer, token, head, dim, byte]``."""
    layers, tokens, heads, dims = shape
    if codec == "stored":
        return np.frombuffer(payload, np.uint8).reshape(*shape, size)
    rows = zstd_rows(payload, layers * size * dims * heads, tokens)
    return rows.reshape(layers, size, dims, heads, tokens).transpose(0, 4, 3, 2, 1)


def side_parts(side: bytes, item: ParsedSet, shape: tuple[int, ...], row_bytes: int) -> Any:
    """Section 9.3: token scale per ``[layer, token]`` or None; ordinals and rows per layer."""
    layers, tokens = shape[:2]
    place, factors = 0, None
    if len(item.token_scale):
        index = np.frombuffer(side, np.uint8, layers * tokens).reshape(layers, tokens)
        factors, place = item.token_scale[index], layers * tokens
    patches = []
    for _ in range(layers):
        (count,) = struct.unpack_from("<I", side, place)
        ordinals = np.frombuffer(side, "<u4", count, place + 4)
        place += 4 + 4 * count
        patches.append((ordinals, side[place : place + count * row_bytes]))
        place += count * row_bytes
    assert place == len(side)
    return factors, patches


@dataclass
class Tables:
    """A whole file, cut up."""

    manifest: dict[str, Any]
    sets: dict[str, list[dict[str, Any]]]
    segments: dict[str, list[dict[str, Any]]]
    data: bytes


def cut_up(file: bytes) -> Tables:
    """Sections 4 and 8."""
    manifest_bytes, tables_bytes = struct.unpack_from("<QQ", file, 56)
    manifest = json.loads(file[128 : 128 + manifest_bytes])
    alignment = manifest["segmentation"]["alignment"]
    place = 128 + manifest_bytes
    start = -(-(place + tables_bytes) // alignment) * alignment
    sets: dict[str, list[dict[str, Any]]] = {}
    segments: dict[str, list[dict[str, Any]]] = {}
    for part, record, names, found in (
        ("qualities", SET_RECORD, SET_FIELDS, sets),
        ("tracks", SEGMENT_RECORD, SEGMENT_FIELDS, segments),
    ):
        for item in manifest[part]:
            count = item["sets" if part == "qualities" else "segments"]
            table = file[place : place + count * record.size]
            rows = record.iter_unpack(table)
            found[item["name"]] = [dict(zip(names, row, strict=True)) for row in rows]
            place += count * record.size
    return Tables(manifest, sets, segments, file[start:])


def restored_segment(
    cut: Tables, track: dict[str, Any], row: dict[str, Any], profile: bytes
) -> Array:
    """Raw bytes ``[layer, token, head, dim * itemsize]`` of one segment."""
    group = cut.manifest["groups"][row["group"]]
    kind = DTYPES[group["dtype"]]
    shape = (row["layer_count"], row["token_count"], row["head_count"], group["head_dim"])
    codec = track["codecs"][row["group"]]
    stored = cut.data[row["offset"] : row["offset"] + row["stored_bytes"]]
    side, payload = stored[: row["side_bytes"]], stored[row["side_bytes"] :]
    quality = next(q for q in cut.manifest["qualities"] if q["name"] == track["quality"])
    if quality["encodings"][row["group"]] == "exact":
        raw = exact_bytes(codec, payload, shape, kind.itemsize)
        return np.ascontiguousarray(raw).reshape(*shape[:3], -1)
    where = cut.sets[quality["name"]][row["set_index"]]
    item = parse_set(cut.data[where["offset"] : where["offset"] + where["bytes"]])
    heads = slice(row["head_start"], row["head_start"] + row["head_count"])
    order = None if item.order is None else item.order[:, heads]
    layout = track["layouts"][row["layout"]] if codec == "hevc" else None
    q = integers_of(codec, payload, shape, order, layout)
    factors, patches = side_parts(side, item, shape, shape[2] * shape[3] * kind.itemsize)

    def cut_heads(values: Array | None) -> Array | None:
        if values is None:
            return None
        return (values if values.shape[1] == 1 else values[:, heads])[:, None]

    if quality["encodings"][row["group"]] == "transformed":
        codes = transformed_codes(
            cut, quality["name"], row, q, scales=(item.scale, factors), profile=profile
        )
    else:
        codes = restore_values(
            q,
            scale=cut_heads(item.scale),
            zero=cut_heads(item.zero),
            bias=cut_heads(item.bias),
            token_scale=factors,
            name=group["dtype"],
        )
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(*shape[:3], -1)
    for layer, (ordinals, rows) in enumerate(patches):
        raw[layer, ordinals] = np.frombuffer(rows, np.uint8).reshape(-1, *raw.shape[2:])
    return raw


def transformed_codes(
    cut: Tables,
    quality: str,
    row: dict[str, Any],
    q: Array,
    *,
    scales: tuple[Array, Array | None],
    profile: bytes,
) -> Array:
    """Section 9.5 for a segment's integers; gives bit patterns of the dtype."""
    group = cut.manifest["groups"][row["group"]]
    first = cut.manifest["tokens"]["first_position"] + row["token_start"]
    found = read_transforms(profile)
    layers = group["layers"][row["layer_index"] : row["layer_index"] + row["layer_count"]]
    values = [
        restore_layer(
            q[index],
            found[quality, group["role"], layer],
            scales[0][index, 0, 0],
            None if scales[1] is None else scales[1][index],
            first,
        )
        for index, layer in enumerate(layers)
    ]
    return round_to(np.stack(values), group["dtype"])


def reference_restore(
    file: bytes, profile: bytes = b"", *, only: str = ""
) -> dict[str, dict[str, Array]]:
    """Track name to group name to array ``[L, T, H, D]`` of the group's dtype.

    ``profile`` are the bytes of the calibration profile that transformed groups need; ``only``
    is one track.
    """
    cut = cut_up(file)
    count = cut.manifest["tokens"]["count"]
    result: dict[str, dict[str, Array]] = {}
    for track in cut.manifest["tracks"]:
        if only not in ("", track["name"]):
            continue
        arrays = {}
        for group in cut.manifest["groups"]:
            first, last = held(group, count)
            shape = (len(group["layers"]), last - first, group["heads"], group["head_dim"])
            arrays[group["name"]] = np.zeros(shape, DTYPES[group["dtype"]])
        for row in cut.segments[track["name"]]:
            group = cut.manifest["groups"][row["group"]]
            first = held(group, count)[0]
            out = arrays[group["name"]].view(np.uint8)
            layers = slice(row["layer_index"], row["layer_index"] + row["layer_count"])
            start = row["token_start"] - first
            tokens = slice(start, start + row["token_count"])
            heads = slice(row["head_start"], row["head_start"] + row["head_count"])
            out[layers, tokens, heads] = restored_segment(cut, track, row, profile)
        result[track["name"]] = arrays
    return result


def held(group: dict[str, Any], count: int) -> tuple[int, int]:
    """Token ordinals held by a group (section 7.1)."""
    if group["tokens"]["kind"] == "state":
        return 0, 1
    return group["tokens"].get("held_start", 0), count
