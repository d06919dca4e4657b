"""Mutants that survive: for each one the case that is missing.

When the case exists, move the mutant to the module of its kind, without ``missing``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from conformance.mutants.texts import rows, skipped

_MISSING: Final = {
    "data-bytes-unchecked": "data_bytes, file_bytes and the file itself one byte (a zero) longer "
    "than the last part: manifest.semantics. In dat-0007 and dat-0008 the header disagrees too",
    "quality-without-track": "a last quality exact (all encodings exact, no sets, an empty span of "
    "data) that no track names, all else valid: manifest.semantics. In trk-0012 the name is wrong "
    "too",
    "window-behind-the-end": "a window group with held_start = T + 1, no cells and no segments, as "
    "grp-0026 otherwise: manifest.semantics. In grp-0053 the number of segments is wrong too",
    "padding-of-the-front": "inspect and decode on the file of hdr-0040, if HDR-9 binds every "
    "reader: data.padding. Only verify is asked there, and it looks a second time",
    "salted-ignored": "salted true with hashes of the empty salt, verified with ids and no salt, "
    "and salted false with hashes of a salt that is given: identity.tokens (TOK-16)",
    "zstd-checksum": "a frame with the right checksum, the low 4 bytes of XXH64 of the content: "
    "segment.payload. That of zst-0057 is four zeros, which zstd refuses by itself",
    "hevc-zero-behind": "one zero byte behind the slice unit, in front of a start code of 4 bytes: "
    "segment.bitstream. In hev-0040 the zero is behind the MD5 message, whose length is wrong then",
}

_FOUND: Final = (
    *rows(
        "manifest",
        skipped(
            "data-bytes-unchecked",
            "manifest.data_bytes != cursor",
            "data_bytes is not the end of the last part",
            "dat-* hdr-*",
        ),
        skipped("quality-without-track", "unused", "a quality without a track passes", "trk-*"),
    ),
    *rows(
        "groups",
        skipped(
            "window-behind-the-end",
            "extent.held_start > tokens.count",
            "a window may start behind the last token",
            "grp-*",
        ),
    ),
    *rows(
        "front",
        skipped(
            "padding-of-the-front",
            "any(padding)",
            "opening accepts padding behind the tables that is not zero",
            "hdr-0040* dat-*",
        ),
    ),
    *rows(
        "expectations",
        skipped(
            "salted-ignored",
            "bool(expected.salt) != chain.salted",
            "salted is not compared with the salt given",
            "tok-*",
        ),
    ),
    *rows(
        "codecs.zstd_codec",
        (
            "zstd-checksum",
            "_FORBIDDEN_FLAGS = 0x1F",
            "_FORBIDDEN_FLAGS = 0x1B",
            "a frame may have a checksum",
            "zst-00*",
        ),
    ),
    *rows(
        "codecs.bitstream",
        (
            "hevc-zero-behind",
            "if stop - start < _SLICE_HEADER_BYTES or data[stop - 1] == 0:",
            "if stop - start < _SLICE_HEADER_BYTES:",
            "a zero behind a unit passes",
            "hev-00[34]* hev-01*",
        ),
    ),
)

MUTANTS: Final = tuple(replace(mutant, missing=_MISSING[mutant.name]) for mutant in _FOUND)
