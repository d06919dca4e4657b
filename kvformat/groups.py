"""Groups, segmentation and the grid of cells (spec section 7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np

from kvformat.dtypes import DTYPES
from kvformat.fields import Node, schema_error, semantic_error, to_json
from kvformat.limits import LIMITS
from kvformat.tokens import Tokens

ORDERS: Final = ("token-major", "layer-major")
ALIGNMENTS: Final = (1, 4096)


@dataclass(frozen=True, slots=True)
class Extent:
    """Which tokens a group holds: kind ``all``, ``window`` or ``state`` (section 7.1)."""

    kind: str = "all"
    held_start: int = 0
    cumulative_tokens: int = 0
    shape: tuple[int, ...] = ()

    @staticmethod
    def parse(node: Node) -> Extent:
        """From JSON."""
        kind = node.kind("all", "window", "state")
        if kind == "window":
            m = node.members("cumulative_tokens", "held_start", "kind")
            return Extent(
                kind,
                held_start=m["held_start"].integer(),
                cumulative_tokens=m["cumulative_tokens"].integer(),
            )
        if kind == "state":
            m = node.members("kind", "shape")
            shape = m["shape"].each(lambda item: item.integer(1), minimum=1)
            if len(shape) > 8:
                raise schema_error("too many factors", m["shape"].pointer, "at most 8", len(shape))
            return Extent(kind, shape=shape)
        node.members("kind")
        return Extent(kind)

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        if self.kind == "window":
            return {
                "cumulative_tokens": self.cumulative_tokens,
                "held_start": self.held_start,
                "kind": "window",
            }
        if self.kind == "state":
            return {"kind": "state", "shape": list(self.shape)}
        return {"kind": "all"}


_GROUP_KEYS: Final = (
    "dtype",
    "head_dim",
    "head_start",
    "heads",
    "heads_total",
    "layers",
    "name",
    "role",
    "tokens",
)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one role, dtype and shape for a list of layers (section 7.1)."""

    name: str
    role: str
    dtype: str
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    heads_total: int
    head_start: int = 0
    tokens: Extent = Extent()

    @staticmethod
    def parse(node: Node) -> Group:
        """From JSON."""
        m = node.members(*_GROUP_KEYS)
        group = Group(
            name=m["name"].name(),
            role=m["role"].name(),
            dtype=m["dtype"].choice(*DTYPES),
            layers=m["layers"].each(Node.integer, minimum=1),
            heads=m["heads"].integer(1, "heads"),
            head_dim=m["head_dim"].integer(1, "head_dim"),
            heads_total=m["heads_total"].integer(1, "heads"),
            head_start=m["head_start"].integer(),
            tokens=Extent.parse(m["tokens"]),
        )
        LIMITS.check("layers_per_group", len(group.layers), f"{node.pointer}/layers")
        LIMITS.check("channels", group.channels, node.pointer)
        return group

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {key: to_json(getattr(self, key)) for key in _GROUP_KEYS}

    @property
    def channels(self) -> int:
        """Channels of one layer, heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def quantisable(self) -> bool:
        """Whether a quality may hold integers for this group (QUA-3)."""
        return self.dtype != "uint8" and self.tokens.kind != "state"

    def held(self, count: int) -> tuple[int, int]:
        """The token ordinals held, of an artifact with ``count`` tokens; a state holds [0, 1)."""
        if self.tokens.kind == "state":
            return (0, 1)
        return (self.tokens.held_start, count)

    def shape(self, count: int) -> tuple[int, int, int, int]:
        """``[L, T, H, D]`` of the whole group in an artifact with ``count`` tokens."""
        start, stop = self.held(count)
        return (len(self.layers), stop - start, self.heads, self.head_dim)

    def check(self, pointer: str, layers_total: int, tokens: Tokens) -> None:
        """GRP-2, GRP-3, GRP-5, GRP-6."""
        if any(a >= b for a, b in pairwise(self.layers)):
            raise semantic_error("layers are not strictly ascending", f"{pointer}/layers")
        if self.layers[-1] >= layers_total:
            raise semantic_error(
                "a layer that the model lacks",
                f"{pointer}/layers",
                expected=f"below {layers_total}",
                found=self.layers[-1],
            )
        if self.head_start + self.heads > self.heads_total:
            raise semantic_error(
                "more heads than the model has",
                f"{pointer}/heads",
                expected=f"at most {self.heads_total}",
                found=self.head_start + self.heads,
            )
        extent = self.tokens
        if extent.kind == "window":
            if extent.held_start > tokens.count:
                raise semantic_error(
                    "the window starts behind the last token",
                    f"{pointer}/tokens/held_start",
                    expected=f"at most {tokens.count}",
                    found=extent.held_start,
                )
            if extent.cumulative_tokens != tokens.first_position + tokens.count:
                raise semantic_error(
                    "cumulative_tokens is not the end of the artifact",
                    f"{pointer}/tokens/cumulative_tokens",
                    expected=tokens.first_position + tokens.count,
                    found=extent.cumulative_tokens,
                )
        if extent.kind == "state" and prod(extent.shape) != self.head_dim:
            raise semantic_error(
                "the shape does not have head_dim elements",
                f"{pointer}/tokens/shape",
                expected=self.head_dim,
                found=prod(extent.shape),
            )


@dataclass(frozen=True, slots=True)
class GroupSegmentation:
    """Layers and heads per segment of one group."""

    layers: int
    heads: int

    @staticmethod
    def parse(node: Node) -> GroupSegmentation:
        """From JSON."""
        m = node.members("heads", "layers")
        return GroupSegmentation(
            m["layers"].integer(1, "layers_per_segment"), m["heads"].integer(1, "heads")
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"heads": self.heads, "layers": self.layers}


@dataclass(frozen=True, slots=True)
class Segmentation:
    """How groups are cut into cells, and the order of segments (section 7.3)."""

    tokens: int
    groups: tuple[GroupSegmentation, ...]
    order: str = "token-major"
    alignment: int = 1

    @staticmethod
    def parse(node: Node) -> Segmentation:
        """From JSON."""
        m = node.members("alignment", "groups", "order", "tokens")
        alignment = m["alignment"].integer(1)
        if alignment not in ALIGNMENTS:
            raise schema_error("unknown alignment", m["alignment"].pointer, ALIGNMENTS, alignment)
        return Segmentation(
            m["tokens"].integer(1, "tokens_per_segment"),
            m["groups"].each(GroupSegmentation.parse),
            m["order"].choice(*ORDERS),
            alignment,
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "alignment": self.alignment,
            "groups": to_json(self.groups),
            "order": self.order,
            "tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """The coordinates of a segment, the same in all tracks (section 7.3)."""

    group: int
    layer_index: int
    layer_count: int
    head_start: int
    head_count: int
    token_start: int
    token_count: int

    def values(self, group: Group) -> int:
        """Number of values of the segment."""
        return self.layer_count * self.token_count * self.head_count * group.head_dim


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of an artifact in table order, without a loop over them.

    ``fields`` is a structured array ``[segments]`` with the coordinates of ``Cell``.
    """

    fields: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.fields)

    def cell(self, index: int) -> Cell:
        """The cell of the segment ``index``."""
        return Cell(*(int(item) for item in self.fields[index]))

    def __iter__(self) -> Iterator[Cell]:
        return (self.cell(index) for index in range(len(self)))


CELL_DTYPE: Final = np.dtype(
    [
        ("group", "<i8"),
        ("layer_index", "<i8"),
        ("layer_count", "<i8"),
        ("head_start", "<i8"),
        ("head_count", "<i8"),
        ("token_start", "<i8"),
        ("token_count", "<i8"),
    ]
)


def token_blocks(group: Group, count: int, step: int) -> tuple[Any, Any, Any]:
    """``(b, token_start, token_count)`` of the group's token blocks, int64 arrays."""
    if group.tokens.kind == "state":
        return np.array([-(-count // step)]), np.array([0]), np.array([1])
    start, stop = group.held(count)
    if start >= stop:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty
    block = np.arange(start // step, -(-stop // step), dtype=np.int64)
    begin = np.maximum(block * step, start)
    return block, begin, np.minimum((block + 1) * step, stop) - begin


def _runs(total: int, step: int) -> tuple[Any, Any]:
    start = np.arange(0, total, step, dtype=np.int64)
    return start, np.minimum(start + step, total) - start


def count_cells(groups: tuple[Group, ...], segmentation: Segmentation, count: int) -> int:
    """Number of cells, computed without making them (ORD-4)."""
    total = 0
    for group, cut in zip(groups, segmentation.groups, strict=True):
        start, stop = group.held(count)
        blocks = 0
        if start < stop:
            step = segmentation.tokens if group.tokens.kind != "state" else 1
            blocks = -(-stop // step) - start // step
        total += blocks * -(-len(group.layers) // cut.layers) * -(-group.heads // cut.heads)
    return total


def make_grid(groups: tuple[Group, ...], segmentation: Segmentation, count: int) -> Grid:
    """The cells of all groups in the order of SEG-2 or SEG-3."""
    parts: list[np.ndarray[Any, Any]] = []
    keys: list[tuple[Any, Any, Any, Any]] = []
    for member, (group, cut) in enumerate(zip(groups, segmentation.groups, strict=True)):
        block, token_start, token_count = token_blocks(group, count, segmentation.tokens)
        layer_index, layer_count = _runs(len(group.layers), cut.layers)
        head_start, head_count = _runs(group.heads, cut.heads)
        shape = (len(block), len(layer_index), len(head_start))
        b, run, j = (axis.ravel() for axis in np.indices(shape))
        part = np.zeros(len(b), CELL_DTYPE)
        part["group"] = member
        part["layer_index"], part["layer_count"] = layer_index[run], layer_count[run]
        part["head_start"], part["head_count"] = head_start[j], head_count[j]
        part["token_start"], part["token_count"] = token_start[b], token_count[b]
        parts.append(part)
        first_layer = np.asarray(group.layers, dtype=np.int64)[layer_index[run]]
        keys.append((block[b], first_layer, part["group"], j))
    blocks, layers, members, heads = (np.concatenate(axis) for axis in zip(*keys, strict=True))
    if segmentation.order == "token-major":
        order = np.lexsort((heads, members, layers, blocks))
    else:
        order = np.lexsort((blocks, heads, members, layers))
    return Grid(np.concatenate(parts)[order])
