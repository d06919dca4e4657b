"""Reading through other fsspec backends: memory, caches in front of HTTP, and one that errs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

import kvformat
from kvformat import StorageError
from kvformat.storage import Transport
from tests.remote import arrays, assemble, eventually, local, nothing_left, ordinary
from tests.requirements import covers
from tests.web_server import WebServer, web_server  # noqa: F401 - the fixture is used by name


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def test_a_file_in_memory_of_fsspec() -> None:
    data = ordinary()
    MemoryFileSystem().pipe_file("/remote/a.kvf", data)
    with kvformat.open("memory://remote/a.kvf") as artifact:
        assert artifact.source.remote
        assert arrays(artifact.read()) == local(data)
        assert assemble(artifact, data, order="layer-major") == local(data)
    assert kvformat.verify("memory://remote/a.kvf", in_child=False).tokens == 1_500
    MemoryFileSystem().rm("/remote/a.kvf")
    with pytest.raises(StorageError) as caught:
        kvformat.open("memory://remote/a.kvf")
    assert caught.value.code == "io.not-found"


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_caches_in_front_of_http(
    web_server: WebServer,  # noqa: F811
    tmp_path: Path,
    cache: str,
) -> None:
    data = ordinary()
    (web_server.directory / "a.kvf").write_bytes(data)
    url = f"{cache}::{web_server.url('a.kvf')}"
    options = {cache: {"cache_storage": str(tmp_path / "cache")}}
    asked = 0
    for _ in range(2):
        with kvformat.open(url, storage_options=options) as artifact:
            assert artifact.name == url
            assert arrays(artifact.read(tokens=(3, 700))) == local(data, tokens=(3, 700))
        asked, before = len(web_server.requests()), asked
    if cache == "simplecache":
        assert asked == before  # the second time it is here


class OddFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """One file that is ``ordinary()``, and ``mode`` says what becomes of it from ``start`` on."""

    protocol = "oddly"
    cachable = False

    def __init__(self, behaviour: str = "plain", start: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.mode, self.start, self.count = behaviour, start, 0

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> Any:
        data = ordinary()[start:end]
        self.count += 1
        return self.changed(path, data) if self.count > self.start else data

    def changed(self, path: str, data: bytes) -> Any:
        if self.mode == "short":
            return data[:-1]
        if self.mode == "long":
            return data + b"\0"
        if self.mode == "whole":
            return ordinary()
        if self.mode == "wrong":
            return bytes(byte ^ 1 for byte in data)
        if self.mode == "empty":
            return b""
        if self.mode == "text":
            return "text"
        if self.mode == "nothing":
            return None
        if self.mode == "view":
            return memoryview(bytearray(data))
        if self.mode == "flaky" and self.count % 2 == 0:
            raise ConnectionResetError("went away")
        errors = {
            "denied": PermissionError("no"),
            "missing": FileNotFoundError(path),
            "broken": RuntimeError("see http://user:secret@host/a?sig=secret for more"),
            "timeout": TimeoutError("slow"),
        }
        if self.mode in errors:
            raise errors[self.mode]
        return data


@pytest.fixture
def oddly() -> Callable[..., Any]:
    """Opens ``ordinary()`` on a backend with a mode."""
    fsspec.register_implementation("oddly", OddFileSystem, clobber=True)

    def opened(mode: str, start: int = 1, **transport: Any) -> Any:
        transport.setdefault("retries", 0)
        options = {"behaviour": mode, "start": start}
        return kvformat.open(
            "oddly:///a.kvf", storage_options=options, transport=Transport(**transport)
        )

    return opened


ODD = [
    ("short", "io.short", "file.size"),
    ("long", "io.short", "io.short"),
    ("whole", "io.short", "io.short"),
    ("wrong", "segment.digest", "header.magic"),
    ("empty", "io.short", "header.magic"),
    ("text", "io.read", "io.read"),
    ("nothing", "io.read", "io.read"),
    ("denied", "io.denied", "io.denied"),
    ("missing", "io.not-found", "io.not-found"),
    ("broken", "io.read", "io.read"),
    ("timeout", "io.timeout", "io.timeout"),
]


@covers("REQ-4", "PAR-2")
@pytest.mark.parametrize(("mode", "later", "first"), ODD, ids=[row[0] for row in ODD])
def test_a_backend_that_misbehaves_is_found_out(
    oddly: Callable[..., Any], mode: str, later: str, first: str
) -> None:
    with pytest.raises(kvformat.KvformatError) as caught:
        oddly(mode, 0)
    assert caught.value.code == first
    with oddly(mode) as artifact:
        for call in (
            lambda: artifact.read(tokens=(600, 700)),
            lambda: list(artifact.stream(tokens=(600, 700))),
        ):
            with pytest.raises(kvformat.KvformatError) as caught:
                call()
            assert caught.value.code == later
            assert "secret" not in str(caught.value)
            assert caught.value.validity is not None
            assert caught.value.validity.valid_end == 600


@pytest.mark.parametrize("mode", ["plain", "view"])
def test_a_backend_that_behaves(oddly: Callable[..., Any], mode: str) -> None:
    with oddly(mode) as artifact:
        assert arrays(artifact.read()) == local(ordinary())


def test_a_flaky_backend_is_asked_again(
    oddly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e-4)
    with oddly("flaky", retries=1) as artifact:
        restored = artifact.read(track="exact/stored")
    assert arrays(restored) == local(ordinary(), track="exact/stored")
    assert restored.report is not None
    assert restored.report.traffic.retries > 0


def test_no_wait_between_tries_outlasts_the_read(
    oddly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing would hang for hours here if it waited for the next try."""
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e4)
    monkeypatch.setattr("kvformat.storage.ranged.LONGEST_WAIT_S", 1e4)
    with oddly("timeout", retries=3) as artifact:
        stream = artifact.stream(tokens=(600, 700))
        assert eventually(lambda: artifact.source.meter.traffic().retries > 0)
        stream.close()
