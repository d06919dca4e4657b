"""What a reply to a range request must say (spec section 11.1). Pure: numbers and strings in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvformat.errors import StorageError

RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
EMPTY: Final = re.compile(r"bytes \*/(\d{1,19})")
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a good reply said: how many bytes follow, the object's size and strong tag if given."""

    size_bytes: int
    total_bytes: int | None
    tag: str | None


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


def check_reply(status: int, headers: Mapping[str, str], asked: Range, where: str) -> Answer:
    """The answer in a reply of status 200, 206 or 416, or the error of REQ-6 or REQ-7.

    ``headers`` has lower-case names.
    """
    wanted = f"bytes {asked.first}-{asked.stop - 1}"
    said = headers.get("content-range", "")
    if status == 416:
        empty = EMPTY.fullmatch(said.strip())
        if asked.front and empty and int(empty[1]) == 0:
            return Answer(0, 0, None)
        raise _bad("the server says that the object ends before these bytes", wanted, said, where)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise _bad("the server encodes the bytes", "identity", coding, where)
    if status == 200:
        raise _bad("the server ignores byte ranges", "status 206", "status 200", where)
    match = RANGE.fullmatch(said.strip())
    if match is None:
        raise _bad("the reply does not say which bytes it holds", wanted, said or "none", where)
    first, stop = int(match[1]), int(match[2]) + 1
    total = None if match[3] == "*" else int(match[3])
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
    return Answer(stop - first, total, strong_tag(headers.get("etag")))


def strong_tag(tag: str | None) -> str | None:
    """The entity tag unless it is weak."""
    if tag is None or tag.strip().startswith("W/"):
        return None
    return tag.strip()


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
    if value is None or not re.fullmatch(r"\d{1,6}", value.strip()):
        return None
    return float(value)
