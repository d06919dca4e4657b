"""Options that several subcommands share: intervals, token ids, salts, expectations."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import numpy as np
from numpy.typing import NDArray

from kvformat.cli.foreign import parsing
from kvformat.errors import UsageError
from kvformat.expectations import Expectation, token_array
from kvformat.storage import storage_errors

Function = TypeVar("Function", bound=Callable[..., Any])
HASH: Final = re.compile(r"(blake3|sha256):[0-9a-f]{64}")
NPY_MAGIC: Final = b"\x93NUMPY"
LARGEST_SIDE_FILE: Final = 2**28
"""Bytes of token ids or of a salt; 20 million ids as text."""


def interval(context: click.Context, parameter: click.Parameter, value: str | None) -> slice | None:
    """A click callback: ``A:B``, ``A:``, ``:B``, ``:`` or one number, as a slice."""
    if value is None:
        return None
    first, colon, second = value.partition(":")
    parts = [part.strip() for part in ((first, second) if colon else (first,))]
    digits = [part.isascii() and part.isdigit() and len(part) < 16 for part in parts]
    if not all(good or (colon and not part) for good, part in zip(digits, parts, strict=True)):
        raise click.BadParameter(
            f"{value[:80]!a} is not an interval such as 0:512, 512:, :512 or 7", context, parameter
        )
    numbers = [int(part) if part else None for part in parts]
    if not colon:
        start = int(parts[0])
        return slice(start, start + 1)
    begin, end = numbers
    if begin is not None and end is not None and begin >= end:
        raise click.BadParameter(
            f"{value[:80]!a} holds nothing: the end must be above the start", context, parameter
        )
    return slice(begin, end)


class Utf8(click.types.StringParamType):
    """A text for the manifest or to compare with it: UTF-8 whatever the locale is.

    File names are left alone: they are bytes, and need not be text.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Arguments come with surrogates in place of bytes that the locale cannot decode."""
        try:
            return os.fsencode(value).decode("utf-8")
        except UnicodeError:
            self.fail(f"{value[:80]!a} is not UTF-8", param, ctx)


UTF8: Final = Utf8()


def names(text: str | None) -> tuple[str, ...] | None:
    """A list with commas."""
    if text is None:
        return None
    found = tuple(item.strip() for item in text.split(",") if item.strip())
    if not found:
        raise UsageError("usage.argument", "the list is empty", found=ascii(text))
    return found


def read_all(file: str, doing: str) -> bytes:
    """The bytes of a file or a pipe; one that has no end is refused."""
    with (
        parsing(file, "the file cannot be read"),
        storage_errors(file, "io.read", doing),
        Path(file).open("rb") as handle,
    ):
        data = handle.read(LARGEST_SIDE_FILE + 1)
    if len(data) > LARGEST_SIDE_FILE:
        raise UsageError(
            "usage.argument",
            "the file is too large for what it is",
            where=file,
            expected=f"at most {LARGEST_SIDE_FILE:,} bytes",
        )
    return data


def read_token_ids(file: str) -> NDArray[np.uint32]:
    """Token ids from a JSON list, a .npy file, or integers between white space or commas."""
    data = read_all(file, "reading the token ids")
    with parsing(
        file,
        "the file holds no token ids",
        expected="a JSON list, a .npy file, or integers separated by white space",
    ):
        if data.startswith(NPY_MAGIC):
            from kvformat.cli.inputs import open_npy

            return token_array(open_npy(Path(file)))
        text = data.decode("utf-8").strip()
        value = json.loads(text) if text.startswith("[") else text.replace(",", " ").split()
        if any(isinstance(item, (bool, float, list, dict)) or item is None for item in value):
            raise ValueError("not integers")
        ids = [int(item) for item in value]
    if any(not 0 <= item < 2**32 for item in ids):
        raise UsageError(
            "usage.argument",
            "a token id is out of range",
            where=file,
            expected="0 to 2^32 - 1",
            found=next(item for item in ids if not 0 <= item < 2**32),
        )
    return np.array(ids, np.uint32)


def read_salt(file: str) -> bytes:
    """All bytes of a file, a final newline included."""
    data = read_all(file, "reading the salt")
    if not data:
        raise UsageError("usage.argument", "the salt file is empty", where=file)
    return data


profile_option: Final = click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="FILE_OR_DIR",
    help="Where to look for the calibration profile that a transformed track needs: a .kvp file, "
    "or a directory of them. Repeatable.",
)

EXPECTATIONS: Final = (
    click.option(
        "--expect-model", type=UTF8, metavar="ID", help="Refuse the cache of another model."
    ),
    click.option(
        "--expect-revision", type=UTF8, metavar="TEXT", help="Refuse another model revision."
    ),
    click.option(
        "--expect-weights-digest",
        type=UTF8,
        metavar="HASH",
        help="Refuse other weights: sha256: or blake3: and 64 hexadecimal digits.",
    ),
    click.option("--expect-tokenizer", type=UTF8, metavar="ID", help="Refuse another tokenizer."),
    click.option(
        "--expect-token-ids",
        metavar="FILE",
        help="Refuse the cache of other tokens. The ids of the sequence from position 0 on: a "
        "JSON list, a .npy file, or integers separated by white space.",
    ),
    click.option("--salt-file", metavar="FILE", help="The tenant's salt: all bytes of this file."),
)


def expectation_options(function: Function) -> Function:
    """Add the ``--expect-`` options; they arrive as keywords for ``make_expectation``."""
    for option in reversed(EXPECTATIONS):
        function = option(function)
    return function


def make_expectation(
    *,
    expect_model: str | None,
    expect_revision: str | None,
    expect_weights_digest: str | None,
    expect_tokenizer: str | None,
    expect_token_ids: str | None,
    salt_file: str | None,
) -> Expectation | None:
    """What the caller wants the artifact to be, None if nothing was said."""
    if salt_file is not None and expect_token_ids is None:
        raise UsageError("usage.argument", "--salt-file needs --expect-token-ids")
    if expect_weights_digest is not None and not HASH.fullmatch(expect_weights_digest):
        raise UsageError(
            "usage.argument",
            "--expect-weights-digest is not understood",
            expected="sha256: or blake3: and 64 lower-case hexadecimal digits",
            found=ascii(expect_weights_digest[:80]),
        )
    texts = (expect_model, expect_revision, expect_weights_digest, expect_tokenizer)
    if expect_token_ids is None and not any(item is not None for item in texts):
        return None
    return Expectation(
        model=expect_model,
        revision=expect_revision,
        weights_digest=expect_weights_digest,
        tokenizer=expect_tokenizer,
        token_ids=None if expect_token_ids is None else read_token_ids(expect_token_ids),
        salt=b"" if salt_file is None else read_salt(salt_file),
    )


EXPECTATION_KEYS: Final = (
    "expect_model",
    "expect_revision",
    "expect_weights_digest",
    "expect_tokenizer",
    "expect_token_ids",
    "salt_file",
)
