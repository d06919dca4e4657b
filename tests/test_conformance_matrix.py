"""``kvconform matrix``: who agrees with whom, and what is said when they do not."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance_fakes import (  # noqa: F401 - fixtures are used by name
    CONFORMANCE,
    REFERENCE,
    fake_fixture,
)
from tests.conformance_wrappers import wrapper

# isort: split
from kvconform import cases, matrix, matrix_page
from kvconform.matrix import Matrix, parse_party, parties

CASES = cases.load(CONFORMANCE / "cases")
SMALL = ("enc-*-exact-stored", "enc-*-quantised-two-codecs", "enc-*-tensors-short")

FLIPS = """
old = it.raw_bytes
def raw_bytes(array):
    data = bytearray(old(array))
    data[-1] ^= 1
    return bytes(data)
it.raw_bytes = raw_bytes
"""
ONLY_QUANTISED = """
old = it.decode
def decode(url, options, *, batch):
    if options["--track"].startswith("exact"):
        return old(url, options, batch=batch)
    plain = it.raw_bytes
    it.raw_bytes = lambda array: bytes([plain(array)[0] ^ 1]) + bytes(plain(array)[1:])
    try:
        return old(url, options, batch=batch)
    finally:
        it.raw_bytes = plain
it.decode = decode
"""
BOTH_WRONG = """
import numpy as np
def turned(array):
    return np.ascontiguousarray(array).reshape(-1)[::-1]
plain, tensors = it.raw_bytes, it.group_tensors
it.raw_bytes = lambda array: plain(turned(array))
def group_tensors(value, count, folder):
    found = tensors(value, count, folder)
    whole = turned(np.stack(found.layers)).reshape(np.stack(found.layers).shape)
    return it.kvformat.GroupTensors(found.group, tuple(whole))
it.group_tensors = group_tensors
"""


def named(**commands: list[str]) -> list[str]:
    return [f"{name}={shlex.join(command)}" for name, command in commands.items()]


def exchange(
    producers: dict[str, list[str]], consumers: dict[str, list[str]], globs: tuple[str, ...] = SMALL
) -> Matrix:
    return matrix.run(
        parties(named(**producers), "producer", 1.0),
        parties(named(**consumers), "consumer", 1.0),
        cases.select(CASES, globs=globs),
        CONFORMANCE / "schema",
    )


def sums(found: Matrix) -> dict[tuple[str, str], list[str]]:
    return {
        (producer, what): [str(item) for item in (files, *each)]
        for producer, what, files, each in matrix.rows(found)
    }


def without(codecs: str) -> list[str]:
    return ["env", f"KVCONFORM_CODECS={codecs}", *REFERENCE]


def test_the_reference_agrees_with_itself() -> None:
    found = exchange({"one": REFERENCE}, {"one": REFERENCE, "small": without("stored")})
    assert found.good
    assert sums(found) == {
        ("one", "exact/stored"): ["1/1", "1/1", "1/1"],
        ("one", "near-lossless/stored"): ["1/1", "1/1", "1/1"],
        ("one", "near-lossless/zstd"): ["1/1", "1/1", "skipped"],
        ("one", "verify"): ["2/2", "2/2", "1/1"],
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [(FLIPS, "of the source"), (ONLY_QUANTISED, "as good restores it")],
)
def test_a_wrong_consumer_is_found(tmp_path: Path, body: str, expected: str) -> None:
    bad = wrapper(tmp_path, body)
    found = exchange({"good": REFERENCE}, {"good": REFERENCE, "bad": bad})
    assert not found.good
    assert {(cell.consumer, cell.status) for cell in found.problems} == {("bad", "failed")}
    assert expected in found.problems[0].expected


def test_a_writer_and_reader_with_one_fault_are_found_by_another(tmp_path: Path) -> None:
    wrong = wrapper(tmp_path, BOTH_WRONG)
    found = exchange({"wrong": wrong}, {"wrong": wrong, "good": REFERENCE}, SMALL[:1])
    assert not found.good
    # what it writes has another source digest: it never gets as far as its reader
    assert [(cell.what, cell.status) for cell in found.problems] == [("encode", "failed")]
    assert "source_digest" in found.problems[0].expected
    assert sums(found)[("wrong", "verify")] == ["0/1", "-", "-"]


def test_who_exchanged_nothing_is_not_good() -> None:
    found = exchange(
        {"one": REFERENCE},
        {"one": REFERENCE, "small": without("stored")},
        ("enc-*-exact-zstd",),
    )
    assert found.problems == []
    assert found.silent == ["small read nothing of one"]
    assert not found.good
    assert not exchange({"one": REFERENCE}, {"one": REFERENCE}, ("hdr-*",)).good


def test_a_producer_writes_only_what_it_declares() -> None:
    found = exchange({"small": without("stored")}, {"one": REFERENCE})
    assert {cell.what for cell in found.cells} == {"encode", "exact/stored", "verify"}
    assert found.good


@pytest.mark.parametrize("text", ["", "name", "=python x", "name=", 'name="'])
def test_a_party_has_a_name_and_a_command(text: str) -> None:
    with pytest.raises(cases.CaseError):
        parse_party(text)


def test_parties_are_checked(fake: Callable[..., list[str]]) -> None:
    one = named(one=REFERENCE)
    with pytest.raises(cases.CaseError, match="one name"):
        parties([*one, *one], "consumer", 1.0)
    with pytest.raises(cases.CaseError, match="declares no encode"):
        parties(named(reader=fake("return 1")), "producer", 1.0)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvconform", "matrix", *arguments],
        cwd=CONFORMANCE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def call(tmp_path: Path, consumer: list[str]) -> tuple[Any, str, str, Any]:
    json_file, html_file = tmp_path / "m.json", tmp_path / "m.html"
    (producer,), (reader,) = named(one=REFERENCE), named(two=consumer)
    done = command(
        *("--producer", producer, "--consumer", reader, "--case", "enc-*-exact-stored"),
        *("--json", str(json_file), "--html", str(html_file)),
    )
    value = json.loads(json_file.read_text())
    return done.returncode, done.stdout, html_file.read_text(), value


def test_the_command(tmp_path: Path) -> None:
    code, text, page, value = call(tmp_path, REFERENCE)
    assert (code, value["good"], value["silent"]) == (0, True, [])
    assert [cell["status"] for cell in value["cells"]] == ["passed"] * 3
    assert "good: 3 calls agree" in text
    assert '<strong class="passed">good</strong>' in page
    code, text, page, value = call(tmp_path, wrapper(tmp_path, FLIPS, 'a "<b>" c'))
    assert (code, value["good"]) == (1, False)
    assert "not good: 1 of 3 calls do not agree" in text
    assert page.index("not good") < page.index("What does not agree") < page.index(">Matrix<")
    assert "<b>" not in page
    assert "<script" not in page
    found = command("--producer", "x", "--consumer", "y=z")
    assert (found.returncode, "NAME=COMMAND" in found.stderr) == (2, True)


def test_notes_are_problems() -> None:
    found = Matrix([], [], "0" * 64, "here", "now", notes=["a & b"])
    assert not found.good
    assert "a &amp; b" in matrix_page.page(found)
