"""``kvformat inspect --html``: one page about an artifact that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree import ElementTree as ET

from kvformat.artifact import Artifact
from kvformat.cli.inspect import file_facts, group_row, identity_facts, structure_facts
from kvformat.cli.layer_sizes import RunSize, layer_sizes
from kvformat.cli.markup import el, facts, image, table, to_bytes
from kvformat.cli.measured import COLUMNS as MEASURED
from kvformat.cli.measured import measured_rows
from kvformat.cli.page_map import (
    Piece,
    amount,
    bar,
    front_pieces,
    layer_chart,
    legend,
    pieces,
    segment_bar,
)
from kvformat.cli.page_pictures import Album, albums
from kvformat.cli.sizes import COLUMNS, count_raw_bytes, count_values, track_row, track_size
from kvformat.tracks import Track

MOST_SEGMENTS: Final = 200_000
"""Tables of larger tracks are not read for a picture."""
MOST_ROWS: Final = 400
PIECES: Final = ("part", ">from", ">bytes", ">share")

STYLE: Final = """
:root { --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --line: #d1d9e0; --band: #f5f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #8a6d00; --c5: #6e7781;
  --head: #1b1f24; --front: #6e7781; --sets: #8a6d00; --track: #2f78ab; --odd: #1f6394;
  --on: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9ba6b2; --paper: #0f1419; --line: #39424c; --band: #182029;
    --c0: #4aa8e0; --c1: #f0883e; --c2: #3fb98f; --c3: #e29ac4; --c4: #d3b24a; --c5: #8b949e;
    --head: #e6edf3; --front: #8b949e; --sets: #d3b24a; --track: #3a7fb0; --odd: #4f9bd0;
    --on: #0b0f13; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.1rem 0 .3rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 80ch; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; margin: .4rem 0; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { fill: var(--soft); font-size: 13px; font-family: inherit; }
svg text.on { fill: var(--on); }
svg text.middle { text-anchor: middle; }
svg text.end { text-anchor: end; }
svg line { stroke: var(--line); }
.edge { stroke: var(--paper); stroke-width: .6; }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.head { fill: var(--head); } .front { fill: var(--front); } .sets { fill: var(--sets); }
.track { fill: var(--track); } .track.odd { fill: var(--odd); } .none { fill: var(--line); }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .22rem .75rem .22rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.facts th { color: var(--soft); font-weight: 400; white-space: nowrap; }
.facts td { overflow-wrap: anywhere; min-width: 16rem; }
.legend { display: flex; flex-wrap: wrap; gap: 1rem; }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
.album { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0; max-width: 100%; width: 330px; }
figure img { display: block; max-width: 100%; max-height: 420px; height: auto;
  image-rendering: pixelated; border: 1px solid var(--line); }
figcaption { font-size: .8rem; color: var(--soft); margin-top: .3rem; overflow-wrap: anywhere; }
.swatch, rect { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media print {
  :root { --ink: #000000; --soft: #333333; --paper: #ffffff; --line: #bbbbbb; --on: #ffffff;
    --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #8a6d00; --c5: #6e7781;
    --head: #1b1f24; --front: #6e7781; --sets: #8a6d00; --track: #2f78ab; --odd: #1f6394; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  .scroll { overflow: visible; } svg { min-width: 0; }
  td { overflow-wrap: anywhere; }
  figure, svg, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
"""


def render(artifact: Artifact) -> bytes:
    """The page, in UTF-8. Reads all tables of tracks that are not huge, and a few segments.

    Raises what reading tables raises; a damaged segment is named in its place.
    """
    drawn = [item for item in artifact.manifest.tracks if item.segments <= MOST_SEGMENTS]
    sizes = {track.name: layer_sizes(artifact, track) for track in drawn}
    body = [
        *_opening(artifact),
        *_tracks(artifact),
        *_identity(artifact),
        *_map(artifact, drawn),
        *_layers(sizes),
        *_pictures(albums(artifact) if len(drawn) == len(artifact.tracks) else []),
        *_statements(artifact),
    ]
    return to_bytes(f"{artifact.name} - kvformat", STYLE, body)


def _opening(artifact: Artifact) -> Iterator[ET.Element]:
    manifest = artifact.manifest
    yield el("h1", artifact.name)
    tokens, values = manifest.tokens.count, count_values(manifest)
    size, raw = artifact.front.header.file_bytes, count_raw_bytes(manifest)
    yield el(
        "p",
        f"The KV cache of {tokens:,} tokens in {manifest.identity.model.id}: {values:,} values, "
        f"{amount(raw)} as the engine held them, {amount(size)} in this file with "
        f"{len(manifest.tracks)} {'tracks' if len(manifest.tracks) > 1 else 'track'}.",
    )


def _tracks(artifact: Artifact) -> Iterator[ET.Element]:
    manifest = artifact.manifest
    yield el("h2", "Tracks")
    yield table(COLUMNS, [track_row(track_size(manifest, item)) for item in manifest.tracks])
    yield _note(
        "Bytes: what a reader of that track needs; tracks of one quality share their sets and "
        "restore the same bits. Ratio: to the cache in its own dtype."
    )
    quality = measured_rows(manifest)
    yield el("h3", "Quality")
    if not quality:
        yield _note("The file does not say how the model answers with it: kvformat evaluate.")
        return
    yield table(MEASURED, quality)
    yield _note(
        "As the writer says it was measured, in nats per token against the original cache; top-1 "
        "is the share of tokens with the same likeliest successor. Nothing proves it."
    )


def _map(artifact: Artifact, drawn: Sequence[Track]) -> Iterator[ET.Element]:
    yield el("h2", "Map of the file")
    whole, front = pieces(artifact), front_pieces(artifact)
    total = artifact.front.header.file_bytes
    yield el("h3", f"The whole file, {total:,} bytes, to scale")
    yield bar(whole, "the whole file")
    yield el("h3", f"Its front, {front[-1].stop:,} bytes: header, manifest, tables")
    yield bar(front, "the front")
    yield table(PIECES, [_piece_row(part, total) for part in [*front, *whole[1:]]])
    yield el("h3", "Segments, each track on its own scale")
    yield legend(group.role for group in artifact.groups)
    for track in drawn:
        size = track.data_stop - track.data_start
        yield el("h3", f"{track.name}: {track.segments:,} segments, {size:,} bytes")
        yield segment_bar(artifact, track)
    for track in artifact.manifest.tracks:
        if track not in drawn:
            yield _note(f"{track.name} has {track.segments:,} segments: too many to draw.")


def _piece_row(part: Piece, total: int) -> tuple[str, ...]:
    return part.name, f"{part.start:,}", f"{part.size:,}", f"{part.size / max(1, total):.2%}"


def _layers(sizes: dict[str, list[RunSize]]) -> Iterator[ET.Element]:
    yield el("h2", "Bytes by layer and role")
    yield legend(run.role for runs in sizes.values() for run in runs)
    for name, runs in sizes.items():
        yield el("h3", name)
        yield layer_chart(runs, f"bytes by layer of {name}")
    yield _note("A segment holds up to three layers; those share its bytes evenly here.")
    rows = [
        (group[0].group, group[0].label, *(f"{one.size_bytes:,} ({one.bits_per_value:.2f})"
                                           for one in group))
        for group in zip(*sizes.values(), strict=True)
    ]  # fmt: skip
    yield el("h3", "Bytes, and bits per value")
    yield table(("group", "layers", *(f">{name}" for name in sizes)), rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        yield _note(f"and {len(rows) - MOST_ROWS:,} more")


def _pictures(found: Sequence[Album]) -> Iterator[ET.Element]:
    yield el("h2", "Pictures")
    yield _note(
        "The stored integers of the first segments, with their contrast stretched. Video planes "
        "are as a decoder gives them; where a track has no video, channels are rows."
    )
    for album in found:
        yield el("h3", album.track)
        figures = [
            el("figure", image(picture.png, picture.caption), el("figcaption", picture.caption))
            for picture in album.pictures
        ]
        yield el("div", figures, class_="album")
        for problem in album.problems:
            yield el("p", f"Not shown: {problem}")


def _identity(artifact: Artifact) -> Iterator[ET.Element]:
    yield el("h2", "Identity: what this is the cache of")
    yield facts(identity_facts(artifact.manifest))


def _statements(artifact: Artifact) -> Iterator[ET.Element]:
    manifest = artifact.manifest
    yield el("h2", "Groups")
    columns = ("name", "role", "dtype", "layers", ">heads", ">dim", "tokens")
    yield table(columns, [group_row(group, manifest.tokens.count) for group in manifest.groups])
    yield el("h2", "File")
    yield facts([*file_facts(artifact), *structure_facts(manifest)])
    yield _note(
        "Header, manifest and tables were checked for this page, and the segments in the pictures. "
        "To check every byte: kvformat verify."
    )


def _note(text: str) -> ET.Element:
    return el("p", text, class_="note")
