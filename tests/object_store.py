"""An S3 server for tests: moto's, in a thread of this process. It is a mock, not a real store.

moto answers as S3 does but looks and writes without a lock: of two conditional writes at once both
may succeed. ``ObjectStore`` therefore lets only one conditional request in at a time, as a real
store does. It also records what is asked, and lets a test answer, delay or fail single requests.

Tests import the fixture ``object_store`` (one server per worker) and take a bucket of their own::

    from tests.object_store import object_store_fixture  # noqa: F401

    def test_it(object_store):
        bucket = object_store.new_bucket()
        kvformat.write(f"s3://{bucket}/a.kvf", ..., storage_options=object_store.storage_options)

A real endpoint is used by the tests that ask ``real_endpoint()`` for one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import fsspec
import pytest
from moto.server import ThreadedMotoServer

KEY, SECRET = "test-key", "test-secret"


@dataclass(frozen=True)
class Call:
    """One request that reached the server. ``operation`` is its S3 name where tests need one."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def operation(self) -> str:
        """``PutObject``, ``UploadPart``, ... or the HTTP method for what concerns no object."""
        if "/" not in self.path.strip("/"):
            return self.method
        multipart = "uploadId" in self.query
        names = {
            ("POST", "uploads" in self.query, False): "CreateMultipartUpload",
            ("PUT", False, True): "UploadPart",
            ("POST", False, True): "CompleteMultipartUpload",
            ("DELETE", False, True): "AbortMultipartUpload",
            ("PUT", False, False): "PutObject",
            ("HEAD", False, False): "HeadObject",
            ("GET", False, False): "GetObject",
        }
        return names.get((self.method, "uploads" in self.query, multipart), self.method)

    @property
    def part(self) -> int:
        """The part number, 0 without one."""
        return int(self.query.get("partNumber", 0))


@dataclass(frozen=True)
class Reply:
    """An answer in place of the server's. With ``done`` the server does as asked all the same."""

    status: int
    code: str = ""
    message: str = "injected by a test"
    headers: Mapping[str, str] = field(default_factory=dict)
    done: bool = False

    def body(self) -> bytes:
        """The XML document that S3 sends with an error."""
        text = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
        return text.encode() if self.code else b""


Rule = Callable[[Call], Reply | None]


class ObjectStore:
    """A running server: ``endpoint``, ``storage_options`` for fsspec, buckets, rules and a log."""

    def __init__(self, server: ThreadedMotoServer) -> None:
        host, port = server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.storage_options: dict[str, Any] = {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
        }
        self._rules: list[Rule] = []
        self._logs: list[list[Call]] = []
        self._conditional = threading.Lock()
        self._names = (f"bucket-{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count())
        assert server._server is not None
        self._app = server._server.app
        server._server.app = self._serve

    def file_system(self) -> Any:
        """An s3fs file system of this server, with no listing cache."""
        return fsspec.filesystem("s3", use_listings_cache=False, **self.storage_options)

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = next(self._names)
        self.file_system().mkdir(name)
        return name

    def unfinished_uploads(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that are neither completed nor aborted."""
        return [item["Key"] for item in self.file_system().list_multipart_uploads(bucket)]

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Call]]:
        """The requests that arrive in the block, in the order in which they arrive."""
        log: list[Call] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs = [item for item in self._logs if item is not log]

    @contextlib.contextmanager
    def rule(self, rule: Rule) -> Iterator[None]:
        """Ask ``rule`` about each request in the block: a reply, or None to let it through.

        It runs in the thread of the request and may wait there.
        """
        self._rules.append(rule)
        try:
            yield
        finally:
            self._rules.remove(rule)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        call = _call(environ)
        for log in self._logs:
            log.append(call)
        for rule in list(self._rules):
            reply = rule(call)
            if reply is None:
                continue
            if reply.done:
                list(self._app(environ, lambda *_: None))
            return _answer(reply, environ, start_response)
        if "if-none-match" not in call.headers:
            return self._app(environ, start_response)
        with self._conditional:
            return list(self._app(environ, start_response))


def _call(environ: Mapping[str, Any]) -> Call:
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    headers = {
        name[5:].replace("_", "-").lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    return Call(
        environ["REQUEST_METHOD"],
        environ["PATH_INFO"],
        {name: values[0] for name, values in query.items()},
        headers,
    )


def _answer(reply: Reply, environ: Mapping[str, Any], start_response: Any) -> Iterable[bytes]:
    # The request is read first, or the client sees a broken connection instead of the answer.
    if not reply.done:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else reply.body()
    headers = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
    start_response(f"{reply.status} Injected", [*{**headers, **reply.headers}.items()])
    return [body]


@contextlib.contextmanager
def serve_objects() -> Iterator[ObjectStore]:
    """A server of its own on a free port, for as long as the block runs."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield ObjectStore(server)
    finally:
        server.stop()


@pytest.fixture(scope="session", name="object_store")
def object_store_fixture() -> Iterator[ObjectStore]:
    """One server per worker."""
    with serve_objects() as store:
        yield store


def real_endpoint() -> tuple[str, dict[str, Any]]:
    """The URL prefix ``KVFORMAT_S3_URL`` and options from ``AWS_*``; skips without the variable.

    ``AWS_ENDPOINT_URL`` and the credentials are read by botocore itself.
    """
    prefix = os.environ.get("KVFORMAT_S3_URL", "").rstrip("/")
    if not prefix.startswith("s3://"):
        pytest.skip("no real S3 endpoint is named: set KVFORMAT_S3_URL=s3://bucket/prefix, AWS_...")
    return prefix, {}
