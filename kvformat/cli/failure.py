"""How the command ends: a line on standard error and what to try, JSON, an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Final

import click

from kvformat.cli.process import silence
from kvformat.cli.text import (
    STANDARD_OUTPUT,
    clean,
    output_errors,
    write_error,
    write_json,
    write_step,
)
from kvformat.errors import KvformatError, StorageError, UsageError

INTERNAL: Final = 70
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 74
NO_ROOM: Final = (errno.ENOSPC, errno.EFBIG, errno.EROFS)
DEBUG_VARIABLE: Final = "KVFORMAT_DEBUG"
DIGEST: Final = re.compile(r"(?<![\w/.-])[0-9a-f]{64}(?!\w|[-./]\w)")
"""A digest that is no part of a path."""
DIGITS: Final = 12
_TEXT: Final = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
TEXTS: Final = re.compile(rf"\[{_TEXT}(?:, {_TEXT})*\]|\({_TEXT}(?:, {_TEXT})*,?\)")
"""A Python list or tuple of texts."""
NUMBERS: Final = re.compile(r"(?:(?<=one of )|^)\[(-?\d+(?:, -?\d+)*)\]$")
"""A Python list of numbers that is all of a value; a shape in ``input.shape`` keeps brackets."""


def answer(act: Callable[[], None], *, as_json: bool) -> int:
    """Call ``act`` and return the exit code; whatever it raises is told in one line,
    and a second one says what to try."""
    try:
        try:
            return _complete(act)
        except KvformatError as error:
            return _report(error, as_json=as_json)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            return UsageError("usage.argument", "no command").exit_code
        except click.ClickException as error:
            return _report(usage_of(error), as_json=as_json)
    except BrokenPipeError:
        silence(sys.stdout)
        return OUTPUT_CLOSED
    except (KeyboardInterrupt, click.Abort):
        write_error("interrupted; nothing is left behind")
        return INTERRUPTED
    except OSError as error:
        return _report(_of_system(error), as_json=False)
    except Exception as error:
        return _internal(error)


def _complete(act: Callable[[], None]) -> int:
    code = 0
    try:
        act()
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    with output_errors():
        sys.stdout.flush()
    return code


def _of_system(error: OSError) -> StorageError:
    """What the system says; it is of standard output if that cannot be flushed any more."""
    try:
        with output_errors():
            sys.stdout.flush()
    except StorageError as failed:
        return failed
    silence(sys.stdout)
    code = "io.write" if error.errno in NO_ROOM else "io.read"
    return StorageError(code, f"the system says: {error}")


def usage_of(error: click.ClickException) -> UsageError:
    """What click says about the command line, as an error of this package."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "kvformat"
    return UsageError("usage.argument", message, next_step=f"{path} --help")


def _report(error: KvformatError, *, as_json: bool) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    if error.code == "io.exists" and "overwriting" in error.next_step:
        error.next_step = "Choose another name, or give --overwrite"
    write_error(f"error {clean(one_line(error), limit=4000)}")
    if error.next_step:
        step = error.next_step
        step = step[0].lower() + step[1:] if step[1:2].islower() else step
        write_step(clean(step, limit=1000))
    if as_json and error.where != STANDARD_OUTPUT:
        try:
            write_json(error.as_dict())
        except StorageError:
            silence(sys.stdout)  # the line on standard error and the exit code have said it
    elif error.where == STANDARD_OUTPUT:
        silence(sys.stdout)
    return error.exit_code


def one_line(error: KvformatError) -> str:
    """The error without its next step; digests are shortened, lists have commas only."""
    text = plain(error.message)
    for name in ("expected", "found"):
        value = getattr(error, name)
        if value is not None:
            joint = ", " if name == "found" and error.expected is not None else "; "
            text += f"{joint}{name} {plain(value, shape=error.code == 'input.shape')}"
    if error.where:
        text += f" (at {error.where})"
    return f"[{error.code}] {text}"


def plain(text: str, *, shape: bool = False) -> str:
    """``text`` without Python's brackets and quotes, and with 12 digits of a digest."""
    text = TEXTS.sub(lambda match: ", ".join(item[1:-1] for item in _texts(match[0])), text)
    if not shape:
        text = NUMBERS.sub(r"\1", text)
    if text in ("[]", "()"):
        return "none"
    return DIGEST.sub(lambda match: f"{match[0][:DIGITS]}...", text)


def _texts(listed: str) -> list[str]:
    return re.findall(_TEXT, listed)


def _internal(error: Exception) -> int:
    """A bug: never a traceback unless it is asked for."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    if isinstance(error, MemoryError):
        write_error("error: not enough memory. Use fewer --workers, or decode a part")
    else:
        write_error(
            f"internal error: {type(error).__name__}: {clean(error)}. This is a bug in kvformat; "
            f"please report it with the traceback that {DEBUG_VARIABLE}=1 shows"
        )
    return INTERNAL
