"""When quantisation sets are asked for, and that nobody waits for one that is not needed yet."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import kvformat
from kvformat.fetching import Wish
from kvformat.sets_ahead import SetsAhead
from kvformat.storage import Data, Piece
from kvformat.storage.meter import Traffic
from kvformat.tables import NO_SET

SET_BYTES = 1000
SLOW = Traffic(1, 0, 262_144, 0.0, 262_144, 1.01, first_byte_s=0.01)
"""262,144 bytes a second, 10 ms away: a set takes 4 ms, and ten take 38 ms."""
DISTANT = Traffic(1, 0, 262_144, 0.0, 262_144, 2.0, first_byte_s=1.0)


class Artifact:
    """Ten sets of which ``near`` lie in the prefix; those in ``bad`` are damaged so many times."""

    def __init__(self, near: int, traffic: Traffic = SLOW, *, remote: bool = True) -> None:
        self.retries = 0
        meter = SimpleNamespace(traffic=lambda: traffic, retry=self.count)
        self.source = SimpleNamespace(name="http://nowhere/x", remote=remote, meter=meter)
        self.front = SimpleNamespace(prefix=bytes(100 + SET_BYTES * near), data_start=100)
        self.manifest = SimpleNamespace(segmentation=SimpleNamespace(alignment=1))
        self.kept: list[int] = []
        self.bad: dict[int, int] = {}

    def count(self) -> None:
        self.retries += 1

    def set_table(self, quality: str) -> list[Any]:
        assert quality == "q"
        return [SimpleNamespace(offset=SET_BYTES * n, size_bytes=SET_BYTES) for n in range(10)]

    def has_set(self, quality: str, index: int) -> bool:
        assert quality == "q"
        return index in self.kept

    def quantisation_set(self, quality: str, index: int, data: bytes) -> None:
        assert quality == "q"
        assert len(data) == SET_BYTES
        if self.bad.get(index, 0):
            self.bad[index] -= 1
            raise kvformat.InvalidError("set.digest", "damaged")
        self.kept.append(index)


class Beside:
    """Requests that are out: first set and number of sets, and how many were taken."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.taken = 0
        self.ended = 0

    def start(self, pieces: Sequence[Piece]) -> Any:
        self.requests.append(((pieces[0].offset - 100) // SET_BYTES, len(pieces)))
        left = list(pieces)

        def take() -> Data:
            self.taken += 1
            return bytes(left.pop(0).size_bytes)

        return SimpleNamespace(take=take)

    def end(self, transfer: object) -> None:
        assert transfer is not None
        self.ended += 1

    def fetch(self, pieces: Sequence[Piece]) -> list[Data]:
        transfer = self.start(pieces)
        self.end(transfer)
        return [transfer.take() for _ in pieces]


def window(*sets: int) -> list[Wish]:
    """A segment for each set."""
    track: Any = SimpleNamespace(quality="q")
    records: list[Any] = [SimpleNamespace(set_index=number) for number in sets]
    return [Wish(track, record) for record in records]


def ahead(artifact: Artifact) -> tuple[SetsAhead, Beside]:
    beside = Beside()
    made: Any = SetsAhead
    return made(artifact, beside), beside


def test_sets_of_the_prefix_need_no_request() -> None:
    artifact = Artifact(near=10)
    sets, beside = ahead(artifact)
    wishes = window(3, NO_SET, 4, 3)
    sets.begin(wishes)
    for wish in wishes:
        sets.ready(wish)
    assert (artifact.kept, beside.requests) == ([3, 4], [])


def test_a_busy_link_carries_the_first_segment_first() -> None:
    artifact = Artifact(near=2)
    sets, beside = ahead(artifact)
    wishes = window(*range(10))
    sets.begin(wishes)
    assert beside.requests == []
    for number, wish in enumerate(wishes):
        sets.ready(wish)
        assert beside.requests == [(2, 8)]
        assert artifact.kept == list(range(number + 1))
        assert beside.taken == max(0, number - 1)
    assert beside.ended == 1


@pytest.mark.parametrize(
    ("traffic", "first"), [(DISTANT, 0), (SLOW, 5)], ids=["distant", "needed first"]
)
def test_the_request_goes_out_at_once(traffic: Traffic, first: int) -> None:
    artifact = Artifact(near=2, traffic=traffic)
    sets, beside = ahead(artifact)
    wishes = window(first, *range(10))
    sets.begin(wishes)
    assert (beside.requests, beside.taken) == ([(2, 8)], 0)
    sets.ready(wishes[0])
    assert artifact.kept == ([0] if first == 0 else [2, 3, 4, 5])


def test_later_windows_ask_only_for_what_no_request_is_out_for() -> None:
    artifact = Artifact(near=0, traffic=DISTANT)
    sets, beside = ahead(artifact)
    sets.begin(window(0, 1, 2))
    sets.begin(window(1, 2, 3))
    assert beside.requests == [(0, 3), (3, 1)]
    sets.ready(window(3)[0])
    assert artifact.kept == [3]
    sets.ready(window(2)[0])
    assert artifact.kept == [3, 0, 1, 2]
    sets.begin(window(0, 3))
    assert (len(beside.requests), beside.ended) == (2, 2)


@pytest.mark.parametrize("near", [0, 10])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_damaged_set_is_asked_for_once_more_where_it_came_over_a_network(
    near: int, remote: bool, times: int
) -> None:
    artifact = Artifact(near=near, traffic=DISTANT, remote=remote)
    artifact.bad = {1: times}
    sets, _ = ahead(artifact)
    wishes = window(0, 1, 2)
    sets.begin(wishes)
    for wish in wishes:
        sets.ready(wish)
    whole = remote and times == 1
    assert artifact.retries == int(remote)
    assert artifact.kept == ([0, 1, 2] if whole else [0, 2])
    assert list(sets.damaged) == ([] if whole else [("q", 1)])
