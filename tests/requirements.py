"""Tie tests to requirement ids of the spec: ``@covers("MAN-1", "MAN-2")``.

An id that the spec does not define fails at import, so that a renamed or mistyped id is noticed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parent.parent / "spec"
SPEC_TEXT = (SPEC / "kvformat.md").read_text(encoding="utf-8")
REQUIREMENTS = tuple(re.findall(r"^- \[([A-Z]{3}-[1-9][0-9]*)\] ", SPEC_TEXT, flags=re.MULTILINE))


def covers(*ids: str) -> pytest.MarkDecorator:
    """Mark a test with the requirements that it would catch a violation of."""
    unknown = sorted(set(ids) - set(REQUIREMENTS))
    if unknown or not ids:
        raise ValueError(f"no such requirement in spec/kvformat.md: {unknown or 'none given'}")
    return pytest.mark.covers(*ids)


def section(number: str) -> str:
    """The text of one numbered section of the spec, up to the next heading of any level."""
    found = re.search(
        rf"^#+ {re.escape(number)}\.? [^\n]*\n(.*?)(?=^#+ |\Z)",
        SPEC_TEXT,
        flags=re.MULTILINE | re.DOTALL,
    )
    if found is None:
        raise ValueError(f"no section {number} in spec/kvformat.md")
    return found.group(1)


def table_rows(text: str) -> list[list[str]]:
    """The cells of every table row in ``text``, without header and rule lines."""
    rows = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_rule = set(line) <= set("|-: ")
        if line.startswith("|") and not is_rule and not following.startswith("|---"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def code_spans(text: str) -> list[str]:
    """Everything between single back-ticks."""
    return re.findall(r"`([^`]+)`", text)
