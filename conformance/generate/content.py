"""Content spans of the caller (``--expect-content``) against those of the artifact: TOK-15."""

# ruff: noqa: PLR0917 - tables

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from conformance.generate.compose import EXACT
from conformance.generate.core import HAND
from conformance.generate.identity import IMAGE, MEDIA, SALT, bound_parts, ids
from conformance.generate.suite import Case, Operation, Suite, decode, verify

GIVEN = ("--expect-token-ids", "ids.json", "--expect-content", "content.json")
OTHER = "An image is no token id: the same ids with another image are another prompt."


def first_block_only(*, whole: bool = True) -> list[Operation]:
    """The first block may be served, the second not; ``whole`` if the ids cover both."""
    calls = [
        decode(EXACT, "--tokens", "0:256", *GIVEN),
        decode(EXACT, "--tokens", "0:257", *GIVEN, code="identity.tokens"),
    ]
    return [verify("identity.tokens", *GIVEN), *calls] if whole else calls


def served() -> list[Operation]:
    """All of it is the caller's."""
    return [verify("ok", *GIVEN), decode(EXACT, *GIVEN)]


def add_cases(suite: Suite) -> None:
    """All of this module."""

    def case(
        slug: str,
        requirements: str,
        holds: Sequence[dict[str, Any]],
        expects: Sequence[dict[str, Any]],
        operations: list[Operation],
        what: str,
        why: str,
        *,
        given: int = 600,
        **options: Any,
    ) -> None:
        bad = any(operation.code != "ok" for operation in operations)
        files = {
            "ids.json": ids(given),
            "content.json": json.dumps(list(expects)).encode(),
        }
        if options.get("salt"):
            files["salt.bin"] = options["salt"]
        builder = bound_parts(options.pop("count", 600), spans=holds, **options)
        suite.add(
            Case(
                "tok",
                f"expected-content-{slug}",
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

    rules = "TOK-4 TOK-6 TOK-10 TOK-15"
    case(
        "agrees",
        rules,
        [IMAGE],
        [IMAGE],
        served(),
        "The caller has the same image at positions 300 to 319.",
        "With the span from the caller the whole artifact is verified.",
    )
    case(
        "of-two-spans",
        rules,
        MEDIA,
        MEDIA,
        served(),
        "An image and a sound in the first block, and the caller has both.",
        "Spans of one block enter its hash in ascending order.",
    )
    across = {**IMAGE, "start": 250, "count": 30}
    case(
        "across-blocks",
        rules,
        [across],
        [across],
        served(),
        "An image that begins in one block and ends in the next.",
        "It enters the hashes of both.",
    )
    case(
        "salted",
        f"{rules} TOK-1 TOK-16",
        [IMAGE],
        [IMAGE],
        [verify("ok", *GIVEN, "--salt-file", "salt.bin"), verify("identity.tokens", *GIVEN)],
        "The same image under a tenant's salt, with the salt and without.",
        "A salted chain needs the salt whatever else is given.",
        salt=SALT,
    )
    renamed = {**IMAGE, "digest": "blake3:" + IMAGE["digest"].partition(":")[2], "kind": "picture"}
    case(
        "of-another-algorithm",
        rules,
        [IMAGE],
        [renamed],
        served(),
        "The caller's span has the same 32 bytes of digest under another algorithm and kind.",
        "Only the bytes enter the chain; what names them is for people.",
    )
    changed = {**IMAGE, "digest": "sha256:" + "ba" * 32}
    for slug, expected, what in (
        ("of-another-image", [changed], "The caller has another image at the same positions."),
        ("moved", [{**IMAGE, "start": 301}], "The caller's image begins one position later."),
        ("shorter", [{**IMAGE, "count": 19}], "The caller's image is one position shorter."),
        ("left-out", [], "The caller says that there is no image."),
    ):
        case(slug, f"{rules} TOK-11 VER-7", [IMAGE], expected, first_block_only(), what, OTHER)
    case(
        "that-is-not-there",
        f"{rules} TOK-11 VER-7",
        [],
        [IMAGE],
        first_block_only(),
        "The caller has an image where the artifact has token ids.",
        OTHER,
    )
    two = [IMAGE, {**IMAGE, "start": 520, "digest": None}]
    case(
        "without-digest",
        "TOK-5 TOK-10 TOK-11 TOK-15",
        two,
        two,
        [
            decode(EXACT, "--tokens", "0:512", *GIVEN),
            decode(EXACT, "--tokens", "0:513", *GIVEN, code="identity.tokens"),
        ],
        "A second span has no digest, for the artifact and for the caller.",
        "Its block has no hash, so nobody can verify it.",
    )
    before = {**IMAGE, "start": 30}
    inside = {**IMAGE, "start": 700}
    late: dict[str, Any] = {"given": 812, "count": 300, "first": 512}
    case(
        "of-a-later-part",
        f"{rules} TOK-14 TOK-8",
        [before, inside],
        [before, inside],
        served(),
        "Tokens 512 to 811 of a sequence with one image before them and one among them.",
        "The parent hash covers the image before, which the manifest does not list.",
        **late,
    )
    case(
        "missing-before-a-later-part",
        "TOK-14 TOK-15",
        [before, inside],
        [inside],
        [verify("identity.tokens", *GIVEN), decode(EXACT, *GIVEN, code="identity.tokens")],
        "The caller leaves out the image before the artifact.",
        "Only the parent hash tells.",
        **late,
    )
    case(
        "behind-the-artifact",
        rules,
        [IMAGE],
        [IMAGE, {**IMAGE, "start": 700}],
        served(),
        "The caller has a second image behind the end of the artifact.",
        "A request is usually longer than the cache that serves it.",
        given=800,
    )
