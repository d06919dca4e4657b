"""Faults in the middle of a read: where it goes on, when it gives up, and what is good then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat import StorageError
from kvformat.reading import ORDERS, Request, choose_cells
from kvformat.storage import Transport
from tests.remote import arrays, far, hybrid, local, nothing_left, ordinary
from tests.requirements import covers

sys.path.append(str(Path(__file__).parent.parent / "conformance"))

from kvconform.behaviours import Asked, Behaviour, Reply, bare, on_part, pieces, sent
from kvconform.server import Resource, Server

TRACK = "exact/stored"
PART: dict[str, Any] = {"tokens": (300, 1_300), "track": TRACK}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e-4)


def places(data: bytes, **options: Any) -> list[tuple[int, int]]:
    """First byte and length of the segments that a read touches, in its order."""
    with kvformat.open(data) as artifact:
        track = artifact.track(options.pop("track"))
        _, _, cells = choose_cells(artifact, Request(**options))
        table = artifact.segment_table(track)
        start = artifact.front.data_start
        records = [table[int(cell)] for cell in cells]
        return [(start + item.offset, item.stored_bytes) for item in records]


PLACES = places(ordinary(), **PART)
FIRST = PLACES[0][0]
SIZE = PLACES[-1][0] + PLACES[-1][1] - FIRST


def cut_after(count: int, ending: str = "close") -> Callable[[Asked], Reply]:
    """The connection ends behind so many bytes of the body."""

    def change(asked: Asked, good: Reply) -> Reply:
        return replace(good, body=pieces(sent(asked, good)[:count]), ending=ending)

    return on_part(change)


def asked_from(resource: Resource) -> list[int]:
    """The first byte of every request behind that for the front."""
    return [int(line.ranges[0].removeprefix("bytes=").split("-")[0]) for line in resource.log[1:]]


CUTS = sorted(
    {0, 1, PLACES[0][1] - 1, PLACES[0][1], PLACES[0][1] + 1, SIZE // 2, SIZE - 1}
    | {PLACES[-1][0] - FIRST, PLACES[20][0] - FIRST}
)


@covers("REQ-9")
@pytest.mark.parametrize("count", CUTS)
def test_the_next_request_begins_at_the_first_segment_that_is_missing(
    server: Server, count: int
) -> None:
    with nothing_left(), server.serve(ordinary(), "plain") as resource:
        resource.behaviour = Behaviour(cut_after(count), 1, 2)
        with kvformat.open(resource.url) as artifact:
            restored = artifact.read(**PART)
        assert arrays(restored) == local(ordinary(), **PART)
        missing = next(start for start, size in PLACES if start + size - FIRST > count)
        assert asked_from(resource) == [FIRST, missing]
        assert restored.report is not None
        assert restored.report.traffic.retries == 1


@pytest.mark.parametrize("count", [1, SIZE // 3, SIZE - 1])
def test_a_reset_is_resumed_too(server: Server, count: int) -> None:
    """How much of what was sent arrives before a reset is not known."""
    with nothing_left(), server.serve(ordinary(), "plain") as resource:
        resource.behaviour = Behaviour(cut_after(count, "reset"), 1, 2)
        with kvformat.open(resource.url) as artifact:
            assert arrays(artifact.read(**PART)) == local(ordinary(), **PART)
        first, again = asked_from(resource)
        assert first == FIRST
        assert again in [start for start, _ in PLACES]
        assert again <= FIRST + count


@covers("REQ-9")
def test_progress_forgives_failures(server: Server) -> None:
    """Every reply breaks behind one segment; two failures in a row would end it."""
    size = max(size for _, size in PLACES)
    with nothing_left(), server.serve(ordinary(), "plain") as resource:
        resource.behaviour = Behaviour(cut_after(size), 1)
        with kvformat.open(resource.url, transport=Transport(retries=1)) as artifact:
            restored = artifact.read(**PART)
        assert arrays(restored) == local(ordinary(), **PART)
        starts = asked_from(resource)
        assert starts == sorted(set(starts))
        assert set(starts) <= {start for start, _ in PLACES}
        assert len(starts) > 10


@pytest.mark.parametrize("retries", [0, 2])
def test_without_progress_it_gives_up(server: Server, retries: int) -> None:
    with nothing_left(), server.serve(ordinary(), "plain") as resource:
        resource.behaviour = Behaviour(cut_after(PLACES[0][1] - 1), 1)
        with (
            kvformat.open(resource.url, transport=Transport(retries=retries)) as artifact,
            pytest.raises(StorageError) as caught,
        ):
            artifact.read(**PART)
        assert caught.value.code == "io.short"
        assert caught.value.validity is not None
        assert caught.value.validity.valid_end == 300
        assert asked_from(resource) == [FIRST] * (1 + retries)


LIMITS = Transport(connect_timeout_s=0.75, stall_timeout_s=0.75, retries=3)
"""A busy machine must be able to open the file within them."""


@covers("REQ-10")
@pytest.mark.parametrize("count", [0, PLACES[0][1] - 1])
def test_a_stall_is_a_time_out(server: Server, count: int) -> None:
    with nothing_left(), server.serve(ordinary(), "plain") as resource:
        resource.behaviour = Behaviour(cut_after(count, "silence"), 1)
        with (
            kvformat.open(resource.url, transport=LIMITS) as artifact,
            pytest.raises(StorageError) as caught,
        ):
            artifact.read(**PART)
        assert (caught.value.code, caught.value.expected) == (
            "io.timeout",
            "progress within 0.75 s",
        )


@covers("REQ-10")
def test_one_stall_is_survived(server: Server) -> None:
    with nothing_left(), server.serve(ordinary(), "plain") as resource:
        resource.behaviour = Behaviour(cut_after(SIZE // 2, "silence"), 1, 2)
        with kvformat.open(resource.url, transport=LIMITS) as artifact:
            assert arrays(artifact.read(**PART)) == local(ordinary(), **PART)
        missing = next(start for start, size in PLACES if start + size - FIRST > SIZE // 2)
        assert asked_from(resource) == [FIRST, missing]


def wrong_bytes(asked: Asked, good: Reply) -> Reply:
    body = bytes(byte ^ 1 for byte in sent(asked, good))
    return replace(good, body=pieces(body))


@pytest.mark.parametrize("make", [ordinary, far])
def test_damage_on_the_way_is_asked_for_again(server: Server, make: Callable[[], bytes]) -> None:
    data = make()
    options: dict[str, Any] = {"tokens": (1_200, 1_300), "track": "near-lossless"}
    if make is far:
        options["tokens"] = (100, 140)
    with nothing_left(), server.serve(data, "plain") as resource:
        with kvformat.open(resource.url) as artifact:
            artifact.segment_table(artifact.track("near-lossless"))
            number = len(resource.log)
            wrong = 2 if make is far else 1  # the sets, and the segments
            resource.behaviour = Behaviour(on_part(wrong_bytes), number, number + wrong)
            restored = artifact.read(**options)
        assert arrays(restored) == local(data, **options)
        assert restored.report is not None
        assert restored.report.traffic.retries > 0


# Reads that tell how far they came instead of raising.


def buffers_of(data: bytes, **options: Any) -> dict[str, Any]:
    """Buffers that are full of a value that means nothing."""
    with kvformat.open(data) as artifact:
        groups = artifact.read(**options).groups
    shapes = {name: item.array for name, item in groups.items()}
    return {
        name: np.frombuffer(b"\xa5" * array.nbytes, np.uint8).copy().view(array.dtype).reshape(
            array.shape
        )
        for name, array in shapes.items()
    }  # fmt: skip


def check_promise(data: bytes, found: dict[str, Any], validity: Any, **options: Any) -> None:
    """All that is called good is the same, bit by bit."""
    with kvformat.open(data) as artifact:
        right = artifact.read(**options).groups
    for name, item in right.items():
        for number, layer in enumerate(item.layers):
            end = validity.layers[layer]
            count = len(item.array[number])
            good = slice(0, max(0, min(count, end - item.token_start)))
            if item.group.tokens.kind == "state":
                good = slice(0, count if end > validity.tokens[0] else 0)
            mine, theirs = found[name][number, good], item.array[number, good]
            assert mine.tobytes() == theirs.tobytes()


def broken(data: bytes, offsets: list[int]) -> bytes:
    """The file with a bit flipped at each of these places."""
    changed = bytearray(data)
    for offset in offsets:
        changed[offset] ^= 1
    return bytes(changed)


def ends_without(data: bytes, bad: set[int], **options: Any) -> dict[int, int]:
    """Where each layer ends if the numbered segments of a read are missing, painted by token."""
    with kvformat.open(data) as artifact:
        track = artifact.track(options.pop("track"))
        wanted, (begin, end), cells = choose_cells(artifact, Request(**options))
        table = artifact.segment_table(track)
        groups = artifact.groups
    ends = {item.group.layers[index]: end for item in wanted for index in item.layers}
    for number in bad:
        cell = table[int(cells[number])].cell
        group = groups[cell.group]
        start = begin if group.tokens.kind == "state" else max(begin, cell.token_start)
        for layer in group.layers[cell.layer_index : cell.layer_index + cell.layer_count]:
            if layer in ends:
                ends[layer] = min(ends[layer], start)
    return ends


FILES = {
    "token-major": (ordinary, {"tokens": (200, 1_400), "track": "exact/zstd"}),
    "layer-major": (lambda: ordinary("layer-major"), {"layers": (1, 6), "track": "near-lossless"}),
    "hybrid": (hybrid, {"track": "exact/stored"}),
}


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(FILES)),
    order=st.sampled_from(ORDERS),
    fractions=st.lists(st.floats(0, 0.999), min_size=1, max_size=4),
)
def test_the_valid_prefix_ends_at_the_first_damage(
    name: str, order: Any, fractions: list[float]
) -> None:
    make, options = FILES[name]
    data = make()
    segments = places(data, **options, order=order)
    bad = {int(fraction * len(segments)) for fraction in fractions}
    damaged = broken(data, [segments[number][0] + segments[number][1] // 2 for number in bad])
    found = buffers_of(data, **options)
    with kvformat.open(damaged) as artifact:
        report = artifact.read_into(found, **options, order=order, on_error="prefix")
        lengths = artifact.manifest.valid_lengths
    validity = report.validity
    check_promise(data, found, validity, **options)
    ends = ends_without(data, bad, **options, order=order)
    valid_end = min(ends.values())
    if lengths is not None:
        valid_end = 0
    assert validity.valid_end == valid_end
    if order == "layer-major":
        assert dict(validity.layers) == ends
        assert len(validity.failures) == len(bad)
    assert all(validity.layers[layer] <= end for layer, end in ends.items())
    assert {item.error.code for item in validity.failures} == {"segment.digest"}
    assert not validity.complete


def test_nothing_is_read_that_cannot_help() -> None:
    """In a token-major read the rest is left alone; layers of a layer-major file still count."""
    for file, least in [(ordinary(), 0), (ordinary("layer-major"), 128)]:
        segments = places(file, track=TRACK)
        damaged = broken(file, [segments[1][0]])
        found = buffers_of(file, track=TRACK)
        with kvformat.open(damaged) as artifact:
            report = artifact.read_into(found, track=TRACK, on_error="prefix")
        assert report.validity.valid_end == least
        assert report.segments < len(segments)


def test_a_damaged_set_takes_only_its_own_layers() -> None:
    data = ordinary()
    with kvformat.open(data) as artifact:
        table = artifact.set_table("near-lossless")
        place = artifact.front.data_start + table[1].offset
        group, first = artifact.groups[table[1].group], table[1].layer_index
        hit = set(group.layers[first : first + table[1].layer_count])
    options: dict[str, Any] = {"track": "near-lossless", "tokens": (0, 500)}
    found = buffers_of(data, **options)
    with kvformat.open(broken(data, [place])) as artifact:
        with pytest.raises(kvformat.InvalidError) as caught:
            artifact.read(**options)
        assert caught.value.code == "set.digest"
        report = artifact.read_into(found, **options, order="layer-major", on_error="prefix")
    assert {layer for layer, end in report.validity.layers.items() if end == 0} == hit
    assert {end for layer, end in report.validity.layers.items() if layer not in hit} == {500}
    assert {item.error.code for item in report.validity.failures} == {"set.digest"}
    check_promise(data, found, report.validity, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("segments", [0, 1, 5, 17])
def test_a_server_that_vanishes(server: Server, order: Any, segments: int) -> None:
    """What came before is good, and exactly that is promised."""
    data = ordinary()
    options: dict[str, Any] = {"layers": (0, 3), **PART}
    where = places(data, **options, order=order)
    found = buffers_of(data, **options)
    begun: list[int] = []

    def vanish(asked: Asked) -> Reply:
        """So many whole segments come, over all replies; then there is no object any more."""
        first, last = asked.interval or (0, 0)
        mine = [number for number, (start, size) in enumerate(where) if first <= start <= last]
        left = [number for number in mine if number < segments]
        if not left:
            return bare(404)(asked)
        begun.extend(left)
        stop = where[left[-1]][0] + where[left[-1]][1] if len(left) < len(mine) else last + 1
        return cut_after(stop - first)(asked)

    with nothing_left(), server.serve(data, "plain") as resource:
        resource.behaviour = Behaviour(vanish, 1)
        transport = Transport(retries=0, connections=1)
        with kvformat.open(resource.url, transport=transport) as artifact:
            report = artifact.read_into(found, **options, order=order, on_error="prefix")
            validity = report.validity
            with pytest.raises(StorageError):
                artifact.read(**options)
    check_promise(data, found, validity, **options)
    assert not validity.complete
    (failure,) = validity.failures
    assert failure.error.code in ("io.not-found", "io.short")
    ends = ends_without(data, set(range(segments, len(where))), **options, order=order)
    assert dict(validity.layers) == ends
    assert validity.valid_end == min(ends.values())


def test_on_error_is_one_of_two() -> None:
    with kvformat.open(ordinary()) as artifact, pytest.raises(kvformat.UsageError):
        artifact.read_into({}, on_error="ignore")  # type: ignore[arg-type]
