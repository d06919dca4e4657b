"""What HTTP says about ranges, entity tags and hosts (RFC 9110), as functions of header values.

No network and no file: ``kvformat.server`` answers with what these functions say.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

_UNIT: Final = re.compile(r"[ \t]*bytes[ \t]*=(.*)", re.IGNORECASE | re.DOTALL)
_SPAN: Final = re.compile(r"([0-9]*)-([0-9]*)")
_ETAG: Final = re.compile(r'(W/)?"([^"]*)"')
_DIGITS: Final = 18
"""Enough for any file; a longer number is behind every end, and is not computed."""


class RangeRefusedError(Exception):
    """The answer is status 416."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file, never empty; both in bytes."""

    offset_bytes: int
    length_bytes: int


def requested_span(value: str | None, size_bytes: int) -> Span | None:
    """The part of a file of ``size_bytes`` that a ``Range`` header asks for; None means all.

    Section 14.2 leaves a server three choices, which are made so: another unit than bytes and
    more than one satisfiable range are answered with the whole file; a header that breaks the
    grammar raises ``RangeRefusedError`` like one that is behind the end, because a client that
    misspells a range rarely wants gigabytes.
    """
    found = _UNIT.fullmatch(value) if value is not None else None
    if found is None:
        return None
    parts = [item.strip(" \t") for item in found[1].split(",")]
    spans = [_span(item, size_bytes) for item in parts if item]
    satisfiable = [item for item in spans if item is not None]
    if not satisfiable:
        raise RangeRefusedError
    return satisfiable[0] if len(spans) == 1 else None


def _span(text: str, size_bytes: int) -> Span | None:
    """One range, None if it holds no byte of the file."""
    found = _SPAN.fullmatch(text)
    if found is None or text == "-":
        raise RangeRefusedError
    first, last = (_number(item) if item else None for item in found.groups())
    if first is None:
        length_bytes = min(last or 0, size_bytes)
        return Span(size_bytes - length_bytes, length_bytes) if length_bytes else None
    if last is not None and last < first:
        raise RangeRefusedError
    stop = size_bytes if last is None else min(last + 1, size_bytes)
    return Span(first, stop - first) if first < size_bytes else None


def _number(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


def failed_condition(if_match: str | None, if_none_match: str | None, etag: str) -> int | None:
    """412 or 304 if a condition says so (section 13.2.2); ``etag`` is strong, in its quotes."""
    if if_match is not None and if_match.strip() != "*" and etag not in _tags(if_match, weak=False):
        return 412
    if if_none_match is None:
        return None
    return 304 if if_none_match.strip() == "*" or etag in _tags(if_none_match, weak=True) else None


def range_applies(if_range: str | None, etag: str) -> bool:
    """Whether ``If-Range`` lets the range through: only for this very tag, never for a date."""
    return if_range is None or if_range.strip() == etag


def _tags(value: str, *, weak: bool) -> list[str]:
    """The tags of a list; those that are weak only where the comparison may be weak."""
    return [f'"{tag}"' for mark, tag in _ETAG.findall(value) if weak or not mark]


def is_local(host: str | None) -> bool:
    """Whether a ``Host`` header names this machine's loopback; a missing one is no browser's.

    A page of a stranger can point its own name at 127.0.0.1 and then read what answers there.
    The name in the header gives it away.
    """
    if host is None:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def is_loopback(address: str) -> bool:
    """Whether a numeric address is one that only this machine reaches."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
