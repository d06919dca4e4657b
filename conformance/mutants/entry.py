"""A mutant as an implementation: ``python conformance/mutants/entry.py NAME CALL ...``.

Speaks conformance/PROTOCOL.md, ``batch`` too, as the reference adapter with one fault. Video is
decoded in this process always, for a child process would have no fault.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from conformance.mutants.mutant import install  # noqa: E402
from conformance.mutants.table import BY_NAME  # noqa: E402


def main() -> int:
    """Install the mutant, then answer as the reference adapter does."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in BY_NAME:
        sys.stderr.write(f"no mutant {name!r}; see conformance/mutants.md\n")
        return 64
    install(BY_NAME[name])
    from conformance.adapters import reference

    try:
        if sys.argv[1:] == ["batch"]:
            return reference.main()
        found, code = reference.answer(sys.argv[1:], batch=True)
    except Exception:
        traceback.print_exc()
        return reference.INTERNAL
    sys.stdout.write(json.dumps(found) + "\n")
    return code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
