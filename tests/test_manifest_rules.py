"""Manifests whose digests are right and whose content breaks one rule of sections 5 to 9.1."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import kvformat.manifest
from kvformat import InvalidError
from tests.builder import Builder
from tests.damage import (
    DROP,
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

SCHEMA = Path(__file__).resolve().parent.parent / "schema/manifest.schema.json"
VALIDATOR = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
BASES = {
    "plain": artifact(),
    "window": artifact(window=True),
    "bound": bound_artifact(),
    "later": bound_artifact(512),
}
MANIFESTS = {name: Builder(file).manifest for name, file in BASES.items()}
Z = "0" * 64


def check(base: str, changes: dict[str, Any], code: str) -> None:
    """Opening gives ``code``, and the JSON Schema agrees on which kind of error it is (ERR-5)."""
    file = with_members(Builder(BASES[base]), changes)
    manifest = json.loads(file[128 : 128 + int.from_bytes(file[56:64], "little")])
    assert open_code(file) == code
    if code in ("manifest.schema", "manifest.semantics", "ok"):
        assert VALIDATOR.is_valid(manifest) == (code != "manifest.schema")


@covers("MAN-1", "CID-2", "CID-3", "DAT-1", "DAT-4", "TAB-2", "HDR-7", "HDR-8")
@pytest.mark.parametrize("base", BASES)
def test_bases_are_valid_and_built_again_byte_for_byte(base: str) -> None:
    assert Builder(BASES[base]).build() == BASES[base]
    assert verdict(BASES[base]) == "ok"
    check(base, {}, "ok")


# --- every member ----------------------------------------------------------------------------


def walk(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a manifest with its pointer, the first two elements of lists only."""
    yield pointer, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{pointer}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from walk(item, f"{pointer}/{index}")


def inside_extension(pointer: str) -> bool:
    return "/value" in pointer and pointer.startswith("/extensions")


@covers("MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1", "EXT-1", "JSN-11", "ERR-5")
@pytest.mark.parametrize("base", ["plain", "window", "bound"])
def test_members_are_exactly_those_of_the_text(base: str) -> None:
    for pointer, value in walk(MANIFESTS[base]):
        if not isinstance(value, dict) or inside_extension(pointer):
            continue
        if pointer != "/extensions":
            check(base, {f"{pointer}/zz": 1}, "manifest.schema")
            for key in value:
                check(base, {f"{pointer}/{key}": DROP}, "manifest.schema")


@covers("MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1", "JSN-10", "CNV-4", "ERR-5")
@pytest.mark.parametrize("base", ["plain", "window", "bound"])
def test_values_of_another_type_are_refused(base: str) -> None:
    for pointer, value in walk(MANIFESTS[base]):
        if not pointer or inside_extension(pointer):
            continue
        wrong: list[Any] = [True, "", [], {}, 0, None, [None]]
        for new in wrong:
            if type(new) is type(value) or (pointer == "/extensions" and new == {}):
                continue
            changed = copy.deepcopy(MANIFESTS[base])
            put(changed, pointer, new)
            if not VALIDATOR.is_valid(changed):
                check(base, {pointer: new}, "manifest.schema")
            else:
                assert new is None or new == []  # optional members and empty lists


# --- one value -------------------------------------------------------------------------------

SINGLE: list[tuple[str, str, Any]] = [
    ("plain", "/format", "kvformat2"),
    ("plain", "/version", "0.90"),
    ("plain", "/version", "0.8"),
    ("plain", "/groups", []),
    ("plain", "/qualities", []),
    ("plain", "/tracks", []),
    ("plain", "/generator", ""),
    ("plain", "/generator", "x" * 1025),
    ("plain", "/content_id", "A" * 64),
    ("plain", "/source_digest", "blake3:" + Z),
    ("plain", "/identity/layers_total", 0),
    ("plain", "/identity/component", "target"),
    ("plain", "/identity/kind", "none"),
    ("plain", "/identity/cache_dtype", "Float16"),
    ("bound", "/identity/rope/0/inv_freq", ""),
    ("bound", "/identity/rope/0/inv_freq", "3f8000003f80"),
    ("bound", "/identity/rope/0/inv_freq", "3f80000080000000"),
    ("bound", "/identity/rope/0/inv_freq", "bf800000"),
    ("bound", "/identity/rope/0/inv_freq", "7f800000"),
    ("bound", "/identity/rope/0/inv_freq", "7fc00000"),
    ("bound", "/identity/rope/0/scaling", "0" * 16),
    ("bound", "/identity/rope/0/scaling", "8000000000000000"),
    ("bound", "/identity/rope/0/scaling", "7ff0000000000000"),
    ("bound", "/identity/rope/0/scaling", "7ff8000000000000"),
    ("bound", "/identity/rope/0/scaling", "bff0000000000000"),
    ("bound", "/identity/rope/0/pairing", "pairs"),
    ("bound", "/identity/scale_scheme/scales/0/bits", "00000000"),
    ("bound", "/identity/scale_scheme/scales/0/bits", "ff800000"),
    ("bound", "/identity/model/weights_digest", "md5:" + Z),
    ("plain", "/qualities/0/relative_step", "0" * 16),
    ("plain", "/qualities/0/relative_step", "fff0000000000000"),
    ("plain", "/qualities/0/encodings/0", "lossy"),
    ("bound", "/lineage/generations", 0),
    ("plain", "/lineage", {"kind": "exact", "generations": 1}),
    ("bound", "/tokens/chain/block_tokens", 512),
    ("bound", "/tokens/content/0/count", 0),
    ("plain", "/groups/0/dtype", "int8"),
    ("plain", "/groups/0/layers", []),
    ("plain", "/groups/0/heads", 0),
    ("plain", "/groups/0/head_dim", 0),
    ("plain", "/groups/0/role", "Key"),
    ("plain", "/groups/0/tokens", {"kind": "most"}),
    ("window", "/groups/3/tokens/shape", []),
    ("window", "/groups/3/tokens/shape", [1] * 9),
    ("window", "/groups/3/tokens/shape", [0, 4]),
    ("plain", "/segmentation/alignment", 2),
    ("plain", "/segmentation/alignment", 0),
    ("plain", "/segmentation/alignment", 8192),
    ("plain", "/segmentation/order", "head-major"),
    ("plain", "/segmentation/tokens", 0),
    ("plain", "/segmentation/groups/0/layers", 0),
    ("plain", "/segmentation/groups/0/heads", 0),
    ("plain", "/tracks/0/codecs/0", "av1"),
    ("plain", "/tracks/0/name", "near-lossless"),
    ("plain", "/tracks/0/layouts/0/width", 128),
    ("plain", "/tracks/0/layouts/0/width", 152),
    ("plain", "/tracks/0/layouts/0/height", 143),
    ("plain", "/tracks/0/layouts/0/height", 0),
    ("plain", "/tracks/0/layouts/0/fold", [1]),
    ("plain", "/tracks/0/layouts/0/fold", [0, 1]),
    ("plain", "/tracks/0/layouts/0/tile", [1, 1, 1]),
    ("plain", "/tracks/0/layouts/0/grid/0", 0),
    ("plain", "/tracks/0/layouts/0/frames", 0),
    ("plain", "/tracks/0/layouts/0/order", "zigzag"),
]


@covers(
    "MAN-1", "MAN-2", "MAN-4", "CNV-4", "IDN-1", "IDN-6", "IDN-8", "LIN-2", "TOK-8", "GRP-1",
    "GRP-6", "SEG-4", "SEG-5", "TRK-1", "TRK-3", "QUA-1", "LAY-1", "LAY-4", "ERR-5",
)  # fmt: skip
@pytest.mark.parametrize(("base", "pointer", "value"), SINGLE, ids=lambda v: str(v)[:40])
def test_a_value_that_breaks_a_rule_alone(base: str, pointer: str, value: Any) -> None:
    check(base, {pointer: value}, "manifest.schema")


# --- values that contradict each other -------------------------------------------------------

KEY = {
    "engine": "e", "engine_version": None, "hash_algorithm": "h", "key": "k", "rank": 0,
    "world_size": 1,
}  # fmt: skip
CHAIN = MANIFESTS["bound"]["tokens"]["chain"]
ID = MANIFESTS["plain"]["content_id"]
DATA_BYTES = MANIFESTS["plain"]["data_bytes"]
SECOND_TRACK = MANIFESTS["plain"]["tracks"][1]["data_start"]
SPAN = {"count": 1, "digest": None, "kind": "image", "start": 290}

CONTRADICTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "MAN-5 group twice": ("plain", {"/groups/1/name": "keys"}),
    "MAN-5 quality twice": ("plain", {"/qualities/1/name": "near-lossless"}),
    "MAN-5 track twice": ("plain", {"/tracks/1/name": "near-lossless/hevc"}),
    "IDN-3 descending": ("bound", {"/identity/rope/0/layers": [1, 0]}),
    "IDN-3 repeated": ("bound", {"/identity/rope/0/layers": [1, 1]}),
    "IDN-3 shared": ("bound", {"/identity/rope/1/layers": [2, 5]}),
    "IDN-3 no such layer": ("bound", {"/identity/rope/1/layers": [3, 8]}),
    "IDN-4 key for tokens": ("bound", {"/identity/engine_key": KEY}),
    "IDN-4 key for unbound": ("plain", {"/identity/engine_key": KEY}),
    "IDN-4 no key": ("plain", {"/identity/kind": "engine_key"}),
    "IDN-5 no chain": ("bound", {"/tokens/chain": None}),
    "IDN-5 chain for unbound": ("plain", {"/tokens/chain": {**CHAIN, "hashes": [Z]}}),
    "IDN-5 unbound with chain": ("bound", {"/identity/kind": "unbound"}),
    "IDN-7 twice": ("bound", {"/identity/scale_scheme/scales/1/role": "key"}),
    "IDN-7 no such layer": ("bound", {"/identity/scale_scheme/scales/0/layer": 8}),
    "ENG-1": (
        "plain",
        {"/identity/kind": "engine_key", "/identity/engine_key": {**KEY, "rank": 1}},
    ),
    "TOK-5 one hash too few": ("bound", {"/tokens/chain/hashes/1": DROP}),
    "TOK-5 one hash too many": ("bound", {"/tokens/chain/hashes/-": Z}),
    "TOK-5 none": ("bound", {"/tokens/chain/hashes": []}),
    "TOK-5 hash behind a span without digest": ("bound", {"/tokens/content/-": SPAN}),
    "TOK-7 no block boundary": ("later", {"/tokens/first_position": 511}),
    "TOK-7 parent at 0": ("bound", {"/tokens/chain/parent": Z}),
    "TOK-7 no parent": ("later", {"/tokens/chain/parent": None}),
    "TOK-8 overlap": ("bound", {"/tokens/content/1/start": 6}),
    "TOK-8 descending": ("bound", {"/tokens/content/1/start": 1}),
    "TOK-8 behind the end": ("bound", {"/tokens/content/1/count": 294}),
    "TOK-8 before the start": ("later", {"/tokens/content/0/start": 511}),
    "CID-3": ("plain", {"/content_id": Z}),
    "CID-2 other source": ("plain", {"/source_digest": Z, "/content_id": ID}),
    "CID-2 other model": ("plain", {"/identity/model/id": "b", "/content_id": ID}),
    "CID-2 other group": ("plain", {"/groups/0/role": "other", "/content_id": ID}),
    "GRP-2 descending": ("plain", {"/groups/0/layers": [1, 3, 6, 4]}),
    "GRP-2 repeated": ("plain", {"/groups/0/layers": [1, 3, 3, 4]}),
    "GRP-2 no such layer": ("plain", {"/groups/0/layers": [1, 3, 4, 64]}),
    "GRP-3": ("plain", {"/groups/0/head_start": 1}),
    "GRP-3 fewer in the model": ("plain", {"/groups/0/heads_total": 1}),
    "GRP-4": ("plain", {"/groups/1/role": "key"}),
    "GRP-5 start": ("window", {"/groups/2/tokens/held_start": 11}),
    "GRP-5 counter": ("window", {"/groups/2/tokens/cumulative_tokens": 11}),
    "GRP-6": ("window", {"/groups/3/tokens/shape": [2, 3]}),
    "SEG-4 too few": ("plain", {"/segmentation/groups/1": DROP}),
    "SEG-4 too many": ("plain", {"/segmentation/groups/-": {"heads": 1, "layers": 1}}),
    "SEG-4 heads": ("plain", {"/segmentation/groups/1/heads": 2}),
    "LEN-1 null": ("window", {"/valid_lengths": None}),
    "LEN-1 without T": ("window", {"/valid_lengths": [9]}),
    "LEN-1 empty": ("window", {"/valid_lengths": []}),
    "LEN-1 not null": ("plain", {"/valid_lengths": [10]}),
    "LEN-2 descending": ("window", {"/valid_lengths": [5, 4, 10]}),
    "LEN-2 repeated": ("window", {"/valid_lengths": [10, 10]}),
    "LEN-2 above T": ("window", {"/valid_lengths": [10, 11]}),
    "TAB-2 too many": ("plain", {"/tracks/0/segments": 7}),
    "TAB-2 too few": ("plain", {"/tracks/4/segments": 5}),
    "TAB-2 other segmentation": ("plain", {"/segmentation/tokens": 5 * 2**10}),
    "TAB-2 other heads": ("plain", {"/segmentation/groups/0/heads": 1}),
    "TRK-2 unknown quality": ("plain", {"/tracks/0/quality": "small"}),
    "TRK-2 name of another quality": ("plain", {"/tracks/0/name": "small/hevc"}),
    "TRK-2 codec that is not used": ("plain", {"/tracks/0/codecs": ["zstd", "zstd"]}),
    "TRK-3 too few": ("plain", {"/tracks/1/codecs": ["zstd"]}),
    "TRK-3 too many": ("plain", {"/tracks/1/codecs": ["zstd"] * 3}),
    "TRK-3 hevc for exact": ("plain", {"/tracks/3/codecs": ["hevc", "zstd"]}),
    "TRK-4": ("plain", {f"/tracks/{index}/quality": "exact" for index in (0, 1, 2)}),
    "TRK-5 layouts without hevc": (
        "plain", {"/tracks/1/layouts": MANIFESTS["plain"]["tracks"][0]["layouts"]}
    ),
    "TRK-6 equal layouts": (
        "plain", {"/tracks/0/layouts/1": MANIFESTS["plain"]["tracks"][0]["layouts"][0]}
    ),
    "LAY-3 high": ("plain", {"/tracks/0/layouts/0/grid": [145, 1]}),
    "LAY-3 wide": ("plain", {"/tracks/0/layouts/0/grid": [1, 19]}),
    "LAY-3 folded": ("plain", {"/tracks/0/layouts/1/fold": [145, 1]}),
    "LAY-3 huge": ("plain", {"/tracks/0/layouts/1/fold": [2**53 - 1, 2**53 - 1]}),
    "DAT-1 first": ("plain", {"/qualities/0/data_start": 1}),
    "DAT-1 hole": ("plain", {"/tracks/1/data_start": SECOND_TRACK + 1}),
    "DAT-1 overlap": ("plain", {"/tracks/1/data_start": SECOND_TRACK - 1}),
    "DAT-1 stop before start": ("plain", {"/tracks/4/data_stop": 1}),
    "DAT-4": ("plain", {"/data_bytes": DATA_BYTES + 1}),
    "DAT-4 0": ("plain", {"/data_bytes": 0}),
    "QUA-2 exact name": ("plain", {"/qualities/1/encodings": ["quantised", "exact"]}),
    "QUA-2 exact encodings": ("plain", {"/qualities/0/encodings": ["exact", "exact"]}),
    "QUA-2 too few": ("plain", {"/qualities/0/encodings": ["quantised"]}),
    "QUA-3 state": ("window", {"/qualities/0/encodings/3": "quantised"}),
    "QUA-3 uint8": ("plain", {"/groups/0/dtype": "uint8"}),
    "QUA-4 sets": ("plain", {"/qualities/1/sets": 1}),
    "QUA-4 step": ("plain", {"/qualities/1/relative_step": "3ff0000000000000"}),
}  # fmt: skip


@covers(
    "MAN-5", "IDN-3", "IDN-4", "IDN-5", "IDN-7", "ENG-1", "TOK-5", "TOK-7", "TOK-8", "CID-3",
    "CID-2", "GRP-2", "GRP-3", "GRP-4", "GRP-5", "GRP-6", "SEG-4", "LEN-1", "LEN-2", "TAB-2",
    "TRK-2", "TRK-3", "TRK-4", "TRK-5", "TRK-6", "LAY-3", "DAT-1", "DAT-4", "QUA-2", "QUA-3",
    "QUA-4", "ERR-5",
)  # fmt: skip
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_values_that_contradict_each_other(name: str) -> None:
    base, changes = CONTRADICTIONS[name]
    check(base, changes, "manifest.semantics")


@covers("MAN-3")
def test_features_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvformat.manifest, "KNOWN_FEATURES", frozenset({"a", "b"}))
    for features, code in (
        (["a", "b"], "ok"), (["b", "a"], "manifest.semantics"), (["a", "a"], "manifest.semantics"),
    ):  # fmt: skip
        check("plain", {"/features": features}, code)


@covers("HDR-7", "HDR-8", "ORD-1")
def test_alignment_and_tables_of_the_manifest_bind_the_header() -> None:
    check("plain", {"/qualities/0/sets": 2}, "header.field")
    check("plain", {"/qualities/0/sets": 4}, "header.field")
    builder = parts()
    wanted = builder.build(
        edit_header=lambda fields: fields.update(file_bytes=fields["file_bytes"] + 1)
    )
    assert open_code(wanted + b"\0") == "header.field"


@covers("FEA-4", "IDN-8", "TOK-5")
@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("plain", {"/groups/0/role": "something-new"}),
        ("plain", {"/identity/layers_total": 65_536}),
        ("bound", {"/identity/rope/0/inv_freq": "00000000000000017f7fffff"}),
        ("bound", {"/tokens/content/0/kind": "smell", "/identity/rotation/name": "twist"}),
        ("plain", {"/groups/0/head_start": 1, "/groups/0/heads_total": 3}),
        ("plain", {"/qualities/0/relative_step": None}),
        ("bound", {"/tokens/chain/salted": False}),
        ("bound", {"/tokens/content/0/digest": None, "/tokens/chain/hashes": []}),
        ("bound", {"/tokens/content/-": SPAN, "/tokens/chain/hashes/1": DROP}),
        ("bound", {"/tokens/content": []}),
        ("window", {"/valid_lengths": [0, 3, 10]}),
        ("plain", {"/generator": "模型 \n\u0000"}),
    ],
    ids=str,
)
def test_what_no_rule_forbids_is_accepted(base: str, changes: dict[str, Any]) -> None:
    check(base, changes, "ok")
    file = with_members(Builder(BASES[base]), changes)
    assert verdict(file) == "ok"
    track = MANIFESTS[base]["tracks"][0]["name"]
    assert outcome(file, track) == outcome(BASES[base], track)


@covers("MAN-1")
def test_texts_are_measured_in_bytes() -> None:
    for text, code in (("é" * 512, "ok"), ("é" * 513, "manifest.schema")):
        assert open_code(with_members(parts(), {"/generator": text})) == code


@covers("ERR-3")
def test_an_error_names_the_place() -> None:
    file = with_members(parts(), {"/groups/1/dtype": "int8"})
    with pytest.raises(InvalidError) as caught:
        kvformat.open(file)
    assert caught.value.where == "/groups/1/dtype"
    assert "float16" in (caught.value.expected or "")
    assert caught.value.found == "'int8'"
