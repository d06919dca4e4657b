"""Qualities and tracks, the two kinds of things that tables belong to (spec 8.3, 9.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from kvformat.fields import FLOAT64_BITS, Node, positive_bits, schema_error, semantic_error
from kvformat.groups import Group
from kvformat.layout import Layout
from kvformat.limits import LIMITS

SET_RECORD_BYTES: Final = 64
SEGMENT_RECORD_BYTES: Final = 128
CODEC_NAMES: Final = ("hevc", "zstd", "stored")
QUANTISED: Final = "quantised"
TRANSFORMED: Final = "transformed"
EXACT: Final = "exact"
ENCODINGS: Final = (QUANTISED, EXACT, TRANSFORMED)
_TRACK_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,47}/[a-z0-9][a-z0-9-]{0,47}")


def parse_layout(node: Node) -> Layout:
    """One element of ``layouts`` (LAY-1); sizes are checked against segments later."""
    m = node.members("fold", "frames", "grid", "height", "order", "tile", "width")
    tile, grid, fold = (_pair(m[key]) for key in ("tile", "grid", "fold"))
    return Layout(
        order="time" if m["order"].choice("time", "raster") == "time" else "raster",
        tile_height=tile[0],
        tile_width=tile[1],
        grid_rows=grid[0],
        grid_columns=grid[1],
        frames=m["frames"].integer(1, "frames_per_segment"),
        fold_height=fold[0],
        fold_width=fold[1],
        width=m["width"].integer(1, "picture_side"),
        height=m["height"].integer(1, "picture_side"),
    )


def _pair(node: Node) -> tuple[int, int]:
    items = node.each(lambda item: item.integer(1))
    if len(items) != 2:
        raise schema_error("not a pair", node.pointer, "two integers", list(items))
    return items[0], items[1]


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """To JSON."""
    return {
        "fold": [layout.fold_height, layout.fold_width],
        "frames": layout.frames,
        "grid": [layout.grid_rows, layout.grid_columns],
        "height": layout.height,
        "order": layout.order,
        "tile": [layout.tile_height, layout.tile_width],
        "width": layout.width,
    }


@dataclass(frozen=True, slots=True)
class Quality:
    """One choice of integers and sets, or the exact bytes (section 9.1)."""

    name: str
    encodings: tuple[str, ...]
    sets: int
    set_table_digest: str
    data_start: int
    data_stop: int
    relative_step: str | None = None

    @staticmethod
    def parse(node: Node) -> Quality:
        """From JSON."""
        m = node.members(
            "data_start",
            "data_stop",
            "encodings",
            "name",
            "relative_step",
            "set_table_digest",
            "sets",
        )
        return Quality(
            m["name"].name(),
            m["encodings"].each(lambda item: item.choice(*ENCODINGS)),
            m["sets"].integer(limit="sets_per_quality"),
            m["set_table_digest"].digest(),
            m["data_start"].integer(),
            m["data_stop"].integer(),
            m["relative_step"].optional(lambda item: positive_bits(item, FLOAT64_BITS)),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "data_start": self.data_start,
            "data_stop": self.data_stop,
            "encodings": list(self.encodings),
            "name": self.name,
            "relative_step": self.relative_step,
            "set_table_digest": self.set_table_digest,
            "sets": self.sets,
        }

    @property
    def table_bytes(self) -> int:
        """Length of the set table."""
        return self.sets * SET_RECORD_BYTES

    def check(self, pointer: str, groups: tuple[Group, ...]) -> None:
        """QUA-2 to QUA-4."""
        if len(self.encodings) != len(groups):
            raise semantic_error(
                "not one encoding per group",
                f"{pointer}/encodings",
                expected=len(groups),
                found=len(self.encodings),
            )
        all_exact = all(item == EXACT for item in self.encodings)
        if (self.name == EXACT) != all_exact:
            raise semantic_error(
                "the name exact and exact encodings of all groups belong together",
                f"{pointer}/name",
                found=self.name,
            )
        for index, (group, encoding) in enumerate(zip(groups, self.encodings, strict=True)):
            if encoding != EXACT and not group.quantisable:
                raise semantic_error(
                    "this group can only be exact", f"{pointer}/encodings/{index}", found=encoding
                )
        if all_exact and (self.sets or self.relative_step is not None):
            raise semantic_error("quantisation parameters without a quantised group", pointer)


@dataclass(frozen=True, slots=True)
class Track:
    """One quality in one codec per group (section 8.3)."""

    name: str
    quality: str
    codecs: tuple[str, ...]
    segments: int
    table_digest: str
    data_start: int
    data_stop: int
    layouts: tuple[Layout, ...] = ()
    encoder: str = "none"

    @staticmethod
    def parse(node: Node) -> Track:
        """From JSON."""
        m = node.members(
            "codecs",
            "data_start",
            "data_stop",
            "encoder",
            "layouts",
            "name",
            "quality",
            "segments",
            "table_digest",
        )
        layouts = m["layouts"].items()
        LIMITS.check("layouts_per_track", len(layouts), m["layouts"].pointer)
        return Track(
            m["name"].matching(_TRACK_NAME),
            m["quality"].name(),
            m["codecs"].each(lambda item: item.choice(*CODEC_NAMES)),
            m["segments"].integer(limit="segments_per_track"),
            m["table_digest"].digest(),
            m["data_start"].integer(),
            m["data_stop"].integer(),
            tuple(parse_layout(item) for item in layouts),
            m["encoder"].text(),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "codecs": list(self.codecs),
            "data_start": self.data_start,
            "data_stop": self.data_stop,
            "encoder": self.encoder,
            "layouts": [layout_to_json(item) for item in self.layouts],
            "name": self.name,
            "quality": self.quality,
            "segments": self.segments,
            "table_digest": self.table_digest,
        }

    @property
    def table_bytes(self) -> int:
        """Length of the segment table."""
        return self.segments * SEGMENT_RECORD_BYTES

    @property
    def codec(self) -> str:
        """The codec in the track's name."""
        return self.name.split("/")[1]

    def check(self, pointer: str, quality: Quality) -> None:
        """TRK-2, TRK-3, TRK-5, LAY-3, LAY-4."""
        prefix, _, label = self.name.partition("/")
        if prefix != self.quality or label not in self.codecs:
            raise semantic_error(
                "the name is not quality/codec",
                f"{pointer}/name",
                expected=f"{self.quality}/ and one of {', '.join(sorted(set(self.codecs)))}",
                found=self.name,
            )
        if len(self.codecs) != len(quality.encodings):
            raise semantic_error(
                "not one codec per group",
                f"{pointer}/codecs",
                expected=len(quality.encodings),
                found=len(self.codecs),
            )
        for index, (codec, encoding) in enumerate(zip(self.codecs, quality.encodings, strict=True)):
            if codec == "hevc" and encoding == EXACT:
                raise semantic_error("hevc cannot hold exact bytes", f"{pointer}/codecs/{index}")
        if self.layouts and "hevc" not in self.codecs:
            raise semantic_error("layouts without hevc", f"{pointer}/layouts")
        if len(set(self.layouts)) != len(self.layouts):
            raise semantic_error("two layouts are equal", f"{pointer}/layouts")
        sizes = {(item.width, item.height) for item in self.layouts}
        LIMITS.check("picture_sizes_per_track", len(sizes), f"{pointer}/layouts")
        for index, item in enumerate(self.layouts):
            for side in (item.width, item.height):
                if side % 16 or side < LIMITS.picture_side_minimum:
                    raise schema_error(
                        "the picture size is not allowed",
                        f"{pointer}/layouts/{index}",
                        "multiples of 16, at least 144",
                        f"{item.width} x {item.height}",
                    )
            high = item.grid_rows * item.tile_height * item.fold_height
            wide = item.grid_columns * item.tile_width * item.fold_width
            if high > item.height or wide > item.width:
                raise semantic_error(
                    "the grid does not fit the picture",
                    f"{pointer}/layouts/{index}/grid",
                    expected=f"at most {item.width} x {item.height}",
                    found=f"{wide} x {high}",
                )
