"""``kvformat encode``: a cache in a .npy or .safetensors file to an artifact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from kvformat.cli.inputs import read_input
from kvformat.cli.measured import read_measured
from kvformat.cli.options import UTF8, read_salt, read_token_ids
from kvformat.cli.outputs import check_target
from kvformat.cli.show import emit, facts, heading, progress, say, table
from kvformat.cli.sizes import COLUMNS, count_raw_bytes, track_row, track_sizes
from kvformat.cli.statements import (
    Given,
    make_identity,
    parse_lineage,
    source_lineage,
    token_ids_of,
)
from kvformat.cli.text import warn, write_json
from kvformat.dtypes import DTYPES
from kvformat.errors import UsageError
from kvformat.groups import ALIGNMENTS, ORDERS
from kvformat.limits import LIMITS
from kvformat.measured import extensions_of
from kvformat.planning import DEFAULT_QUALITY, DEFAULT_TRACKS, parse_tracks
from kvformat.tracks import EXACT
from kvformat.writer import WriteReport, write

UNBOUND = "tokens are not verified: no token ids are known, so no reader can check which prompt"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``encode``, as click hands them over."""

    tracks: str
    quality: str
    overwrite: bool
    order: str
    alignment: str
    segment_tokens: int | None
    workers: int | None
    model: str | None
    revision: str | None
    weights_digest: str | None
    tokenizer: str | None
    adapter: tuple[str, ...]
    component: str
    token_ids: str | None
    salt_file: str | None
    first_position: int
    head_start: int
    heads_total: int | None
    layers_total: int | None
    dtype: str | None
    lossy_source: str | None
    measured: str | None
    profile: str | None
    as_json: bool


POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0, max=LIMITS.tokens)


@click.command(name="encode")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option(
    "--tracks",
    type=UTF8,
    default=",".join(DEFAULT_TRACKS),
    show_default=True,
    metavar="T,T",
    help="Tracks to write, with commas: QUALITY/CODEC, for example balanced/zstd. Short forms: a "
    "codec alone (hevc, zstd, stored) means that codec in --quality; exact means exact/zstd. zstd "
    "is the fast one on a CPU, hevc is for video engines, stored is not compressed.",
)
@click.option(
    "--quality",
    type=UTF8,
    default=DEFAULT_QUALITY,
    show_default=True,
    metavar="Q",
    help="Quality of the codecs in --tracks that name none: high, near-lossless, balanced, small "
    "or exact, explained below.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--model",
    type=UTF8,
    metavar="ID",
    help="The model that made the cache. Needed, unless the metadata of a .safetensors file has a "
    "model_id.",
)
@click.option("--revision", type=UTF8, metavar="TEXT", help="Revision of the model.")
@click.option(
    "--weights-digest", type=UTF8, metavar="HASH", help="sha256:... or blake3:... of the weights."
)
@click.option("--tokenizer", type=UTF8, metavar="ID", help="Id of the tokenizer, or ID=sha256:...")
@click.option(
    "--adapter",
    type=UTF8,
    multiple=True,
    metavar="ID",
    help="An adapter, or ID=sha256:... Repeatable.",
)
@click.option(
    "--component",
    type=click.Choice(("main", "draft")),
    default="main",
    help="Which model of a speculative pair.",
)
@click.option(
    "--token-ids",
    metavar="FILE",
    help="Ids of the sequence from position 0 on: a JSON list, a .npy file, or integers. "
    "Default: tensor token_ids of the input.",
)
@click.option("--salt-file", metavar="FILE", help="The tenant's salt: all bytes of this file.")
@click.option(
    "--first-position",
    type=NATURAL,
    default=0,
    metavar="N",
    help="Position of the first token of the cache in its sequence.",
)
@click.option(
    "--head-start", type=NATURAL, default=0, metavar="N", help="Global number of the first head."
)
@click.option("--heads-total", type=POSITIVE, metavar="N", help="KV heads of the whole model.")
@click.option("--layers-total", type=POSITIVE, metavar="N", help="Layers of the whole model.")
@click.option(
    "--dtype",
    type=click.Choice(tuple(DTYPES)),
    help="What raw elements of the input are ('V2', 'uint16', 'V1'). Nothing is converted.",
)
@click.option(
    "--lossy-source",
    type=UTF8,
    metavar="Q[:N]",
    help="The input was restored from a lossy track of quality Q (N times). Default: what the "
    ".safetensors file says.",
)
@click.option(
    "--profile",
    metavar="FILE",
    help="A calibration profile of the model (kvformat calibrate): smaller at the same quality. "
    "Readers need it too.",
)
@click.option(
    "--measured",
    metavar="FILE",
    help="State the quality of the tracks as kvformat evaluate --json measured it; inspect shows "
    "it.",
)
@click.option("--segment-tokens", type=POSITIVE, metavar="N", help="Tokens per segment.")
@click.option("--order", type=click.Choice(ORDERS), default=ORDERS[0], help="Order of segments.")
@click.option(
    "--alignment",
    type=click.Choice([str(item) for item in ALIGNMENTS]),
    default="1",
    help="Where objects start in the file.",
)
@click.option("--workers", type=POSITIVE, metavar="N", help="Threads. Default: all cores.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(source: str, target: str, **given: Any) -> None:
    """Write the KV cache in IN to the artifact OUT.

    IN is a .npy file with an array [2, layers, tokens, heads, head_dim], keys first, or a
    .safetensors file with tensors [tokens, heads, head_dim] named layers.0.key and so on.

    A .npy file says nothing about its cache, so --model is needed. A .safetensors file can name
    the model and more. Options win over it, and with another --model its revision, weights,
    tokenizer and num_layers are left aside:

    \b
      metadata model_id                  the model; without it --model is needed
      metadata revision                  its revision
      metadata weights_digest            sha256:... or blake3:... of its weights
               or weights_sha256         the same, SHA-256 as bare digits
      metadata tokenizer_id              the tokenizer
      metadata num_layers                layers of the whole model
      metadata keys_rotated, rope_type,
               with tensor inv_freq      how positions were put into the keys
      metadata kvformat.lineage          which lossy track it was restored from
      tensor   token_ids                 ids of the tokens, from position 0 on

    Qualities, with the bits per value measured on SmolLM2-135M (2,048 tokens of bfloat16):

    \b
      high           about 4.9  half the step of near-lossless
      near-lossless  about 3.9  the model diverges about as with an fp8 cache
      balanced       about 2.4  ten times that divergence
      small          about 1.8  coarser still; compare your model's answers
      exact         about 10.7  every bit of the source

    One small model is no proof: measure yours (tools/model_check.py).
    """
    options = Options(**given)
    parse_tracks(options.tracks, options.quality)  # a wrong request is reported before OUT
    if options.lossy_source is not None:
        parse_lineage(options.lossy_source)
    check_target(target, source, overwrite=options.overwrite)
    report, bound = _encode(source, target, options)
    large = _larger_than_raw(report)
    if options.as_json:
        write_json(_as_json(target, report))
    else:
        _show(target, report)
    if not bound:
        warn(f"{UNBOUND} this cache is of. Give --token-ids to bind it")
    if large:
        warn(large)


def _encode(source: str, target: str, options: Options) -> tuple[WriteReport, bool]:
    """Read, describe, write; also tells whether the artifact is bound to its tokens."""
    found = read_input(
        source,
        dtype=options.dtype,
        first_position=options.first_position,
        head_start=options.head_start,
        heads_total=options.heads_total,
    )
    given_ids = None if options.token_ids is None else read_token_ids(options.token_ids)
    token_ids = token_ids_of(found, given_ids, options.first_position)
    if options.salt_file is not None and token_ids is None:
        raise UsageError("usage.argument", "--salt-file needs token ids")
    identity = make_identity(
        Given(
            model=options.model,
            revision=options.revision,
            weights_digest=options.weights_digest,
            tokenizer=options.tokenizer,
            adapters=options.adapter,
            layers_total=options.layers_total,
            component=options.component,
        ),
        found,
        bound=token_ids is not None,
    )
    plans = parse_tracks(options.tracks, options.quality)
    measured = () if options.measured is None else read_measured(
        options.measured, [plan.name for plan in plans], identity.model.id
    )  # fmt: skip
    with progress("encoding") as step:
        report = write(
            target,
            found.cache,
            identity=identity,
            token_ids=token_ids,
            salt=b"" if options.salt_file is None else read_salt(options.salt_file),
            tracks=options.tracks,
            quality=options.quality,
            first_position=options.first_position,
            lineage=source_lineage(found)
            if options.lossy_source is None
            else parse_lineage(options.lossy_source),
            segment_tokens=options.segment_tokens,
            order=options.order,
            alignment=int(options.alignment),
            extensions=extensions_of(measured) if measured else None,
            overwrite=options.overwrite,
            workers=options.workers,
            profile=options.profile,
            progress=step,
        )
    return report, token_ids is not None


def _larger_than_raw(report: WriteReport) -> str:
    """What to say when quantising made the cache larger: mostly the axes are in a wrong order."""
    manifest = report.manifest
    raw = count_raw_bytes(manifest)
    qualities = {track.name: track.quality for track in manifest.tracks}
    sizes = [item for item in track_sizes(manifest) if qualities[item.name] != EXACT]
    size = max(sizes, key=lambda item: item.size_bytes, default=None)
    if size is None or size.size_bytes <= raw:
        return ""
    group = manifest.groups[0]
    return (
        f"track {size.name} is larger than the raw cache ({size.size_bytes:,} and {raw:,} bytes), "
        "so the axes are probably in another order than [2, layers, tokens, heads, head_dim]: "
        f"this was read as {len(group.layers)} layers, {manifest.tokens.count:,} tokens, "
        f"{group.heads} heads, head_dim {group.head_dim}. Very few tokens have the same effect"
    )


def _as_json(target: str, report: WriteReport) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "verdict": "ok",
        "file": target,
        "file_bytes": report.file_bytes,
        "raw_bytes": count_raw_bytes(manifest),
        "values": report.values,
        "seconds": round(report.seconds, 3),
        "manifest_digest": report.manifest_digest,
        "content_id": manifest.content_id,
        "identity_kind": manifest.identity.kind,
        "tokens": manifest.tokens.count,
        "tracks": [
            {
                "name": size.name,
                "codecs": size.codecs.split("+"),
                "segments": size.segments,
                "bytes": size.size_bytes,
                "bits_per_value": round(size.bits_per_value, 4),
                "ratio": round(size.ratio, 4),
            }
            for size in track_sizes(manifest)
        ],
    }


def _show(target: str, report: WriteReport) -> None:
    manifest = report.manifest
    raw = count_raw_bytes(manifest)
    heading(f"wrote {target}")
    emit(
        facts(
            [
                ("model", manifest.identity.model.id),
                ("cache", f"{manifest.tokens.count:,} tokens, {report.values:,} values"),
                ("file", f"{report.file_bytes:,} bytes for {raw:,} raw, {report.seconds:.1f} s"),
                ("manifest", report.manifest_digest),
            ]
        ),
        "",
        table(COLUMNS, [track_row(size) for size in track_sizes(manifest)]),
        "",
    )
    say("bytes: what a reader of that track needs (tracks of one quality share their sets)")
    say("ratio: to the bytes of the cache in its own dtype")
