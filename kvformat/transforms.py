"""From the integers of a transformed group to values (spec section 9.5). Exact, and pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvformat.workers import single_threaded_blas

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

ROW_BUDGET: Final = 2**17
"""Largest sum of magnitudes of a matrix row: times 128 it is 2^24, where float32 integers end."""
CENTRE: Final = 128


@dataclass(frozen=True, slots=True)
class Rotation:
    """Pairs of dims that turn with the position; ``cosine``, ``sine`` float64 ``[n]`` of a step."""

    pairing: str
    cosine: Float64
    sine: Float64

    def table(self, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
        """Cosine and sine float32 ``[T, n]`` of consecutive positions (TRF-7)."""
        if not len(positions):
            return _table(self.cosine.tobytes(), self.sine.tobytes(), 0, 0)
        first = int(positions[0])
        return _table(self.cosine.tobytes(), self.sine.tobytes(), first, len(positions))

    def turn(self, z: Float32, positions: NDArray[np.int64], *, back: bool = False) -> None:
        """Rotate ``z`` float32 ``[T, H, D]`` in place; ``back`` is the inverse up to rounding."""
        n = len(self.cosine)
        half = self.pairing == "half"
        u, v = (slice(n), slice(n, 2 * n)) if half else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        first = int(positions[0]) if len(positions) else 0
        along, across = _rows(
            self.cosine.tobytes(), self.sine.tobytes(), first, len(positions), half
        )
        pairs = z[..., : 2 * n]
        others = np.empty_like(pairs)
        others[..., u], others[..., v] = pairs[..., v], pairs[..., u]
        # a + (-b) is a - b to the bit, and whole rows are twice as fast as halves
        np.multiply(others, across, out=others)
        np.multiply(pairs, along, out=pairs)
        (np.subtract if back else np.add)(pairs, others, out=pairs)


@lru_cache(maxsize=16)
def _table(cosine: bytes, sine: bytes, first: int, count: int) -> tuple[Float32, Float32]:
    """By binary powers of one step, for ``count`` positions; layers mostly share it."""
    positions = np.arange(first, first + count)
    c, s = np.frombuffer(cosine), np.frombuffer(sine)
    x = np.ones((count, len(c)))
    y = np.zeros_like(x)
    for bit in range(int(positions.max(initial=0)).bit_length()):
        rows = (positions >> bit & 1).astype(bool)
        a, b = x[rows], y[rows]
        x[rows], y[rows] = a * c - b * s, a * s + b * c
        c, s = c * c - s * s, c * s + c * s
    return x.astype(np.float32), y.astype(np.float32)


@lru_cache(maxsize=8)
def _rows(
    cosine: bytes, sine: bytes, first: int, count: int, half: bool
) -> tuple[Float32, Float32]:
    """Factors ``[T, 1, 2 n]`` of a row's dims, and of those that they are paired with."""
    c, s = _table(cosine, sine, first, count)
    axis = 1 if half else 2
    shape = (count, 1, 2 * c.shape[1])
    return np.stack((c, c), axis).reshape(shape), np.stack((-s, s), axis).reshape(shape)


@dataclass(frozen=True, slots=True)
class LayerTransform:
    """One layer of one role: ``mean`` and ``row_scale`` float32 ``[C]``, ``slots`` ``[C, C]``.

    ``slots`` is the matrix as float32, row k for slot k: the transpose of the stored one.
    """

    mean: Float32
    row_scale: Float32
    slots: Float32
    rotation: Rotation | None = None

    def values(
        self,
        q: NDArray[np.uint8],
        scale: np.float32,
        token_scale: Float32 | None,
        positions: NDArray[np.int64],
    ) -> Float32:
        """Values float32 ``[T, H, D]`` of integers uint8 ``[T, H, D]``, not yet clamped.

        ``token_scale`` is float32 ``[T]`` or None.
        """
        tokens, heads, head_dim = q.shape
        u = q.transpose(0, 2, 1).reshape(tokens, heads * head_dim).astype(np.float32)
        np.subtract(u, np.float32(CENTRE), out=u)
        with single_threaded_blas:
            z = u @ self.slots
        np.multiply(z, self.row_scale, out=z)
        np.multiply(z, scale, out=z)
        if token_scale is not None:
            np.multiply(z, token_scale[:, None], out=z)
        np.add(z, self.mean, out=z)
        x = z.reshape(tokens, heads, head_dim)
        if self.rotation is not None:
            self.rotation.turn(x, positions)
        return x
