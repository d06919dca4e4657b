"""Mutants that survive: for each one the case that is missing (``missing``). There is none now.

When the case exists, move the mutant to the module of its kind, without ``missing``.
"""

from __future__ import annotations

from typing import Final

from conformance.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = ()
