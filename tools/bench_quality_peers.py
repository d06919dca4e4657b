"""Other ways to store a KV cache, written for the bench from their published descriptions.

Every function takes a cache ``[2, L, T, H, D]`` float32 (keys, values; values of bfloat16) and
gives a ``Stored``: what comes back, and the bits it takes. ``payload_bits`` leaves out side data
that grows with layers and channels only. Each docstring says what was simplified. A model with
sliding windows has a cache per kind of layer: "layers" are then those of one kind.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np
import zstandard
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SINKS: Final = 4
RECENT: Final = 128
ANCHOR_EVERY: Final = 10
KIVI_GROUP: Final = 32
WIDTHS: Final = (0.5, 1.0, 1.5)
"""CacheGen's bin widths for the first, middle and last third of the layers."""
LEAST_BITS: Final = 3
MOST_BITS: Final = 8
RANGE_DEVIATIONS: Final = 7.0
CROSS_RANK: Final = 768


@dataclass(frozen=True, slots=True)
class Stored:
    """A restored cache ``[2, L, T, H, D]``, None where it is the original; bits of all of it."""

    restored: Float32 | None
    bits: float
    payload_bits: float
    encode_s: float
    decode_s: float


Peer = Callable[[Float32], Stored]


def bfloat16(x: NDArray[Any]) -> Float32:
    """Rounded to bfloat16, the dtype of the cache, as float32."""
    rounded: Float32 = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded


def rotated(
    keys: Float32, inv_freq: NDArray[Any], *, first: int = 0, back: bool = False
) -> Float32:
    """Keys ``[..., T, H, D]`` of positions from ``first`` on turned in halves, or turned back."""
    positions = np.arange(first, first + keys.shape[-3])
    angles = positions[:, None] * inv_freq.astype(np.float64)
    sign = -1 if back else 1
    cosine = np.cos(angles).astype(np.float32)[:, None]
    sine = np.float32(sign) * np.sin(angles).astype(np.float32)[:, None]
    u, v = np.split(keys, 2, axis=-1)
    turned: Float32 = np.concatenate([u * cosine - v * sine, v * cosine + u * sine], axis=-1)
    return turned


def raw(cache: Float32) -> Stored:
    """The bytes as they are; the times are those of a copy."""
    source = cache.astype(ml_dtypes.bfloat16)
    started = time.perf_counter()
    copied = source.copy()
    seconds = time.perf_counter() - started
    return Stored(None, 8.0 * copied.nbytes / cache.size, 16.0, seconds, seconds)


def zstd(cache: Float32) -> Stored:
    """zstd level 19, one thread, over the raw bfloat16 bytes."""
    return zstd_bytes(cache.astype(ml_dtypes.bfloat16).tobytes(), cache.size)


def zstd_bytes(source: bytes, count: int) -> Stored:
    """zstd level 19, one thread, over the bytes of ``count`` values."""
    started = time.perf_counter()
    packed = zstandard.ZstdCompressor(level=19).compress(source)
    middle = time.perf_counter()
    if zstandard.ZstdDecompressor().decompress(packed) != source:
        raise AssertionError("zstd did not give the bytes back")
    seconds = time.perf_counter() - middle
    bits = 8.0 * len(packed) / count
    return Stored(None, bits, bits, middle - started, seconds)


def blosc2(cache: Float32) -> Stored:
    """Blosc2: bit-shuffle and zstd level 9 over the raw bfloat16 bytes, one thread.

    The package must be there: see ``missing``.
    """
    library = importlib.import_module("blosc2")
    source = cache.astype(ml_dtypes.bfloat16).tobytes()
    library.set_nthreads(1)
    options = {"codec": library.Codec.ZSTD, "filter": library.Filter.BITSHUFFLE}
    started = time.perf_counter()
    packed = library.compress2(
        source, typesize=2, clevel=9, codec=options["codec"],
        filters=[options["filter"]], filters_meta=[0], nthreads=1,
    )  # fmt: skip
    middle = time.perf_counter()
    if library.decompress2(packed) != source:
        raise AssertionError("Blosc2 did not give the bytes back")
    seconds = time.perf_counter() - middle
    bits = 8.0 * len(packed) / cache.size
    return Stored(None, bits, bits, middle - started, seconds)


def missing(package: str) -> str | None:
    """Why a package cannot be used, or None."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        return str(error)
    return None


def fp8(cache: Float32) -> Stored:
    """float8_e4m3fn without a scale, values beyond 448 clamped: the cast that engines do."""
    started = time.perf_counter()
    q = np.clip(cache, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    middle = time.perf_counter()
    restored = q.astype(np.float32)
    return Stored(restored, 8.0, 8.0, middle - started, time.perf_counter() - middle)


def int8(cache: Float32) -> Stored:
    """Symmetric int8, a float16 scale per token and head."""
    started = time.perf_counter()
    scale = (np.abs(cache).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scale = np.maximum(scale, np.float32(2.0**-24))
    q = np.clip(np.rint(cache / scale), -127, 127).astype(np.int8)
    middle = time.perf_counter()
    restored = bfloat16(q * scale)
    bits = 8 + 16 / cache.shape[-1]
    return Stored(restored, bits, 8.0, middle - started, time.perf_counter() - middle)


def _groups(x: Float32, levels: int, axis: int) -> tuple[Float32, Float32, Float32]:
    """Asymmetric integers over groups along ``axis``: integers, step, least, step in float16."""
    least = x.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
    reach = x.max(axis, keepdims=True) - least
    step = np.maximum((reach / (levels - 1)).astype(np.float16).astype(np.float32), 2.0**-24)
    return np.clip(np.rint((x - least) / step), 0, levels - 1), step, least


def kivi(cache: Float32, bits: int) -> Stored:
    """KIVI: keys per channel over 32 tokens, values per token over 32 channels, asymmetric.

    The last 128 tokens stay in 16 bits. Step and least value of a group are float16 each. The
    fused kernels are not part of it; the times are those of numpy, integers not bit-packed.
    """
    started = time.perf_counter()
    _, layers, tokens, heads, dim = cache.shape
    held = max(0, tokens - RECENT) // KIVI_GROUP * KIVI_GROUP
    keys = cache[0, :, :held].reshape(layers, -1, KIVI_GROUP, heads, dim)
    values = cache[1, :, :held].reshape(layers, held, heads, -1, KIVI_GROUP)
    parts = _groups(keys, 2**bits, 2), _groups(values, 2**bits, 4)
    middle = time.perf_counter()
    restored = cache.copy()
    for role, (q, step, least) in enumerate(parts):
        restored[role, :, :held] = bfloat16(q * step + least).reshape(layers, held, heads, dim)
    total = held * (bits + 32 / KIVI_GROUP) + (tokens - held) * 16
    payload = held * bits + (tokens - held) * 16
    return Stored(restored, total / tokens, payload / tokens,
                  middle - started, time.perf_counter() - middle)  # fmt: skip


def entropy_bits(q: NDArray[np.integer[Any]]) -> float:
    """Bits of an ideal arithmetic coder for ``q`` ``[N, channels]``, a distribution each."""
    total = 0.0
    for column in q.T:
        counts = np.bincount(column - column.min())
        counts = counts[counts > 0]
        total -= float((counts * np.log2(counts / len(column))).sum())
    return total


def cachegen(cache: Float32, factor: float) -> Stored:
    """CacheGen as published: groups of 10 tokens, the first an anchor, the others deltas to it.

    Anchors take 8 bits, a float16 scale per layer and token. Deltas are rounded to bins of
    0.5, 1 and 1.5 (thirds of the layers) times ``factor`` times the deviation of the layer's
    deltas: the description that was read does not say of what the widths are multiples. The coder
    is ideal and adapted to this very cache, a distribution per layer and channel; ``bits`` adds
    these as 16-bit counts, one for every symbol in the channel's range, and one to say which.
    """
    started = time.perf_counter()
    roles, layers, tokens, heads, dim = cache.shape
    x = cache.reshape(roles * layers, tokens, heads * dim)
    home = np.arange(tokens) // ANCHOR_EVERY * ANCHOR_EVERY
    is_anchor = home == np.arange(tokens)
    anchors = x[:, is_anchor]
    scale = (np.abs(anchors).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scale = np.maximum(scale, np.float32(2.0**-24))
    restored = np.empty_like(x)
    restored[:, is_anchor] = np.rint(anchors / scale) * scale
    payload = float(anchors.size * 8)
    side = float(scale.size * 16)
    for index in range(len(x)):
        third = index % layers * 3 // layers
        base = restored[index, home[~is_anchor]]
        deltas = x[index, ~is_anchor] - base
        width = np.float32(factor * WIDTHS[third] * deltas[ANCHOR_EVERY - 1 :].std())
        q = np.rint(deltas / width).astype(np.int32)
        payload += entropy_bits(q)
        side += float((np.ptp(q, axis=0) + 2).sum() * 16 + 16)
        restored[index, ~is_anchor] = base + q * width
    seconds = time.perf_counter() - started
    out = bfloat16(restored).reshape(cache.shape)
    return Stored(out, (payload + side) / x.size, payload / x.size, seconds, float("nan"))


def cachegen_shipped(cache: Float32) -> Stored:
    """The serialiser that LMCache ships under the name: no anchors, absmax per layer and token.

    32 bins for the keys of the first third and the values of the first two layers, 16 for the
    rest. The published limit is layer 10 of 32; here a third of the layers. Ideal coder; tables of
    33 16-bit entries per layer and channel in every chunk of 256 tokens, a float32 per token.
    """
    started = time.perf_counter()
    roles, layers, tokens, heads, dim = cache.shape
    x = cache.reshape(roles, layers, tokens, heads * dim)
    restored = np.empty_like(x)
    payload = side = 0.0
    for role in range(roles):
        for layer in range(layers):
            fine = layer < (layers // 3 if role == 0 else 2)
            top = np.float32((32 if fine else 16) // 2 - 1)
            scale = np.maximum(np.abs(x[role, layer]).max(-1, keepdims=True), 2.0**-24) / top
            q = np.rint(x[role, layer] / scale).astype(np.int32)
            for first in range(0, tokens, 256):
                payload += entropy_bits(q[first : first + 256])
                side += heads * dim * (33 * 16 + 32)
            side += tokens * 32
            restored[role, layer] = q * scale
    seconds = time.perf_counter() - started
    out = bfloat16(restored).reshape(cache.shape)
    return Stored(out, (payload + side) / x.size, payload / x.size, seconds, float("nan"))


@dataclass(frozen=True, slots=True)
class Basis:
    """KVTC's offline part for runs of layers: ``mean`` ``[n, C]``, ``axes`` ``[n, C, R]``,
    ``variance`` ``[n, R]`` of the coefficients."""

    mean: Float32
    axes: Float32
    variance: Float32

    @property
    def size_bytes(self) -> int:
        """In 16-bit floats, as it would be kept."""
        return 2 * (self.mean.size + self.axes.size)


def learn_basis(rows: Float32, *, cross: bool) -> tuple[Basis, Basis]:
    """PCA of calibration rows ``[2, L, N, C]`` for keys and values: per layer, or of all at once.

    The published basis spans all layers and is learnt from far more tokens; with few of them the
    cross-layer one is cut to its first axes by a randomised decomposition.
    """
    found = []
    for role in rows:
        sets = role.transpose(1, 0, 2).reshape(1, role.shape[1], -1) if cross else role
        means, axes, variances = [], [], []
        for x in sets:
            mean = x.mean(0)
            vectors, variance = _principal(x - mean, CROSS_RANK if cross else x.shape[1])
            means.append(mean)
            axes.append(vectors)
            variances.append(variance)
        found.append(Basis(np.stack(means), np.stack(axes), np.stack(variances)))
    return found[0], found[1]


def _principal(x: Float32, rank: int) -> tuple[Float32, Float32]:
    """The first axes ``[C, rank]`` and variances of centred rows."""
    if rank < x.shape[1]:
        random = np.random.default_rng(0).standard_normal((x.shape[1], rank + 16))
        span = np.linalg.qr(x @ random.astype(np.float32))[0]
        span = np.linalg.qr(x @ (x.T @ span))[0]
        _, size, axes = np.linalg.svd(span.T @ x, full_matrices=False)
        return axes[:rank].T.copy(), (size[:rank] ** 2 / len(x)).astype(np.float32)
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    return vectors[:, ::-1].copy(), np.maximum(values[::-1], 0).astype(np.float32)


def allocate(variance: Float32, budget_bits: float) -> NDArray[np.int64]:
    """Whole bits per component that lower the squared error most, ``budget_bits`` in all.

    The error of b bits over a range of 7 deviations is (7 / (2^b - 1))^2 / 12 of the variance: 1
    and 2 bits are never worth their cost, so a component gets none or ``LEAST_BITS`` and more,
    and taking the largest gain per bit first is what dynamic programming would find, but for the
    last component.
    """
    flat = variance.reshape(-1).astype(np.float64)
    depths = np.arange(LEAST_BITS, MOST_BITS + 1)
    errors = np.concatenate([[1.0], (RANGE_DEVIATIONS / (2.0**depths - 1)) ** 2 / 12])
    cost = np.diff(depths, prepend=0)
    gains = flat[:, None] * (-np.diff(errors) / cost)
    best = np.argsort(-gains, axis=None, kind="stable")
    spent = np.cumsum(cost[best % len(cost)])
    taken = best[: np.searchsorted(spent, budget_bits, side="right")]
    weights = cost[taken % len(cost)].astype(np.float64)
    bits = np.bincount(taken // len(cost), weights, minlength=len(flat)).astype(np.int64)
    return bits.reshape(variance.shape)


def kvtc(
    unrotated: Float32, bases: Sequence[Basis], bits: float, *, sinks: int, recent: int
) -> Stored:
    """KVTC: un-rotated keys, PCA, whole bits per component, DEFLATE.

    The first tokens, 4 as published, and the last ``recent`` (128) stay in 16 bits. Bits are
    allocated by variances of the calibration text, greedily (``allocate``). A component's range
    is that of this cache, two float16 a component; integers are packed in bits and deflated, or
    deflated in bytes where that is smaller. ``bits`` is the mean before DEFLATE. The basis is not
    counted: see ``Basis.size_bytes``. The caller rotates the keys again and rounds.
    """
    started = time.perf_counter()
    _, layers, tokens, heads, dim = unrotated.shape
    held = slice(sinks, tokens - recent)
    count = tokens - recent - sinks
    restored = unrotated.copy()
    total = side = 0
    decode_s = 0.0
    for role, basis in enumerate(bases):
        shape = (len(basis.mean), -1, count)
        x = unrotated[role, :, held].reshape(layers, count, heads * dim)
        given = bits * layers * heads * dim
        rows = x.transpose(1, 0, 2).reshape(1, count, -1) if shape[0] == 1 else x
        plan = allocate(basis.variance, given)
        out = np.empty_like(rows)
        for index, axes in enumerate(basis.axes):
            kept = np.flatnonzero(plan[index])
            y = (rows[index] - basis.mean[index]) @ axes[:, kept]
            levels = (2.0 ** plan[index, kept] - 1).astype(np.float32)
            least, most = y.min(0), y.max(0)
            step = np.maximum((most - least) / levels, np.float32(2.0**-24))
            q = np.rint((y - least) / step)
            total += 8 * _deflated(q.astype(np.uint8), plan[index, kept])
            side += 32 * len(kept)
            before = time.perf_counter()
            out[index] = (q * step + least) @ axes[:, kept].T + basis.mean[index]
            decode_s += time.perf_counter() - before
        back = out.reshape(count, layers, -1).transpose(1, 0, 2) if shape[0] == 1 else out
        restored[role, :, held] = back.reshape(layers, count, heads, dim)
    seconds = time.perf_counter() - started - decode_s
    exact = (sinks + recent) * 16 * unrotated.size // tokens
    return Stored(restored, (total + side + exact) / unrotated.size,
                  (total + exact) / unrotated.size, seconds, decode_s)  # fmt: skip


def _deflated(q: Bytes, bits: NDArray[np.int64]) -> int:
    """Bytes of integers ``[N, K]``, component after component, the better of two packings."""
    planes = [
        np.packbits(np.unpackbits(column[:, None], axis=1)[:, 8 - depth :])
        for column, depth in zip(q.T, bits, strict=True)
    ]
    packed = np.concatenate(planes).tobytes() if planes else b""
    plain = np.ascontiguousarray(q.T).tobytes()
    return min(len(zlib.compress(packed, 6)), len(zlib.compress(plain, 6)), len(packed))


def video(cache: Float32, levels: int) -> Stored:
    """Integers between a layer's least and largest value, a gray picture per layer, x265 lossless.

    Pictures are tokens by channels; keys and values are two streams, preset medium, one thread.
    """
    roles, layers, tokens, heads, dim = cache.shape
    started = time.perf_counter()
    x = cache.reshape(roles, layers, tokens, heads * dim)
    least = x.min((2, 3), keepdims=True)
    step = np.maximum((x.max((2, 3), keepdims=True) - least) / (levels - 1), 2.0**-24)
    q = np.rint((x - least) / step).astype(np.uint8)
    streams = [_x265(pictures) for pictures in q]
    middle = time.perf_counter()
    back = np.stack([_decoded(data) for data in streams])
    restored = bfloat16(back * step + least).reshape(cache.shape)
    seconds = time.perf_counter() - middle
    if not (back == q).all():
        raise AssertionError("x265 did not give the pictures back")
    payload = 8.0 * sum(map(len, streams))
    side = 64.0 * roles * layers
    return Stored(restored, (payload + side) / cache.size, payload / cache.size,
                  middle - started, seconds)  # fmt: skip


def _x265(pictures: Bytes) -> bytes:
    av = importlib.import_module("av")
    context = av.CodecContext.create("libx265", "w")
    context.height, context.width = pictures.shape[1:]
    context.pix_fmt, context.time_base = "gray", Fraction(1, 25)
    context.options = {
        "preset": "medium",
        "x265-params": "lossless=1:pools=1:frame-threads=1:log-level=error",
    }
    packets = []
    for number, picture in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="gray")
        frame.pts = number
        packets += context.encode(frame)
    return b"".join(bytes(packet) for packet in [*packets, *context.encode(None)])


def _decoded(data: bytes) -> Bytes:
    av = importlib.import_module("av")
    context = av.CodecContext.create("hevc", "r")
    context.thread_count = 1
    frames = [frame for packet in context.parse(data) for frame in context.decode(packet)]
    frames += [frame for packet in context.parse(b"") for frame in context.decode(packet)]
    frames += context.decode(None)
    return np.stack([frame.to_ndarray(format="gray") for frame in frames])
