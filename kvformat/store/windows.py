"""Loading a hit of a model with windows or states into new arrays."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import RestoredGroup
from kvformat.groups import Group
from kvformat.store.faults import MissError
from kvformat.store.loading import Account, Deadline, Loader, Opened
from kvformat.store.results import Hit, Miss


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a group in one extent: positions [``start``, ``stop``)."""

    opened: Opened
    group: Group
    start: int
    stop: int


def load_all(loader: Loader, hit: Hit) -> tuple[dict[str, RestoredGroup], Account]:
    """All groups of the hit's end; with a fault, those of the last end in front of it.

    Every extent's end is one that was put, so the prefix in front of a bad extent can be served.
    """
    account = Account()
    deadline = Deadline(loader.options.load_deadline_s)
    with contextlib.ExitStack() as stack:
        stack.callback(deadline.stop)
        pieces = open_all(loader, hit, account, stack, deadline)
        while pieces:
            try:
                groups = _restore(loader, pieces, account, deadline)
            except _ExtentError as error:
                bad = error.opened
                loader.fault(account, bad.extent, error.reason, late=deadline.expired)
                pieces = pieces[: pieces.index(bad)]
                continue
            except Exception as error:
                loader.fault(account, pieces[-1].extent, error, late=deadline.expired)
                break
            account.tokens = pieces[-1].extent.tokens[1]
            account.names += [item.extent.name for item in pieces]
            return groups, account
    return {}, account


def open_all(
    loader: Loader,
    hit: Hit,
    account: Account,
    stack: contextlib.ExitStack,
    deadline: Deadline,
) -> list[Opened]:
    """The objects of all cells up to the first fault; ``stack`` closes them."""
    pieces: list[Opened] = []
    ahead = loader.opened_ahead(hit.extents, hit.hashes)
    with contextlib.closing(ahead):
        for cell in ahead:
            stack.callback(cell.close)
            pieces += cell.pieces
            if cell.error is not None or deadline.expired:
                error = cell.error or MissError(Miss.SLOW, "the time for this load is over")
                loader.fault(account, cell.extent, error, late=deadline.expired)
                break
    return pieces


class _ExtentError(Exception):
    def __init__(self, opened: Opened, reason: Exception) -> None:
        super().__init__(str(reason))
        self.opened, self.reason = opened, reason


def _restore(
    loader: Loader, opened: list[Opened], account: Account, deadline: Deadline
) -> dict[str, RestoredGroup]:
    result: dict[str, RestoredGroup] = {}
    for group in opened[-1].artifact.groups:
        pieces = _pieces(opened, group, loader.scope.window_tokens)
        array: NDArray[Any] | None = None
        start = pieces[0].start
        length = pieces[-1].stop - start
        for piece in pieces:
            if array is None:
                shape = (len(group.layers), length, group.heads, group.head_dim)
                array = np.empty(shape, group.numpy_dtype)
            _read(piece, array[:, piece.start - start : piece.stop - start], account, deadline)
        if array is not None:
            place = opened[-1].extent.tokens[1] if group.tokens.kind == "state" else start
            result[group.name] = RestoredGroup(group, array, group.layers, place, group.head_start)
    return result


def _pieces(opened: list[Opened], group: Group, window_tokens: int | None) -> list[Piece]:
    """Where the group's tokens lie, in ascending order."""
    last = opened[-1]
    if group.tokens.kind == "state":
        return [Piece(last, group, 0, 1)]
    end = last.extent.tokens[1]
    least = 0
    if group.tokens.kind == "window" and window_tokens is not None:
        least = max(0, end - window_tokens)
    found: list[Piece] = []
    for item in reversed(opened):
        same = next(
            g for g in item.artifact.groups if g.role == group.role and g.layers == group.layers
        )
        first, stop = item.extent.tokens
        start = max(first + same.tokens.held_start, least)
        if start < stop:
            found.append(Piece(item, same, start, stop))
        if start > first or first <= least:
            break
    return found[::-1]


def _read(piece: Piece, out: NDArray[Any], account: Account, deadline: Deadline) -> None:
    first = piece.opened.extent.tokens[0]
    tokens = (piece.start - first, piece.stop - first)
    if piece.group.tokens.kind == "state":
        tokens = (0, piece.opened.extent.tokens[1] - first)
    try:
        report = piece.opened.artifact.read_into(
            {piece.group.name: out},
            tokens=tokens,
            layers=list(piece.group.layers),  # a tuple of two would be an interval
            roles=[piece.group.role],
            track=piece.opened.track.name,
            allow_partial=True,
            cancellation=deadline.cancellation,
        )
    except Exception as error:
        raise _ExtentError(piece.opened, error) from error
    account.add(piece.opened.artifact, piece.opened.track, report)
