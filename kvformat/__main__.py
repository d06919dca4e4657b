"""``python -m kvformat``: the same program as the ``kvformat`` command."""

from __future__ import annotations

from kvformat.cli.main import run

if __name__ == "__main__":
    run()
