"""Measured qualities on the command line: from ``evaluate --json`` into an artifact, and shown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from kvformat.cli.foreign import parsing
from kvformat.cli.options import read_all
from kvformat.errors import KvformatError, UsageError
from kvformat.fields import Node
from kvformat.manifest import Manifest
from kvformat.measured import Measurement, measured

COLUMNS: Final = (
    "track",
    ">KL mean",
    ">KL p99",
    ">KL max",
    ">top-1",
    ">cross-entropy",
    ">tokens",
    "measured on",
)
REPORT: Final = "the output of kvformat evaluate --json"


def read_measured(file: str, tracks: Iterable[str], model: str) -> tuple[Measurement, ...]:
    """The measurements of these tracks in a report of ``kvformat evaluate --json``.

    Raises ``usage.argument`` for another kind of file, another model, and where none of the tracks
    was measured.
    """
    data = read_all(file, "reading the measured quality")
    with parsing(file, "the file holds no measured quality", expected=REPORT):
        listed = json.loads(data)["measurements"]
    try:
        found = Node(listed, "/measurements").each(Measurement.parse)
    except KvformatError as error:
        raise UsageError(
            "usage.argument",
            f"the file holds no measured quality: {error.message}",
            where=f"{file}, {error.where}",
            expected=REPORT,
        ) from None
    wanted = tuple(tracks)
    mine = tuple(item for item in found if item.track in wanted)
    if not mine:
        raise UsageError(
            "usage.argument",
            "none of these tracks was measured",
            where=file,
            expected=", ".join(wanted),
            found=", ".join(item.track for item in found) or "none",
        )
    other = next((item.model for item in mine if item.model != model), None)
    if other is not None:
        raise UsageError(
            "usage.argument",
            "the quality was measured with another model",
            where=file,
            expected=ascii(model),
            found=ascii(other),
        )
    return mine


def measured_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    """One row per measurement that the manifest states, under ``COLUMNS``."""
    return [
        (
            item.track,
            f"{item.kl_mean:.3g}",
            f"{item.kl_p99:.3g}",
            f"{item.kl_max:.3g}",
            f"{item.top1:.3f}",
            f"{item.cross_entropy_change:+.4f}",
            f"{item.compared_tokens:,}",
            "this cache" if item.content_id == manifest.content_id else "another cache",
        )
        for item in measured(manifest)
    ]
