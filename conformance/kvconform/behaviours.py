"""What a server makes of a range request: one function per behaviour, from a request to a reply.

A behaviour is pure: it gets what was asked and the bytes of the case, and says status, headers and
pieces of the body. ``BEHAVIOURS`` names them; a case refers to these names.
"""

from __future__ import annotations

import gzip as gzip_format
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

LARGE_BYTES: Final = 64 * 2**20
"""The length of a body whose reading to the end cannot be hidden by socket buffers."""
PIECE_BYTES: Final = 65_536
PAUSE_S: Final = 0.3
SLOW_PIECES: Final = 8
HOPS: Final = (302, 307, 308)
RANGE: Final = re.compile(r"bytes=(\d{1,19})-(\d{1,19})?")
_OTHER: Final = bytes(byte ^ 1 for byte in range(256))

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: the object's bytes, the header field Range, and where it came from.

    ``number`` counts the requests of this URL from 0, ``hop`` the redirections on the way here.
    ``here`` is the URL without hops and ``local`` the path of the same bytes on this machine.
    """

    data: bytes
    range: str = ""
    number: int = 0
    hop: int = 0
    method: str = "GET"
    here: str = ""
    local: str = ""

    @property
    def interval(self) -> tuple[int, int] | None:
        """First and last byte asked for; the end of the object for a range without one."""
        match = RANGE.fullmatch(self.range)
        if match is None:
            return None
        first = int(match[1])
        last = len(self.data) - 1 if match[2] is None else int(match[2])
        return (first, last) if first <= last or match[2] is None else None

    @property
    def etag(self) -> str:
        """A strong entity tag of the bytes."""
        return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, header fields and body.

    ``length`` is the Content-Length, None means chunked. ``ending`` says what happens behind the
    body: the connection is kept, closed, reset, or open and silent until the call has ended.
    ``first`` and ``last`` are the bytes of the object that the body stands for.
    """

    status: int
    headers: Headers = ()
    body: Iterable[bytes] = ()
    length: int | None = 0
    first: int = 0
    last: int = -1
    ending: str = "keep"
    pause_s: float = 0.0

    def without(self, *names: str) -> Reply:
        """The reply without these header fields."""
        return replace(self, headers=tuple(item for item in self.headers if item[0] not in names))

    def having(self, name: str, value: str) -> Reply:
        """The reply with this header field, in place of one of that name."""
        return replace(self, headers=(*self.without(name).headers, (name, value)))


def pieces(data: bytes) -> Iterator[bytes]:
    """``data`` cut for sending."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def endless(data: bytes) -> Iterator[bytes]:
    """``data`` with zeros behind, ``LARGE_BYTES`` in all."""
    yield from pieces(data)
    left = LARGE_BYTES - len(data)
    while left > 0:
        yield bytes(min(left, PIECE_BYTES))
        left -= PIECE_BYTES


def content_range(first: int, last: int, total: object) -> str:
    """The value of Content-Range."""
    return f"bytes {first}-{last}/{total}"


def whole(asked: Asked) -> Reply:
    """Status 200 and everything."""
    size = len(asked.data)
    return Reply(200, (("ETag", asked.etag),), pieces(asked.data), size, 0, size - 1)


def part(asked: Asked, first: int, last: int) -> Reply:
    """Status 206 with the bytes ``first`` to ``last``."""
    body = asked.data[first : last + 1]
    headers = (
        ("Content-Range", content_range(first, last, len(asked.data))),
        ("ETag", asked.etag),
    )
    return Reply(206, headers, pieces(body), len(body), first, last)


def outside(asked: Asked) -> Reply:
    """Status 416 and the size."""
    return Reply(416, (("Content-Range", f"bytes */{len(asked.data)}"),))


def bare(status: int) -> Callable[[Asked], Reply]:
    """A status and nothing else."""

    def reply(asked: Asked) -> Reply:
        del asked
        return Reply(status)

    return reply


def plain(asked: Asked) -> Reply:
    """What RFC 9110 says: 206 with what there is, 416 behind the end, 200 without a range."""
    interval = asked.interval
    if interval is None:
        return whole(asked)
    first, last = interval
    if first >= len(asked.data):
        return outside(asked)
    return part(asked, first, min(last, len(asked.data) - 1))


def on_part(change: Callable[[Asked, Reply], Reply]) -> Callable[[Asked], Reply]:
    """A behaviour that changes replies of status 206 and leaves others as they are."""

    def reply(asked: Asked) -> Reply:
        good = plain(asked)
        return change(asked, good) if good.status == 206 else good

    return reply


def sent(asked: Asked, good: Reply) -> bytes:
    """The bytes of the object that a good reply sends."""
    return asked.data[good.first : good.last + 1]


def no_head(asked: Asked) -> Reply:
    """A URL that is signed for GET alone."""
    return plain(asked) if asked.method == "GET" else Reply(403)


def no_total(asked: Asked, good: Reply) -> Reply:
    """The server does not say how long the object is."""
    del asked
    return good.having("Content-Range", content_range(good.first, good.last, "*"))


def no_etag(asked: Asked, good: Reply) -> Reply:
    """A server without entity tags."""
    del asked
    return good.without("ETag")


def weak_etag(asked: Asked, good: Reply) -> Reply:
    """A weak tag that differs each time says nothing about bytes."""
    return good.having("ETag", f'W/"{asked.number}"')


def says_identity(asked: Asked, good: Reply) -> Reply:
    """The one Content-Encoding that is allowed."""
    del asked
    return good.having("Content-Encoding", "identity")


def chunked(asked: Asked, good: Reply) -> Reply:
    """The right bytes without a Content-Length."""
    del asked
    return replace(good, length=None)


def slow(asked: Asked, good: Reply) -> Reply:
    """Small pieces with pauses: slower than the time-out as a whole, never silent for so long."""
    body = sent(asked, good)
    step = max(1, -(-len(body) // SLOW_PIECES))
    parts = [body[start : start + step] for start in range(0, len(body), step)]
    return replace(good, body=parts, pause_s=PAUSE_S)


def ignores_range(asked: Asked) -> Reply:
    """The server knows no ranges."""
    return whole(asked)


def ignores_range_large(asked: Asked) -> Reply:
    """The server knows no ranges and the object is large."""
    return Reply(200, (), endless(asked.data), LARGE_BYTES, 0, LARGE_BYTES - 1)


def gzip(asked: Asked, good: Reply) -> Reply:
    """The right range, compressed on the way."""
    body = gzip_format.compress(sent(asked, good), mtime=0)
    return replace(good, body=pieces(body), length=len(body)).having("Content-Encoding", "gzip")


def shifted(asked: Asked, good: Reply) -> Reply:
    """Range and bytes begin one byte behind the one asked for."""
    first, last = good.first + 1, min(good.last + 1, len(asked.data) - 1)
    return part(asked, first, last) if first <= last else good


def no_content_range(asked: Asked, good: Reply) -> Reply:
    """206 that does not say which part it is."""
    del asked
    return good.without("Content-Range")


def malformed_content_range(asked: Asked, good: Reply) -> Reply:
    """A Content-Range in the form of the request's Range."""
    del asked
    return good.having("Content-Range", f"bytes={good.first}-{good.last}")


def short_range(asked: Asked, good: Reply) -> Reply:
    """Content-Range and body agree with each other and end too early."""
    return part(asked, good.first, good.last - 1) if good.first < good.last else good


def short_body(asked: Asked, good: Reply) -> Reply:
    """The connection is closed before the promised bytes are there."""
    return replace(good, body=pieces(sent(asked, good)[:-1]), ending="close")


def short_chunked(asked: Asked, good: Reply) -> Reply:
    """A chunked body that ends in good order, one byte too early."""
    return replace(good, body=pieces(sent(asked, good)[:-1]), length=None)


def long_body(asked: Asked, good: Reply) -> Reply:
    """A chunked body with one byte more than Content-Range says."""
    return replace(good, body=pieces(sent(asked, good) + b"\0"), length=None)


def endless_body(asked: Asked, good: Reply) -> Reply:
    """A chunked body that goes on behind the range."""
    return replace(good, body=endless(sent(asked, good)), length=None)


def empty(asked: Asked) -> Reply:
    """An object of no bytes."""
    return plain(replace(asked, data=b""))


def changes_size(asked: Asked, good: Reply) -> Reply:
    """The object is one byte longer now; there are no tags to tell."""
    total = len(asked.data) + 1
    return good.without("ETag").having("Content-Range", content_range(good.first, good.last, total))


def changes_etag(asked: Asked, good: Reply) -> Reply:
    """Another object of the same size, as its strong tag says."""
    other = replace(asked, data=asked.data.translate(_OTHER))
    return replace(good, body=pieces(sent(other, good))).having("ETag", other.etag)


def changes_bytes(asked: Asked, good: Reply) -> Reply:
    """Another object of the same size, without any sign of it."""
    other = replace(asked, data=asked.data.translate(_OTHER))
    return replace(good, body=pieces(sent(other, good)))


def redirects(asked: Asked) -> Reply:
    """Three redirections, one of them to a path without a host, then the object."""
    if asked.hop == len(HOPS):
        return plain(asked)
    here = asked.here if asked.hop != 1 else "/" + asked.here.split("/", 3)[-1]
    return Reply(HOPS[asked.hop], (("Location", f"{here}?hop={asked.hop + 1}"),))


def redirect_loop(asked: Asked) -> Reply:
    """Two addresses that name each other."""
    return Reply(302, (("Location", f"{asked.here}?hop={(asked.hop + 1) % 2}"),))


def redirect_to_file(asked: Asked) -> Reply:
    """A redirection to the very bytes, on the reader's own disk."""
    return Reply(302, (("Location", f"file://{asked.local}"),))


def redirect_to_ftp(asked: Asked) -> Reply:
    """A redirection to another protocol; nothing listens there."""
    del asked
    return Reply(302, (("Location", "ftp://127.0.0.1:1/input.kvf"),))


def flaky_reset(asked: Asked, good: Reply) -> Reply:
    """The connection is reset in the middle of a body."""
    body = sent(asked, good)
    return replace(good, body=pieces(body[: len(body) // 2]), ending="reset")


def stalls(asked: Asked, good: Reply) -> Reply:
    """The server stops in the middle of a body and keeps the connection."""
    body = sent(asked, good)
    return replace(good, body=pieces(body[: len(body) // 2]), ending="silence")


def silent(asked: Asked) -> Reply:
    """The server takes the request and says nothing."""
    del asked
    return Reply(0, ending="silence")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """``reply`` answers requests ``start`` to ``stop``, counted from 0; all others are plain."""

    reply: Callable[[Asked], Reply]
    start: int = 0
    stop: int | None = None

    def answer(self, asked: Asked) -> Reply:
        """The reply to one request."""
        mine = asked.number >= self.start and (self.stop is None or asked.number < self.stop)
        return self.reply(asked) if mine else plain(asked)


BEHAVIOURS: Final = {
    "plain": Behaviour(plain),
    "no-head": Behaviour(no_head),
    "no-total": Behaviour(on_part(no_total)),
    "no-etag": Behaviour(on_part(no_etag)),
    "weak-etag-changes": Behaviour(on_part(weak_etag)),
    "says-identity": Behaviour(on_part(says_identity)),
    "chunked": Behaviour(on_part(chunked)),
    "slow": Behaviour(on_part(slow)),
    "ignores-range": Behaviour(ignores_range),
    "ignores-range-later": Behaviour(ignores_range, 1),
    "ignores-range-large": Behaviour(ignores_range_large),
    "gzip": Behaviour(on_part(gzip)),
    "gzip-later": Behaviour(on_part(gzip), 1),
    "shifted": Behaviour(on_part(shifted)),
    "shifted-later": Behaviour(on_part(shifted), 1),
    "no-content-range": Behaviour(on_part(no_content_range)),
    "no-content-range-later": Behaviour(on_part(no_content_range), 1),
    "malformed-content-range": Behaviour(on_part(malformed_content_range)),
    "short-range": Behaviour(on_part(short_range), 1),
    "short-range-first": Behaviour(on_part(short_range)),
    "short-body": Behaviour(on_part(short_body)),
    "short-body-later": Behaviour(on_part(short_body), 1),
    "short-chunked": Behaviour(on_part(short_chunked)),
    "short-chunked-later": Behaviour(on_part(short_chunked), 1),
    "long-body": Behaviour(on_part(long_body)),
    "long-body-later": Behaviour(on_part(long_body), 1),
    "endless-body": Behaviour(on_part(endless_body)),
    "endless-body-later": Behaviour(on_part(endless_body), 1),
    "unsatisfiable": Behaviour(outside, 1),
    "unsatisfiable-first": Behaviour(outside),
    "empty-416": Behaviour(empty),
    "changes-size": Behaviour(on_part(changes_size), 1),
    "changes-etag": Behaviour(on_part(changes_etag), 1),
    "changes-bytes": Behaviour(on_part(changes_bytes), 1),
    "missing": Behaviour(bare(404)),
    "gone": Behaviour(bare(410)),
    "denied": Behaviour(bare(403)),
    "unauthorised": Behaviour(bare(401)),
    "proxy-asks": Behaviour(bare(407)),
    "denied-later": Behaviour(bare(403), 1),
    "teapot": Behaviour(bare(418)),
    "fails": Behaviour(bare(500)),
    "redirects": Behaviour(redirects),
    "redirect-loop": Behaviour(redirect_loop),
    "redirect-to-file": Behaviour(redirect_to_file),
    "redirect-to-ftp": Behaviour(redirect_to_ftp),
    "flaky": Behaviour(bare(503), 0, 1),
    "flaky-later": Behaviour(bare(503), 1, 2),
    "flaky-reset": Behaviour(on_part(flaky_reset), 1, 2),
    "stalls": Behaviour(on_part(stalls)),
    "stalls-later": Behaviour(on_part(stalls), 1),
    "silent": Behaviour(silent),
}
"""All behaviours by the name that cases use."""
