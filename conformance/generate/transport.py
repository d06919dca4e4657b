"""Levels core and faulty: files at the edge of the first request, and readers over HTTP.

What servers do wrong is in ``servers``.
"""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

import numpy as np

from conformance.generate.compose import (
    EXACT,
    STORED,
    RawGroup,
    compose,
    noise,
    tiny,
    with_members,
)
from conformance.generate.servers import LAST_LAYERS, add_servers, http_case, served
from conformance.generate.suite import Case, Shared, Suite, decode, inspect, verify
from tests.builder import Builder

PREFETCH_BYTES = 262_144
EDGES = (PREFETCH_BYTES - 1, PREFETCH_BYTES, PREFETCH_BYTES + 1)
STRING_BYTES = 4_000
LAYERS, TOKENS, DIMS, SEGMENT_TOKENS = 6, 3_072, 16, 1_024
LAYER_BYTES = TOKENS * DIMS * 2
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
