"""A reader made from spec/kvformat.md alone, which writes a table row for each field it takes.

For tools/make_appendix.py. It knows just what the worked example needs: binary16 values, the codecs
``stored`` and ``zstd``, small zstd frames.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

NO_SET = 2**32 - 1
TOKENS_PER_BYTE = {1: 8, 2: 8, 3: 5, 4: 4, 5: 3, 6: 3, **dict.fromkeys(range(7, 17), 2), 256: 1}
ITEM_BYTES = 2
SEGMENT_FIELDS = (
    ("offset", 8),
    ("stored_bytes", 8),
    ("side_bytes", 4),
    ("set_index", 4),
    ("token_start", 8),
    ("token_count", 4),
    ("group", 2),
    ("layer_index", 2),
    ("layer_count", 2),
    ("layout", 2),
    ("head_start", 4),
    ("head_count", 4),
    ("reserved", 4),
    ("integer_sum", 8),
    ("digest", 32),
    ("integer_digest", 32),
)
SET_FIELDS = (
    ("offset", 8),
    ("bytes", 8),
    ("digest", 32),
    ("group", 2),
    ("layer_index", 2),
    ("layer_count", 2),
    ("reserved", 10),
)
Array = NDArray[Any]
Record = dict[str, Any]


def digest(data: bytes) -> bytes:
    """BLAKE3."""
    return blake3(data).digest()


def weight(n: int) -> int:
    """h of INT-3."""
    z = 2_654_435_761 * n % 2**32
    return (z ^ z // 2**15) | 1


def integer_sum(data: bytes) -> int:
    """INT-3, as it is written."""
    total = sum(q * weight(i % 4096) * weight(4096 + i // 4096) for i, q in enumerate(data))
    return total % 2**64


def canonical(value: object) -> bytes:
    """The canonical form of JSON (section 2.1)."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def pretty(value: Any, indent: str = "") -> str:
    """JSON for people: what fits into 160 columns on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= 160 or not value:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f'"{key}": {pretty(item, inner)}' for key, item in value.items()]
    else:
        parts = [pretty(item, inner) for item in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + "\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}{right}"


def short(raw: bytes) -> str:
    """Hexadecimal digits, the middle left out where they are many."""
    return raw.hex() if len(raw) <= 12 else f"{raw[:8].hex()}…{raw[-2:].hex()}"


def numbers(values: Sequence[Any] | Array) -> str:
    """Values with commas between them."""
    return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in values)


@dataclass
class Walk:
    """A cursor over the file that writes a table row for each field it takes."""

    data: bytes
    cursor: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def title(self, text: str, *below: str) -> None:
        """Start a new table, after a heading and text."""
        self.lines += ["", text, ""]
        for line in below:
            self.lines += [line, ""]
        self.lines += ["| Offset | Bytes | Hex | Field | Meaning |", "|---|---|---|---|---|"]

    def take(self, size_bytes: int, name: str, meaning: str | None = None) -> bytes:
        """The next bytes; without ``meaning`` they are shown as an integer."""
        raw = self.data[self.cursor : self.cursor + size_bytes]
        if len(raw) != size_bytes:
            raise ValueError(f"the file ends inside {name}")
        if meaning == "zero" and any(raw):
            raise ValueError(f"{name} is not zero")
        shown = f"{int.from_bytes(raw, 'little'):,}" if meaning is None else meaning
        self.lines.append(
            f"| 0x{self.cursor:04x} | {size_bytes:,} | `{short(raw)}` | {name} | {shown} |"
        )
        self.taken.append((self.cursor, size_bytes))
        self.cursor += size_bytes
        return raw

    def integer(self, size_bytes: int, name: str, meaning: str | None = None) -> int:
        """The next bytes as an integer."""
        return int.from_bytes(self.take(size_bytes, name, meaning), "little")

    def array(self, dtype: str, shape: tuple[int, ...], name: str, what: str = "") -> Array:
        """The next bytes as an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found = np.frombuffer(self.data, dtype, int(np.prod(shape)), self.cursor)
        self.take(size, name, what or numbers(found.tolist()))
        return found.reshape(shape)

    def check(self) -> None:
        """Every byte belongs to exactly one row."""
        end = 0
        for offset, size_bytes in self.taken:
            if offset != end or not size_bytes:
                raise ValueError(f"rows leave a gap or overlap at byte {offset}")
            end += size_bytes
        if end != len(self.data):
            raise ValueError(f"{len(self.data) - end} bytes at the end have no row")


@dataclass
class Parsed:
    """What the walk found: the manifest, sets, records and integers by track."""

    manifest: Record
    data_start: int
    sets: list[Record]
    records: dict[str, list[Record]]
    values: dict[str, list[Array]] = field(default_factory=dict)


def walk_front(walk: Walk) -> Parsed:
    """Header, manifest and tables."""
    walk.title("### A.4.1 Header")
    walk.take(8, "magic", "`\\x89KVF\\r\\n\\x1a\\n`")
    walk.take(2, "version_major")
    walk.take(2, "version_minor")
    walk.take(4, "header_bytes")
    walk.take(32, "check", "section A.5.1")
    file_bytes = walk.integer(8, "file_bytes")
    size_bytes = walk.integer(8, "manifest_bytes", f"M = {walk.data[56] + 256 * walk.data[57]:,}")
    walk.integer(8, "tables_bytes")
    walk.take(32, "manifest_digest", "section A.5.2")
    walk.take(24, "reserved", "zero")
    raw = walk.data[128 : 128 + size_bytes]
    manifest: Record = json.loads(raw)
    if file_bytes != len(walk.data) or canonical(manifest) != raw:
        raise ValueError("the worked file breaks the specification")
    walk.title("### A.4.2 Manifest")
    walk.take(size_bytes, "manifest", "the JSON below, in canonical form")
    walk.lines += [
        "",
        "Here it is with white space for reading; the file holds the same members in the same",
        "order without any white space outside strings.",
        "",
        "```json,manifest",
        pretty(manifest),
        "```",
    ]
    sets: list[Record] = []
    records: dict[str, list[Record]] = {}
    alignment = manifest["segmentation"]["alignment"]
    tables_end = 128 + size_bytes + walk.data[64] + 256 * walk.data[65]
    data_start = -(-tables_end // alignment) * alignment
    names = [item["name"] for item in manifest["groups"]]
    walk.lines += ["", "### A.4.3 Tables"]
    for quality in manifest["qualities"]:
        start = walk.cursor
        for index in range(quality["sets"]):
            walk.title(f"#### Set table of `{quality['name']}`, record {index}")
            sets.append(_record(walk, SET_FIELDS, names, data_start))
        _require_digest(walk, start, bytes.fromhex(quality["set_table_digest"]))
    for track in manifest["tracks"]:
        records[track["name"]] = []
        start = walk.cursor
        for index in range(track["segments"]):
            walk.title(f"#### Segment table of `{track['name']}`, record {index}")
            records[track["name"]].append(_record(walk, SEGMENT_FIELDS, names, data_start))
        _require_digest(walk, start, bytes.fromhex(track["table_digest"]))
    if data_start > walk.cursor:
        walk.take(data_start - walk.cursor, "up to the start of the data", "zero")
    return Parsed(manifest, data_start, sets, records)


def _record(
    walk: Walk, fields: Sequence[tuple[str, int]], names: list[str], data_start: int
) -> Record:
    found: Record = {"digest": b""}
    for name, size_bytes in fields:
        value = int.from_bytes(walk.data[walk.cursor : walk.cursor + size_bytes], "little")
        meaning = {
            "offset": f"{value:,}: byte 0x{data_start + value:04x} of the file",
            "digest": "BLAKE3 of the object's bytes",
            "integer_digest": "section A.5.5",
            "integer_sum": "section A.5.5",
            "reserved": "zero",
            "set_index": "none, the group is exact" if value == NO_SET else str(value),
            "layout": "none, the codec is not `hevc`",
            "group": f"{value}: `{names[min(value, len(names) - 1)]}`",
        }.get(name)
        raw = walk.take(size_bytes, name, meaning)
        found[name] = raw if "digest" in name else value
    return found


def _start_object(walk: Walk, parsed: Parsed, record: Record) -> int:
    """The place of an object, after zeros where the alignment asks for them (DAT-2, DAT-5)."""
    start: int = parsed.data_start + record["offset"]
    if start < walk.cursor or start - walk.cursor >= parsed.manifest["segmentation"]["alignment"]:
        raise ValueError(f"an object should start at {walk.cursor}, not at {start}")
    if start > walk.cursor:
        walk.take(start - walk.cursor, "padding", "zero")
    return start


def walk_set(walk: Walk, parsed: Parsed, index: int) -> None:
    """One quantisation set; its fields go into the record."""
    record = parsed.sets[index]
    walk.title(f"#### Quantisation set {index}")
    start = _start_object(walk, parsed, record)
    layers = walk.integer(2, "layer_count")
    bits = walk.data[walk.cursor]
    names = {1: "scale per channel", 2: "zero per channel", 4: "bias", 8: "order"}
    flags = walk.integer(
        2, "flags", f"{bits}: " + ", ".join(text for bit, text in names.items() if bits & bit)
    )
    heads, dims = walk.integer(4, "heads"), walk.integer(4, "head_dim")
    count = walk.integer(2, "token_scale_count")
    walk.integer(2, "reserved", "zero")
    full, each = (layers, heads, dims), (layers, 1, 1)
    record["scale"] = walk.array("<f4", full if flags & 1 else each, "scale")
    record["zero"] = walk.array("<i2", full if flags & 2 else each, "zero")
    record["bias"] = record["order"] = None
    for layer in range(layers * bool(flags & 4)):
        found = walk.array("<f4", (1, heads, dims), f"bias, layer {layer}")
        record["bias"] = found if not layer else np.concatenate([record["bias"], found])
    for layer in range(layers * bool(flags & 8)):
        found = walk.array("u1", (1, heads, dims), f"order, layer {layer}")
        record["order"] = found if not layer else np.concatenate([record["order"], found])
    what = "2^((i - 16) / 4) as binary32 for i = 0 to 32: the writer's choice"
    record["token_scale"] = walk.array("<f4", (count,), "token_scale", what)
    _require_digest(walk, start, record["digest"])


def _require_digest(walk: Walk, start: int, expected: bytes) -> None:
    if digest(walk.data[start : walk.cursor]) != expected:
        raise ValueError(f"wrong digest of the object at {start}")


def walk_segment(walk: Walk, parsed: Parsed, track: Record, index: int) -> None:
    """One segment; its integers and values go into the record."""
    record = parsed.records[track["name"]][index]
    group = parsed.manifest["groups"][record["group"]]
    codec = track["codecs"][record["group"]]
    title = f"#### Track `{track['name']}`, segment {index}: group `{group['name']}`"
    walk.title(title)
    start = _start_object(walk, parsed, record)
    layers, tokens = record["layer_count"], record["token_count"]
    shape = (layers, tokens, record["head_count"], group["head_dim"])
    row = shape[2:]
    quantised = record["set_index"] != NO_SET
    record["patches"] = []
    if quantised:
        item = parsed.sets[record["set_index"]]
        record["index"] = np.concatenate(
            [
                walk.array("u1", (1, tokens), f"side block: token scale indices, layer {layer}")
                for layer in range(layers)
            ]
        )
        for layer in range(layers):
            name = f"side block, layer {layer}"
            count = walk.integer(4, f"{name}: patch_count")
            ordinals = walk.array("<u4", (count,), f"{name}: patched tokens")
            rows = walk.array("<f2", (count, *row), f"{name}: their exact rows")
            record["patches"] += [(layer, *item) for item in zip(ordinals, rows, strict=True)]
    if walk.cursor - start != record["side_bytes"]:
        raise ValueError("wrong side_bytes")
    if codec == "stored":
        parts = [_stored_layer(walk, layer, shape, quantised) for layer in range(layers)]
        integers = np.concatenate(parts)
    else:
        order = item["order"] if quantised else None
        integers = _walk_zstd(walk, shape, order, quantised=quantised)
    _require_digest(walk, start, record["digest"])
    if digest(integers.tobytes()) != record["integer_digest"]:
        raise ValueError("wrong integers")
    if integer_sum(integers.tobytes()) != record["integer_sum"]:
        raise ValueError("wrong integer sum")
    record["integers"] = integers
    values = integers.view("<f2")[..., 0] if not quantised else _restore(record, item)
    parsed.values.setdefault(track["name"], []).append(values)


def _stored_layer(walk: Walk, layer: int, shape: tuple[int, ...], quantised: bool) -> Array:
    name = f"payload: layer {layer}"
    one = (1, *shape[1:]) if quantised else (1, *shape[1:], ITEM_BYTES)
    what = "integers" if quantised else "binary16 values"
    return walk.array("u1", one, name, f"{what} `[token, head, dim]`, " + numbers(shape[1:]))


def _walk_zstd(
    walk: Walk, shape: tuple[int, ...], order: Array | None, *, quantised: bool
) -> Array:
    layers, tokens, heads, dims = shape
    entries = []
    for index in range(walk.integer(4, "payload: frame_count")):
        name = f"payload: entry {index}, "
        entries.append(
            (
                walk.integer(4, name + "row_count"),
                walk.integer(4, name + "frame_bytes"),
                walk.integer(1, name + "low"),
                walk.integer(1, name + "radix_minus_1") + 1,
            )
        )
    rows: list[list[int]] = []
    for index, (count, size_bytes, low, radix) in enumerate(entries):
        frame = walk.data[walk.cursor : walk.cursor + size_bytes]
        content = zstandard.ZstdDecompressor().decompress(frame)
        per_byte = TOKENS_PER_BYTE[radix]
        width = -(-tokens // per_byte)
        name = f"payload: frame {index}, "
        walk.take(4, name + "zstd magic", "RFC 8878")
        walk.take(1, name + "descriptor", "0x20: single segment, content size of 1 byte, no more")
        if frame[4] != 0x20 or frame[5] != count * width:
            raise ValueError("describe this form of zstd frame here first")
        walk.take(1, name + "content size", f"{frame[5]} = {count} rows x {width} bytes")
        walk.take(size_bytes - 6, name + "blocks", f"content: `{short(content)}`")
        for start in range(0, len(content), width):
            row = content[start : start + width]
            digits = [low + byte // radix**i % radix for byte in row for i in range(per_byte)]
            rows.append(digits[:tokens])
    table = np.array(rows, np.uint8)
    if not quantised:
        by_byte = table.reshape(layers, ITEM_BYTES, dims, heads, tokens)
        return np.ascontiguousarray(by_byte.transpose(0, 4, 3, 2, 1))
    ranked = table.reshape(layers, dims, heads, tokens)
    result = np.empty(shape, np.uint8)
    for layer, rank, head in np.ndindex(layers, dims, heads):
        dim = rank if order is None else order[layer, head, rank]
        result[layer, :, head, dim] = ranked[layer, rank, head]
    return result


def _restore(record: Record, item: Record) -> Array:
    result = np.empty(record["integers"].shape, "<f2")
    for place in np.ndindex(*result.shape):
        result[place] = steps(record, item, place)[-1]
    for layer, ordinal, row in record["patches"]:
        result[layer, ordinal] = row
    return result


def steps(record: Record, item: Record, place: tuple[int, ...]) -> list[Any]:
    """The numbers on the way from an integer to its value (section 9.4)."""
    layer, token, head, dim = place
    shape = (record["layer_count"], *record["integers"].shape[2:])
    zero = np.broadcast_to(item["zero"], shape)[layer, head, dim]
    scale = np.broadcast_to(item["scale"], shape)[layer, head, dim]
    difference = np.float32(int(record["integers"][place]) - int(zero))
    token_scale = item["token_scale"][record["index"][layer, token]]
    first = np.float32(difference * scale)
    second = np.float32(first * token_scale)
    bias = item["bias"][layer, head, dim]
    total = np.float32(second + bias)
    bounded = np.float32(min(max(total, np.float32(-65504)), np.float32(65504)))
    return [difference, scale, first, token_scale, second, bias, total, bounded.astype("<f2")]
