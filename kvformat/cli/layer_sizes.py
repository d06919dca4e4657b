"""Where the bytes of a track go: stored bytes per group and run of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvformat.artifact import Artifact
from kvformat.tracks import Track


@dataclass(frozen=True, slots=True)
class RunSize:
    """The segments of a run of layers that are stored together, at most three."""

    group: str
    role: str
    layers: tuple[int, ...]
    size_bytes: int
    values: int

    @property
    def bits_per_value(self) -> float:
        """Without sets and tables."""
        return 8 * self.size_bytes / max(1, self.values)

    @property
    def label(self) -> str:
        """``0-2``, or one number; global layers need not be adjacent."""
        first, last = self.layers[0], self.layers[-1]
        if last - first == len(self.layers) - 1:
            return f"{first}-{last}" if last > first else str(first)
        return ", ".join(str(layer) for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "group": self.group,
            "role": self.role,
            "layers": list(self.layers),
            "bytes": self.size_bytes,
            "bits_per_value": round(self.bits_per_value, 4),
        }


def layer_sizes(artifact: Artifact, track: Track) -> list[RunSize]:
    """One entry per group and layer run, in the order of groups; reads the segment table."""
    records = artifact.segment_table(track).records
    result: list[RunSize] = []
    for number, group in enumerate(artifact.groups):
        mine = records[records["group"] == number]
        values = (
            mine["layer_count"].astype(np.int64)
            * mine["token_count"].astype(np.int64)
            * mine["head_count"].astype(np.int64)
            * group.head_dim
        )
        for first in np.unique(mine["layer_index"]):
            here = mine["layer_index"] == first
            count = int(mine["layer_count"][here][0])
            layers = group.layers[int(first) : int(first) + count]
            stored = int(mine["stored_bytes"][here].sum(dtype=np.int64))
            result.append(RunSize(group.name, group.role, layers, stored, int(values[here].sum())))
    return result
