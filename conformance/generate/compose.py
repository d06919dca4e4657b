"""Artifacts made by hand from tensors, integers and sets: nothing here depends on a library's version.

``compose`` gives a ``tests.builder.Builder``, which a case may break before it builds the file.
zstd frames are raw blocks unless a case makes others; HEVC streams are kept files of the suite.
"""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.generate import packages  # noqa: F401 - makes kvconform importable
from tests.builder import Builder, SegmentObject, SetObject, b3, canonical, integer_sum
from tests.reference import DTYPES

# isort: split
from kvconform.fuzz.pieces import (
    NO_LAYOUT,
    NO_SET,
    Array,
    Cell,
    Quant,
    cells_of,
    chain_hashes,
    exact_rows,
    noise,
    pack,
    rows_of,
)

QUALITY = "near-lossless"
STORED, ZSTD, HEVC = f"{QUALITY}/stored", f"{QUALITY}/zstd", f"{QUALITY}/hevc"
EXACT, EXACT_ZSTD = "exact/stored", "exact/zstd"
ALL_TRACKS = (HEVC, ZSTD, STORED, EXACT_ZSTD, EXACT)
IDENTITY: dict[str, Any] = {
    "adapters": [],
    "cache_dtype": "bfloat16",
    "component": "main",
    "engine_key": None,
    "kind": "unbound",
    "layers_total": 64,
    "model": {"id": "a model", "revision": None, "weights_digest": None},
    "rope": [],
    "rotation": None,
    "scale_scheme": None,
    "tokenizer": None,
}


def floats(seed: str, shape: tuple[int, ...], name: str) -> Array:
    """Finite values of a dtype in [-8, 8), as bytes ``[..., item]``; any bytes for ``uint8``."""
    count = int(np.prod(shape))
    if name == "uint8":
        return noise(seed, count).reshape(*shape, 1)
    wide = (noise(seed, count).astype(np.float32) - 128) / 16
    return as_bytes(wide.reshape(shape).astype(DTYPES[name]))


def as_bytes(values: Array) -> Array:
    """``[...]`` of any dtype to bytes ``[..., item]``."""
    flat = np.ascontiguousarray(values)
    return flat.view(np.uint8).reshape(*flat.shape, flat.dtype.itemsize)


@dataclass
class RawGroup:
    """A group; ``source`` are bytes ``[L, T, H, D, item]``, ``quants`` its qualities."""

    name: str
    role: str
    dtype: str
    layers: tuple[int, ...]
    source: Array
    quants: dict[str, Quant] = field(default_factory=dict)
    cut: tuple[int, int] = (3, 65_536)
    head_start: int = 0
    heads_total: int | None = None
    tokens: dict[str, Any] = field(default_factory=lambda: {"kind": "all"})

    @property
    def run_layers(self) -> int:
        """Layers of a run."""
        return self.cut[0]

    @property
    def run_heads(self) -> int:
        """Heads of a run, no more than there are."""
        return min(self.cut[1], self.source.shape[2])

    def to_json(self) -> dict[str, Any]:
        """The element of ``groups``."""
        heads, dims = self.source.shape[2:4]
        total = self.head_start + heads if self.heads_total is None else self.heads_total
        return {
            "dtype": self.dtype,
            "head_dim": dims,
            "head_start": self.head_start,
            "heads": heads,
            "heads_total": total,
            "layers": list(self.layers),
            "name": self.name,
            "role": self.role,
            "tokens": self.tokens,
        }


def raw_frame(
    content: bytes, descriptor: int | None = None, fields: bytes = b"", blocks: bytes | None = None
) -> bytes:
    """A zstd frame made by hand: raw blocks, single segment, content size in as few bytes."""
    if descriptor is None:
        size = len(content)
        if size < 256:
            descriptor, fields = 0x20, bytes([size])
        elif size < 65_792:
            descriptor, fields = 0x60, struct.pack("<H", size - 256)
        else:
            descriptor, fields = 0xA0, struct.pack("<I", size)
    if blocks is None:
        pieces = [content[i : i + 2**17] for i in range(0, max(len(content), 1), 2**17)]
        blocks = b"".join(
            (len(piece) << 3 | (index == len(pieces) - 1)).to_bytes(3, "little") + piece
            for index, piece in enumerate(pieces)
        )
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + fields + blocks


Entry = tuple[int, bytes, int, int]


def zstd_payload(entries: Sequence[Entry], *, count: int | None = None, tail: bytes = b"") -> bytes:
    """A payload from (rows, frame, low, radix) entries."""
    data = struct.pack("<I", len(entries) if count is None else count)
    for rows, body, low, radix in entries:
        data += struct.pack("<IIBB", rows, len(body), low, radix - 1)
    return data + b"".join(body for _, body, _, _ in entries) + tail


def one_frame(rows: Array) -> bytes:
    """All rows in one frame, packed if their values allow it."""
    low, high = int(rows.min(initial=255)), int(rows.max(initial=0))
    low, radix = (low, high - low + 1) if high - low < 16 else (0, 256)
    return zstd_payload([(len(rows), raw_frame(pack(rows, low, radix).tobytes()), low, radix)])


@dataclass
class Video:
    """Layouts of the hevc tracks, which one a cell uses, and where streams come from.

    ``stream(name, integers, order, layout)`` gives the payload.
    """

    layouts: list[dict[str, Any]]
    choose: Callable[[Cell], int]
    stream: Callable[[str, Array, Array | None, dict[str, Any]], bytes]


def compose(
    groups: Sequence[RawGroup],
    count: int,
    tracks: Sequence[str] = (STORED,),
    *,
    seg: int = 256,
    order: str = "token-major",
    alignment: int = 1,
    identity: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
    codecs: dict[str, list[str]] | None = None,
    video: Video | None = None,
    frames: Callable[[Array], bytes] = one_frame,
    **members: Any,
) -> Builder:
    """The parts of a valid artifact. ``codecs`` are by track name, default the track's own."""
    cells = cells_of(groups, count, seg, order)
    names = list(dict.fromkeys(track.split("/")[0] for track in tracks))
    builder = Builder.__new__(Builder)
    builder.fixed = b"\x89KVF\r\n\x1a\n" + struct.pack("<HHI", 0, 9, 128)
    builder.sets, builder.segments = {}, {}
    numbers: dict[tuple[str, int, int], int] = {}
    for name in names:
        objects = builder.sets.setdefault(name, [])
        for index, group in enumerate(groups):
            runs = sorted({c.layers.start: c.layers for c in cells if c.group == index}.items())
            for first, run in runs if name in group.quants else ():
                numbers[name, index, first] = len(objects)
                row = {
                    "group": index,
                    "layer_index": first,
                    "layer_count": run.stop - first,
                    "reserved": bytes(10),
                }
                objects.append(SetObject(row, group.quants[name].set_bytes(run)))
    chosen: dict[str, list[str]] = {}
    for track in tracks:
        quality, codec = track.split("/")
        mine = (codecs or {}).get(track) or [
            "zstd" if codec == "hevc" and quality not in group.quants else codec for group in groups
        ]
        chosen[track] = mine
        builder.segments[track] = [
            _segment(
                groups[cell.group],
                cell,
                quality,
                mine[cell.group],
                numbers,
                video,
                frames,
                f"{track.replace('/', '-')}-{number}",
            )
            for number, cell in enumerate(cells)
        ]
    source = b"".join(b3(layer.tobytes()) for group in groups for layer in group.source)
    windows = any(group.tokens["kind"] != "all" for group in groups)
    builder.manifest = {
        "content_id": "",
        "data_bytes": 0,
        "extensions": {},
        "features": [],
        "format": "kvformat",
        "generator": "conformance",
        "groups": [group.to_json() for group in groups],
        "identity": copy.deepcopy(identity or IDENTITY),
        "lineage": {"kind": "exact"},
        "qualities": [
            {
                "data_start": 0,
                "data_stop": 0,
                "encodings": ["quantised" if n in g.quants else "exact" for g in groups],
                "name": n,
                "relative_step": None if n == "exact" else "3fd1eb851eb851ec",
                "set_table_digest": "",
                "sets": 0,
            }
            for n in names
        ],
        "segmentation": {
            "alignment": alignment,
            "groups": [
                {"heads": min(g.cut[1], g.source.shape[2]), "layers": g.cut[0]} for g in groups
            ],
            "order": order,
            "tokens": seg,
        },
        "source_digest": b3(source).hex(),
        "tokens": tokens or {"chain": None, "content": [], "count": count, "first_position": 0},
        "tracks": [
            {
                "codecs": chosen[track],
                "data_start": 0,
                "data_stop": 0,
                "encoder": "none",
                "layouts": video.layouts if video and "hevc" in chosen[track] else [],
                "name": track,
                "quality": track.split("/")[0],
                "segments": 0,
                "table_digest": "",
            }
            for track in tracks
        ],
        "valid_lengths": [count] if windows else None,
        "version": "0.9",
        **members,
    }
    return builder


def _segment(
    group: RawGroup,
    cell: Cell,
    quality: str,
    codec: str,
    numbers: dict[tuple[str, int, int], int],
    video: Video | None,
    frames: Callable[[Array], bytes],
    name: str,
) -> SegmentObject:
    part = (cell.layers, cell.tokens, cell.heads)
    row = {
        "token_start": cell.start,
        "token_count": cell.tokens.stop - cell.tokens.start,
        "group": cell.group,
        "layer_index": cell.layers.start,
        "layer_count": cell.layers.stop - cell.layers.start,
        "layout": NO_LAYOUT,
        "head_start": cell.heads.start,
        "head_count": cell.heads.stop - cell.heads.start,
        "reserved": bytes(4),
        "set_index": NO_SET,
    }
    if quality not in group.quants:
        source = np.ascontiguousarray(group.source[part])
        row["integer_digest"] = b3(source.tobytes())
        row["integer_sum"] = integer_sum(source.tobytes())
        payload = source.tobytes() if codec == "stored" else frames(exact_rows(source))
        return SegmentObject(row, b"", payload)
    quant = group.quants[quality]
    q = np.ascontiguousarray(quant.q[part])
    mine = None if quant.order is None else quant.order[cell.layers, cell.heads]
    row["set_index"] = numbers[quality, cell.group, cell.layers.start]
    row["integer_digest"] = b3(q.tobytes())
    row["integer_sum"] = integer_sum(q.tobytes())
    if codec == "stored":
        payload = q.tobytes()
    elif codec == "zstd":
        payload = frames(rows_of(q, mine))
    else:
        assert video is not None
        row["layout"] = video.choose(cell)
        payload = video.stream(name, q, mine, video.layouts[row["layout"]])
    return SegmentObject(row, quant.side_bytes(*part), payload)


# --- what most cases start from --------------------------------------------------------------

LEVELS = np.float32([0.5, 0.8408964, 1, 1.189207, 2])


def typical(
    seed: str,
    shape: tuple[int, int, int, int],
    dtype: str,
    *,
    patches: Sequence[int] = (0, 1, 2, 3),
    scales: Array | None = None,
) -> tuple[Array, Quant]:
    """Source bytes and integers of a group, as a usual writer makes them."""
    layers, tokens, heads, dims = shape
    source = floats(f"{seed}-source", shape, dtype)
    scales = LEVELS if scales is None else scales
    channels = (layers, heads, dims)
    q = (112 + noise(f"{seed}-q", int(np.prod(shape))) % 33).reshape(shape)
    order = np.argsort(
        noise(f"{seed}-order", int(np.prod(channels))).reshape(channels), axis=-1, kind="stable"
    )
    quant = Quant(
        q=q,
        scale=np.float32(0.25) + np.arange(layers, dtype=np.float32) / 64,
        zero=np.full(layers, 128, np.int16),
        bias=(noise(f"{seed}-bias", int(np.prod(channels))).astype(np.float32) / 64 - 2).reshape(
            channels
        ),
        order=order,
        token_scale=scales,
        index=(noise(f"{seed}-index", layers * tokens) % np.int64(max(len(scales), 1)))
        .astype(np.uint8)
        .reshape(layers, tokens),
        patches={(n, t): source[n, t] for n in range(layers) for t in patches if t < tokens},
    )
    return source, quant


def small_groups(*, window: bool = False) -> list[RawGroup]:
    """Two quantised groups of 10 tokens and, with ``window``, a windowed one and a state."""
    groups = []
    for name, role, dtype, layers, heads, dims in (
        ("keys", "key", "bfloat16", (1, 3, 4, 6), 2, 4),
        ("values", "value", "float16", (1, 3), 1, 3),
    ):
        source, quant = typical(name, (len(layers), 10, heads, dims), dtype)
        groups.append(RawGroup(name, role, dtype, layers, source, {QUALITY: quant}))
    if window:
        source, quant = typical("near", (1, 7, 1, 3), "float16", patches=())
        near = {"cumulative_tokens": 10, "held_start": 3, "kind": "window"}
        groups.append(
            RawGroup("near", "value", "float16", (4,), source, {QUALITY: quant}, tokens=near)
        )
        state = floats("state", (1, 1, 1, 4), "float32")
        shape = {"kind": "state", "shape": [2, 2]}
        groups.append(RawGroup("rec", "state", "float32", (5,), state, tokens=shape))
    return groups


def tiny_groups() -> list[RawGroup]:
    """One group of one layer, three tokens, one head and two dims."""
    source, quant = typical(
        "tiny", (1, 3, 1, 2), "float16", patches=(0,), scales=np.float32([1, 2])
    )
    return [RawGroup("key", "key", "float16", (0,), source, {QUALITY: quant}, cut=(1, 1))]


def tiny(tracks: Sequence[str] = (STORED,), **options: Any) -> Builder:
    """The smallest artifact with a set and a side block."""
    return compose(tiny_groups(), 3, tracks, seg=16, **options)


LAYOUT_KEYS = {
    "fold": [1, 1],
    "frames": 1,
    "grid": [1, 6],
    "height": 144,
    "order": "time",
    "tile": [1, 8],
    "width": 144,
}
LAYOUT_VALUES = {**LAYOUT_KEYS, "tile": [1, 3]}


def small(
    suite: Any, tracks: Sequence[str] = (STORED, EXACT), *, window: bool = False, **options: Any
) -> Builder:
    """The artifact that most broken cases start from, segments of 6 tokens."""
    video = None
    if any(track.endswith("hevc") for track in tracks):
        video = Video(
            [LAYOUT_KEYS, LAYOUT_VALUES], lambda c: min(c.group, 1), streams(suite, "small")
        )
    return compose(
        small_groups(window=window), 10, tracks, seg=6, video=copy.deepcopy(video), **options
    )


def streams(suite: Any, prefix: str) -> Callable[[str, Array, Array | None, dict[str, Any]], bytes]:
    """Streams that the reference encoder makes with ``--new``."""

    def stream(_: str, q: Array, order: Array | None, layout: dict[str, Any]) -> bytes:
        def make() -> bytes:
            from kvformat.codecs.base import SegmentShape
            from kvformat.codecs.hevc import HevcCodec
            from kvformat.fields import Node
            from kvformat.tracks import parse_layout

            shape = SegmentShape(*q.shape, 0, order, parse_layout(Node(layout, "/layout")))
            return HevcCodec().encode(q, shape)

        parts = (q.tobytes(), b"" if order is None else order.tobytes(), canonical(layout))
        key = b3(b"".join(map(b3, parts)) + str(q.shape).encode()).hex()[:12]
        return bytes(suite.stream(f"{prefix}-{key}", make))

    return stream


def with_members(builder: Builder, changes: dict[str, Any]) -> bytes:
    """The file with other values in its manifest and the content id that follows from them."""

    def edit(manifest: dict[str, Any]) -> None:
        for pointer, new in changes.items():
            put(manifest, pointer, new)
        if "/content_id" not in changes and {"groups", "identity", "source_digest"} <= set(
            manifest
        ):
            manifest["content_id"] = builder.content_id()

    return builder.build(edit_manifest=edit)


DROP: Any = ...


def put(value: Any, pointer: str, new: Any) -> None:
    """Set the value behind a JSON pointer; ``-`` appends to a list, DROP removes."""
    *steps, last = pointer.strip("/").split("/")
    for step in steps:
        value = value[int(step) if isinstance(value, list) else step]
    if isinstance(value, list):
        if last == "-":
            value.append(new)
        elif new is DROP:
            del value[int(last)]
        else:
            value[int(last)] = new
    elif new is DROP:
        del value[last]
    else:
        value[last] = new


def chain(
    identity: dict[str, Any],
    ids: Sequence[int],
    salt: bytes,
    spans: list[dict[str, Any]],
    count: int,
) -> list[bytes]:
    """TOK-1 to TOK-6 from position 0 on: h(0), h(1), ... over ``count`` tokens."""
    return chain_hashes(identity, ids[:count], salt, spans)
