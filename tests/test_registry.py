"""Prose, registry, schema and code hold the same names, codes and limits."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvformat.errors import CODES, EXIT_CODES
from kvformat.limits import LIMIT_NAMES, LIMITS
from kvformat.manifest import KNOWN_FEATURES
from tests.requirements import (
    REQUIREMENTS,
    SPEC,
    SPEC_TEXT,
    code_spans,
    covers,
    section,
    table_rows,
)

REGISTRY = (SPEC / "registry.md").read_text(encoding="utf-8")
SCHEMAS = Path(__file__).resolve().parent.parent / "schema"
MANIFEST, PROFILE = (
    json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    for name in ("manifest", "profile")
)
DEFS = MANIFEST["$defs"]
NAME = re.compile(DEFS["name"]["pattern"])


def registry_rows(title: str) -> list[list[str]]:
    """The rows of the first table below a heading of the registry."""
    found = re.search(
        rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", REGISTRY, flags=re.MULTILINE | re.DOTALL
    )
    assert found is not None, title
    return table_rows(found.group(1))


def registered(title: str) -> list[str]:
    """The names in the first column, in order."""
    return [code_spans(row[0])[0] for row in registry_rows(title)]


def number(text: str) -> int:
    """A number as section 12 prints it: 4,096 or 2^40 or 2^53 - 1."""
    found = re.fullmatch(r"(?:2\^(\d+)(?: - (\d+))?|(\d[\d,]*))", text)
    assert found is not None, text
    power, less, plain = found.groups()
    return 2 ** int(power) - int(less or 0) if power else int(plain.replace(",", ""))


# --- requirement ids -------------------------------------------------------------------------


def test_requirement_ids_are_unique_and_dense() -> None:
    assert len(REQUIREMENTS) > 100
    assert not [name for name, times in Counter(REQUIREMENTS).items() if times > 1]
    families: dict[str, list[int]] = {}
    for requirement in REQUIREMENTS:
        family, _, index = requirement.partition("-")
        families.setdefault(family, []).append(int(index))
    for family, indices in families.items():
        assert sorted(indices) == list(range(1, len(indices) + 1)), family


@pytest.mark.parametrize("page", ["kvformat.md", "registry.md", "rationale.md", "CHANGELOG.md"])
def test_references_to_requirements_exist(page: str) -> None:
    text = (SPEC / page).read_text(encoding="utf-8")
    families = {requirement[:3] for requirement in REQUIREMENTS}
    named = {f"{a}-{b}" for a, b in re.findall(r"\b([A-Z]{3})-([1-9][0-9]*)\b", text)}
    assert not {name for name in named if name[:3] in families} - set(REQUIREMENTS)


def test_covers_refuses_unknown_ids() -> None:
    for wrong in ((), ("ZZZ-1",), ("MAN-1", "MAN-0")):
        with pytest.raises(ValueError, match="no such requirement"):
            covers(*wrong)


# --- error codes -----------------------------------------------------------------------------


@covers("ERR-1", "ERR-3")
@pytest.mark.parametrize("verdict", CODES)
def test_codes_are_registered_and_nothing_else_is(verdict: str) -> None:
    assert sorted(registered(verdict)) == sorted(CODES[verdict])


@covers("ERR-3")
def test_a_code_belongs_to_one_verdict() -> None:
    every = [code for codes in CODES.values() for code in codes]
    assert not [code for code, times in Counter(every).items() if times > 1]


def test_each_code_has_a_meaning_and_requirements() -> None:
    for verdict in CODES:
        for row in registry_rows(verdict):
            assert len(row) == 3, row
            ids = row[2].split(", ")
            assert row[1], row
            assert set(ids) <= set(REQUIREMENTS), row
            assert len(set(ids)) == len(ids), row


@covers("ERR-3")
def test_codes_named_in_the_spec_are_registered() -> None:
    every = {code for codes in CODES.values() for code in codes}
    areas = {code.partition(".")[0] for code in every}
    named = {
        span
        for span in code_spans(SPEC_TEXT)
        if re.fullmatch(r"[a-z_]+\.[a-z-]+", span) and span.partition(".")[0] in areas
    }
    members = {"identity.layers", "segmentation.tokens", "tokens.chain"}
    assert named - members <= every


@covers("ERR-3")
def test_a_requirement_that_names_a_code_is_listed_with_it() -> None:
    every = {code for codes in CODES.values() for code in codes}
    listed = {
        code_spans(row[0])[0]: set(row[2].split(", "))
        for verdict in CODES
        for row in registry_rows(verdict)
    }
    items = re.findall(
        r"^- \[([A-Z]{3}-\d+)\] (.*?)(?=^- \[|^\s*$|\Z)", SPEC_TEXT, flags=re.MULTILINE | re.DOTALL
    )
    for requirement, text in items:
        for code in every.intersection(code_spans(text)):
            # ORD-1 names the order of almost all codes, not the reason for them.
            assert requirement == "ORD-1" or requirement in listed[code], (requirement, code)


@covers("ERR-1", "ERR-2")
def test_exit_codes_are_those_of_the_spec() -> None:
    table = {code_spans(row[0])[0]: int(row[1]) for row in table_rows(section("14"))}
    assert table == dict(EXIT_CODES)
    assert not {1, 2} & set(EXIT_CODES.values())
    assert set(EXIT_CODES) == {"ok", *CODES}


# --- limits ----------------------------------------------------------------------------------


@covers("LIM-1", "LIM-2")
def test_limits_are_those_of_the_spec() -> None:
    table = {code_spans(row[0])[0]: number(row[1]) for row in table_rows(section("12"))}
    assert table == {name: getattr(LIMITS, name) for name in LIMIT_NAMES}


def test_no_limit_is_listed_twice() -> None:
    names = [row[0] for row in table_rows(section("12"))]
    assert len(names) == len(set(names))


# --- names -----------------------------------------------------------------------------------


@covers("GRP-1")
def test_dtypes() -> None:
    row = next(row for row in table_rows(section("7.1")) if row[0] == "`dtype`")
    assert (
        registered("Dtypes") == code_spans(row[2]) == DEFS["group"]["properties"]["dtype"]["enum"]
    )


@covers("TRK-3")
def test_codecs() -> None:
    in_prose = re.findall(r"^### 10\.\d+ `([^`]+)`$", SPEC_TEXT, flags=re.MULTILINE)
    in_schema = DEFS["track"]["properties"]["codecs"]["items"]["enum"]
    assert registered("Codecs") == in_prose
    assert sorted(in_schema) == sorted(in_prose)
    pattern = DEFS["track"]["properties"]["name"]["pattern"]
    assert sorted(re.findall(r"\(\?:(.*)\)\$", pattern)[0].split("|")) == sorted(in_prose)
    for row in registry_rows("Codecs"):
        assert code_spans(section(row[2])) is not None
        assert f"### {row[2]} {row[0]}\n" in SPEC_TEXT


@covers("QUA-1")
def test_encodings() -> None:
    row = next(row for row in table_rows(section("9.1")) if row[0] == "`encodings`")
    in_schema = DEFS["quality"]["properties"]["encodings"]["items"]["enum"]
    assert registered("Encodings") == in_schema
    assert re.findall(r'"([a-z]+)"', row[1]) == in_schema


@covers("GRP-1")
def test_roles() -> None:
    line = next(line for line in SPEC_TEXT.splitlines() if line.startswith("- **role**"))
    assert registered("Roles") == code_spans(line)


@covers("QUA-2")
def test_qualities_print_their_steps_as_float_bits() -> None:
    rows = registry_rows("Qualities (informative)")
    assert code_spans(rows[-1][0]) == ["exact"]
    for row in rows[:-1]:
        digits = code_spans(row[2])[0]
        assert memoryview(bytes.fromhex(digits)[::-1]).cast("d")[0] == float(row[1])


@covers("FEA-2")
def test_features() -> None:
    known, reserved = (
        REGISTRY.split("## Features")[1].split("## Extensions")[0].split("| feature |")[1:]
    )
    assert [code_spans(row[0])[0] for row in table_rows("| feature |" + known)] == ["transform-klt"]
    assert "external-sets" in reserved
    assert sorted(KNOWN_FEATURES) == ["transform-klt"]
    assert "Version 0.9 has one, `transform-klt` (section 9.5)" in " ".join(section("13.2").split())
    condition = MANIFEST["if"]["properties"]["features"]["contains"]
    assert condition == {"const": "transform-klt"}
    assert PROFILE["properties"]["features"]["items"] == {"const": "transform-klt"}


@pytest.mark.parametrize(
    "title",
    [
        "Roles",
        "Codecs",
        "Encodings",
        "Qualities (informative)",
        "Features",
        "Extensions",
        "Scale schemes",
        "Rotations",
        "Content kinds",
    ],
)
def test_registered_names_are_names(title: str) -> None:
    names = registered(title)
    assert names
    assert len(set(names)) == len(names)
    assert all(NAME.fullmatch(name) for name in names)
