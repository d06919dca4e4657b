"""Mutants that survive: for each one the case that is missing.

When the case exists, move the mutant to the module of its kind, without ``missing``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from conformance.mutants.texts import rows, skipped

_MISSING: Final = {
    "padding-of-the-front": "inspect and decode on the file of hdr-0040, if HDR-9 binds every "
    "reader: data.padding. Only verify is asked there, and it looks a second time",
}

_FOUND: Final = rows(
    "front",
    skipped(
        "padding-of-the-front",
        "any(padding)",
        "opening accepts padding behind the tables that is not zero",
        "hdr-0040* dat-*",
    ),
)

MUTANTS: Final = tuple(replace(mutant, missing=_MISSING[mutant.name]) for mutant in _FOUND)
