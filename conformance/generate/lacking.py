"""What a reader without a codec answers: ``codec.unavailable``, and only when it is used.

These cases run for implementations that do *not* declare the codec (``lacks:`` in ``requires``).
"""

# ruff: noqa: PLR0917 - tables

from __future__ import annotations

from dataclasses import replace

from conformance.generate.compose import EXACT, EXACT_ZSTD, HEVC, STORED, ZSTD, small, tiny
from conformance.generate.core import HAND
from conformance.generate.suite import Case, Operation, Suite, decode, inspect, verify


def add_cases(suite: Suite) -> None:
    """All of this module."""
    why = (
        "A codec that the text defines is no fault of the file, and a track without it is as good "
        "as in any other file."
    )
    missing = "codec.unavailable"
    for codec, tracks, data in (
        ("zstd", (ZSTD, EXACT_ZSTD), small(suite, (ZSTD, STORED, EXACT_ZSTD, EXACT)).build()),
        ("hevc", (HEVC,), small(suite, (HEVC, STORED, EXACT)).build()),
    ):
        calls = [
            inspect(),
            decode(STORED),
            decode(EXACT, "--tokens", "2:7"),
            *(decode(track, code=missing) for track in tracks),
            decode(tracks[0], "--tokens", "0:1", code=missing),
            verify(missing),
        ]
        _add(suite, codec, "beside-stored", data, calls, f"Tracks in {codec} and in stored.", why)
    calls = [inspect(), decode(EXACT_ZSTD, code=missing), verify(missing)]
    data = tiny([EXACT_ZSTD]).build()
    _add(suite, "zstd", "alone", data, calls, "A track in zstd and no other.", why)


def _add(
    suite: Suite,
    codec: str,
    slug: str,
    data: bytes,
    calls: list[Operation],
    what: str,
    why: str,
) -> None:
    suite.add(
        Case(
            "trk",
            f"lacks-{codec}-{slug}",
            "uncommon",
            ("TRK-3", "ERR-1"),
            data,
            [replace(call, without=codec) for call in calls],
            f"{what} The reader does not have {codec}.",
            why,
            HAND,
            (f"lacks:{codec}",),
        )
    )
