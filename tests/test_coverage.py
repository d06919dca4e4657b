"""Each requirement is shown by a test or listed, with a reason, as one that no test can show."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import make_coverage

IDS = make_coverage.requirements(make_coverage.SPEC.read_text(encoding="utf-8"))


def test_ids_are_unique() -> None:
    assert len(IDS) > 100
    assert not [name for name, times in Counter(IDS).items() if times > 1]


def test_each_requirement_is_shown_or_listed() -> None:
    shown = make_coverage.collect(make_coverage.TESTS)
    assert set(shown) <= set(IDS)
    assert not sorted(set(IDS) - set(shown) - set(make_coverage.untestable()))


def test_nothing_is_both_shown_and_listed() -> None:
    assert not set(make_coverage.collect(make_coverage.TESTS)) & set(make_coverage.untestable())


def test_what_is_listed_exists_and_has_a_reason() -> None:
    listed = make_coverage.untestable()
    assert set(listed) <= set(IDS)
    assert all(len(reason) > 20 and "|" not in reason for reason in listed.values())


def test_the_page_is_up_to_date() -> None:
    expected = make_coverage.render(
        IDS, make_coverage.collect(make_coverage.TESTS), make_coverage.untestable()
    )
    assert make_coverage.TEXT.read_text(encoding="utf-8") == expected


MODULE = """
import pytest
from tests.requirements import covers

pytestmark = [covers("AAA-1"), pytest.mark.other]

@covers("BBB-1", "BBB-2")
@pytest.mark.parametrize("x", [pytest.param(1, marks=covers("CCC-1")), 2])
def test_one(x):
    with pytest.raises(ValueError):
        covers(*wrong)

@covers("DDD-1")
class TestMany:
    @pytest.mark.covers("EEE-1")
    def test_two(self): ...

@covers("FFF-1")
@pytest.mark.skip
def test_skipped(): ...

@covers("FFF-2")
@pytest.mark.xfail(reason="open")
def test_failing(): ...

@covers("GGG-1")
@pytest.mark.skipif(True, reason="no library")
def test_somewhere(): ...
"""


def test_marks_are_found_without_running_tests(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(MODULE, encoding="utf-8")
    assert make_coverage.collect(tmp_path) == {
        "AAA-1": ["test_a.py"],
        "BBB-1": ["test_a.py::test_one"],
        "BBB-2": ["test_a.py::test_one"],
        "CCC-1": ["test_a.py::test_one"],
        "DDD-1": ["test_a.py::TestMany"],
        "EEE-1": ["test_a.py::TestMany::test_two"],
        "GGG-1": ["test_a.py::test_somewhere"],
    }


@pytest.mark.parametrize(
    "text",
    [
        "@covers(*IDS)\ndef test_a(): ...",
        "@covers(NAME)\ndef test_a(): ...",
        "@covers('AAA-1')\ndef helper(): ...",
    ],
)
def test_marks_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_a.py").write_text(text, encoding="utf-8")
    with pytest.raises((TypeError, ValueError), match=r"test_a\.py"):
        make_coverage.collect(tmp_path)


def test_open_requirements_are_marked() -> None:
    text = make_coverage.render(["AAA-1", "AAA-2", "AAA-3"], {"AAA-1": ["t"]}, {"AAA-2": "why"})
    assert "| AAA-1 | `t` |" in text
    assert "| AAA-2 | no test: why |" in text
    assert "| AAA-3 | **open** |" in text
    assert "3 requirements: 1 shown by tests, 1 that no test can show, 1 open." in text
