"""Calibration profiles: bytes to frozen dataclasses and back (spec section 9.6). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat import strictjson
from kvformat.digests import Buffer, digest
from kvformat.errors import InvalidError, KvformatError
from kvformat.fields import Node
from kvformat.groups import Group
from kvformat.header import HEADER_BYTES, Header, parse_header
from kvformat.identity import Identity, Model
from kvformat.manifest import TRANSFORM_KLT, VERSION, Extension, require_known
from kvformat.sets import BIAS_RANGE
from kvformat.transforms import ROW_BUDGET, LayerTransform, Rotation

MAGIC: Final = b"\x89KVP\r\n\x1a\n"
FORMAT: Final = "kvformat-profile"
LARGEST_CHANNELS: Final = 16_384
ROW_SCALE_RANGE: Final = (2.0**-40, 2.0**22)
LARGEST_TURN: Final = 1 + 2.0**-40
DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"int16": np.dtype("<i2"), "int32": np.dtype("<i4")}
PAIRINGS: Final = ("none", "half", "interleaved")
_KEYS: Final = (
    "data_bytes",
    "extensions",
    "features",
    "format",
    "generator",
    "model",
    "transforms",
    "version",
    "writer",
)
_TRANSFORM_KEYS: Final = (
    "digest",
    "dtype",
    "head_dim",
    "head_start",
    "heads",
    "heads_total",
    "layer",
    "pairing",
    "pairs",
    "quality",
    "role",
)


@dataclass(frozen=True, slots=True)
class TransformRecord:
    """What the manifest says of one transform, and where its object lies in the data."""

    quality: str
    role: str
    layer: int
    heads: int
    heads_total: int
    head_start: int
    head_dim: int
    pairing: str
    pairs: int
    dtype: str
    digest: str = ""
    offset: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """Quality, role and layer, by which records are ordered and found."""
        return self.quality, self.role, self.layer

    @property
    def channels(self) -> int:
        """C."""
        return self.heads * self.head_dim

    @property
    def size_bytes(self) -> int:
        """Length of the object."""
        matrix_bytes = self.channels**2 * DTYPES[self.dtype].itemsize
        return 8 * self.channels + 16 * self.pairs + matrix_bytes

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {key: getattr(self, key) for key in _TRANSFORM_KEYS}


@dataclass(frozen=True, slots=True)
class Profile:
    """A checked profile with its data; objects are checked when they are used."""

    model: Model
    records: tuple[TransformRecord, ...]
    writer: bytes
    digest: str
    data: Buffer
    generator: str = ""

    def transform(
        self, quality: str, group: Group, layer: int, identity: Identity
    ) -> LayerTransform:
        """The matrices for a global layer of a group in a quality (TRF-5, PRF-3 to PRF-5)."""
        where = f"profile {self.digest[:12]}, {quality} {group.role} of layer {layer}"
        key = (quality, group.role, layer)
        item = next((record for record in self.records if record.key == key), None)
        if item is None:
            raise content("the profile has no such transform", where)
        wanted = (group.heads, group.heads_total, group.head_start, group.head_dim)
        found = (item.heads, item.heads_total, item.head_start, item.head_dim)
        if wanted != found:
            raise content("the transform is for another shape", where, wanted, found)
        if item.pairs:
            _check_rope(identity, item, where)
        return self.matrices(item, where)

    def matrices(self, item: TransformRecord, where: str) -> LayerTransform:
        """The object of a record, checked."""
        raw = memoryview(self.data)[item.offset : item.offset + item.size_bytes]
        if digest(raw).hex() != item.digest:
            raise content("the transform is damaged", where, item.digest, digest(raw).hex())
        count, n = item.channels, item.pairs
        mean, row_scale = np.frombuffer(raw, "<f4", 2 * count).reshape(2, count).astype(np.float32)
        turns = np.frombuffer(raw, "<f8", 2 * n, 8 * count).reshape(2, n).astype(np.float64)
        matrix = np.frombuffer(raw, DTYPES[item.dtype], count * count, 8 * count + 16 * n)
        matrix = matrix.reshape(count, count)
        rows = np.abs(matrix.astype(np.int64)).sum(axis=1)
        size = np.abs(mean)
        good = (
            (rows <= ROW_BUDGET).all()
            and ((row_scale >= ROW_SCALE_RANGE[0]) & (row_scale <= ROW_SCALE_RANGE[1])).all()
            and ((mean.view(np.uint32) == 0) | (size >= BIAS_RANGE[0])).all()
            and (size <= BIAS_RANGE[1]).all()
            and (np.abs(turns) <= 1).all()
            and (turns[0] * turns[0] + turns[1] * turns[1] <= LARGEST_TURN).all()
        )
        if not good:
            raise content("a number of the transform is out of range", where)
        rotation = Rotation(item.pairing, turns[0], turns[1]) if n else None
        slots = np.ascontiguousarray(matrix.T, np.float32)
        return LayerTransform(mean, row_scale, slots, rotation)


def content(
    message: str, where: str, expected: object = None, found: object = None
) -> InvalidError:
    """The error ``profile.content``."""
    return InvalidError(
        "profile.content",
        message,
        where=where,
        expected=expected,
        found=found,
        next_step="Use the profile that the artifact was written with",
    )


def _check_rope(identity: Identity, item: TransformRecord, where: str) -> None:
    rope = next((found for found in identity.rope if item.layer in found.layers), None)
    if rope is None or not rope.keys_rotated:
        raise content("the artifact does not say how this layer is rotated", where)
    found = (rope.pairing, len(rope.inv_freq) // 8)
    if found != (item.pairing, item.pairs):
        raise content(
            "the artifact's layer is rotated in another way",
            where,
            (item.pairing, item.pairs),
            found,
        )


def check_model(profile: Profile, model: Model) -> None:
    """TRF-5."""
    same = profile.model.id == model.id
    digests = {profile.model.weights_digest, model.weights_digest} - {None}
    if not same or len(digests) > 1:
        raise content(
            "the profile is of another model",
            f"profile {profile.digest[:12]}",
            model.id,
            profile.model.id,
        )


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform to store: ``matrix`` integers ``[C, C]``, row c for channel c."""

    record: TransformRecord
    mean: NDArray[np.float32]
    row_scale: NDArray[np.float32]
    matrix: NDArray[np.integer[Any]]
    cosine: NDArray[np.float64]
    sine: NDArray[np.float64]

    def to_bytes(self) -> bytes:
        """The stored object."""
        parts: tuple[tuple[NDArray[Any], np.dtype[Any]], ...] = (
            (self.mean, np.dtype("<f4")),
            (self.row_scale, np.dtype("<f4")),
            (self.cosine, np.dtype("<f8")),
            (self.sine, np.dtype("<f8")),
            (self.matrix, DTYPES[self.record.dtype]),
        )
        return b"".join(array.astype(dtype).tobytes() for array, dtype in parts)


def build(
    model: Model, transforms: Sequence[Transform], *, writer: bytes = b"", generator: str
) -> bytes:
    """The bytes of a profile."""
    objects: list[bytes] = []
    records: list[dict[str, Any]] = []
    for item in sorted(transforms, key=lambda item: item.record.key):
        raw = item.to_bytes()
        objects.append(raw)
        records.append({**item.record.to_json(), "digest": digest(raw).hex()})
    objects.append(writer)
    data = b"".join(objects)
    manifest = strictjson.serialise(
        {
            "data_bytes": len(data),
            "extensions": {},
            "features": [TRANSFORM_KLT],
            "format": FORMAT,
            "generator": generator,
            "model": model.to_json(),
            "transforms": records,
            "version": VERSION,
            "writer": {"bytes": len(writer), "digest": digest(writer).hex()},
        }
    )
    total = HEADER_BYTES + len(manifest) + len(data)
    return Header(total, len(manifest), 0, digest(manifest)).to_bytes(MAGIC) + manifest + data


def parse_profile(data: Buffer) -> Profile:
    """The profile in ``data``, refused in the order of ORD-1; raises ``profile.content``."""
    header = parse_header(data, MAGIC)
    view = memoryview(data)
    if len(view) != header.file_bytes:
        raise InvalidError(
            "file.size", "the profile is truncated", expected=header.file_bytes, found=len(view)
        )
    raw = bytes(view[HEADER_BYTES : header.tables_start])
    if digest(raw) != header.manifest_digest:
        raise InvalidError("manifest.digest", "the profile's manifest is damaged", where="byte 128")
    try:
        return _parse(raw, view[header.front_bytes :], header)
    except KvformatError as error:
        if error.code in ("manifest.schema", "manifest.semantics", "limit.exceeded"):
            raise content(
                error.message, f"profile, {error.where}", error.expected, error.found
            ) from error
        raise


def _parse(raw: bytes, data: memoryview, header: Header) -> Profile:
    value = strictjson.parse(raw)
    require_known(value)
    m = Node(value).members(*_KEYS)
    m["format"].choice(FORMAT)
    m["version"].choice(VERSION)
    features = m["features"].each(lambda item: item.choice(TRANSFORM_KLT))
    if features != (TRANSFORM_KLT,):
        raise content("the features of a profile", "/features", [TRANSFORM_KLT], list(features))
    for item in m["extensions"].mapping().values():
        Extension.parse(item)
    records: list[TransformRecord] = []
    cursor = 0
    for found in m["transforms"].each(_record):
        if found.channels > LARGEST_CHANNELS:
            raise content("too many channels", found.role, LARGEST_CHANNELS, found.channels)
        if records and records[-1].key >= found.key:
            raise content("transforms out of order", f"{found.role} of layer {found.layer}")
        least = 0 if found.pairing == "none" else 1
        bound = found.head_dim // 2 if found.pairing != "none" else 0
        if not least <= found.pairs <= bound:
            raise content(
                "an impossible number of pairs", found.role, f"up to {bound}", found.pairs
            )
        placed = replace(found, offset=cursor)
        records.append(placed)
        cursor += placed.size_bytes
    last = m["writer"].members("bytes", "digest")
    size = last["bytes"].integer()
    stated = m["data_bytes"].integer()
    if not cursor + size == stated == len(data) or header.tables_bytes:
        raise content("the data has another length", "profile", cursor + size, len(data))
    writer = bytes(data[cursor:])
    if digest(writer).hex() != last["digest"].digest():
        raise content("the writer's part is damaged", "profile")
    return Profile(
        Model.parse(m["model"]),
        tuple(records),
        writer,
        header.manifest_digest.hex(),
        data,
        m["generator"].text(),
    )


def _record(node: Node) -> TransformRecord:
    m = node.members(*_TRANSFORM_KEYS)
    return TransformRecord(
        m["quality"].name(),
        m["role"].name(),
        m["layer"].integer(),
        m["heads"].integer(1, "heads"),
        m["heads_total"].integer(1, "heads"),
        m["head_start"].integer(),
        m["head_dim"].integer(1, "head_dim"),
        m["pairing"].choice(*PAIRINGS),
        m["pairs"].integer(),
        m["dtype"].choice(*DTYPES),
        m["digest"].digest(),
    )
