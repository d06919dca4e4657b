"""Reading over HTTP, S3 and other storages: what is asked for, and that the bits are the same."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

import kvformat
from kvformat import StorageError, UsageError
from kvformat.cli.program import cli
from kvformat.extents import plan_extents
from kvformat.fetching import Wish
from kvformat.reading import ORDERS, Request, choose_cells
from kvformat.storage import Piece, Transport
from tests.builder import Builder
from tests.object_store import ObjectStore, object_store_fixture  # noqa: F401 - used by name
from tests.remote import (
    PREFETCH_BYTES,
    arrays,
    assemble,
    eventually,
    far,
    hybrid,
    local,
    long_manifest,
    many,
    nothing_left,
    ordinary,
)
from tests.requirements import covers
from tests.strategies import raw
from tests.web_server import WebServer, web_server  # noqa: F401 - the fixture is used by name

FRONT = f"bytes=0-{PREFETCH_BYTES - 1}"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def put(server: WebServer, data: bytes, name: str = "a.kvf") -> str:
    (server.directory / name).write_bytes(data)
    return server.url(name)


def spans(server: WebServer) -> list[tuple[int, int]]:
    """First byte and length of every request, each checked for its form."""
    result = []
    for request in server.requests():
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range)
        assert match is not None
        assert (request.method, request.status) == ("GET", 206)
        result.append((int(match[1]), int(match[2]) - int(match[1]) + 1))
    return result


def wanted(artifact: kvformat.Artifact, **options: Any) -> list[Piece]:
    """The whole segments that a read touches and the prefix lacks, in the order of the read."""
    track = artifact.track(options.pop("track", None))
    _, _, cells = choose_cells(artifact, Request(**options))
    table = artifact.segment_table(track)
    start = artifact.front.data_start
    wishes = [Wish(track, table[int(cell)]) for cell in cells]
    pieces = [Piece(start + item.record.offset, item.record.stored_bytes) for item in wishes]
    return [piece for piece in pieces if piece.stop > len(artifact.front.prefix)]


# What is asked for.


@covers("REQ-1", "REQ-2", "REQ-5", "REQ-12")
def test_opening_an_ordinary_file_is_one_get(web_server: WebServer) -> None:  # noqa: F811
    with kvformat.open(put(web_server, ordinary())):
        pass
    (request,) = web_server.requests()
    assert (request.method, request.range, request.status) == ("GET", FRONT, 206)
    assert request.body_bytes == PREFETCH_BYTES


@covers("REQ-1", "REQ-12")
def test_opening_a_long_front_is_two_gets(web_server: WebServer) -> None:  # noqa: F811
    data = long_manifest()
    with kvformat.open(put(web_server, data)) as artifact:
        front = artifact.front.data_start
        artifact.read()
    assert spans(web_server)[:2] == [(0, PREFETCH_BYTES), (PREFETCH_BYTES, front - PREFETCH_BYTES)]
    assert len(spans(web_server)) == 3


@covers("REQ-1")
@pytest.mark.parametrize("make", [far, many])
def test_a_table_behind_the_prefix_is_one_more(
    web_server: WebServer,  # noqa: F811
    make: Callable[[], bytes],
) -> None:
    with kvformat.open(put(web_server, make())) as artifact:
        assert len(artifact.front.prefix) == PREFETCH_BYTES
        assert len(spans(web_server)) == 1
        artifact.segment_table(artifact.track("exact"))
        place = artifact.front.spans["exact/stored"]
        begin = max(place.offset, PREFETCH_BYTES)
        assert spans(web_server)[1:] == [(begin, place.stop - begin)]


BUDGETS = [
    ("all", {}),
    ("all of a quantised track", {"track": "near-lossless"}),
    ("some blocks", {"tokens": (256, 900), "track": "near-lossless"}),
    ("one block", {"tokens": (1_000, 1_001)}),
    ("inside of blocks", {"tokens": (700, 1_100), "track": "exact/stored"}),
]


@covers("REQ-12")
@pytest.mark.parametrize("options", [row[1] for row in BUDGETS], ids=[row[0] for row in BUDGETS])
def test_tokens_of_a_token_major_track_are_one_get(
    web_server: WebServer,  # noqa: F811
    options: dict[str, Any],
) -> None:
    data = ordinary()
    with kvformat.open(put(web_server, data)) as artifact:
        pieces = wanted(artifact, **options)
        restored = artifact.read(**options)
        report = restored.report
    assert arrays(restored) == local(data, **options)
    front, *rest = spans(web_server)
    assert front == (0, PREFETCH_BYTES)
    needed = sum(piece.size_bytes for piece in pieces)
    if pieces:
        assert [start for start, _ in rest] == [pieces[0].offset]
    assert sum(size for _, size in rest) <= 1.05 * needed
    assert report is not None
    assert report.traffic.requests == len(rest)
    assert report.traffic.received_bytes == sum(size for _, size in rest)


@covers("REQ-12")
def test_sets_and_tables_behind_the_prefix_are_one_get_each(
    web_server: WebServer,  # noqa: F811
) -> None:
    data = far()
    options: dict[str, Any] = {"tokens": (100, 140), "track": "near-lossless"}
    with kvformat.open(put(web_server, data)) as artifact:
        restored = artifact.read(**options)
        pieces = wanted(artifact, **options)
        table = artifact.set_table("near-lossless")
        first, last = table[0], table[len(table) - 1]
        sets = (
            artifact.front.data_start + first.offset,
            last.offset + last.size_bytes - first.offset,
        )
    assert arrays(restored) == local(data, **options)
    requests = spans(web_server)
    assert len(requests) <= 5  # front, one or two tables, sets, segments
    assert sets in requests
    place = (pieces[0].offset, pieces[-1].stop - pieces[0].offset)
    assert place in requests
    assert place[1] <= 1.05 * sum(piece.size_bytes for piece in pieces)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stored", ["token-major", "layer-major"])
@pytest.mark.parametrize(
    "options",
    [
        {"layers": (0, 1)},
        {"layers": (3, 6), "tokens": (0, 300)},
        {"roles": "value", "heads": (1, 2)},
        {"layers": [0, 5], "tokens": (500, 1_500), "track": "exact/stored"},
    ],
    ids=str,
)
@covers("REQ-12", "PAR-1")
def test_any_part_in_any_order(
    web_server: WebServer,  # noqa: F811
    stored: str,
    order: str,
    options: dict[str, Any],
) -> None:
    data = ordinary(stored)
    with kvformat.open(put(web_server, data)) as artifact:
        pieces = wanted(artifact, **options, order=order)
        runs = plan_extents(pieces)
        assert assemble(artifact, data, **options, order=order) == local(data, **options)
        requests = spans(web_server)[1:]
        assert sorted(requests) == sorted(
            (run[0].offset, run[-1].stop - run[0].offset) for run in runs
        )
        needed = sum(piece.size_bytes for piece in pieces)
        assert sum(size for _, size in requests) <= 1.05 * needed


def test_the_rest_of_a_connection_is_used_again(web_server: WebServer) -> None:  # noqa: F811
    with kvformat.open(put(web_server, ordinary())) as artifact:
        for start in range(0, 1_500, 300):
            artifact.read(tokens=(start, start + 10), track="exact/stored")
    requests = web_server.requests()
    assert len(requests) >= 5
    assert {request.connection for request in requests} == {requests[0].connection}
    assert all(request.completed for request in requests)


def test_a_limit_of_requests_is_kept(web_server: WebServer) -> None:  # noqa: F811
    data = ordinary()
    transport = Transport(request_bytes=200_000, connections=3)
    with kvformat.open(put(web_server, data), transport=transport) as artifact:
        pieces = wanted(artifact)
        assert arrays(artifact.read()) == local(data)
    sizes = [size for _, size in spans(web_server)[1:]]
    assert all(size <= 200_000 for size in sizes)
    least = math.ceil(sum(piece.size_bytes for piece in pieces) / 200_000)
    assert least <= len(sizes) <= 2 * least


@covers("REQ-12", "HDR-10", "VER-1")
@pytest.mark.parametrize("make", [ordinary, far, long_manifest, hybrid])
def test_verification_never_asks_behind_the_end(
    web_server: WebServer,  # noqa: F811
    make: Callable[[], bytes],
) -> None:
    data = make()
    kvformat.verify(put(web_server, data), in_child=False)
    for start, size in spans(web_server)[1:]:
        assert start + size <= len(data)


@pytest.mark.parametrize("make", [ordinary, far, long_manifest, hybrid])
@pytest.mark.parametrize("order", ["token-major", "layer-major"])
@covers("PAR-1")
def test_all_calls_give_what_local_reading_gives(
    web_server: WebServer,  # noqa: F811
    make: Callable[..., bytes],
    order: str,
) -> None:
    data = make(order) if make is not long_manifest else make()
    with kvformat.open(data) as twin, kvformat.open(put(web_server, data)) as artifact:
        for track in twin.tracks:
            expected = twin.read(track=track)
            assert arrays(artifact.read(track=track, check=True)) == arrays(expected)
            buffers = {n: np.zeros_like(g.array) for n, g in expected.groups.items()}
            report = artifact.read_into(buffers, track=track, order=order)
            assert report.validity.complete
            assert {name: raw(item) for name, item in buffers.items()} == arrays(expected)
            assert assemble(artifact, data, track=track, order=order) == arrays(expected)


def test_alignment_is_crossed(web_server: WebServer) -> None:  # noqa: F811
    data = ordinary("token-major", 4096)
    with kvformat.open(put(web_server, data)) as artifact:
        assert artifact.manifest.segmentation.alignment == 4096
        for options in [{}, {"layers": (0, 3)}, {"tokens": (100, 400), "track": "exact/stored"}]:
            pieces = wanted(artifact, **options)
            before = len(spans(web_server))
            assert arrays(artifact.read(**options)) == local(data, **options)
            asked = sum(size for _, size in spans(web_server)[before:])
            assert asked <= 1.05 * sum(piece.size_bytes for piece in pieces)
    kvformat.verify(put(web_server, data), in_child=False)


def test_windows_and_states(web_server: WebServer) -> None:  # noqa: F811
    data = hybrid()
    with kvformat.open(put(web_server, data)) as artifact:
        restored = artifact.read()
        assert {name: item.token_start for name, item in restored.groups.items()} == {
            "key": 0, "window": 700, "state": 0,
        }  # fmt: skip
        for part in [{"tokens": (0, 500)}, {"tokens": (650, 800), "layers": [1, 2]}]:
            options: dict[str, Any] = {**part, "allow_partial": True}
            assert arrays(artifact.read(**options)) == local(data, **options)
        with pytest.raises(kvformat.MismatchError, match="window or state"):
            artifact.read(tokens=(0, 500))


@covers("REQ-2", "REQ-12")
def test_inspect_reads_only_the_front_of_a_large_file(
    web_server: WebServer,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = web_server.directory / "large.kvf"
    data = grown(ordinary(), 4 * 2**30)
    path.write_bytes(data)
    size = int.from_bytes(data[48:56], "little")
    assert size > 4 * 2**30 > len(data)
    os.truncate(path, size)  # sparse: the bytes behind are not there
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", web_server.url("large.kvf")])
    shown = capfd.readouterr()
    assert (ended.value.code, shown.err) == (0, "")
    assert f"{size:,}" in shown.out
    assert spans(web_server) == [(0, PREFETCH_BYTES)]


def grown(data: bytes, by: int) -> bytes:
    """The file with a last track that is longer by ``by`` bytes, which are not there."""
    builder = Builder(data)

    def longer(manifest: dict[str, Any]) -> None:
        manifest["data_bytes"] += by
        manifest["tracks"][-1]["data_stop"] += by

    def header(fields: dict[str, Any]) -> None:
        fields["file_bytes"] += by

    return builder.build(edit_manifest=longer, edit_header=header)


# Other storages.


def s3_url(store: ObjectStore, data: bytes) -> tuple[str, dict[str, Any]]:
    bucket = store.new_bucket()
    store.file_system().pipe_file(f"{bucket}/some folder/a+b é.kvf", data)
    return f"s3://{bucket}/some folder/a+b é.kvf", store.storage_options


@covers("REQ-1", "REQ-2", "REQ-12")
def test_s3_is_asked_with_get_only(object_store: ObjectStore) -> None:
    data = ordinary()
    url, options = s3_url(object_store, data)
    part = {"tokens": (500, 1_000), "track": "exact/zstd"}
    with (
        object_store.record() as calls,
        kvformat.open(url, storage_options=options) as artifact,
    ):
        assert [call.operation for call in calls] == ["GetObject"]
        assert calls[0].headers["range"] == FRONT
        pieces = wanted(artifact, **part)
        assert arrays(artifact.read(**part)) == local(data, **part)
        assert [call.operation for call in calls] == ["GetObject"] * 2
        place = f"bytes={pieces[0].offset}-{pieces[-1].stop - 1}"
        assert calls[1].headers["range"] == place


def test_verifying_and_streaming_from_s3(object_store: ObjectStore) -> None:
    data = far()
    url, options = s3_url(object_store, data)
    assert kvformat.verify(url, storage_options=options, in_child=False).tokens == 300
    with kvformat.open(url, storage_options=options) as artifact:
        part = {"layers": (0, 4)}
        assert assemble(artifact, data, **part, order="token-major") == local(data, **part)


@pytest.mark.parametrize(
    ("key", "code"),
    [("missing.kvf", "io.not-found"), ("empty.kvf", "header.magic"), ("tiny.kvf", "header.magic")],
)
def test_s3_objects_that_are_none(object_store: ObjectStore, key: str, code: str) -> None:
    bucket = object_store.new_bucket()
    files = object_store.file_system()
    files.pipe_file(f"{bucket}/tiny.kvf", b"no cache")
    files.pipe_file(f"{bucket}/empty.kvf", b"")
    with pytest.raises(kvformat.KvformatError) as caught:
        kvformat.open(f"s3://{bucket}/{key}", storage_options=object_store.storage_options)
    assert caught.value.code == code


def presigned(store: ObjectStore, url: str) -> str:
    return str(store.file_system().sign(url.removeprefix("s3://"), expiration=600))


@covers("REQ-2", "REQ-5")
def test_a_presigned_url_is_read_over_http(object_store: ObjectStore) -> None:
    data = ordinary()
    url, _ = s3_url(object_store, data)
    signed = presigned(object_store, url)
    assert "Signature" in signed
    with object_store.record() as calls, kvformat.open(signed) as artifact:
        assert arrays(artifact.read(tokens=(0, 400))) == local(data, tokens=(0, 400))
        assert "Signature" not in artifact.name + repr(artifact)
        assert artifact.name.endswith("?...")
    assert [call.operation for call in calls] == ["GetObject"] * 2
    assert [call.headers.get("accept-encoding") for call in calls] == ["identity"] * 2
    signature = re.search(r"Signature=([^&]+)", signed)
    assert signature is not None
    assert all(unquote(signature[1]) in call.query.values() for call in calls)


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
    url = f"{cache}::{put(web_server, data)}"
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


# URLs and options.


@pytest.mark.parametrize(
    "name", ["a b.kvf", "é 世界.kvf", "a+b.kvf", "a%2Bb.kvf", "100%.kvf", "a'(b)!.kvf"]
)
def test_names_with_special_characters(web_server: WebServer, name: str) -> None:  # noqa: F811
    data = long_manifest()
    (web_server.directory / name).write_bytes(data)
    urls = [web_server.url(quote(name))]
    if "%" not in name:
        urls.append(web_server.url(name))
    for url in urls:
        with kvformat.open(url) as artifact:
            assert arrays(artifact.read()) == local(data)


def test_what_is_quoted_is_sent_as_it_is(web_server: WebServer) -> None:  # noqa: F811
    url = put(web_server, long_manifest())
    query = "X-Amz-Credential=a%2Fb&token=%2B%3D%7e%20+&x=a:b@c"
    with kvformat.open(f"{url}?{query}"):
        pass
    assert {request.path.partition("?")[2] for request in web_server.requests()} == {query}


def test_options_reach_the_session(web_server: WebServer) -> None:  # noqa: F811
    url = put(web_server, ordinary())
    headers = {"range": "bytes=0-0", "Accept-Encoding": "gzip", "accept-encoding": "br"}
    with kvformat.open(url, storage_options={"headers": headers}) as artifact:
        assert arrays(artifact.read(tokens=(0, 9))) == local(ordinary(), tokens=(0, 9))
    assert spans(web_server)[0] == (0, PREFETCH_BYTES)
    with pytest.raises(UsageError, match="storage option"):
        kvformat.open(url, storage_options={"no_such_option": 1})
    with pytest.raises(UsageError, match="asynchronous"):
        kvformat.open(url, storage_options={"asynchronous": True})


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a.kvf", "http://host:x/a.kvf", "https://user:p/w@host/a.kvf?sig=secret",
     "nosuch://user:secret@host/a?sig=secret", "http://[/a?sig=secret"],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        kvformat.open(url)
    assert "secret" not in str(caught.value)
    assert "p/w" not in str(caught.value)
