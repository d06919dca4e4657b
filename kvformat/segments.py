"""One segment: stored bytes to restored values, in the order of checks of ORD-3.

Pure: bytes in, arrays out. The reader and the verifier both go through here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat import quant
from kvformat.codecs.base import Bytes, Codec, Decoded, SegmentShape
from kvformat.codecs.registry import CODECS
from kvformat.digests import Buffer, digest
from kvformat.errors import InvalidError
from kvformat.groups import Group
from kvformat.layout import Layout
from kvformat.sets import QuantisationSet, SideBlock, neutral_integers, parse_side
from kvformat.sums import integer_sum
from kvformat.tables import SegmentRecord
from kvformat.transforms import LayerTransform


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """What the bytes of a segment mean: its record, group, codec, layout and set.

    ``transforms`` are those of the segment's layers, for a transformed group (section 9.5);
    ``first_position`` is that of the artifact.
    """

    record: SegmentRecord
    group: Group
    codec: str
    layout: Layout | None
    quantisation: QuantisationSet | None
    where: str
    transforms: tuple[LayerTransform, ...] | None = None
    first_position: int = 0

    @property
    def heads(self) -> slice:
        """The segment's heads among those held."""
        start = self.record.cell.head_start
        return slice(start, start + self.record.cell.head_count)

    def order(self) -> NDArray[Any] | None:
        """Rank to dim of the segment's heads."""
        if self.quantisation is None or self.quantisation.order is None:
            return None
        return self.quantisation.order[:, self.heads]

    def shape(self) -> SegmentShape:
        """The shape for the codec."""
        cell = self.record.cell
        return SegmentShape(
            cell.layer_count,
            cell.token_count,
            cell.head_count,
            self.group.head_dim,
            0 if self.quantisation is not None else self.group.numpy_dtype.itemsize,
            self.order(),
            self.layout,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A decoded segment: integers, and the side block of a quantised group."""

    context: SegmentContext
    decoded: Decoded
    side: SideBlock | None


def check_stored(context: SegmentContext, data: Buffer) -> None:
    """Size and digest of the stored bytes."""
    record = context.record
    if len(data) != record.stored_bytes or digest(data) != record.digest:
        raise InvalidError(
            "segment.digest",
            "the segment is damaged",
            where=context.where,
            expected=record.digest.hex(),
            found=digest(data).hex(),
            next_step="Fetch the file again; the other segments may be good",
        )


def parse_side_block(context: SegmentContext, data: Buffer) -> SideBlock | None:
    """The side block in front of the payload, None for an exact group."""
    if context.quantisation is None:
        return None
    cell = context.record.cell
    return parse_side(
        memoryview(data)[: context.record.side_bytes],
        context.quantisation,
        tokens=cell.token_count,
        heads=cell.head_count,
        dtype=context.group.numpy_dtype,
        where=context.where,
    )


def decode_segment(
    context: SegmentContext, data: Buffer, *, strict: bool = False, codec: Codec | None = None
) -> Segment:
    """Digest, side block, payload: in this order (ORD-3).

    ``codec`` replaces the registered one, for a decoder in another process.
    """
    check_stored(context, data)
    side = parse_side_block(context, data)
    payload = memoryview(data)[context.record.side_bytes :]
    codec = codec or CODECS[context.codec]
    decoded = codec.decode(payload, context.shape(), context.where, strict=strict)
    return Segment(context, decoded, side)


def restore_into(segment: Segment, out: NDArray[Any], tokens: slice, part: PartOfSegment) -> None:
    """Restore ``part`` of the segment into ``out`` ``[L, T, H, D]`` of the group's dtype."""
    context = segment.context
    target = out[:, tokens]
    if context.quantisation is None:
        q = segment.decoded.integers[part.layers, part.tokens, part.heads]
        kind = target.dtype.itemsize
        raw = target.view(np.uint8).reshape(*target.shape[:3], context.group.head_dim, kind)
        raw[...] = q
        return
    item = context.quantisation
    if context.transforms is not None:
        _restore_transformed(segment, item, target, part)
    else:
        _restore_quantised(segment, item, target, part)
    if segment.side is not None:
        _patch(segment.side, target, part)


def _restore_transformed(
    segment: Segment, item: QuantisationSet, target: NDArray[Any], part: PartOfSegment
) -> None:
    """Section 9.5: values of all heads in float32, then those wanted."""
    context = segment.context
    first = context.first_position + context.record.cell.token_start
    positions = np.arange(first + part.tokens.start, first + part.tokens.stop)
    limit = np.float32(quant.MAX_FINITE[target.dtype])
    index = None if segment.side is None else segment.side.token_index
    transforms = context.transforms or ()
    for place, layer in enumerate(range(part.layers.start, part.layers.stop)):
        q = segment.decoded.integers[layer, part.tokens]
        token_scale = None if index is None else item.token_scale[index[layer, part.tokens]]
        x = transforms[layer].values(q, item.scale[layer, 0, 0], token_scale, positions)
        wanted = np.clip(x[:, part.heads], -limit, limit).reshape(len(x), -1)
        quant.store_float32(wanted, target[place])


def _restore_quantised(
    segment: Segment, item: QuantisationSet, target: NDArray[Any], part: PartOfSegment
) -> None:
    """Section 9.4, without patches."""
    context = segment.context
    q = segment.decoded.integers[part.layers, part.tokens, part.heads]
    heads = slice(context.heads.start + part.heads.start, context.heads.start + part.heads.stop)
    inverse = None
    if segment.decoded.ranked and item.order is not None:
        inverse = np.argsort(item.order[part.layers, heads], axis=-1)
    token_scale = None
    side = segment.side
    if side is not None and side.token_index is not None:
        token_scale = item.token_scale[side.token_index[part.layers, part.tokens]]
    quant.restore(
        q,
        target,
        scale=_heads(item.scale[part.layers], heads),
        zero=_heads(item.zero[part.layers], heads),
        bias=None if item.bias is None else item.bias[part.layers, heads],
        token_scale=token_scale,
        order=inverse,
    )


@dataclass(frozen=True, slots=True)
class PartOfSegment:
    """Slices of a segment's layers, tokens and heads, counted from its own first ones."""

    layers: slice
    tokens: slice
    heads: slice


def _heads(values: NDArray[Any], heads: slice) -> NDArray[Any]:
    return values if values.shape[1] == 1 else values[:, heads]


def _patch(side: SideBlock, target: NDArray[Any], part: PartOfSegment) -> None:
    """ARI-5: exact rows replace what the arithmetic gave."""
    for index, patches in enumerate(side.patches[part.layers]):
        mine = (patches.ordinals >= part.tokens.start) & (patches.ordinals < part.tokens.stop)
        if mine.any():
            ordinals = patches.ordinals[mine] - part.tokens.start
            target[index, ordinals] = patches.rows[mine][:, part.heads]


def canonical_integers(segment: Segment) -> Bytes:
    """The integers in original dim order, C-contiguous (section 10.1)."""
    q = segment.decoded.integers
    order = segment.context.order()
    if segment.decoded.ranked and order is not None:
        inverse = np.argsort(order, axis=-1)
        q = np.take_along_axis(q, inverse[:, None].astype(np.intp), axis=3)
    return np.ascontiguousarray(q)


def check_integers(segment: Segment, integers: Bytes | None = None) -> Bytes:
    """INT-1: the integer digest. Returns the canonical integers."""
    canonical = canonical_integers(segment) if integers is None else integers
    found = digest(canonical.reshape(-1).data)
    if found != segment.context.record.integer_digest:
        raise InvalidError(
            "segment.integers",
            "the decoded integers are wrong",
            where=segment.context.where,
            expected=segment.context.record.integer_digest.hex(),
            found=found.hex(),
            next_step="The writer or this decoder is faulty: try another track",
        )
    return canonical


def check_sum(segment: Segment, canonical: Bytes) -> None:
    """INT-3: the integer sum."""
    compare_sum(segment.context, integer_sum(canonical))


def compare_sum(context: SegmentContext, found: int) -> None:
    """INT-3, for a sum that was computed anywhere."""
    expected = context.record.integer_sum
    if found != expected:
        raise InvalidError(
            "segment.integers",
            "the sum of the decoded integers is wrong",
            where=context.where,
            expected=f"{expected:016x}",
            found=f"{found:016x}",
            next_step="The writer or this decoder is faulty: try another track",
        )


def check_strictly(segment: Segment) -> None:
    """What verification checks beyond reading: integers, filler, neutral values (11.3)."""
    context = segment.context
    if not segment.decoded.clean:
        raise InvalidError(
            "segment.filler",
            "samples that hold no channel are not 128",
            where=context.where,
        )
    canonical = check_integers(segment)
    check_sum(segment, canonical)
    if context.quantisation is None or segment.side is None:
        return
    neutral = neutral_integers(context.quantisation)
    neutral = neutral if neutral.shape[1] == 1 else neutral[:, context.heads]
    for layer, patches in enumerate(segment.side.patches):
        if not np.isfinite(patches.rows.astype(np.float32)).all():
            raise InvalidError(
                "segment.side", "a patch holds a NaN or an infinity", where=context.where
            )
        if (canonical[layer, patches.ordinals] != neutral[layer]).any():
            raise InvalidError(
                "segment.side", "the integers at a patch are not neutral", where=context.where
            )
        index = segment.side.token_index
        if index is not None and index[layer, patches.ordinals].any():
            raise InvalidError(
                "segment.side", "the token scale index at a patch is not 0", where=context.where
            )
