"""Identity, prefix chain and what a caller expects: levels core (ok) and faulty (mismatch)."""

# ruff: noqa: PLR0915, PLR0917 - long sentences and tables

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from conformance.generate.compose import EXACT, IDENTITY, RawGroup, chain, compose, floats, small
from conformance.generate.core import HAND
from conformance.generate.suite import Case, Operation, Suite, decode, inspect, verify

IDS = [n * 7919 % 50_000 for n in range(1200)]
BOUND = {
    **IDENTITY,
    "kind": "tokens",
    "layers_total": 4,
    "model": {"id": "a model", "revision": "main", "weights_digest": "sha256:" + "0f" * 32},
    "tokenizer": {"digest": None, "id": "a tokenizer"},
}
FULL = {
    **BOUND,
    "adapters": [{"digest": None, "id": "lora"}, {"digest": "blake3:" + "12" * 32, "id": "second"}],
    "layers_total": 8,
    "rope": [
        {
            "inv_freq": "3f8000003dcccccd",
            "keys_rotated": True,
            "layers": [0, 1, 2],
            "pairing": "half",
            "scaling": "3ff0000000000000",
        },
        {
            "inv_freq": "3f8000003f000000",
            "keys_rotated": False,
            "layers": [3, 5],
            "pairing": "interleaved",
            "scaling": "3ff199999999999a",
        },
    ],
    "rotation": {"digest": None, "name": "hadamard"},
    "scale_scheme": {
        "name": "per-layer",
        "scales": [
            {"bits": "3f800000", "layer": 0, "role": "key"},
            {"bits": "3f000000", "layer": 0, "role": "value"},
        ],
    },
}
SALT = b"tenant"
IMAGE = {"count": 20, "digest": "sha256:" + "ab" * 32, "kind": "image", "start": 300}
MEDIA = [
    {"count": 4, "digest": "sha256:" + "ab" * 32, "kind": "image", "start": 3},
    {"count": 2, "digest": "blake3:" + "cd" * 32, "kind": "audio", "start": 7},
]


def bound_parts(
    count: int = 600,
    *,
    first: int = 0,
    salt: bytes = b"",
    spans: Sequence[dict[str, Any]] = (),
    identity: dict[str, Any] = BOUND,
    tracks: Sequence[str] = (EXACT,),
    **members: Any,
) -> Any:
    """A builder of a bound artifact of one byte a token."""
    links = chain(identity, IDS, salt, [s for s in spans if s["digest"]], first + count)
    blocks = -(-count // 256)
    for span in spans:
        if span["digest"] is None:
            blocks = (span["start"] - first) // 256
            break
    tokens = {
        "chain": {
            "block_tokens": 256,
            "hashes": [link.hex() for link in links[1 + first // 256 :][:blocks]],
            "parent": links[first // 256].hex() if first else None,
            "salted": bool(salt),
        },
        "content": [span for span in spans if span["start"] >= first],
        "count": count,
        "first_position": first,
    }
    group = RawGroup("key", "key", "uint8", (0,), floats("ids", (1, count, 1, 1), "uint8"))
    return compose([group], count, tracks, identity=identity, tokens=tokens, **members)


def full_parts(first: int = 0) -> Any:
    """Every optional object of the identity, two content spans, a lossy lineage, an extension."""
    spans = [{**span, "start": first + int(str(span["start"]))} for span in MEDIA]
    return bound_parts(
        300,
        first=first,
        salt=SALT,
        spans=spans,
        identity=FULL,
        lineage={"generations": 2, "kind": "lossy", "profile": None, "quality": "near-lossless"},
        extensions={"com.example.a": {"must_understand": False, "value": [1, {"b": None}]}},
    )


def ids(number: int, *changes: int) -> bytes:
    """A file of the first ids, some of them others."""
    wanted = IDS[:number]
    for place in changes:
        wanted[place] += 1
    return json.dumps(wanted, separators=(",", ":")).encode()


def add_cases(suite: Suite) -> None:
    """All of this module."""
    given = ("--expect-token-ids", "ids.json")
    salted = (*given, "--salt-file", "salt.bin")

    def case(
        slug: str,
        requirements: str,
        builder: Any,
        files: dict[str, bytes],
        operations: list[Operation],
        what: str,
        why: str,
        *,
        family: str = "tok",
    ) -> None:
        bad = any(op.code != "ok" for op in operations)
        suite.add(
            Case(
                family,
                slug,
                "faulty" if bad else "core",
                tuple(requirements.split()),
                builder.build(),
                operations,
                what,
                why,
                HAND,
                files=files,
            )
        )

    serve = "A cache served for other tokens gives wrong answers without any error."
    case(
        "all-ids",
        "TOK-1 TOK-2 TOK-3 TOK-4 TOK-5 TOK-10 IDN-5",
        bound_parts(),
        {"ids.json": ids(600)},
        [verify("ok", *given), decode(EXACT, *given), verify("ok", "--expect-model", "a model")],
        "600 tokens, all ids given: three blocks, the last of 88 tokens.",
        "The chain is h(0) from the identity, then one keyed hash a block.",
    )
    case(
        "more-ids-than-tokens",
        "TOK-10",
        bound_parts(),
        {"ids.json": ids(900)},
        [verify("ok", *given), decode(EXACT, *given)],
        "More ids than the artifact holds.",
        "A request is usually longer than the cache that serves it.",
    )
    case(
        "a-block-of-ids",
        "TOK-10 TOK-11",
        bound_parts(),
        {"ids.json": ids(256)},
        [
            verify("ok", *given),
            decode(EXACT, "--tokens", "0:256", *given),
            decode(EXACT, "--tokens", "0:257", *given, code="identity.tokens"),
            decode(EXACT, "--tokens", "256:300", *given, code="identity.tokens"),
            decode(EXACT, *given, code="identity.tokens"),
        ],
        "One block of ids is given: tokens 0 to 255 may be served, others not.",
        serve,
    )
    case(
        "ids-that-end-inside-a-block",
        "TOK-10 TOK-11",
        bound_parts(),
        {"ids.json": ids(599)},
        [
            decode(EXACT, "--tokens", "0:512", *given),
            decode(EXACT, "--tokens", "511:513", *given, code="identity.tokens"),
        ],
        "599 of 600 ids: the last block cannot be verified.",
        serve,
    )
    case(
        "fewer-ids-than-a-block",
        "TOK-11",
        bound_parts(),
        {"ids.json": ids(255)},
        [
            verify("identity.tokens", *given),
            decode(EXACT, "--tokens", "0:1", *given, code="identity.tokens"),
        ],
        "255 ids: no block can be verified.",
        "A verified length of 0 is a mismatch, not an empty success.",
    )
    case(
        "no-ids",
        "TOK-11",
        bound_parts(),
        {"ids.json": b"[]"},
        [verify("identity.tokens", *given)],
        "An empty list of ids is given.",
        "An empty list is an expectation, too.",
    )
    case(
        "other-first-token",
        "TOK-11",
        bound_parts(),
        {"ids.json": ids(600, 0)},
        [
            verify("identity.tokens", *given),
            decode(EXACT, "--tokens", "0:1", *given, code="identity.tokens"),
        ],
        "The first token is another.",
        serve,
    )
    case(
        "other-token-in-the-second-block",
        "TOK-10 TOK-11 VER-7",
        bound_parts(),
        {"ids.json": ids(600, 300)},
        [
            verify("identity.tokens", *given),
            decode(EXACT, "--tokens", "0:256", *given),
            decode(EXACT, "--tokens", "0:600", *given, code="identity.tokens"),
        ],
        "Token 300 is another: the first block may still be served.",
        serve,
    )
    case(
        "other-last-token",
        "TOK-10 TOK-11 TOK-3 VER-7",
        bound_parts(),
        {"ids.json": ids(600, 599)},
        [
            verify("identity.tokens", *given),
            decode(EXACT, "--tokens", "0:512", *given),
            decode(EXACT, "--tokens", "599:600", *given, code="identity.tokens"),
        ],
        "The last token of the short last block is another.",
        serve,
    )
    one = {"ids.json": ids(1)}
    case(
        "one-token",
        "TOK-3 TOK-10",
        bound_parts(1),
        one,
        [verify("ok", *given), decode(EXACT, *given)],
        "An artifact of one token: a block of one.",
        "The number of tokens of a block is part of its hash.",
    )
    case(
        "no-tokens",
        "TOK-5 TOK-11",
        bound_parts(0),
        {"ids.json": b"[]"},
        [verify("ok", *given)],
        "No tokens, no hashes; nothing to mismatch.",
        "A verified length of 0 is right where T is 0.",
    )
    case(
        "exactly-two-blocks",
        "TOK-3 TOK-10",
        bound_parts(512),
        {"ids.json": ids(512)},
        [verify("ok", *given), decode(EXACT, *given)],
        "512 tokens: two whole blocks.",
        "There is no empty third block.",
    )
    case(
        "large-ids",
        "TOK-4 TOK-6",
        _large(),
        {"ids.json": json.dumps([2**32 - 2, 2**31, 0]).encode()},
        [verify("ok", *given)],
        "Ids of 2^32 - 2, 2^31 and 0.",
        "Ids are unsigned 32-bit integers.",
    )

    # salts
    files = {"ids.json": ids(600), "salt.bin": SALT}
    case(
        "salted",
        "TOK-1 TOK-9 TOK-10",
        bound_parts(salt=SALT),
        files,
        [verify("ok", *salted), decode(EXACT, *salted)],
        "A chain under a tenant's salt.",
        "The chain key is derived from the salt with a fixed context.",
    )
    long = bytes(range(256)) * 4
    case(
        "long-salt",
        "TOK-1",
        bound_parts(salt=long),
        {**files, "salt.bin": long},
        [verify("ok", *salted)],
        "A salt of 1,024 bytes of every value.",
        "A salt is a byte string of any length, not text.",
    )
    case(
        "other-salt",
        "TOK-1 TOK-11",
        bound_parts(salt=SALT),
        {**files, "salt.bin": b"tenanT"},
        [verify("identity.tokens", *salted), decode(EXACT, *salted, code="identity.tokens")],
        "Right ids, another tenant's salt.",
        "Tenants must not see each other's caches.",
    )
    case(
        "salt-missing",
        "TOK-16",
        bound_parts(salt=SALT),
        {"ids.json": ids(600)},
        [verify("identity.tokens", *given)],
        "A salted chain and no salt.",
        "TOK-16 decides it before any hash.",
    )
    case(
        "salt-not-wanted",
        "TOK-16",
        bound_parts(),
        files,
        [verify("identity.tokens", *salted)],
        "An unsalted chain and a salt.",
        "TOK-16 decides it before any hash.",
    )

    for says, salt, arguments in ((True, b"", given), (False, SALT, salted)):
        builder = bound_parts(salt=salt)
        builder.manifest["tokens"]["chain"]["salted"] = says
        case(
            f"salted-says-{str(says).lower()}-of-right-hashes",
            "TOK-16",
            builder,
            files if salt else {"ids.json": ids(600)},
            [
                verify("identity.tokens", *arguments),
                decode(EXACT, *arguments, code="identity.tokens"),
            ],
            f"`salted` is {str(says).lower()}, the hashes are those of "
            f"{'the salt that is given' if salt else 'no salt, and none is given'}.",
            "TOK-16 decides it before any hash.",
        )

    # parts of a longer sequence
    case(
        "later-part",
        "TOK-2 TOK-7 TOK-14 TOK-10",
        bound_parts(300, first=512, salt=SALT),
        {"ids.json": ids(812), "salt.bin": SALT},
        [verify("ok", *salted), decode(EXACT, "--tokens", "0:300", *salted)],
        "Tokens 512 to 811 of a sequence; ids from position 0 on.",
        "The parent hash binds the tokens before; ordinals count from the artifact's first token.",
    )
    case(
        "later-part-partly",
        "TOK-10 TOK-14",
        bound_parts(300, first=512),
        {"ids.json": ids(768)},
        [
            decode(EXACT, "--tokens", "0:256", *given),
            decode(EXACT, "--tokens", "0:257", *given, code="identity.tokens"),
        ],
        "A later part, ids up to the end of its first block.",
        serve,
    )
    case(
        "later-part-of-another-sequence",
        "TOK-14",
        bound_parts(300, first=512),
        {"ids.json": ids(812, 3)},
        [verify("identity.tokens", *given)],
        "One id before the artifact differs.",
        "The tokens of the artifact itself agree: only the parent tells.",
    )
    case(
        "later-part-with-ids-of-its-own",
        "TOK-14",
        bound_parts(300, first=512),
        {"ids.json": json.dumps(IDS[512:812]).encode()},
        [verify("identity.tokens", *given)],
        "Ids counted from the artifact's first token.",
        "Expected ids are those from position 0 on.",
    )
    case(
        "later-part-with-ids-up-to-it",
        "TOK-14 TOK-11",
        bound_parts(300, first=512),
        {"ids.json": ids(512)},
        [verify("identity.tokens", *given)],
        "The ids end where the artifact begins.",
        "None of its blocks is verified.",
    )

    # content
    case(
        "content-of-the-second-block",
        "TOK-4 TOK-6 TOK-15",
        bound_parts(spans=[IMAGE]),
        {"ids.json": ids(600)},
        [
            verify(),
            decode(EXACT, "--tokens", "0:256", *given),
            decode(EXACT, "--tokens", "0:257", *given, code="identity.tokens"),
        ],
        "An image at positions 300 to 319, which the caller does not mention.",
        "Spans come from the caller; those of the manifest prove nothing.",
    )
    case(
        "content-of-the-first-block",
        "TOK-15 TOK-11",
        bound_parts(spans=[{**IMAGE, "start": 3}]),
        {"ids.json": ids(600)},
        [verify("identity.tokens", *given)],
        "An image in the first block, which the caller does not mention.",
        "The verified length is 0.",
    )
    edge = [{**IMAGE, "start": 250}, {**IMAGE, "start": 400, "digest": None, "count": 200}]
    case(
        "content-without-digest",
        "TOK-5 TOK-8",
        bound_parts(spans=edge),
        {},
        [verify(), decode(EXACT)],
        "A span across two blocks with a digest, and one to the end without.",
        "The chain stops before the first span without a digest.",
    )

    # identity
    case(
        "every-member",
        "IDN-1 IDN-3 IDN-6 IDN-7 IDN-8 MAN-1",
        full_parts(),
        {},
        [verify(), decode(EXACT)],
        "Every optional object of the identity is there.",
        "A reader must know them all to accept the manifest.",
        family="idn",
    )
    zero = copy.deepcopy(FULL)
    zero["rope"][0]["inv_freq"] = "00000000000000017f7fffff"
    case(
        "frequencies-at-their-ends",
        "IDN-8",
        bound_parts(3, identity=zero),
        {"ids.json": ids(3)},
        [verify("ok", *given)],
        "Inverse frequencies of +0, the smallest subnormal and the largest number.",
        "All are finite and at least +0.",
        family="idn",
    )
    case(
        "model",
        "TOK-13",
        bound_parts(3),
        {},
        [
            verify("ok", "--expect-model", "a model"),
            decode(EXACT, "--expect-model", "a model"),
            verify("identity.field", "--expect-model", "another model"),
            decode(EXACT, "--expect-model", "a mode", code="identity.field"),
            decode(EXACT, "--expect-model", "A model", code="identity.field"),
        ],
        "The model is the expected one, and is not.",
        "Names are compared byte for byte.",
        family="idn",
    )
    key = {
        "engine": "an engine",
        "engine_version": None,
        "hash_algorithm": "sha256",
        "key": "8f14e45f",
        "rank": 1,
        "world_size": 2,
    }
    by_key = {**BOUND, "kind": "engine_key", "engine_key": key}
    group = RawGroup("key", "key", "uint8", (0,), floats("ids", (1, 5, 1, 1), "uint8"))
    case(
        "engine-key",
        "IDN-4 ENG-1",
        compose([group], 5, [EXACT], identity=by_key),
        {},
        [verify(), decode(EXACT)],
        "An artifact bound by a key of its engine.",
        "Such artifacts have no chain.",
        family="eng",
    )
    case(
        "ids-for-an-engine-key",
        "TOK-12",
        compose([group], 5, [EXACT], identity=by_key),
        {"ids.json": ids(5)},
        [verify("identity.missing", *given)],
        "Ids are expected of an artifact with an engine key.",
        "It does not say which tokens it holds.",
    )
    case(
        "ids-for-an-unbound-artifact",
        "TOK-12",
        compose([group], 5, [EXACT]),
        {"ids.json": ids(5)},
        [verify("identity.missing", *given), decode(EXACT, *given, code="identity.missing")],
        "Ids are expected of an unbound artifact.",
        "It does not say which tokens it holds.",
    )
    far = {
        "chain": None,
        "content": [{**IMAGE, "start": 2**40 - 4, "count": 1}],
        "count": 5,
        "first_position": 2**40 - 5,
    }
    case(
        "last-positions",
        "TOK-8 LIM-2",
        compose([group], 5, [EXACT], tokens=far),
        {},
        [verify(), decode(EXACT)],
        "The last five positions that the limit allows, with content there.",
        "Positions are larger than 32 bits.",
    )
    suite.cases[-1].limits = ("tokens",)

    _not_found(suite)

    # selections
    parts = small(suite, [EXACT])
    outside = {
        "tokens": ["0:11", "10:11", "0:4294967297"],
        "layers": ["7:8", "0:2", "64:65"],
        "heads": ["0:3", "2:3"],
    }
    case(
        "outside-the-artifact",
        "PAR-4 ERR-1",
        parts,
        {},
        [
            decode(EXACT, f"--{name}", text, code="usage.selection")
            for name, texts in outside.items()
            for text in texts
        ],
        "Tokens, layers and heads that the artifact does not hold.",
        "A reader that cuts a selection down gives less than was asked for, silently.",
        family="par",
    )
    command = [
        decode(EXACT, "--tokens", text, code="usage.argument")
        for text in ("x:y", "1", "0:1:2", "1.5:2")
    ]
    for item in command:
        item.reference = False
    case(
        "malformed-intervals",
        "ERR-1",
        parts,
        {},
        command,
        "Intervals that are none.",
        "A wrong request is `usage`, exit code 64; parsers of arguments like to exit with 1 or 2.",
        family="err",
    )
    case(
        "unknown-track",
        "ERR-1",
        parts,
        {},
        [decode("near-lossless/zstd", code="usage.selection")],
        "A track that the artifact lacks.",
        "The request is wrong, not the artifact.",
        family="err",
    )


def _not_found(suite: Suite) -> None:
    """A path where there is no file."""
    calls = [verify("io.not-found"), inspect("io.not-found"), decode(EXACT, code="io.not-found")]
    suite.add(
        Case(
            "err",
            "no-such-file",
            "faulty",
            ("ERR-1",),
            None,
            calls,
            "There is no file at the path.",
            "The storage failed, not the bytes: exit code 74, and no file is left behind.",
            "The case has no input.",
        )
    )


def _large() -> Any:
    wanted = [2**32 - 2, 2**31, 0]
    builder = bound_parts(3)
    builder.manifest["tokens"]["chain"]["hashes"] = [chain(BOUND, wanted, b"", [], 3)[1].hex()]
    return builder
