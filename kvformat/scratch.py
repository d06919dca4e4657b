"""Memory that threads reuse, and transposition that does not fight the processor's cache.

Both exist for speed only: fresh pages cost as much as the arithmetic on them, and a transposition
that walks memory at a power of two evicts its own cache lines and is 2 to 5 times slower.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LINE_BYTES: Final = 64
_ROWS: Final = 256
"""Lines that stay in the first-level cache while a block of a transposition uses them up."""
_COLUMNS: Final = 4096


class Scratch(threading.local):
    """Reusable memory of one thread, by purpose; grows to the largest request seen."""

    def __init__(self) -> None:
        self.pool: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, kind: type[np.generic] | np.dtype[Any], *shape: int) -> Array:
        """An uninitialised C-contiguous array; valid until ``name`` is taken again."""
        dtype = np.dtype(kind)
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        held = self.pool.get(name)
        if held is None or held.size < size:
            held = self.pool[name] = np.empty(size, np.uint8)
        return held[:size].view(dtype).reshape(shape)


scratch: Final = Scratch()


def transpose(source: Array, out: Array) -> None:
    """``out[j, i] = source[i, j]`` for arrays of one dtype, their last axis contiguous.

    Blocks of rows go through a copy whose rows lie an odd number of cache lines apart.
    """
    rows, columns = source.shape
    width = min(columns, _COLUMNS)
    lines = -(-width * source.itemsize // _LINE_BYTES) | 1
    shape = min(rows, _ROWS), lines * _LINE_BYTES // source.itemsize
    padded = scratch.take("transpose", source.dtype, *shape)
    for row in range(0, rows, _ROWS):
        for column in range(0, columns, _COLUMNS):
            part = source[row : row + _ROWS, column : column + _COLUMNS]
            block = padded[: part.shape[0], : part.shape[1]]
            np.copyto(block, part)
            np.copyto(out[column : column + _COLUMNS, row : row + _ROWS], block.T)
