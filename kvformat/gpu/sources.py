"""Where integers lie in device memory, as two tables whose sum is an address.

In pictures as in arrays the sample of token t and channel c of a layer lies at
``token_offset[t] + channel_offset[c]`` from the start of the layer's plane (section 10.4 is
separable in t and k). So one reference and one kernel serve every layout and codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.layout import Layout

Offsets = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Source:
    """Integers in device memory.

    ``planes`` has one uint8 tensor per layer of the segment; offsets count bytes from its first
    element. Sample j of ``token_offsets`` int32 ``[J]`` belongs to token ``numbers[j] + shift`` of
    the segment, which may be beyond its end. ``pitch`` names the geometry for caches of tables.
    """

    planes: tuple[Any, ...]
    token_offsets: Any
    numbers: Any
    shift: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Geometry:
    """Channel k of a token lies at ``rows[k // width] + columns[k % width]``; hashable."""

    kind: str
    layout: Layout | None = None
    pitch: int = 0
    strides: tuple[int, int] = (0, 0)

    def channel_offsets(self, heads: int, head_dim: int) -> Offsets:
        """Byte offsets int32 ``[heads, rank]`` of the channels of one token."""
        if self.layout is None:
            by_head, by_rank = self.strides
            offsets = np.arange(heads)[:, None] * by_head + np.arange(head_dim) * by_rank
            return offsets.astype(np.int32)
        la = self.layout
        k = np.arange(heads * head_dim)
        y, x = k // la.tile_width * la.fold_height, k % la.tile_width * la.fold_width
        return (y * self.pitch + x).astype(np.int32).reshape(heads, head_dim)


def frame_tokens(layout: Layout, pitch: int) -> tuple[Offsets, Offsets, int]:
    """Byte offsets and token numbers int32 ``[J]`` of frame 0; what each frame adds to these."""
    la = layout
    site, b = (axis.ravel() for axis in np.indices((la.cells, la.fold)))
    y = site // la.grid_columns * la.tile_height * la.fold_height + b // la.fold_width
    x = site % la.grid_columns * la.tile_width * la.fold_width + b % la.fold_width
    offsets = (y * pitch + x).astype(np.int32)
    if la.order == "time":
        return offsets, (site * la.frames * la.fold + b).astype(np.int32), la.fold
    return offsets, np.arange(la.cells * la.fold, dtype=np.int32), la.cells * la.fold


def array_source(planes: Sequence[Any], tables: Any) -> Source:
    """Integers uint8 ``[T, H, rank]`` of each layer, any strides, already on the device."""
    first = planes[0]
    tokens = first.shape[0]
    by_token, by_head, by_rank = (int(stride) for stride in first.stride())
    offsets = np.arange(tokens, dtype=np.int64) * by_token
    kind = ("array", tokens, by_token)
    token_offsets, numbers = tables.pair(
        kind, lambda: (offsets.astype(np.int32), np.arange(tokens, dtype=np.int32))
    )
    geometry = Geometry("array", strides=(by_head, by_rank))
    return Source(tuple(planes), token_offsets, numbers, 0, geometry)


def frame_source(planes: Sequence[Any], layout: Layout, frame: int, tables: Any) -> Source:
    """The samples of picture ``frame``: planes uint8 ``[height, width]`` of one pitch."""
    pitch = int(planes[0].stride(0))
    made = frame_tokens(layout, pitch)
    token_offsets, numbers = tables.pair(("frame", layout, pitch), lambda: made[:2])
    geometry = Geometry("frame", layout, pitch)
    return Source(tuple(planes), token_offsets, numbers, frame * made[2], geometry)
