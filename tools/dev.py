"""Run the demo or the tests from a fresh checkout, with nothing installed but Python and git.

``python3 tools/dev.py demo`` and ``python3 tools/dev.py test`` make a virtual environment beside
the checkout's files once, install the package into it, and run. Further arguments are passed on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-dev"
STAMP = ENVIRONMENT / "kvformat-stamp"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
COMMANDS = {
    "demo": ["-m", "kvformat", "demo"],
    "test": ["-m", "pytest", "-n", "auto"],
    "lint": ["-m", "ruff", "check", "."],
    "types": ["-m", "mypy"],
    "shell": [],
}


def prepare() -> None:
    """Make the environment, or make it anew when pyproject.toml changed."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    print("Installing kvformat and its tools into .venv-dev (about a minute, once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    install = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, "-e", ".[dev]"], cwd=ROOT, check=True)
    STAMP.write_text(wanted)


def main() -> int:
    """The exit status of the command."""
    if sys.version_info < (3, 11):  # noqa: UP036 - people start this with any Python
        print("kvformat needs Python 3.11 or newer", file=sys.stderr)
        return 64
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python3 tools/dev.py {{{','.join(COMMANDS)}}} [ARGUMENT ...]")
        return 64
    try:
        prepare()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the environment could not be made: {error}", file=sys.stderr)
        print("Python's venv and pip modules and a package index are needed", file=sys.stderr)
        return 74
    command = [str(PYTHON), *COMMANDS[sys.argv[1]], *sys.argv[2:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
