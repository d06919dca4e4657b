"""Entries that are the reference adapter with one fault, for tests of kvconform."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conformance_fakes import CONFORMANCE, ROOT

WRAPPER = """
import sys
sys.path.insert(0, {adapters!r})
sys.path.insert(0, {root!r})
import reference as it

{body}

sys.exit(it.main())
"""


def wrapper(folder: Path, body: str, name: str = "entry") -> list[str]:
    """The command of an adapter that runs ``body`` first; ``it`` is the adapter's module."""
    path = folder / f"{name}.py"
    text = WRAPPER.format(adapters=str(CONFORMANCE / "adapters"), root=str(ROOT), body=body)
    path.write_text(text)
    return [sys.executable, str(path)]
