"""The conformance runner against implementations that are wrong in one known way each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.conformance_fakes import (  # noqa: F401 - fixtures are used by name
    ALWAYS_INVALID,
    ALWAYS_OK,
    BAD,
    DIGEST,
    FILE,
    OK,
    READ,
    REFERENCE,
    TRACK,
    fake_fixture,
    make_case,
    run,
    statuses,
    suite_fixture,
)

# isort: split
from kvconform import cases, check, judge, process, runner
from kvconform.runner import WiringError, ask_info, read_xfails

CRASHES = {
    "exits 1": 'raise ValueError("oops")',
    "exits 2": "return 2",
    "exits 3 with a right answer": 'say("invalid", "header.magic")\nreturn 3',
    "prints nothing": "return 65",
    "prints two objects": 'say("invalid", "header.magic")\nreturn say("invalid", "header.magic")',
    "prints text first": 'print("hello")\nreturn say("invalid", "header.magic")',
    "wrong exit code for its verdict": 'say("invalid", "header.magic")\nreturn 69',
    "prints a list": 'print("[]")\nreturn 65',
    "has no code": 'print(\'{"protocol": 1, "verdict": "invalid"}\')\nreturn 65',
    "has a null code": 'return say("invalid")',
    "unknown verdict": 'print(\'{"protocol": 1, "verdict": "bad", "code": "x.y"}\')\nreturn 65',
    "other protocol": 'print(\'{"protocol": 2, "verdict": "invalid", "code": "x.y"}\')\nreturn 65',
    "doubled key": (
        'print(\'{"protocol": 1, "protocol": 1, "verdict": "invalid", "code": "header.magic"}\')\n'
        "return 65"
    ),
    "kills itself": "os.kill(os.getpid(), 9)",
}


def test_always_ok(suite: Path, fake: Callable[..., list[str]]) -> None:
    found = run(fake(ALWAYS_OK), suite)
    assert statuses(found) == {OK: "passed", BAD: "failed"}
    problem = found.cases[1].problems[0]
    assert (problem.expected, problem.found) == ("invalid header.magic", "ok")
    assert not found.good


def test_always_invalid(suite: Path, fake: Callable[..., list[str]]) -> None:
    assert statuses(run(fake(ALWAYS_INVALID), suite)) == {OK: "failed", BAD: "passed"}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (
            'return say("invalid", "manifest.json", where="byte 9")',
            "invalid manifest.json at byte 9",
        ),
        ('return say("invalid", "no.such")', "invalid no.such"),
        ('return say("unsupported", "version.unknown")', "unsupported version.unknown"),
    ],
)
def test_another_verdict_or_code(
    suite: Path, fake: Callable[..., list[str]], body: str, found: str
) -> None:
    case = run(fake(body), suite).cases[1]
    assert (case.status, case.problems[0].found) == ("failed", found)


@pytest.mark.parametrize("body", CRASHES.values(), ids=CRASHES)
def test_a_crash_passes_nothing(suite: Path, fake: Callable[..., list[str]], body: str) -> None:
    assert set(statuses(run(fake(body), suite)).values()) == {"crashed"}


def test_what_a_crash_says_is_kept(suite: Path, fake: Callable[..., list[str]]) -> None:
    problem = run(fake(CRASHES["exits 1"]), suite).cases[0].problems[0]
    assert problem.kind == "crashed"
    assert "exit code 1" in problem.found
    assert "ValueError: oops" in problem.detail


def limited(root: Path, **ceiling: int) -> Path:
    expect = {"verdict": "invalid", "codes": ["header.magic"]}
    make_case(
        root, "faulty", BAD, [{"call": "verify", "ceiling": ceiling, "expect": expect}], FILE[:8]
    )
    return root


CHILD = (
    "import subprocess\n"
    'subprocess.run([sys.executable, "-S", "-c", "x = b\'1\' * (300 << 20); '
    'import time; time.sleep(20)"])\n'
)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"time.sleep(20)\n{ALWAYS_INVALID}", "took more than 1 seconds"),
        (f'x = b"1" * (300 << 20)\ntime.sleep(20)\n{ALWAYS_INVALID}', "MiB, allowed are 128"),
        (f"{CHILD}{ALWAYS_INVALID}", "MiB, allowed are 128"),
    ],
    ids=["hangs", "eats memory", "a child eats memory"],
)
@pytest.mark.parametrize("batch", [False, True])
def test_ceilings(
    tmp_path: Path, fake: Callable[..., list[str]], body: str, why: str, batch: bool
) -> None:
    root = limited(tmp_path / "cases", seconds=1 if "seconds" in why else 15, memory_mib=128)
    if batch:  # flips run in batch although the case has a ceiling
        path = root / "faulty" / BAD / "case.json"
        value = json.loads(path.read_text())
        value["operations"][0]["flips"] = [[1, 1]]
        path.write_text(json.dumps(value))
    case = run(fake(body, body.replace("return ", "") if batch else ""), root).cases[0]
    assert case.status == "crashed"
    assert why in case.problems[0].found


def test_timeout_factor(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    root = limited(tmp_path / "cases", seconds=1)
    command = fake(f"time.sleep(1.3)\n{ALWAYS_INVALID}")
    assert run(command, root).cases[0].status == "crashed"
    assert run(command, root, timeout_factor=10).cases[0].status == "passed"


def decode_case(root: Path, expect: dict[str, Any], *more: str) -> Path:
    arguments = ["--track", TRACK, *more]
    make_case(root, "core", READ, [{"call": "decode", "arguments": arguments, "expect": expect}])
    return root


LEAVES = 'open(args[args.index("--output") + 1], "w").close()\n'


@pytest.mark.parametrize("name", ["part.bin", "part.bin.tmp"])
def test_an_output_left_behind_is_a_crash(
    tmp_path: Path, fake: Callable[..., list[str]], name: str
) -> None:
    expect = {"verdict": "usage", "codes": ["usage.selection"]}
    root = decode_case(tmp_path / "cases", expect, "--tokens", "0:99")
    answer = 'return say("usage", "usage.selection")'
    assert run(fake(answer), root).good
    leaves = LEAVES.replace("+ 1]", f'+ 1].replace("part.bin", "{name}")')
    case = run(fake(leaves + answer), root).cases[0]
    assert case.status == "crashed"
    assert "behind" in case.problems[0].found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('return say("ok", digests={})', "there is no FILE"),
        (LEAVES + 'return say("ok", digests={})', "0 bytes"),
        ('return say("ok")', "digests is missing"),
        (
            'd = b"1" * 818\nopen(args[-1], "wb").write(d)\nz = "0" * 64\n'
            'return say("ok", digests={"keys": z, "values": z, "near": z, "rec": z})',
            blake3(b"1" * 640).hexdigest(),
        ),
    ],
)
def test_decode_is_judged_by_the_file(
    tmp_path: Path, fake: Callable[..., list[str]], body: str, found: str
) -> None:
    root = decode_case(tmp_path / "cases", {"verdict": "ok"})
    case = run(fake(body), root).cases[0]
    assert case.status == "failed"
    assert found in case.problems[0].found


@pytest.mark.parametrize(
    ("selection", "sizes"),
    [
        ((), {"keys": 640, "values": 120, "near": 42, "rec": 16}),
        (("--tokens", "2:5"), {"keys": 192, "values": 36, "near": 12, "rec": 16}),
        (("--layers", "3:5"), {"keys": 320, "values": 60, "near": 42}),
        (("--heads", "0:1", "--tokens", "9:10"), {"keys": 32, "values": 12, "near": 6, "rec": 16}),
    ],
)
def test_part_sizes(selection: tuple[str, ...], sizes: dict[str, int]) -> None:
    assert judge.part_sizes(FILE, selection) == sizes


def test_inspect_must_give_the_manifest(tmp_path: Path, fake: Callable[..., list[str]]) -> None:
    root = tmp_path / "cases"
    expect = {"verdict": "ok", "manifest_digest": DIGEST}
    make_case(root, "core", OK, [{"call": "inspect", "expect": expect}])
    assert run(fake(ALWAYS_OK), root).cases[0].status == "failed"
    assert run(REFERENCE, root).cases[0].status == "passed"


def full_suite(root: Path) -> Path:
    """Every kind of call, flips, cuts, a file argument and an absent input."""
    expect = {"verdict": "ok"}
    decode_case(root, expect, "--tokens", "0:10", "--layers", "1:2")
    damaged = {"verdict": "invalid"}
    make_case(
        root,
        "faulty",
        "flp-0001-header-flips",
        [
            {"call": "verify", "flips": [[8, 128, 1], [130, 255]], "expect": damaged},
            {"call": "inspect", "cuts": [[0, 40], 100], "expect": damaged},
        ],
    )
    other = {"verdict": "mismatch", "codes": ["identity.missing"]}
    folder = make_case(
        root,
        "core",
        "tok-0001-other-tokens",
        [{"call": "verify", "arguments": ["--expect-token-ids", "ids.json"], "expect": other}],
        files=["ids.json"],
    )
    (folder / "ids.json").write_text("[1, 2, 3]")
    gone = {"verdict": "io_error", "codes": ["io.not-found"]}
    folder = make_case(
        root, "faulty", "err-0001-absent", [{"call": "inspect", "expect": gone}], input="absent.kvf"
    )
    (folder / "input.kvf").unlink()
    return root


@pytest.mark.parametrize("batch", [False, True])
def test_the_reference_is_right(suite: Path, batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_VARIANTS", 3)
    root = full_suite(suite)
    assert check.check_cases(root) == []
    found = run(REFERENCE, root, jobs=2, batch=batch)
    assert [case.problems for case in found.cases if case.problems] == []
    assert found.good
    flips = next(case for case in found.cases if case.id.startswith("flp"))
    assert (flips.runs, flips.of) == (121 + 41 if batch else 3 + 3, 121 + 41)


def test_the_reference_answers_wrong_calls_with_usage(tmp_path: Path) -> None:
    ended = process.call([*REFERENCE, "verify"], cases.Ceiling())
    answer = judge.answer_of(ended, batch=False)
    assert (answer["verdict"], answer["code"]) == ("usage", "usage.argument")
    ended = process.call([*REFERENCE, "decode", str(tmp_path), "--x"], cases.Ceiling())
    assert ended.exit_code == 64


BATCH_OK = 'print(json.dumps({"protocol": 1, "verdict": "ok", "code": None, "exit": 0, **OK}))\n'


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (BATCH_OK.replace('"exit": 0, ', "") + "sys.stdout.flush()", "exit is missing"),
        (BATCH_OK.replace('"exit": 0', '"exit": 65') + "sys.stdout.flush()", "exit code 65"),
        ("sys.exit(1)", "died with exit code 1"),
        ("os.abort()", "died with signal"),
    ],
)
def test_batch_crashes(suite: Path, fake: Callable[..., list[str]], line: str, why: str) -> None:
    case = run(fake(batch_body=line), suite).cases[0]
    assert case.status == "crashed"
    assert why in case.problems[0].found


def test_batch_restarts_after_a_death(suite: Path, fake: Callable[..., list[str]]) -> None:
    body = f'if open(args[1], "rb").read(1) == b"X":\n    os.abort()\n{BATCH_OK}sys.stdout.flush()'
    make_case(suite, "faulty", "hdr-0002-again", [{"call": "verify", "expect": {"verdict": "ok"}}])
    found = run(fake(batch_body=body), suite)
    assert list(statuses(found).values()) == ["passed", "crashed", "passed"]
    assert found.notes == []


@pytest.mark.parametrize("pause", ["", "sys.stdout.flush()\ntime.sleep(0.3)\n"])
def test_batch_answers_each_call_once(
    suite: Path, fake: Callable[..., list[str]], pause: str
) -> None:
    found = run(fake(batch_body=f"{BATCH_OK}{pause}{BATCH_OK}sys.stdout.flush()"), suite)
    crashed = [item.found for case in found.cases for item in case.problems]
    assert "more than one line for one call" in crashed or found.notes
    assert not found.good


def test_batch_must_not_end_early(suite: Path, fake: Callable[..., list[str]]) -> None:
    found = run(fake(batch_body=f"{BATCH_OK}sys.stdout.flush()\nreturn"), suite)
    crashed = [item.found for case in found.cases for item in case.problems]
    assert "batch ended with exit code 0 before its input did" in found.notes or any(
        "died with exit code 0" in item for item in crashed
    )


def test_batch_must_end_well(suite: Path, fake: Callable[..., list[str]]) -> None:
    command = fake(batch_body=f"{BATCH_OK}sys.stdout.flush()")
    path = Path(command[-1])
    path.write_text(path.read_text().replace("sys.exit(batch()", "sys.exit(batch() or 5"))
    found = run(command, suite)
    assert found.notes == ["batch ended with exit code 5, expected 0"]
    assert not found.good


def test_skips_say_what_is_not_declared(suite: Path, fake: Callable[..., list[str]]) -> None:
    expect = [{"call": "verify", "expect": {"verdict": "ok"}}]
    make_case(suite, "core", "zst-0001-needs-zstd", expect, requires=["codec:zstd"])
    make_case(suite, "core", "trf-0001-needs-klt", expect, requires=["feature:transform-klt"])
    make_case(suite, "gold", "gol-0001-later", expect)
    found = run(fake(ALWAYS_OK), suite)
    reasons = {case.id: case.reason for case in found.cases if case.status == "skipped"}
    assert reasons == {
        "zst-0001-needs-zstd": "not declared: codec:zstd",
        "trf-0001-needs-klt": "not declared: feature:transform-klt",
        "gol-0001-later": "not declared: level:gold",
    }


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit(1)",
        'sys.exit(say("ok", name="x"))',
        'sys.exit(say("ok", **{**INFO, "codecs": ["zstd"]}))',
        'sys.exit(say("ok", **{**INFO, "formats": ["0.8"]}))',
        'sys.exit(say("ok", **{**INFO, "levels": ["all"]}))',
    ],
)
def test_info_is_checked(fake: Callable[..., list[str]], body: str) -> None:
    command = fake(ALWAYS_OK)
    path = Path(command[-1])
    path.write_text(path.read_text().replace('sys.exit(say("ok", **INFO))', body))
    with pytest.raises(WiringError):
        ask_info(command)
    with pytest.raises(WiringError, match="cannot be started"):
        ask_info(["/no/such/program"])


def test_xfails_are_strict(suite: Path, fake: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "xfails.txt"
    file.write_text(f"# a comment\n\n{BAD}  # does not look, https://example.com/1\n")
    known = {OK, BAD}
    xfails = read_xfails(file, known)
    found = run(fake(ALWAYS_OK), suite, xfails=xfails)
    assert statuses(found) == {OK: "passed", BAD: "xfailed"}
    assert found.good
    found = run(fake(ALWAYS_OK), suite, xfails={OK: "thought so", **xfails})
    assert statuses(found) == {OK: "xpassed", BAD: "xfailed"}
    assert not found.good
    for text in (f"{BAD}\n", "hdr-0009-nothing # reason\n"):
        file.write_text(text)
        with pytest.raises(cases.CaseError):
            read_xfails(file, known)


def test_fail_fast(suite: Path, fake: Callable[..., list[str]]) -> None:
    found = run(fake(ALWAYS_INVALID), suite, fail_fast=True)
    assert statuses(found) == {OK: "failed", BAD: "skipped"}
