"""The interface of all codecs: integers of one segment to a payload and back (spec section 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvformat.layout import Layout

Bytes = NDArray[np.uint8]
Payload = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What a codec must know of a segment besides its bytes.

    ``item_bytes`` is 0 for the integers of a quantised group and the size of the dtype for an
    exact one. ``order`` is rank to dim, ``[layers, heads, head_dim]``, or None for equal.
    """

    layers: int
    tokens: int
    heads: int
    head_dim: int
    item_bytes: int = 0
    order: NDArray[Any] | None = None
    layout: Layout | None = None

    @property
    def channels(self) -> int:
        """Channels of one layer."""
        return self.heads * self.head_dim

    @property
    def integers_shape(self) -> tuple[int, ...]:
        """``[layer, token, head, dim]``, with a byte axis behind for an exact group."""
        shape = (self.layers, self.tokens, self.heads, self.head_dim)
        return (*shape, self.item_bytes) if self.item_bytes else shape

    @property
    def integers_bytes(self) -> int:
        """Length of the integers."""
        return self.layers * self.tokens * self.channels * max(self.item_bytes, 1)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Integers uint8 of ``SegmentShape.integers_shape``, in any memory order.

    ``ranked`` tells that the dim axis counts ranks instead of dims. ``clean`` tells whether
    everything that is no integer, such as filler, has the value that the spec wants; it is
    computed only when asked for.
    """

    integers: Bytes
    ranked: bool = False
    clean: bool = True


class Codec(Protocol):
    """One codec. Implementations are stateless and safe to share between threads."""

    name: str

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """The payload of C-contiguous ``integers`` in original dim order."""

    def decode(
        self, payload: Payload, shape: SegmentShape, where: str, *, strict: bool = False
    ) -> Decoded:
        """The integers in ``payload``; ``strict`` also computes ``clean``.

        Raises ``InvalidError`` and nothing else for any bytes; ``UnsupportedError`` when the
        library behind the codec is missing.
        """

    def encoder(self) -> str:
        """Name and version of the encoder, informative."""

    def working_bytes(self, shape: SegmentShape) -> int:
        """About how much memory encoding one segment takes, beyond its integers."""
