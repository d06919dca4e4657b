"""Levels core and faulty: one case per behaviour of a server (``kvconform.behaviours``).

The reference is asked here only for the bytes; what it makes of the servers is for a run of the
suite.
"""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

from collections.abc import Sequence

from conformance.generate import packages  # noqa: F401 - makes kvconform importable
from conformance.generate.compose import EXACT
from conformance.generate.suite import Case, Operation, Shared, Suite, decode, verify

# isort: split
from kvconform.behaviours import BEHAVIOURS

LAST_LAYERS = ("--layers", "4:6")
TIMEOUT = ("--timeout", "1")


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
