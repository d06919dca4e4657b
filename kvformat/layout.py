"""Where the integers of a segment lie in its pictures (spec section 8): pure index arithmetic.

A picture is a grid of ``grid_rows x grid_columns`` *tiles* of ``tile_height x tile_width``
channels; a tile holds one channel vector a *fold*, a block of ``fold_height x fold_width``
tokens in which every channel of the tile is widened. With ``B = fold_height * fold_width``,
``cells = grid_rows * grid_columns`` and ``F = frames``, token ``t`` (from the segment's start)
and channel ``k`` (in stored column order) have the address::

    b = t mod B                g = t div B
    time:    f = g mod F       cell = g div F
    raster:  cell = g mod cells    f = g div cells
    y = ((cell div grid_columns) * tile_height + k div tile_width) * fold_height + b div fold_width
    x = ((cell mod grid_columns) * tile_width + k mod tile_width) * fold_width + b mod fold_width

Every sample without an address is *filler* and is 128. ``address`` is the reference; the other
functions move whole boxes of samples with strided views and give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvformat.limits import LIMITS

Order: TypeAlias = Literal["time", "raster"]
Bytes: TypeAlias = NDArray[np.uint8]

FILLER: Final = 128
SIDE_MULTIPLE: Final = 16
SAMPLES_PER_PICTURE: Final = 2**21
"""What the writer's candidates keep to a plane; x265 needs seven times three of them a frame."""
_TIME_TILE_WIDTH: Final = 8
_TIME_TILE_HEIGHT: Final = 2048
_FILLER_RATIO: Final = 1.5


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of the spec; every size is in samples, tokens or channels (see the module).

    ``width`` and ``height`` are the size of the picture. Nothing is checked here: the fields
    may come from a manifest. Call ``fault`` before any other function of this module.
    """

    order: Order
    tile_height: int
    tile_width: int
    grid_rows: int
    grid_columns: int
    frames: int
    fold_height: int
    fold_width: int
    width: int
    height: int

    @property
    def cells(self) -> int:
        """Tiles in a picture."""
        return self.grid_rows * self.grid_columns

    @property
    def fold(self) -> int:
        """Tokens that share a tile (``B``)."""
        return self.fold_height * self.fold_width

    @property
    def token_capacity(self) -> int:
        """Tokens that all pictures together can hold."""
        return self.fold * self.cells * self.frames

    @property
    def channel_capacity(self) -> int:
        """Channels that one tile can hold."""
        return self.tile_height * self.tile_width


def fault(layout: Layout, tokens: int, channels: int) -> str:
    """Say why ``layout`` cannot hold ``tokens`` x ``channels``, or return an empty string."""
    if layout.order not in ("time", "raster"):
        return f"order {layout.order!r} is neither 'time' nor 'raster'"
    for name in ("tile_height", "tile_width", "grid_rows", "grid_columns"):
        if getattr(layout, name) < 1:
            return f"{name} is less than 1"
    if layout.fold_height < 1 or layout.fold_width < 1:
        return "a fold side is less than 1"
    if not 1 <= layout.frames <= LIMITS.frames_per_segment:
        return f"frames is not in 1..{LIMITS.frames_per_segment}"
    for name in ("width", "height"):
        side = getattr(layout, name)
        if side % SIDE_MULTIPLE or not LIMITS.picture_side_minimum <= side <= LIMITS.picture_side:
            return (
                f"{name} {side} is not a multiple of {SIDE_MULTIPLE} in "
                f"{LIMITS.picture_side_minimum}..{LIMITS.picture_side}"
            )
    if layout.grid_rows * layout.tile_height * layout.fold_height > layout.height:
        return "the grid is higher than the picture"
    if layout.grid_columns * layout.tile_width * layout.fold_width > layout.width:
        return "the grid is wider than the picture"
    if channels > layout.channel_capacity:
        return f"a tile holds {layout.channel_capacity} channels, not {channels}"
    if tokens > layout.token_capacity:
        return f"the pictures hold {layout.token_capacity} tokens, not {tokens}"
    return ""


def address(layout: Layout, t: int, k: int) -> tuple[int, int, int]:
    """Return ``(frame, y, x)`` of token ``t``, channel ``k``: the spec's formula, word by word."""
    g, b = divmod(t, layout.fold)
    if layout.order == "time":
        cell, f = divmod(g, layout.frames)
    else:
        f, cell = divmod(g, layout.cells)
    row, column = divmod(cell, layout.grid_columns)
    y = (row * layout.tile_height + k // layout.tile_width) * layout.fold_height
    x = (column * layout.tile_width + k % layout.tile_width) * layout.fold_width
    return f, y + b // layout.fold_width, x + b % layout.fold_width


def place(layout: Layout, q: Bytes, planes: Bytes) -> None:
    """Write ``q`` ``[tokens, channels]`` (any strides) into ``planes`` ``[frames, height, width]``.

    ``planes`` must hold ``FILLER`` everywhere before; filler stays as it is.
    """
    tokens, channels = q.shape
    for rows, columns, samples in _boxes(layout, planes, 0, tokens, channels):
        samples[...] = q[rows, columns].reshape(samples.shape)


def gather(
    layout: Layout, planes: Bytes, tokens: int, channels: int, out: Bytes, *, start: int = 0
) -> None:
    """Read tokens ``start`` to ``start + tokens`` from ``planes`` ``[frames, height, width]``.

    ``out`` ``[tokens, channels]`` may have any strides, those of a slice of a larger array or
    of a transposed one too. Only frames that hold one of these tokens are touched.
    """
    for rows, columns, samples in _boxes(layout, planes, start, start + tokens, channels):
        shifted = slice(rows.start - start, rows.stop - start)
        # Splitting axes never copies, so this writes through to `out`.
        out[shifted, columns].reshape(samples.shape)[...] = samples


def filler_is_clean(layout: Layout, planes: Bytes, tokens: int, channels: int) -> bool:
    """Tell whether every sample of ``planes`` that has no address is ``FILLER``.

    Addresses are distinct, so this holds exactly when as many samples differ from the filler
    value among the addressed ones as among all.
    """
    everywhere = sum(int(np.count_nonzero(plane != FILLER)) for plane in planes)
    addressed = sum(
        int(np.count_nonzero(samples != FILLER))
        for _, _, samples in _boxes(layout, planes, 0, tokens, channels)
    )
    return everywhere == addressed


def frames_needed(layout: Layout, start: int, stop: int) -> range:
    """The shortest range of frames that holds tokens ``start`` to ``stop`` of a segment."""
    if stop <= start:
        return range(0)
    first, last = start // layout.fold, (stop - 1) // layout.fold
    if layout.order == "raster":
        return range(first // layout.cells, last // layout.cells + 1)
    if first // layout.frames == last // layout.frames:
        return range(first % layout.frames, last % layout.frames + 1)
    return range(layout.frames)


def _boxes(
    layout: Layout, planes: Bytes, start: int, stop: int, channels: int
) -> Iterator[tuple[slice, slice, Bytes]]:
    """Cut tokens ``start`` to ``stop`` x all channels into boxes with a strided view each.

    Yields the token slice, the channel slice and the samples, a view of ``planes`` of six or
    seven axes whose leading axes run over the tokens and whose last one or two over the
    channels, both in rising order, so that a reshape of ``[tokens, channels]`` matches it.
    """
    la = layout
    high = la.grid_rows * la.tile_height * la.fold_height
    wide = la.grid_columns * la.tile_width * la.fold_width
    down = (la.grid_rows, la.tile_height, la.fold_height)
    across = (la.grid_columns, la.tile_width, la.fold_width)
    axes = (1, 4, 0, 3, 6, 2, 5) if la.order == "time" else (0, 1, 4, 3, 6, 2, 5)
    samples = planes[:, :high, :wide].reshape(la.frames, *down, *across).transpose(axes)
    full, rest = divmod(channels, la.tile_width)
    for rows, index in _aligned_runs(samples.shape[:5], start, stop):
        run = samples[index]
        if full:
            yield rows, slice(0, full * la.tile_width), run[..., :full, :]
        if rest:
            yield rows, slice(full * la.tile_width, channels), run[..., full, :rest]


def _aligned_runs(
    radix: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[slice, tuple[int | slice, ...]]]:
    """Cut the counter values ``start`` to ``stop`` into runs that are boxes of digits.

    Digits count with ``radix``, most significant first. Each run fixes some leading digits,
    has a range in one, and takes all of the rest; there are at most two runs a digit.
    """
    while start < stop:
        depth = 0
        unit = prod(radix[1:])
        while depth < len(radix) - 1 and (start % unit or start + unit > stop):
            depth += 1
            unit = prod(radix[depth + 1 :])
        digit = start // unit % radix[depth]
        count = min(radix[depth] - digit, (stop - start) // unit)
        leading = tuple(start // prod(radix[i + 1 :]) % radix[i] for i in range(depth))
        end = start + count * unit
        yield slice(start, end), (*leading, slice(digit, digit + count))
        start = end


# ---------------------------------------------------------------------------------------------
# What a writer chooses from


def candidate_layouts(tokens: int, channels: int) -> list[Layout]:
    """The layouts worth trying for a segment of ``tokens`` x ``channels``, most general last.

    The same arguments give the same list. Each layout holds the segment, keeps to the limits of
    the spec and to ``SAMPLES_PER_PICTURE`` unless one token needs more. In this order, as far
    as they do not waste more than a third of the samples on filler:

    1. token as time, tiles of eight columns: keys that resemble their predecessor;
    2. channels as rows with two rows a channel: few bits, or strong drift along the tokens;
    3. rows with 4 x 4 tokens folded: values;
    4. rows are tokens: always present.
    """
    tokens = max(tokens, 1)
    candidates = (
        _time(tokens, channels),
        _channel_rows(tokens, channels),
        _rows(tokens, channels, 4, 4),
    )
    bound = _FILLER_RATIO * tokens * channels
    good = [
        la
        for la in candidates
        if la is not None
        and la.width * la.height * la.frames <= bound
        and la.width * la.height <= SAMPLES_PER_PICTURE
        and not fault(la, tokens, channels)
    ]
    return [*good, _rows(tokens, channels, 1, 1)]


def tail_layout(layout: Layout, tokens: int) -> Layout:
    """``layout`` for a shorter segment of ``tokens``: fewer frames of the same picture size."""
    return replace(layout, frames=max(1, _up(tokens, layout.fold * layout.cells)))


def _time(tokens: int, channels: int) -> Layout | None:
    """Small pictures, many frames: each cell holds a run of consecutive tokens, one a frame."""
    tile_width = _TIME_TILE_WIDTH
    while _up(channels, tile_width) > _TIME_TILE_HEIGHT:
        tile_width *= 2
    tile_height = _up(channels, tile_width)
    grid = _repeats(tile_height), _repeats(tile_width)
    frames = _up(tokens, grid[0] * grid[1])
    if frames < 2:
        return None
    return _layout("time", (tile_height, tile_width), grid, frames, (1, 1))


def _channel_rows(tokens: int, channels: int) -> Layout | None:
    """Each channel is two rows of tokens; the columns are sorted, so neighbours are alike."""
    fold_height = 2
    height = _padded(channels * fold_height)
    widest = min(SAMPLES_PER_PICTURE // height, LIMITS.picture_side) // SIDE_MULTIPLE
    if widest < 1:
        return None
    frames = _up(tokens, fold_height * widest * SIDE_MULTIPLE)
    fold_width = _padded(_up(tokens, fold_height * frames))
    return _layout("raster", (channels, 1), (1, 1), frames, (fold_height, fold_width))


def _rows(tokens: int, channels: int, fold_height: int, fold_width: int) -> Layout:
    """Each grid row is one fold of tokens (several side by side where channels are few)."""
    tile_height = _up(channels * fold_width, LIMITS.picture_side)
    tile_width = _up(channels, tile_height)
    columns = _repeats(tile_width * fold_width)
    width = _padded(columns * tile_width * fold_width)
    groups = _up(tokens, fold_height * fold_width)
    rows = _up(groups, columns)
    high = min(SAMPLES_PER_PICTURE // width, LIMITS.picture_side) // SIDE_MULTIPLE * SIDE_MULTIPLE
    frames = _up(rows, max(1, high // (tile_height * fold_height)))
    grid = _up(rows, frames), columns
    fold = fold_height, fold_width
    return _layout("raster", (tile_height, tile_width), grid, _up(rows, grid[0]), fold)


def _repeats(side: int) -> int:
    """How often to repeat ``side`` samples so that little of the padded picture side is lost."""
    if side >= LIMITS.picture_side_minimum:
        return 1
    counts = range(1, _up(2 * LIMITS.picture_side_minimum, side) + 1)
    return min(counts, key=lambda count: (_padded(count * side) / (count * side), count))


def _layout(
    order: Order, tile: tuple[int, int], grid: tuple[int, int], frames: int, fold: tuple[int, int]
) -> Layout:
    height, width = (_padded(tile[i] * grid[i] * fold[i]) for i in (0, 1))
    return Layout(order, *tile, *grid, frames, *fold, width=width, height=height)


def _padded(side: int) -> int:
    """The picture side that holds ``side`` samples."""
    return max(LIMITS.picture_side_minimum, _up(side, SIDE_MULTIPLE) * SIDE_MULTIPLE)


def _up(value: int, unit: int) -> int:
    """Whole units that hold ``value``."""
    return -(-value // unit)
