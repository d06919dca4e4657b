"""Plain output: escaped text, warnings, JSON. No import that takes time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from kvformat.errors import StorageError

STANDARD_OUTPUT: Final = "standard output"


def clean(value: object, limit: int = 300) -> str:
    """``value`` as one line in which nothing can steer a terminal.

    Names in an artifact come from anyone: control, bidi and other invisible characters are
    shown as escapes, and very long texts are cut.
    """
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """A full disk behind standard output is the storage's failure; a closed pipe passes."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        closed = error.errno == errno.EBADF
        reason = "it is closed" if closed else error.strerror or type(error).__name__
        raise StorageError(
            "io.write", f"writing failed: {reason}", where=STANDARD_OUTPUT
        ) from error


def require_output() -> None:
    """Refuse before any work what could not be told in the end; no byte is written."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # not a stream of the system
    with output_errors():
        os.write(number, b"")


def write_error(line: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"kvformat: {line}\n")
    sys.stderr.flush()


def write_step(line: str) -> None:
    """What to try, as a line of its own below an error."""
    sys.stderr.write(f"  try: {line}\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    """One line that does not stop anything."""
    write_error(f"warning: {clean(text, limit=1000)}")


def write_json(value: Any) -> None:
    """One JSON object on standard output, in ASCII."""
    with output_errors():
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")
        sys.stdout.flush()
