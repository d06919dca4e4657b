"""The fault matrix: every misbehaviour of a server with every operation.

Each cell says the exact code or that the bits are right. In none of them may a wrong byte come out,
or a thread, connection, file descriptor or half of a file be left behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat import KvformatError
from kvformat.cli.program import cli
from kvformat.storage import Transport
from kvformat.storage.replies import NOT_FOUND
from tests.remote import arrays, far, local, nothing_left, ordinary
from tests.requirements import covers

sys.path.append(str(Path(__file__).parent.parent / "conformance"))

from kvconform.behaviours import BEHAVIOURS, LARGE_BYTES
from kvconform.server import Resource, Server

PART: dict[str, Any] = {"tokens": (300, 1_300), "layers": (0, 3)}
TRACK = "near-lossless/zstd"
BUFFERED_BYTES = 12 * 2**20
"""What a server may write that nobody reads: it lies in buffers of the kernel and of aiohttp."""

OK = "ok"
GOOD = (
    "plain", "no-head", "no-total", "no-etag", "weak-etag-changes", "says-identity", "chunked",
    "slow", "redirects", "flaky", "flaky-later", "flaky-reset",
)  # fmt: skip
FIRST = {
    "ignores-range": "io.range",
    "ignores-range-large": "io.range",
    "gzip": "io.range",
    "shifted": "io.range",
    "no-content-range": "io.range",
    "malformed-content-range": "io.range",
    "unsatisfiable-first": "io.range",
    "short-range-first": "io.short",
    "short-body": "io.short",
    "short-chunked": "io.short",
    "long-body": "io.short",
    "endless-body": "io.short",
    "empty-416": "header.magic",
    "missing": "io.not-found",
    "gone": "io.not-found",
    "denied": "io.denied",
    "unauthorised": "io.denied",
    "proxy-asks": "io.denied",
    "teapot": "io.read",
    "fails": "io.read",
    "redirect-loop": "io.read",
    "redirect-to-file": "io.read",
    "redirect-to-ftp": "io.read",
    "stalls": "io.timeout",
    "silent": "io.timeout",
}
"""Servers whose first reply is bad already: what every operation answers."""
LATER = {
    "ignores-range-later": "io.range",
    "gzip-later": "io.range",
    "shifted-later": "io.range",
    "no-content-range-later": "io.range",
    "unsatisfiable": "io.range",
    "short-range": "io.short",
    "short-body-later": "io.short",
    "short-chunked-later": "io.short",
    "long-body-later": "io.short",
    "endless-body-later": "io.short",
    "changes-size": "io.changed",
    "changes-etag": "io.changed",
    "changes-bytes": "segment.digest",
    "denied-later": "io.denied",
    "stalls-later": "io.timeout",
}
"""Servers that a file can be opened at: what the operations answer that need more of it."""
OTHER_CODES = {
    ("changes-bytes", name): "set.digest" for name in ("verify", "verify-cli", "cp", "copy")
}
"""These go through the file from its front, where the sets are."""
STALLS = ("stalls", "stalls-later", "silent")


def expected_code(behaviour: str, operation: str) -> str:
    """The matrix."""
    if behaviour in GOOD or (behaviour in LATER and operation in ("open", "inspect-cli")):
        return OK
    code = FIRST.get(behaviour) or LATER[behaviour]
    return OTHER_CODES.get((behaviour, operation), code)


def test_the_matrix_has_every_behaviour() -> None:
    assert set(GOOD) | set(FIRST) | set(LATER) == set(BEHAVIOURS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small waits; the command line has no options for them."""
    behaviour = getattr(request.node, "callspec", None)
    name = None if behaviour is None else behaviour.params.get("behaviour")
    limits: dict[str, Any] = {}
    if name in STALLS:  # a busy machine must be able to open a file before it stalls
        limit_s = 0.75 if name in LATER else 0.1
        limits = {"connect_timeout_s": limit_s, "stall_timeout_s": limit_s, "retries": 0}
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e-3)
    monkeypatch.setattr("kvformat.storage.locate.Transport", partial(Transport, **limits))
    monkeypatch.setattr("kvconform.behaviours.PAUSE_S", 0.01)


# Operations: each returns a code, and asserts that what it gave is right.


def of_calls(act: Callable[[], None]) -> str:
    try:
        act()
    except KvformatError as error:
        return error.code
    return OK


def do_open(url: str, _: Path) -> str:
    return of_calls(lambda: kvformat.open(url).close())


def do_read(url: str, _: Path) -> str:
    def act() -> None:
        with kvformat.open(url) as artifact:
            assert arrays(artifact.read(**PART, track=TRACK)) == local(
                ordinary(), **PART, track=TRACK
            )

    return of_calls(act)


def do_stream(url: str, _: Path) -> str:
    whole = kvformat.open(ordinary()).read(track=TRACK).groups

    def act() -> None:
        with kvformat.open(url) as artifact, artifact.stream(**PART, track=TRACK) as stream:
            for block in stream:
                tokens = slice(block.token_start, block.token_start + block.array.shape[1])
                right = whole[block.group.name].array[list(block.layers), tokens]
                assert block.array.tobytes() == right.tobytes()

    return of_calls(act)


def filled(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.full(shape, 0xA5A5, np.uint16)


def expected_kv() -> np.ndarray[Any, Any]:
    return kvformat.open(ordinary()).read(**PART, track=TRACK).kv.view(np.uint16)


def check_prefix(buffer: np.ndarray[Any, Any], validity: kvformat.Validity) -> None:
    """What is called good is, layer by layer."""
    right, begin = expected_kv(), PART["tokens"][0]
    assert validity.tokens == PART["tokens"]
    for layer, end in validity.layers.items():
        good = np.s_[:, layer, : end - begin]
        assert (buffer[good] == right[good]).all()
        assert validity.valid_end <= end


def do_read_into(url: str, _: Path) -> str:
    buffer = filled(expected_kv().shape)
    try:
        with kvformat.open(url) as artifact:
            report = artifact.read_into(buffer, **PART, track=TRACK)
            assert report.validity.complete
            check_prefix(buffer, report.validity)
    except KvformatError as error:
        if error.validity is not None:
            check_prefix(buffer, error.validity)
            assert not error.validity.complete
        return error.code
    return OK


def do_read_prefix(url: str, _: Path) -> str:
    """``on_error="prefix"`` never raises once the file is open."""
    buffer = filled(expected_kv().shape)
    try:
        artifact = kvformat.open(url)
    except KvformatError as error:
        return error.code
    with artifact:
        report = artifact.read_into(buffer, **PART, track=TRACK, on_error="prefix")
    check_prefix(buffer, report.validity)
    codes = {failure.error.code for failure in report.validity.failures}
    assert report.validity.complete == (not codes)
    assert len(codes) <= 1
    return codes.pop() if codes else OK


def do_verify(url: str, _: Path) -> str:
    return of_calls(lambda: kvformat.verify(url, in_child=False) and None)


def do_copy(url: str, folder: Path) -> str:
    target = folder / "copy.kvf"
    code = of_calls(lambda: kvformat.copy(url, target) and None)
    assert target.exists() == (code == OK)
    if code == OK:
        assert target.read_bytes() == ordinary()
    return code


def of_command(*arguments: str) -> str:
    """The code in the JSON that a command printed."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--json"])
    shown = CAPTURE[0].readouterr()
    assert "Traceback" not in shown.err
    verdict = json.loads(shown.out)
    code = verdict.get("code") or OK
    assert (ended.value.code == 0) == (code == OK)
    if code != OK:
        assert f"error [{code}]" in shown.err
    return str(code)


CAPTURE: list[pytest.CaptureFixture[str]] = []


@pytest.fixture(autouse=True)
def _captured(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    CAPTURE.append(capfd)
    yield
    CAPTURE.clear()


def cli_inspect(url: str, _: Path) -> str:
    return of_command("inspect", url)


def cli_verify(url: str, _: Path) -> str:
    return of_command("verify", url)


def cli_decode(url: str, folder: Path) -> str:
    target = folder / "part.npy"
    code = of_command("decode", url, "--output", str(target), "--track", TRACK)
    assert target.exists() == (code == OK)
    if code == OK:
        found = np.load(target)
        right = kvformat.open(ordinary()).read(track=TRACK).kv
        assert found.tobytes() == right.tobytes()
    return code


def cli_cp(url: str, folder: Path) -> str:
    target = folder / "copy.kvf"
    code = of_command("cp", url, str(target))
    assert target.exists() == (code == OK)
    return code


OPERATIONS: dict[str, Callable[[str, Path], str]] = {
    "open": do_open,
    "read": do_read,
    "read-into": do_read_into,
    "read-prefix": do_read_prefix,
    "stream": do_stream,
    "verify": do_verify,
    "copy": do_copy,
    "inspect-cli": cli_inspect,
    "decode-cli": cli_decode,
    "verify-cli": cli_verify,
    "cp": cli_cp,
}


def check_requests(resource: Resource) -> None:
    """REQ-5, and that nothing is read to its end that was refused."""
    for request in resource.log:
        assert request.method == "GET"
        (asked,) = request.ranges
        assert request.encodings == ("identity",)
        first, last = asked.removeprefix("bytes=").split("-")
        assert request.written <= int(last) - int(first) + 1 + BUFFERED_BYTES < LARGE_BYTES


@covers(
    "REQ-3", "REQ-4", "REQ-5", "REQ-6", "REQ-7", "REQ-8", "REQ-9", "REQ-10", "REQ-11",
    "PAR-2", "ERR-4",
)  # fmt: skip
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("behaviour", [*GOOD, *FIRST, *LATER])
def test_matrix(server: Server, tmp_path: Path, behaviour: str, operation: str) -> None:
    outside = tmp_path / "source.kvf"
    outside.write_bytes(ordinary())
    folder = tmp_path / "out"
    folder.mkdir()
    with nothing_left(), server.serve(ordinary(), behaviour, outside) as resource:
        assert OPERATIONS[operation](resource.url, folder) == expected_code(behaviour, operation)
        check_requests(resource)
        if behaviour in FIRST and FIRST[behaviour] != "io.timeout" and "body" not in behaviour:
            repeats = 5 if behaviour == "fails" else 1
            most = repeats * (11 if behaviour == "redirect-loop" else 1)
            assert len(resource.log) <= most or behaviour == "short-chunked"
    assert [path.name for path in folder.iterdir()] in ([], ["copy.kvf"], ["part.npy"])


@covers("REQ-9")
def test_what_is_final_is_asked_once(server: Server) -> None:
    for behaviour in ("missing", "gone", "denied", "teapot", "ignores-range", "long-body"):
        with server.serve(ordinary(), behaviour) as resource:
            assert do_open(resource.url, Path()) == FIRST[behaviour]
            assert len(resource.log) == 1
    assert {404, 410} == NOT_FOUND


@covers("REQ-9")
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_repeats_are_counted(server: Server, retries: int) -> None:
    with server.serve(ordinary(), "fails") as resource:
        with pytest.raises(kvformat.StorageError, match="status 500"):
            kvformat.open(resource.url, transport=Transport(retries=retries))
        assert len(resource.log) == 1 + retries


@covers("REQ-11")
def test_ten_redirections_are_followed(server: Server) -> None:
    with server.serve(ordinary(), "redirect-loop") as resource:
        with pytest.raises(kvformat.StorageError, match="more than 10 redirections") as caught:
            kvformat.open(resource.url)
        assert len(resource.log) == 11
        assert caught.value.code == "io.read"


def test_damage_behind_a_table_that_changes(server: Server) -> None:
    """Tables and sets are behind the prefix here: their digests name them."""
    with server.serve(far(), "changes-bytes") as resource, kvformat.open(resource.url) as artifact:
        with pytest.raises(kvformat.InvalidError) as caught:
            artifact.read(track="exact")
        assert caught.value.code == "table.digest"
