"""Codec ``zstd``: rows of like variance, entropy-coded by zstd (spec section 10.3)."""

from __future__ import annotations

import numpy as np
import zstandard

from kvformat.codecs import zstd_codec
from kvformat.codecs.base import Bytes, Decoded, Payload, SegmentShape


class ZstdCodec:
    """zstd as a Huffman coder over channel-major rows."""

    name = "zstd"

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """The frames of all rows."""
        return zstd_codec.encode_rows(to_rows(integers, shape), run=shape.channels)

    def decode(
        self, payload: Payload, shape: SegmentShape, where: str, *, strict: bool = False
    ) -> Decoded:
        """The integers, a view of the decoded rows."""
        del strict
        rows = shape.layers * shape.channels * max(shape.item_bytes, 1)
        return from_rows(zstd_codec.decode_rows(payload, rows, shape.tokens, where), shape)

    def encoder(self) -> str:
        """The zstd library."""
        return f"zstd {'.'.join(str(part) for part in zstandard.ZSTD_VERSION)}"

    def working_bytes(self, shape: SegmentShape) -> int:
        """The rows and the frames."""
        return 3 * shape.integers_bytes


def to_rows(integers: Bytes, shape: SegmentShape) -> Bytes:
    """Rows ``[R, T]`` in ``[layer, rank, head]`` order, exact ones ``[layer, byte, dim, head]``."""
    if shape.item_bytes:
        rows = integers.transpose(0, 4, 3, 2, 1)
    else:
        rows = integers.transpose(0, 3, 2, 1)
        if shape.order is not None:
            heads = np.arange(shape.heads)
            rows = np.stack(
                [
                    layer[order.T.astype(np.intp), heads]
                    for layer, order in zip(rows, shape.order, strict=True)
                ]
            )
    return np.ascontiguousarray(rows).reshape(-1, shape.tokens)


def from_rows(rows: Bytes, shape: SegmentShape) -> Decoded:
    """The inverse of ``to_rows``, without a copy."""
    dims, heads = shape.head_dim, shape.heads
    if shape.item_bytes:
        view = rows.reshape(shape.layers, shape.item_bytes, dims, heads, shape.tokens)
        return Decoded(view.transpose(0, 4, 3, 2, 1))
    view = rows.reshape(shape.layers, dims, heads, shape.tokens)
    return Decoded(view.transpose(0, 3, 2, 1), ranked=True)
