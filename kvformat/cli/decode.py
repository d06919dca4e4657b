"""``kvformat decode``: an artifact, whole or in part, to a file of tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import click

from kvformat.artifact import Artifact, open_artifact
from kvformat.cache import Restored
from kvformat.cli.options import (
    EXPECTATION_KEYS,
    UTF8,
    expectation_options,
    interval,
    make_expectation,
    names,
    profile_option,
)
from kvformat.cli.outputs import check_target, require_suffix, write_npy, write_safetensors
from kvformat.cli.show import emit, facts, heading, say
from kvformat.cli.statements import restored_metadata
from kvformat.cli.text import warn, write_json
from kvformat.dtypes import DTYPES
from kvformat.errors import UsageError

NUMPY_LACKS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``decode``, as click hands them over."""

    track: str | None
    tokens: slice | None
    layers: slice | None
    heads: slice | None
    roles: str | None
    allow_partial: bool
    check: bool
    overwrite: bool
    workers: int | None
    as_json: bool
    profiles: tuple[str, ...]


@click.command(name="decode")
@click.argument("url", metavar="URL")
@click.option(
    "--output", required=True, metavar="FILE", help="A .npy or .safetensors file to write."
)
@click.option(
    "--track", type=UTF8, metavar="T", help="Track, codec or quality. Default: the best quality."
)
@click.option(
    "--tokens",
    callback=interval,
    metavar="A:B",
    help="Tokens of the artifact, from 0: A:B, A:, :B or N.",
)
@click.option(
    "--layers", callback=interval, metavar="A:B", help="Layers by their number in the model."
)
@click.option(
    "--heads", callback=interval, metavar="A:B", help="KV heads by their number in the model."
)
@click.option("--roles", type=UTF8, metavar="R,R", help="Roles, for example key,value.")
@click.option(
    "--allow-partial",
    is_flag=True,
    help="Also give parts of windowed or recurrent layers that serve no prefix.",
)
@click.option("--check", is_flag=True, help="Also compare the digests of the decoded integers.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Threads.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
@profile_option
@expectation_options
def command(url: str, output: str, **given: Any) -> None:
    """Restore the cache in the artifact URL to a file, exactly as the artifact defines it.

    Every reader restores the same bits of a track. Those of an exact track are the source's.

    A .npy file holds one array [2, layers, tokens, heads, head_dim]; a .safetensors file any
    cache, as tensors layers.0.key and so on, with the digest of the manifest as metadata.
    """
    expected = {key: given.pop(key) for key in list(given) if key in EXPECTATION_KEYS}
    options = Options(**given)
    suffix = require_suffix(output, ".npy", ".safetensors")
    expect = make_expectation(**expected)
    check_target(output, url, overwrite=options.overwrite)
    started = time.monotonic()
    with open_artifact(url, expect=expect, profiles=options.profiles) as artifact:
        restored = _read(artifact, options)
        _write(output, suffix, artifact, restored, overwrite=options.overwrite)
        seconds = time.monotonic() - started
        if options.as_json:
            write_json(_verdict(output, artifact, restored, options, seconds=seconds))
        else:
            _show(output, suffix, artifact, restored, seconds=seconds)
        if artifact.manifest.identity.kind != "tokens":
            warn("tokens are not verified: the artifact does not say which tokens it holds")


def _closed(wanted: slice | None, what: str, first: int, stop: int) -> slice | None:
    """Open ends are the first and last one that the artifact holds, not those of the model."""
    if wanted is None or (wanted.start is None and wanted.stop is None):
        return None
    begin = first if wanted.start is None else wanted.start
    end = stop if wanted.stop is None else wanted.stop
    if begin >= end:
        raise UsageError(
            "usage.selection",
            f"the artifact holds no such {what}",
            expected=f"inside [{first}, {stop})",
            found=f"from {begin} to {end}",
        )
    return slice(begin, end)


def _read(artifact: Artifact, options: Options) -> Restored:
    """The part that the options select."""
    groups = artifact.groups
    layers = sorted({layer for group in groups for layer in group.layers})
    first_head = min(group.head_start for group in groups)
    last_head = max(group.head_start + group.heads for group in groups)
    return artifact.read(
        tokens=_closed(options.tokens, "tokens", 0, artifact.manifest.tokens.count),
        layers=_closed(options.layers, "layers", layers[0], layers[-1] + 1),
        heads=_closed(options.heads, "heads", first_head, last_head),
        roles=names(options.roles),
        track=options.track,
        check=options.check,
        allow_partial=options.allow_partial,
        workers=options.workers,
    )


def _write(
    output: str, suffix: str, artifact: Artifact, restored: Restored, *, overwrite: bool
) -> None:
    if suffix == ".safetensors":
        metadata = restored_metadata(artifact.manifest, artifact.manifest_digest, restored)
        write_safetensors(output, restored.tensors(), metadata, overwrite=overwrite)
        return
    try:
        array = restored.kv
    except UsageError as error:
        raise UsageError(
            error.code,
            error.message,
            found=error.found,
            next_step="Write a .safetensors file, which holds any cache",
        ) from None
    write_npy(output, array, overwrite=overwrite)


def _verdict(
    output: str, artifact: Artifact, restored: Restored, options: Options, *, seconds: float
) -> dict[str, Any]:
    """As ``schema/verdict.schema.json`` has it."""
    manifest = artifact.manifest
    not_checked = ["artifact: what this part does not need; kvformat verify checks all bytes"]
    if not options.check:
        not_checked.append("integers: their digests; --check compares them")
    if artifact.verified_length is None:
        not_checked.append("tokens: no token ids were given, or the artifact does not hold them")
    groups = {
        name: {
            "dtype": item.group.dtype,
            "role": item.group.role,
            "shape": list(item.array.shape),
            "layers": list(item.layers),
            "token_start": item.token_start,
            "head_start": item.head_start,
        }
        for name, item in restored.groups.items()
    }
    return {
        "verdict": "ok",
        "code": None,
        "message": "restored, and every byte that was used agrees with its digest",
        "where": "",
        "expected": None,
        "found": None,
        "next_step": "",
        "report": {
            "artifact": {
                "name": artifact.name,
                "manifest_digest": artifact.manifest_digest,
                "content_id": manifest.content_id,
                "track": restored.track,
                "verified_tokens": artifact.verified_length,
                "output": output,
                "seconds": round(seconds, 3),
                "groups": groups,
                "lineage": restored.lineage.to_json(),
            },
            "checked": {"values": sum(item.array.size for item in restored.groups.values())},
            "not_checked": not_checked,
        },
    }


def _show(
    output: str, suffix: str, artifact: Artifact, restored: Restored, *, seconds: float
) -> None:
    """What was written, and what to know before it is used."""
    dtypes = sorted({item.group.dtype for item in restored.groups.values()})
    shapes = ", ".join(f"{name} {list(item.shape)}" for name, item in restored.items())
    rows = [("track", restored.track), ("groups", shapes), ("dtype", ", ".join(dtypes))]
    if artifact.verified_length is not None:
        rows.append(("tokens", f"the first {artifact.verified_length:,} agree with those given"))
    heading(f"wrote {output} in {seconds:.1f} s")
    emit(facts(rows))
    if suffix == ".npy" and dtypes[0] in NUMPY_LACKS:
        raw = f"V{DTYPES[dtypes[0]].itemsize}"
        say(f"numpy has no {dtypes[0]}: load it, then .view(ml_dtypes.{dtypes[0]}) the {raw} array")
    quality = restored.track.split("/")[0]
    if suffix == ".npy" and quality != "exact":
        say(f"lossy: when you encode these values again, give --lossy-source {quality}")
