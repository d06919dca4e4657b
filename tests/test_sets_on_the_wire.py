"""Quantisation sets behind the first request: damaged, held back by the server, or not needed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from functools import cache
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat.reading import Order
from kvformat.tables import SegmentRecord
from tests.faulty_server import Asked, Wire, part, raw_server
from tests.remote import eventually, far, in_use, nothing_left, ordinary

TRACK = "near-lossless/zstd"
FILES = {"far": far, "near": ordinary}


@cache
def places(name: str) -> tuple[list[tuple[int, int]], list[SegmentRecord]]:
    """First and last byte of each set in the file, and all segments."""
    with kvformat.open(FILES[name]()) as artifact:
        track = artifact.track(TRACK)
        sets, segments = artifact.set_table(track.quality), artifact.segment_table(track)
        start = artifact.front.data_start
        spans = [
            (start + sets[n].offset, start + sets[n].offset + sets[n].size_bytes - 1)
            for n in range(len(sets))
        ]
        return spans, [segments[n] for n in range(len(segments))]


def held(asked: Asked) -> Wire:
    """Of the request for the sets only the first set comes."""
    data, spans = far(), places("far")[0]
    whole = part(data, asked)
    if not spans[0][0] <= asked.first <= spans[-1][1]:
        return Wire(whole)
    head = whole.index(b"\r\n\r\n") + 4
    return Wire(whole[: head + spans[0][1] + 1 - spans[0][0]], "hold")


@pytest.mark.parametrize("name", list(FILES))
@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("order", ["token-major", "layer-major"])
def test_damage_of_a_set_is_that_of_its_layers(name: str, over_http: bool, order: Order) -> None:
    spans, segments = places(name)
    good = FILES[name]()
    for bad in {0, len(spans) // 2, len(spans) - 1}:
        changed = bytearray(good)
        changed[spans[bad][0] + 5] ^= 4
        file = bytes(changed)
        mine = [item.cell for item in segments if item.set_index == bad]
        with contextlib.ExitStack() as stack:
            place: Any = file
            if over_http:
                stack.enter_context(nothing_left())
                server = stack.enter_context(raw_server(_serving(file)))
                place = server.url()
            check_damage(good, place, mine, order)


def _serving(file: bytes) -> Any:
    return lambda asked: Wire(part(file, asked))


def check_damage(good: bytes, place: Any, cells: list[Any], order: Order) -> None:
    """Only the layers of ``cells`` are refused, and all that is said to be good is right."""
    with kvformat.open(good) as twin:
        expected = twin.read(track=TRACK).groups
    with kvformat.open(place) as artifact:
        buffers = {key: np.full_like(item.array, np.nan) for key, item in expected.items()}
        report = artifact.read_into(buffers, track=TRACK, order=order, on_error="prefix")
        validity = report.validity
        damaged = {
            artifact.groups[cell.group].layers[cell.layer_index + number]
            for cell in cells
            for number in range(cell.layer_count)
        }
        others = [layer for layer in validity.layers if layer not in damaged]
        assert {failure.error.code for failure in validity.failures} == {"set.digest"}
        assert all(validity.layers[layer] == 0 for layer in damaged)
        count = artifact.manifest.tokens.count
        if order == "layer-major":
            assert all(validity.layers[layer] == count for layer in others)
        for key, item in expected.items():
            for number, layer in enumerate(item.layers):
                told = slice(0, validity.layers[layer])
                assert buffers[key][number, told].tobytes() == item.array[number, told].tobytes()
        with pytest.raises(kvformat.InvalidError) as caught:
            artifact.read(track=TRACK)
        assert caught.value.code == "set.digest"
        assert caught.value.validity is not None
        assert caught.value.validity.valid_end == 0
        artifact.read(track=TRACK, layers=others)
        artifact.read(track="exact/stored")


def test_a_stream_that_ended_holds_no_request_for_sets_that_came_another_way() -> None:
    with nothing_left(), raw_server(held) as server, kvformat.open(server.url()) as artifact:
        stream = artifact.stream(track=TRACK, roles=["key"], order="layer-major", workers=1)
        assert next(stream).layers == (0, 1, 2)
        for index in range(len(places("far")[0])):
            artifact.quantisation_set("near-lossless", index)
        assert sum(1 for _ in stream) == 151
        assert in_use() == 0


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_fork_leaves_requests_for_sets_to_its_parent() -> None:
    code = """
    import os, signal, sys, warnings
    import kvformat
    warnings.simplefilter("ignore", DeprecationWarning)
    artifact = kvformat.open(sys.argv[1])
    stream = artifact.stream(track="near-lossless/zstd", workers=1)
    next(stream)
    child = os.fork()
    if not child:
        signal.alarm(30)
        code = ""
        try:
            list(stream)
        except kvformat.KvformatError as error:
            code = error.code
        stream.close()
        artifact.close()
        os._exit(0 if code == "usage.argument" else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stream.close()
    artifact.close()
    """
    with raw_server(held) as server:
        out, err = run(code, server.url()).communicate(timeout=120)
    assert (out, err) == ("0\n", "")


def test_an_interrupted_read_does_not_wait_for_a_set() -> None:
    code = """
    import sys
    import kvformat
    transport = kvformat.Transport(stall_timeout_s=600)
    with kvformat.open(sys.argv[1], transport=transport) as artifact:
        try:
            artifact.read(track="near-lossless/zstd")
        except KeyboardInterrupt:
            print("interrupted")
    """
    spans = places("far")[0]
    with raw_server(held) as server:
        process = run(code, server.url())
        wanted = range(spans[0][0], spans[-1][1] + 1)
        assert eventually(lambda: any(asked.first in wanted for asked in server.asked))
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


@pytest.mark.parametrize(
    "nothing", [{"tokens": (5, 5)}, {"tokens": (8, 8)}, {"heads": (1, 1)}], ids=str
)
def test_nothing_is_fetched_for_a_selection_of_nothing(nothing: dict[str, Any]) -> None:
    with raw_server(_serving(far())) as server, kvformat.open(server.url()) as artifact:
        artifact.segment_table(artifact.track(TRACK))
        before = len(server.asked)
        restored = artifact.read(track=TRACK, **nothing)
        assert [item.array.size for item in restored.groups.values()] in ([], [0, 0])
        with artifact.stream(track=TRACK, **nothing) as stream:
            assert list(stream) == []
        assert len(server.asked) == before
