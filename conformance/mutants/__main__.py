"""``python -m conformance.mutants``: run the suite against every mutant, write ``mutants.md``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from fnmatch import fnmatchcase

from conformance.mutants.campaign import (
    MUTANTS,
    REPORT,
    all_cases,
    check_places,
    report,
    try_all,
)


def main() -> int:
    """0 if every mutant is noticed, else 1; only a full run writes the report."""
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", metavar="GLOB", default="*", help="only these mutants")
    parser.add_argument(
        "--hinted", action="store_true", help="only cases that the table hints at; no report"
    )
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if fnmatchcase(mutant.name, options.only)]
    check_places(chosen)
    cases = all_cases()
    started, outcomes = time.monotonic(), []
    for outcome in try_all(chosen, cases, options.jobs, hinted=options.hinted):
        outcomes.append(outcome)
        name, killer = outcome.mutant.name, outcome.killer
        if killer is None:
            sys.stdout.write(f"{name} survives; missing: {outcome.mutant.missing or 'unknown'}\n")
        elif outcome.mutant.missing:
            sys.stdout.write(f"{name}: {killer} kills it now, take away what is missing\n")
        elif not outcome.hinted:
            sys.stdout.write(f"{name}: killed by {killer}, which no hint names\n")
        sys.stdout.flush()
    seconds = time.monotonic() - started
    survivors = [item.mutant.name for item in outcomes if item.killer is None]
    killed = len(outcomes) - len(survivors)
    sys.stdout.write(f"{killed} of {len(outcomes)} mutants killed in {seconds:.0f} s\n")
    if len(chosen) == len(MUTANTS) and not options.hinted:
        REPORT.write_text(report(outcomes), encoding="utf-8")
    return 1 if survivors or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
