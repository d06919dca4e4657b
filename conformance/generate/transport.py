"""Levels core and faulty: files at the edge of the first request, and readers over HTTP.

The servers are those of ``kvconform.behaviours``. The reference is asked here only for the bytes;
what it makes of the servers is for a run of the suite.
"""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.generate import packages  # noqa: F401 - makes kvconform importable
from conformance.generate.compose import (
    EXACT,
    STORED,
    RawGroup,
    compose,
    noise,
    tiny,
    with_members,
)
from conformance.generate.suite import Case, Operation, Shared, Suite, decode, inspect, verify
from tests.builder import Builder

# isort: split
from kvconform.behaviours import BEHAVIOURS

PREFETCH_BYTES = 262_144
EDGES = (PREFETCH_BYTES - 1, PREFETCH_BYTES, PREFETCH_BYTES + 1)
STRING_BYTES = 4_000
LAYERS, TOKENS, DIMS, SEGMENT_TOKENS = 6, 3_072, 16, 1_024
LAYER_BYTES = TOKENS * DIMS * 2
LAST_LAYERS = ("--layers", "4:6")
TIMEOUT = ("--timeout", "1")
BY_HAND = "The artifact is composed by hand in `generate/`; the suite keeps it compressed."


def large() -> bytes:
    """589,824 bytes of data in 18 segments, layer by layer; layers 4 and 5 lie behind 262,144."""
    pattern = np.tile(noise("large", 64), LAYERS * LAYER_BYTES // 64)
    source = pattern.reshape(LAYERS, TOKENS, 1, DIMS, 2).copy()
    source[..., 0] ^= np.arange(LAYERS, dtype=np.uint8)[:, None, None, None]
    source[..., 1] ^= (np.arange(TOKENS) // SEGMENT_TOKENS).astype(np.uint8)[:, None, None]
    group = RawGroup("key", "key", "float16", tuple(range(LAYERS)), source, cut=(1, 1))
    return compose([group], TOKENS, (EXACT,), seg=SEGMENT_TOKENS, order="layer-major").build()


def filled(builder: Builder, text_bytes: int) -> bytes:
    """The artifact with that many bytes more in an extension that need not be understood."""
    strings = ["x" * STRING_BYTES] * (text_bytes // (STRING_BYTES + 3))
    strings.append("x" * (text_bytes - len(strings) * (STRING_BYTES + 3)))
    value = {"com.example.filler": {"must_understand": False, "value": strings}}
    return with_members(builder, {"/extensions": value})


def ending(data: bytes) -> dict[str, int]:
    """Where the parts of an artifact end."""
    manifest = 128 + int.from_bytes(data[56:64], "little")
    front = manifest + int.from_bytes(data[64:72], "little")
    return {"manifest": manifest, "front": front, "file": len(data)}


def reaching(part: str, size: int) -> Shared:
    """A tiny artifact whose manifest, front or whole file ends at ``size``."""
    data = filled(tiny(), size - ending(filled(tiny(), 0))[part])
    if ending(data)[part] != size:
        raise AssertionError(f"{part} ends at {ending(data)[part]}, wanted {size}")
    return Shared(f"{part}-{size}.kvf.gz", data)


def edges() -> dict[str, tuple[Shared, str]]:
    """Files at the edge of the first request, and what is special about each."""
    named = {
        "front": "the tables end and the data begins",
        "manifest": "the manifest ends and the tables begin",
        "file": "the file ends",
    }
    found = {
        f"{part}-of-{size}": (reaching(part, size), f"{what} at byte {size:,}")
        for part, what in named.items()
        for size in EDGES
    }
    far = reaching("manifest", 300_000)
    found["tables-behind"] = (far, "the tables lie wholly behind the first 262,144 bytes")
    return found


def served(
    behaviour: str,
    operation: Operation,
    *,
    accept: Sequence[str] = (),
    should: dict[str, int] | None = None,
) -> Operation:
    """An operation whose input is behind a URL."""
    operation.http = behaviour
    operation.accept = tuple(accept)
    operation.reference = operation.code == "ok"
    if operation.call != "verify" and operation.code == "ok" and behaviour == "plain":
        operation.requests["front_once"] = True  # one opening; verify may open twice
    if should:
        operation.requests["should"] = should
    return operation


GOOD = {
    "no-head": (
        "REQ-2",
        "Only GET is allowed, as with a signed URL: HEAD gets status 403.",
        "Stores sign a URL for one method.",
        (),
    ),
    "no-total": (
        "REQ-2 REQ-8",
        "Content-Range ends in `/*`: the server does not tell the size of the object.",
        "RFC 9110 allows it, and proxies that stream do it.",
        (),
    ),
    "no-etag": ("REQ-8", "Replies carry no entity tag.", "Many simple servers have none.", ()),
    "weak-etag-changes": (
        "REQ-8",
        "Each reply has another weak entity tag.",
        "Weak tags do not say that bytes are the same or differ.",
        (),
    ),
    "says-identity": (
        "REQ-6",
        "Replies say `Content-Encoding: identity`.",
        "It is the coding that was asked for.",
        (),
    ),
    "chunked": (
        "REQ-7",
        "Bodies are chunked, without Content-Length.",
        "The length is that of Content-Range.",
        (),
    ),
    "slow": (
        "REQ-10",
        "Each body comes in 8 pieces with pauses of 0.3 seconds, the time-out is 2 seconds.",
        "The time-out is for silence, not for a whole request.",
        ("--timeout", "2"),
    ),
}
"""Servers that every reader copes with: requirements, what, why, arguments."""

LENIENT = {
    "redirects": (
        "REQ-11",
        ("io.read",),
        "Three redirections with 302, 307 and 308 lead to the object, one of them without a host.",
        "To follow them is advised; a reader that does not answers `io.read`.",
    ),
    "flaky": (
        "REQ-9",
        ("io.read",),
        "The first request gets status 503, all others are answered.",
        "A reader may ask again; if it does not, the answer is `io.read`.",
    ),
    "flaky-later": (
        "REQ-9",
        ("io.read",),
        "The second request gets status 503, all others are answered.",
        "A reader may ask again; if it does not, the answer is `io.read`.",
    ),
    "flaky-reset": (
        "REQ-9",
        ("io.read", "io.short"),
        "The second reply is reset in the middle of its body, all others are whole.",
        "A reader may ask again. If it does not, a body that is too short is `io.short` and a lost connection `io.read`.",
    ),
}
"""Servers where the specification leaves a choice: requirements, codes that are right too."""

BAD = {
    "ignores-range": (
        "REQ-6",
        "io.range",
        "Every request gets status 200 and the whole object.",
        "Its bytes are not those asked for.",
    ),
    "ignores-range-later": (
        "REQ-6",
        "io.range",
        "The first reply is right, later ones have status 200 and the whole object.",
        "Caches and fallbacks change between requests.",
    ),
    "ignores-range-large": (
        "REQ-6 REQ-7",
        "io.range",
        "Every request gets status 200 and a body of 64 MiB.",
        "A reader that reads on to find out can be made to read anything.",
    ),
    "gzip": (
        "REQ-6",
        "io.range",
        "Replies of status 206 have Content-Encoding gzip.",
        "The range of a compressed body is no range of the object; libraries unpack it silently.",
    ),
    "gzip-later": (
        "REQ-6",
        "io.range",
        "The first reply is right, later ones have Content-Encoding gzip.",
        "Every reply is checked, not only the first.",
    ),
    "shifted": (
        "REQ-6",
        "io.range",
        "Content-Range and body begin one byte behind the one asked for.",
        "The reply is consistent with itself, and is of other bytes.",
    ),
    "shifted-later": (
        "REQ-6",
        "io.range",
        "The first reply is right, later ones begin one byte behind the one asked for.",
        "Every reply is checked, not only the first.",
    ),
    "no-content-range": (
        "REQ-6",
        "io.range",
        "Replies of status 206 have no Content-Range.",
        "Nothing says which bytes these are.",
    ),
    "no-content-range-later": (
        "REQ-6",
        "io.range",
        "The first reply is right, later ones have no Content-Range.",
        "Every reply is checked, not only the first.",
    ),
    "malformed-content-range": (
        "REQ-6",
        "io.range",
        "Content-Range has the form of a Range, `bytes=0-9`.",
        "What cannot be parsed says nothing.",
    ),
    "unsatisfiable": (
        "REQ-6",
        "io.range",
        "The first reply is right, later requests get status 416.",
        "The object has these bytes, as the first reply said.",
    ),
    "unsatisfiable-first": (
        "REQ-6",
        "io.range",
        "Every request gets status 416 with the size of an object that is not empty.",
        "Only an empty object has no first byte.",
    ),
    "short-range": (
        "REQ-7 REQ-4",
        "io.short",
        "The Content-Range and body of later replies end one byte too early.",
        "The reply is consistent with itself, and is too short.",
    ),
    "short-range-first": (
        "REQ-7 REQ-3",
        "io.short",
        "The first reply ends one byte too early, and its total says that there is more.",
        "A first reply may be short only where the object ends.",
    ),
    "short-body": (
        "REQ-7 REQ-4",
        "io.short",
        "Each body ends one byte before its Content-Length: the connection is closed.",
        "A dropped connection must not look like an end.",
    ),
    "short-body-later": (
        "REQ-7 REQ-4",
        "io.short",
        "The first reply is right, later bodies end one byte before their Content-Length.",
        "A dropped connection must not look like an end.",
    ),
    "short-chunked": (
        "REQ-7 REQ-4",
        "io.short",
        "Each body is chunked and ends in good order, one byte too early.",
        "No library notices: only Content-Range tells.",
    ),
    "short-chunked-later": (
        "REQ-7 REQ-4",
        "io.short",
        "The first reply is right, later bodies are chunked and one byte too short.",
        "No library notices: only Content-Range tells.",
    ),
    "long-body": (
        "REQ-7 REQ-4",
        "io.short",
        "Each body is chunked and has one byte more than Content-Range says.",
        "The byte too many is the only sign that the parts do not fit.",
    ),
    "long-body-later": (
        "REQ-7 REQ-4",
        "io.short",
        "The first reply is right, later bodies have one byte too many.",
        "The byte too many is the only sign that the parts do not fit.",
    ),
    "endless-body": (
        "REQ-7",
        "io.short",
        "Each body is chunked and has 64 MiB.",
        "A reader reads one byte more than it asked for, and no further.",
    ),
    "endless-body-later": (
        "REQ-7",
        "io.short",
        "The first reply is right, later bodies have 64 MiB.",
        "A reader reads one byte more than it asked for, and no further.",
    ),
    "changes-size": (
        "REQ-8",
        "io.changed",
        "Later replies state a size that is one byte larger; there are no entity tags.",
        "The object was replaced, the bytes belong to two artifacts.",
    ),
    "changes-etag": (
        "REQ-8",
        "io.changed",
        "Later replies are of another object of the same size, with its strong entity tag.",
        "To say that the segment is damaged would send people the wrong way.",
    ),
    "changes-bytes": (
        "REQ-8 PAR-2 CNV-5",
        "segment.digest",
        "Later replies are of another object, with the size and the entity tag of the first.",
        "Where the server hides it, the digests find it.",
    ),
    "missing": (
        "REQ-9",
        "io.not-found",
        "Status 404.",
        "The object may be written later: callers wait or encode.",
    ),
    "gone": ("REQ-9", "io.not-found", "Status 410.", "Like 404."),
    "denied": ("REQ-9", "io.denied", "Status 403.", "Another credential helps, waiting does not."),
    "denied-later": (
        "REQ-9",
        "io.denied",
        "The first reply is right, later requests get status 403.",
        "Signatures expire while an artifact is open.",
    ),
    "unauthorised": (
        "REQ-9",
        "io.denied",
        "Status 401.",
        "Like 403; HTTP libraries like to handle it themselves.",
    ),
    "proxy-asks": ("REQ-9", "io.denied", "Status 407.", "Like 403; some HTTP libraries hide it."),
    "teapot": (
        "REQ-9",
        "io.read",
        "Status 418.",
        "Neither success nor a status with a meaning here.",
    ),
    "fails": (
        "REQ-9",
        "io.read",
        "Status 500, however often one asks.",
        "To ask again is allowed, to ask for ever is not.",
    ),
    "redirect-loop": (
        "REQ-11 REQ-9",
        "io.read",
        "Two addresses that redirect to each other.",
        "Whoever follows must count.",
    ),
    "redirect-to-file": (
        "REQ-11 REQ-9",
        "io.read",
        "A redirection to a `file:` URL where the very bytes lie.",
        "A server must not make a reader open files of its own machine.",
    ),
    "redirect-to-ftp": (
        "REQ-11 REQ-9",
        "io.read",
        "A redirection to an `ftp:` URL.",
        "Only HTTP and HTTPS are followed.",
    ),
    "stalls": (
        "REQ-10",
        "io.timeout",
        "Each body stops in the middle and the connection stays open; the time-out is 1 second.",
        "A request without an end would hold a worker for ever.",
    ),
    "stalls-later": (
        "REQ-10",
        "io.timeout",
        "The first reply is right, later bodies stop in the middle; the time-out is 1 second.",
        "A request without an end would hold a worker for ever.",
    ),
    "silent": (
        "REQ-10",
        "io.timeout",
        "The server takes requests and does not answer; the time-out is 1 second.",
        "A request without an end would hold a worker for ever.",
    ),
}
"""Servers that no reader believes: requirements, code, what, why."""


def http_case(
    suite: Suite,
    slug: str,
    level: str,
    requirements: str,
    source: Shared | bytes,
    operations: list[Operation],
    what: str,
    why: str,
    how: str = "The file is valid; what differs is the server.",
) -> None:
    """A case that requires http."""
    ids = tuple(requirements.split())
    suite.add(Case("req", slug, level, ids, source, operations, what, why, how, ("http",)))


def add_servers(suite: Suite, source: Shared) -> None:
    """One case per behaviour, all with the large file."""
    for behaviour, (ids, what, why, arguments) in GOOD.items():
        operations = [decode(EXACT, *LAST_LAYERS, *arguments), verify("ok", *arguments)]
        wanted = [served(behaviour, item) for item in operations]
        http_case(suite, f"server-{behaviour}", "core", ids, source, wanted, what, why)
    for behaviour, (ids, accept, what, why) in LENIENT.items():
        operations = [decode(EXACT, *LAST_LAYERS), verify()]
        wanted = [served(behaviour, item, accept=accept) for item in operations]
        http_case(suite, f"server-{behaviour}", "core", ids, source, wanted, what, why)
    for behaviour, (ids, code, what, why) in BAD.items():
        arguments = TIMEOUT if code == "io.timeout" else ()
        first = Operation("inspect", arguments, code)
        if BEHAVIOURS[behaviour].start:
            first = decode(EXACT, *LAST_LAYERS, *arguments, code=code)
        wanted = [served(behaviour, item) for item in (first, verify(code, *arguments))]
        http_case(suite, f"server-{behaviour}", "faulty", ids, source, wanted, what, why)


def add_plain(suite: Suite, source: Shared) -> None:
    """What is asked for, and how often, where the server does everything right."""
    parts = int(1.05 * 2 * LAYER_BYTES)
    everything = int(1.05 * LAYERS * LAYER_BYTES)
    http_case(
        suite,
        "large",
        "core",
        "REQ-1 REQ-5 REQ-12 PAR-1",
        source,
        [
            served("plain", inspect(), should={"most": 1, "bytes_most": 0}),
            served("plain", decode(EXACT, *LAST_LAYERS), should={"most": 2, "bytes_most": parts}),
            served("plain", decode(EXACT), should={"most": 2, "bytes_most": everything}),
            served("plain", verify()),
        ],
        "An artifact of 593 kB, read in part and whole.",
        "The front comes with the first request, and what is wanted of the data with one more.",
        "The two layers lie side by side, behind the first 262,144 bytes.",
    )
    small = Shared("tiny.kvf", tiny().build())
    once = {"most": 1, "bytes_most": 0}
    http_case(
        suite,
        "small",
        "core",
        "REQ-1 REQ-3 REQ-5",
        small,
        [
            served("plain", inspect(), should=once),
            served("plain", decode(STORED), should=once),
            served("plain", verify()),
        ],
        "An artifact that is shorter than the first request.",
        "The reply is shorter than asked for and reaches the end: one request is enough.",
        "The server is a plain one.",
    )
    http_case(
        suite,
        "small-200",
        "faulty",
        "REQ-6",
        small,
        [served("ignores-range", item) for item in (inspect("io.range"), verify("io.range"))],
        "A small artifact from a server that answers every request with status 200.",
        "All its bytes are there, and still the reader must not depend on the size.",
    )
    http_case(
        suite,
        "absent",
        "faulty",
        "REQ-6 HDR-1",
        small,
        [served("empty-416", item) for item in (inspect("header.magic"), verify("header.magic"))],
        "An empty object: status 416 with `bytes */0`.",
        "It is there and it is no artifact, which is not the server's fault.",
    )


def add_lengths(suite: Suite) -> None:
    """Objects that are shorter or longer than the header says."""
    data = tiny().build()
    cut = Shared("tiny.kvf", data)
    places = (8, 127, 128, len(data) // 2, len(data) - 1)
    magic, size = inspect("header.magic"), verify("file.size")
    magic.cuts, size.cuts = ((0, 8),), places
    http_case(
        suite,
        "truncated",
        "faulty",
        "REQ-3 HDR-10 ORD-2",
        cut,
        [served("plain", magic), served("plain", size)],
        "The object is a truncated copy, and Content-Range tells its size.",
        "The reply is as short as the object, which is short of what the header says.",
        "The server is a plain one.",
    )
    unknown = verify("file.size")
    unknown.cuts = places
    http_case(
        suite,
        "truncated-no-total",
        "faulty",
        "REQ-3 HDR-10 ORD-2",
        cut,
        [served("no-total", unknown, accept=("io.short",))],
        "The object is a truncated copy, and Content-Range does not tell its size.",
        "Whether the file or the reply is short cannot be known: `file.size` and `io.short` are right.",
        "The server does not tell the size.",
    )
    long = reaching("file", PREFETCH_BYTES).data + b"\0"
    for behaviour in ("plain", "no-total"):
        http_case(
            suite,
            f"byte-behind-{behaviour}",
            "faulty",
            "HDR-10 REQ-12 VER-1",
            Shared("file-and-a-byte.kvf.gz", long),
            [served(behaviour, verify("file.size"))],
            "One byte follows an artifact that is as long as the first request.",
            "The first reply is exactly as long as asked for, so it does not show the end.",
            "A reader may ask for the byte behind `file_bytes`, and for no other.",
        )


def add_edges(suite: Suite) -> None:
    """The same files as local paths and over HTTP."""
    for slug, (source, what) in edges().items():
        front = ending(source.data)["front"]
        to_the_front = 1 if front <= PREFETCH_BYTES else 2
        ids = "REQ-1 HDR-10 EXT-3"
        suite.add(
            Case(
                "pre",
                slug,
                "core",
                tuple(ids.split()),
                source,
                [inspect(), verify(), decode(STORED)],
                f"An artifact in which {what}.",
                "A reader that takes the front in pieces of 262,144 bytes is easily wrong by one here.",
                BY_HAND,
            )
        )
        operations = [
            served("plain", inspect(), should={"most": to_the_front}),
            served("plain", decode(STORED), should={"most": to_the_front + 1}),
            served("plain", verify()),
            served("no-total", verify()),
        ]
        http_case(
            suite,
            slug,
            "core",
            f"{ids} REQ-3 REQ-12",
            source,
            operations,
            f"An artifact in which {what}, from a server.",
            "Where the first request ends, nothing may be fetched twice and nothing left out.",
            BY_HAND,
        )


def add_cases(suite: Suite) -> None:
    """All of this module."""
    source = Shared("large.kvf.gz", large())
    add_plain(suite, source)
    add_servers(suite, source)
    add_lengths(suite)
    add_edges(suite)
