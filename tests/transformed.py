"""Calibration profiles and transformed groups by hand, from the text of spec 9.5 and 9.6.

Nothing here uses the package: sums are those of Python or numpy integers, binary32 operations are
done in binary64 and rounded one by one (innocuous for one multiplication or addition), and the
rotation uses Python's floats.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Array = NDArray[Any]
Json = dict[str, Any]
MAGIC = b"\x89KVP\r\n\x1a\n"
HEADER = struct.Struct("<QQQ32s24s")
DTYPES = {"int16": "<i2", "int32": "<i4"}
MODEL: Json = {"id": "a model", "revision": None, "weights_digest": None}


def b3(data: bytes) -> bytes:
    """BLAKE3."""
    return blake3(data).digest()


def canonical(value: Any) -> bytes:
    """Section 2.1."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


@dataclass
class Transform:
    """One transform; ``matrix`` integers ``[C, C]``, row c for channel c; ``turns`` [2, n]."""

    quality: str
    role: str
    layer: int
    heads: int
    head_dim: int
    mean: Array
    row_scale: Array
    matrix: Array
    pairing: str = "none"
    turns: Array = field(default_factory=lambda: np.zeros((2, 0)))
    dtype: str = "int16"
    head_start: int = 0
    heads_total: int = 0

    def object(self) -> bytes:
        """The stored object of section 9.6."""
        parts = (
            self.mean.astype("<f4"),
            self.row_scale.astype("<f4"),
            self.turns.astype("<f8"),
            self.matrix.astype(DTYPES[self.dtype]),
        )
        return b"".join(part.tobytes() for part in parts)

    def to_json(self) -> Json:
        """The element of ``transforms``."""
        names = ("dtype", "head_dim", "head_start", "heads", "layer", "pairing", "quality", "role")
        return {
            **{name: getattr(self, name) for name in names},
            "digest": b3(self.object()).hex(),
            "heads_total": self.heads_total or self.head_start + self.heads,
            "pairs": self.turns.shape[1],
        }


def profile_file(
    transforms: Sequence[Transform],
    *,
    model: Json | None = None,
    writer: bytes = b"",
    **members: Any,
) -> bytes:
    """A profile with these transforms in this order; ``members`` replace some of its manifest."""
    data = b"".join(item.object() for item in transforms) + writer
    manifest = {
        "data_bytes": len(data),
        "extensions": {},
        "features": ["transform-klt"],
        "format": "kvformat-profile",
        "generator": "by hand",
        "model": model or MODEL,
        "transforms": [item.to_json() for item in transforms],
        "version": "0.9",
        "writer": {"bytes": len(writer), "digest": b3(writer).hex()},
        **members,
    }
    return assembled(manifest, data)


def assembled(manifest: Json | bytes, data: bytes, **fields: Any) -> bytes:
    """Header, manifest and data; ``fields`` replace fields of the header, its check is right."""
    text = manifest if isinstance(manifest, bytes) else canonical(manifest)
    values = {
        "file_bytes": 128 + len(text) + len(data),
        "manifest_bytes": len(text),
        "tables_bytes": 0,
        "manifest_digest": b3(text),
        "reserved": bytes(24),
        "fixed": MAGIC + struct.pack("<HHI", 0, 9, 128),
        **fields,
    }
    fixed = values.pop("fixed")
    rest = HEADER.pack(*values.values())
    return bytes(fixed + b3(fixed + rest) + rest + text + data)


def cut_profile(file: bytes) -> tuple[Json, bytes]:
    """Manifest and data."""
    (size,) = struct.unpack_from("<Q", file, 56)
    manifest: Json = json.loads(file[128 : 128 + size])
    return manifest, file[128 + size :]


def profile_with(file: bytes, manifest: Json) -> bytes:
    """The same data behind another manifest."""
    return assembled(manifest, cut_profile(file)[1])


def profile_digest(file: bytes) -> str:
    """What an artifact names it by."""
    (size,) = struct.unpack_from("<Q", file, 56)
    return b3(file[128 : 128 + size]).hex()


def read_transforms(file: bytes) -> dict[tuple[str, str, int], Transform]:
    """All transforms of a good profile, by quality, role and layer."""
    manifest, data = cut_profile(file)
    place = 0
    found = {}

    def take(kind: str, *shape: int) -> Array:
        nonlocal place
        values = np.frombuffer(data, kind, int(np.prod(shape)), place).reshape(shape)
        place += values.nbytes
        return values

    for item in manifest["transforms"]:
        count = item["heads"] * item["head_dim"]
        mean, row_scale = take("<f4", count), take("<f4", count)
        turns = take("<f8", 2, item["pairs"])
        matrix = take(DTYPES[item["dtype"]], count, count)
        named = ("quality", "role", "layer", "heads", "head_dim")
        key = (item["quality"], item["role"], item["layer"])
        values = [item[name] for name in named]
        found[key] = Transform(*values, mean, row_scale, matrix, item["pairing"], turns)
    return found


def mul(a: Array, b: Array) -> Array:
    """One binary32 multiplication."""
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64)).astype(np.float32)


def add(a: Array, b: Array) -> Array:
    """One binary32 addition."""
    return (np.asarray(a, np.float64) + np.asarray(b, np.float64)).astype(np.float32)


def turned_by(position: int, cosine: float, sine: float) -> tuple[float, float]:
    """C_p and S_p of section 9.5 in binary64."""
    c, s = float(cosine), float(sine)
    big_c, big_s = 1.0, 0.0
    for bit in range(position.bit_length()):
        if position >> bit & 1:
            big_c, big_s = big_c * c - big_s * s, big_c * s + big_s * c
        c, s = c * c - s * s, c * s + c * s
    return big_c, big_s


def sums(q: Array, matrix: Array) -> Array:
    """a of section 9.5 for q ``[N, H, D]``: int64 ``[N, C]``."""
    slots = q.astype(np.int64).transpose(0, 2, 1).reshape(len(q), len(matrix)) - 128
    return slots @ matrix.astype(np.int64).T


def restore_layer(
    q: Array, transform: Transform, scale: Array, factors: Array | None, first: int
) -> Array:
    """Values float32 ``[N, H, D]`` of integers ``[N, H, D]``, not yet clamped.

    ``factors`` are token scales ``[N]``; ``first`` is the position of the first token.
    """
    z = sums(q, transform.matrix).astype(np.float32)
    z = mul(mul(z, transform.row_scale), scale)
    if factors is not None:
        z = mul(z, factors[:, None])
    x = add(z, transform.mean).reshape(q.shape)
    count = transform.turns.shape[1]
    result = x.copy()
    for token in range(len(q)):
        for pair in range(count):
            u, v = (pair, pair + count) if transform.pairing == "half" else (2 * pair, 2 * pair + 1)
            wide = turned_by(first + token, *transform.turns[:, pair])
            big_c, big_s = np.float32(wide[0]), np.float32(wide[1])
            result[token, :, u] = add(mul(x[token, :, u], big_c), -mul(x[token, :, v], big_s))
            result[token, :, v] = add(mul(x[token, :, v], big_c), mul(x[token, :, u], big_s))
    return result
