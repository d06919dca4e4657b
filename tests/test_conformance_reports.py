"""Reports, checks of case folders, and the commands of the conformance runner."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jsonschema import Draft202012Validator

from tests.conformance_fakes import (  # noqa: F401 - fixtures are used by name
    ALWAYS_OK,
    BAD,
    CONFORMANCE,
    OK,
    REFERENCE,
    ROOT,
    fake_fixture,
    make_case,
    run,
    suite_fixture,
)

# isort: split
from kvconform import cases, check, html, junit, protocol, results


def test_reports(suite: Path, fake: Callable[..., list[str]], tmp_path: Path) -> None:
    found = run(fake(f'sys.stderr.write("<\\x00&")\n{ALWAYS_OK}'), suite, name='a "<b>" c')
    Draft202012Validator(cases.schema("results")).validate(found.to_json())
    results.write(found, tmp_path / "r.json")
    again = results.read(tmp_path / "r.json")
    assert again.to_json() == json.loads((tmp_path / "r.json").read_text())

    junit.write(found, tmp_path / "j.xml")
    tree = ElementTree.parse(tmp_path / "j.xml").getroot()
    counted = [(s.get("name"), s.get("tests"), s.get("failures")) for s in tree]
    assert counted == [("core", "1", "0"), ("faulty", "1", "1")]

    reference = run(REFERENCE, suite)
    page = html.page([again, reference])
    assert "<b>" not in page
    assert not re.findall(r"(?:src|href)=|url\(|<script|@import", page)
    assert page.count("<table>") == 2
    assert f"<code>{BAD}</code>" in page
    assert "1 passed, 1 failed" in page
    wanted = ("not good", "Failures (1)", ">Levels<", ">Requirements<")
    assert sorted(wanted, key=page.index) == list(wanted)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(cases.CaseError):
        results.read(tmp_path / "bad.json")


def test_crashes_in_reports(suite: Path, fake: Callable[..., list[str]], tmp_path: Path) -> None:
    body = 'sys.stderr.write("\\x00\\x1b&<")\nreturn 1'
    found = run(fake(body), suite)
    junit.write(found, tmp_path / "j.xml")
    tree = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert [suite.get("errors") for suite in tree] == ["1", "1"]
    assert "&amp;&lt;" in html.page([found])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": "hdr-0009-other"}, "folder's name"),
        ({"level": "core"}, "the level is core"),
        ({"input": "other.kvf"}, "no file other.kvf"),
        ({"files": ["x.json"]}, "no file x.json"),
        ({"more": 1}, "more"),
        ({"operations": []}, "operations"),
    ],
)
def test_check_cases(suite: Path, change: dict[str, Any], problem: str) -> None:
    assert check.check_cases(suite) == []
    path = suite / "faulty" / BAD / "case.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert problem in "\n".join(check.check_cases(suite))


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        ({"call": "verify", "expect": {"verdict": "ok", "codes": ["io.read"]}}, "codes"),
        ({"call": "verify", "expect": {"verdict": "invalid", "codes": ["io.read"]}}, "io.read"),
        ({"call": "inspect", "expect": {"verdict": "ok", "digests": {}}}, "digests"),
        ({"call": "decode", "expect": {"verdict": "ok"}}, "--track"),
        ({"call": "verify", "arguments": ["--salt-file", "s"], "expect": {"verdict": "ok"}}, "s"),
        ({"call": "verify", "flips": [[1, 0]], "expect": {"verdict": "invalid"}}, "flip"),
        ({"call": "verify", "flips": [[10**6, 1]], "expect": {"verdict": "invalid"}}, "flip"),
        ({"call": "verify", "cuts": [10**6], "expect": {"verdict": "invalid"}}, "cut"),
    ],
)
def test_check_operations(tmp_path: Path, operation: dict[str, Any], problem: str) -> None:
    make_case(tmp_path, "faulty", BAD, [operation])
    assert problem in "\n".join(check.check_cases(tmp_path))


def test_check_cases_notices_what_is_missing_or_large(suite: Path) -> None:
    folder = suite / "faulty" / BAD
    (folder / "README.md").unlink()
    (folder / "input.kvf").write_bytes(bytes(65_537))
    (folder / "stray").touch()
    (suite / "core" / "empty").mkdir()
    text = "\n".join(check.check_cases(suite))
    for part in ("README.md", "65,536", "stray", "core/empty"):
        assert part in text


def test_the_real_cases_keep_their_rules() -> None:
    if not (CONFORMANCE / "cases").is_dir():
        pytest.skip("there are no cases yet")
    assert check.check_cases(CONFORMANCE / "cases") == []


def test_codes_are_those_of_the_registry() -> None:
    text = (ROOT / "spec" / "registry.md").read_text(encoding="utf-8")
    for verdict, codes in protocol.CODES.items():
        section = text.split(f"\n### {verdict}\n")[1].split("\n### ")[0]
        assert tuple(re.findall(r"^\| `([a-z]+\.[a-z-]+)` \|", section, re.M)) == codes


def test_selection(suite: Path) -> None:
    every = cases.load(suite)
    assert [case.id for case in cases.select(every, levels=["core"])] == [OK]
    assert [case.id for case in cases.select(every, globs=["hdr-*"])] == [BAD]
    assert [case.id for case in cases.select(every, requirements=["HDR-1"])] == [BAD]
    assert len(cases.select(every, levels=["entry"])) == 2


def test_evenly() -> None:
    many = tuple(cases.Variant("cut", place) for place in range(1000))
    few = cases.evenly(many, 64)
    assert (len(set(few)), few[0].place, few[-1].place) == (64, 0, 999)
    assert cases.evenly(few, 64) == few


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvconform", *arguments],
        cwd=CONFORMANCE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command(suite: Path, fake: Callable[..., list[str]], tmp_path: Path) -> None:
    root, entry = str(suite), fake(ALWAYS_OK)
    files = [str(tmp_path / name) for name in ("r.json", "j.xml", "p.html")]
    outputs = ["--json", files[0], "--junit", files[1], "--html", files[2]]
    done = command("run", "--cases", root, "--level", "core", *outputs, "--", *entry)
    assert (done.returncode, "good: 1 passed" in done.stdout) == (0, True), done.stderr
    assert all(Path(file).stat().st_size for file in files)
    done = command("run", "--cases", root, "--", *entry)
    assert done.returncode == 1
    assert "expected  invalid header.magic" in done.stdout
    assert command("run", "--cases", root, "--case", "x*", "--", *entry).returncode == 1
    assert command("run", "--cases", root, "--", "/no/such").returncode == 3
    assert command("run", "--cases", root).returncode == 2
    done = command("report", files[0], "--html", str(tmp_path / "m.html"))
    assert done.returncode == 0


def test_smaller_commands(suite: Path, fake: Callable[..., list[str]]) -> None:
    root = str(suite)
    assert BAD in command("list", "--cases", root).stdout
    assert "header.magic" in command("show", BAD, "--cases", root).stdout
    assert command("show", "nothing", "--cases", root).returncode == 2
    assert "2 cases, 0 problems" in command("check-cases", "--cases", root).stdout
    done = command("smoke", "--cases", root, "--", *REFERENCE)
    assert (done.returncode, done.stdout.count("good")) == (0, 2), done.stdout
    done = command("smoke", "--cases", root, "--", *fake("return 1"))
    assert done.returncode == 3
    assert "exit code 1" in done.stdout


def test_certify_names_options_that_exist() -> None:
    text = (CONFORMANCE / "certify.md").read_text(encoding="utf-8")
    names = ((), ("run",), ("matrix",), ("fuzz",), ("report",))
    known = "".join(command(*name, "--help").stdout for name in names)
    lines = re.findall(r"^kvconform .*$", text, re.MULTILINE)
    used = {item for line in lines for item in line.split() if re.fullmatch(r"--[a-z-]+", item)}
    assert len(used) > 5
    assert {item for item in used if item not in known} == set()


def test_the_wheel_has_the_cases(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "conformance"
    for name in ("pyproject.toml", "certify.md", "kvconform", "schema"):
        source = CONFORMANCE / name
        target = copy / name
        for path in [source] if source.is_file() else source.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                place = target if path == source else target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
    make_case(copy / "cases", "faulty", BAD, [{"call": "verify", "expect": {"verdict": "ok"}}])
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "."],
        cwd=copy,
        check=True,
        capture_output=True,
    )
    (wheel,) = copy.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"kvconform/cases/faulty/{BAD}/case.json" in names
    assert "kvconform/schema/case.schema.json" in names
