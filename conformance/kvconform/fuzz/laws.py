"""What a reader must answer to an artifact, whole, damaged, or broken with right digests.

A ``Probe`` is one input with the operations of a case folder. ``probes(info)`` draws them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import strategies as st

from kvconform.fuzz import naive
from kvconform.fuzz.compose import EXACT, Parts, Plan, compose
from kvconform.fuzz.pieces import Json
from kvconform.fuzz.strategies import plans, selections
from kvconform.judge import ITEM_BYTES


@dataclass(frozen=True)
class Probe:
    """An input and what must be answered; ``law`` is a slug, ``what`` a sentence for people."""

    law: str
    what: str
    requirements: tuple[str, ...]
    level: str
    codecs: frozenset[str]
    data: bytes
    operations: tuple[Json, ...]
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def requires(self) -> list[str]:
        """What the implementation must declare."""
        return sorted(f"codec:{name}" for name in self.codecs - {"stored"})


def _operation(call: str, *arguments: str, **more: Any) -> Json:
    codes = more.pop("codes", None)
    expect: Json = more.pop("expect", None) or {"verdict": "invalid", "codes": list(codes)}
    operation: Json = {"call": call, "expect": expect, **more}
    if arguments:
        operation["arguments"] = list(arguments)
    return operation


# --- valid artifacts -------------------------------------------------------------------------


@st.composite
def valid(draw: st.DrawFn, codecs: Set[str]) -> Probe:
    """An artifact is ok; its digests, whole and in part, are those of the naive reader."""
    plan = draw(plans(codecs))
    data = compose(plan).build()
    found = naive.restore(data)
    good = {"verdict": "ok", "manifest_digest": found.manifest_digest}
    everything = {**good, "integers": found.integers}
    operations = [_operation("verify", expect=everything), _operation("inspect", expect=good)]
    for track in found.tensors:
        digests = found.digests(track)
        expect = {"verdict": "ok", "digests": digests}
        operations.append(_operation("decode", "--track", track, expect=expect))
        part = draw(selections(plan))
        if part:
            expect = {"verdict": "ok", "digests": found.digests(track, **part)}
            cut = [x for name, (a, b) in part.items() for x in (f"--{name}", f"{a}:{b}")]
            operations.append(_operation("decode", "--track", track, *cut, expect=expect))
    files: dict[str, bytes] = {}
    if plan.token_ids is not None and plan.count:
        files, more = _expectations(plan, everything)
        operations += more
    return Probe(
        "valid-artifact",
        "A valid artifact is `ok`, its integers and restored bytes are those that follow from the "
        "text, in all tracks of a quality and in parts as in the whole.",
        ("VER-1", "ARI-6", "PAR-1", "INT-1", *(("TOK-10",) if files else ())),
        "core",
        frozenset(plan.codecs),
        data,
        tuple(operations),
        files,
    )


def _expectations(plan: Plan, everything: Json) -> tuple[dict[str, bytes], list[Json]]:
    """Calls with the right ids and with wrong ones in the first block that the artifact holds."""
    ids = list(plan.token_ids or ())
    wrong = [*ids]
    wrong[plan.first_position] += 1
    files = {"ids.json": json.dumps(ids).encode(), "other-ids.json": json.dumps(wrong).encode()}
    salt: list[str] = []
    if plan.salt:
        files["salt.bin"] = plan.salt
        salt = ["--salt-file", "salt.bin"]
    other = {"verdict": "mismatch", "codes": ["identity.tokens"]}
    return files, [
        _operation("verify", "--expect-token-ids", "ids.json", *salt, expect=everything),
        _operation("verify", "--expect-token-ids", "other-ids.json", *salt, expect=other),
    ]


# --- damage ----------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, codecs: Set[str]) -> Probe:
    """Flips and cuts: verify never says ok, and decode does not where it uses the byte."""
    plan = draw(plans(codecs))
    data = compose(plan).build()
    track = draw(st.sampled_from([name for name, _, _ in plan.tracks]))
    front = 128 + int.from_bytes(data[56:64], "little")
    regions = [(0, len(data)), (0, 128), (128, front), (front, len(data))]
    used = [(0, front), *_used(data, track)]
    operations = []
    mask = st.integers(1, 255)
    for _ in range(draw(st.integers(1, 6))):
        start, stop = draw(st.sampled_from([item for item in regions if item[0] < item[1]]))
        flip = [draw(st.integers(start, stop - 1)), draw(mask)]
        operations.append(_operation("verify", flips=[flip], expect={"verdict": "invalid"}))
    start, stop = draw(st.sampled_from(used))
    flip = [draw(st.integers(start, stop - 1)), draw(mask)]
    expect = {"verdict": "invalid"}
    operations.append(_operation("decode", "--track", track, flips=[flip], expect=expect))
    cut = draw(st.integers(0, len(data) - 1))
    codes = ["header.magic" if cut < 8 else "file.size"]
    operations.append(_operation("verify", cuts=[cut], codes=codes))
    operations.append(_operation("decode", "--track", track, cuts=[cut], codes=codes))
    return Probe(
        "damaged-file",
        "A changed byte is never `ok`: every byte of an artifact is covered by a digest or must be "
        "zero. A cut file is too short.",
        ("VER-1", "CNV-5", "PAR-2", "ORD-2", "HDR-10"),
        "faulty",
        frozenset(plan.codecs),
        data,
        tuple(operations),
    )


def _used(data: bytes, track: str) -> list[tuple[int, int]]:
    """Intervals of the data section that decoding a whole track reads: its segments."""
    manifest_bytes, tables_bytes = struct.unpack_from("<QQ", data, 56)
    manifest = json.loads(data[128 : 128 + manifest_bytes])
    place, alignment = 128 + manifest_bytes, manifest["segmentation"]["alignment"]
    start = -(-(place + tables_bytes) // alignment) * alignment
    place += 64 * sum(item["sets"] for item in manifest["qualities"])
    found = []
    for item in manifest["tracks"]:
        for _ in range(item["segments"]):
            offset, size = struct.unpack_from("<QQ", data, place)
            if item["name"] == track:
                found.append((start + offset, start + offset + size))
            place += 128
    return found


# --- one rule broken, every digest right -----------------------------------------------------

RECORD: Final = ("table.record",)
SCHEMA: Final = ("manifest.schema",)
SEMANTICS: Final = ("manifest.semantics",)
Breaker = Callable[[st.DrawFn, Plan, Parts], bytes | None]
BREAKERS: Final[dict[str, tuple[str, tuple[str, ...], Breaker]]] = {}


def _breaks(requirement: str, *codes: str) -> Callable[[Breaker], Breaker]:
    """Registers a way to break a requirement; it gives None where it does not apply."""

    def register(function: Breaker) -> Breaker:
        name = function.__name__.strip("_").replace("_", "-")
        BREAKERS[name] = (requirement, codes, function)
        return function

    return register


def _any_segment(draw: st.DrawFn, parts: Parts) -> tuple[str, int] | None:
    places = [(name, n) for name, items in parts.segments.items() for n in range(len(items))]
    return draw(st.sampled_from(places)) if places else None


def _record_breaker(requirement: str, field_name: str, change: Callable[[Any], Any]) -> None:
    def breaker(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
        place = _any_segment(draw, parts)
        if place is None:
            return None

        def edit(mine: Parts) -> None:
            record = mine.segments[place[0]][place[1]].record
            record[field_name] = change(record[field_name])

        return parts.build(edit_records=edit)

    BREAKERS[f"record-{field_name.replace('_', '-')}"] = (requirement, RECORD, breaker)


for _name in ("token_start", "token_count", "group", "layer_index", "layer_count"):
    _record_breaker("REC-1", _name, lambda value: value + 1)
for _name in ("head_start", "head_count"):
    _record_breaker("REC-1", _name, lambda value: value + 1)
_record_breaker("TAB-4", "reserved", lambda value: value[:-1] + b"\1")
_record_breaker("DAT-2", "offset", lambda value: value + 1)
_record_breaker("REC-2", "set_index", lambda value: 65_000 if value else 2**32 - 2)
_record_breaker("REC-8", "layout", lambda _: 2**16 - 2)
_record_breaker("REC-4", "stored_bytes", lambda _: 0)


@_breaks("PAR-2", "segment.digest")
def _segment_digest(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    place = _any_segment(draw, parts)
    if place is None:
        return None
    return parts.build(
        edit_records=lambda p: p.segments[place[0]][place[1]].record.update(digest=bytes(32))
    )


@_breaks("INT-1", "segment.integers")
def _integer_digest(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    """The same wrong digest in all tracks (REC-6, REC-10)."""
    place = _any_segment(draw, parts)
    if place is None:
        return None
    for items in parts.segments.values():
        items[place[1]].record["integer_digest"] = bytes([7]) * 32
    return parts.build()


@_breaks("INT-3", "segment.integers")
def _integer_sum(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    """The same wrong sum in all tracks; the digest is right."""
    place = _any_segment(draw, parts)
    if place is None:
        return None
    for items in parts.segments.values():
        items[place[1]].record["integer_sum"] ^= 1
    return parts.build()


@_breaks("CID-3", *SEMANTICS)
def _content_id(_draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    return parts.build(edit_manifest=lambda m: m.update(content_id="0" * 64))


@_breaks("JSN-11", *SCHEMA)
def _unknown_member(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    where = draw(st.sampled_from(["identity", "tokens", "segmentation", "lineage"]))
    return parts.build(edit_manifest=lambda m: m[where].update(z=0))


@_breaks("MAN-1", *SCHEMA)
def _missing_member(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    name = draw(st.sampled_from(sorted({*parts.manifest} - {"features", "extensions"})))
    return parts.build(edit_manifest=lambda m: m.pop(name))


@_breaks("JSN-10", *SCHEMA)
def _boolean_for_integer(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    where = draw(st.sampled_from(["tokens", "segmentation"]))
    member = {"tokens": "count", "segmentation": "alignment"}[where]
    return parts.build(edit_manifest=lambda m: m[where].update({member: True}))


@_breaks("LEN-1", *SEMANTICS)
def _valid_lengths(_draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    wrong = [plan.count] if parts.manifest["valid_lengths"] is None else None
    return parts.build(edit_manifest=lambda m: m.update(valid_lengths=wrong))


@_breaks("MAN-5", *SEMANTICS)
def _group_name_twice(_draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    if len(plan.groups) < 2:
        return None
    parts.manifest["groups"][1]["name"] = parts.manifest["groups"][0]["name"]
    return parts.build()


@_breaks("GRP-2", *SEMANTICS)
def _layer_beyond_the_model(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    group = draw(st.integers(0, len(plan.groups) - 1))
    parts.manifest["groups"][group]["layers"][-1] = plan.identity["layers_total"]
    return parts.build()


@_breaks("GRP-3", *SEMANTICS)
def _heads_beyond_the_model(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    group = parts.manifest["groups"][draw(st.integers(0, len(plan.groups) - 1))]
    group["heads_total"] = group["head_start"] + group["heads"]
    group["head_start"] += 1
    return parts.build()


@_breaks("TAB-3", "table.digest")
def _table_digest(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    track = draw(st.integers(0, len(plan.tracks) - 1))
    return parts.build(edit_manifest=lambda m: m["tracks"][track].update(table_digest="0" * 64))


@_breaks("VER-2", "data.source")
def _source_digest(_draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    if EXACT not in plan.qualities:
        return None
    parts.manifest["source_digest"] = "0" * 64
    return parts.build()


@_breaks("DAT-5", "data.padding")
def _padding(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    byte = bytes([draw(st.integers(1, 255))])
    good = parts.copy().build()
    data = parts.build(filler=byte) if draw(st.booleans()) else parts.build(padding=byte)
    return data if data != good else None


def _some_set(draw: st.DrawFn, parts: Parts) -> Any:
    items = [item for objects in parts.sets.values() for item in objects]
    return draw(st.sampled_from(items)) if items else None


@_breaks("SET-4", "set.content")
def _scale(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    item = _some_set(draw, parts)
    if item is None:
        return None
    bits = [0x7FC00000, 0x7F800000, 0, 0xBF800000, 0x2B7FFFFF, 0x53800001]
    wrong = struct.pack("<I", draw(st.sampled_from(bits)))
    item.data = item.data[:16] + wrong + item.data[20:]
    return parts.build()


@_breaks("SET-2", "set.content")
def _flag(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    item = _some_set(draw, parts)
    if item is None:
        return None
    data = bytearray(item.data)
    place, bit = draw(st.sampled_from([(2, 16), (3, 128), (14, 1), (15, 1)]))
    data[place] |= bit
    item.data = bytes(data)
    return parts.build()


@_breaks("SET-3", "set.content")
def _set_length(draw: st.DrawFn, _: Plan, parts: Parts) -> bytes | None:
    item = _some_set(draw, parts)
    if item is None:
        return None
    item.data = item.data[:-1]
    return parts.build()


@_breaks("SET-5", "set.content")
def _bias(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    wrong = struct.pack("<I", draw(st.sampled_from([0x80000000, 1, 0x7FC00000, 0x7F800000])))
    return _with_quants(
        plan,
        parts,
        lambda quant: quant.bias is not None,
        lambda data, offsets: data[: offsets[2]] + wrong + data[offsets[2] + 4 :],
    )


@_breaks("SET-6", "set.content")
def _order(_draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    def edit(data: bytes, offsets: tuple[int, ...]) -> bytes:
        size = 1 if struct.unpack_from("<I", data, 8)[0] <= 256 else 2
        place = offsets[3]
        first = data[place : place + size]
        return data[: place + size] + first + data[place + 2 * size :]

    return _with_quants(
        plan, parts, lambda quant: quant.order is not None and quant.q.shape[3] > 1, edit
    )


def _with_quants(
    plan: Plan,
    parts: Parts,
    fits: Callable[[Any], bool],
    edit: Callable[[bytes, tuple[int, ...]], bytes],
) -> bytes | None:
    """Edit the first set of a quantisation that fits; offsets of scale, zero, bias, order."""
    for name, objects in parts.sets.items():
        for item in objects:
            quant = plan.groups[item.record["group"]].quants[name]
            if not fits(quant):
                continue
            count, flags, heads, dims = struct.unpack_from("<HHII", item.data)
            full = count * heads * dims
            zero = 16 + 4 * (full if flags & 1 else count)
            bias = zero + 2 * (full if flags & 2 else count)
            order = bias + (4 * full if flags & 4 else 0)
            item.data = edit(item.data, (16, zero, bias, order))
            return parts.build()
    return None


def _edit_sides(
    draw: st.DrawFn, plan: Plan, parts: Parts, edit: Callable[[bytes, Any, Json], bytes | None]
) -> bytes | None:
    """Edit the side block of one cell in the same way in all tracks of a quality (REC-6)."""
    qualities = {name: quality for name, quality, _ in plan.tracks}
    places = [
        (qualities[name], number)
        for name, items in parts.segments.items()
        for number, item in enumerate(items)
        if item.side
    ]
    if not places:
        return None
    chosen = draw(st.sampled_from(sorted({*places})))
    for name, items in parts.segments.items():
        if qualities[name] == chosen[0]:
            item = items[chosen[1]]
            quant = plan.groups[item.record["group"]].quants[chosen[0]]
            side = edit(item.side, quant, item.record)
            if side is None:
                return None
            item.side = side
    return parts.build()


@_breaks("SID-1", "segment.side")
def _side_length(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    return _edit_sides(draw, plan, parts, lambda side, _q, _r: side + b"\0")


@_breaks("SID-2", "segment.side")
def _token_scale_index(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    def edit(side: bytes, quant: Any, _: Json) -> bytes | None:
        count = len(quant.token_scale)
        return bytes([count]) + side[1:] if 0 < count < 256 else None

    return _edit_sides(draw, plan, parts, edit)


def _patch_place(side: bytes, quant: Any, record: Json) -> int | None:
    """Where the first layer's patch count is, if that layer has a patch."""
    place = record["layer_count"] * record["token_count"] if len(quant.token_scale) else 0
    return place if struct.unpack_from("<I", side, place)[0] else None


@_breaks("SID-3", "segment.side")
def _patch_outside(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    def edit(side: bytes, quant: Any, record: Json) -> bytes | None:
        place = _patch_place(side, quant, record)
        if place is None:
            return None
        return side[: place + 4] + struct.pack("<I", record["token_count"]) + side[place + 8 :]

    return _edit_sides(draw, plan, parts, edit)


@_breaks("VER-6", "segment.side")
def _patch_not_finite(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    def edit(side: bytes, quant: Any, record: Json) -> bytes | None:
        place = _patch_place(side, quant, record)
        if place is None:
            return None
        size = ITEM_BYTES[plan.groups[record["group"]].dtype]
        (count,) = struct.unpack_from("<I", side, place)
        row = place + 4 + 4 * count
        return side[:row] + b"\xff" * size + side[row + size :]

    return _edit_sides(draw, plan, parts, edit)


@_breaks("SID-4", "segment.side")
def _index_at_a_patch(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    def edit(side: bytes, quant: Any, record: Json) -> bytes | None:
        place = _patch_place(side, quant, record)
        if place is None or len(quant.token_scale) < 2:
            return None
        (token,) = struct.unpack_from("<I", side, place + 4)
        return side[:token] + b"\1" + side[token + 1 :]

    return _edit_sides(draw, plan, parts, edit)


def _payloads(plan: Plan, parts: Parts, codec: str) -> list[Any]:
    codecs = {name: mine for name, _, mine in plan.tracks}
    return [
        item
        for name, items in parts.segments.items()
        for item in items
        if codecs[name][item.record["group"]] == codec
    ]


@_breaks("STO-1", "segment.payload")
def _stored_length(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    items = _payloads(plan, parts, "stored")
    if not items:
        return None
    draw(st.sampled_from(items)).payload += b"\0"
    return parts.build()


@_breaks("INT-2", "segment.integers", "segment.side")
def _another_integer(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    """At a patched token it is the side block that is contradicted (SID-4)."""
    items = _payloads(plan, parts, "stored")
    if not items:
        return None
    item = draw(st.sampled_from(items))
    place = draw(st.integers(0, len(item.payload) - 1))
    wrong = item.payload[place] ^ draw(st.integers(1, 255))
    item.payload = item.payload[:place] + bytes([wrong]) + item.payload[place + 1 :]
    return parts.build()


@_breaks("ZST-5", "segment.payload")
def _zstd_payload(draw: st.DrawFn, plan: Plan, parts: Parts) -> bytes | None:
    """A radix that is none, an entry without rows, a frame too few, or bytes behind the last."""
    items = _payloads(plan, parts, "zstd")
    if not items:
        return None
    item = draw(st.sampled_from(items))
    old = item.payload
    (frames,) = struct.unpack_from("<I", old)
    item.payload = draw(
        st.sampled_from(
            [
                old[:13] + b"\x64" + old[14:],
                old[:4] + bytes(4) + old[8:],
                struct.pack("<I", frames - 1) + old[4:],
                old + b"\0",
            ]
        )
    )
    return parts.build()


@st.composite
def broken(draw: st.DrawFn, codecs: Set[str]) -> Probe:
    """One rule is broken and every digest, size and offset that follows is right."""
    plan = draw(plans(codecs))
    names = draw(st.permutations(sorted(BREAKERS)))
    for name in names:
        requirement, codes, breaker = BREAKERS[name]
        data = breaker(draw, plan, compose(plan))
        if data is not None:
            break
    else:  # pragma: no cover - content-id always applies
        raise AssertionError("no breaker applies")
    return Probe(
        f"broken-{name}",
        f"{requirement} is broken ({name}); every digest, size and offset that follows is right.",
        (requirement,),
        "faulty",
        frozenset(plan.codecs),
        data,
        (_operation("verify", codes=codes),),
    )


# --- the order of refusal --------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One failure; hooks of ``Parts.build`` or a change of the file, applied in the end."""

    name: str
    code: str
    requirement: str
    hook: str = ""
    edit: Callable[[Any], Any] = bytes


def _set(**members: Any) -> Callable[[Json], None]:
    return lambda value: value.update(members)


UNKNOWN: Final = {"com.example.new": {"must_understand": True, "value": None}}
STAGES: Final = (  # in the order of ORD-1
    Stage("magic", "header.magic", "HDR-1", "file", lambda data: b"X" + data[1:]),
    Stage("shorter-than-48", "file.size", "ORD-2", "file", lambda data: data[:47]),
    Stage("header-bytes", "header.field", "HDR-11", "edit_header", _set(header_bytes=127)),
    Stage("shorter-than-header", "file.size", "ORD-2", "file", lambda data: data[:127]),
    Stage("check", "header.check", "HDR-3", "break_check"),
    Stage("version", "version.unknown", "VRS-1", "edit_header", _set(version=(0, 10))),
    Stage("reserved", "header.field", "HDR-6", "edit_header", _set(reserved=b"\1" * 24)),
    Stage("size", "file.size", "HDR-10", "file", lambda data: data + b"\0"),
    Stage("digest", "manifest.digest", "HDR-5", "edit_header", _set(manifest_digest=bytes(32))),
    Stage(
        "key-twice",
        "manifest.duplicate-key",
        "JSN-3",
        "edit_text",
        lambda text: text.replace(b'{"content_id":', b'{"content_id":0,"content_id":', 1),
    ),
    Stage("canonical", "manifest.canonical", "JSN-7", "edit_text", lambda text: b" " + text),
    Stage("feature", "feature.unknown", "FEA-2", "edit_manifest", _set(features=["new-rule"])),
    Stage("extension", "extension.unknown", "EXT-2", "edit_manifest", _set(extensions=UNKNOWN)),
    Stage("schema", "manifest.schema", "MAN-1", "edit_manifest", _set(generator=1)),
    Stage("semantics", "manifest.semantics", "CID-3", "edit_manifest", _set(content_id="0" * 64)),
)


@st.composite
def order(draw: st.DrawFn, codecs: Set[str]) -> Probe:
    """Of several failures the first in the order of ORD-1 is told."""
    plan = draw(plans(codecs))
    stages = draw(st.lists(st.sampled_from(STAGES), min_size=2, max_size=4, unique=True))
    stages.sort(key=STAGES.index)
    data = apply(stages, compose(plan))
    if stages[0].name in ("check", "version"):  # nothing behind the header is looked at
        front = data[:128]
        junk = draw(st.sampled_from([None, b"", b"\xff" * 40, b'{"a":01}']))
        data = data if junk is None or any(s.hook == "file" for s in stages) else front + junk
    verdict = "unsupported" if stages[0].code.split(".")[0] in _UNSUPPORTED else "invalid"
    expect = {"verdict": verdict, "codes": [stages[0].code]}
    names = [stage.name for stage in stages]
    calls = ["verify"] if names[0] == "size" else ["verify", "inspect"]
    return Probe(
        f"order-{'-'.join(names[:2])}",
        f"Failures of several steps: {', '.join(names)}. The first of ORD-1 is `{stages[0].code}`.",
        ("ORD-1", stages[0].requirement),
        "future" if verdict == "unsupported" else "faulty",
        frozenset(plan.codecs),
        data,
        tuple(_operation(call, expect=expect) for call in calls),
    )


_UNSUPPORTED: Final = frozenset({"version", "feature", "extension"})


def apply(stages: list[Stage], parts: Parts) -> bytes:
    """The file with all these failures."""

    def hook(kind: str) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            for stage in stages:
                if stage.hook == kind:
                    changed = stage.edit(value)
                    value = value if changed is None else changed
            return value

        return run

    broken_check = any(stage.hook == "break_check" for stage in stages)
    data = parts.build(
        break_check=broken_check,
        edit_header=hook("edit_header"),
        edit_text=hook("edit_text"),
        edit_manifest=hook("edit_manifest"),
    )
    for stage in reversed(stages):
        if stage.hook == "file":
            data = stage.edit(data)
    return data


def probes(codecs: Set[str]) -> st.SearchStrategy[Probe]:
    """All laws; ``codecs`` are those that the implementation declares and that can be made."""
    return st.one_of(valid(codecs), damaged(codecs), broken(codecs), order(codecs))
