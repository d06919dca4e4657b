"""All mutants, in the order of the report."""

from __future__ import annotations

from typing import Final

from conformance.mutants import payloads, profiles, survivors, texts, transforms, values, writers
from conformance.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    *texts.MUTANTS,
    *values.MUTANTS,
    *payloads.MUTANTS,
    *transforms.MUTANTS,
    *profiles.MUTANTS,
    *writers.MUTANTS,
    *survivors.MUTANTS,
)
BY_NAME: Final = {mutant.name: mutant for mutant in MUTANTS}
