"""The suite notices readers with one fault each: the recorded case of every mutant kills it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "conformance"))

from conformance.mutants.campaign import (  # noqa: E402
    ENTRY,
    MUTANTS,
    REFERENCE,
    REPORT,
    SURVIVES,
    all_cases,
    first_failure,
    recorded,
)
from conformance.mutants.mutant import Mutant  # noqa: E402

RECORDED = recorded(REPORT.read_text(encoding="utf-8"))
KILLED = [mutant for mutant in MUTANTS if RECORDED.get(mutant.name, SURVIVES) != SURVIVES]
CASES = {case.id: case for case in all_cases()}
LEAST = 25


def test_report_lists_every_mutant() -> None:
    assert list(RECORDED) == [mutant.name for mutant in MUTANTS]
    assert len(KILLED) >= LEAST
    assert set(RECORDED.values()) - {SURVIVES} <= set(CASES)


def test_survivors_are_those_whose_case_is_missing() -> None:
    survivors = {name for name, killer in RECORDED.items() if killer == SURVIVES}
    assert survivors == {mutant.name for mutant in MUTANTS if mutant.missing}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_place(mutant: Mutant) -> None:
    path = ROOT / f"{mutant.module.replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8")
    changed = mutant.apply(source)
    assert changed != source
    compile(changed, str(path), "exec")


def test_a_place_that_is_gone_is_told() -> None:
    with pytest.raises(ValueError, match="0 places"):
        MUTANTS[0].apply("")


def test_recorded_cases_fail() -> None:
    def fails(mutant: Mutant) -> bool:
        command = [sys.executable, ENTRY, mutant.name]
        return first_failure(command, [CASES[RECORDED[mutant.name]]])[0] is not None

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(fails, KILLED))
    survivors = [mutant.name for mutant, found in zip(KILLED, results, strict=True) if not found]
    assert not survivors


def test_reference_passes_the_same_cases() -> None:
    killers = {RECORDED[mutant.name] for mutant in KILLED}
    cases = [
        replace(case, operations=tuple(replace(o, own_ceiling=False) for o in case.operations))
        for case in (CASES[name] for name in sorted(killers))
    ]  # one process for all of them: the suite itself runs each with its own
    failed, passed = first_failure(REFERENCE, cases)
    assert failed is None
    assert len(passed) == len(killers)
