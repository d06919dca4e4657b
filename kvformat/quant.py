"""Arithmetic between cache values and their 8-bit integers (spec: quantisation).

Restoring is exact and every implementation must produce the same bits::

    x = ((q - zero[c]) * scale[c]) * token_scale[t] + bias[c]

The subtraction is one of integers; what follows is float32, left to right, each operation rounded
on its own (numpy never fuses them), absent terms skipped; then the value is clamped to the largest
finite one of the target dtype and rounded to nearest even. Quantising is the writer's choice and
merely close to the inverse.

Axes are [layer L, token T, head H, dim D] throughout, whatever the memory order: a caller that
holds channel-major rows passes a transposed view. Work goes in tiles of some ten thousand values
that stay in the processor's cache, in scratch memory that belongs to the thread; a change of memory
order is done on tiles of uint8, the smallest form that the values have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvformat.errors import UsageError

Array = NDArray[Any]
Float32 = NDArray[np.float32]

ZERO = 128
"""The integer that stands for the channel mean in what this writer produces."""

SINK_TOKENS = 4
"""Tokens at the start of a sequence that statistics leave out: attention sinks are outliers."""

_FLOAT16 = np.dtype(np.float16)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)

MAX_FINITE: dict[np.dtype[Any], float] = {
    np.dtype(np.float32): float.fromhex("0x1.fffffep+127"),
    _FLOAT16: 65504.0,
    np.dtype(ml_dtypes.bfloat16): float.fromhex("0x1.fep+127"),
    _E4M3: 448.0,
    _E5M2: 57344.0,
}
"""Largest finite value of each dtype that can be quantised and restored."""

_TILE_VALUES = 24 * 1024
_TILE_CHANNELS = 256
_TILE_TOKENS = 64
_FLOAT8_VALUES = {
    kind: np.arange(256, dtype=np.uint8).view(kind).astype(np.float32) for kind in (_E4M3, _E5M2)
}
_TWO_112 = np.float32(2.0**112)


class _Scratch(threading.local):
    """Reusable memory of one thread, by purpose; grows to the largest tile seen."""

    def __init__(self) -> None:
        self.pool: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, kind: type[np.generic], *shape: int) -> Array:
        """An uninitialised C-contiguous array; valid until ``name`` is taken again."""
        dtype = np.dtype(kind)
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        held = self.pool.get(name)
        if held is None or held.size < size:
            held = self.pool[name] = np.empty(size, np.uint8)
        return held[:size].view(dtype).reshape(shape)


_scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class _Tile:
    """A block of tokens and heads of one layer."""

    layer: int
    tokens: slice
    heads: slice
    shape: tuple[int, int, int]

    @property
    def index(self) -> tuple[int, slice, slice]:
        return (self.layer, self.tokens, self.heads)

    @property
    def flat(self) -> tuple[int, int]:
        """(tokens, channels)."""
        return (self.shape[0], self.shape[1] * self.shape[2])


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
        full = np.broadcast_to(values, (layers, heads, dims))
        self.values = np.ascontiguousarray(full, np.float32)
        flat = self.values.reshape(layers, -1)
        self.uniform = (flat == flat[:, :1]).all(axis=1) if flat.size else np.ones(layers, np.bool_)

    def __getitem__(self, tile: _Tile) -> Any:
        """Scalar where the layer has one value (faster), else [channels of the tile]."""
        if self.uniform[tile.layer]:
            return self.values[tile.layer, 0, 0]
        return self.values[tile.layer, tile.heads].reshape(-1)

    def peak(self) -> float:
        """Largest magnitude, 0 for none."""
        return float(np.abs(self.values).max(initial=0))


def restore(
    q: NDArray[np.uint8],
    out: Array,
    *,
    scale: Float32,
    zero: Array,
    bias: Float32 | None = None,
    token_scale: Float32 | None = None,
    order: NDArray[np.integer[Any]] | None = None,
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
    _check(q, out, order, token_scale)
    if np.dtype(q.dtype) != np.uint8:
        raise UsageError("input.dtype", "quantised values are uint8", found=q.dtype)
    shape = q.shape
    scales, zeros = _Channels(scale, shape), _Channels(zero, shape)
    biases = None if bias is None else _Channels(bias, shape)
    limit = MAX_FINITE[out.dtype]
    clamp = _bound(scales, zeros, biases, token_scale) > 0.999 * limit
    with np.errstate(all="ignore"):
        for tile in _tiles(shape):
            x = _scratch.take("float", np.float32, *tile.flat)
            _load_integers(q, tile, order, x)
            np.subtract(x, zeros[tile], out=x)
            np.multiply(x, scales[tile], out=x)
            if token_scale is not None:
                np.multiply(x, token_scale[tile.layer, tile.tokens, None], out=x)
            if biases is not None:
                np.add(x, biases[tile], out=x)
            if clamp:
                np.clip(x, -limit, limit, out=x)
            _store_float32(x, out[tile.index])


def _bound(
    scales: _Channels, zeros: _Channels, biases: _Channels | None, token_scale: Float32 | None
) -> float:
    """An upper bound of the magnitude of any restored value."""
    bound = (zeros.peak() + 255) * scales.peak()
    if token_scale is not None:
        bound *= float(np.abs(token_scale).max(initial=0))
    return bound + (biases.peak() if biases is not None else 0.0)


def _load_integers(
    q: NDArray[np.uint8], tile: _Tile, order: NDArray[np.integer[Any]] | None, x: Float32
) -> None:
    """Integers of one tile, in token-major order and original dims, as float32 into ``x``."""
    source = q[tile.index]
    tokens, channels = tile.flat
    if not _token_fastest(q):
        if order is None:
            np.copyto(x.reshape(tile.shape), source)
            return
        stored = _scratch.take("rows", np.uint8, *tile.shape)
        np.copyto(stored, source)
        sorted_ = _scratch.take("bytes", np.uint8, tokens, channels)
        index = _flat_order(order, tile)
        np.take(stored.reshape(tokens, channels), index, axis=1, out=sorted_, mode="clip")
        np.copyto(x, sorted_)
        return
    rows = _scratch.take("rows", np.uint8, channels, tokens)
    by_channel = source.transpose(1, 2, 0)
    if order is not None:
        heads = np.arange(tile.shape[1])[:, None]
        by_channel = by_channel[heads, order[tile.layer, tile.heads]]
    np.copyto(rows.reshape(tile.shape[1], tile.shape[2], tokens), by_channel)
    turned = _scratch.take("bytes", np.uint8, tokens, channels)
    np.copyto(turned, rows.T)
    np.copyto(x, turned)


def _token_fastest(q: Array) -> bool:
    """Whether neighbouring tokens lie closer in memory than neighbouring dims."""
    return q.shape[1] > 1 and q.shape[3] > 1 and abs(q.strides[1]) < abs(q.strides[3])


def _flat_order(order: NDArray[np.integer[Any]], tile: _Tile) -> NDArray[np.intp]:
    """``order`` of a tile as indices into its flat channels."""
    heads = np.arange(tile.shape[1], dtype=np.intp)[:, None] * tile.shape[2]
    return (heads + order[tile.layer, tile.heads]).reshape(-1).astype(np.intp)


class _Rounding:
    """Constants that round float32 to a smaller binary format, as int32 scalars.

    Args:
        mantissa: stored significand bits of the format.
        bias: exponent bias of the format; 1 - bias is the exponent of its subnormals.
        bits: its width.
    """

    def __init__(self, mantissa: int, bias: int, bits: int) -> None:
        lowest = 127 + 1 - bias
        up = 23 - mantissa
        self.unsigned = np.dtype(f"uint{bits}")
        self.exponent = np.int32(0x7F800000)
        self.lowest = np.int32(lowest << 23)
        self.infinite = np.int32(0x7F800000)
        self.magic = np.int32((up << 23) | 0x400000)
        self.shift = np.int32(up)
        self.offset = np.int32(((lowest + up) << mantissa) | (1 << (mantissa - 1)))
        self.sign_shift = np.int32(32 - bits)
        self.sign = np.int32(1 << (bits - 1))


_ROUNDING = {_FLOAT16: _Rounding(10, 15, 16), _E4M3: _Rounding(3, 7, 8), _E5M2: _Rounding(2, 15, 8)}


def _store_float32(x: Float32, out: Array) -> None:
    """Round finite float32 [tokens, channels] to nearest even into ``out`` [tokens, heads, dims].

    No magnitude may exceed the largest finite value of ``out``'s dtype.
    """
    rounding = _ROUNDING.get(out.dtype)
    if rounding is None:
        np.copyto(out, x.reshape(out.shape), casting="unsafe")
    else:
        _round(x, out.view(rounding.unsigned), rounding)


def _round(x: Float32, out: Array, to: _Rounding) -> None:
    """Round to a format with m mantissa bits, as IEEE 754 says; faster than ``astype``.

    Adding M = 1.5 * 2^(e + 23 - m) to a value with exponent e (the subnormals' exponent for
    smaller ones) makes the adder round at the format's last bit, ties to even; the difference of
    the bit patterns of x + M and M is then the signed significand in units of that bit, and
    exponent and significand add up to the pattern of the format.
    """
    bits = x.view(np.int32)
    magic = _scratch.take("magic", np.int32, *x.shape)
    np.bitwise_and(bits, to.exponent, out=magic)
    np.clip(magic, to.lowest, to.infinite, out=magic)
    np.add(magic, to.magic, out=magic)
    total = _scratch.take("total", np.float32, *x.shape)
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


def load_float32(x: Array, out: Float32 | None = None) -> Float32:
    """Convert an array of any dtype in ``MAX_FINITE`` to float32 exactly, NaN and infinity too.

    Args:
        x: values, any shape and strides.
        out: C-contiguous float32 of the same shape to fill, or None for a new one.
    """
    result = np.empty(x.shape, np.float32) if out is None else out
    if x.dtype in _FLOAT8_VALUES:
        np.take(_FLOAT8_VALUES[x.dtype], x.view(np.uint8), out=result, mode="clip")
        return result
    if x.dtype != _FLOAT16:
        np.copyto(result, x, casting="unsafe")
        return result
    bits = result.view(np.int32)
    np.copyto(bits, x.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, np.int32(0x8FFFE000 - (1 << 32)), out=bits)
    np.multiply(result, _TWO_112, out=result)
    if result.size and max(float(result.max()), -float(result.min())) >= 65536.0:
        np.copyto(result, x)
    return result


def quantise(
    x: Array,
    out: NDArray[np.uint8],
    *,
    scale: Float32,
    zero: Array,
    bias: Float32 | None = None,
    token_scale: Float32 | None = None,
    order: NDArray[np.integer[Any]] | None = None,
) -> NDArray[np.bool_]:
    """Quantise values: ``clip(rint((x - bias) / (scale * token_scale)) + zero, 0, 255)``.

    Args:
        x: [L, T, H, D] of a dtype in ``MAX_FINITE``, any strides.
        out: uint8 [L, T, H, D], any strides; overwritten.
        scale: float32, broadcastable to [L, H, D].
        zero: int16, broadcastable to [L, H, D].
        bias: float32, broadcastable to [L, H, D], or None.
        token_scale: float32 [L, T], or None.
        order: [L, H, D], or None: dim d of ``x`` goes to dim ``order[l, h, d]`` of ``out``.

    Returns:
        bool [L, T]: tokens with a value that did not fit (or was no finite number).
    """
    _check(x, out, order, token_scale)
    if x.dtype not in MAX_FINITE:
        raise UsageError("input.dtype", "cannot quantise this dtype", found=x.dtype)
    shape = x.shape
    clipped = np.zeros(shape[:2], np.bool_)
    with np.errstate(all="ignore"):
        inverse = _Channels(np.float32(1) / np.asarray(scale, np.float32), shape)
        zeros = _Channels(zero, shape)
        biases = None if bias is None else _Channels(bias, shape)
        token_inverse = None if token_scale is None else np.float32(1) / token_scale
        for tile in _tiles(shape):
            y = _scratch.take("float", np.float32, *tile.flat)
            load_float32(x[tile.index], y.reshape(tile.shape))
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


def _store_integers(
    y: Float32, out: NDArray[np.uint8], tile: _Tile, order: NDArray[np.integer[Any]] | None
) -> None:
    """Whole numbers [tokens, channels] as uint8 into their place in ``out``."""
    tokens, channels = tile.flat
    target = out[tile.index]
    narrow = _scratch.take("bytes", np.uint8, tokens, channels)
    np.copyto(narrow, y, casting="unsafe")
    if not _token_fastest(out):
        if order is not None:
            sorted_ = _scratch.take("rows", np.uint8, tokens, channels)
            index = np.argsort(_flat_order(order, tile))
            np.take(narrow, index, axis=1, out=sorted_, mode="clip")
            narrow = sorted_
        np.copyto(target, narrow.reshape(tile.shape))
        return
    by_channel = target.transpose(1, 2, 0)
    rows = _scratch.take("rows", np.uint8, channels, tokens)
    np.copyto(rows, narrow.T)
    rows = rows.reshape(by_channel.shape)
    if order is None:
        np.copyto(by_channel, rows)
    else:
        heads = np.arange(tile.shape[1])[:, None]
        by_channel[heads, order[tile.layer, tile.heads]] = rows


def _check(
    source: Array,
    target: Array,
    order: NDArray[np.integer[Any]] | None,
    token_scale: Float32 | None,
) -> None:
    """Refuse shapes that do not belong together."""
    shape = source.shape
    if len(shape) != 4 or target.shape != shape:
        raise UsageError(
            "input.shape", "source and target need one shape", expected=shape, found=target.shape
        )
    if order is not None and order.shape != (shape[0], shape[2], shape[3]):
        raise UsageError("input.shape", "order is [layer, head, dim]", found=order.shape)
    if token_scale is not None and token_scale.shape != shape[:2]:
        raise UsageError("input.shape", "token_scale is [layer, token]", found=token_scale.shape)


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
    mean = np.zeros(channels)
    squares = np.zeros(channels)
    by_token = np.zeros(tokens)
    step = max(16, _TILE_VALUES // max(1, channels))
    starts = range(0, tokens, step)
    for start in starts:
        y = _load_rows(x[start : start + step], kind)
        mean += np.einsum("ij->j", y[max(0, first - start) :])
    mean /= max(1, tokens - first)
    center = mean.astype(kind)
    for start in starts:
        y = _load_rows(x[start : start + step], kind)
        np.subtract(y, center, out=y)
        by_token[start : start + step] = np.einsum("ij,ij->i", y, y)
        counted = y[max(0, first - start) :]
        squares += np.einsum("ij,ij->j", counted, counted)
    return mean, squares, by_token


def _load_rows(x: Array, kind: type[np.float32 | np.float64]) -> Array:
    """Values [tokens, heads, dims] as ``kind`` [tokens, channels] in scratch memory."""
    y: Array = load_float32(x, _scratch.take("float", np.float32, *x.shape))
    y = y.reshape(x.shape[0], x.shape[1] * x.shape[2])
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
    exponents = (np.arange(count) - count // 2) / per_octave
    return np.exp2(exponents).astype(np.float32)


def nearest_levels(token_rms: Float32, levels: Float32) -> NDArray[np.uint8]:
    """Index of the level nearest by ratio to each token's relative rms: uint8 [T]."""
    logs = np.log2(levels.astype(np.float64))
    wanted = np.log2(np.maximum(token_rms.astype(np.float64), 2.0**-126))
    return np.searchsorted((logs[1:] + logs[:-1]) / 2, wanted).astype(np.uint8)
