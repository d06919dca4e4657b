"""The schemas of what the feature ``transform-klt`` adds: tied to prose, code and limits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from conformance.generate.transform_parts import transforms
from kvformat import profiles
from kvformat.errors import InvalidError, KvformatError
from kvformat.limits import LIMITS
from kvformat.manifest import parse_manifest
from kvformat.tracks import ENCODINGS
from tests.builder import canonical
from tests.requirements import code_spans, covers, section, table_rows
from tests.test_schema import MANIFEST, PROFILE, sample
from tests.transformed import cut_profile, profile_file, profile_with

Json = dict[str, Any]
VALIDATOR = Draft202012Validator(MANIFEST)
ONES = "1" * 64


def transformed() -> Json:
    """The sample manifest with the feature."""
    manifest = sample()
    manifest["features"] = ["transform-klt"]
    manifest["profile"] = {"digest": ONES}
    manifest["qualities"][0]["encodings"][0] = "transformed"
    return manifest


def edited(**changes: Any) -> Json:
    manifest = transformed()
    for key, value in changes.items():
        if value is None:
            del manifest[key]
        else:
            manifest[key] = value
    return manifest


# --- the manifest of an artifact -------------------------------------------------------------


@covers("TRF-1", "MAN-1")
def test_the_feature_brings_one_member() -> None:
    VALIDATOR.validate(transformed())
    VALIDATOR.validate({**transformed(), "features": ["some-feature", "transform-klt"]})


@covers("TRF-1", "FEA-1", "MAN-1", "JSN-11")
@pytest.mark.parametrize(
    "changes",
    [
        {"profile": None},
        {"profile": {}},
        {"profile": {"digest": ONES, "url": "http://example.com/a.kvp"}},
        {"profile": {"digest": "blake3:" + ONES}},
        {"profile": {"digest": ONES[:-1]}},
        {"profile": {"digest": ONES.replace("1", "A")}},
        {"profile": ONES},
        {"features": []},
        {"features": ["some-feature"]},
        {"features": [], "profile": None},
    ],
)
def test_what_the_feature_brings_stands_alone(changes: Json) -> None:
    """The schema and the reader refuse the same; the last has only the encoding left."""
    manifest = edited(**changes)
    assert not VALIDATOR.is_valid(manifest)
    if manifest["features"] == ["some-feature"]:
        return  # feature.unknown comes before the schema
    manifest["segmentation"]["groups"].append({"heads": 1, "layers": 1})
    with pytest.raises(InvalidError) as caught:
        parse_manifest(canonical(manifest))
    assert caught.value.code == "manifest.schema"


@covers("QUA-1")
def test_encodings_are_those_of_the_code() -> None:
    listed = MANIFEST["$defs"]["quality"]["properties"]["encodings"]["items"]["enum"]
    assert tuple(listed) == ENCODINGS
    plain = MANIFEST["else"]["properties"]["qualities"]["items"]["properties"]["encodings"]
    assert plain["items"]["enum"] == [item for item in listed if item != "transformed"]


# --- the manifest of a profile ---------------------------------------------------------------


def test_definitions_are_those_of_the_manifest() -> None:
    for name, part in PROFILE["$defs"].items():
        if name not in ("transform", "writer"):
            assert part == MANIFEST["$defs"][name], name


@covers("PRF-1")
def test_members_are_those_of_the_prose() -> None:
    rows = table_rows(section("9.6"))
    in_prose = [name for row in rows for name in code_spans(row[0])]
    transform = PROFILE["$defs"]["transform"]["properties"]
    assert sorted(in_prose) == sorted([*PROFILE["properties"], *transform])


@covers("PRF-1")
def test_names_and_limits_are_those_of_the_code() -> None:
    transform = PROFILE["$defs"]["transform"]["properties"]
    assert transform["dtype"]["enum"] == list(profiles.DTYPES)
    assert transform["pairing"]["enum"] == list(profiles.PAIRINGS)
    assert PROFILE["properties"]["format"]["const"] == profiles.FORMAT
    assert transform["heads"]["maximum"] == transform["heads_total"]["maximum"] == LIMITS.heads
    assert transform["head_dim"]["maximum"] == LIMITS.head_dim


def mutations(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Places of a manifest and what to put there; ``...`` removes the member."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    if isinstance(value, dict):
        found.append((path, {**value, "zz": 1}))
        for key, member in value.items():
            if path != ("extensions",):
                found.append(((*path, key), ...))
            found += mutations(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            found += mutations(member, (*path, index))
        found += [(path, None), (path, {})]
    elif isinstance(value, str):
        found += [(path, value + "\n"), (path, value.upper() + "A"), (path, 1), (path, "")]
    elif isinstance(value, int):
        found += [(path, new) for new in ("1", 2**53, *(() if value is False else (True,)))]
    return found


def changed(manifest: Json, path: tuple[Any, ...], new: Any) -> Json:
    result = copy.deepcopy(manifest)
    if not path:
        return dict(new)
    target: Any = result
    for step in path[:-1]:
        target = target[step]
    if new is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = new
    return result


@covers("PRF-1", "PRF-6")
def test_schema_and_reader_refuse_the_same() -> None:
    """All that a value shows by itself; free text takes any value."""
    note = {"com.example.note": {"must_understand": False, "value": [1]}}
    file = profile_file(transforms(), writer=b"abc", extensions=note)
    manifest = cut_profile(file)[0]
    validator = Draft202012Validator(PROFILE)
    validator.validate(manifest)
    seen = 0
    for path, new in mutations(manifest):
        other = changed(manifest, path, new)
        name = path[-1] if path else ""
        text = name in ("generator", "id", "revision") and isinstance(new, str) and new
        if text or ("value" in path and new is not ...):
            continue
        seen += 1
        assert not validator.is_valid(other), (path, new)
        with pytest.raises(KvformatError) as caught:
            profiles.parse_profile(profile_with(file, other))
        unknown = path == ("features", 0) and isinstance(new, str)
        assert caught.value.code == ("feature.unknown" if unknown else "profile.content"), path
    assert seen > 100
