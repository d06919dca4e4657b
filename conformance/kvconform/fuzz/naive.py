"""A reader straight from the text of the specification: whole valid files, slow, no checks.

Independent of ``compose``: it starts from the bytes of the file. All arithmetic is binary32, one
operation at a time; rounding to a small dtype is a search in the list of all its values.
"""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from kvconform.fuzz import video
from kvconform.judge import ITEM_BYTES

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Json = dict[str, Any]
_SHAPES: Final = {  # exponent bits, mantissa bits, code of the largest finite value
    "float16": (5, 10, 0x7BFF),
    "bfloat16": (8, 7, 0x7F7F),
    "float8_e4m3fn": (4, 3, 0x7E),
    "float8_e5m2": (5, 2, 0x7B),
}


@dataclass(frozen=True)
class Restored:
    """What a reader must find: digests and, by track and group, bytes ``[L, T, H, D * item]``."""

    manifest: Json
    manifest_digest: str
    integers: dict[str, list[str]]
    tensors: dict[str, dict[str, Bytes]]

    def digests(
        self,
        track: str,
        tokens: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> dict[str, str]:
        """What ``decode`` must answer for a selection, cut out of the whole tensors."""
        found = {}
        for group in self.manifest["groups"]:
            part: Bytes = self.tensors[track][group["name"]]
            if layers is not None:
                inside = [layers[0] <= layer < layers[1] for layer in group["layers"]]
                part = part[np.array(inside)]
            if tokens is not None and group["tokens"]["kind"] != "state":
                first = group["tokens"].get("held_start", 0)
                part = part[:, max(tokens[0] - first, 0) : max(tokens[1] - first, 0)]
            if heads is not None:
                part = part[:, :, heads[0] - group["head_start"] : heads[1] - group["head_start"]]
            if len(part):
                found[group["name"]] = blake3(part.tobytes()).hexdigest()
        return found


@functools.cache
def _values(name: str) -> NDArray[np.float64]:
    """All finite values from +0 up; the index is the bit pattern."""
    exponent_bits, mantissa_bits, last = _SHAPES[name]
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    normal = np.where(exponent > 0, 2**mantissa_bits, 0)
    power = np.maximum(exponent, 1) - bias - mantissa_bits
    values: NDArray[np.float64] = np.ldexp((mantissa + normal).astype(np.float64), power)
    return values


def round_to(x: NDArray[np.float32], name: str) -> Array:
    """ARI-4: the bit patterns of clamped and rounded values."""
    if name == "float32":
        return x.view(np.uint32)
    values = _values(name)
    size = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    down, up = size - values[below], values[above] - size
    nearer = np.where(down < up, below, above)
    code = np.where(down == up, below + below % 2, nearer)
    bits = 8 * ITEM_BYTES[name]
    sign = np.signbit(x).astype(np.int64) << (bits - 1)
    patterns: Array = (code | sign).astype(f"<u{bits // 8}")
    return patterns


class _Set:
    """Section 9.2."""

    def __init__(self, raw: bytes) -> None:
        count, flags, heads, dims, scales, _ = struct.unpack_from("<HHIIHH", raw)
        self._raw, self._place = raw, 16
        full, each = (count, heads, dims), (count, 1, 1)
        self.scale = self._take("<f4", full if flags & 1 else each)
        self.zero = self._take("<i2", full if flags & 2 else each)
        self.bias = self._take("<f4", full) if flags & 4 else None
        self.order = self._take("u1" if dims <= 256 else "<u2", full) if flags & 8 else None
        self.token_scale = self._take("<f4", (scales,))

    def _take(self, kind: str, shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape))
        values = np.frombuffer(self._raw, kind, count, self._place).reshape(shape)
        self._place += values.nbytes
        return values


@dataclass(frozen=True)
class _Segment:
    """One record and its bytes; ``shape`` is ``[layer, token, head, dim]`` of the group."""

    shape: tuple[int, int, int, int]
    dtype: str
    codec: str
    layout: Json | None
    side: bytes
    payload: bytes
    head_start: int

    def rows(self, count: int) -> Bytes:
        """Rows of section 10.3 as ``[count, token]``."""
        tokens = self.shape[1]
        (frames,) = struct.unpack_from("<I", self.payload)
        place = 4 + 10 * frames
        found: list[Array] = []
        for index in range(frames):
            rows, size, low, radix = struct.unpack_from("<IIBB", self.payload, 4 + 10 * index)
            radix += 1
            per_byte = next(p for p in (8, 5, 4, 3, 2, 1) if radix**p <= 256 or radix == 1)
            width = -(-tokens // per_byte)
            frame = self.payload[place : place + size]
            content = zstandard.ZstdDecompressor().decompress(frame)
            left = np.frombuffer(content, np.uint8).reshape(rows, width).astype(np.int64)
            values = np.zeros((rows, width, per_byte), np.uint8)
            for digit in range(per_byte):
                values[..., digit] = left % radix + low
                left //= radix
            found.append(values.reshape(rows, -1)[:, :tokens])
            place += size
        return np.concatenate(found).reshape(count, tokens)

    def exact(self) -> Bytes:
        """``[layer, token, head, dim, byte]``."""
        layers, tokens, heads, dims = self.shape
        size = ITEM_BYTES[self.dtype]
        if self.codec == "stored":
            return np.frombuffer(self.payload, np.uint8).reshape(*self.shape, size)
        rows = self.rows(layers * size * dims * heads)
        return rows.reshape(layers, size, dims, heads, tokens).transpose(0, 4, 3, 2, 1)

    def integers(self, item: _Set) -> Bytes:
        """``[layer, token, head, dim]`` in original dim order."""
        layers, tokens, heads, dims = self.shape
        if self.codec == "stored":
            return np.frombuffer(self.payload, np.uint8).reshape(self.shape)
        if self.codec == "zstd":
            rows = self.rows(layers * dims * heads)
            ranked = rows.reshape(layers, dims, heads, tokens).transpose(0, 3, 2, 1)
        else:
            assert self.layout is not None
            planes = video.decode(self.payload)
            columns = video.columns_of(planes, self.layout, layers, tokens, heads * dims)
            ranked = columns.reshape(self.shape)
        if item.order is None:
            return ranked
        result = np.empty(self.shape, np.uint8)
        for layer in range(layers):
            for head in range(heads):
                for rank in range(dims):
                    dim = item.order[layer, self.head_start + head, rank]
                    result[layer, :, head, dim] = ranked[layer, :, head, rank]
        return result

    def restore(self, item: _Set, q: Bytes) -> Bytes:
        """Sections 9.3 and 9.4: bytes ``[layer, token, head, dim * item]``."""
        layers, tokens, heads, _ = self.shape

        def mine(values: Array) -> Array:
            """A parameter of the set for this segment's heads."""
            if values.shape[1] > 1:
                values = values[:, self.head_start : self.head_start + heads]
            return values[:, None]

        x = (q.astype(np.int32) - mine(item.zero).astype(np.int32)).astype(np.float32)
        x = x * mine(item.scale)
        place = 0
        if len(item.token_scale):
            place = layers * tokens
            index = np.frombuffer(self.side, np.uint8, place).reshape(layers, tokens)
            x = x * item.token_scale[index][:, :, None, None]
        if item.bias is not None:
            x = x + mine(item.bias)
        assert x.dtype == np.float32
        codes = np.ascontiguousarray(round_to(x, self.dtype))
        out = codes.view(np.uint8).reshape(layers, tokens, heads, -1)
        row = heads * out.shape[3]
        for layer in range(layers):
            (count,) = struct.unpack_from("<I", self.side, place)
            where = struct.unpack_from(f"<{count}I", self.side, place + 4)
            place += 4 + 4 * count
            for token in where:
                patch = np.frombuffer(self.side, np.uint8, row, place)
                out[layer, token] = patch.reshape(heads, -1)
                place += row
        assert place == len(self.side)
        return out


def restore(file: bytes) -> Restored:
    """Everything that a valid artifact holds."""
    manifest_bytes, tables_bytes = struct.unpack_from("<QQ", file, 56)
    text = file[128 : 128 + manifest_bytes]
    manifest = json.loads(text)
    place, alignment = 128 + manifest_bytes, manifest["segmentation"]["alignment"]
    data = file[-(-(place + tables_bytes) // alignment) * alignment :]
    sets: dict[str, list[_Set]] = {}
    for quality in manifest["qualities"]:
        mine = sets.setdefault(quality["name"], [])
        for _ in range(quality["sets"]):
            start, length = struct.unpack_from("<QQ", file, place)
            mine.append(_Set(data[start : start + length]))
            place += 64
    integers: dict[str, list[str]] = {}
    tensors: dict[str, dict[str, Bytes]] = {}
    for track in manifest["tracks"]:
        tensors[track["name"]] = {g["name"]: _empty(manifest, g) for g in manifest["groups"]}
        digests = integers.setdefault(track["name"], [])
        for _ in range(track["segments"]):
            record = file[place : place + 128]
            digests.append(
                _segment(
                    (manifest, track), record, data, sets[track["quality"]], tensors[track["name"]]
                )
            )
            place += 128
    return Restored(manifest, blake3(text).hexdigest(), integers, tensors)


def _empty(manifest: Json, group: Json) -> Bytes:
    held = group["tokens"]
    tokens = manifest["tokens"]["count"] - held.get("held_start", 0)
    if held["kind"] == "state":
        tokens = 1
    size = group["head_dim"] * ITEM_BYTES[group["dtype"]]
    return np.zeros((len(group["layers"]), tokens, group["heads"], size), np.uint8)


def _segment(
    where: tuple[Json, Json],
    record: bytes,
    data: bytes,
    sets: list[_Set],
    tensors: dict[str, Bytes],
) -> str:
    """Restore one segment of a manifest's track; returns the digest of its integers."""
    manifest, track = where
    fields = struct.unpack("<QQIIQIHHHHII", record[:52])
    offset, stored, side, set_index, start, count, number, first, layers, layout = fields[:10]
    head, heads = fields[10:]
    group = manifest["groups"][number]
    item = _Segment(
        (layers, count, heads, group["head_dim"]),
        group["dtype"],
        track["codecs"][number],
        None if layout == 2**16 - 1 else track["layouts"][layout],
        data[offset : offset + side],
        data[offset + side : offset + stored],
        head,
    )
    if set_index == 2**32 - 1:
        source = item.exact()
        values, raw = source, np.ascontiguousarray(source).reshape(layers, count, heads, -1)
    else:
        values = item.integers(sets[set_index])
        raw = item.restore(sets[set_index], values)
    token = start - group["tokens"].get("held_start", 0)
    target = tensors[group["name"]]
    target[first : first + layers, token : token + count, head : head + heads] = raw
    return blake3(np.ascontiguousarray(values).tobytes()).hexdigest()
