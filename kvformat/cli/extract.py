"""``kvformat extract``: one video segment as a file that any player opens."""

from __future__ import annotations

import shlex

import click

from kvformat.artifact import Artifact, open_artifact
from kvformat.cli.options import UTF8
from kvformat.cli.outputs import check_target, require_suffix, write_bytes
from kvformat.cli.show import emit, facts, heading, say, whole_line
from kvformat.errors import UsageError
from kvformat.segments import SegmentContext, check_stored
from kvformat.tracks import Track


@click.command(name="extract")
@click.argument("url", metavar="URL")
@click.option("--output", required=True, metavar="FILE", help="A .hevc file to write.")
@click.option("--track", type=UTF8, metavar="T", help="Track. Default: the first one with video.")
@click.option(
    "--segment",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of the segment in the track's table. Default: the first one with video.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(
    url: str, output: str, *, track: str | None, segment: int | None, overwrite: bool
) -> None:
    """Take the video of one segment out of the artifact URL.

    The stored bytes are checked against their digest first. The file is a plain HEVC stream.
    """
    require_suffix(output, ".hevc", ".h265", ".265")
    check_target(output, url, overwrite=overwrite)
    with open_artifact(url) as artifact:
        chosen = _video_track(artifact, track)
        number = _video_segment(artifact, chosen, segment)
        record = artifact.segment_table(chosen)[number]
        context = artifact.context(chosen, record, restoring=False)
        data = artifact.segment_bytes(record)
        check_stored(context, data)
        write_bytes(output, memoryview(data)[record.side_bytes :], overwrite=overwrite)
        _show(output, chosen, context, record.stored_bytes - record.side_bytes)


def _video_track(artifact: Artifact, name: str | None) -> Track:
    tracks = [item for item in artifact.manifest.tracks if "hevc" in item.codecs]
    chosen = artifact.track(name) if name is not None else next(iter(tracks), None)
    if chosen is None or chosen not in tracks:
        raise UsageError(
            "usage.selection",
            "no such track with video",
            expected=", ".join(item.name for item in tracks) or "an artifact with an hevc track",
            found=", ".join(artifact.tracks) if chosen is None else chosen.name,
        )
    return chosen


def _video_segment(artifact: Artifact, track: Track, number: int | None) -> int:
    groups = artifact.grid.fields["group"]
    video = [index for index in range(len(groups)) if track.codecs[int(groups[index])] == "hevc"]
    if number is None and video:
        return video[0]
    if number is None or number not in video:
        raise UsageError(
            "usage.selection",
            "no such segment with video",
            expected=f"0 to {len(groups) - 1}, one of {len(video)} with video",
            found=number,
        )
    return number


def _show(output: str, track: Track, context: SegmentContext, size_bytes: int) -> None:
    cell, group, layout = context.record.cell, context.group, context.layout
    layers = group.layers[cell.layer_index : cell.layer_index + cell.layer_count]
    heads = group.head_start + cell.head_start
    heading(f"wrote {output}")
    rows: list[tuple[str, object]] = [
        ("segment", f"{context.record.index} of track {track.name}, {size_bytes:,} bytes"),
        ("group", group.name),
        ("layers", f"{', '.join(str(layer) for layer in layers)}: planes Y, Cb, Cr in this order"),
        ("heads", f"{heads} to {heads + cell.head_count - 1}"),
        ("tokens", f"{cell.token_start:,} to {cell.token_start + cell.token_count - 1:,}"),
    ]
    if layout is not None:
        size = f"{layout.width} x {layout.height}"
        rows.append(("pictures", f"{layout.frames} of {size}, 8-bit 4:4:4, order {layout.order}"))
    emit(facts(rows))
    say("Play it, or look at the first picture alone:")
    name = shlex.quote(output)
    whole_line(f"  ffplay -f hevc -framerate 10 {name}")
    whole_line(f"  ffmpeg -f hevc -i {name} -frames:v 1 first.png")
