"""What a run found, as Python objects and as ``results.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from kvconform import __version__
from kvconform.cases import CaseError, schema
from kvconform.protocol import LEVELS, PROTOCOL

STATUSES: Final = ("passed", "failed", "crashed", "skipped", "xfailed", "xpassed")
BAD: Final = ("failed", "crashed", "xpassed")
MOST_PROBLEMS: Final = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A problem and where it was seen; ``variant`` is empty for the input as it is.

    ``requests`` is the log of a call that read over HTTP.
    """

    operation: int
    call: str
    variant: str
    kind: str
    expected: str
    found: str
    detail: str = ""
    requests: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CaseResult:
    """What became of one case. ``runs`` counts calls, ``of`` those that the case describes.

    ``advice`` is what the specification advises and calls that passed did not do.
    """

    id: str
    level: str
    requirements: list[str]
    status: str
    reason: str = ""
    seconds: float = 0.0
    memory_mib: float = 0.0
    runs: int = 0
    of: int = 0
    problem_count: int = 0
    problems: list[Found] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """One run of the suite against one implementation."""

    name: str
    entry: list[str]
    info: dict[str, Any]
    suite: dict[str, Any]
    platform: str
    started: str
    seconds: float
    batch: bool
    options: dict[str, Any]
    cases: list[CaseResult]
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing failed, crashed or passed unexpectedly, and something ran."""
        total = summary(self.cases)
        ran = sum(total.values()) - total["skipped"]
        return ran > 0 and not self.notes and not any(total[status] for status in BAD)

    def to_json(self) -> dict[str, Any]:
        """As ``results.schema.json`` has it."""
        value = asdict(self)
        value["kvconform"] = __version__
        value["protocol"] = PROTOCOL
        value["good"] = self.good
        value["summary"] = summary(self.cases)
        value["levels"] = {
            level: summary(items) for level, items in by_level(self.cases).items() if items
        }
        for case in value["cases"]:
            case["seconds"] = round(case["seconds"], 3)
            case["memory_mib"] = round(case["memory_mib"], 1)
        value["seconds"] = round(self.seconds, 3)
        return value


def summary(cases: Iterable[CaseResult]) -> dict[str, int]:
    """Cases per status."""
    counted = Counter(case.status for case in cases)
    return {status: counted[status] for status in STATUSES}


def by_level(cases: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    """Cases per level, in the order of the protocol."""
    result: dict[str, list[CaseResult]] = {level: [] for level in LEVELS}
    for case in cases:
        result[case.level].append(case)
    return result


def by_requirement(cases: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    """Cases per requirement, sorted by prefix and number."""
    result: dict[str, list[CaseResult]] = {}
    for case in cases:
        for name in case.requirements:
            result.setdefault(name, []).append(case)
    return dict(sorted(result.items(), key=lambda item: requirement_order(item[0])))


def requirement_order(name: str) -> tuple[str, int]:
    """``TOK-2`` before ``TOK-10``."""
    prefix, _, number = name.partition("-")
    return prefix, int(number)


def from_json(value: dict[str, Any]) -> Results:
    """Results from JSON that matches the schema."""
    names = Results.__slots__
    cases = [
        CaseResult(**{**case, "problems": [Found(**item) for item in case["problems"]]})
        for case in value["cases"]
    ]
    return Results(**{**{name: value[name] for name in names}, "cases": cases})


def read(path: Path) -> Results:
    """A ``results.json``; raises ``CaseError`` if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: {error}") from error
    wrong = next(Draft202012Validator(schema("results")).iter_errors(value), None)
    if wrong is not None:
        raise CaseError(f"{path} is no results.json: {wrong.json_path}: {wrong.message[:200]}")
    return from_json(value)


def write(results: Results, path: Path) -> None:
    """Write ``results.json``."""
    text = json.dumps(results.to_json(), indent=1, ensure_ascii=True)
    path.write_text(text + "\n", encoding="utf-8")
