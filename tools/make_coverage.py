"""Write spec/coverage.md: which tests show which requirement of spec/kvformat.md.

Tests name requirements with ``@covers("MAN-1")``; the tests are read, not run. What no test can
show is in spec/untestable.toml, with the reason. Ends with status 1 if a requirement has neither.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "spec" / "kvformat.md"
UNTESTABLE = ROOT / "spec" / "untestable.toml"
TEXT = ROOT / "spec" / "coverage.md"
TESTS = ROOT / "tests"
NOT_COUNTED = re.compile(r"pytest\.mark\.(skip|xfail|real)(?![a-z_])")
"""Marks of tests that do not run everywhere, or may fail."""

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def requirements(text: str) -> list[str]:
    """The ids that the specification defines, in its order, also one that occurs twice."""
    return re.findall(r"^- \[([A-Z]{3}-[1-9][0-9]*)\] ", text, flags=re.MULTILINE)


def untestable() -> dict[str, str]:
    """Requirement ids that no test can show, with the reason."""
    found = tomllib.loads(UNTESTABLE.read_text(encoding="utf-8"))
    return {name: str(reason) for name, reason in found.items()}


def collect(folder: Path) -> dict[str, list[str]]:
    """Names of tests, ``file::test``, by requirement id; odd marks are errors."""
    result: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        file = path.relative_to(folder).as_posix()
        for name, ids in _marked(tree, file):
            for item in ids:
                tests = result.setdefault(item, [])
                if name not in tests:
                    tests.append(name)
    return result


def _marked(node: Node, name: str) -> Iterator[tuple[str, list[str]]]:
    """Each test or class below ``node`` with the ids of its marks."""
    if isinstance(node, ast.Module | ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "pytestmark":
                yield name, _ids(item.value, name)
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _marked(item, f"{name}::{item.name}")
    if isinstance(node, ast.Module):
        return
    ids = [found for mark in node.decorator_list for found in _ids(mark, name)]
    if not ids or any(NOT_COUNTED.match(ast.unparse(mark)) for mark in node.decorator_list):
        return
    if not node.name.lower().startswith("test"):
        raise ValueError(f"{name} is no test but covers {ids[0]}")
    yield name, ids


def _ids(mark: ast.expr, name: str) -> list[str]:
    """The ids of all ``covers(...)`` in an expression."""
    result: list[str] = []
    for call in ast.walk(mark):
        if not isinstance(call, ast.Call):
            continue
        called = call.func.attr if isinstance(call.func, ast.Attribute) else call.func
        if called != "covers" and not (isinstance(called, ast.Name) and called.id == "covers"):
            continue
        for item in call.args:
            if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
                raise TypeError(f"{name}: write the ids of covers() out, as strings")
            result.append(item.value)
    return result


def render(ids: list[str], tests: dict[str, list[str]], reasons: dict[str, str]) -> str:
    """The text of coverage.md."""
    shown = sum(name in tests for name in ids)
    missing = [name for name in ids if name not in tests and name not in reasons]
    lines = [
        "# Coverage of the requirements",
        "",
        "Made by `tools/make_coverage.py` from the marks `@covers(...)` in `tests/`; do not edit.",
        "Tests that are skipped, expected to fail, or need a captured cache do not count. What no",
        "test can show is in [untestable.toml](untestable.toml).",
        "",
        f"{len(ids)} requirements: {shown} shown by tests, {len(reasons)} that no test can show, "
        f"{len(missing)} open.",
        "",
        "| Requirement | Tests, or why there is none |",
        "|---|---|",
    ]
    for name in ids:
        parts = [f"`{test}`" for test in tests.get(name, [])]
        if name in reasons:
            parts.append(f"no test: {reasons[name]}")
        lines.append(f"| {name} | {'<br>'.join(parts) or '**open**'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    ids = requirements(SPEC.read_text(encoding="utf-8"))
    tests, reasons = collect(TESTS), untestable()
    TEXT.write_text(render(ids, tests, reasons), encoding="utf-8")
    missing = [name for name in ids if name not in tests and name not in reasons]
    if missing:
        sys.exit(f"{len(missing)} requirements are open: {', '.join(missing)}")


if __name__ == "__main__":
    main()
