"""HTTP in the conformance suite: rules on requests, and readers that err in one way."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from tests.conformance_fakes import (  # noqa: F401 - fixtures are used by name
    ALWAYS_OK,
    BAD,
    CONFORMANCE,
    DIGEST,
    FILE,
    INTEGERS,
    OK,
    fake_fixture,
    make_case,
    run,
    statuses,
)

# isort: split
from kvconform import cases, check, html, junit, results, terminal, traffic
from kvconform.behaviours import LARGE_BYTES
from kvconform.runner import Options, Run, WiringError, ask_info
from kvconform.server import Request

ROOT = CONFORMANCE / "cases"
READER = str(Path(__file__).parent / "http_readers.py")
MEMBERS = {"manifest_digest": DIGEST, "integers": INTEGERS}


def read_by(fault: str, *globs: str, jobs: int = 1) -> results.Results:
    """A run of cases that need http with a reader of ``tests/http_readers.py``."""
    wanted = [case for case in cases.load(ROOT) if "http" in case.requires]
    wanted = cases.select(wanted, globs=globs)
    assert wanted
    return Run([sys.executable, READER, fault], wanted, Options(jobs=jobs)).run(ROOT)


def test_a_reader_that_does_everything_right_passes_every_case() -> None:
    found = read_by("none", jobs=2)
    assert [(case.id, case.problems) for case in found.cases if case.status != "passed"] == []
    assert len(found.cases) > 60
    advised = {case.id[9:] for case in found.cases if case.advice}
    assert "large" in advised  # it takes whole files


FAULTS: dict[str, tuple[set[str], str]] = {
    "asks-head": ({"large", "small", "server-no-head", "front-of-262144"}, "(REQ-5)"),
    "accepts-gzip": ({"large", "small", "server-no-head"}, "(REQ-5)"),
    "open-ranges": ({"large", "small", "server-no-head"}, "(REQ-5)"),
    "asks-beyond": ({"large", "front-of-262144", "tables-behind"}, "(REQ-12)"),
    "takes-the-front-twice": ({"large", "front-of-262144", "tables-behind"}, "(REQ-1)"),
    "reads-everything": (
        {"server-ignores-range-large", "server-endless-body", "server-endless-body-later"},
        "(REQ-7)",
    ),
    "accepts-200": (
        {"small-200", "server-ignores-range", "server-ignores-range-later"},
        "io.range",
    ),
    "unpacks-gzip": ({"server-gzip", "server-gzip-later"}, "io.range"),
    "ignores-content-range": (
        {
            "server-shifted",
            "server-shifted-later",
            "server-no-content-range",
            "server-malformed-content-range",
            "server-short-range",
        },
        "io.",
    ),
    "takes-short-replies": (
        {"server-short-range", "server-short-body", "server-short-chunked", "server-long-body"},
        "io.short",
    ),
    "trusts-the-length": ({"server-long-body", "server-endless-body-later"}, "io.short"),
    "trusts-every-object": ({"server-changes-size", "server-changes-etag"}, "io.changed"),
    "no-status": ({"server-missing", "server-gone", "server-denied", "server-proxy-asks"}, "io."),
    "opens-files": ({"server-redirect-to-file"}, "io.read"),
}
"""Faults, cases that must find them, and what the problem speaks of."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_that_errs_fails(fault: str) -> None:
    names, speaks_of = FAULTS[fault]
    found = read_by(fault, *(f"req-????-{name}" for name in names))
    assert {case.id[9:]: case.status for case in found.cases} == dict.fromkeys(names, "failed")
    for case in found.cases:
        assert speaks_of in case.problems[0].expected
        assert case.problems[0].requests[0].startswith("0: ")


def test_what_the_specification_leaves_open_is_accepted() -> None:
    found = read_by("no-redirects", "*-server-redirects", "*-server-flaky*")
    assert statuses(found) == dict.fromkeys(statuses(found), "passed")


# --- rules on logs ---------------------------------------------------------------------------

HEADER = FILE[:48] + (1000).to_bytes(8, "little") + FILE[56:128]
OBJECT = HEADER + bytes(872)


def asked(*ranges: str, **more: Any) -> Request:
    """A request with a good reply."""
    first, last = (int(item) for item in ranges[0].removeprefix("bytes=").split("-"))
    given = {"status": 206, "first": first, "last": last, "written": last - first + 1, **more}
    return Request(
        given.pop("method", "GET"), ranges, given.pop("encodings", ("identity",)), **given
    )


FIRST = asked("bytes=0-499")
MIB = 2**20

LOGS: dict[str, tuple[list[Request], dict[str, Any], str | None]] = {
    "good": ([FIRST, asked("bytes=500-999")], {}, None),
    "one byte behind": ([FIRST, asked("bytes=1000-1000")], {}, None),
    "the same again": ([asked("bytes=0-2047"), asked("bytes=0-2047")], {}, None),
    "nothing": ([], {}, "at least one request"),
    "head": ([asked("bytes=0-9", method="HEAD")], {}, "GET"),
    "no range": ([FIRST, Request("GET", (), ("identity",))], {}, "Range"),
    "two fields": ([asked("bytes=0-9", "bytes=0-9")], {}, "Range"),
    "open": ([Request("GET", ("bytes=0-",), ("identity",))], {}, "Range"),
    "last bytes": ([Request("GET", ("bytes=-9",), ("identity",))], {}, "Range"),
    "two ranges": ([Request("GET", ("bytes=0-1,3-4",), ("identity",))], {}, "Range"),
    "descending": ([Request("GET", ("bytes=9-1",), ("identity",))], {}, "Range"),
    "no coding": ([asked("bytes=0-9", encodings=())], {}, "identity"),
    "gzip": ([asked("bytes=0-9", encodings=("gzip",))], {}, "identity"),
    "behind the end": ([FIRST, asked("bytes=500-1001")], {}, "REQ-12"),
    "far behind": ([FIRST, asked("bytes=1001-1001")], {}, "REQ-12"),
    "before the header came": ([asked("bytes=0-99"), asked("bytes=100-2000")], {}, None),
    "reads on": ([asked("bytes=0-9", written=17 * MIB)], {}, "REQ-7"),
    "buffers": ([asked("bytes=0-9", written=15 * MIB)], {}, None),
    "front again": ([FIRST, asked("bytes=300-999")], {"front_once": True}, "REQ-1"),
    "front again, not asked": ([FIRST, asked("bytes=300-999")], {}, None),
    "front twice": ([FIRST, FIRST], {"front_once": True}, "REQ-1"),
    "front repeated": ([asked("bytes=0-499", status=503), FIRST], {"front_once": True}, None),
    "too many": ([FIRST] * 3, {"most": 2}, "at most 2 requests"),
    "redirected": ([asked("bytes=0-9", status=302)] * 3 + [FIRST], {"most": 1}, None),
    "too much": ([FIRST, asked("bytes=500-999")], {"bytes_most": 499}, "499 bytes"),
    "enough": ([FIRST, asked("bytes=500-1000")], {"bytes_most": 500}, None),
    "only advice": ([FIRST, asked("bytes=500-999")], {"should": {"most": 1}}, None),
}


@pytest.mark.parametrize("name", LOGS)
def test_rules(name: str) -> None:
    log, wanted, expected = LOGS[name]
    broken = traffic.violation(traffic.Traffic(log, OBJECT, wanted))
    assert (broken is None) == (expected is None), broken
    assert expected is None or (broken is not None and expected in broken[0])


def test_advice() -> None:
    limits = {"should": {"most": 1, "bytes_most": 100}}
    log = [FIRST, asked("bytes=500-999")]
    assert traffic.advice(traffic.Traffic(log, OBJECT, limits)) == [
        "2 requests, the specification advises 1",
        "500 bytes behind the first request, the specification advises 100",
    ]
    assert traffic.advice(traffic.Traffic(log[:1], OBJECT, limits)) == []


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        (("identity",), True),
        (("Identity;q=1",), True),
        (("identity, identity",), True),
        (("identity;q=1, *;q=0",), True),
        (("",), True),
        (("gzip;q=0.000", "identity"), True),
        ((), False),
        (("gzip",), False),
        (("identity, br",), False),
        (("identity", "deflate"), False),
        (("*",), False),
        (("gzip;q=0.001",), False),
    ],
)
def test_codings(fields: tuple[str, ...], good: bool) -> None:
    assert traffic.accepts_only_identity(fields) == good


def test_what_tempts_a_reader_is_larger_than_any_buffer() -> None:
    assert 4 * traffic.SLACK_BYTES <= LARGE_BYTES


def test_a_long_log_is_cut_for_the_reports() -> None:
    lines = traffic.lines([FIRST] * 25)
    assert (len(lines), lines[-1]) == (21, "and 5 more")


# --- the runner ------------------------------------------------------------------------------


def http_case(root: Path, behaviour: str = "plain", **expect: Any) -> Path:
    wanted = {"verdict": "ok", **(MEMBERS if not expect.get("codes") else {}), **expect}
    operation = {"call": "verify", "http": {"behaviour": behaviour}, "expect": wanted}
    make_case(root, "core", OK, [operation], requires=["http"])
    return root


def declares_http(command: list[str]) -> list[str]:
    path = Path(command[-1])
    path.write_text(path.read_text().replace('"batch":', '"http": True, "batch":'))
    return command


ASK = (
    """
import urllib.request
fields = {"Range": "bytes=0-262143", "Accept-Encoding": "identity"}
request = urllib.request.Request(args[1], headers=fields)
with urllib.request.urlopen(request) as reply:
    data = reply.read()
"""
    + ALWAYS_OK
)


def test_without_http_the_case_is_skipped(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    root = http_case(tmp_path / "cases")
    case = run(fake(ALWAYS_OK), root).cases[0]
    assert (case.status, case.reason) == ("skipped", "not declared: http")
    assert not cases.load(root)[0].entry_level


def test_http_in_info_is_a_boolean(fake: Callable[..., list[str]]) -> None:
    command = fake(ALWAYS_OK)
    path = Path(command[-1])
    path.write_text(path.read_text().replace('"batch":', '"http": "yes", "batch":'))
    with pytest.raises(WiringError, match="http is neither"):
        ask_info(command)


def test_a_right_answer_with_wrong_requests_fails(
    tmp_path: Path, fake: Callable[..., list[str]]
) -> None:
    root = http_case(tmp_path / "cases")
    assert run(declares_http(fake(ASK)), root).good
    case = run(declares_http(fake(ASK.replace("identity", "gzip"))), root).cases[0]
    problem = case.problems[0]
    assert (case.status, problem.kind) == ("failed", "failed")
    assert (problem.expected, problem.found) == (
        "Accept-Encoding: identity (REQ-5)",
        "request 0: gzip",
    )
    size = len(FILE)
    assert problem.requests == [
        f"0: GET bytes=0-262143: 206 with bytes 0-{size - 1}, {size:,} bytes of body sent"
    ]
    case = run(declares_http(fake(ALWAYS_OK)), root).cases[0]
    assert (case.problems[0].expected, case.problems[0].requests) == ("at least one request", [])


def test_a_wrong_answer_shows_the_requests(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    root = http_case(tmp_path / "cases", verdict="io_error", codes=["io.range"])
    problem = run(declares_http(fake(ASK)), root).cases[0].problems[0]
    assert (problem.expected, problem.found) == ("io_error io.range", "ok")
    assert len(problem.requests) == 1


def test_accepted_codes(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    root = http_case(tmp_path / "cases", accept=["io.read"])
    refuses = ASK.replace(ALWAYS_OK, 'return say("io_error", "io.read")')
    assert run(declares_http(fake(refuses)), root).good
    case = run(declares_http(fake(refuses.replace("io.read", "io.short"))), root).cases[0]
    assert case.problems[0].expected == "ok or io.read"


def test_a_crash_of_a_reader_that_hangs_shows_the_requests(
    tmp_path: Path, fake: Callable[..., list[str]]
) -> None:
    root = http_case(tmp_path / "cases", "stalls")
    case = run(declares_http(fake(ASK)), root, timeout_factor=0.05).cases[0]
    assert case.status == "crashed"
    assert "took more than 1.5 seconds" in case.problems[0].found
    assert case.problems[0].requests[0].startswith("0: GET bytes=0-262143: 206")


def test_reports_show_requests_and_advice(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    root = http_case(tmp_path / "cases", requests={"should": {"most": 1}})
    asks_twice = "for _ in range(2):\n" + "\n".join(
        f"    {line}" for line in ASK.replace(ALWAYS_OK, "").strip().splitlines()
    )
    good = run(declares_http(fake(f"{asks_twice}\n{ALWAYS_OK}")), root)
    advice = "operation 0, verify: 2 requests, the specification advises 1"
    assert (good.good, good.cases[0].advice) == (True, [advice])
    bad = run(declares_http(fake(ASK.replace("identity", "br"))), root)
    line = bad.cases[0].problems[0].requests[0]
    for found in (good, bad):
        Draft202012Validator(cases.schema("results")).validate(found.to_json())
        results.write(found, tmp_path / "r.json")
        assert results.read(tmp_path / "r.json").to_json() == found.to_json()
    screen = StringIO()
    for found in (good, bad):
        terminal.show_results(Console(file=screen, width=100), found)
    text = screen.getvalue()
    assert f"advice {OK}: {advice}" in text
    assert f"request   {line}" in text
    page = html.page([good, bad])
    assert advice in page
    assert line in page
    assert page.count("<h2>Advice") == 1
    assert "Advice" not in html.page([bad])
    junit.write(bad, tmp_path / "j.xml")
    assert f"request {line}" in (tmp_path / "j.xml").read_text()


def test_old_results_without_requests_can_be_read(
    tmp_path: Path, fake: Callable[..., list[str]]
) -> None:
    found = run(declares_http(fake(ALWAYS_OK)), http_case(tmp_path / "cases")).to_json()
    for case in found["cases"]:
        del case["advice"]
        for problem in case["problems"]:
            del problem["requests"]
    (tmp_path / "r.json").write_text(json.dumps(found))
    again = results.read(tmp_path / "r.json").cases[0]
    assert (again.advice, again.problems[0].requests) == ([], [])


def test_inputs_are_inflated(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    path = tmp_path / "x.kvf.gz"
    path.write_bytes(gzip.compress(FILE))
    assert cases.read_input(path) == FILE
    assert cases.read_input(tmp_path / "absent.gz") is None
    path.write_bytes(gzip.compress(bytes(cases.LARGEST_INFLATED)))
    assert cases.read_input(path) == bytes(cases.LARGEST_INFLATED)
    for data, why in (
        (gzip.compress(bytes(cases.LARGEST_INFLATED + 1)), "more than 1,048,576"),
        (gzip.compress(FILE)[:-9], "no gzip file"),
        (FILE, "no gzip file"),
    ):
        path.write_bytes(data)
        with pytest.raises(cases.CaseError, match=why):
            cases.read_input(path)
    body = f'if open(args[1], "rb").read() != {FILE!r}:\n    raise ValueError\n{ALWAYS_OK}'
    root = tmp_path / "cases"
    operation = {"call": "verify", "expect": {"verdict": "ok", **MEMBERS}}
    folder = make_case(root, "core", OK, [operation], input="input.kvf.gz")
    (folder / "input.kvf").unlink()
    (folder / "input.kvf.gz").write_bytes(gzip.compress(FILE))
    assert check.check_cases(root) == []
    assert run(fake(body), root).good


@pytest.mark.parametrize(
    ("operation", "requires", "problem"),
    [
        ({"http": {"behaviour": "plain"}}, ["http"], ""),
        ({"http": {"behaviour": "plain"}, "arguments": ["--timeout", "1"]}, ["http"], ""),
        ({"http": {"behaviour": "plain"}}, [], "http must be in requires"),
        ({}, ["http"], "http must be in requires"),
        ({"http": {"behaviour": "rude"}}, ["http"], "no behaviour of the server: rude"),
        ({"arguments": ["--timeout", "1"]}, [], "no option of the protocol: --timeout"),
        ({"expect": {"verdict": "ok", "accept": ["io.read"]}}, [], "accept"),
        ({"expect": {"verdict": "ok", "requests": {"most": 1}}}, [], "requests"),
        (
            {"http": {"behaviour": "plain"}, "expect": {"verdict": "ok", "accept": ["io.x"]}},
            ["http"],
            "no codes: io.x",
        ),
        (
            {"http": {"behaviour": "plain"}, "expect": {"verdict": "ok", "requests": {}}},
            ["http"],
            "requests",
        ),
    ],
)
def test_check_cases(
    tmp_path: Path, operation: dict[str, Any], requires: list[str], problem: str
) -> None:
    whole = {"call": "verify", "expect": {"verdict": "ok"}, **operation}
    make_case(tmp_path, "faulty", BAD, [whole], requires=requires)
    found = check.check_cases(tmp_path)
    assert (problem in "\n".join(found)) if problem else found == []


def test_check_cases_notices_bad_compressed_inputs(tmp_path: Path) -> None:
    operation = {"call": "verify", "expect": {"verdict": "ok"}}
    folder = make_case(tmp_path, "core", OK, [operation], input="input.kvf.gz")
    (folder / "input.kvf").rename(folder / "input.kvf.gz")
    assert "no gzip file" in "\n".join(check.check_cases(tmp_path))


# --- the cases themselves --------------------------------------------------------------------


def ends(name: str) -> dict[str, int]:
    """Where manifest, front and file of a shared input end."""
    data = cases.read_input(ROOT / "shared" / name)
    assert data is not None
    manifest = 128 + int.from_bytes(data[56:64], "little")
    front = manifest + int.from_bytes(data[64:72], "little")
    return {"manifest": manifest, "front": front, "file": len(data)}


@pytest.mark.parametrize("part", ["manifest", "front", "file"])
@pytest.mark.parametrize("size", [262_143, 262_144, 262_145])
def test_files_end_where_their_names_say(part: str, size: int) -> None:
    assert ends(f"{part}-{size}.kvf.gz")[part] == size


def test_what_lies_behind_the_first_request() -> None:
    assert ends("manifest-300000.kvf.gz")["manifest"] == 300_000
    assert ends("large.kvf.gz")["file"] > 2 * 262_144


def test_every_behaviour_has_a_case() -> None:
    from kvconform.behaviours import BEHAVIOURS

    used = {item.http for case in cases.load(ROOT) for item in case.operations}
    assert set(BEHAVIOURS) - used == set()
