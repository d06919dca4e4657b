"""Quantisation parameters and address tables in device memory, made once and kept while reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.gpu.libraries import load_torch
from kvformat.gpu.sources import Geometry
from kvformat.segments import PartOfSegment
from kvformat.sets import QuantisationSet

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Channels:
    """Parameters of some layers and heads: tensors ``[n, heads, head_dim]`` in original dim order.

    ``offsets`` int32 are byte offsets of the stored sample, ``zero`` int32, ``scale`` and ``bias``
    float32; ``bias`` may be None.
    """

    offsets: Any
    scale: Any
    zero: Any
    bias: Any | None


class Tables:
    """Small tensors on one device, by key. Safe to share between threads."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._kept: dict[Hashable, Any] = {}
        self._owners: dict[int, object] = {}

    def put(self, array: Array) -> Any:
        """A copy of ``array`` on the device."""
        tensor = load_torch().from_numpy(np.array(array, order="C"))
        return tensor.to(self.device)

    def pair(self, key: Hashable, make: Callable[[], tuple[Array, Array]]) -> tuple[Any, Any]:
        """Two tensors."""

        def both() -> tuple[Any, Any]:
            first, second = make()
            return self.put(first), self.put(second)

        found: tuple[Any, Any] = self._get(("pair", key), both)
        return found

    def one(self, key: Hashable, make: Callable[[], Array]) -> Any:
        """A tensor."""
        return self._get(("one", key), lambda: self.put(make()))

    def triple(self, owner: object, arrays: tuple[Array, Array, Array]) -> tuple[Any, Any, Any]:
        """Tensors of three arrays that ``owner`` has for good."""
        self._owners[id(owner)] = owner  # the id is a key for as long as the owner lives
        first, second, third = self._get(
            ("triple", id(owner)), lambda: tuple(self.put(array) for array in arrays)
        )
        return first, second, third

    def _get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]

    def channels(
        self,
        item: QuantisationSet,
        geometry: Geometry,
        heads: slice,
        part: PartOfSegment,
        *,
        ranked: bool,
    ) -> Channels:
        """Parameters of a part of a segment whose integers lie as ``geometry`` says.

        ``heads`` are those of the segment among those held; ``ranked`` tells that integers are
        stored by rank.
        """
        span = (heads.start, heads.stop, *_ends(part.layers), *_ends(part.heads))
        self._owners[id(item)] = item  # the id is a key for as long as the set lives
        found: Channels = self._get(
            ("channels", id(item), geometry, ranked, span),
            lambda: self._make(item, geometry, heads, part, ranked),
        )
        return found

    def _make(
        self,
        item: QuantisationSet,
        geometry: Geometry,
        heads: slice,
        part: PartOfSegment,
        ranked: bool,
    ) -> Channels:
        count = heads.stop - heads.start
        shape = (item.layers, count, item.head_dim)
        stored = np.broadcast_to(geometry.channel_offsets(count, item.head_dim), shape)
        if ranked and item.order is not None:
            rank = np.argsort(item.order[:, heads], axis=-1)
            stored = np.take_along_axis(stored, rank, axis=-1)

        def cut(values: Array, kind: type[Any]) -> Any:
            mine = values if values.shape[1] == 1 else values[:, heads]
            return self.put(np.broadcast_to(mine, shape)[part.layers, part.heads].astype(kind))

        bias = None if item.bias is None else cut(item.bias, np.float32)
        return Channels(
            self.put(stored[part.layers, part.heads]),
            cut(item.scale, np.float32),
            cut(item.zero, np.int32),
            bias,
        )

    def offsets(self, geometry: Geometry, order: Array | None, shape: tuple[int, int, int]) -> Any:
        """Byte offsets int32 ``[n, heads, head_dim]`` of a token's samples, by original dim."""
        stored = np.broadcast_to(geometry.channel_offsets(*shape[1:]), shape)
        if order is not None:
            stored = np.take_along_axis(stored, np.argsort(order, axis=-1), axis=-1)
        return self.put(stored)


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop
