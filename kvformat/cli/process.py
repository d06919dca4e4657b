"""Signals and standard streams of the process. Imports nothing that takes time.

Exit codes are answers (spec section 14), so neither a signal while modules are loaded nor a
stream that is closed or full may replace them by a traceback, by 1, or by the 120 of Python's
last flush.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from types import FrameType
from typing import IO, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
ESCAPED: Final = "backslashreplace"


def interruptions_end_at_once() -> None:
    """While nothing is there to be cleaned up: exit 130 or 143, silently.

    An exception would not do: half of an import may swallow it, or tell it as its own failure.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def answer_stands() -> None:
    """The very last: Python takes its handlers away while it ends, and a signal would kill."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interruptions_clean_up() -> None:
    """Signals become exceptions from here on, so that temporary files are removed.

    Changes nothing where ``interruptions_end_at_once`` was not called, as in tests.
    """
    for number, handler in zip(SIGNALS, (signal.default_int_handler, _terminated), strict=True):
        if signal.getsignal(number) is _leave:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    os._exit(128 + number)


def _terminated(number: int, frame: FrameType | None) -> None:
    """End like an interruption."""
    del frame
    sys.exit(128 + number)


def open_streams() -> None:
    """Give standard streams that are closed a descriptor, and make standard error harmless.

    Without a descriptor of its own, a closed stream would be the next file that is opened, and
    what libraries print would end up in an artifact. Writing to a closed standard output fails
    as on a full disk: its descriptor is open for reading only.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(_null(0, os.O_RDONLY), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(_null(1, os.O_RDONLY), "w", errors=ESCAPED)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_null(2, os.O_WRONLY), "w", errors=ESCAPED)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=ESCAPED)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = ErrorStream(sys.stderr)


def _null(wanted: int, flags: int) -> int:
    """The null device as descriptor ``wanted`` if that is free."""
    found = os.open(os.devnull, flags)
    if found == wanted:
        os.set_inheritable(found, True)
    return found


def silence(stream: IO[str]) -> None:
    """Point ``stream`` away, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class ErrorStream(io.TextIOWrapper):
    """Standard error whose failures pass: nobody reads it, but the exit code is read."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream  # or it would close the buffer
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=ESCAPED, line_buffering=True
        )

    def write(self, text: str, /) -> int:
        """Write, or do as if."""
        try:
            return super().write(text)
        except (OSError, ValueError):
            silence(self)
            return len(text)

    def flush(self) -> None:
        """Flush, or do as if."""
        try:
            super().flush()
        except (OSError, ValueError):
            silence(self)
