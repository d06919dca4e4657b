"""The integer sum of a segment (INT-3): cheap enough for a kernel that decodes on a device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FACTOR: Final = 2_654_435_761
ROW: Final = 4096
"""Integers that share the second factor of their weights."""
_ROWS_AT_A_TIME: Final = 32


def factors(first: int, count: int) -> NDArray[np.uint64]:
    """h(first), h(first + 1), ...: odd, below 2^32."""
    z = np.arange(first, first + count, dtype=np.uint64) * np.uint64(FACTOR) % np.uint64(2**32)
    found: NDArray[np.uint64] = (z ^ (z >> np.uint64(15))) | np.uint64(1)
    return found


@lru_cache(maxsize=1)
def _columns() -> NDArray[np.float64]:
    return factors(0, ROW).astype(np.float64)


def integer_sum(integers: NDArray[Any]) -> int:
    """The sum of C-contiguous bytes, weighted by position, modulo 2^64.

    The sum over a row is below 255 * 2^32 * 2^12, so binary64 holds it exactly in any order.
    """
    flat = integers.reshape(-1).view(np.uint8)
    whole = len(flat) // ROW * ROW
    rows = flat[:whole].reshape(-1, ROW)
    totals = np.empty(len(rows) + 1, np.float64)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[start : start + _ROWS_AT_A_TIME]
        np.matmul(part.astype(np.float64), _columns(), out=totals[start : start + len(part)])
    rest = flat[whole:]
    totals[-1] = rest.astype(np.float64) @ _columns()[: len(rest)]
    weighted = totals.astype(np.uint64) * factors(ROW, len(totals))
    return int(weighted.sum(dtype=np.uint64))
