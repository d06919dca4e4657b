"""A reader over HTTP with bare sockets of the standard library, and the same with one fault.

An entry of the conformance suite: ``python tests/http_readers.py FAULT CALL ...``. It fetches the
whole artifact by exact ranges, as section 11.1 of the specification says, into a file, and lets
the adapter of the reference read that. The fault ``none`` is a reader that does everything right,
though it takes more than it needs; the others are named in ``FAULTS``.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance.adapters import reference
from kvformat.errors import InvalidError, KvformatError, StorageError

PREFETCH_BYTES = 262_144
CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)")
FAULTS = (
    "none",
    "asks-head",
    "accepts-200",
    "ignores-content-range",
    "reads-everything",
    "accepts-gzip",
    "unpacks-gzip",
    "open-ranges",
    "asks-beyond",
    "takes-the-front-twice",
    "takes-short-replies",
    "trusts-every-object",
    "opens-files",
    "no-status",
    "no-redirects",
    "trusts-the-length",
)
TOLERANT = ("takes-short-replies", "asks-beyond", "open-ranges")
CODES = {404: "io.not-found", 410: "io.not-found", **dict.fromkeys((401, 403, 407), "io.denied")}


def failure(code: str, why: str) -> StorageError:
    """The error of a reply that is refused."""
    return StorageError(code, why, where="url")


@dataclass
class Reader:
    """One artifact behind a URL."""

    url: str
    timeout_s: float
    fault: str
    totals: set[int] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)

    def whole(self) -> bytes:
        """All bytes, or as many as it takes to see that the object has another length."""
        if self.fault == "asks-head":
            self.answer("HEAD", 0, 0)
        data = self.get(0, PREFETCH_BYTES - 1)
        size = int.from_bytes(data[48:56], "little")
        if data[:8] != b"\x89KVF\r\n\x1a\n" or len(data) < PREFETCH_BYTES:
            return data
        start = 0 if self.fault == "takes-the-front-twice" else len(data)
        stop = start + 2**20 if self.fault == "asks-beyond" else size
        if stop > start and size > len(data):
            data = data[:start] + self.get(start, stop - 1)
        total = next(iter(self.totals), None)
        more = self.byte_at(size) if total is None else total > size
        return data + b"\0" if more and len(data) <= size else data

    def byte_at(self, offset: int) -> bool:
        """Whether there is a byte: one request for it, as REQ-12 allows."""
        reply, _ = self.answer("GET", offset, offset)
        return reply.status != 416

    def answer(self, method: str, first: int, last: int) -> tuple[http.client.HTTPResponse, bytes]:
        """The reply to one request behind up to ten redirections, and its body as far as read."""
        url = self.url
        for _ in range(11):
            address = urlsplit(url)
            if address.scheme != "http":
                if self.fault == "opens-files" and address.scheme == "file":
                    with urllib.request.urlopen(url) as file:
                        raise _Found(file.read())
                raise failure("io.read", f"a redirection to {address.scheme}")
            reply, body = self.request(method, address, first, last)
            target = reply.headers.get("Location")
            if reply.status not in (301, 302, 303, 307, 308) or target is None:
                return reply, body
            if self.fault == "no-redirects":
                raise failure("io.read", "a redirection")
            url = urljoin(url, target)
        raise failure("io.read", "too many redirections")

    def request(
        self, method: str, address: SplitResult, first: int, last: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """One exchange on a connection of its own."""
        target = address.path + (f"?{address.query}" if address.query else "")
        end = "" if self.fault == "open-ranges" else last
        coding = "gzip" if self.fault == "accepts-gzip" else "identity"
        headers = {"Range": f"bytes={first}-{end}", "Accept-Encoding": coding}
        connection = http.client.HTTPConnection(address.netloc, timeout=self.timeout_s)
        try:
            connection.request(method, target, headers=headers)
            reply = connection.getresponse()
            most = last - first + 2
            body = reply.read(None if self.fault == "reads-everything" else most)
            if self.fault == "reads-everything":
                body = body[:most]
        except TimeoutError:
            raise failure("io.timeout", "no answer") from None
        except http.client.IncompleteRead as error:
            return reply, error.partial
        except (OSError, http.client.HTTPException) as error:
            raise failure("io.read", repr(error)) from None
        finally:
            connection.close()
        return reply, body

    def get(self, first: int, last: int) -> bytes:
        """Exactly these bytes, of the first request what there is."""
        reply, body = self.answer("GET", first, last)
        self.check_status(reply, first)
        if reply.status == 200:
            return body[first : last + 1] if first == 0 else body[: last - first + 1]
        end = self.check_range(reply, first, last)
        if self.fault in ("takes-short-replies", "open-ranges"):
            return body[: last - first + 1]
        wanted = end - first + 1
        if len(body) != wanted and not (self.fault == "trusts-the-length" and len(body) > wanted):
            raise failure("io.short", f"{len(body)} bytes, {wanted} announced")
        return body[:wanted]

    def check_status(self, reply: http.client.HTTPResponse, first: int) -> None:
        """REQ-6 and REQ-9, without the range."""
        status = reply.status
        if status == 416 and first == 0 and reply.headers.get("Content-Range") == "bytes */0":
            raise InvalidError("header.magic", "the object is empty", where="byte 0")
        if status == 416 or (status == 200 and self.fault != "accepts-200"):
            raise failure("io.range", f"status {status}")
        if status not in (200, 206):
            raise failure(
                "io.read" if self.fault == "no-status" else CODES.get(status, "io.read"),
                f"{status}",
            )
        coding = reply.headers.get("Content-Encoding", "identity")
        if coding != "identity" and self.fault != "unpacks-gzip":
            raise failure("io.range", coding)

    def check_range(self, reply: http.client.HTTPResponse, first: int, last: int) -> int:
        """REQ-3, REQ-6, REQ-7 and REQ-8; returns the last byte of the reply."""
        field_value = reply.headers.get("Content-Range", "")
        match = CONTENT_RANGE.fullmatch(field_value)
        if self.fault == "ignores-content-range":
            return first + int(reply.headers.get("Content-Length", last - first + 1)) - 1
        if match is None or int(match[1]) != first:
            raise failure("io.range", field_value)
        end = int(match[2])
        total = None if match[3] == "*" else int(match[3])
        if self.fault != "trusts-every-object":
            self.compare(total, reply.headers.get("ETag", ""))
        at_end = first == 0 and end < last and total in (None, end + 1)
        if end != last and not at_end and self.fault not in TOLERANT:
            raise failure("io.short", field_value)
        return end

    def compare(self, total: int | None, tag: str) -> None:
        """REQ-8."""
        if total is not None:
            self.totals.add(total)
        if tag.startswith('"'):
            self.tags.add(tag)
        if len(self.totals) > 1 or len(self.tags) > 1:
            raise failure("io.changed", "another object")


class _Found(Exception):  # noqa: N818 - a way out, not an error
    """Bytes that came from elsewhere."""


def fetch(url: str, timeout_s: float, fault: str) -> bytes:
    """The artifact; nothing is asked twice, which REQ-9 allows."""
    try:
        return Reader(url, timeout_s, fault).whole()
    except _Found as found:
        data: bytes = found.args[0]
        return data


def answer(arguments: list[str], fault: str) -> tuple[dict[str, object], int]:
    """The adapter's answer on a copy of what the URL gives."""
    if len(arguments) < 2 or not arguments[1].startswith("http"):
        return reference.answer(arguments, batch=True)
    rest = arguments[2:]
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    try:
        data = fetch(arguments[1], float(options.pop("--timeout", "30")), fault)
    except KvformatError as error:
        head = {"protocol": 1, "verdict": error.verdict, "code": error.code, "where": error.where}
        return {**head, "detail": str(error)}, error.exit_code
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.kvf"
        path.write_bytes(data)
        pairs = [item for pair in options.items() for item in pair]
        return reference.answer([arguments[0], str(path), *pairs], batch=True)


def main() -> int:
    """``info``, one call, or ``batch``."""
    fault, arguments = sys.argv[1], sys.argv[2:]
    if fault not in FAULTS:
        raise SystemExit(f"no such fault: {fault}")
    if arguments != ["batch"]:
        found, code = answer(arguments, fault)
        print(json.dumps(found))
        return code
    for line in sys.stdin:
        found, code = answer(json.loads(line), fault)
        print(json.dumps({**found, "exit": code}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
