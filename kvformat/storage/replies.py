"""What a reply to a range request must say (spec section 11.1). Pure: numbers and strings in."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvformat.errors import StorageError

RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII | re.IGNORECASE)
EMPTY: Final = re.compile(r"bytes \*/(\d{1,19})", re.ASCII | re.IGNORECASE)
TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_FOUND: Final = frozenset({404, 410})
DENIED: Final = frozenset({401, 403, 407})
NEW_SERVER: Final = "Serve the file with byte ranges, or copy it to this machine first"


class TransientError(Exception):
    """A failure that may pass: ``final`` is raised when repeats are used up."""

    def __init__(self, final: StorageError, *, after_s: float | None = None) -> None:
        super().__init__(str(final))
        self.final = final
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes asked for: ``first`` to ``stop``; ``front`` allows the object to end earlier."""

    first: int
    stop: int
    front: bool = False

    @property
    def size_bytes(self) -> int:
        """How many."""
        return self.stop - self.first


class Same:
    """What the replies so far said of the object: its size and strong tag (REQ-8)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total_bytes: int | None = None
        self.tag: str | None = None

    def check(self, total_bytes: int | None, tag: str | None, where: str) -> None:
        """Raise ``io.changed`` if this differs from what was said before; None says nothing."""
        with self._lock:
            pairs = ((self.total_bytes, total_bytes), (self.tag, tag))
            self.total_bytes = total_bytes if self.total_bytes is None else self.total_bytes
            self.tag = tag if self.tag is None else self.tag
        for before, now in pairs:
            if before is not None and now is not None and before != now:
                raise StorageError(
                    "io.changed",
                    "the object was replaced while it was read",
                    where=where,
                    expected=before,
                    found=now,
                    next_step="Open it again",
                )


def check_status(status: int, where: str, reason: str, after_s: float | None = None) -> None:
    """Raise unless the status is 200, 206 or 416 (REQ-9)."""
    if status in (200, 206, 416):
        return
    said = f"status {status} {reason}".strip()
    if status in NOT_FOUND:
        raise StorageError(
            "io.not-found", "there is no such object", where=where, found=said,
            next_step="Check the URL",
        )  # fmt: skip
    if status in DENIED:
        raise StorageError(
            "io.denied", "the server refuses access", where=where, found=said,
            next_step="Check the credentials; a signed URL may have expired",
        )  # fmt: skip
    error = StorageError("io.read", "the server cannot give the bytes", where=where, found=said)
    if status in TRANSIENT:
        raise TransientError(error, after_s=after_s)
    raise error


def check_reply(
    status: int, headers: Mapping[str, str], asked: Range, where: str, same: Same
) -> int:
    """How many bytes the body of a reply of status 200, 206 or 416 has; or REQ-6 to REQ-8 raise.

    ``headers`` has lower-case names. No bytes means an empty object: the body of that reply is
    none of the object's.
    """
    wanted = f"bytes {asked.first}-{asked.stop - 1}"
    said = headers.get("content-range", "")
    if status == 416:
        empty = EMPTY.fullmatch(said.strip())
        if empty:
            same.check(int(empty[1]), None, where)
        if asked.front and empty and int(empty[1]) == 0:
            return 0
        raise _bad("the server says that the object ends before these bytes", wanted, said, where)
    coding = headers.get("content-encoding", "")
    if {item.strip().lower() for item in coding.split(",")} - {"identity", ""}:
        raise _bad("the server encodes the bytes", "identity", coding[:60], where)
    if status == 200:
        raise _bad("the server ignores byte ranges", "status 206", "status 200", where)
    match = RANGE.fullmatch(said.strip())
    if match is None:
        raise _bad("the reply does not say which bytes it holds", wanted, said or "none", where)
    first, stop = int(match[1]), int(match[2]) + 1
    total = None if match[3] == "*" else int(match[3])
    same.check(total, strong_tag(headers.get("etag")), where)
    if first != asked.first or stop <= first or (total is not None and stop > total):
        raise _bad("the server sends another range than asked", wanted, said, where)
    ends = asked.stop if total is None else min(asked.stop, total)
    early = asked.front and stop < asked.stop and total in (None, stop)
    if stop != ends and not early:
        raise _short(asked.size_bytes, stop - first, where)
    if stop != asked.stop and not asked.front:
        raise _short(asked.size_bytes, stop - first, where)
    length = headers.get("content-length")
    if length is not None and length.strip() != str(stop - first):
        raise _short(stop - first, length, where)
    return stop - first


def strong_tag(tag: str | None) -> str | None:
    """The entity tag unless it is weak."""
    text = (tag or "").strip()
    return None if not text or text.startswith("W/") else text


def fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Header fields by lower-case name; one that came twice is a list, as RFC 9110 has it."""
    found: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found


def _bad(message: str, expected: str, found: str, where: str) -> StorageError:
    return StorageError(
        "io.range", message, where=where, expected=expected, found=found or "none",
        next_step=NEW_SERVER,
    )  # fmt: skip


def _short(expected: object, found: object, where: str) -> StorageError:
    return StorageError(
        "io.short",
        "the storage returned another number of bytes than asked",
        where=where,
        expected=expected,
        found=found,
        next_step="The file may be truncated or was replaced: fetch it again",
    )


def body_error(where: str, expected: int, *, longer: bool) -> StorageError:
    """The error of a body that is not as long as its Content-Range says (REQ-7)."""
    found = f"more than {expected}" if longer else f"fewer than {expected}"
    return _short(expected, found, where)


def retry_after_s(value: str | None) -> float | None:
    """Seconds in a Retry-After header; a date counts as none."""
    if value is None or not re.fullmatch(r"[0-9]{1,6}", value.strip()):
        return None
    return float(value)
