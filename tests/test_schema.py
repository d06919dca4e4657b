"""The JSON Schemas are valid, closed, tied to prose and limits, and refuse what they should."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvformat.errors import CODES, InvalidError, MismatchError, StorageError
from kvformat.groups import ALIGNMENTS
from kvformat.limits import LIMITS
from tests.requirements import code_spans, covers, section, table_rows

FOLDER = Path(__file__).resolve().parent.parent / "schema"
MANIFEST = json.loads((FOLDER / "manifest.schema.json").read_text(encoding="utf-8"))
VERDICT = json.loads((FOLDER / "verdict.schema.json").read_text(encoding="utf-8"))
PROFILE = json.loads((FOLDER / "profile.schema.json").read_text(encoding="utf-8"))
CONDITIONS = ("if", "then", "else")
"""Parts of a schema that add to what stands beside them."""

Path_ = tuple[str | int, ...]
ONES = "1" * 64
HASH = "blake3:" + "0123456789abcdef" * 4


def sample() -> dict[str, Any]:
    """A manifest with every object of the format in it; digests are made up."""
    return {
        "content_id": ONES,
        "data_bytes": 123_456,
        "extensions": {"com.example.note": {"must_understand": False, "value": {"a": [1, None]}}},
        "features": ["some-feature"],
        "format": "kvformat",
        "generator": "hand 1.0",
        "groups": [
            {
                "dtype": "bfloat16",
                "head_dim": 64,
                "head_start": 0,
                "heads": 3,
                "heads_total": 3,
                "layers": [0, 1, 3],
                "name": "keys",
                "role": "key",
                "tokens": {"kind": "all"},
            },
            {
                "dtype": "bfloat16",
                "head_dim": 64,
                "head_start": 0,
                "heads": 3,
                "heads_total": 3,
                "layers": [2],
                "name": "window",
                "role": "value",
                "tokens": {"cumulative_tokens": 300, "held_start": 44, "kind": "window"},
            },
            {
                "dtype": "float32",
                "head_dim": 32,
                "head_start": 0,
                "heads": 1,
                "heads_total": 1,
                "layers": [4],
                "name": "state",
                "role": "state",
                "tokens": {"kind": "state", "shape": [4, 8]},
            },
        ],
        "identity": {
            "adapters": [{"digest": HASH, "id": "an adapter"}],
            "cache_dtype": "float8_e4m3fn",
            "component": "main",
            "engine_key": None,
            "kind": "tokens",
            "layers_total": 5,
            "model": {"id": "a model", "revision": None, "weights_digest": HASH},
            "rope": [
                {
                    "inv_freq": "3f8000003f000000",
                    "keys_rotated": True,
                    "layers": [0, 1],
                    "pairing": "half",
                    "scaling": "3ff0000000000000",
                }
            ],
            "rotation": {"digest": HASH, "name": "matrix"},
            "scale_scheme": {
                "name": "per-layer",
                "scales": [{"bits": "3f800000", "layer": 0, "role": "key"}],
            },
            "tokenizer": {"digest": HASH, "id": "a tokenizer"},
        },
        "lineage": {
            "generations": 1,
            "kind": "lossy",
            "profile": ONES,
            "quality": "near-lossless",
        },
        "qualities": [
            {
                "data_start": 0,
                "data_stop": 1000,
                "encodings": ["quantised", "quantised", "exact"],
                "name": "near-lossless",
                "relative_step": "3fd1eb851eb851ec",
                "set_table_digest": ONES,
                "sets": 2,
            }
        ],
        "segmentation": {
            "alignment": 1,
            "groups": [{"heads": 3, "layers": 3}, {"heads": 3, "layers": 1}],
            "order": "token-major",
            "tokens": 256,
        },
        "source_digest": ONES,
        "tokens": {
            "chain": {"block_tokens": 256, "hashes": [ONES, ONES], "parent": None, "salted": True},
            "content": [{"count": 3, "digest": HASH, "kind": "image", "start": 7}],
            "count": 300,
            "first_position": 0,
        },
        "tracks": [
            {
                "codecs": ["hevc", "zstd", "stored"],
                "data_start": 1000,
                "data_stop": 123_456,
                "encoder": "none",
                "layouts": [
                    {
                        "fold": [1, 1],
                        "frames": 1,
                        "grid": [144, 1],
                        "height": 144,
                        "order": "time",
                        "tile": [1, 192],
                        "width": 192,
                    }
                ],
                "name": "near-lossless/hevc",
                "quality": "near-lossless",
                "segments": 5,
                "table_digest": ONES,
            }
        ],
        "valid_lengths": [300],
        "version": "0.9",
    }


def with_engine_key() -> dict[str, Any]:
    """The same, with the members that are null in ``sample`` filled and others emptied."""
    manifest = sample()
    manifest["identity"]["kind"] = "engine_key"
    manifest["identity"]["engine_key"] = {
        "engine": "an engine",
        "engine_version": None,
        "hash_algorithm": "sha256",
        "key": "k",
        "rank": 0,
        "world_size": 1,
    }
    for member in ("rotation", "scale_scheme", "tokenizer"):
        manifest["identity"][member] = None
    manifest["tokens"]["chain"] = None
    manifest["lineage"] = {"kind": "exact"}
    manifest["valid_lengths"] = None
    manifest["extensions"] = {}
    return manifest


VALIDATOR = Draft202012Validator(MANIFEST)
VALID = {"chain": sample(), "engine key": with_engine_key()}


def walk(value: object, path: Path_ = ()) -> Iterator[tuple[Path_, object]]:
    yield path, value
    if isinstance(value, dict):
        for key, member in value.items():
            yield from walk(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from walk(member, (*path, index))


def places(wanted: Callable[[object], bool]) -> list[Any]:
    """One pytest parameter for each value that is ``wanted``, extension values left out."""
    return [
        pytest.param(name, path, id=f"{name}:/{'/'.join(map(str, path))}")
        for name, manifest in VALID.items()
        for path, value in walk(manifest)
        if wanted(value) and "value" not in path
    ]


def changed(manifest: dict[str, Any], path: Path_, value: object) -> Any:
    result = copy.deepcopy(manifest)
    if not path:
        return value
    target: Any = result
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return result


def at(manifest: dict[str, Any], path: Path_) -> Any:
    value: Any = manifest
    for step in path:
        value = value[step]
    return value


def refused(manifest: object) -> bool:
    return not VALIDATOR.is_valid(manifest)


def is_integer(value: object) -> bool:
    return type(value) is int


def object_schemas(schema: object) -> Iterator[tuple[Path_, dict[str, Any]]]:
    for path, part in walk(schema):
        is_schema = not path or path[-1] not in ("properties", "patternProperties", "$defs")
        if set(path) & set(CONDITIONS):
            continue
        if isinstance(part, dict) and is_schema:
            types = part.get("type", [])
            if types == "object" or "object" in types or "properties" in part:
                yield path, part


# --- the schemas themselves ------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema", [MANIFEST, VERDICT, PROFILE], ids=["manifest", "verdict", "profile"]
)
def test_schema_is_valid_2020_12(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"].startswith("urn:kvformat:schema:")


@covers("JSN-11", "PRF-1")
@pytest.mark.parametrize(("schema", "least"), [(MANIFEST, 20), (PROFILE, 5)])
def test_manifest_schema_is_closed(schema: dict[str, Any], least: int) -> None:
    found = list(object_schemas(schema))
    assert len(found) > least
    for path, part in found:
        assert part["additionalProperties"] is False, path


@covers("MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1", "PRF-1", "TRF-1")
@pytest.mark.parametrize("schema", [MANIFEST, PROFILE], ids=["manifest", "profile"])
def test_every_member_is_required(schema: dict[str, Any]) -> None:
    for path, part in object_schemas(schema):
        if "properties" in part:
            conditional = set(part.get("then", {}).get("required", ()))
            assert part["required"] == sorted(set(part["properties"]) - conditional), path
    assert MANIFEST["then"] == {"required": ["profile"]}


def test_verdict_schema_is_closed_but_for_summaries() -> None:
    is_open = {
        path[-1]: part.get("additionalProperties")
        for path, part in object_schemas(VERDICT)
        if part.get("additionalProperties") is not False and "oneOf" not in path
    }
    assert sorted(map(str, is_open)) == ["artifact", "checked"]


@pytest.mark.parametrize("schema", [MANIFEST, PROFILE], ids=["manifest", "profile"])
def test_every_integer_is_bounded(schema: dict[str, Any]) -> None:
    for path, part in walk(schema):
        if isinstance(part, dict) and part.get("type") == "integer":
            bounded = {"const", "enum"} & set(part) or {"minimum", "maximum"} <= set(part)
            assert bounded, path
            assert part.get("maximum", 0) <= LIMITS.integer, path


@pytest.mark.parametrize("schema", [MANIFEST, PROFILE], ids=["manifest", "profile"])
def test_patterns_are_anchored_and_portable(schema: dict[str, Any]) -> None:
    for path, part in walk(schema):
        if isinstance(part, dict) and isinstance(part.get("pattern"), str):
            pattern = part["pattern"]
            if path[-1] == "not" or path[-1] == "propertyNames":
                assert pattern == "\n", path
                continue
            assert pattern.startswith("^"), path
            assert pattern.endswith("$"), path
            assert "(?=" not in pattern, path
            assert "(?!" not in pattern, path
            assert "not" in part or part["minLength"] == part["maxLength"], path


@covers("SEG-4", "LAY-4")
@pytest.mark.parametrize(
    ("definition", "member", "keyword", "limit"),
    [
        ("", "groups", "maxItems", "groups"),
        ("", "qualities", "maxItems", "qualities"),
        ("", "tracks", "maxItems", "tracks"),
        ("group", "layers", "maxItems", "layers_per_group"),
        ("group", "heads_total", "maximum", "heads"),
        ("group", "head_dim", "maximum", "head_dim"),
        ("track", "layouts", "maxItems", "layouts_per_track"),
        ("track", "segments", "maximum", "segments_per_track"),
        ("quality", "sets", "maximum", "sets_per_quality"),
        ("layout", "frames", "maximum", "frames_per_segment"),
        ("layout", "width", "maximum", "picture_side"),
        ("layout", "height", "minimum", "picture_side_minimum"),
        ("tokens", "count", "maximum", "tokens"),
        ("tokens", "first_position", "maximum", "tokens"),
        ("segmentation", "tokens", "maximum", "tokens_per_segment"),
        ("rope", "inv_freq", "maxLength", "string_bytes"),
        ("identity", "layers_total", "maximum", "layers_total"),
    ],
)
def test_limits_are_those_of_the_spec(
    definition: str, member: str, keyword: str, limit: str
) -> None:
    part = (MANIFEST["$defs"][definition] if definition else MANIFEST)["properties"][member]
    if "$ref" in part:
        part = MANIFEST["$defs"][part["$ref"].rpartition("/")[2]]
    assert part[keyword] == getattr(LIMITS, limit)


@covers("SEG-4")
def test_limits_of_the_segmentation() -> None:
    part = MANIFEST["$defs"]["segmentation"]["properties"]
    assert part["groups"]["items"]["properties"]["layers"]["maximum"] == LIMITS.layers_per_segment
    assert tuple(part["alignment"]["enum"]) == ALIGNMENTS


@covers("MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1")
@pytest.mark.parametrize(
    ("number", "definition"),
    [
        ("5", ""),
        ("6.1", "identity"),
        ("6.2", "tokens"),
        ("7.1", "group"),
        ("8.3", "track"),
        ("9.1", "quality"),
    ],
)
def test_members_are_those_of_the_prose(number: str, definition: str) -> None:
    rows = table_rows(section(number))
    in_prose = [name for row in rows for name in code_spans(row[0])]
    if not definition:  # the one member that only a feature brings (section 9.5)
        assert "one more member, `profile`" in " ".join(section("9.5").split())
        in_prose.append("profile")
    part = MANIFEST["$defs"][definition] if definition else MANIFEST
    assert sorted(in_prose) == sorted(part["properties"])


# --- manifests -------------------------------------------------------------------------------


@covers("MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1", "EXT-1")
@pytest.mark.parametrize("name", VALID)
def test_valid_manifests_pass(name: str) -> None:
    VALIDATOR.validate(VALID[name])


@covers("JSN-11", "MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1")
@pytest.mark.parametrize(
    ("name", "path"), [p for p in places(lambda v: isinstance(v, dict)) if "extensions" not in p.id]
)
def test_unknown_member_is_refused(name: str, path: Path_) -> None:
    assert refused(changed(VALID[name], path, {**at(VALID[name], path), "zz": 1}))


@covers("EXT-1")
def test_unknown_member_of_an_extension_is_refused() -> None:
    path = ("extensions", "com.example.note")
    assert refused(changed(sample(), path, {**at(sample(), path), "zz": 1}))


@covers("MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1", "EXT-1")
@pytest.mark.parametrize(
    ("name", "path"),
    [
        p
        for p in places(lambda _: True)
        if p.values[1] and isinstance(p.values[1][-1], str) and p.values[1][:-1] != ("extensions",)
    ],
)
def test_missing_member_is_refused(name: str, path: Path_) -> None:
    smaller = dict(at(VALID[name], path[:-1]))
    del smaller[path[-1]]
    assert refused(changed(VALID[name], path[:-1], smaller))


@covers("JSN-10", "MAN-1", "IDN-1", "GRP-1", "TRK-1", "QUA-1", "LAY-1")
@pytest.mark.parametrize(("name", "path"), places(is_integer))
def test_no_integer_is_replaced_by_another_type_or_range(name: str, path: Path_) -> None:
    for wrong in (True, False, "1", None, 1.5, -1, LIMITS.integer + 1):
        assert refused(changed(VALID[name], path, wrong)), wrong


@covers("JSN-10")
@pytest.mark.parametrize(("name", "path"), places(lambda v: isinstance(v, bool)))
def test_no_boolean_is_replaced(name: str, path: Path_) -> None:
    for wrong in (0, 1, "true", None):
        assert refused(changed(VALID[name], path, wrong)), wrong


TEXTS = {"generator", "encoder", "id", "revision", "engine", "engine_version", "key"}
TEXTS |= {"hash_algorithm"}


def is_text(path: Path_) -> bool:
    """Whether the value is free text; ``kind`` and ``role`` and the like are not."""
    return path[-1] in TEXTS


def is_digits(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("(.*:)?[0-9a-f]{8,}", value) is not None


@covers("CNV-4", "MAN-1")
@pytest.mark.parametrize(
    ("name", "path"),
    [p for p in places(lambda v: isinstance(v, str)) if not is_text(p.values[1])],
)
def test_no_string_takes_a_suffix(name: str, path: Path_) -> None:
    for suffix in ("\n", " ", "\x00", "/", "é"):
        assert refused(changed(VALID[name], path, at(VALID[name], path) + suffix)), suffix


@covers("CNV-4")
@pytest.mark.parametrize(
    ("name", "path"),
    [p for p in places(is_digits) if not is_text(p.values[1])],
)
def test_digits_are_lower_case_and_complete(name: str, path: Path_) -> None:
    good = at(VALID[name], path)
    assert refused(changed(VALID[name], path, good[:-1] + "A"))
    assert refused(changed(VALID[name], path, good[:-1]))
    assert refused(changed(VALID[name], path, good[:-1] + "\n"))


SINGLE = {
    "top level is a list": ((), []),
    "other format": (("format",), "kvfile"),
    "other version": (("version",), "0.8"),
    "no group": (("groups",), []),
    "no quality": (("qualities",), []),
    "no track": (("tracks",), []),
    "65 groups": (("groups",), sample()["groups"][:1] * 65),
    "17 qualities": (("qualities",), sample()["qualities"] * 17),
    "33 tracks": (("tracks",), sample()["tracks"] * 33),
    "65 layouts": (("tracks", 0, "layouts"), sample()["tracks"][0]["layouts"] * 65),
    "no layer": (("groups", 0, "layers"), []),
    "4,097 layers": (("groups", 0, "layers"), list(range(4097))),
    "no head": (("groups", 0, "heads"), 0),
    "no dim": (("groups", 0, "head_dim"), 0),
    "head_dim above limit": (("groups", 0, "head_dim"), 65_537),
    "heads_total above limit": (("groups", 0, "heads_total"), 65_537),
    "unknown dtype": (("groups", 0, "dtype"), "int8"),
    "unknown kind of tokens": (("groups", 0, "tokens"), {"kind": "some"}),
    "all with a shape": (("groups", 0, "tokens"), {"kind": "all", "shape": [64]}),
    "two kinds mixed": (
        ("groups", 1, "tokens"),
        {"cumulative_tokens": 300, "held_start": 44, "kind": "window", "shape": [64]},
    ),
    "empty shape": (("groups", 2, "tokens", "shape"), []),
    "nine factors": (("groups", 2, "tokens", "shape"), [1] * 9),
    "factor 0": (("groups", 2, "tokens", "shape"), [0, 8]),
    "upper-case name": (("groups", 0, "name"), "Keys"),
    "name starts with hyphen": (("groups", 0, "name"), "-keys"),
    "name of 49": (("groups", 0, "name"), "a" * 49),
    "empty name": (("groups", 0, "name"), ""),
    "underscore in a name": (("groups", 0, "role"), "a_b"),
    "empty text": (("generator",), ""),
    "text of 1,025": (("generator",), "a" * 1025),
    "text of the wrong type": (("generator",), 1),
    "feature is no name": (("features",), ["Bad"]),
    "features is an object": (("features",), {}),
    "unknown component": (("identity", "component"), "both"),
    "unknown identity kind": (("identity", "kind"), "none"),
    "no layer in the model": (("identity", "layers_total"), 0),
    "inv_freq empty": (("identity", "rope", 0, "inv_freq"), ""),
    "inv_freq of 12 digits": (("identity", "rope", 0, "inv_freq"), "3f8000003f80"),
    "inv_freq too long": (("identity", "rope", 0, "inv_freq"), "3f800000" * 513),
    "unknown pairing": (("identity", "rope", 0, "pairing"), "pairs"),
    "scaling as binary32": (("identity", "rope", 0, "scaling"), "3f800000"),
    "scaling 0": (("identity", "rope", 0, "scaling"), "0" * 16),
    "scaling -1": (("identity", "rope", 0, "scaling"), "bff0000000000000"),
    "scaling infinite": (("identity", "rope", 0, "scaling"), "7ff0000000000000"),
    "scaling no number": (("identity", "rope", 0, "scaling"), "7ff0000000000001"),
    "inv_freq with a -0": (("identity", "rope", 0, "inv_freq"), "3f80000080000000"),
    "inv_freq infinite": (("identity", "rope", 0, "inv_freq"), "7f8000003f800000"),
    "inv_freq negative": (("identity", "rope", 0, "inv_freq"), "bf800000"),
    "cache scale 0": (("identity", "scale_scheme", "scales", 0, "bits"), "00000000"),
    "cache scale -1": (("identity", "scale_scheme", "scales", 0, "bits"), "bf800000"),
    "cache scale infinite": (("identity", "scale_scheme", "scales", 0, "bits"), "7f800000"),
    "step 0": (("qualities", 0, "relative_step"), "0" * 16),
    "step infinite": (("qualities", 0, "relative_step"), "7ff0000000000000"),
    "layers_total above limit": (("identity", "layers_total"), 65_537),
    "hash without algorithm": (("identity", "model", "weights_digest"), ONES),
    "hash of another algorithm": (("identity", "model", "weights_digest"), "sha512:" + ONES),
    "digest with algorithm": (("source_digest",), HASH),
    "generations 0": (("lineage", "generations"), 0),
    "exact with generations": (("lineage",), {"generations": 1, "kind": "exact"}),
    "lossy without quality": (("lineage",), {"generations": 1, "kind": "lossy", "profile": None}),
    "lineage is null": (("lineage",), None),
    "block_tokens 255": (("tokens", "chain", "block_tokens"), 255),
    "chain false": (("tokens", "chain"), False),
    "content span of no position": (("tokens", "content", 0, "count"), 0),
    "tokens above limit": (("tokens", "count"), 2**40 + 1),
    "first_position above limit": (("tokens", "first_position"), 2**40 + 1),
    "alignment 512": (("segmentation", "alignment"), 512),
    "unknown order": (("segmentation", "order"), "head-major"),
    "segment of no token": (("segmentation", "tokens"), 0),
    "segment of 65,537 tokens": (("segmentation", "tokens"), 65_537),
    "four layers a segment": (("segmentation", "groups", 0, "layers"), 4),
    "no layers a segment": (("segmentation", "groups", 0, "layers"), 0),
    "no heads a segment": (("segmentation", "groups", 0, "heads"), 0),
    "unknown encoding": (("qualities", 0, "encodings", 0), "quantized"),
    "step as binary32": (("qualities", 0, "relative_step"), "3f800000"),
    "sets above limit": (("qualities", 0, "sets"), 65_537),
    "unknown codec": (("tracks", 0, "codecs", 0), "h264"),
    "track name without codec": (("tracks", 0, "name"), "near-lossless"),
    "track name with two slashes": (("tracks", 0, "name"), "a/b/zstd"),
    "segments above limit": (("tracks", 0, "segments"), 2**20 + 1),
    "unknown layout order": (("tracks", 0, "layouts", 0, "order"), "rows"),
    "no frame": (("tracks", 0, "layouts", 0, "frames"), 0),
    "frames above limit": (("tracks", 0, "layouts", 0, "frames"), 65_537),
    "tile of one number": (("tracks", 0, "layouts", 0, "tile"), [1]),
    "tile of three numbers": (("tracks", 0, "layouts", 0, "tile"), [1, 1, 1]),
    "fold 0": (("tracks", 0, "layouts", 0, "fold"), [0, 1]),
    "width 128": (("tracks", 0, "layouts", 0, "width"), 128),
    "width 150": (("tracks", 0, "layouts", 0, "width"), 150),
    "height 8,208": (("tracks", 0, "layouts", 0, "height"), 8208),
    "valid_lengths an integer": (("valid_lengths",), 300),
    "extensions a list": (("extensions",), []),
    "extension a string": (("extensions",), {"a": "b"}),
    "extension name upper case": (("extensions",), {"A": {"must_understand": False, "value": 1}}),
    "extension name line feed": (
        ("extensions",),
        {"a\n": {"must_understand": False, "value": 1}},
    ),
    "extension name of 65": (("extensions",), {"a" * 65: {"must_understand": False, "value": 1}}),
    "extension name empty": (("extensions",), {"": {"must_understand": False, "value": 1}}),
    "must_understand 0": (("extensions", "com.example.note", "must_understand"), 0),
    "fraction in an extension": (("extensions", "com.example.note", "value"), [0.5]),
    "negative in an extension": (("extensions", "com.example.note", "value"), {"a": -1}),
    "large integer in an extension": (("extensions", "com.example.note", "value"), 2**53),
    "key in an extension": (("extensions", "com.example.note", "value"), {"A": 1}),
}


@covers(
    "MAN-1", "MAN-2", "MAN-4", "IDN-1", "IDN-6", "IDN-8", "LIN-2", "GRP-1", "GRP-6", "SEG-4",
    "SEG-5", "TRK-1", "TRK-3", "QUA-1", "LAY-1", "LAY-4", "EXT-1", "CNV-2",
)  # fmt: skip
@pytest.mark.parametrize("case", SINGLE)
def test_single_mutation_is_refused(case: str) -> None:
    path, value = SINGLE[case]
    assert refused(changed(sample(), path, value))


AT_THE_LIMIT = {
    "64 groups": (("groups",), sample()["groups"][:1] * 64),
    "4,096 layers": (("groups", 0, "layers"), list(range(4096))),
    "head_dim": (("groups", 0, "head_dim"), 65_536),
    "heads_total": (("groups", 0, "heads_total"), 65_536),
    "tokens": (("tokens", "count"), 2**40),
    "segment tokens": (("segmentation", "tokens"), 65_536),
    "alignment": (("segmentation", "alignment"), 4096),
    "integer": (("data_bytes",), 2**53 - 1),
    "width": (("tracks", 0, "layouts", 0, "width"), 8192),
    "height": (("tracks", 0, "layouts", 0, "height"), 144),
    "inv_freq": (("identity", "rope", 0, "inv_freq"), "3f800000" * 512),
    "inv_freq extremes": (("identity", "rope", 0, "inv_freq"), "00000000000000017f7fffff"),
    "smallest scaling": (("identity", "rope", 0, "scaling"), "0000000000000001"),
    "largest scaling": (("identity", "rope", 0, "scaling"), "7fefffffffffffff"),
    "layers_total": (("identity", "layers_total"), 65_536),
    "name of 48": (("groups", 0, "name"), "a" * 48),
    "text of 1,024": (("generator",), "a" * 1024),
    "text of another script": (("identity", "model", "id"), "模型\n"),
    "extension name of 64": (
        ("extensions",),
        {"a" * 64: {"must_understand": False, "value": None}},
    ),
    "state without tokens": (("tokens", "count"), 0),
    "no content": (("tokens", "content"), []),
}


@covers("CNV-2")
@pytest.mark.parametrize("case", AT_THE_LIMIT)
def test_values_at_a_limit_pass(case: str) -> None:
    path, value = AT_THE_LIMIT[case]
    VALIDATOR.validate(changed(sample(), path, value))


# --- verdicts --------------------------------------------------------------------------------


OK = {
    "verdict": "ok",
    "code": None,
    "message": "the artifact is valid",
    "where": "",
    "expected": None,
    "found": None,
    "next_step": "",
    "report": {
        "checked": {"segments": 5},
        "not_checked": ["the salt of the chain"],
        "artifact": {"content_id": ONES},
    },
}


@covers("ERR-1", "ERR-3")
def test_errors_print_as_the_verdict_schema_says() -> None:
    validator = Draft202012Validator(VERDICT)
    validator.validate(OK)
    for error in (
        InvalidError("manifest.schema", "no", where="/a", expected=1, found=2, next_step="stop"),
        MismatchError("identity.field", "no"),
        StorageError("io.short", "no"),
    ):
        validator.validate(error.as_dict())


@covers("ERR-1", "ERR-3")
@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "fine"},
        {"verdict": "invalid"},
        {"verdict": "invalid", "code": "io.short"},
        {"code": "header.magic"},
        {"message": ""},
        {"where": None},
        {"extra": 1},
        {"report": {"checked": {}, "artifact": {}}},
        {"report": {"checked": {"sets": "all"}, "not_checked": [], "artifact": {}}},
        {"report": {"checked": {}, "not_checked": [], "artifact": {}, "more": 1}},
    ],
)
def test_verdict_schema_refuses(change: dict[str, object]) -> None:
    assert not Draft202012Validator(VERDICT).is_valid({**OK, **change})


@covers("ERR-3")
def test_verdict_schema_has_the_codes_of_the_code() -> None:
    listed = {
        case["properties"]["verdict"]["const"]: tuple(case["properties"]["code"].get("enum", ()))
        for case in VERDICT["oneOf"]
    }
    assert listed == {"ok": (), **CODES}
