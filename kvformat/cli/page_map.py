"""Drawings of ``inspect --html``: the file to scale, its front, segments, bytes by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree as ET

import numpy as np

from kvformat.artifact import Artifact
from kvformat.cli.layer_sizes import RunSize
from kvformat.cli.markup import el, svg
from kvformat.header import HEADER_BYTES
from kvformat.tracks import Track

WIDTH: Final = 1000
BAR: Final = 34
ROLES: Final = ("key", "value", "latent", "indexer", "state")
COLUMNS: Final = 400
"""More segments than this are drawn several to a column."""
RUNS: Final = 400
LETTER: Final = 7.5
"""Units that a letter of a label takes at most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the file, in bytes from its start; ``kind`` is a class of the style sheet."""

    name: str
    kind: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


def colour(role: str) -> str:
    """The class that paints a role."""
    return f"c{ROLES.index(role)}" if role in ROLES else "c5"


def pieces(artifact: Artifact) -> list[Piece]:
    """The file from end to end: front, padding, sets per quality, tracks."""
    front, manifest = artifact.front, artifact.manifest
    found = front_pieces(artifact)
    cut = [Piece("front", "front", 0, front.header.front_bytes)]
    if found[-1].stop < front.data_start:
        cut.append(Piece("padding", "none", found[-1].stop, front.data_start))
    for kind, parts in (("sets", manifest.qualities), ("track", manifest.tracks)):
        for part in parts:
            name = f"sets of {part.name}" if kind == "sets" else part.name
            bounds = front.data_start + part.data_start, front.data_start + part.data_stop
            if bounds[1] > bounds[0]:
                cut.append(Piece(name, kind, *bounds))
    return cut


def front_pieces(artifact: Artifact) -> list[Piece]:
    """Header, manifest and one table per quality and track."""
    front = artifact.front
    found = [
        Piece("header", "head", 0, HEADER_BYTES),
        Piece("manifest", "front", HEADER_BYTES, front.header.tables_start),
    ]
    found += [
        Piece(f"table of {name}", "sets", span.offset, span.stop)
        for name, span in front.spans.items()
        if span.size_bytes
    ]
    return found


def bar(parts: Sequence[Piece], label: str) -> ET.Element:
    """One bar to scale; names where there is room, all of them as tool tips."""
    start, stop = parts[0].start, parts[-1].stop
    scale = WIDTH / max(1, stop - start)
    shapes: list[ET.Element] = []
    for number, part in enumerate(parts):
        x, width = (part.start - start) * scale, part.size * scale
        kind = f"{part.kind} edge{' odd' if number % 2 else ''}"
        tip = f"{part.name}: {part.size:,} bytes from {part.start:,}"
        shapes.append(_box(x, 0, width, BAR, kind=kind, tip=tip))
        if len(part.name) * LETTER + 8 < width:
            shapes.append(el("text", part.name, x=f"{x + 5:.2f}", y="22", class_="on"))
    return svg(WIDTH, BAR, label, shapes)


def segment_bar(artifact: Artifact, track: Track) -> ET.Element:
    """The segments of a track in file order, to scale, in the colours of their roles."""
    records = artifact.segment_table(track).records
    start = track.data_start
    scale = WIDTH / max(1, track.data_stop - start)
    shapes: list[ET.Element] = []
    for part in np.array_split(records, max(1, min(len(records), COLUMNS))):
        if len(part):
            x = (int(part["offset"][0]) - start) * scale
            last = int(part["offset"][-1]) + int(part["stored_bytes"][-1])
            shapes += _column(artifact, part, x, (last - start) * scale - x)
    return svg(WIDTH, BAR, f"segments of {track.name}", shapes)


def _column(artifact: Artifact, part: Any, x: float, width: float) -> Iterable[ET.Element]:
    """Some segments side by side in one column, each role with its share of the height."""
    total = int(part["stored_bytes"].sum(dtype=np.int64))
    below = 0.0
    for group in np.unique(part["group"]):
        mine = part[part["group"] == group]
        size = int(mine["stored_bytes"].sum(dtype=np.int64))
        height = BAR * size / max(1, total)
        item = artifact.groups[int(group)]
        if len(mine) == 1:
            first, count = int(mine["layer_index"][0]), int(mine["layer_count"][0])
            layers = item.layers[first : first + count]
            begin = int(mine["token_start"][0])
            what = (
                f"{item.name}, layers {layers[0]} to {layers[-1]}, tokens {begin:,} to "
                f"{begin + int(mine['token_count'][0]) - 1:,}: {size:,} bytes"
            )
        else:
            what = f"{item.name}: {len(mine):,} segments, {size:,} bytes"
        yield _box(x, below, width, height, kind=f"{colour(item.role)} edge", tip=what)
        below += height


def _box(x: float, y: float, width: float, height: float, *, kind: str, tip: str) -> ET.Element:
    return el(
        "rect", el("title", tip), x=f"{x:.2f}", y=f"{y:.2f}", width=f"{width:.2f}",
        height=f"{height:.2f}", class_=kind,
    )  # fmt: skip


def layer_chart(runs: Sequence[RunSize], label: str) -> ET.Element:
    """Bytes per layer, roles on top of each other; layers stored together share them evenly."""
    height, left, floor = 150, 78, 130
    layers = sorted({layer for run in runs for layer in run.layers})[:RUNS]
    shown = {layer: number for number, layer in enumerate(layers)}
    shares = [
        (shown[layer], run, run.size_bytes / len(run.layers))
        for run in runs
        for layer in run.layers
        if layer in shown
    ]
    totals = [0.0] * len(layers)
    for number, _, share in shares:
        totals[number] += share
    most = max(totals, default=0.0) or 1.0
    width = (WIDTH - left) / max(1, len(layers))
    below = [0.0] * len(layers)
    shapes: list[ET.Element] = []
    for number, run, share in shares:
        tall = share / most * (floor - 12)
        below[number] += tall
        tip = f"{run.group}, layers {run.label}: {run.size_bytes:,} bytes"
        x, y = left + (number + 0.1) * width, floor - below[number]
        shapes.append(_box(x, y, 0.8 * width, tall, kind=colour(run.role), tip=tip))
    every = max(1, -(-len(layers) // 30))
    for number in range(0, len(layers), every):
        x = left + (number + 0.5) * width
        shapes.append(el("text", str(layers[number]), x=f"{x:.2f}", y="146", class_="tick middle"))
    shapes.append(el("text", amount(most), x="70", y="18", class_="tick end"))
    shapes.append(el("text", "layer", x="70", y="146", class_="tick end"))
    shapes.append(el("line", x1=str(left), x2=str(WIDTH), y1=str(floor), y2=str(floor)))
    return svg(WIDTH, height, label, shapes)


def amount(size_bytes: float) -> str:
    """Bytes for people, in powers of 1,000."""
    value, unit = float(size_bytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"


def legend(roles: Iterable[str]) -> ET.Element:
    """Which colour is which role."""
    items = [
        el("span", el("span", class_=f"swatch {colour(role)}"), role, class_="key")
        for role in dict.fromkeys(roles)
    ]
    return el("p", items, class_="legend")
