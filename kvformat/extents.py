"""From objects that are wanted to requests: which lie near enough to be fetched together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvformat.storage.base import Piece

GAP_BYTES: Final = 2**20
WASTE: Final = 0.04


def plan_extents(
    pieces: Sequence[Piece],
    *,
    request_bytes: int | None = None,
    gap_bytes: int = GAP_BYTES,
    alignment: int = 1,
) -> list[list[Piece]]:
    """Runs of pieces, in the order given, that one request each fetches.

    Neighbours are joined over gaps of at most ``gap_bytes``, the smallest gaps first, while all
    gaps together stay under ``WASTE`` of the bytes wanted (REQ-12). Padding up to ``alignment``
    is no waste. ``request_bytes`` cuts longer runs.
    """
    allowed = int(WASTE * sum(piece.size_bytes for piece in pieces))
    gaps = [after.offset - before.stop for before, after in pairwise(pieces)]
    joined = [False] * len(gaps)
    for index in sorted(range(len(gaps)), key=gaps.__getitem__):
        if 0 <= gaps[index] < alignment:
            joined[index] = True
        elif 0 <= gaps[index] <= min(allowed, gap_bytes):
            allowed -= gaps[index]
            joined[index] = True
    runs: list[list[Piece]] = []
    for index, piece in enumerate(pieces):
        near = index > 0 and joined[index - 1]
        if near and request_bytes is not None:
            near = piece.stop - runs[-1][0].offset <= request_bytes
        if near:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs
