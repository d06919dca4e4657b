"""Codec ``zstd``: rows of like variance, entropy-coded by zstd (spec section 10.3)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvformat.codecs import zstd_codec
from kvformat.codecs.base import Bytes, Decoded, Payload, SegmentShape
from kvformat.scratch import scratch, transpose

_UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class ZstdCodec:
    """zstd as a Huffman coder over channel-major rows."""

    name = "zstd"

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """The frames of all rows."""
        return zstd_codec.encode_rows(to_rows(integers, shape), run=shape.channels)

    def decode(
        self, payload: Payload, shape: SegmentShape, where: str, *, strict: bool = False
    ) -> Decoded:
        """The integers: of a quantised group a view of the decoded rows."""
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
    """Rows ``[R, T]`` in ``[layer, rank, head]`` order, exact ones ``[layer, byte, dim, head]``.

    The result is scratch memory of this thread: the next call overwrites it.
    """
    planes = max(shape.item_bytes, 1)
    rows = scratch.take("matrix", np.uint8, shape.layers, planes, shape.channels, shape.tokens)
    turned = scratch.take("turned", np.uint8, shape.channels, shape.tokens)
    for layer in range(shape.layers):
        channel_of_row = _channel_of_row(shape, layer)
        for plane in range(planes):
            transpose(_plane(integers[layer], shape, plane), turned)
            # "clip" lets take write straight into out; the indices are in range.
            np.take(turned, channel_of_row, axis=0, out=rows[layer, plane], mode="clip")
    return rows.reshape(-1, shape.tokens)


def _channel_of_row(shape: SegmentShape, layer: int) -> NDArray[np.intp]:
    """The channel, counted in ``[head, dim]`` order, that each row of a plane holds."""
    if shape.order is None:
        dims = np.arange(shape.head_dim)[:, None]
    else:
        dims = shape.order[layer].T.astype(np.intp)
    return np.asarray(dims + np.arange(shape.heads) * shape.head_dim, np.intp).reshape(-1)


def _plane(layer: Bytes, shape: SegmentShape, plane: int) -> Bytes:
    """One byte of every value, uint8 ``[T, H * D]``; a cast is faster than a strided copy."""
    flat = layer.reshape(shape.tokens, -1)
    kind = _UNSIGNED.get(shape.item_bytes)
    if kind is None:
        return flat
    whole = flat.view(kind)
    if plane:
        moved = scratch.take("moved", kind, *whole.shape)
        whole = np.right_shift(whole, kind.type(8 * plane), out=moved)
    out: Bytes = scratch.take("plane", np.uint8, *whole.shape)
    np.copyto(out, whole, casting="unsafe")
    return out


def from_rows(rows: Bytes, shape: SegmentShape) -> Decoded:
    """The inverse of ``to_rows``; of a quantised group a view in rank order."""
    if not shape.item_bytes:
        view = rows.reshape(shape.layers, shape.head_dim, shape.heads, shape.tokens)
        return Decoded(view.transpose(0, 3, 2, 1), ranked=True)
    out = np.empty(shape.integers_shape, np.uint8)
    planes = rows.reshape(shape.layers, shape.item_bytes, shape.channels, shape.tokens)
    for layer in range(shape.layers):
        _join(planes[layer], shape, out[layer].reshape(shape.tokens, -1))
    return Decoded(out)


def _join(planes: Bytes, shape: SegmentShape, out: Bytes) -> None:
    """Values ``[T, H * D * item]`` from the rows ``[item, H * D, T]`` of one layer."""
    kind: np.dtype[Any] = _UNSIGNED.get(shape.item_bytes, np.dtype(np.uint8))
    row_of_channel = np.argsort(_channel_of_row(shape, 0))
    total = scratch.take("joined", kind, shape.channels, shape.tokens)
    wide = scratch.take("moved", kind, shape.channels, shape.tokens)
    for plane in range(shape.item_bytes):
        np.copyto(wide if plane else total, planes[plane])
        if plane:
            np.left_shift(wide, kind.type(8 * plane), out=wide)
            np.bitwise_or(total, wide, out=total)
    transpose(total[row_of_channel], out.view(kind))
