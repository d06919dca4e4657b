"""Quantisation sets and side blocks (spec sections 9.2 and 9.3): bytes to arrays and back."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.digests import Buffer
from kvformat.errors import InvalidError
from kvformat.limits import LIMITS

_HEAD: Final = struct.Struct("<HHIIHH")
SCALE_PER_CHANNEL: Final = 1
ZERO_PER_CHANNEL: Final = 2
HAS_BIAS: Final = 4
HAS_ORDER: Final = 8
SCALE_RANGE: Final = (2.0**-40, 2.0**40)
BIAS_RANGE: Final = (2.0**-64, 2.0**96)
TRANSFORMED_ZERO: Final = 128
"""The only zero that the set of a transformed group has (TRF-3)."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantisationSet:
    """Parameters of n layers: arrays broadcastable to ``[n, H, D]``; None where absent.

    ``scale`` float32 and ``zero`` int16 are ``[n, H, D]`` or ``[n, 1, 1]``; ``bias`` float32 and
    ``order`` (rank to dim, unsigned) are ``[n, H, D]``; ``token_scale`` float32 ``[count]``.
    """

    heads: int
    head_dim: int
    scale: Float32
    zero: NDArray[np.int16]
    bias: Float32 | None
    order: NDArray[Any] | None
    token_scale: Float32

    @property
    def layers(self) -> int:
        """Number of layers, n."""
        return len(self.scale)

    @property
    def has_token_scale(self) -> bool:
        """Whether side blocks carry an index per token."""
        return len(self.token_scale) > 0

    def to_bytes(self) -> bytes:
        """The stored object."""
        shape = (self.layers, self.heads, self.head_dim)
        flags = SCALE_PER_CHANNEL if self.scale.shape == shape != (self.layers, 1, 1) else 0
        flags |= ZERO_PER_CHANNEL if self.zero.shape == shape != (self.layers, 1, 1) else 0
        parts = [self.scale.astype("<f4").tobytes(), self.zero.astype("<i2").tobytes()]
        if self.bias is not None:
            flags |= HAS_BIAS
            parts.append(self.bias.astype("<f4").tobytes())
        if self.order is not None:
            flags |= HAS_ORDER
            parts.append(self.order.astype(order_dtype(self.head_dim)).tobytes())
        parts.append(self.token_scale.astype("<f4").tobytes())
        head = _HEAD.pack(self.layers, flags, self.heads, self.head_dim, len(self.token_scale), 0)
        return head + b"".join(parts)


def order_dtype(head_dim: int) -> np.dtype[Any]:
    """The stored type of ranks."""
    return np.dtype("u1") if head_dim <= 256 else np.dtype("<u2")


def _content(message: str, where: str, expected: object, found: object) -> InvalidError:
    return InvalidError("set.content", message, where=where, expected=expected, found=found)


def parse_set(
    data: Buffer,
    layers: int,
    heads: int,
    head_dim: int,
    where: str,
    *,
    transformed: bool = False,
) -> QuantisationSet:
    """The set in ``data`` for a record of ``layers`` and a group of ``heads`` x ``head_dim``.

    Raises ``set.content`` (SET-1 to SET-7, for a ``transformed`` group also TRF-3).
    """
    if len(data) < _HEAD.size:
        raise _content("the set ends inside its head", where, _HEAD.size, len(data))
    found_layers, flags, found_heads, found_dim, scales, reserved = _HEAD.unpack_from(data)
    if (found_layers, found_heads, found_dim) != (layers, heads, head_dim):
        raise _content(
            "the set is for another shape",
            where,
            (layers, heads, head_dim),
            (found_layers, found_heads, found_dim),
        )
    if flags & ~15 or reserved:
        raise _content("unknown flags", where, "flags 0 to 15", f"{flags:#x}, {reserved:#x}")
    if transformed and flags:
        raise _content("flags in the set of a transformed group", where, "flags 0", f"{flags:#x}")
    LIMITS.check("token_scales_per_set", scales, where)
    shape = (layers, heads, head_dim)
    each = (layers, 1, 1)
    wanted: list[tuple[Any, tuple[int, ...]]] = [
        (np.dtype("<f4"), shape if flags & SCALE_PER_CHANNEL else each),
        (np.dtype("<i2"), shape if flags & ZERO_PER_CHANNEL else each),
        (np.dtype("<f4"), shape if flags & HAS_BIAS else (0,)),
        (order_dtype(head_dim), shape if flags & HAS_ORDER else (0,)),
        (np.dtype("<f4"), (scales,)),
    ]
    counts = [int(np.prod(dims, dtype=np.int64)) for _, dims in wanted]
    total = _HEAD.size + sum(
        count * kind.itemsize for count, (kind, _) in zip(counts, wanted, strict=True)
    )
    if total != len(data):
        raise _content("the set has the wrong length", where, total, len(data))
    arrays: list[NDArray[Any]] = []
    cursor = _HEAD.size
    for count, (kind, dims) in zip(counts, wanted, strict=True):
        arrays.append(np.frombuffer(data, kind, count, cursor).reshape(dims))
        cursor += count * kind.itemsize
    result = QuantisationSet(
        heads,
        head_dim,
        np.ascontiguousarray(arrays[0], np.float32),
        np.ascontiguousarray(arrays[1], np.int16),
        np.ascontiguousarray(arrays[2], np.float32) if flags & HAS_BIAS else None,
        arrays[3] if flags & HAS_ORDER else None,
        np.ascontiguousarray(arrays[4], np.float32),
    )
    check_set(result, where)
    if transformed and (result.zero != TRANSFORMED_ZERO).any():
        found = sorted(set(result.zero.flat))
        raise _content("a zero of a transformed group", where, TRANSFORMED_ZERO, found)
    return result


def check_set(item: QuantisationSet, where: str) -> None:
    """SET-4 to SET-6."""
    for name, values in (("scale", item.scale), ("token_scale", item.token_scale)):
        good = (values >= SCALE_RANGE[0]) & (values <= SCALE_RANGE[1])
        if not good.all():
            raise _content(f"{name} out of range", where, "2^-40 to 2^40", values[~good].flat[0])
    if item.bias is not None:
        size = np.abs(item.bias)
        good = (size >= BIAS_RANGE[0]) & (size <= BIAS_RANGE[1])
        good |= item.bias.view(np.uint32) == 0
        if not good.all():
            raise _content(
                "bias out of range", where, "+0, or 2^-64 to 2^96", item.bias[~good].flat[0]
            )
    if item.order is not None:
        ranks = np.sort(item.order, axis=-1)
        if not (ranks == np.arange(item.head_dim)).all():
            raise _content("order is not a permutation", where, "each dim once", "another list")


@dataclass(frozen=True, slots=True)
class Patches:
    """Exact rows of some tokens of one layer.

    ``ordinals`` int64 ``[count]``, counted from the segment's first token; ``rows`` of the
    group's dtype, ``[count, H, D]``.
    """

    ordinals: NDArray[np.int64]
    rows: NDArray[Any]


@dataclass(frozen=True, slots=True)
class SideBlock:
    """Side data of one segment: ``token_index`` uint8 ``[n, N]`` or None, patches per layer."""

    token_index: NDArray[np.uint8] | None
    patches: tuple[Patches, ...]

    def to_bytes(self) -> bytes:
        """The stored block."""
        parts: list[bytes] = []
        if self.token_index is not None:
            parts.append(np.ascontiguousarray(self.token_index).tobytes())
        for item in self.patches:
            parts.append(len(item.ordinals).to_bytes(4, "little"))
            parts.append(item.ordinals.astype("<u4").tobytes())
            parts.append(np.ascontiguousarray(item.rows).tobytes())
        return b"".join(parts)


def _side(message: str, where: str, expected: object, found: object) -> InvalidError:
    return InvalidError("segment.side", message, where=where, expected=expected, found=found)


def parse_side(
    data: Buffer,
    item: QuantisationSet,
    *,
    tokens: int,
    heads: int,
    dtype: np.dtype[Any],
    where: str,
) -> SideBlock:
    """The side block in ``data`` (SID-1 to SID-3); raises ``segment.side``."""
    cursor = 0
    index: NDArray[np.uint8] | None = None
    size_bytes = len(data)
    if item.has_token_scale:
        cursor = item.layers * tokens
        if size_bytes < cursor:
            raise _side("the side block is too short", where, f"at least {cursor}", size_bytes)
        index = np.frombuffer(data, np.uint8, cursor).reshape(item.layers, tokens)
        if tokens and int(index.max()) >= len(item.token_scale):
            raise _side(
                "a token scale index is out of range",
                where,
                f"below {len(item.token_scale)}",
                int(index.max()),
            )
    row_bytes = heads * item.head_dim * dtype.itemsize
    patches: list[Patches] = []
    for _ in range(item.layers):
        found, cursor = _parse_patches(data, cursor, tokens, row_bytes, where)
        rows = found.rows.view(dtype).reshape(-1, heads, item.head_dim)
        patches.append(Patches(found.ordinals, rows))
    if cursor != size_bytes:
        raise _side("the side block has the wrong length", where, cursor, size_bytes)
    return SideBlock(index, tuple(patches))


def _parse_patches(
    data: Buffer, cursor: int, tokens: int, row_bytes: int, where: str
) -> tuple[Patches, int]:
    size_bytes = len(data)
    if size_bytes < cursor + 4:
        raise _side("the side block is too short", where, f"at least {cursor + 4}", size_bytes)
    count = int.from_bytes(data[cursor : cursor + 4], "little")
    cursor += 4
    if count > tokens:
        raise _side("more patches than tokens", where, f"at most {tokens}", count)
    end = cursor + count * (4 + row_bytes)
    if size_bytes < end:
        raise _side("the side block is too short", where, f"at least {end}", size_bytes)
    ordinals = np.frombuffer(data, "<u4", count, cursor).astype(np.int64)
    if count and (ordinals[-1] >= tokens or (np.diff(ordinals) <= 0).any()):
        raise _side("patch ordinals are not ascending", where, f"below {tokens}", "another list")
    rows = np.frombuffer(data, np.uint8, count * row_bytes, cursor + 4 * count)
    return Patches(ordinals, rows.reshape(count, row_bytes)), end


def neutral_integers(item: QuantisationSet) -> NDArray[np.uint8]:
    """The integer of each channel at a patched token (SID-4), ``[n, 1 or H, 1 or D]``."""
    return np.clip(item.zero, 0, 255).astype(np.uint8)
