"""What a reader asked of the server, held against section 11.1 of the specification.

``violation`` gives the first MUST that the log breaks, ``advice`` the SHOULDs. What a case adds is
the member ``requests`` of ``expect``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvconform.judge import Problem
from kvconform.server import Request

SLACK_BYTES: Final = 16 * 2**20
"""What buffers of both systems and of HTTP libraries may hold. The bodies that tempt a reader to
read on are four times as large, so this finds one that reads all of them, and not one that reads
a little too much: how much of what was sent was also read cannot be seen from here."""
MAGIC: Final = b"\x89KVF\r\n\x1a\n"
MOST_LINES: Final = 20
_RANGE: Final = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")

Broken = tuple[str, str]
"""What was expected, and what was found."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The log of one call, the object that was served, and what the case says about requests."""

    log: Sequence[Request]
    data: bytes
    wanted: dict[str, Any]

    def number(self, offset: int) -> int | None:
        """An integer of the header, None if there is no header to believe."""
        if len(self.data) < 128 or not self.data.startswith(MAGIC):
            return None
        return int.from_bytes(self.data[offset : offset + 8], "little")

    @property
    def file_bytes(self) -> int | None:
        """The size that the header states."""
        return self.number(48)

    @property
    def front_bytes(self) -> int | None:
        """Where the tables end."""
        manifest, tables = self.number(56), self.number(64)
        return None if manifest is None or tables is None else 128 + manifest + tables

    def later(self) -> Iterator[tuple[int, Request, int, int]]:
        """The requests behind the first that are not its repetition, with what they ask for.

        A reader that opens the artifact a second time, or repeats a request, asks the same again.
        """
        for index, item in enumerate(self.log[1:], 1):
            if item.ranges != self.log[0].ranges:
                yield index, item, *interval(item)


def interval(item: Request) -> tuple[int, int]:
    """First and last byte asked for; only for requests of the right form."""
    match = _RANGE.fullmatch(item.ranges[0])
    assert match is not None
    return int(match[1]), int(match[2])


def violation(traffic: Traffic) -> Broken | None:
    """The first rule that the requests break, None if they keep all."""
    return next((broken for rule in RULES if (broken := rule(traffic))), None)


def with_requests(problem: Problem | None, traffic: Traffic) -> Problem | None:
    """The problem of an answer with the log, or else what is wrong with the requests."""
    broken = violation(traffic) if problem is None else None
    if broken is not None:
        problem = Problem("failed", *broken)
    return None if problem is None else replace(problem, requests=tuple(lines(traffic.log)))


def advice(traffic: Traffic) -> list[str]:
    """What the specification advises and the reader did not do."""
    wanted = traffic.wanted.get("should", {})
    return [
        f"{found:,} {what}, the specification advises {most:,}"
        for found, most, what in _limits(traffic, wanted)
    ]


def lines(log: Sequence[Request]) -> list[str]:
    """The log for reports."""
    shown = [f"{index}: {item}" for index, item in enumerate(log[:MOST_LINES])]
    more = len(log) - len(shown)
    return [*shown, f"and {more:,} more"] if more else shown


def _asked(traffic: Traffic) -> Broken | None:
    return None if traffic.log else ("at least one request", "none")


def _methods(traffic: Traffic) -> Broken | None:
    """REQ-2 and REQ-5."""
    for index, item in enumerate(traffic.log):
        if item.method != "GET":
            return "requests with GET only (REQ-5)", f"request {index}: {item.method}"
    return None


def _ranges(traffic: Traffic) -> Broken | None:
    """REQ-5: one Range with first and last byte."""
    for index, item in enumerate(traffic.log):
        match = _RANGE.fullmatch(item.ranges[0]) if len(item.ranges) == 1 else None
        if match is None or int(match[1]) > int(match[2]):
            found = " and ".join(item.ranges) or "no Range"
            return "one Range: bytes=first-last per request (REQ-5)", f"request {index}: {found}"
    return None


def accepts_only_identity(fields: Sequence[str]) -> bool:
    """Whether Accept-Encoding admits nothing but ``identity``; no field admits everything."""
    if not fields:
        return False
    for item in ",".join(fields).lower().split(","):
        name, _, weight = (part.strip() for part in item.partition(";"))
        refused = re.fullmatch(r"q=0(?:\.0{0,3})?", weight) is not None
        if name and name != "identity" and not refused:
            return False
    return True


def _encodings(traffic: Traffic) -> Broken | None:
    """REQ-5: no content coding but identity."""
    for index, item in enumerate(traffic.log):
        if not accepts_only_identity(item.encodings):
            found = ", ".join(item.encodings) or "none, which accepts every coding"
            return "Accept-Encoding: identity (REQ-5)", f"request {index}: {found}"
    return None


def _inside(traffic: Traffic) -> Broken | None:
    """REQ-12: nothing behind ``file_bytes`` once a reply has brought the header, but one byte."""
    size, first = traffic.file_bytes, traffic.log[0]
    if size is None or first.status != 206 or first.written < 128 or first.first != 0:
        return None
    for index, _, start, last in traffic.later():
        if last > size:
            expected = f"no byte behind file_bytes {size} but one (REQ-12)"
            return expected, f"request {index}: bytes {start} to {last}"
    return None


def _not_read_on(traffic: Traffic) -> Broken | None:
    """REQ-7: at most one byte more than asked for, as far as the server can tell."""
    for index, item in enumerate(traffic.log):
        first, last = interval(item)
        most = last - first + 2 + SLACK_BYTES
        if item.written > most:
            expected = f"an end of reading after {last - first + 2:,} bytes (REQ-7)"
            return expected, f"request {index}: {item.written:,} bytes were sent"
    return None


def _front_once(traffic: Traffic) -> Broken | None:
    """REQ-1: what the first reply brought of the front is not fetched again."""
    end, first = traffic.front_bytes, traffic.log[0]
    if not traffic.wanted.get("front_once") or end is None or first.last is None:
        return None
    held = min(end, first.last + 1)
    repeated = [item for item in traffic.log[1:] if item.ranges == first.ranges]
    if repeated and all(item.status == 206 for item in traffic.log):
        return "the front fetched once (REQ-1)", f"{first.ranges[0]} twice"
    for index, _, start, last in traffic.later():
        if start < held:
            expected = f"the first {held} bytes fetched once (REQ-1)"
            return expected, f"request {index}: bytes {start} to {last}"
    return None


def _limits(traffic: Traffic, wanted: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Limits of ``wanted`` that are passed: what was found, the limit, and of what."""
    answered = [item for item in traffic.log if not 300 <= item.status < 400]
    size = len(traffic.data)
    asked = (min(last + 1, size) - first for first, last in map(interval, answered[1:]))
    found = {"most": len(answered), "bytes_most": sum(max(0, count) for count in asked)}
    units = {"most": "requests", "bytes_most": "bytes behind the first request"}
    for name, count in found.items():
        if count > wanted.get(name, count):
            yield count, wanted[name], units[name]


def _limited(traffic: Traffic) -> Broken | None:
    for found, most, what in _limits(traffic, traffic.wanted):
        return f"at most {most:,} {what}", f"{found:,}"
    return None


RULES: Final[tuple[Callable[[Traffic], Broken | None], ...]] = (
    _asked,
    _methods,
    _ranges,
    _encodings,
    _inside,
    _not_read_on,
    _front_once,
    _limited,
)
