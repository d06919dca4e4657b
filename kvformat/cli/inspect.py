"""``kvformat inspect``: what an artifact says about itself, from its front alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from kvformat.artifact import Artifact, open_artifact
from kvformat.cli.measured import COLUMNS as MEASURED
from kvformat.cli.measured import measured_rows
from kvformat.cli.outputs import check_target, require_suffix, write_bytes
from kvformat.cli.show import emit, facts, heading, table
from kvformat.cli.sizes import COLUMNS, track_row, track_size
from kvformat.cli.text import write_json
from kvformat.groups import Extent, Group
from kvformat.layout import Layout
from kvformat.manifest import Manifest
from kvformat.tokens import BLOCK_TOKENS
from kvformat.tracks import TRANSFORMED


@click.command(name="inspect")
@click.argument("url", metavar="URL")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest and header as JSON.")
@click.option("--html", metavar="FILE", help="Write a page with a map of the file, sizes by layer "
              "and pictures. Also reads the tables and a few segments.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the page if it exists.")
def command(url: str, *, as_json: bool, html: str | None, overwrite: bool) -> None:
    """Show what the artifact URL says about itself.

    Reads and checks the header and the manifest, nothing else: use verify to check the data.
    """
    if html is not None:
        require_suffix(html, ".html", ".htm")
        check_target(html, url, overwrite=overwrite)
    with open_artifact(url) as artifact:
        if html is not None:
            from kvformat.cli.page import render

            write_bytes(html, render(artifact), overwrite=overwrite)
        if as_json:
            write_json(_as_json(artifact))
        else:
            show(artifact, artifact.name)


def _as_json(artifact: Artifact) -> dict[str, Any]:
    header = artifact.front.header
    return {
        "header": {
            "file_bytes": header.file_bytes,
            "manifest_bytes": header.manifest_bytes,
            "manifest_digest": artifact.manifest_digest,
            "tables_bytes": header.tables_bytes,
            "version": artifact.manifest.version,
        },
        "data_start": artifact.front.data_start,
        "manifest": artifact.manifest.to_json(),
        "url": artifact.name,
    }


def show(artifact: Artifact, name: str) -> None:
    """The view for people, under the title ``name``."""
    manifest = artifact.manifest
    heading(name)
    emit(facts(file_facts(artifact)), "")
    heading("Identity: what this is the cache of")
    emit(facts(identity_facts(manifest)), "")
    heading("Groups")
    rows = [group_row(group, manifest.tokens.count) for group in manifest.groups]
    emit(table(("name", "role", "dtype", "layers", ">heads", ">dim", "tokens"), rows), "")
    heading("Tracks")
    sizes = [track_row(track_size(manifest, track)) for track in manifest.tracks]
    emit(table(COLUMNS, sizes), "")
    quality = measured_rows(manifest)
    if quality:
        heading("Quality, as the writer says it was measured")
        emit(table(MEASURED, quality), "")
    emit(facts(structure_facts(manifest)))


def file_facts(artifact: Artifact) -> list[tuple[str, object]]:
    """Format, size, digests."""
    header, manifest = artifact.front.header, artifact.manifest
    return [
        ("format", f"kvformat {manifest.version}"),
        ("size", f"{header.file_bytes:,} bytes, front {artifact.front.header.front_bytes:,}"),
        ("manifest", artifact.manifest_digest),
        ("content id", manifest.content_id),
        ("generator", manifest.generator),
    ]


def identity_facts(manifest: Manifest) -> list[tuple[str, object]]:
    """What the artifact is the cache of, and whether tokens can be verified."""
    identity, tokens = manifest.identity, manifest.tokens
    model = identity.model
    rows: list[tuple[str, object]] = [
        ("model", model.id + ("" if identity.component == "main" else " (draft model)")),
        ("revision", model.revision or "not said"),
        ("weights", model.weights_digest or "not said"),
        ("tokenizer", _reference(identity.tokenizer)),
    ]
    rows += [("adapter", _reference(item)) for item in identity.adapters]
    held = {layer for group in manifest.groups for layer in group.layers}
    rows += [
        ("layers", f"{len(held)} held of {identity.layers_total}"),
        ("tokens", f"{tokens.count:,}, the first at position {tokens.first_position:,}"),
        ("binding", _binding(manifest)),
        ("cache", f"{identity.cache_dtype} in the engine; {_ropes(manifest)}"),
        ("lineage", _lineage(manifest)),
    ]
    if identity.rotation is not None:
        rows.append(("rotation", identity.rotation.name))
    if identity.scale_scheme is not None:
        rows.append(("scales", identity.scale_scheme.name))
    if tokens.content:
        spans = compact(f"{item.kind} {item.start}+{item.count}" for item in tokens.content)
        rows.append(("content", spans))
    return rows


def _reference(item: Any) -> str:
    if item is None:
        return "not said"
    return f"{item.id} ({item.digest})" if item.digest else str(item.id)


def _binding(manifest: Manifest) -> str:
    """ENG-2: say so where tokens cannot be verified."""
    kind, chain = manifest.identity.kind, manifest.tokens.chain
    if chain is not None:
        salt = "salted" if chain.salted else "not salted, so it confirms a guessed prompt"
        count = len(chain.hashes)
        blocks = f"{count:,} block{'' if count == 1 else 's'} of up to {BLOCK_TOKENS} tokens"
        return f"prefix chain, {blocks}; {salt}"
    key = manifest.identity.engine_key
    if key is not None:
        place = f"rank {key.rank} of {key.world_size}"
        return f"key {key.key} of {key.engine}, {place}; tokens are not verified"
    return f"{kind}: tokens are not verified, nothing says which prompt this is"


def _ropes(manifest: Manifest) -> str:
    ropes = manifest.identity.rope
    if not ropes:
        return "no rotary embedding is described"
    state = {True: "rotated", False: "not rotated"}
    kinds = sorted({state[item.keys_rotated] for item in ropes})
    layers = sum(len(item.layers) for item in ropes)
    return f"keys {' or '.join(kinds)}, frequencies of {layers} layers"


def _lineage(manifest: Manifest) -> str:
    lineage = manifest.lineage
    if lineage.kind == "exact":
        return "exact: the source tensors came from the model"
    times = f"{lineage.generations} generation{'s' if lineage.generations > 1 else ''}"
    return f"lossy: {times}, the source was restored from quality {lineage.quality}"


def group_row(group: Group, count: int) -> tuple[object, ...]:
    """Name, role, dtype, layers, heads, dim, tokens held of ``count``."""
    heads = str(group.heads)
    if group.heads != group.heads_total:
        stop = group.head_start + group.heads
        heads = f"{group.head_start}-{stop - 1} of {group.heads_total}"
    return (
        group.name,
        group.role,
        group.dtype,
        number_runs(group.layers),
        heads,
        group.head_dim,
        _held(group.tokens, count),
    )


def _held(extent: Extent, count: int) -> str:
    if extent.kind == "window":
        return f"{extent.held_start:,}-{count:,} (window)"
    if extent.kind == "state":
        return f"state {list(extent.shape)}"
    return f"all {count:,}"


def structure_facts(manifest: Manifest) -> list[tuple[str, object]]:
    """Segments, pictures, features, extensions."""
    cut = manifest.segmentation
    groups = dict.fromkeys(f"{item.layers} layers x {item.heads} heads" for item in cut.groups)
    rows: list[tuple[str, object]] = [
        ("segments", f"at most {cut.tokens:,} tokens x {compact(groups)}; {cut.order}"),
        ("alignment", f"{cut.alignment}"),
    ]
    rows += [
        (f"pictures of {track.quality}", short_layouts(track.layouts))
        for track in manifest.tracks
        if track.layouts
    ]
    if manifest.valid_lengths is not None:
        rows.append(("valid lengths", number_runs(manifest.valid_lengths)))
    if manifest.profile is not None:
        rows.append(("profile", f"{manifest.profile}, a file beside this one, not in the sizes"))
        rows += [("" if n else "needed for", text) for n, text in enumerate(_needing(manifest))]
    rows.append(("features", compact(manifest.features) or "none"))
    rows.append(("extensions", compact(sorted(manifest.extensions)) or "none"))
    return rows


def _needing(manifest: Manifest) -> Iterator[str]:
    """Which groups of which quality cannot be restored without the profile."""
    for quality in manifest.qualities:
        pairs = zip(manifest.groups, quality.encodings, strict=True)
        found = [group.name for group, encoding in pairs if encoding == TRANSFORMED]
        if found:
            names = "all groups" if len(found) == len(manifest.groups) else compact(found)
            yield f"{names} of {quality.name}"


def compact(items: Iterable[object], most: int = 8) -> str:
    """A list with commas, cut after some elements."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def number_runs(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs written as ``0-29``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return compact(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def short_layouts(layouts: Sequence[Layout]) -> str:
    """Frames, width x height and order of the first layouts."""
    texts = [f"{item.frames} of {item.width}x{item.height}, order {item.order}" for item in layouts]
    return "; ".join([*dict.fromkeys(texts)][:3]) + ("; ..." if len(set(texts)) > 3 else "")
