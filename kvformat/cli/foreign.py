"""What foreign bytes do to parsers becomes one error of this package, here only."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Final

from kvformat.errors import KvformatError, UsageError

PARSING: Final = (
    ValueError,  # also UnicodeError, JSONDecodeError, integers of thousands of digits
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,  # also OverflowError
    SyntaxError,  # a .npy header is a Python literal
    RecursionError,
    MemoryError,
    struct.error,
)
"""What parsers raise."""
_WORDY: Final = (ValueError, ArithmeticError, SyntaxError)
"""Those whose text says something about the data."""


@contextlib.contextmanager
def parsing(
    where: object,
    message: str,
    *,
    code: str = "usage.argument",
    expected: str | None = None,
    found: str | None = None,
    next_step: str = "",
) -> Iterator[None]:
    """Raise ``UsageError`` with these words for whatever a parser raises inside.

    Errors of this package and of the storage pass.
    """
    try:
        yield
    except KvformatError:
        raise
    except PARSING as error:
        reason = found
        if reason is None and expected is None and isinstance(error, _WORDY):
            reason = " ".join(str(error).split())[:200] or None
        if reason is not None and "integer string conversion" in reason:
            reason = "an integer of thousands of digits"
        if isinstance(error, MemoryError):
            reason = "more than fits into memory"
        raise UsageError(
            code, message, where=str(where), expected=expected, found=reason, next_step=next_step
        ) from None


def whole(value: object) -> int:
    """``value`` if it is a whole number from 0 on that fits the format; raises ``ValueError``.

    JSON says 1e400, 2.5 and true where a number of bytes is expected.
    """
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("not a whole number from 0 to 2^53 - 1")
    return value


def unicode_text(value: object) -> str:
    """``value`` if it is a text that UTF-8 can hold; raises ``ValueError``."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    value.encode("utf-8")
    return value
