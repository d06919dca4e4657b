"""The longest stored prefix, without a listing. Pure: a predicate in, a number out.

**Grid.** Tokens form blocks of 256 (spec 6.2); the state after block i has the name h(i), which
depends on every token before it. *Cells* are runs of ``cell_blocks`` blocks E, E in 1, 2, 4, 8, 16.
An *extent* [a, e) starts where the stored part of its cell ended, or at the start of the cell, and
ends inside or at the end of the cell. It is found under h(e) and names its parent h(a). Nothing
that is stored is stored again when a prompt grows or branches.

**Names.** On a dense grid (``g``) an extent is found under each of h(a + 1) to h(e), since full
attention serves every shorter prefix. On a sparse grid (``s``), for layers with a window or a
state, which serve no shorter prefix, and for storage without links, it is found only under h(e),
and e is 1, 2, 4, ..., E blocks behind the start of the cell.

The ends of cells inside a prefix are names of extents. So a prefix is found cell by cell, all at
once, and only inside a cell from an extent to its parent.

**Invariants** that the store keeps: (1) an extent is published only while its parent is present;
(2) the names of a dense extent appear in ascending order and go in descending order; (3) eviction
takes the longest-unused first and, of equals, the later end first, while every use of an extent
marks all extents before it with the same time. So the ends of cells that are present are h(E), ...,
h(mE) without a gap, and so are the names inside one dense cell.

**Bound.** For n blocks, ``longest_prefix`` asks for at most ``probe_limit(n)`` = max(1, 2 log2(n))
names. It first searches the M = n // E ends of cells by halving: ceil(log2(M + 1)) questions. Then
it looks into the one cell that follows, at kE. It holds r <= min(E - 1, n - kE) further names: on a
dense grid ceil(log2(r + 1)) questions, on a sparse one at most floor(log2(r)) + 1, from the longest
down. Each is at most ceil(log2(r + 1)), because floor(log2(r)) + 1 = ceil(log2(r + 1)) for r >= 1.
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

    def cell_of(self, end: int) -> int:
        """The block at which the cell starts that the state ``end`` >= 1 ends in."""
        return (end - 1) // self.cell_blocks * self.cell_blocks

    def ends(self, end: int) -> tuple[int, ...]:
        """The last state of each cell of the prefix of ``end`` blocks."""
        whole = end // self.cell_blocks
        cells = tuple(self.cell_blocks * number for number in range(1, whole + 1))
        return cells if end % self.cell_blocks == 0 else (*cells, end)

    def next_end(self, start: int, blocks: int) -> int:
        """The end of an extent to write at ``start`` when ``blocks`` states exist.

        It is ``start`` where none fits.
        """
        cell = start // self.cell_blocks * self.cell_blocks
        length = min(self.cell_blocks, blocks - cell)
        if length <= 0:
            return start
        end = cell + (length if self.dense else 1 << (length.bit_length() - 1))
        return max(start, end)

    def names_in_cell(self, end: int) -> tuple[int, ...]:
        """The states up to ``end``, in its cell, that may have names; ascending."""
        cell = self.cell_of(end)
        if self.dense:
            return tuple(range(cell + 1, end + 1))
        lengths = (1 << power for power in range(self.cell_blocks.bit_length()))
        return tuple(cell + length for length in lengths if cell + length <= end)


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
