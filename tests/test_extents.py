"""Laws of ``plan_extents`` and ``Ledger``, and of what a valid prefix means."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.errors import InvalidError
from kvformat.extents import GAP_BYTES, WASTE, plan_extents
from kvformat.groups import Cell, Extent, Group
from kvformat.selection import GroupSelection
from kvformat.storage import Piece
from kvformat.validity import Ledger
from tests.requirements import covers

SIZES = st.one_of(st.integers(0, 40), st.integers(1, 3 * GAP_BYTES))
GAPS = st.one_of(st.integers(0, 3), st.integers(0, 2 * GAP_BYTES))


@st.composite
def ascending(draw: st.DrawFn) -> list[Piece]:
    """Objects of a file, which never overlap."""
    place, result = draw(st.integers(0, 1000)), []
    for gap, size in draw(st.lists(st.tuples(GAPS, SIZES), max_size=30)):
        place += gap
        result.append(Piece(place, size))
        place += size
    return result


@st.composite
def wanted(draw: st.DrawFn) -> list[Piece]:
    """Some of the objects of a file, in any order."""
    pieces = draw(ascending())
    return pieces if draw(st.booleans()) else list(draw(st.permutations(pieces)))


def waste(runs: list[list[Piece]]) -> int:
    """Bytes that are fetched and dropped."""
    return sum(after.offset - before.stop for run in runs for before, after in pairwise(run))


@covers("REQ-12")
@given(wanted())
def test_every_piece_is_in_one_run_and_the_order_is_kept(pieces: list[Piece]) -> None:
    runs = plan_extents(pieces)
    assert [piece for run in runs for piece in run] == pieces
    assert all(runs)


@covers("REQ-12")
def test_padding_is_no_waste() -> None:
    pieces = [Piece(4096 * number, 10) for number in range(20)]
    assert len(plan_extents(pieces)) == 20
    assert plan_extents(pieces, alignment=4096) == [pieces]
    apart = [Piece(8192 * number, 10) for number in range(20)]
    assert len(plan_extents(apart, alignment=4096)) == 20


@covers("REQ-12")
@given(wanted())
def test_runs_ascend_and_waste_little(pieces: list[Piece]) -> None:
    runs = plan_extents(pieces)
    for run in runs:
        for before, after in pairwise(run):
            assert 0 <= after.offset - before.stop <= GAP_BYTES
    assert waste(runs) <= WASTE * sum(piece.size_bytes for piece in pieces)


@covers("REQ-12")
@given(ascending())
def test_neighbours_are_always_joined(pieces: list[Piece]) -> None:
    runs = plan_extents(pieces)
    for before, after in pairwise(runs):
        assert before[-1].stop < after[0].offset


@given(ascending(), st.integers(1, 4 * GAP_BYTES))
def test_no_request_is_longer_than_allowed(pieces: list[Piece], request_bytes: int) -> None:
    runs = plan_extents(pieces, request_bytes=request_bytes)
    assert [piece for run in runs for piece in run] == pieces
    for run in runs:
        assert len(run) == 1 or run[-1].stop - run[0].offset <= request_bytes


@given(ascending())
def test_a_gap_that_is_left_would_have_wasted_too_much(pieces: list[Piece]) -> None:
    runs = plan_extents(pieces)
    left = int(WASTE * sum(piece.size_bytes for piece in pieces)) - waste(runs)
    for before, after in pairwise(runs):
        assert after[0].offset - before[-1].stop > min(left, GAP_BYTES)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], []),
        ([(0, 10)], [1]),
        ([(0, 10), (10, 10)], [2]),
        ([(0, 100), (104, 100)], [2]),
        ([(0, 100), (109, 100)], [1, 1]),
        ([(0, 1000), (1030, 10), (1090, 10)], [2, 1]),
        ([(10, 10), (0, 10)], [1, 1]),
        ([(0, 10), (0, 10)], [1, 1]),
    ],
)
def test_examples(pieces: list[tuple[int, int]], expected: list[int]) -> None:
    assert [len(run) for run in plan_extents([Piece(*item) for item in pieces])] == expected


# The ledger, against a model that paints tokens.

TOKENS = 24


@dataclass(frozen=True)
class Made:
    """A selection of groups and the segments that hold it, in the order of the read."""

    selections: tuple[GroupSelection, ...]
    tokens: tuple[int, int]
    records: list[Any]
    lengths: tuple[int, ...] | None


@st.composite
def reads(draw: st.DrawFn) -> Made:
    """Groups of all kinds cut into segments, a token interval, some valid lengths."""
    begin = draw(st.integers(0, TOKENS - 1))
    end = draw(st.integers(begin + 1, TOKENS))
    selections, records = [], []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["all", "all", "window", "state"]))
        layers = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
        held = draw(st.integers(0, TOKENS)) if kind == "window" else 0
        extent = Extent(kind, held, TOKENS, (4,) if kind == "state" else ())
        heads = draw(st.integers(1, 2))
        group = Group(f"g{number}", "key", "float16", layers, heads, 4, heads, 0, extent)
        chosen = draw(st.sets(st.integers(0, len(layers) - 1), min_size=1))
        span = (0, 1) if kind == "state" else (max(begin, held), max(end, begin, held))
        selection = GroupSelection(number, group, tuple(sorted(chosen)), (0, heads), span)
        selections.append(selection)
        count = 1 if kind == "state" else TOKENS
        step = draw(st.sampled_from([3, 8, TOKENS]))
        for start in range(held, count, step):
            size = min(step, count - start)
            if not (start < span[1] and start + size > span[0]):
                continue
            for layer in range(0, len(layers), 2):
                run = range(layer, min(layer + 2, len(layers)))
                if chosen & set(run):
                    for head in range(heads):
                        cell = Cell(number, layer, len(run), head, 1, start, size)
                        records.append(SimpleNamespace(cell=cell))
    if draw(st.booleans()):
        records = list(draw(st.permutations(records)))
    lengths = draw(st.none() | st.sets(st.integers(1, TOKENS), min_size=1, max_size=4).map(sorted))
    return Made(tuple(selections), (begin, end), records, lengths and tuple(lengths))


def ends_of(made: Made, missing: list[Any]) -> dict[int, int]:
    """For each layer, up to where no token lacks anything: token by token."""
    begin, end = made.tokens
    ends = {}
    for selection in made.selections:
        for index in selection.layers:
            layer = selection.group.layers[index]
            bad = set()
            for record in missing:
                cell = record.cell
                if cell.group == selection.index and 0 <= index - cell.layer_index < (
                    cell.layer_count
                ):
                    if selection.group.tokens.kind == "state":
                        bad |= set(range(begin, end))
                    else:
                        bad |= set(range(cell.token_start, cell.token_start + cell.token_count))
            good = begin
            while good < end and good not in bad:
                good += 1
            ends[layer] = min(ends.get(layer, end), good)
    return ends


def prefix_of(made: Made, ends: dict[int, int]) -> int:
    """What an engine may use of it."""
    valid = min(ends.values())
    if made.lengths is None or valid == made.tokens[1]:
        return valid
    return max((n for n in made.lengths if made.tokens[0] < n <= valid), default=made.tokens[0])


def ledger_of(made: Made) -> Ledger:
    return Ledger(made.selections, made.tokens, made.records, made.lengths)


@given(reads(), st.data())
def test_validity_is_that_of_a_model_that_paints_tokens(made: Made, data: st.DataObject) -> None:
    ledger = ledger_of(made)
    missing = list(made.records)
    fates = data.draw(
        st.lists(st.booleans(), min_size=len(missing), max_size=len(missing)), label="good"
    )
    stop = data.draw(st.integers(0, len(missing)), label="stop")
    error = InvalidError("segment.digest", "damaged")
    failures = 0
    for record, good in list(zip(made.records, fates, strict=True))[:stop]:
        if good:
            ledger.done(record)
            missing.remove(record)
        else:
            ledger.failed("t", record, error)
            failures += 1
        validity = ledger.validity()
        ends = ends_of(made, missing)
        assert dict(validity.layers) == ends
        assert validity.valid_end == prefix_of(made, ends)
        assert len(validity.failures) == failures
        assert validity.complete == (not missing)
    untried = made.records[stop:]
    assert ledger.next_open() is (untried[0] if untried else None)


@given(reads(), st.data())
def test_growing_says_whether_the_rest_can_help(made: Made, data: st.DataObject) -> None:
    ledger = ledger_of(made)
    failed, waiting = [], list(made.records)
    error = InvalidError("segment.digest", "damaged")
    for record in made.records:
        if data.draw(st.booleans()):
            ledger.done(record)
        else:
            ledger.failed("t", record, error)
            failed.append(record)
        waiting.remove(record)
        now = min(ends_of(made, failed + waiting).values())
        best = min(ends_of(made, failed).values())
        if failed:
            assert ledger.growing() == (best > now)
        else:
            assert ledger.growing()


@given(reads(), st.data())
def test_a_layer_is_complete_once_its_last_segment_is_done(made: Made, data: st.DataObject) -> None:
    ledger = ledger_of(made)
    done: list[int] = []
    for record in data.draw(st.permutations(made.records)):
        ledger.done(record)
        done += ledger.completed(record)
    held = {s.group.layers[i] for s in made.selections for i in s.layers if _has(made, s, i)}
    assert set(done) == held
    ends = ledger.validity()
    assert ends.complete
    assert ends.valid_end == made.tokens[1]


def _has(made: Made, selection: GroupSelection, index: int) -> bool:
    return any(
        record.cell.group == selection.index
        and 0 <= index - record.cell.layer_index < record.cell.layer_count
        for record in made.records
    )


def test_failures_name_layers_and_tokens() -> None:
    group = Group("key", "key", "float16", (3, 5, 8), 1, 4, 1)
    selection = GroupSelection(0, group, (1, 2), (0, 1), (4, 20))
    record: Any = SimpleNamespace(cell=Cell(0, 0, 3, 0, 1, 8, 8))
    ledger = Ledger([selection], (4, 20), [record], None)
    error = InvalidError("segment.digest", "damaged")
    ledger.failed("exact/zstd", record, error)
    (failure,) = ledger.validity().failures
    assert (failure.track, failure.group, failure.layers, failure.tokens, failure.error) == (
        "exact/zstd", "key", (5, 8), (8, 16), error,
    )  # fmt: skip
    assert dict(ledger.validity().layers) == {5: 8, 8: 8}
    assert np.array_equal(ledger.validity().tokens, (4, 20))
