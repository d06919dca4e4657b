"""kvconform: does a program read kvformat as the specification says?

The contract is ``conformance/PROTOCOL.md``. This package knows nothing of the reference
implementation: it runs an executable, reads one JSON object, looks at the exit code, and compares
with what a case folder says.
"""

from __future__ import annotations

__version__ = "0.9.0"
