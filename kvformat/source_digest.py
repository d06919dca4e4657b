"""The source digest (CID-1) from the segments of an exact track, as they come or read anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvformat.artifact import Artifact
from kvformat.digests import digest_all
from kvformat.encoder import raw_bytes
from kvformat.tables import SegmentRecord

Bytes = NDArray[np.uint8]
"""``[layer, token, head, dim, byte]`` of one segment."""


class SourceDigest:
    """BLAKE3 of each layer's tensor, group by group, one token block at a time.

    ``in_file_order`` says whether segments, taken as the file has them, bring the tokens of each
    layer in order with all heads together. Files that are layer-major and split heads do not:
    their segments must be added in the order of ``sorted_records``.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._fields = fields = artifact.grid.fields
        self._heads = [group.heads for group in artifact.groups]
        self._hashers = [[blake3() for _ in group.layers] for group in artifact.groups]
        self._parts: list[Bytes] = []
        self.sorted_records: NDArray[np.intp] = np.lexsort(
            tuple(fields[name] for name in ("head_start", "token_start", "layer_index", "group"))
        )
        self.in_file_order = self._in_file_order()

    def _in_file_order(self) -> bool:
        fields, order = self._fields, self.sorted_records
        step = np.diff(order)
        same = np.ones(len(step), np.bool_)
        for name in ("group", "layer_index"):
            same &= np.diff(fields[name][order].astype(np.int64)) == 0
        block = same & (np.diff(fields["token_start"][order].astype(np.int64)) == 0)
        return bool(np.all(step[same] > 0) and np.all(step[block] == 1))

    def add(self, record: SegmentRecord, integers: Bytes) -> None:
        """The next segment; heads of a block are put together."""
        cell = record.cell
        self._parts.append(integers)
        if cell.head_start + cell.head_count < self._heads[cell.group]:
            return
        block = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts, 2)
        self._parts = []
        for number, layer in enumerate(block, cell.layer_index):
            self._hashers[cell.group][number].update(raw_bytes(layer))

    def add_all(self, read: Callable[[int], tuple[SegmentRecord, Any]]) -> None:
        """All segments in an order that always works; ``read`` gets one by its number."""
        for index in self.sorted_records:
            self.add(*read(int(index)))

    def hex(self) -> str:
        """The digest of the digests of all layers."""
        return digest_all(self._layers()).hex()

    def _layers(self) -> Iterator[bytes]:
        for group in self._hashers:
            yield from (hasher.digest() for hasher in group)
