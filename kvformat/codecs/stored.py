"""Codec ``stored``: the integers as they are (spec section 10.2)."""

from __future__ import annotations

import numpy as np

from kvformat.codecs.base import Bytes, Decoded, Payload, SegmentShape
from kvformat.errors import InvalidError


class StoredCodec:
    """Plain bytes: the reference that needs no library."""

    name = "stored"

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """The integers themselves."""
        del shape
        return integers.tobytes()

    def decode(
        self, payload: Payload, shape: SegmentShape, where: str, *, strict: bool = False
    ) -> Decoded:
        """A view of ``payload``."""
        del strict
        if len(payload) != shape.integers_bytes:
            raise InvalidError(
                "segment.payload",
                "the payload has the wrong length",
                where=where,
                expected=shape.integers_bytes,
                found=len(payload),
            )
        return Decoded(np.frombuffer(payload, np.uint8).reshape(shape.integers_shape))

    def encoder(self) -> str:
        """There is none."""
        return "none"

    def working_bytes(self, shape: SegmentShape) -> int:
        """One copy."""
        return shape.integers_bytes
