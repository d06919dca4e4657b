"""``kvformat.server`` on the wire: ranges, conditions, names, files that change, many clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

import kvformat
from kvformat import server as server_module
from kvformat import shelf as shelf_module
from tests.serving import Serving, serving, sparse_artifact
from tests.test_http_rules import RANGES

BIG_BYTES = 64 * 2**20
MODEL = kvformat.Model("example/model", "r1")
IDENTITY = kvformat.Identity(MODEL, layers_total=4, cache_dtype="float16", kind="unbound")


def write(path: Path, seed: int = 0, tokens: int = 8) -> bytes:
    """A small artifact."""
    cache = np.random.default_rng(seed).standard_normal((2, 4, tokens, 2, 32)).astype(np.float16)
    kvformat.write(path, cache, identity=IDENTITY, tracks="zstd", overwrite=True)
    return path.read_bytes()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory that is served; its parent holds what must not be."""
    directory = tmp_path / "served"
    directory.mkdir()
    return directory


@pytest.fixture
def server(files: Path) -> Iterator[Serving]:
    with serving(files) as running:
        yield running


def etag_of(data: bytes) -> str:
    return f'"{data[72:104].hex()}-{len(data)}"'


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of one file of 1,000 bytes, the size that ``RANGES`` is about."""
    directory = tmp_path_factory.mktemp("ranges")
    sparse_artifact(directory / "a.kvf", 1000, bytes(range(256)) * 3)
    with serving(directory) as running:
        yield running


@pytest.mark.parametrize(
    ("value", "expected"),
    [item for item in RANGES if len(item[0]) < 5000],
    ids=[item[0] for item in RANGES if len(item[0]) < 5000],
)
def test_ranges_on_the_wire(thousand: Serving, value: str, expected: tuple[int, int] | str) -> None:
    data = (thousand.shelf.root / "a.kvf").read_bytes()
    status, headers, body = thousand.ask("/a.kvf", Range=value)
    assert headers["accept-ranges"] == "bytes"
    assert headers["etag"] == etag_of(data)
    assert int(headers["content-length"]) == len(body)
    if expected == "refused":
        assert (status, headers["content-range"]) == (416, "bytes */1000")
        assert headers["cache-control"] == "no-store"
    elif expected == "whole":
        assert (status, "content-range" in headers, body) == (200, False, data)
    else:
        first, stop = expected
        assert (status, body) == (206, data[first:stop])
        assert headers["content-range"] == f"bytes {first}-{stop - 1}/1000"
    assert thousand.ask("/a.kvf", "HEAD", Range=value)[0] == 200


def test_ranges_of_a_large_file_are_exact(files: Path, server: Serving) -> None:
    data = np.random.default_rng(1).bytes(9_500_000)
    sparse_artifact(files / "a.kvf", 10_000_000, data)
    whole = (files / "a.kvf").read_bytes()
    for first, last in (
        (0, 9_999_999),
        (0, 65_535),
        (0, 65_536),
        (1, 65_537),
        (7, 4_194_310),
        (12_345, 9_000_001),
        (4 * 2**20, 8 * 2**20 + 65_535),
        (9_999_999, 9_999_999),
    ):
        status, _, body = server.ask("/a.kvf", Range=f"bytes={first}-{last}")
        assert (status, body == whole[first : last + 1]) == (206, True), (first, last)
    assert server.ask("/a.kvf")[2] == whole
    assert [entry["complete"] for entry in server.log] == [True] * 9
    assert server.log[-1]["body_bytes"] == len(whole)


def test_an_artifact_and_its_headers(files: Path, server: Serving) -> None:
    data = write(files / "a.kvf")
    status, headers, body = server.ask("/a.kvf")
    date = headers.pop("date")
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", date)
    assert (status, body) == (200, data)
    assert headers == {
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
        "connection": "close",
        "content-length": str(len(data)),
        "content-type": "application/octet-stream",
        "etag": etag_of(data),
        "server": f"kvformat/{kvformat.__version__}",
        "x-content-type-options": "nosniff",
    }


@pytest.mark.parametrize("target", ["/a.kvf", "/none.kvf", "/index.json", "/", "/a.kvf?manifest=0"])
@pytest.mark.parametrize("condition", ["", "*"])
def test_head_equals_get(files: Path, server: Serving, target: str, condition: str) -> None:
    write(files / "a.kvf")
    extra = {"If_None_Match": condition} if condition else {}
    get, head = (server.ask(target, method, **extra) for method in ("GET", "HEAD"))
    for answer in (get, head):
        answer[1].pop("date")
    assert head == (*get[:2], b"")
    assert get[1]["x-content-type-options"] == "nosniff"


def test_conditional_requests(files: Path, server: Serving) -> None:
    data = write(files / "a.kvf")
    tag, other, part = etag_of(data), '"other"', "bytes=5-9"
    cases: list[tuple[dict[str, str], int, bytes]] = [
        ({"If_None_Match": tag}, 304, b""),
        ({"If_None_Match": f"W/{tag}", "Range": part}, 304, b""),
        ({"If_None_Match": other}, 200, data),
        ({"If_Match": tag, "Range": part}, 206, data[5:10]),
        ({"If_Match": other}, 412, b""),
        ({"If_Match": other, "Range": part}, 412, b""),
        ({"If_Match": f"W/{tag}"}, 412, b""),
        ({"If_Range": tag, "Range": part}, 206, data[5:10]),
        ({"If_Range": other, "Range": part}, 200, data),
        ({"If_Range": other, "Range": "bytes=9999999-"}, 200, data),
        ({"If_Range": "Sun, 29 Nov 2093 10:00:00 GMT", "Range": part}, 200, data),
        ({"If_Modified_Since": "Sun, 29 Nov 2093 10:00:00 GMT"}, 200, data),
        ({"If_Unmodified_Since": "Sun, 29 Nov 1993 10:00:00 GMT"}, 200, data),
    ]
    for sent, status, body in cases:
        found = server.ask("/a.kvf", **sent)
        assert (found[0], found[2]) == (status, body), sent
        assert found[1]["etag"] == tag
        assert ("content-length" in found[1]) == (status != 304)


def test_a_url_with_a_digest_is_that_artifact_for_ever(files: Path, server: Serving) -> None:
    data = write(files / "a.kvf")
    url = f"/a.kvf?manifest={data[72:104].hex()}"
    status, headers, body = server.ask(url)
    assert (status, body) == (200, data)
    assert headers["cache-control"] == "private, max-age=31536000, immutable"
    write(files / "a.kvf", seed=1)
    status, headers, _ = server.ask(url)
    assert (status, headers["cache-control"]) == (404, "no-store")
    assert server.ask("/a.kvf?manifest=")[0] == 200
    assert server.ask("/a.kvf?manifest=a&manifest=b")[0] == 404
    assert server.ask("/a.kvf?other=1")[1]["cache-control"] == "private, no-cache"


def outside(files: Path) -> bytes:
    """Fill the directory with what must not be served; one file beside it, one good one in it."""
    secret = write(files.parent / "secret.kvf", seed=3)
    for name in (".hidden.kvf", "a.kvf.tmp", ".0123456789abcdef.kvf.tmp", "a.txt", "a.KVF", ".kvf"):
        (files / name).write_bytes(secret)
    for name in (".dots", "sub", "folder.kvf"):
        (files / name).mkdir()
        (files / name / "b.kvf").write_bytes(secret)
    (files / "out.kvf").symlink_to(files.parent / "secret.kvf")
    (files / "up").symlink_to(files.parent)
    (files / "to-hidden.kvf").symlink_to(".hidden.kvf")
    (files / "to-txt.kvf").symlink_to("a.txt")
    (files / "to-dots.kvf").symlink_to(".dots/b.kvf")
    (files / "nowhere.kvf").symlink_to("none.kvf")
    (files / "loop.kvf").symlink_to("loop.kvf")
    (files / "link.kvf").symlink_to("sub/b.kvf")
    os.mkfifo(files / "pipe.kvf")
    return secret


FORBIDDEN = [
    "/../secret.kvf",
    "/sub/../../secret.kvf",
    "/sub/../sub/b.kvf",
    "/./sub/b.kvf",
    "/%2e%2e/secret.kvf",
    "/%2E%2E%2Fsecret.kvf",
    "/..%2fsecret.kvf",
    "/..%5csecret.kvf",
    "/%252e%252e/secret.kvf",
    "/%c0%ae%c0%ae/secret.kvf",
    "//secret.kvf",
    "//sub/b.kvf",
    "/sub//b.kvf",
    "/sub%2fb.kvf",
    "/sub/b.kvf/",
    "/sub/b.kvf/.",
    "/sub/b.kvf%00",
    "/%00/../secret.kvf",
    "/secret.kvf%00.kvf",
    "/sub/b.kvf%20",
    "/sub/b.kvf%0d%0aX:1",
    "{secret}",
    "/{secret}",
    "/%2f{secret}",
    "/.hidden.kvf",
    "/%2ehidden.kvf",
    "/.dots/b.kvf",
    "/.kvf",
    "/.0123456789abcdef.kvf.tmp",
    "/a.kvf.tmp",
    "/a.txt",
    "/a.KVF",
    "/folder.kvf",
    "/sub",
    "/sub/",
    "/out.kvf",
    "/up/secret.kvf",
    "/up/served/sub/b.kvf/../../../secret.kvf",
    "/to-hidden.kvf",
    "/to-txt.kvf",
    "/to-dots.kvf",
    "/nowhere.kvf",
    "/loop.kvf",
    "/pipe.kvf",
    "/" + "a" * 5000 + ".kvf",
    "/" + "a/" * 3000 + "b.kvf",
    "/index.json/",
    "/%69ndex.json",
    "/x.kvf#/sub/b.kvf",
    "*",
    "http://localhost/../secret.kvf",
]


SERVED = [
    "/sub/b.kvf",
    "/link.kvf",
    "/folder.kvf/b.kvf",
    "/sub/%62%2ekvf",
    "/sub/b.kvf?x",
    "/up/served/sub/b.kvf",  # a link that leads back inside
    "http://localhost/sub/b.kvf",
]


def test_nothing_else_is_served(files: Path, server: Serving) -> None:
    secret = outside(files)
    for target in (item.format(secret=files.parent / "secret.kvf") for item in FORBIDDEN):
        status, headers, body = server.ask(target)
        assert status in (400, 404), target
        assert secret[:8] not in body
        assert "etag" not in headers, target
    for target in (
        "/sub/b.kvf",
        "/link.kvf",
        "/folder.kvf/b.kvf",
        "/sub/%62%2ekvf",
        "/sub/b.kvf?x",
    ):
        assert server.ask(target)[::2] == (200, secret), target
    assert server.ask("/up/served/sub/b.kvf")[0] == 200  # a link that leads back inside
    rows = json.loads(server.ask("/index.json")[2])["artifacts"]
    assert [row["name"] for row in rows] == ["folder.kvf/b.kvf", "link.kvf", "sub/b.kvf"]


def test_a_directory_that_becomes_a_link_is_not_followed(
    files: Path, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap happens behind the check of the name, in front of the opening."""
    outside(files)
    for name, target in (("sub", files.parent), ("b.kvf", files.parent / "secret.kvf")):
        resolved = shelf_module.Shelf._resolved

        def swap(shelf: Any, parts: Any, name: str = name, target: Path = target) -> Any:
            found = resolved(shelf, parts)  # noqa: B023 - called within the same turn
            path = files / "sub" if name == "sub" else files / "sub" / name
            path.rename(files.parent / f"moved-{name}")
            path.symlink_to(target)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(shelf_module.Shelf, "_resolved", swap)
            assert server.ask("/sub/b.kvf")[0] == 404
        path = files / "sub" if name == "sub" else files / "sub" / name
        path.unlink()
        (files.parent / f"moved-{name}").rename(path)


def test_other_methods_and_malformed_requests(files: Path, server: Serving) -> None:
    data = write(files / "a.kvf")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND"):
        status, headers, _ = server.ask("/a.kvf", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD"), method
    for raw in (b"\0\0\0\r\n\r\n", b"GET\r\n\r\n", b"GET /a.kvf HTTP/9.9\r\n\r\n", b"\x16\x03\x01"):
        with socket.create_connection((server.host, server.port), timeout=30) as client:
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer[:12] in (b"", b"HTTP/1.0 400", b"HTTP/1.1 400"), raw
        assert b"Traceback" not in answer
    assert server.ask("/a.kvf", X="x" * 20_000)[0] == 400
    assert server.ask("/a.kvf")[2] == data


def test_two_lines_of_one_header(files: Path, server: Serving) -> None:
    data = write(files / "a.kvf")
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("GET", "/a.kvf")
        connection.putheader("If-None-Match", '"x"')
        connection.putheader("If-None-Match", etag_of(data))
        connection.endheaders()
        assert connection.getresponse().status == 304


def start_reading(server: Serving, target: str) -> tuple[socket.socket, http.client.HTTPResponse]:
    """A client whose buffers are small, so that the server waits in the middle of the body."""
    client = socket.socket()
    client.settimeout(30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((server.host, server.port))
    client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    response = http.client.HTTPResponse(client)
    response.begin()
    return client, response


def test_a_replaced_file_is_served_to_its_end(files: Path, server: Serving) -> None:
    old_tag = sparse_artifact(files / "a.kvf", BIG_BYTES, b"old" * 1000)
    old = (files / "a.kvf").read_bytes()
    new_tag = sparse_artifact(files / "new", BIG_BYTES, b"new" * 1000)
    client, response = start_reading(server, "/a.kvf")
    with client, response:
        begun = response.read(100)
        (files / "new").replace(files / "a.kvf")
        assert response.getheader("ETag") == old_tag
        assert begun + response.read() == old
    status, headers, body = server.ask("/a.kvf", Range="bytes=128-130", If_Range=old_tag)
    assert (status, headers["etag"], body[128:131]) == (200, new_tag, b"new")
    assert server.ask("/a.kvf", Range="bytes=128-130", If_Match=old_tag)[0] == 412


@pytest.mark.parametrize("change", ["write", "cut", "grow"])
def test_a_file_that_is_written_to_is_not_served_to_its_end(
    files: Path, server: Serving, change: str
) -> None:
    sparse_artifact(files / "a.kvf", BIG_BYTES)
    os.utime(files / "a.kvf", ns=(10**18, 10**18))
    client, response = start_reading(server, "/a.kvf")
    with client, response:
        response.read(100)
        with (files / "a.kvf").open("r+b") as file:
            if change == "write":
                file.seek(BIG_BYTES - 10)
                file.write(b"x")
            else:
                file.truncate(BIG_BYTES // 2 if change == "cut" else BIG_BYTES + 1)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            response.read()
    assert server.ask("/a.kvf")[0] == (200 if change == "write" else 404)
    (entry, _) = server.log
    assert (entry["status"], entry["complete"], entry["body_bytes"] < BIG_BYTES) == (
        200,
        False,
        True,
    )


def test_slow_clients_block_nobody(files: Path, server: Serving) -> None:
    sparse_artifact(files / "big.kvf", BIG_BYTES)
    data = write(files / "a.kvf")
    with contextlib.ExitStack() as held:
        for _ in range(40):
            client, response = start_reading(server, "/big.kvf")
            held.enter_context(client)
            held.enter_context(response)
        for _ in range(20):
            assert server.ask("/a.kvf")[2] == data
        assert not [entry for entry in server.log if entry["path"] == "/big.kvf"]


def test_a_client_that_takes_nothing_is_cut_off(
    files: Path, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse_artifact(files / "a.kvf", BIG_BYTES)
    monkeypatch.setattr(server_module, "PIECE_S", 0.05)
    client, response = start_reading(server, "/a.kvf")
    with client, response:
        deadline = time.monotonic() + 60
        while not server.log:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            response.read()
    assert (server.log[0]["status"], server.log[0]["complete"]) == (200, False)


def test_every_file_is_closed(files: Path, server: Serving) -> None:
    write(files / "a.kvf")
    part = {"Range": "bytes=0-9"}
    for method, headers in (("GET", {}), ("HEAD", {}), ("GET", part), ("GET", {"If_Match": '"x"'})):
        server.ask("/a.kvf", method, **headers)
        server.ask("/a.kvf?manifest=0", method, **headers)
    opened = set()
    for item in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.add(item.readlink())
    assert files / "a.kvf" not in opened


def test_two_hundred_at_once(files: Path, server: Serving) -> None:
    sparse_artifact(files / "a.kvf", 2_000_000, np.random.default_rng(2).bytes(1_900_000))
    data = (files / "a.kvf").read_bytes()

    async def fetch(session: aiohttp.ClientSession, first: int) -> bool:
        span = {"Range": f"bytes={first}-{first + 299_999}"}
        async with session.get(server.url("a.kvf"), headers=span) as response:
            body = await response.read()
            return response.status == 206 and body == data[first : first + 300_000]

    async def main() -> list[bool]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(*(fetch(session, 7919 * item) for item in range(200)))

    assert asyncio.run(main()) == [True] * 200


def test_a_connection_is_kept(files: Path, server: Serving) -> None:
    data = write(files / "a.kvf")
    with contextlib.closing(server.connect()) as connection:
        connection.connect()
        used = connection.sock
        for target, status in (("/a.kvf", 200), ("/none.kvf", 404), ("/", 200), ("/a.kvf", 200)):
            connection.request("GET", target)
            response = connection.getresponse()
            body = response.read()
            assert (response.status, connection.sock is used) == (status, True)
        assert body == data


def test_a_token_is_needed(files: Path) -> None:
    data = write(files / "a.kvf")
    with serving(files, token=b"0123456789abcdef") as server:
        for value in ("", "Bearer", "Bearer x", "Basic 0123456789abcdef", "Bearer \udcff\udcfe"):
            for target in ("/a.kvf", "/", "/index.json", "/none.kvf"):
                status, headers, body = server.ask(target, Authorization=value)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
                assert body == b"401: a bearer token is needed\n"
        for value in ("Bearer 0123456789abcdef", "bearer  0123456789abcdef"):
            assert server.ask("/a.kvf", Authorization=value)[::2] == (200, data)


def test_a_strange_host_is_refused_on_loopback(files: Path, server: Serving) -> None:
    write(files / "a.kvf")
    for target in ("/a.kvf", "/index.json", "/"):
        status, headers, _ = server.ask(target, Host="evil.example")
        assert (status, "etag" in headers) == (421, False)
    assert server.ask("/a.kvf", Host="localhost")[0] == 200


def test_the_log_has_a_line_for_each_request(files: Path, server: Serving) -> None:
    write(files / "a.kvf")
    server.ask("/a.kvf?x=%0a", Range="bytes=0-9")
    server.ask("/none.kvf", "HEAD")
    first, second = server.log
    assert first.pop("seconds") >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first.pop("time"))
    assert first == {
        "client": "127.0.0.1",
        "method": "GET",
        "path": "/a.kvf?x=%0a",
        "range": "bytes=0-9",
        "status": 206,
        "body_bytes": 10,
        "complete": True,
    }
    assert (second["method"], second["status"], second["body_bytes"]) == ("HEAD", 404, 0)
