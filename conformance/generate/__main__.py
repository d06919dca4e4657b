"""Command line of the generator."""

from __future__ import annotations

import argparse
import sys
import time

from conformance.generate import (
    arithmetic,
    content,
    core,
    data_faults,
    encoding,
    encoding_faults,
    future,
    hostile,
    identity,
    lacking,
    manifest_faults,
    payload_faults,
    slices,
    texts,
    transformed,
    transformed_faults,
    transport,
    uncommon,
    whole_files,
)
from conformance.generate.suite import MOST_BYTES, Suite, compare, report, write

MODULES = (
    core,
    arithmetic,
    identity,
    uncommon,
    whole_files,
    texts,
    manifest_faults,
    data_faults,
    payload_faults,
    hostile,
    future,
    encoding,
    encoding_faults,
    content,
    lacking,
    slices,
    transport,
    transformed,
    transformed_faults,
)


def build(*, new: bool = False) -> tuple[Suite, dict[str, bytes]]:
    """All cases and the files that they make."""
    suite = Suite(new=new)
    for module in MODULES:
        module.add_cases(suite)
    return suite, suite.files()


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="conformance.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is committed")
    parser.add_argument("--new", action="store_true", help="make library-dependent inputs anew")
    options = parser.parse_args()
    started = time.monotonic()
    suite, files = build(new=options.new)
    report(suite.disagreements)
    total = sum(len(data) for data in files.values())
    print(f"{len(suite.cases)} cases, {total:,} bytes, {time.monotonic() - started:.0f} s")
    if suite.disagreements or total > MOST_BYTES:
        return 1
    if options.check:
        wrong = compare(files)
        report(wrong)
        return 1 if wrong else 0
    write(files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
