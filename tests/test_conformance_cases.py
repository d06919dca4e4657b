"""The conformance cases keep their schema, are what the generator makes, and leave nothing out."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvformat.errors import CODES
from kvformat.limits import LIMIT_NAMES
from tests.requirements import REQUIREMENTS

CONFORMANCE = Path(__file__).resolve().parent.parent / "conformance"
CASES = CONFORMANCE / "cases"
SCHEMA = json.loads((CONFORMANCE / "schema/case.schema.json").read_text(encoding="utf-8"))
LISTED = tomllib.loads((CONFORMANCE / "untestable.toml").read_text(encoding="utf-8"))
PATHS = sorted(CASES.glob("*/*/case.json"))
MIB = 2**20


@cache
def cases() -> dict[str, dict[str, Any]]:
    return {
        path.parent.relative_to(CASES).as_posix(): json.loads(path.read_text(encoding="utf-8"))
        for path in PATHS
    }


@cache
def made() -> tuple[Any, dict[str, bytes]]:
    from conformance.generate.__main__ import build

    return build()


def test_cases_match_their_schema_and_folders() -> None:
    validator = Draft202012Validator(SCHEMA)
    assert len(PATHS) > 1000
    for name, case in cases().items():
        assert not [error.message for error in validator.iter_errors(case)], name
        assert name == f"{case['level']}/{case['id']}"
        assert (CASES / name / "README.md").read_text(encoding="utf-8").count("\n\n") == 1, name


def test_ids_and_numbers_are_unique() -> None:
    ids = [case["id"] for case in cases().values()]
    assert len(ids) == len(set(ids))
    assert Counter(name[:8] for name in ids).most_common(1)[0][1] == 1


def test_sizes() -> None:
    sizes = {path: path.stat().st_size for path in CASES.rglob("*") if path.is_file()}
    assert max(sizes.values()) <= 65_536
    assert sum(sizes.values()) <= 7 * MIB


def test_the_generator_makes_what_is_committed_and_the_reference_agrees() -> None:
    from conformance.generate.suite import compare

    suite, files = made()
    assert suite.disagreements == []
    assert compare(files) == []


def test_two_runs_are_equal() -> None:
    from conformance.generate.manifest_faults import add_cases
    from conformance.generate.suite import Suite

    first, second = Suite(), Suite()
    for suite in (first, second):
        add_cases(suite)
    assert [case.input for case in first.cases] == [case.input for case in second.cases]


def test_every_requirement_is_shown_or_listed() -> None:
    shown = {item for case in cases().values() for item in case["requirements"]}
    listed = set(LISTED["requirements"])
    assert shown <= set(REQUIREMENTS)
    assert listed <= set(REQUIREMENTS)
    assert not sorted(set(REQUIREMENTS) - shown - listed)
    assert not shown & listed


def test_every_code_is_provoked_or_listed() -> None:
    found = {
        code
        for case in cases().values()
        for operation in case["operations"]
        for code in operation["expect"].get("codes", ())
    }
    every = {code for codes in CODES.values() for code in codes}
    assert found <= every
    assert not sorted(every - found - set(LISTED["codes"]))
    assert not found & set(LISTED["codes"])
    assert set(CODES["invalid"]) | set(CODES["mismatch"]) <= found


def test_every_limit_is_shown_or_listed() -> None:
    shown = {item for case in made()[0].cases for item in case.limits}
    assert not sorted(set(LIMIT_NAMES) - shown - set(LISTED["limits"]))
    assert not shown & set(LISTED["limits"])


@pytest.mark.parametrize("part", ["requirements", "codes", "limits"])
def test_what_is_listed_has_a_reason(part: str) -> None:
    assert all(len(reason) > 20 and "|" not in reason for reason in LISTED[part].values())


def test_verdicts_fit_their_codes_and_several_codes_are_rare() -> None:
    verdict = {code: name for name, codes in CODES.items() for code in codes}
    several = 0
    for name, case in cases().items():
        for operation in case["operations"]:
            expect = operation["expect"]
            codes = expect.get("codes", [])
            assert {verdict[code] for code in codes} <= {expect["verdict"]}, name
            assert bool(codes) == (expect["verdict"] != "ok"), name
            several += len(codes) > 1
    assert several < 40


def test_codes_of_cases_are_those_that_the_registry_gives_to_the_requirement() -> None:
    """Each faulty case shows at least one requirement of the code that it expects."""
    text = (CONFORMANCE.parent / "spec/registry.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z.-]+)` \| .* \| ([A-Z0-9, -]+) \|$", text, flags=re.MULTILINE)
    rules = {code: set(ids.split(", ")) for code, ids in rows}
    free = {"ERR-1", "ORD-1"}
    wrong = [
        (name, code)
        for name, case in cases().items()
        if case["level"] == "faulty"
        for operation in case["operations"]
        for code in operation["expect"].get("codes", ())
        if not (rules[code] | free) & set(case["requirements"])
    ]
    assert not wrong


def test_the_page_has_no_open_row() -> None:
    assert "**open**" not in (CONFORMANCE / "coverage.md").read_text(encoding="utf-8")


def test_what_must_be_there() -> None:
    names = [case["id"] for case in cases().values()]
    assert sum("-i-" in name for name in names) == 35  # decided texts of JSONTestSuite
    assert sum(bool(re.search(r"-radix-(\d+)$", name)) for name in names) >= 17
    assert sum(bool(re.fullmatch(r"set-\d{4}-flags-\d+", name)) for name in names) == 16
    assert any(case.get("files") for case in cases().values())
