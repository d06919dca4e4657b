"""Content that is wrong at random behind right digests: an answer with a code, or the right values.

Every case ends in ``ok`` or a ``KvformatError``; what is read is what the reference reads. The
random changes keep all digests, sizes and offsets right, so that they reach the inner checks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvformat
from kvformat import KvformatError
from kvformat.errors import CODES
from kvformat.header import parse_header
from kvformat.manifest import parse_manifest
from tests.builder import Builder, canonical, seal_header
from tests.damage import artifact, bound_artifact, outcome, put, verdict
from tests.reference import SEGMENT_FIELDS, SET_FIELDS, reference_restore
from tests.requirements import covers

many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
INVALID = set(CODES["invalid"])
PLAIN = Builder(artifact())
OTHERS = ("near-lossless/zstd", "near-lossless/stored", "near-lossless/hevc", "exact/zstd")
SINGLE = {track: Builder(artifact(tracks=(track,))) for track in OTHERS}
MANIFESTS = {
    "plain": PLAIN.manifest,
    "window": Builder(artifact(window=True)).manifest,
    "bound": Builder(bound_artifact()).manifest,
}


def settle(file: bytes, track: str) -> str:
    """Read and verify; the values, if there are any, must be those of the reference."""
    found = outcome(file, track)
    if isinstance(found, dict):
        expected = reference_restore(file)[track]
        assert found == {name: array.tobytes() for name, array in expected.items()}
    else:
        assert found in INVALID, found
    code = verdict(file)
    assert code == "ok" or code in INVALID, code
    return code


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([1, 1, 1, 2, 4, 8]))
        kind = draw(st.sampled_from(["change", "change", "cut", "double", "insert", "end"]))
        old = data[place : place + length]
        if kind == "change":
            new = draw(st.binary(min_size=len(old), max_size=len(old)))
            data = data[:place] + new + data[place + length :]
        elif kind == "cut":
            data = data[:place] + data[place + length :]
        elif kind == "double":
            data = data[:place] + old + data[place:]
        elif kind == "insert":
            data = data[:place] + draw(st.binary(min_size=1, max_size=8)) + data[place:]
        else:
            data = data[:place]
    return data


@covers("ERR-1", "ORD-3", "SEC-3", "PAR-2", "SET-3", "SID-1", "ZST-7", "HEV-8")
@pytest.mark.parametrize("track", OTHERS)
@pytest.mark.parametrize("what", ["set", "side", "payload"])
@many
@given(data=st.data())
def test_objects(track: str, what: str, data: st.DataObject) -> None:
    builder = SINGLE[track].copy()
    if track.startswith("exact") and what != "payload":
        return
    if what == "set":
        item: Any = data.draw(st.sampled_from(builder.sets["near-lossless"]))
        item.data = data.draw(mutated(item.data))
    else:
        item = data.draw(st.sampled_from(builder.segments[track]))
        setattr(item, what, data.draw(mutated(getattr(item, what))))
    settle(builder.build(), track)


EXTREME = st.sampled_from([0, 1, 2, 3, 5, 6, 10, 127, 128, 255, 256, 2**15, 2**16 - 2, 2**16 - 1])
WIDE = EXTREME | st.sampled_from([2**16, 2**31, 2**32 - 2, 2**32 - 1])
HUGE = WIDE | st.sampled_from([2**32, 2**40, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1])
WIDTHS = {
    "offset": HUGE, "stored_bytes": HUGE, "bytes": HUGE, "token_start": HUGE, "side_bytes": WIDE,
    "set_index": WIDE, "token_count": WIDE, "head_start": WIDE, "head_count": WIDE,
    "group": EXTREME, "layer_index": EXTREME, "layer_count": EXTREME, "layout": EXTREME,
}  # fmt: skip


@covers("ERR-1", "CNV-3", "ORD-4", "SEC-3")
@settings(many, max_examples=400)
@given(st.data())
def test_records(data: st.DataObject) -> None:
    builder = PLAIN.copy()
    track = data.draw(st.sampled_from(OTHERS))
    rows: list[Any] = builder.segments[track]
    names = [name for name in SEGMENT_FIELDS if name in WIDTHS]
    if data.draw(st.booleans()) and track.startswith("near"):
        rows = builder.sets["near-lossless"]
        names = [name for name in SET_FIELDS if name in WIDTHS]
    changes = {}
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(rows) - 1))
        field = data.draw(st.sampled_from(names))
        changes[number, field] = data.draw(WIDTHS[field])

    def edit(_: Builder) -> None:
        for (number, field), value in changes.items():
            rows[number].record[field] = value

    settle(builder.build(edit_records=edit), track)


# --- manifests -------------------------------------------------------------------------------


def pointers(value: Any, pointer: str = "") -> list[str]:
    """Pointers to all values but the root."""
    found = [pointer] if pointer else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += pointers(item, f"{pointer}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += pointers(item, f"{pointer}/{index}")
    return found


def at(value: Any, pointer: str) -> Any:
    for step in pointer.strip("/").split("/"):
        value = value[int(step) if isinstance(value, list) else step]
    return value


NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 4, 7, 9, 10, 11, 15, 16, 17, 64, 144, 255, 256, 4096, 65_535, 65_536, 65_537,
     2**20, 2**31, 2**32, 2**40, 2**52, 2**53 - 1, 2**53]
)  # fmt: skip
TEXTS = st.sampled_from(
    ["", "a", "key", "exact", "hevc", "zstd", "near-lossless", "0" * 64, "é\n", "x" * 5000]
)


@covers("ERR-1", "MAN-1", "LIM-2", "CNV-3", "SEC-3")
@pytest.mark.parametrize("base", MANIFESTS)
@settings(many, max_examples=400)
@given(data=st.data())
def test_manifests(base: str, data: st.DataObject) -> None:
    manifest = copy.deepcopy(MANIFESTS[base])
    for _ in range(data.draw(st.integers(1, 3))):
        pointer = data.draw(st.sampled_from(pointers(manifest)))
        old = at(manifest, pointer)
        other = at(manifest, data.draw(st.sampled_from(pointers(manifest))))
        new: Any
        if isinstance(old, bool) or old is None:
            new = data.draw(st.sampled_from([True, False, None, 0, copy.deepcopy(other)]))
        elif isinstance(old, int):
            new = data.draw(NUMBERS | st.just(max(old - 1, 0)) | st.just(old + 1))
        elif isinstance(old, str):
            new = data.draw(TEXTS | st.just(old + "0"))
        elif isinstance(old, list):
            new = data.draw(st.sampled_from([[], old[:-1], old + old, old[::-1]]))
        else:
            new = data.draw(st.sampled_from([{}, copy.deepcopy(other)]))
        put(manifest, pointer, copy.deepcopy(new))
    try:
        parse_manifest(canonical(manifest))
    except KvformatError as error:
        assert error.code in INVALID | {"feature.unknown", "extension.unknown"}


@covers("ERR-1", "ORD-1", "ORD-2")
@many
@given(st.binary(max_size=200), st.integers(0, 160))
def test_any_header(data: bytes, keep: int) -> None:
    good = artifact()
    for file in (data, good[:keep] + data, data[:keep] + good[keep:]):
        with pytest.raises(KvformatError):
            kvformat.open(file if file != good else b"")


@covers("ERR-1", "CNV-3", "ORD-1")
@many
@given(
    st.binary(min_size=8, max_size=8),
    st.tuples(HUGE, HUGE, HUGE, st.binary(min_size=32, max_size=32), st.just(bytes(24))),
)
def test_any_header_with_a_right_check(fixed: bytes, fields: Any) -> None:
    for head in (artifact()[:8] + fixed, artifact()[:16]):
        header = seal_header(head, fields)
        try:
            parse_header(header)
        except KvformatError as error:
            assert error.verdict in ("invalid", "unsupported")
        with pytest.raises(KvformatError):
            kvformat.open(header + artifact()[128:])
