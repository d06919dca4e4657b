"""JSON that no two parsers can read differently: the rules of spec section 2.1.

``parse`` accepts exactly the canonical bytes that ``serialise`` makes; everything else is refused
with the rule that it breaks. Pure functions, no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np

from kvformat.errors import InvalidError
from kvformat.limits import LIMITS

KEY_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_INTEGER: Final = re.compile(r"0|[1-9][0-9]*")
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NESTING: Final = np.zeros(256, np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1
_DIGITS_OF_LARGEST: Final = len(str(LIMITS.integer))

Json = dict[str, "Json"] | list["Json"] | str | int | bool | None


class _Refused(Exception):  # noqa: N818 - private signal out of the json hooks
    def __init__(self, error: InvalidError) -> None:
        self.error = error
        super().__init__(error.code)


def serialise(value: object) -> bytes:
    """The canonical UTF-8 form of ``value`` (JSN-7)."""
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    )
    return text.encode("utf-8")


def parse(data: bytes, where: str = "manifest") -> dict[str, Any]:
    """The top-level object in ``data``, checked against JSN-1 to JSN-10.

    Raises ``InvalidError`` with ``manifest.json``, ``manifest.duplicate-key``, ``limit.exceeded``
    or ``manifest.canonical``.
    """
    try:
        text = data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise _syntax("the text is not UTF-8", f"{where}, byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise _syntax("the text starts with a byte order mark", f"{where}, byte 0")
    _check_depth(data, where)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except _Refused as refused:
        cause = refused.error
        raise InvalidError(
            cause.code, cause.message, where=where, expected=cause.expected, found=cause.found
        ) from None
    except (ValueError, RecursionError) as error:
        place = f"{where}, character {getattr(error, 'pos', 0)}"
        raise _syntax(f"the text is not JSON ({type(error).__name__})", place) from None
    if type(value) is not dict:
        raise _syntax("the top-level value is not an object", where)
    _check_strings(value, where)
    if serialise(value) != data:
        raise InvalidError(
            "manifest.canonical",
            "the JSON is not in canonical form",
            where=where,
            next_step="Write it with sorted keys, no white space and minimal escapes",
        )
    return value


def _syntax(message: str, where: str) -> InvalidError:
    return InvalidError("manifest.json", message, where=where)


def _check_depth(data: bytes, where: str) -> None:
    """Refuse deep nesting and too many values before the parser sees them (JSN-8, JSN-12).

    Strings are blanked first, so what is counted is exact for JSON; other text fails below anyway.
    """
    bare = np.frombuffer(_STRING.sub(_blank, data), np.uint8)
    steps = _NESTING[bare]
    values = 1 + int(np.count_nonzero(steps == 1)) + int(np.count_nonzero(bare == ord(",")))
    LIMITS.check("json_values", values, where)
    places = np.flatnonzero(steps)
    depth = np.cumsum(steps[places], dtype=np.int64)
    deep = np.flatnonzero(depth > LIMITS.json_depth)
    if len(deep):
        LIMITS.check("json_depth", int(depth[deep[0]]), f"{where}, byte {int(places[deep[0]])}")


def _blank(match: re.Match[bytes]) -> bytes:
    return b" " * len(match[0])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(
                    InvalidError("manifest.duplicate-key", "a key occurs twice", found=repr(key))
                )
            seen.add(key)
    return result


def _constant(text: str) -> NoReturn:
    raise _Refused(InvalidError("manifest.json", "JSON has no such number", found=text))


def _float(text: str) -> NoReturn:
    raise _Refused(
        InvalidError(
            "manifest.json",
            "numbers must be unsigned integers",
            expected="digits only",
            found=text[:40],
        )
    )


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        _float(text)
    if len(text) > _DIGITS_OF_LARGEST or int(text) > LIMITS.integer:
        raise _Refused(
            InvalidError(
                "limit.exceeded",
                "an integer is above the limit of the format",
                expected=f"at most {LIMITS.integer}",
                found=text[:40],
            )
        )
    return int(text)


def _check_strings(value: object, where: str) -> None:
    """Keys, surrogates and lengths (JSN-5, JSN-6, JSN-9), with a JSON pointer in the error."""
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        pointer, item = stack.pop()
        if isinstance(item, Mapping):
            for key, member in item.items():
                if not KEY_PATTERN.fullmatch(key):
                    shown = ascii(key[:80])
                    raise _syntax(f"the key {shown} is not allowed", f"{where} {pointer}/")
                stack.append((f"{pointer}/{key}", member))
        elif isinstance(item, list):
            stack.extend((f"{pointer}/{index}", member) for index, member in enumerate(item))
        elif isinstance(item, str):
            try:
                size_bytes = len(item.encode("utf-8"))
            except UnicodeEncodeError:
                raise _syntax("a string has a lone surrogate", f"{where} {pointer}") from None
            LIMITS.check("string_bytes", size_bytes, f"{where} {pointer}")
