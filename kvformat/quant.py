"""Arithmetic between cache values and their 8-bit integers (spec: quantisation).

Restoring is exact and every implementation must produce the same bits::

    x = ((q - zero[c]) * scale[c]) * token_scale[t] + bias[c]

The subtraction is one of integers; what follows is float32, left to right, each operation rounded
on its own (numpy never fuses them), absent terms skipped; then the value is clamped to the largest
finite one of the target dtype and rounded to nearest even. Quantising is the writer's choice and
merely close to the inverse.

Axes are [layer L, token T, head H, dim D] throughout, whatever the memory order: a caller that
holds channel-major rows passes a transposed view. Work goes in tiles, in scratch memory of the
thread (about 8 MiB); memory order is changed while values are uint8, their smallest form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvformat.errors import UsageError
from kvformat.scratch import scratch, transpose

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Order = NDArray[np.integer[Any]]

ZERO = 128
"""The integer that stands for the channel mean in what this writer produces."""

SINK_TOKENS = 4
"""Tokens at the start of a sequence that statistics leave out: attention sinks are outliers."""

_FLOAT16 = np.dtype(np.float16)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)

MAX_FINITE: dict[np.dtype[Any], float] = {
    np.dtype(np.float32): float.fromhex("0x1.fffffep+127"),
    _FLOAT16: 65504.0,
    _BFLOAT16: float.fromhex("0x1.fep+127"),
    _E4M3: 448.0,
    _E5M2: 57344.0,
}
"""Largest finite value of each dtype that can be quantised and restored."""

_TILE_VALUES = 512 * 1024  # smaller: threads queue for the interpreter lock
_SUM_VALUES = 256 * 1024  # how sums are grouped; a change changes their last bits
_TILE_CHANNELS = 1024
_HELD_VALUES = 4 * 1024 * 1024  # a layer up to this size is converted once for two passes
_TILE_TOKENS = 64
_FLOAT8_VALUES = {
    kind: np.arange(256, dtype=np.uint8).view(kind).astype(np.float32) for kind in (_E4M3, _E5M2)
}
_TWO_112 = np.float32(2.0**112)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A block of tokens and heads of one layer."""

    layer: int
    tokens: slice
    heads: slice
    shape: tuple[int, int, int]

    @property
    def flat(self) -> tuple[int, int]:
        """(tokens, channels)."""
        return (self.shape[0], self.shape[1] * self.shape[2])

    def of(self, array: Array) -> Array:
        """The tile's part of [L, T, H, D], a view [tokens, heads, dims]."""
        view: Array = array[self.layer, self.tokens, self.heads]
        return view

    def sorted_by(self, order: Order) -> tuple[Array, Array]:
        """``order`` [L, H, D] as indices of heads and dims within the tile."""
        return np.arange(self.shape[1])[:, None], order[self.layer, self.heads]


def _tiles(shape: tuple[int, ...]) -> Iterator[_Tile]:
    """Cut [L, T, H, D] into tiles: whole dims, a few heads, at least 64 tokens where there are."""
    layers, tokens, heads, dims = shape
    if 0 in shape:
        return
    by_head = max(1, min(heads, _TILE_CHANNELS // dims))
    by_token = max(_TILE_TOKENS, _TILE_VALUES // (by_head * dims) // _TILE_TOKENS * _TILE_TOKENS)
    for layer in range(layers):
        for head in range(0, heads, by_head):
            head_end = min(head + by_head, heads)
            for token in range(0, tokens, by_token):
                end = min(token + by_token, tokens)
                extent = (end - token, head_end - head, dims)
                yield _Tile(layer, slice(token, end), slice(head, head_end), extent)


class _Channels:
    """A per-channel parameter, [L, H, D] or broadcastable to it, as operand for flat tiles."""

    def __init__(self, values: Array, shape: tuple[int, ...]) -> None:
        layers, _, heads, dims = shape
        self.uniform = values.shape in ((), (layers, 1, 1))
        extent = (layers, 1, 1) if self.uniform else (layers, heads, dims)
        self.values = np.ascontiguousarray(np.broadcast_to(values, extent), np.float32)

    def __getitem__(self, tile: _Tile) -> Any:
        """Scalar where the layer has one value (faster), else [channels of the tile]."""
        if self.uniform:
            return self.values[tile.layer, 0, 0]
        return self.values[tile.layer, tile.heads].reshape(-1)


def restore(
    q: NDArray[np.uint8],
    out: Array,
    *,
    scale: Float32,
    zero: Array,
    bias: Float32 | None = None,
    token_scale: Float32 | None = None,
    order: Order | None = None,
) -> None:
    """Restore integers to values, bit for bit as the spec says.

    Args:
        q: uint8 [L, T, H, D], any strides; tokens may be the fastest axis.
        out: [L, T, H, D] of a dtype in ``MAX_FINITE``, any strides; overwritten.
        scale: float32, broadcastable to [L, H, D].
        zero: int16, broadcastable to [L, H, D].
        bias: float32, broadcastable to [L, H, D], or None.
        token_scale: float32 [L, T], or None.
        order: [L, H, D], or None: dim d of the result lies at dim ``order[l, h, d]`` of ``q``.
    """
    shape = _check(q, out, order, token_scale)
    scales, zeros = _Channels(scale, shape), _Channels(zero, shape)
    biases = None if bias is None else _Channels(bias, shape)
    limit = MAX_FINITE[out.dtype]
    clamp = _bound(scales, zeros, biases, token_scale) > 0.999 * limit
    with np.errstate(all="ignore"):
        for tile in _tiles(shape):
            x = scratch.take("float", np.float32, *tile.flat)
            _load_integers(q, tile, order, x)
            np.subtract(x, zeros[tile], out=x)
            np.multiply(x, scales[tile], out=x)
            if token_scale is not None:
                np.multiply(x, token_scale[tile.layer, tile.tokens, None], out=x)
            if biases is not None:
                np.add(x, biases[tile], out=x)
            if clamp:
                np.clip(x, -limit, limit, out=x)
            store_float32(x, tile.of(out))


def _bound(
    scales: _Channels, zeros: _Channels, biases: _Channels | None, token_scale: Float32 | None
) -> float:
    """An upper bound of the magnitude of any restored value."""
    bound = (_peak(zeros.values) + 255) * _peak(scales.values)
    bound *= 1 if token_scale is None else _peak(token_scale)
    return bound + (0 if biases is None else _peak(biases.values))


def _peak(values: Float32) -> float:
    return float(np.abs(values).max(initial=0))


def _load_integers(q: NDArray[np.uint8], tile: _Tile, order: Order | None, x: Float32) -> None:
    """Integers of one tile, in token-major order and original dims, as float32 into ``x``."""
    source = tile.of(q)
    if not _token_fastest(q):
        values = source if order is None else source[:, *tile.sorted_by(order)]
        np.copyto(x.reshape(tile.shape), values)
        return
    by_channel = source.transpose(1, 2, 0)
    if order is not None:
        rows = by_channel[tile.sorted_by(order)].reshape(tile.flat[::-1])
    else:
        rows = scratch.take("rows", np.uint8, *tile.flat[::-1])
        np.copyto(rows.reshape(by_channel.shape), by_channel)
    turned = scratch.take("bytes", np.uint8, *tile.flat)
    transpose(rows, turned)
    np.copyto(x, turned)


def _token_fastest(q: Array) -> bool:
    """Whether neighbouring tokens lie closer in memory than neighbouring dims."""
    return q.shape[1] > 1 and q.shape[3] > 1 and abs(q.strides[1]) < abs(q.strides[3])


class _Rounding:
    """Constants that round float32 to a format of ``bits`` with ``mantissa`` stored bits."""

    def __init__(self, mantissa: int, bias: int, bits: int) -> None:
        lowest = 127 + 1 - bias
        up = 23 - mantissa
        self.unsigned = np.dtype(f"uint{bits}")
        self.lowest = np.int32(lowest << 23)
        self.infinite = np.int32(0x7F800000)
        self.magic = np.int32((up << 23) | 0x400000)
        self.shift = np.int32(up)
        self.offset = np.int32(((lowest + up) << mantissa) | (1 << (mantissa - 1)))
        self.sign_shift = np.int32(32 - bits)
        self.sign = np.int32(1 << (bits - 1))


_ROUNDING = {_FLOAT16: _Rounding(10, 15, 16), _E4M3: _Rounding(3, 7, 8), _E5M2: _Rounding(2, 15, 8)}


def store_float32(x: Float32, out: Array) -> None:
    """Round finite float32 [tokens, channels] to nearest even into ``out`` [tokens, heads, dims].

    No magnitude may exceed the largest finite value of ``out``'s dtype.
    """
    rounding = _ROUNDING.get(out.dtype)
    if rounding is not None:
        _round(x, out.view(rounding.unsigned), rounding)
    elif out.dtype == _BFLOAT16:
        _round_bfloat16(x, out.view(np.uint16))
    else:
        np.copyto(out, x.reshape(out.shape), casting="unsafe")


def _round(x: Float32, out: Array, to: _Rounding) -> None:
    """Round to a format with m mantissa bits, as IEEE 754 says; faster than ``astype``.

    Adding M = 1.5 * 2^(e + 23 - m) to a value with exponent e (the subnormals' exponent for
    smaller ones) makes the adder round at the format's last bit, ties to even; the difference of
    the bit patterns of x + M and M is then the signed significand in units of that bit, and
    exponent and significand add up to the pattern of the format.
    """
    bits = x.view(np.int32)
    magic = scratch.take("magic", np.int32, *x.shape)
    np.bitwise_and(bits, to.infinite, out=magic)
    np.maximum(magic, to.lowest, out=magic)
    np.add(magic, to.magic, out=magic)
    total = scratch.take("total", np.float32, *x.shape)
    np.add(x, magic.view(np.float32), out=total)
    pattern = total.view(np.int32)
    np.subtract(pattern, magic, out=pattern)
    np.abs(pattern, out=pattern)
    np.right_shift(magic, to.shift, out=magic)
    np.add(pattern, magic, out=pattern)
    np.subtract(pattern, to.offset, out=pattern)
    np.right_shift(bits, to.sign_shift, out=magic)
    np.bitwise_and(magic, to.sign, out=magic)
    np.bitwise_or(pattern, magic, out=pattern)
    np.copyto(out, pattern.reshape(out.shape), casting="unsafe")


def _round_bfloat16(x: Float32, out: Array) -> None:
    """Round to the upper half of the pattern; ml_dtypes does so with the interpreter locked."""
    bits = x.view(np.uint32)
    odd = scratch.take("magic", np.uint32, *x.shape)
    np.right_shift(bits, np.uint32(16), out=odd)
    np.bitwise_and(odd, np.uint32(1), out=odd)
    np.add(odd, bits, out=odd)
    np.add(odd, np.uint32(0x7FFF), out=odd)
    np.right_shift(odd, np.uint32(16), out=odd)
    np.copyto(out, odd.reshape(out.shape), casting="unsafe")


def load_float32(x: Array, out: Float32 | None = None) -> Float32:
    """Convert an array of any dtype in ``MAX_FINITE`` to float32 exactly, NaN and infinity too.

    Args:
        x: values, any shape and strides.
        out: C-contiguous float32 of the same shape to fill, or None for a new one.

    A thread that flushes subnormals to zero reads those of float16 as zero.
    """
    result = np.empty(x.shape, np.float32) if out is None else out
    if x.dtype in _FLOAT8_VALUES:
        np.take(_FLOAT8_VALUES[x.dtype], x.view(np.uint8), out=result, mode="clip")
    elif x.dtype == _FLOAT16:
        bits = result.view(np.int32)
        np.copyto(bits, x.view(np.int16))
        np.left_shift(bits, np.int32(13), out=bits)
        np.bitwise_and(bits, np.int32(0x8FFFE000 - (1 << 32)), out=bits)
        np.multiply(result, _TWO_112, out=result)
        if max(result.max(initial=0), -result.min(initial=0)) >= 65536:  # NaN or infinity
            np.copyto(result, x)
    elif x.dtype == _BFLOAT16:
        bits = result.view(np.int32)
        np.copyto(bits, x.view(np.int16))
        np.left_shift(bits, np.int32(16), out=bits)
    else:
        np.copyto(result, x, casting="unsafe")
    return result


def quantise(
    x: Array,
    out: NDArray[np.uint8],
    *,
    scale: Float32,
    zero: Array,
    bias: Float32 | None = None,
    token_scale: Float32 | None = None,
    order: Order | None = None,
) -> NDArray[np.bool_]:
    """Quantise values: ``clip(rint((x - bias) / (scale * token_scale)) + zero, 0, 255)``.

    Args:
        x: [L, T, H, D] of a dtype in ``MAX_FINITE``, any strides.
        out: uint8 [L, T, H, D], any strides; overwritten.
        scale, zero, bias, token_scale: as in ``restore``.
        order: [L, H, D], or None: dim d of ``x`` goes to dim ``order[l, h, d]`` of ``out``.

    Returns:
        bool [L, T]: tokens with a value that did not fit (or was no finite number).
    """
    shape = _check(out, x, order, token_scale)
    clipped = np.zeros(shape[:2], np.bool_)
    with np.errstate(all="ignore"):
        inverse = _Channels(np.float32(1) / np.asarray(scale, np.float32), shape)
        zeros = _Channels(zero, shape)
        biases = None if bias is None else _Channels(bias, shape)
        token_inverse = None if token_scale is None else np.float32(1) / token_scale
        for tile in _tiles(shape):
            y = scratch.take("float", np.float32, *tile.flat)
            load_float32(tile.of(x), y.reshape(tile.shape))
            if biases is not None:
                np.subtract(y, biases[tile], out=y)
            np.multiply(y, inverse[tile], out=y)
            if token_inverse is not None:
                np.multiply(y, token_inverse[tile.layer, tile.tokens, None], out=y)
            np.rint(y, out=y)
            np.add(y, zeros[tile], out=y)
            if not (y.min() >= 0 and y.max() <= 255):
                clipped[tile.layer, tile.tokens] |= _clip(y)
            _store_integers(y, out, tile, order)
    return clipped


def _clip(y: Float32) -> NDArray[np.bool_]:
    """Clip to 0..255 in place (NaN becomes 0); bool [tokens]: rows that needed it."""
    bad = ~((y >= 0) & (y <= 255))
    np.copyto(y, 0, where=np.isnan(y))
    np.clip(y, 0, 255, out=y)
    return np.asarray(bad.any(axis=1))


def _store_integers(y: Float32, out: NDArray[np.uint8], tile: _Tile, order: Order | None) -> None:
    """Whole numbers [tokens, channels] as uint8 into their place in ``out``."""
    target = tile.of(out)
    narrow = scratch.take("bytes", np.uint8, *tile.flat)
    np.copyto(narrow, y, casting="unsafe")
    if _token_fastest(out):
        rows = scratch.take("rows", np.uint8, *tile.flat[::-1])
        transpose(narrow, rows)
        target = target.transpose(1, 2, 0)
        index = (...,) if order is None else tile.sorted_by(order)
        target[index] = rows.reshape(target.shape)
    elif order is None:
        np.copyto(target, narrow.reshape(tile.shape))
    else:
        target[:, *tile.sorted_by(order)] = narrow.reshape(tile.shape)


def _check(
    integers: Array, values: Array, order: Order | None, token_scale: Float32 | None
) -> tuple[int, ...]:
    """The common shape [L, T, H, D], after refusing arrays that do not belong together."""
    shape = values.shape
    for name, held, wanted in (
        ("array of integers", integers.shape, shape if len(shape) == 4 else "four axes"),
        ("order", None if order is None else order.shape, (shape[0], *shape[2:])),
        ("token_scale", None if token_scale is None else token_scale.shape, shape[:2]),
    ):
        if held is not None and held != wanted:
            raise UsageError("input.shape", f"{name} does not fit", expected=wanted, found=held)
    if integers.dtype != np.uint8 or values.dtype not in MAX_FINITE:
        found = f"{values.dtype} and {integers.dtype}"
        raise UsageError("input.dtype", "these cannot be quantised or restored", found=found)
    return shape


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a writer needs to know of one layer, leaving out the first tokens.

    ``mean`` and ``variance`` are float32 [H, D] in the values' units (squared); ``rms`` is the
    root mean square deviation from the channel means over all channels; ``token_rms`` float32
    [T], for all tokens, is each one's deviation as a multiple of ``rms`` (1 where ``rms`` is 0).
    """

    mean: Float32
    variance: Float32
    rms: float
    token_rms: Float32


def statistics(x: Array, skip_first: int = SINK_TOKENS) -> Statistics:
    """Mean, variance and token sizes of one layer [T, H, D], any dtype in ``MAX_FINITE``.

    ``skip_first`` tokens do not count for means, variances and rms, unless there are no others.
    Deterministic: sums are taken in a fixed order whatever the strides.

    Raises:
        UsageError: ``input.non-finite`` with token, head and dim of the first offender.
    """
    tokens, heads, dims = x.shape
    first = skip_first if skip_first < tokens else 0
    for kind in (np.float32, np.float64):
        with np.errstate(all="ignore"):
            mean, channel_squares, token_squares = _moments(x, first, kind)
        if np.isfinite(channel_squares).all() and np.isfinite(token_squares).all():
            break
        _refuse_non_finite(x)
    counted = max(1, tokens - first)
    variance = channel_squares / counted
    mean_square = float(variance.mean()) if variance.size else 0.0
    token_means = token_squares / max(1, heads * dims)
    relative = np.sqrt(token_means / mean_square) if mean_square > 0 else np.ones(tokens)
    with np.errstate(over="ignore"):
        return Statistics(
            mean=mean.reshape(heads, dims).astype(np.float32),
            variance=variance.reshape(heads, dims).astype(np.float32),
            rms=mean_square**0.5,
            token_rms=relative.astype(np.float32),
        )


def _moments(x: Array, first: int, kind: type[np.float32 | np.float64]) -> tuple[Array, ...]:
    """Float64 mean [C], squared deviations by channel [C] (from ``first`` on) and token [T].

    Tiles are summed in ``kind``, totals in float64. A NaN or infinity anywhere shows up as
    one in the results.
    """
    tokens, heads, dims = x.shape
    channels = heads * dims
    mean, squares, by_token = np.zeros(channels), np.zeros(channels), np.zeros(tokens)
    step = max(16, _SUM_VALUES // max(1, channels))
    starts = range(0, tokens, step)
    held = kind is np.float32 and x.size <= _HELD_VALUES
    whole = scratch.take("layer", np.float32, *(x.shape if held else (0, 0, 0)))
    for start in starts:
        y = _load_rows(x[start : start + step], kind, whole[start : start + step])
        mean += np.einsum("ij->j", y[max(0, first - start) :])
    mean /= max(1, tokens - first)
    center = mean.astype(kind)
    for start in starts:
        if held:
            y = whole[start : start + step].reshape(-1, channels)
        else:
            y = _load_rows(x[start : start + step], kind)
        np.subtract(y, center, out=y)
        by_token[start : start + step] = np.einsum("ij,ij->i", y, y)
        counted = y[max(0, first - start) :]
        squares += np.einsum("ij,ij->j", counted, counted)
    return mean, squares, by_token


def _load_rows(x: Array, kind: type[np.float32 | np.float64], out: Array | None = None) -> Array:
    """Values [tokens, heads, dims] as ``kind`` [tokens, channels], in ``out`` or in scratch."""
    if out is None or out.shape != x.shape:
        out = scratch.take("float", np.float32, *x.shape)
    y: Array = load_float32(x, out).reshape(x.shape[0], x.shape[1] * x.shape[2])
    return y if kind is np.float32 else y.astype(kind)


def _refuse_non_finite(x: Array) -> None:
    """Raise for the first value that is no finite number, if there is one."""
    for token in range(x.shape[0]):
        bad = ~np.isfinite(x[token].astype(np.float32))
        if bad.any():
            head, dim = (int(i) for i in np.argwhere(bad)[0])
            raise UsageError(
                "input.non-finite",
                "a quantised track cannot hold NaN or infinity",
                where=f"token {token}, head {head}, dim {dim}",
                found=float(x[token, head, dim]),
                next_step="Write an exact track, or repair the cache.",
            )


def relative_scale(rms: float, relative_step: float) -> np.float32:
    """The step of a layer: ``relative_step`` times its rms, within the spec's [2^-40, 2^40]."""
    return np.float32(min(max(rms * relative_step, 2.0**-40), 2.0**40))


def geometric_levels(count: int = 33, per_octave: int = 4) -> Float32:
    """Token scales 2^(i / per_octave), ascending, float32 [count]; the middle one is 1."""
    return np.exp2((np.arange(count) - count // 2) / per_octave).astype(np.float32)


def nearest_levels(token_rms: Float32, levels: Float32) -> NDArray[np.uint8]:
    """Index of the level nearest by ratio to each token's relative rms: uint8 [T]."""
    logs = np.log2(levels.astype(np.float64))
    wanted = np.log2(np.maximum(token_rms.astype(np.float64), 2.0**-126))
    return np.searchsorted((logs[1:] + logs[:-1]) / 2, wanted).astype(np.uint8)
