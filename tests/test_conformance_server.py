"""What the server of the conformance suite puts on the wire, read with a bare socket."""

from __future__ import annotations

import gzip
import hashlib
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CONFORMANCE = Path(__file__).parent.parent / "conformance"
sys.path.append(str(CONFORMANCE))

from kvconform import behaviours  # noqa: E402
from kvconform.behaviours import (  # noqa: E402
    BEHAVIOURS,
    LARGE_BYTES,
    PAUSE_S,
    SLOW_PIECES,
    Asked,
    pieces,
)
from kvconform.server import Resource, Server  # noqa: E402

DATA = bytes(index * 7 % 251 for index in range(1000))
OTHER = bytes(byte ^ 1 for byte in DATA)
PART = DATA[100:200]
TYPE = "Content-Type: application/octet-stream"
LENGTH = "Content-Length: 100"
CHUNKED = "Transfer-Encoding: chunked"
RANGE = "Content-Range: bytes 100-199/1000"


def tag(data: bytes) -> str:
    return f'ETag: "{hashlib.sha256(data).hexdigest()[:16]}"'


TAG = tag(DATA)


def raw(status: str, *head: str, body: bytes = b"") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *head, "", "")).encode() + body


def part(*head: str, body: bytes = PART) -> bytes:
    return raw("206 Partial Content", *head, TYPE, body=body)


def chunk(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(item), item) for item in parts) + end


GOOD = part(RANGE, TAG, LENGTH)
WHOLE = raw("200 OK", TAG, "Content-Length: 1000", TYPE, body=DATA)
ZIPPED = gzip.compress(PART, mtime=0)
GZIP = part(RANGE, TAG, "Content-Encoding: gzip", f"Content-Length: {len(ZIPPED)}", body=ZIPPED)
SHIFTED = part("Content-Range: bytes 101-200/1000", TAG, LENGTH, body=DATA[101:201])
BARE = part(TAG, LENGTH)
SHORT = part("Content-Range: bytes 100-198/1000", TAG, "Content-Length: 99", body=PART[:-1])
CUT = part(RANGE, TAG, LENGTH, body=PART[:-1])
SHORT_CHUNKED = part(RANGE, TAG, CHUNKED, body=chunk(PART[:-1]))
LONG = part(RANGE, TAG, CHUNKED, body=chunk(PART + b"\0"))
OUTSIDE = raw(
    "416 Requested Range Not Satisfiable", "Content-Range: bytes */1000", "Content-Length: 0"
)
END = part("Content-Range: bytes 990-999/1000", TAG, "Content-Length: 10", body=DATA[990:])
HALF = part(RANGE, TAG, LENGTH, body=PART[:50])


def bare(status: str) -> bytes:
    return raw(status, "Content-Length: 0")


WIRE = {
    "plain": (GOOD, GOOD),
    "no-head": (GOOD, GOOD),
    "no-total": (part(TAG, "Content-Range: bytes 100-199/*", LENGTH),) * 2,
    "no-etag": (part(RANGE, LENGTH),) * 2,
    "weak-etag-changes": tuple(part(RANGE, f'ETag: W/"{n}"', LENGTH) for n in range(2)),
    "says-identity": (part(RANGE, TAG, "Content-Encoding: identity", LENGTH),) * 2,
    "chunked": (part(RANGE, TAG, CHUNKED, body=chunk(PART)),) * 2,
    "slow": (GOOD, GOOD),
    "ignores-range": (WHOLE, WHOLE),
    "ignores-range-later": (GOOD, WHOLE),
    "gzip": (GZIP, GZIP),
    "gzip-later": (GOOD, GZIP),
    "shifted": (SHIFTED, SHIFTED),
    "shifted-later": (GOOD, SHIFTED),
    "no-content-range": (BARE, BARE),
    "no-content-range-later": (GOOD, BARE),
    "malformed-content-range": (part(TAG, "Content-Range: bytes=100-199", LENGTH),) * 2,
    "short-range": (GOOD, SHORT),
    "short-range-first": (SHORT, SHORT),
    "short-body": (CUT, CUT),
    "short-body-later": (GOOD, CUT),
    "short-chunked": (SHORT_CHUNKED, SHORT_CHUNKED),
    "short-chunked-later": (GOOD, SHORT_CHUNKED),
    "long-body": (LONG, LONG),
    "long-body-later": (GOOD, LONG),
    "unsatisfiable": (GOOD, OUTSIDE),
    "unsatisfiable-first": (OUTSIDE, OUTSIDE),
    "empty-416": (OUTSIDE.replace(b"1000", b"0"),) * 2,
    "changes-size": (GOOD, part("Content-Range: bytes 100-199/1001", LENGTH)),
    "changes-etag": (GOOD, part(RANGE, tag(OTHER), LENGTH, body=OTHER[100:200])),
    "changes-bytes": (GOOD, part(RANGE, TAG, LENGTH, body=OTHER[100:200])),
    "missing": (bare("404 Not Found"),) * 2,
    "gone": (bare("410 Gone"),) * 2,
    "denied": (bare("403 Forbidden"),) * 2,
    "denied-later": (GOOD, bare("403 Forbidden")),
    "unauthorised": (bare("401 Unauthorized"),) * 2,
    "proxy-asks": (bare("407 Proxy Authentication Required"),) * 2,
    "teapot": (bare("418 I'm a Teapot"),) * 2,
    "fails": (bare("500 Internal Server Error"),) * 2,
    "redirect-to-ftp": (
        raw("302 Found", "Location: ftp://127.0.0.1:1/input.kvf", "Content-Length: 0"),
    )
    * 2,
    "flaky": (bare("503 Service Unavailable"), GOOD),
    "flaky-later": (GOOD, bare("503 Service Unavailable")),
    "flaky-reset": (GOOD, HALF),
    "stalls": (HALF, HALF),
    "stalls-later": (GOOD, HALF),
    "silent": (b"", b""),
}
"""The whole reply to the first and to the second request for bytes 100 to 199."""
APART = {
    "ignores-range-large", "endless-body", "endless-body-later", "redirects", "redirect-loop",
    "redirect-to-file",
}  # fmt: skip


@pytest.fixture(name="server")
def server_fixture() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def connect(resource: Resource) -> socket.socket:
    address = urlsplit(resource.url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port or 0), timeout=20)


def ask(url: str, *fields: str, method: str = "GET") -> bytes:
    address = urlsplit(url)
    target = address.path + (f"?{address.query}" if address.query else "")
    lines = (f"{method} {target} HTTP/1.1", "Host: x", *fields, "Connection: close", "", "")
    return "\r\n".join(lines).encode()


def received(connection: socket.socket) -> bytes:
    """All bytes until the end, or until a reset, which leaves a mark."""
    data = bytearray()
    try:
        while piece := connection.recv(2**20):
            data += piece
    except ConnectionResetError:
        data += b"<reset>"
    return bytes(data)


def fetch(resource: Resource, *fields: str, method: str = "GET", url: str = "") -> bytes:
    with connect(resource) as connection:
        connection.sendall(ask(url or resource.url, *fields, method=method))
        return received(connection)


def test_the_table_of_this_test_is_complete() -> None:
    assert set(WIRE) | APART == set(BEHAVIOURS)


@pytest.mark.parametrize("name", sorted(set(WIRE) - {"stalls", "stalls-later", "silent"}))
def test_bytes_on_the_wire(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviours, "PAUSE_S", 0.0)
    with server.serve(DATA, name) as resource:
        for number, expected in enumerate(WIRE[name]):
            ending = b"<reset>" if name == "flaky-reset" and number == 1 else b""
            assert fetch(resource, "Range: bytes=100-199") == expected + ending
        again = fetch(resource, "Range: bytes=100-199")
    assert again == (GOOD if name.startswith("flaky") else expected).replace(b'W/"1"', b'W/"2"')
    assert [line.ranges for line in resource.log] == [("bytes=100-199",)] * 3


@pytest.mark.parametrize("name", ["stalls", "stalls-later", "silent"])
def test_silence_lasts_until_the_call_has_ended(server: Server, name: str) -> None:
    with ExitStack() as stack:
        with server.serve(DATA, name) as resource:
            open_ones = []
            for expected in WIRE[name]:
                connection = stack.enter_context(connect(resource))
                connection.sendall(ask(resource.url, "Range: bytes=100-199"))
                found = connection.recv(65_536) if expected else b""
                while len(found) < len(expected):
                    found += connection.recv(65_536)
                assert found == expected
                open_ones.append(connection)
            while len(resource.log) < 2:  # the second may just be arriving
                time.sleep(0.001)
        assert [received(item) for item in open_ones] == [b"", b""]


def test_slow_replies_pause_between_pieces() -> None:
    reply = BEHAVIOURS["slow"].answer(Asked(DATA, "bytes=100-199"))
    parts = list(reply.body)
    assert (b"".join(parts), len(parts), reply.pause_s) == (PART, SLOW_PIECES, PAUSE_S)


@pytest.mark.parametrize("name", ["ignores-range-large", "endless-body", "endless-body-later"])
def test_large_bodies(server: Server, name: str) -> None:
    number = int(name.endswith("later"))
    with server.serve(DATA, name) as resource:
        for _ in range(number):
            assert fetch(resource, "Range: bytes=100-199") == GOOD
        data = fetch(resource, "Range: bytes=100-199")
    head, body = data.split(b"\r\n\r\n", 1)
    assert resource.log[number].written == LARGE_BYTES
    if name == "ignores-range-large":
        assert head + b"\r\n\r\n" == raw("200 OK", f"Content-Length: {LARGE_BYTES}", TYPE)
        assert len(body) == LARGE_BYTES
        assert body.startswith(DATA + bytes(1000))
    else:
        assert head + b"\r\n\r\n" == part(RANGE, TAG, CHUNKED, body=b"")
        assert body.startswith(chunk(PART, end=b"10000\r\n") + bytes(1000))
        assert body.endswith(bytes(1000) + b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("name", ["ignores-range-large", "endless-body"])
def test_a_body_that_nobody_reads_is_cut_when_the_call_has_ended(server: Server, name: str) -> None:
    with ExitStack() as stack:
        with server.serve(DATA, name) as resource:
            connection = stack.enter_context(connect(resource))
            connection.sendall(ask(resource.url, "Range: bytes=100-199"))
            assert connection.recv(100)
        assert 0 < resource.log[0].written < LARGE_BYTES // 4


def test_redirects(server: Server, tmp_path: Path) -> None:
    with server.serve(DATA, "redirects") as resource:
        url, hops = resource.url, []
        for _ in range(3):
            reply = fetch(resource, "Range: bytes=100-199", url=url).decode()
            hops.append((reply[9:12], reply.split("Location: ")[1].split("\r\n")[0]))
            url = hops[-1][1]
        path = urlsplit(resource.url).path
        assert hops == [
            ("302", f"{resource.url}?hop=1"),
            ("307", f"{path}?hop=2"),
            ("308", f"{resource.url}?hop=3"),
        ]
        assert fetch(resource, "Range: bytes=100-199", url=url) == GOOD
    assert [line.status for line in resource.log] == [302, 307, 308, 206]
    with server.serve(DATA, "redirect-loop") as resource:
        targets = [
            fetch(resource, url=url).decode().split("Location: ")[1].split("\r\n")[0]
            for url in (resource.url, f"{resource.url}?hop=1", f"{resource.url}?hop=0")
        ]
        assert targets == [f"{resource.url}?hop={hop}" for hop in (1, 0, 1)]
    with server.serve(DATA, "redirect-to-file", tmp_path / "x.kvf") as resource:
        expected = raw("302 Found", f"Location: file://{tmp_path}/x.kvf", "Content-Length: 0")
        assert fetch(resource) == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("Range: bytes=990-1999", END),
        ("Range: bytes=990-", END),
        ("Range: bytes=1000-1000", OUTSIDE),
        ("Range: bytes=1000-", OUTSIDE),
        ("Range: bytes=5-4", WHOLE),
        ("Range: bytes=-5", WHOLE),
        ("Range: bytes=1-2,5-6", WHOLE),
        ("Range: lines=1-2", WHOLE),
        ("X: y", WHOLE),
    ],
)  # fmt: skip
def test_ranges_of_a_plain_server(server: Server, field: str, expected: bytes) -> None:
    with server.serve(DATA, "plain") as resource:
        assert fetch(resource, field) == expected


def test_an_empty_object(server: Server) -> None:
    with server.serve(b"", "plain") as resource:
        assert fetch(resource, "Range: bytes=0-262143") == OUTSIDE.replace(b"1000", b"0")


@pytest.mark.parametrize(("name", "status"), [("plain", "206"), ("no-head", "403")])
def test_other_methods(server: Server, name: str, status: str) -> None:
    with server.serve(DATA, name) as resource:
        head = fetch(resource, "Range: bytes=100-199", method="HEAD").decode()
        assert head[9:12] == status
        assert head.endswith("\r\n\r\n")
        options = fetch(resource, "Range: bytes=100-199", method="OPTIONS")
        assert options[9:12] == status.encode()
    assert [line.method for line in resource.log] == ["HEAD", "OPTIONS"]
    assert resource.log[0].written == 0


def test_the_log(server: Server) -> None:
    with server.serve(DATA, "no-content-range-later") as resource:
        fetch(resource, "Range: bytes=0-9", "Range: bytes=20-29", "Accept-Encoding: gzip")
        fetch(resource, "Range: bytes=990-1005", "Accept-Encoding: a", "Accept-Encoding: b")
        fetch(resource)
        first, second, third = resource.log
    assert (first.method, first.ranges) == ("GET", ("bytes=0-9", "bytes=20-29"))
    assert (first.encodings, second.encodings, third.encodings) == (("gzip",), ("a", "b"), ())
    assert (second.status, second.first, second.last, second.written) == (206, 990, 999, 10)
    assert (third.ranges, third.status, third.written) == ((), 200, 1000)
    assert str(second) == "GET bytes=990-1005: 206 with bytes 990-999, 10 bytes of body sent"


def test_a_connection_serves_several_urls_and_each_has_its_own_log(server: Server) -> None:
    with server.serve(DATA, "plain") as one, server.serve(OTHER, "plain") as two:
        assert one.url != two.url
        with connect(one) as connection:
            for resource in (one, two, one):
                keep = ask(resource.url, "Range: bytes=0-0").replace(b"Connection: close\r\n", b"")
                connection.sendall(keep)
                data = b""
                while not data.endswith(resource.data[:1]) or b"\r\n\r\n" not in data:
                    data += connection.recv(1)
                assert data.split(b"\r\n\r\n")[1] == resource.data[:1]
    assert (len(one.log), len(two.log)) == (2, 1)
    assert fetch(one).startswith(b"HTTP/1.1 404 ")  # the URL was for one call
    assert len(one.log) == 2


def test_a_large_object_is_not_copied_for_each_piece() -> None:
    sizes = {len(item) for item in pieces(bytes(3 * 65_536 + 5))}
    assert sizes == {65_536, 5}


def test_the_readers_of_the_log_know_every_behaviour() -> None:
    text = (CONFORMANCE / "PROTOCOL.md").read_text(encoding="utf-8")
    assert [name for name in BEHAVIOURS if f"`{name}`" not in text] == []
