"""Replies that are odd on the wire: old servers, doubled and padded headers, broken HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tenacity import RetryCallState

import kvformat
from kvformat import KvformatError, StorageError
from kvformat.storage import Transport
from kvformat.storage.ranged import _Failures, back_off_s
from tests.faulty_server import Asked, Script, Wire, part, raw_server
from tests.remote import arrays, local, nothing_left, ordinary
from tests.requirements import covers

DATA = ordinary()
TOTAL = len(DATA)
PART = {"tokens": (300, 1_300), "layers": (0, 3)}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e-3)
    with nothing_left():
        yield


def said(asked: Asked) -> str:
    """The right Content-Range."""
    return f"bytes {asked.first}-{min(asked.last, TOTAL - 1)}/{TOTAL}"


def chunked(data: bytes, step: int = 70_000) -> bytes:
    chunks = [data[i : i + step] for i in range(0, len(data), step)]
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\nX: y\r\n\r\n"


def as_chunks(asked: Asked) -> bytes:
    head, _, body = part(DATA, asked, length=False).partition(b"\r\n\r\n")
    return head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body)


def early_hints(asked: Asked) -> Wire:
    return Wire(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + part(DATA, asked))


def too_long(asked: Asked) -> Wire:
    """Says so in Content-Length."""
    size = asked.last - asked.first + 1 + 8
    head = f"Content-Length: {size}"
    return Wire(part(DATA, asked, head, length=False) + bytes(8), "close")


def always(data: bytes, ending: str = "keep") -> Script:
    return lambda _: Wire(data, ending)


def redirection(*headers: bytes) -> Script:
    return always(b"\r\n".join([b"HTTP/1.1 302 F", *headers, b"Content-Length: 0", b"", b""]))


GOOD: dict[str, Script] = {
    "http 1.0": lambda a: Wire(part(DATA, a, version="HTTP/1.0"), "close"),
    "http 1.0 without length": lambda a: Wire(
        part(DATA, a, version="HTTP/1.0", length=False), "close"
    ),
    "until the end of the connection": lambda a: Wire(
        part(DATA, a, "Connection: close", length=False), "close"
    ),
    "chunks with extensions and trailers": lambda a: Wire(as_chunks(a)),
    "lower case": lambda a: Wire(part(DATA, a, f"content-range: {said(a)}")),
    "upper case": lambda a: Wire(part(DATA, a, f"CONTENT-RANGE: {said(a)}")),
    "spaces": lambda a: Wire(part(DATA, a, f"Content-Range:   {said(a)}  ")),
    "unit in capitals": lambda a: Wire(part(DATA, a, f"Content-Range: {said(a).title()}")),
    "empty coding": lambda a: Wire(part(DATA, a, "Content-Encoding: ")),
    "unknown headers": lambda a: Wire(part(DATA, a, "X-Cache: HIT", "Via: 1.1 proxy", "Age: 7")),
    "early hints": lambda a: Wire(
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + part(DATA, a)
    ),
}


@pytest.mark.parametrize("script", GOOD.values(), ids=GOOD)
@covers("REQ-4")
def test_odd_but_right(script: Script) -> None:
    with raw_server(script) as server:
        with kvformat.open(server.url()) as artifact:
            assert arrays(artifact.read(**PART)) == local(DATA, **PART)
        assert all("\r\nAccept-Encoding: identity\r\n" in asked.head for asked in server.asked)


def cut(asked: Asked, by: int, version: str = "HTTP/1.1") -> Wire:
    """Ends early; only Content-Range says so."""
    return Wire(part(DATA, asked, version=version, length=False)[:-by], "close")


BAD: dict[str, tuple[Script, str]] = {
    "twice": (
        lambda a: Wire(part(DATA, a, f"Content-Range: {said(a)}", f"content-range: {said(a)}")),
        "io.range",
    ),
    "twice, not the same": (
        lambda a: Wire(part(DATA, a, "Content-Range: bytes 0-9/10", f"Content-Range: {said(a)}")),
        "io.range",
    ),
    "a list": (
        lambda a: Wire(part(DATA, a, f"Content-Range: {said(a)}, {said(a)}")),
        "io.range",
    ),
    "two codings": (
        lambda a: Wire(part(DATA, a, "Content-Encoding: identity", "Content-Encoding: gzip")),
        "io.range",
    ),
    "several parts": (
        lambda a: Wire(
            part(DATA, a, "Content-Range: ", "Content-Type: multipart/byteranges; boundary=x")
        ),
        "io.range",
    ),
    "longer than its range": (too_long, "io.short"),
    "longer until the end of the connection": (
        lambda a: Wire(part(DATA, a, length=False) + b"\0", "close"),
        "io.short",
    ),
    "shorter until the end of the connection": (lambda a: cut(a, 1), "io.short"),
    "shorter, http 1.0": (lambda a: cut(a, 1000, "HTTP/1.0"), "io.short"),
    "nothing but a head": (lambda a: cut(a, a.last - a.first + 1), "io.short"),
    "half of a head": (lambda a: Wire(part(DATA, a)[:40], "close"), "io.read"),
    "nothing": (always(b"", "close"), "io.read"),
    "reset at once": (always(b"", "reset"), "io.read"),
    "no http": (always(b"220 ftp ready\r\n\r\n", "close"), "io.read"),
    "two lengths": (
        lambda a: Wire(part(DATA, a, "Content-Length: 5"), "close"),
        "io.read",
    ),
    "a negative length": (
        lambda a: Wire(part(DATA, a, "Content-Length: -5", length=False), "close"),
        "io.read",
    ),
    "a head without end": (
        always(b"HTTP/1.1 206 OK\r\nX: " + b"x" * 10**6, "close"),
        "io.read",
    ),
    "a total beyond the file": (
        lambda a: Wire(part(DATA, a, f"Content-Range: bytes {a.first}-{a.last}/{10**18}")),
        "file.size",
    ),
    "a total that no machine has": (
        lambda a: Wire(part(DATA, a, f"Content-Range: bytes {a.first}-{a.last}/{'9' * 4000}")),
        "io.range",
    ),
    "a total of nothing": (
        lambda a: Wire(part(DATA, a, f"Content-Range: bytes {a.first}-{a.last}/0")),
        "io.range",
    ),
    "a redirection to nowhere": (redirection(b"Location: "), "io.read"),
    "a redirection without a place": (redirection(), "io.read"),
    "a redirection to what is no url": (redirection(b"Location: http://[/?sig=x"), "io.read"),
}


@covers("REQ-6", "REQ-7", "REQ-9", "REQ-11")
@pytest.mark.parametrize(("script", "code"), BAD.values(), ids=BAD)
def test_odd_and_wrong(script: Script, code: str) -> None:
    with raw_server(script) as server:
        with pytest.raises(KvformatError) as caught:
            kvformat.open(server.url("a.kvf?sig=x"), transport=Transport(retries=1))
        assert caught.value.code == code
        assert len(server.asked) <= 11
        assert "sig=x" not in str(caught.value)


def test_an_empty_object_may_have_a_page_that_says_so() -> None:
    page = b"<html>416</html>"
    head = b"HTTP/1.1 416 No\r\nContent-Range: bytes */0\r\nContent-Length: %d\r\n\r\n" % len(page)
    with raw_server(lambda _: Wire(head + page)) as server:
        with pytest.raises(kvformat.InvalidError) as caught:
            kvformat.open(server.url())
        assert caught.value.code == "header.magic"


@covers("REQ-8", "REQ-11")
def test_a_redirection_that_changes_the_object() -> None:
    other = bytes(1000) + DATA

    def script(asked: Asked) -> Wire:
        if asked.path.startswith("/a.kvf"):
            place = "/new" if asked.number > 1 else "/old"
            head = f"HTTP/1.1 307 T\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"
            return Wire(head.encode())
        return Wire(part(DATA if asked.path == "/old" else other, asked))

    with raw_server(script) as server, kvformat.open(server.url()) as artifact:
        with pytest.raises(StorageError) as caught:
            artifact.read(tokens=(300, 1_300))
        assert caught.value.code == "io.changed"
        assert [asked.path for asked in server.asked] == ["/a.kvf", "/old", "/a.kvf", "/new"]


@covers("REQ-9")
def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(StorageError) as caught:
        kvformat.open(f"http://127.0.0.1:{port}/a.kvf", transport=Transport(retries=1))
    assert caught.value.code == "io.read"


@covers("REQ-10")
def test_a_connection_that_is_never_accepted() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(("127.0.0.1", port))  # the queue is full now
            limits = Transport(connect_timeout_s=0.05, stall_timeout_s=0.05, retries=0)
            with pytest.raises(StorageError) as caught:
                kvformat.open(f"http://127.0.0.1:{port}/a.kvf", transport=limits)
        assert caught.value.code == "io.timeout"


@covers("REQ-9")
def test_a_server_that_asks_for_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    wait = _Failures.wait

    def no_wait(self: _Failures, state: RetryCallState) -> float:
        waited.append(wait(self, state))
        return 0.0

    monkeypatch.setattr(_Failures, "wait", no_wait)

    def script(asked: Asked) -> Wire:
        if asked.number < 2:
            after = ["7", "999999"][asked.number]
            head = f"HTTP/1.1 503 B\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n"
            return Wire(head.encode())
        return Wire(part(DATA, asked))

    with raw_server(script) as server:
        kvformat.open(server.url()).close()
        assert len(server.asked) == 3
    assert waited == [7.0, 20.0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 10**6))
def test_waits_are_bounded_and_not_the_same_for_all(failures: int) -> None:
    waits = [back_off_s(failures) for _ in range(8)]
    assert all(0 < item <= 20 for item in waits)
    assert len(set(waits)) > 1


@pytest.mark.parametrize("rubbish", [b"rubbish\r\n\r\n", DATA[:500]])
def test_rubbish_behind_a_reply_is_never_told(rubbish: bytes) -> None:
    """Whether it is noticed depends on how it arrives; an error must not quote tensors."""
    with raw_server(lambda asked: Wire(part(DATA, asked) + rubbish, "close")) as server:
        for _ in range(5):
            try:
                with kvformat.open(server.url(), transport=Transport(retries=0)) as artifact:
                    assert arrays(artifact.read(**PART)) == local(DATA, **PART)
            except StorageError as error:
                assert error.code == "io.read"
                assert "b'" not in str(error)
                assert len(str(error)) < 200


@covers("REQ-7", "REQ-10")
def test_a_broken_chunk() -> None:
    """aiohttp closes the connection, and may forget to say so to who reads."""
    limits = Transport(stall_timeout_s=0.2, retries=0)
    with raw_server(
        lambda asked: Wire(b"zz".join(as_chunks(asked).rsplit(b";a=b", 1)), "close")
    ) as server:
        with pytest.raises(StorageError) as caught:
            kvformat.open(server.url(), transport=limits)
        assert caught.value.code in ("io.short", "io.timeout", "io.read")
