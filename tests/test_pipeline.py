"""The pipeline and the fetcher on sources that tests control, one step at a time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat import KvformatError, StorageError, UsageError
from kvformat.artifact import Artifact
from kvformat.fetching import Fetcher, Wish
from kvformat.front import read_front
from kvformat.pipeline import Clock, Pipeline
from kvformat.storage import Beside, BytesSource, Data, Piece, Transport
from tests.remote import eventually, far, ordinary, threads

FILE = bytes(range(256)) * 8
"""Segment number n of these tests is the bytes [8 n, 8 n + 8)."""
CLOSED = "closed or cancelled"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert eventually(lambda: threads() == [])


class Source(BytesSource):
    """Bytes in memory whose transfers are counted, and may wait or fail at a piece."""

    def __init__(self, data: bytes = FILE, **transport: Any) -> None:
        super().__init__(data)
        self.transport = Transport(**transport)
        self.asked: list[list[Piece]] = []
        self.taken = 0
        self.open = 0
        self.most_open = 0
        self.fail_at: int | None = None
        self.wait_at: int | None = None
        self.waiting = threading.Event()
        self.lock = threading.Lock()

    def transfer(self, pieces: Sequence[Piece]) -> Any:
        with self.lock:
            self.asked.append(list(pieces))
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        return Transfer(self, pieces)


class Transfer:
    def __init__(self, source: Source, pieces: Sequence[Piece]) -> None:
        self.source = source
        self.pieces = iter(pieces)
        self.closed = threading.Event()
        self.outstanding_bytes = sum(piece.size_bytes for piece in pieces)

    def take(self) -> Data:
        piece = next(self.pieces)
        number = piece.offset // 8
        if self.closed.is_set():
            raise UsageError("usage.argument", "the read was closed")
        if self.source.fail_at == number:
            raise StorageError("io.read", "the wire broke", where=f"piece {number}")
        if self.source.wait_at == number:
            self.source.waiting.set()
            assert self.closed.wait(60)
            raise UsageError("usage.argument", "the read was closed")
        self.outstanding_bytes -= piece.size_bytes
        with self.source.lock:
            self.source.taken += 1
        return self.source.read(piece.offset, piece.size_bytes)

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            with self.source.lock:
                self.source.open -= 1


def wishes(*numbers: int) -> list[Wish]:
    """One segment of 8 bytes for each number."""
    track: Any = SimpleNamespace(name="t", quality="q")
    records: list[Any] = [SimpleNamespace(offset=8 * n, stored_bytes=8) for n in numbers]
    return [Wish(track, record) for record in records]


class Needs:
    """What the fetcher tells of windows and segments; an error or a long wait at one segment."""

    def __init__(self, fail_at: int | None = None, wait_at: int | None = None) -> None:
        self.begun: list[int] = []
        self.asked: list[int] = []
        self.fail_at = fail_at
        self.wait_at = wait_at
        self.waiting = threading.Event()
        self.closed = threading.Event()

    def begin(self, window: Sequence[Wish]) -> None:
        self.begun.append(len(window))

    def ready(self, wish: Wish) -> None:
        number = wish.record.offset // 8
        if number == self.fail_at:
            raise kvformat.InvalidError("set.digest", "damaged")
        if number == self.wait_at:
            self.waiting.set()
            assert self.closed.wait(60)
            raise UsageError("usage.argument", CLOSED)
        self.asked.append(number)

    def close(self) -> None:
        self.closed.set()


def fetcher(source: Source, windows: Sequence[Sequence[Wish]], prefix: bytes = b"") -> Fetcher:
    return Fetcher(source, prefix, 0, windows, Needs())


def number_of(wish: Wish, data: Data) -> int:
    """The work: says which segment came, and that it is that one."""
    offset = wish.record.offset
    assert bytes(data) == FILE[offset : offset + 8]
    return offset // 8


def pipeline(
    source: Source, count: int = 40, workers: int = 2, work: Callable[..., int] = number_of
) -> Pipeline[int]:
    return running_pipeline(fetcher(source, [wishes(*range(count))]), work, workers)


def running_pipeline(
    fetching: Fetcher, work: Callable[..., int] = number_of, workers: int = 2
) -> Pipeline[int]:
    result = Pipeline(fetching, work, workers, Clock())
    result.start()
    return result


def test_everything_comes_once_and_in_order() -> None:
    source = Source()
    assert [outcome.value for outcome in pipeline(source)] == list(range(40))
    assert (source.taken, source.open, len(source.asked)) == (40, 0, 1)


@settings(deadline=None, max_examples=40)
@given(
    numbers=st.lists(st.integers(0, 255), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    prefix=st.integers(0, 120),
    connections=st.integers(1, 4),
    request_bytes=st.none() | st.integers(1, 40),
    workers=st.integers(1, 3),
)
def test_any_order_of_segments_in_any_windows(
    *,
    numbers: list[int],
    cuts: list[int],
    prefix: int,
    connections: int,
    request_bytes: int | None,
    workers: int,
) -> None:
    source = Source(connections=connections, request_bytes=request_bytes)
    edges = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    windows = [wishes(*numbers[a:b]) for a, b in pairwise(edges)]
    needs = Needs()
    fetching = Fetcher(source, FILE[:prefix], 0, windows, needs)
    outcomes = list(running_pipeline(fetching, workers=workers))
    assert [outcome.value for outcome in outcomes] == numbers
    assert needs.begun == [len(window) for window in windows if window]
    assert needs.asked == numbers
    assert source.open == 0
    assert source.most_open <= connections
    for run in source.asked:
        assert all(piece.stop > prefix for piece in run)
        if request_bytes is not None and len(run) > 1:
            assert run[-1].stop - run[0].offset <= request_bytes


@settings(deadline=None, max_examples=40)
@given(stop=st.integers(0, 40), workers=st.integers(1, 4), hang=st.booleans())
def test_cancelled_anywhere_nothing_is_left(stop: int, workers: int, hang: bool) -> None:
    source = Source()
    source.wait_at = stop if hang else None
    running = pipeline(source, workers=workers)
    for _ in range(stop):
        next(running)
    if hang and stop < 40:
        assert source.waiting.wait(60)
    running.close()
    assert threads() == []
    assert source.open == 0
    with pytest.raises(UsageError, match=CLOSED):
        next(running)
    running.close()


def test_closed_before_it_began() -> None:
    source = Source()
    closed = Pipeline(fetcher(source, [wishes(1, 2)]), number_of, 2, Clock())
    closed.close()
    closed.start()
    with pytest.raises(UsageError, match=CLOSED):
        next(closed)
    assert (source.asked, threads()) == ([], [])


def test_closed_by_another_thread_while_the_caller_waits() -> None:
    source = Source()
    source.wait_at = 3
    running = pipeline(source)
    closer = threading.Thread(target=lambda: (source.waiting.wait(60), running.close()))
    closer.start()
    with pytest.raises(UsageError, match=CLOSED):
        list(running)
    closer.join()


def test_an_error_of_the_fetcher_comes_behind_what_was_good() -> None:
    source = Source()
    source.fail_at = 7
    running = pipeline(source)
    assert [next(running).value for _ in range(7)] == list(range(7))
    with pytest.raises(StorageError, match="the wire broke"):
        next(running)
    assert threads() == []
    assert source.open == 0


def test_an_error_beside_the_segments_comes_behind_what_was_good() -> None:
    source = Source()
    fetching = Fetcher(source, b"", 0, [wishes(1, 2, 3)], Needs(fail_at=2))
    running = running_pipeline(fetching)
    assert next(running).value == 1
    with pytest.raises(kvformat.InvalidError, match="damaged"):
        next(running)
    assert source.open == 0


def test_closing_ends_what_is_waited_for_beside_the_segments() -> None:
    source, needs = Source(), Needs(wait_at=3)
    running = running_pipeline(Fetcher(source, b"", 0, [wishes(1, 2, 3, 4)], needs))
    assert [next(running).value for _ in range(2)] == [1, 2]
    assert needs.waiting.wait(60)
    running.close()
    assert (threads(), source.open) == ([], 0)


def test_the_end_closes_what_was_fetched_beside_the_segments() -> None:
    needs = Needs()
    outcomes = list(running_pipeline(Fetcher(Source(), b"", 0, [wishes(1, 2)], needs)))
    assert [outcome.value for outcome in outcomes] == [1, 2]
    assert needs.closed.is_set()


def test_an_error_of_a_worker_is_that_outcome_and_no_more() -> None:
    def work(wish: Wish, data: Data) -> int:
        number = number_of(wish, data)
        if number == 5:
            raise kvformat.InvalidError("segment.digest", "damaged")
        return number

    outcomes = list(pipeline(Source(), work=work))
    assert [item.value for item in outcomes] == [None if n == 5 else n for n in range(40)]
    assert [item.error.code for item in outcomes if item.error] == ["segment.digest"]


def test_a_bug_in_a_worker_is_raised() -> None:
    def work(wish: Wish, data: Data) -> int:
        raise ZeroDivisionError(number_of(wish, data))

    with pytest.raises(ZeroDivisionError):
        next(pipeline(Source(), work=work))
    assert threads() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_a_slow_consumer_holds_everything_back(workers: int) -> None:
    """At most 2 * workers are between feeder and caller; the feeder holds one more."""
    source = Source()
    running = pipeline(source, workers=workers)
    for taken in range(10):
        bound = taken + 2 * workers + 1
        assert eventually(lambda bound=bound: source.taken == bound)
        assert next(running).value == taken
    running.close()
    assert source.taken <= 10 + 2 * workers + 1


def test_far_requests_run_side_by_side_within_their_bound() -> None:
    far_apart = bytes(9 * 2**20)
    source = Source(far_apart, connections=3)
    track: Any = SimpleNamespace(name="t", quality="q")
    records: list[Any] = [SimpleNamespace(offset=n * 2**20, stored_bytes=64) for n in range(9)]
    fetching = fetcher(source, [[Wish(track, record) for record in records]])
    iterator = iter(fetching)
    next(iterator)
    assert source.open == 3
    assert len(list(iterator)) == 8
    assert (source.most_open, source.open, len(source.asked)) == (3, 0, 9)


def test_enough_under_way_opens_no_further_request() -> None:
    source = Source(bytes(40 * 2**20), connections=8)
    track: Any = SimpleNamespace(name="t", quality="q")
    sizes = 2**20
    records: list[Any] = [
        SimpleNamespace(offset=3 * n * sizes, stored_bytes=sizes) for n in range(9)
    ]
    iterator = iter(fetcher(source, [[Wish(track, record) for record in records]]))
    next(iterator)
    assert source.most_open <= 2
    assert len(list(iterator)) == 8


def test_what_is_fetched_beside_can_be_stopped() -> None:
    source = Source()
    beside = Beside(source)
    assert [bytes(item) for item in beside.fetch([Piece(0, 8), Piece(8, 8)])] == [
        FILE[:8], FILE[8:16],
    ]  # fmt: skip
    source.wait_at = 4
    closer = threading.Thread(target=lambda: (source.waiting.wait(60), beside.close()))
    closer.start()
    with pytest.raises(UsageError):
        beside.fetch([Piece(32, 8)])
    closer.join()
    assert (beside.closed, source.open) == (True, 0)
    with pytest.raises(UsageError, match=CLOSED):
        beside.fetch([Piece(0, 8)])


class Stuck(Source):
    """An artifact in memory of which nothing behind the front comes."""

    def transfer(self, pieces: Sequence[Piece]) -> Any:
        self.wait_at = pieces[0].offset // 8
        return super().transfer(pieces)


def stuck(data: bytes) -> tuple[Stuck, Artifact]:
    source = Stuck(data)
    return source, Artifact(source, read_front(source))


def test_a_table_that_does_not_come_can_be_cancelled() -> None:
    source, artifact = stuck(far())
    cancellation = kvformat.Cancellation()
    closer = threading.Thread(target=lambda: (source.waiting.wait(60), cancellation.cancel()))
    closer.start()
    with pytest.raises(UsageError):
        artifact.read(cancellation=cancellation)
    closer.join()
    assert source.open == 0


def test_cancelled_before_it_began() -> None:
    _, artifact = stuck(ordinary())
    cancellation = kvformat.Cancellation()
    cancellation.cancel()
    with pytest.raises(UsageError, match=CLOSED):
        artifact.read(cancellation=cancellation)


def test_a_dropped_stream_ends_by_itself() -> None:
    source, artifact = stuck(ordinary())
    stream = artifact.stream()
    assert source.waiting.wait(60)
    gone = weakref.ref(stream)
    del stream
    assert gone() is None
    assert eventually(lambda: threads() == [] and source.open == 0)


def test_a_dropped_stream_in_a_cycle_is_collected_in_any_thread() -> None:
    source, artifact = stuck(ordinary())
    knot: list[Any] = [artifact.stream()]
    knot.append(knot)
    assert source.waiting.wait(60)
    del knot
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert eventually(lambda: threads() == [] and source.open == 0)


def test_an_exhausted_stream_stays_so() -> None:
    with kvformat.open(ordinary()) as artifact:
        stream = artifact.stream(tokens=(0, 10), layers=(0, 1))
        assert len(list(stream)) == 2
        with pytest.raises(StopIteration):
            next(stream)
        stream.close()
        with pytest.raises(UsageError, match="closed"):
            next(stream)


def test_reading_from_many_threads_while_one_closes(tmp_path: Any) -> None:
    path = tmp_path / "a.kvf"
    path.write_bytes(ordinary())
    expected = kvformat.open(ordinary()).read(tokens=(0, 200)).kv.tobytes()
    artifact = kvformat.open(path)
    first, problems = threading.Barrier(5), []

    def read() -> None:
        first.wait()
        try:
            while True:
                if artifact.read(tokens=(0, 200)).kv.tobytes() != expected:
                    problems.append("wrong bytes")
        except KvformatError as error:
            if error.code != "usage.argument" or "closed" not in error.message:
                problems.append(error)
        except BaseException as error:
            problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    first.wait()
    artifact.read(tokens=(0, 200))
    artifact.close()
    for reader in readers:
        reader.join()
    assert problems == []
