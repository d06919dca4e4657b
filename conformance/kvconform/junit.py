"""JUnit XML for continuous integration: a suite per level, a test per case."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as Tree

from kvconform.results import BAD, CaseResult, Results, by_level

_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(results: Results, path: Path) -> None:
    """Write the XML file."""
    root = Tree.Element("testsuites", name=_clean(f"kvconform {results.name}"))
    for level, cases in by_level(results.cases).items():
        if cases:
            root.append(_suite(level, cases))
    Tree.indent(root)
    Tree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suite(level: str, cases: list[CaseResult]) -> Tree.Element:
    count = {status: sum(case.status == status for case in cases) for status in BAD}
    skipped = sum(case.status in ("skipped", "xfailed") for case in cases)
    suite = Tree.Element(
        "testsuite",
        name=level,
        tests=str(len(cases)),
        failures=str(count["failed"] + count["xpassed"]),
        errors=str(count["crashed"]),
        skipped=str(skipped),
        time=f"{sum(case.seconds for case in cases):.3f}",
    )
    suite.extend(_test(case) for case in cases)
    return suite


def _test(case: CaseResult) -> Tree.Element:
    test = Tree.Element(
        "testcase", classname=f"kvconform.{case.level}", name=case.id, time=f"{case.seconds:.3f}"
    )
    if case.status in ("skipped", "xfailed"):
        Tree.SubElement(test, "skipped", message=_clean(f"{case.status}: {case.reason}"))
    elif case.status in BAD:
        tag = "error" if case.status == "crashed" else "failure"
        first = case.problems[0] if case.problems else None
        message = f"expected {first.expected}, found {first.found}" if first else "it passes now"
        item = Tree.SubElement(test, tag, type=case.status, message=_clean(message))
        item.text = _clean("\n\n".join(_text(case, number) for number in range(len(case.problems))))
    return test


def _text(case: CaseResult, number: int) -> str:
    item = case.problems[number]
    lines = [
        f"operation {item.operation}, {item.call} {item.variant}".rstrip(),
        f"expected {item.expected}",
        f"found {item.found}",
        item.detail,
        *(f"request {line}" for line in item.requests),
    ]
    return "\n".join(line for line in lines if line)


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\ufffd", text)
