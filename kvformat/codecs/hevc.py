"""Codec ``hevc``: one plane per layer, pictures laid out as the segment's layout says (10.4)."""

from __future__ import annotations

import numpy as np

from kvformat.codecs import bitstream
from kvformat.codecs.base import Bytes, Decoded, Payload, SegmentShape
from kvformat.layout import FILLER, Layout, filler_is_clean, gather, place
from kvformat.scratch import scratch, transpose


def ranked_layer(integers: Bytes, shape: SegmentShape, layer: int) -> Bytes:
    """The integers of one layer ``[T, H * D]`` in the stored order of columns."""
    q: Bytes = integers[layer].reshape(shape.tokens, shape.channels)
    if shape.order is None:
        return q
    # Two transpositions and a choice of rows take a fifth of the time of a choice of columns.
    heads = np.arange(shape.heads, dtype=np.intp)[:, None] * shape.head_dim
    columns = (shape.order[layer].astype(np.intp) + heads).reshape(-1)
    turned = scratch.take("turned", np.uint8, shape.channels, shape.tokens)
    transpose(q, turned)
    ranked = np.empty_like(q)
    transpose(turned[columns], ranked)
    return ranked


def make_planes(integers: Bytes, shape: SegmentShape, layout: Layout) -> Bytes:
    """The pictures ``[F, 3, height, width]`` of a segment."""
    planes = np.full(
        (layout.frames, bitstream.PLANES, layout.height, layout.width), FILLER, np.uint8
    )
    for layer in range(shape.layers):
        place(layout, ranked_layer(integers, shape, layer), planes[:, layer])
    return planes


def preset_for(layout: Layout) -> str:
    """The encoder preset that pays for this kind of picture (measured, see the rationale)."""
    folded = layout.order == "raster" and layout.fold > 1
    return "flat" if folded else bitstream.DEFAULT_PRESET


class HevcCodec:
    """Lossless HEVC through PyAV: libx265 to encode, FFmpeg's decoder to decode."""

    name = "hevc"

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """An Annex B stream."""
        layout = _layout(shape)
        planes = make_planes(integers, shape, layout)
        return bitstream.encode_pictures(planes, preset_for(layout))

    def decode(
        self, payload: Payload, shape: SegmentShape, where: str, *, strict: bool = False
    ) -> Decoded:
        """The integers in rank order; ``clean`` tells whether filler and unused planes are 128."""
        layout = _layout(shape)
        planes = bitstream.decode_pictures(
            payload, layout.frames, layout.width, layout.height, where
        )
        out = np.empty((shape.layers, shape.tokens, shape.channels), np.uint8)
        for layer in range(shape.layers):
            gather(layout, planes[:, layer], shape.tokens, shape.channels, out[layer])
        clean = not strict or _is_clean(planes, shape, layout)
        return Decoded(out.reshape(shape.integers_shape), ranked=True, clean=clean)

    def encoder(self) -> str:
        """libx265 inside PyAV."""
        return bitstream.encoder_name()

    def working_bytes(self, shape: SegmentShape) -> int:
        """x265 takes 7 times the picture for one frame, up to 37 times for many small ones."""
        layout = _layout(shape)
        return 3 * layout.width * layout.height * (8 + 4 * min(layout.frames, 8))


def _layout(shape: SegmentShape) -> Layout:
    if shape.layout is None:
        raise ValueError("the hevc codec needs a layout")
    return shape.layout


def _is_clean(planes: Bytes, shape: SegmentShape, layout: Layout) -> bool:
    used = all(
        filler_is_clean(layout, planes[:, layer], shape.tokens, shape.channels)
        for layer in range(shape.layers)
    )
    return used and bool((planes[:, shape.layers :] == FILLER).all())
