"""``kvformat serve`` as a real process: its URL, its warnings, its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvformat
from tests.requirements import covers
from tests.serving import sparse_artifact
from tests.test_cli_common import is_one_error, refused
from tests.test_server import write

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")
PROGRAM = (sys.executable, "-m", "kvformat", "serve")


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, running, and the URL that it printed."""
    with subprocess.Popen(
        [*PROGRAM, *(str(item) for item in arguments), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        try:
            yield running, running.stdout.readline().strip()
        finally:
            if running.poll() is None:
                running.kill()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "served"
    directory.mkdir()
    return directory


@covers("ERR-1", "ERR-2")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_serves_until_a_signal(files: Path, number: int, code: int) -> None:
    data = write(files / "a.kvf")
    with process(files) as (running, url):
        with urllib.request.urlopen(f"{url}a.kvf") as response:
            assert response.read() == data
        running.send_signal(number)
        output, errors = running.communicate(timeout=60)
    assert (running.returncode, output) == (code, "")
    first, *rest = errors.splitlines()
    assert first == f"kvformat: serving {files} read-only; Ctrl-C ends it"
    assert rest == (["kvformat: interrupted; nothing is left behind"] if code else [])


def begin_transfer(url: str) -> tuple[socket.socket, http.client.HTTPResponse]:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    client = socket.socket()
    client.settimeout(60)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall(b"GET /a.kvf HTTP/1.1\r\nHost: localhost\r\n\r\n")
    response = http.client.HTTPResponse(client)
    response.begin()
    return client, response


def test_a_transfer_under_way_ends_well(files: Path) -> None:
    sparse_artifact(files / "a.kvf", 32 * 2**20)
    with process(files) as (running, url):
        client, response = begin_transfer(url)
        with client, response:
            running.send_signal(signal.SIGTERM)
            assert len(response.read()) == 32 * 2**20
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors.count("\n")) == (0, 1)


def test_a_second_signal_does_not_wait(files: Path) -> None:
    sparse_artifact(files / "a.kvf", 32 * 2**20)
    with process(files) as (running, url):
        client, response = begin_transfer(url)
        with client, response:
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(ConnectionError):
                while True:  # until it accepts no more: the first signal has come
                    socket.create_connection(client.getpeername(), timeout=60).close()
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
            with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
                response.read()
    assert (running.returncode, "Traceback" in errors) == (130, False)


def test_a_line_for_each_request_and_for_each_file_that_is_no_artifact(files: Path) -> None:
    write(files / "a.kvf")
    (files / "bad.kvf").write_bytes(b"x")
    with process(files, "--log") as (running, url):
        for name in ("a.kvf?x=%1b", "bad.kvf"):
            try:
                with urllib.request.urlopen(url + name) as found:
                    found.read()
            except urllib.error.HTTPError as refusal:
                refusal.close()
        running.terminate()
        _, errors = running.communicate(timeout=60)
    _, first, told, second = errors.splitlines()
    assert [json.loads(line)["status"] for line in (first, second)] == [200, 404]
    assert json.loads(first)["path"] == "/a.kvf?x=%1b"
    assert told.startswith("kvformat: warning: bad.kvf is not served: [header.magic]")


def test_a_token_from_a_file(files: Path, tmp_path: Path) -> None:
    write(files / "a.kvf")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    with process(files, "--token-file", tmp_path / "token") as (_, url):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}a.kvf")
        headers = {"Authorization": "Bearer 0123456789abcdef"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}a.kvf", headers=headers)
        ) as found:
            assert found.status == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "no authentication, and a KV cache gives away its prompt"),
        (("--host", ""), "no authentication"),
        (("--host", "0.0.0.0", "--token-file"), "the token and all bytes travel unencrypted"),
        (("--host", "127.0.0.2"), None),
    ],
)
def test_a_warning_where_other_machines_reach_it(
    files: Path, tmp_path: Path, options: tuple[str, ...], words: str | None
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    extra = [tmp_path / "token"] if options[-1] == "--token-file" else []
    with process(files, *options, *extra) as (running, url):
        assert url.startswith("http://")
        running.terminate()
        _, errors = running.communicate(timeout=60)
    warnings = [line for line in errors.splitlines() if line.startswith("kvformat: warning: ")]
    assert len(warnings) == (words is not None)
    assert all(words and words in line for line in warnings)


@covers("ERR-1", "ERR-3")
def test_refusals(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, short = files / "a.kvf", tmp_path / "token"
    write(artifact)
    short.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = refused(64, "usage.argument", "serve", files, "--port", port)
    assert "port 0" not in result.stderr
    assert f"127.0.0.1, port {port}" in result.stderr
    assert "try: choose another --port" in result.stderr
    cases: list[tuple[int, str, str, tuple[object, ...]]] = [
        (74, "io.not-found", "there is no such directory", (tmp_path / "none",)),
        (64, "usage.argument", "this is not a directory", (artifact,)),
        (64, "usage.argument", "not a path", ("",)),
        (64, "usage.argument", "cannot listen there", (files, "--host", "203.0.113.1")),
        (64, "usage.argument", "cannot listen there", (files, "--host", "a" * 300)),
        (64, "usage.argument", "holds no token", (files, "--token-file", short)),
        (74, "io.not-found", "no such file", (files, "--token-file", tmp_path / "none")),
        (64, "usage.argument", "--port", (files, "--port", 65536)),
    ]
    for exit_code, code, words, arguments in cases:
        assert words in refused(exit_code, code, "serve", *arguments).stderr
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "kvformat.server", raising=False)
    result = refused(64, "usage.argument", "serve", files)
    assert "try: pip install 'kvformat[http]'" in result.stderr


def test_a_closed_output_is_told_before_anything_is_served(files: Path) -> None:
    found = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, files, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (found.returncode, is_one_error(found.stderr)) == (74, True)


def test_what_is_served_can_be_opened(files: Path) -> None:
    write(files / "a.kvf")
    with kvformat.open(files / "a.kvf") as artifact:
        expected = artifact.read().kv
    with process(files) as (_, url):
        with urllib.request.urlopen(f"{url}index.json") as response:
            (row,) = json.loads(response.read())["artifacts"]
        with kvformat.open(url + row["url"]) as artifact:
            assert artifact.manifest_digest == row["manifest_digest"]
            assert artifact.read().kv.tobytes() == expected.tobytes()
