"""The longest stored prefix, without a listing. Pure: a predicate in, a number out.

**Grid.** Tokens form blocks of 256 (spec 6.2); the state after block i has the name h(i), which
depends on every token before it. *Cells* are runs of ``cell_blocks`` blocks E, E in 1, 2, 4, 8, 16.
An *extent* starts at the start of a cell and ends inside or at the end of that cell, so that the
extents of a prefix follow from its length alone: those at h(E), h(2E), ... and the last one.

**Names.** On a dense grid (``g``) an extent [kE, e) is found under each of h(kE + 1) to h(e), since
full attention serves every shorter prefix. On a sparse grid (``s``), for layers with a window or
a state, which serve no shorter prefix, and for storage without links, an extent is found only
under h(e), and its length is one of 1, 2, 4, ..., E.

**Invariants** that the store keeps: (1) an extent is published only while its parent is present;
(2) the names of a dense extent appear in ascending order and go in descending order; (3) eviction
takes the longest-unused first and, of equals, the later end first, while every use of an extent
marks all extents before it with the same time. So the ends of cells that are present are h(E), ...,
h(mE) without a gap, and so are the names inside one dense cell.

**Bound.** For n blocks, ``longest_prefix`` asks for at most ``probe_limit(n)`` = max(1, 2 log2(n))
names. It first searches the M = n // E ends of cells by halving: ceil(log2(M + 1)) questions. Then
it looks into the one cell that follows. It holds r <= min(E - 1, n - kE) further names: on a dense
grid ceil(log2(r + 1)) questions, on a sparse one at most floor(log2(r)) + 1, from the longest down.
Each is at most ceil(log2(r + 1)), because floor(log2(r)) + 1 = ceil(log2(r + 1)) for r >= 1.
For n < E the first search asks nothing, r = n, and ceil(log2(n + 1)) <= 2 log2(n) for n >= 2.
For n >= E, ceil(log2(M + 1)) = floor(log2(M)) + 1 with M <= n / E, and the second part asks at
most log2(E), so the sum is at most log2(n) + 1 <= 2 log2(n) for n >= 2. For n = 1 it is one.

Where an invariant is broken, by clocks that differ or a crash in a bad moment, the answer may be
shorter than what is stored, or name a prefix with a hole. It is never wrong: loading checks each
extent and ends in front of the hole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Present = Callable[[int], bool]
"""Whether the state after so many blocks has a name."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of ``cell_blocks`` blocks; ``dense`` names every block boundary of an extent."""

    cell_blocks: int
    dense: bool

    @property
    def label(self) -> str:
        """Its part of a namespace: ``g4``, ``s16``."""
        return f"{'g' if self.dense else 's'}{self.cell_blocks}"

    def start_of(self, end: int) -> int:
        """The block at which an extent starts that serves the state ``end`` >= 1."""
        return (end - 1) // self.cell_blocks * self.cell_blocks

    def ends(self, end: int) -> tuple[int, ...]:
        """The states under which the extents of the prefix of ``end`` blocks are found."""
        whole = end // self.cell_blocks
        cells = tuple(self.cell_blocks * number for number in range(1, whole + 1))
        return cells if end % self.cell_blocks == 0 else (*cells, end)

    def longest_end(self, start: int, blocks: int) -> int:
        """The largest end of an extent at cell start ``start`` when ``blocks`` states exist.

        It is ``start`` where there is none.
        """
        length = min(self.cell_blocks, blocks - start)
        if length <= 0:
            return start
        return start + (length if self.dense else 1 << (length.bit_length() - 1))

    def worth_writing(self, start: int, end: int, present: int) -> bool:
        """Whether to write [start, end) where the cell is stored up to ``present`` already.

        Only at the end of the cell or twice as long as what is there: a prompt that grows by
        small steps is then written less than twice, never once per step.
        """
        if end <= present:
            return False
        return end - start == self.cell_blocks or end - start >= 2 * (present - start)


def longest_prefix(blocks: int, grid: Grid, present: Present) -> int:
    """The longest stored prefix of a request of ``blocks`` whole blocks, in blocks."""
    size = grid.cell_blocks
    cells = _last(0, blocks // size, lambda cell: present(cell * size))
    start = cells * size
    rest = min(size - 1, blocks - start)
    if grid.dense:
        return _last(start, start + rest, present)
    length = 1 << (rest.bit_length() - 1) if rest else 0
    while length:
        if present(start + length):
            return start + length
        length //= 2
    return start


def _last(low: int, high: int, holds: Present) -> int:
    """The largest number in [low, high] up to which ``holds`` is true; ``low`` is taken to be."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def probe_limit(blocks: int) -> int:
    """The most questions that ``longest_prefix`` asks for so many blocks."""
    return 0 if blocks < 1 else max(1, math.floor(2 * math.log2(blocks)))
