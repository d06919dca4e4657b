"""The real nginx in front of a directory, with its access log as values.

::

    def test_something(web_server: WebServer) -> None:
        (web_server.directory / "a.kvf").write_bytes(data)
        fetch(web_server.url("a.kvf"))
        assert web_server.requests()[0].range == "bytes=0-262143"

The module that uses the fixture imports it by name, and says so to ruff (``noqa: F401``, ``F811``);
or it uses the context manager ``nginx`` with directives of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
PROGRAM = shutil.which("nginx", path=PATH)
MARKER = "/.all-before-is-logged"
CONFIG = """
daemon off;
worker_processes 1;
{user}
pid {private}/pid;
events {{ worker_connections 2048; }}
http {{
  log_format values escape=json '{{"method":"$request_method","path":"$request_uri",'
    '"range":"$http_range","status":"$status","body_bytes":"$body_bytes_sent",'
    '"connection":"$connection","completion":"$request_completion"}}';
  access_log {private}/access values;
  client_body_temp_path {private}/body;
  proxy_temp_path {private}/proxy;
  fastcgi_temp_path {private}/fastcgi;
  uwsgi_temp_path {private}/uwsgi;
  scgi_temp_path {private}/scgi;
  default_type application/octet-stream;
  sendfile on;
  keepalive_requests 1000000;
  lingering_close off;
  server {{
    listen 127.0.0.1:{port};
    root "{directory}";
    {directives}
    location = {marker} {{ access_log off; return 204; }}
  }}
}}
"""


@dataclass(frozen=True)
class Request:
    """One line of the access log; ``range`` is the header's value, or empty."""

    method: str
    path: str
    range: str
    status: int
    body_bytes: int
    connection: int
    """A number that requests on the same connection share."""
    completed: bool
    """False if the client left before the last byte."""


@dataclass(frozen=True)
class WebServer:
    """A running nginx that serves the files in ``directory``."""

    directory: Path
    port: int
    log: Path
    host: str = "127.0.0.1"

    def url(self, path: str = "") -> str:
        """The URL of a file below ``directory``."""
        return f"http://{self.host}:{self.port}/{path.lstrip('/')}"

    def requests(self) -> list[Request]:
        """The access log: every request whose last byte the client has, in order of their ends.

        The one worker logs a request in the step that sends its last byte, so that what was
        finished before the marker is logged before the marker is answered. A request that a
        client gave up is logged when nginx notices.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", MARKER)
            if (status := connection.getresponse().status) != 204:
                raise RuntimeError(f"nginx answered the marker with {status}")
        return [_request(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def forget(self) -> None:
        """Empty the log; call it while no request is under way."""
        self.requests()
        os.truncate(self.log, 0)


def _request(line: str) -> Request:
    value = json.loads(line)
    return Request(
        value["method"],
        value["path"],
        value["range"],
        int(value["status"]),
        int(value["body_bytes"]),
        int(value["connection"]),
        value["completion"] == "OK",
    )


@contextlib.contextmanager
def nginx(directory: Path, directives: str = "") -> Iterator[WebServer]:
    """Run nginx on a port of its own; ``directives`` go into its ``server`` block.

    Skips the test if nginx is not installed. The listening socket is handed over open, so that the
    port cannot be taken by another, and requests that come early wait for nginx.
    """
    if PROGRAM is None:
        pytest.skip("nginx is not installed")
    with (
        tempfile.TemporaryDirectory() as private,
        socket.create_server(("127.0.0.1", 0), backlog=512) as listening,
    ):
        port = listening.getsockname()[1]
        config, errors = Path(private, "config"), Path(private, "errors")
        config.write_text(
            CONFIG.format(
                user="user root root;" if os.geteuid() == 0 else "",
                private=private,
                port=port,
                directory=directory,
                directives=directives,
                marker=MARKER,
            ),
            encoding="utf-8",
        )
        os.set_inheritable(listening.fileno(), True)
        process = subprocess.Popen(
            [PROGRAM, "-p", private, "-e", errors, "-c", config],
            env={"NGINX": f"{listening.fileno()};", "PATH": PATH},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        listening.close()
        try:
            server = WebServer(directory, port, Path(private, "access"))
            with contextlib.suppress(OSError, http.client.HTTPException):
                server.requests()
            if process.poll() is not None or not server.log.exists():
                raise RuntimeError(f"nginx did not start: {errors.read_text(encoding='utf-8')}")
            yield server
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def web_server(tmp_path: Path) -> Iterator[WebServer]:
    """nginx in front of an empty directory of the test's own."""
    directory = tmp_path / "www"
    directory.mkdir()
    with nginx(directory) as server:
        yield server
