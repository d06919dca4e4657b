"""Writers and readers killed at random points, for a short time; ``tools/torture_store.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parent.parent / "tools" / "torture_store.py"


def test_nothing_wrong_is_served_while_processes_are_killed(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, TOOL, "--seconds", "15", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    counts = json.loads(found.stdout)
    assert counts["lookups"] > 0
    assert counts.get("WRONG", 0) == 0
