"""Reading over HTTP, S3 and other storages: what is asked for, and that the bits are the same."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import kvformat
from kvformat import UsageError
from kvformat.cli.program import cli
from kvformat.extents import plan_extents
from kvformat.header import align
from kvformat.reading import ORDERS
from kvformat.storage import Transport
from tests.builder import Builder
from tests.object_store import ObjectStore, object_store_fixture  # noqa: F401 - used by name
from tests.remote import (
    PREFETCH_BYTES,
    arrays,
    assemble,
    far,
    hybrid,
    local,
    long_manifest,
    many,
    nothing_left,
    ordinary,
    wanted,
)
from tests.requirements import covers
from tests.strategies import canonical_kv, raw, write_bytes
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


@covers("REQ-12")
def test_padding_between_small_segments_costs_no_request(
    web_server: WebServer,  # noqa: F811
) -> None:
    data = write_bytes(
        canonical_kv(6, 1_500, 2, 32), tracks=["exact/stored"], segment_tokens=16, alignment=4096
    )
    options = {"tokens": (900, 1_400)}
    with kvformat.open(put(web_server, data)) as artifact:
        pieces = wanted(artifact, **options)
        padding = sum(b.offset - a.stop for a, b in pairwise(pieces))
        assert padding > 0.05 * sum(piece.size_bytes for piece in pieces)
        restored = artifact.read(**options)
    assert arrays(restored) == local(data, **options)
    assert spans(web_server)[1:] == [(pieces[0].offset, pieces[-1].stop - pieces[0].offset)]


def test_alignment_is_crossed(web_server: WebServer) -> None:  # noqa: F811
    data = ordinary("token-major", 4096)
    with kvformat.open(put(web_server, data)) as artifact:
        assert artifact.manifest.segmentation.alignment == 4096
        for options in [{}, {"layers": (0, 3)}, {"tokens": (100, 400), "track": "exact/stored"}]:
            pieces = wanted(artifact, **options)
            before = len(spans(web_server))
            assert arrays(artifact.read(**options)) == local(data, **options)
            asked = sum(size for _, size in spans(web_server)[before:])
            assert asked <= 1.05 * sum(align(piece.size_bytes, 4096) for piece in pieces)
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


@covers("PAR-1")
def test_auto_over_several_windows(
    web_server: WebServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tracks of one quality restore the same bits, so each window may come from another."""
    monkeypatch.setattr("kvformat.choosing.WINDOW_BYTES", 100_000)
    monkeypatch.setattr("kvformat.choosing.WINDOW_S", 0.0)
    data = ordinary()
    with kvformat.open(put(web_server, data)) as artifact:
        for quality in ("near-lossless", "exact"):
            auto = kvformat.Auto(quality=quality)
            restored = artifact.read(track=auto, tokens=(100, 1_400))
            assert arrays(restored) == local(data, track=quality, tokens=(100, 1_400))
            assert restored.report is not None
            assert restored.report.validity.complete
            assert restored.report.decision
            assert restored.report.traffic.requests > 2  # a request for each window
            assert all(name.startswith(quality) for name in restored.report.tracks)
